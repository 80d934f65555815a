"""G and U on what is drawn from a replay: losses of transitions, and updates of many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit.learner import rollout_updates
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.replay import buffer
from podracer_jit.types import Experience, Metrics, Params, Target, TrainState, Transition

# `losses.algorithm.ReplayAlgorithm.loss` with its network
Loss = Callable[[Params, Params, Transition, jax.Array],
                tuple[jax.Array, tuple[Metrics, jax.Array]]]


class Sizes(NamedTuple):
  """What the arithmetic of an update depends on; all of it belongs to the experiment."""

  num_envs: int
  num_grad_shards: int  # groups, each with a replay
  batch_size: int  # of a gradient step, all groups together
  gradient_steps: int  # of an update
  min_size: int  # transitions that must be there before the first
  target_every: int  # gradient steps
  importance_exponent: float
  microbatch_rows: int

  def groups(self, mesh_size: int = 1, exact: bool = True) -> Groups:
    """Returns the groups of environments, as a device of a mesh of this size has them."""
    return Groups(self.num_grad_shards, self.num_envs // self.num_grad_shards, mesh_size, exact)


def make_steps(loss: Loss, memory: buffer.Replay, update: Callable, sizes: Sizes,
               mesh_size: int = 1, exact: bool = True) -> Callable:
  """Returns steps(state, count) -> (state, sums): `count` gradient steps, on one device of a mesh.

  Each draws a batch, descends, and sets the priorities of what it drew. Sums over the steps: of
  'terms', 'grad_norm', 'sampled_age' (gradient steps since a transition was added).
  """
  groups = sizes.groups(mesh_size, exact)
  share = sizes.batch_size // sizes.num_grad_shards

  @island('importance_weights')
  def weights(probability, least):
    """(N P)^-exponent by their maximum; N, and the number of groups, cancel."""
    return jnp.power(least / jnp.maximum(probability, 1e-30), sizes.importance_exponent)

  @island('gradient')
  def of_batch(params, target_params, batch, weight):
    def mean_loss(params):
      total, (terms, error) = loss(params, target_params, batch, weight)
      return total / sizes.batch_size, (terms, error)

    gradient, (terms, error) = jax.grad(mean_loss, has_aux=True)(params)
    return (gradient, terms), error

  def of_group(params, target_params, batch, weight):
    count = rollout_updates.pieces(share, 1, sizes.microbatch_rows)
    pieces = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), (batch, weight))

    def add(total, piece):
      sums, error = of_batch(params, target_params, *piece)
      return jax.tree.map(jnp.add, total, sums), error

    first = jax.tree.map(lambda x: x[0], pieces)
    zeros = _zeros(jax.eval_shape(of_batch, params, target_params, *first)[0])
    total, error = lax.scan(add, zeros, pieces)
    return total, error.reshape(-1)

  @island('sampled_age')
  def sum_of_ages(added, gradient_steps):
    return jnp.sum((gradient_steps - added).astype(jnp.float32))

  def step(state, key):
    with jax.named_scope('storing'):
      drawn = memory.sample(state.replay, _group_keys(key, groups), share)
      least = groups.smallest(drawn.probability)
      weight = groups.map(lambda p: weights(p, least), drawn.probability)
    with jax.named_scope('gradient'):
      sums, error = groups.map(
          lambda *group: of_group(state.params, state.target.params, *group),
          drawn.transition, weight)
      grads, terms = groups.total(sums)
    now = state.target.gradient_steps
    age = groups.total(groups.map(lambda added: sum_of_ages(added, now), drawn.transition.added))
    with jax.named_scope('update'):
      state, grad_norm = update(state, grads, terms)
      target = lax.cond((now + 1) % sizes.target_every == 0,
                        lambda new, old: new, lambda new, old: old,
                        state.params, state.target.params)
    with jax.named_scope('storing'):
      replay = memory.set_priorities(state.replay, drawn.place, error)
    return (state._replace(target=Target(target, now + 1), replay=replay),
            dict(terms=terms, grad_norm=grad_norm, sampled_age=age))

  def steps(state: TrainState, count: jax.Array):
    key = _key(state, 0)

    def turn(i, carry):
      state, sums = carry
      state, new = step(state, jax.random.fold_in(key, i))
      return state, jax.tree.map(jnp.add, sums, new)
    return lax.fori_loop(0, count, turn, (state, _zeros(jax.eval_shape(step, state, key)[1])))

  return steps


def _zeros(shapes: Any) -> Any:
  return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _key(state: TrainState, stream: int) -> jax.Array:
  """Of this update: 0 for sampling, 1 for eviction."""
  return jax.random.fold_in(rollout_updates.update_key(state), stream)


def _group_keys(key: jax.Array, groups: Groups) -> jax.Array:
  return jax.vmap(lambda group: jax.random.fold_in(key, group))(groups.numbers())


def make_insert(memory: buffer.Replay, sizes: Sizes, mesh_size: int = 1):
  """Returns insert(state, experience, first_group) -> (state, valid rows), on one device of a mesh.

  `experience` is of whole groups, from the first_group of this device on; what is of none of its
  groups it lets be.
  """
  groups = sizes.groups(mesh_size)

  @jax.named_scope('storing')
  def insert(state: TrainState, experience: Experience, first_group: jax.Array):
    experience = experience._replace(episodes=())
    count = experience.reward.shape[1] // groups.envs
    group = first_group + jnp.arange(count)
    group = jnp.where((group >= 0) & (group < groups.local), group, groups.local)
    apart = Groups(count, groups.envs).split(experience)
    keys = _group_keys(_key(state, 1), groups)
    keys = jax.vmap(jax.random.fold_in)(keys, state.replay.inserted)  # an update may add often
    held = memory.add(state.replay, group, apart, keys, state.target.gradient_steps)
    return state._replace(replay=held), jnp.sum(experience.valid, dtype=jnp.int32)

  return insert


def ready(state: TrainState, sizes: Sizes, mesh_size: int = 1) -> jax.Array:
  """Whether every group has its share of what must be there before the first gradient step."""
  smallest = sizes.groups(mesh_size).smallest(state.replay.inserted)
  return smallest * sizes.num_grad_shards >= sizes.min_size


def make_finish(sizes: Sizes, learning_rate: Callable, mesh_size: int = 1):
  """Returns finish(state, count, sums, valid, batch) -> (state, metrics): ends an update.

  `count` gradient steps gave these sums, `valid` rows were added, with the fingerprint `batch`.
  Metrics are means over what was drawn, 0 before anything was.
  """
  groups = sizes.groups(mesh_size)

  @island('metrics')
  def means(sums, count, params, steps_before, steps, gradient_steps):
    drawn = jnp.maximum(count * sizes.batch_size, 1)
    terms = dict(sums['terms'], sampled_age=sums['sampled_age'])
    terms.pop('valid')
    return {name: total / drawn for name, total in terms.items()} | dict(
        grad_norm=sums['grad_norm'] / jnp.maximum(count, 1), param_norm=optax.tree.norm(params),
        learning_rate=learning_rate(steps_before),
        replay_ratio=gradient_steps * float(sizes.batch_size) / jnp.maximum(steps, 1))

  def finish(state, count, sums, valid, batch):
    steps = state.steps + valid
    metrics = means(sums, count, state.params, state.steps, steps, state.target.gradient_steps)
    state = state._replace(update=state.update + 1, steps=steps)
    return state, metrics | dict(
        valid=valid, update=state.update, steps=steps, sampled=count * sizes.batch_size,
        gradient_steps=state.target.gradient_steps,
        replay_size=groups.total_of_integers(jnp.sum(state.replay.size)), batch=batch,
        params=fingerprint(state.params))

  return finish


def make_learn(insert: Callable, steps: Callable, finish: Callable, sizes: Sizes,
               mesh_size: int = 1):
  """Returns learn(state, experience) -> (state, metrics): adds, then takes all gradient steps.

  For one device of a mesh, with the experience of its environments; none before there is enough.
  """
  def learn(state: TrainState, experience: Experience):
    groups = sizes.groups(mesh_size)
    batch = fingerprint(experience._replace(episodes=()), 1, groups.first_env(), sizes.num_envs)
    state, valid = insert(state, experience, jnp.int32(0))
    batch, valid = groups.total_of_integers((batch, valid))
    count = jnp.where(ready(state, sizes, mesh_size), sizes.gradient_steps, 0)
    state, sums = steps(state, count)
    state, metrics = finish(state, count, sums, valid, batch)
    return state, metrics | dict(episodes=experience.episodes)

  return learn
