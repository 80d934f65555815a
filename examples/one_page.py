"""All that happens in a training of PPO on CartPole, in one program: python examples/one_page.py

Its updates are those of `podracer_jit --config=ppo_cartpole:smoke --config.scheme=sync`, and with
LAG = 1 those of `--config.scheme=cleanba`. It prints the fingerprints that are in the receipts of
these runs.
"""

import jax
import jax.numpy as jnp

from podracer_jit.actor import rollouts
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.agents import networks, optimizers, policies
from podracer_jit.envs import envpool_envs, seeds
from podracer_jit.learner import updates
from podracer_jit.learner.learner import keys_of
from podracer_jit.losses.algorithm import Batch, Parts
from podracer_jit.losses.ppo import PPO
from podracer_jit.numerics.fingerprints import as_hex, fingerprint
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.numerics.shuffling import permutation
from podracer_jit.runtime import host, placement

LAG = 0  # updates between the parameters that act and the parameters that learn
SEED, NUM_ENVS, T, EPOCHS, MINIBATCHES, GROUPS, TOTAL_STEPS = 1, 16, 64, 4, 4, 1, 5_000

host.prepare_host(placement.PlacementOptions(), deterministic=True)
keys = keys_of(SEED)
spec = envpool_envs.make_spec('CartPole-v1', {})
ppo = PPO(discount=0.98, clip=0.2, value_coef=0.02, entropy_coef=0.0).bind(Parts(
    spec, policies.categorical(spec.num_actions), networks.MLP(hidden=(64, 64)),
    networks.TorsoOptions(), moments=(), optimizer=optimizers.Adam(learning_rate=2e-3),
    total_steps=TOTAL_STEPS, num_envs=NUM_ENVS, unroll_length=T))
state = jax.jit(ppo.first_state)(keys.init, keys.learn)
groups = Groups(GROUPS, NUM_ENVS // GROUPS)  # of environments; several devices would share them

# A rollout (R) is one program: T times [receive from EnvPool, `ppo.act`, send, store the row].
pools = RolloutProgram([envpool_envs.make_vector_env(
    'CartPole-v1', {}, seeds.env_seeds(SEED, 0, 0, NUM_ENVS), num_threads=1)])
key = jax.random.fold_in(jax.random.fold_in(keys.act, 0), 0)  # of segment 0, of pool 0
actor = rollouts.initial_state(ppo, pools.vector_envs, [key])
program = rollouts.make_rollout(ppo, pools.vector_envs, T)
rollout = pools.load(program, (ppo.for_actors(state), actor), (1,))


@jax.jit
def learn(state, batch):
  """Makes an update: a gradient (G) and a step of the optimizer (U) for each minibatch.

  An island has the same bits in all programs. Outside of islands there is no rounding, but for
  sums in one fixed order.
  """
  by_group = groups.split(batch)  # [groups, T, envs, ...] each, of observations T + 1
  targets = groups.map(lambda x: island('targets')(ppo.targets)(state, x), by_group)
  # Only the targets need the last observation.
  rows = jax.tree.map(lambda x: x[:, :T].reshape(len(x), -1, *x.shape[3:]), (by_group, targets))
  key = updates.update_key(state)

  def shuffled(epoch):  # [minibatches, groups, n]: which rows of each group
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, epoch), i))
    order = jax.vmap(lambda key: permutation(key, T * groups.envs))
    return order(keys(groups.numbers())).reshape(groups.count, MINIBATCHES, -1).swapaxes(0, 1)

  def step(state, index):
    take = jax.vmap(lambda x, i: x[None, i])
    items, targets = jax.tree.map(lambda x: take(x, index), rows)  # [groups, 1, n, ...] each
    statistics = island('batch_statistics')(ppo.statistics)(state, items.valid, targets)
    count = jnp.maximum(jnp.sum(items.valid), 1.0)

    def gradient(items, targets):  # of `ppo.loss`
      minibatch = Batch(items, targets, None, count, statistics)
      return island('gradient')(ppo.gradient)(state, minibatch, None)

    # The exact sum: groups are added pairwise, in the same order on any number of devices.
    grads, aux = groups.total(groups.map(gradient, items, targets))
    return updates.make_update(ppo)(state, grads, aux)  # `ppo.update`

  state, _ = jax.lax.scan(step, state, jnp.concatenate([shuffled(i) for i in range(EPOCHS)]))
  state = state._replace(update=state.update + 1, steps=state.steps + jnp.sum(batch.valid))
  return state, (fingerprint(batch, 1, 0, NUM_ENVS), fingerprint(state.params))


params = [ppo.for_actors(state)] * (LAG + 1)  # a queue: the actor gets the oldest
while state.steps < TOTAL_STEPS:
  actor, (experience,) = rollout(params.pop(0), actor)
  state, receipt = learn(state, experience._replace(episodes=None))
  params.append(ppo.for_actors(state))
  print(state.update, *map(as_hex, receipt))
pools.close()
