"""V-MPO (1909.12238), an algorithm of one's own in one file, on CartPole.

podracer_jit --config=examples/vmpo.py --workdir=runs/vmpo

Any config may name it, with this folder on PYTHONPATH:

podracer_jit --config=ppo_mujoco --config.loss.name=vmpo:VMPO --config.num_epochs=1 \
    --config.num_minibatches=1 --config.loss.alpha=1.0 --workdir=runs/vmpo_mujoco

Ten seeds had a greedy return of 500, the best, after 400,000 steps (docs/results.md).

The rollouts of an update are one batch, which is learned from once (`num_epochs`, `num_minibatches`
are 1). There are no importance weights and no entropy bonus.

| setting | paper | section | option |
|---|---|---|---|
| samples that are learned from | the half with the larger advantages | 4.1 | |
| advantages | n-step returns in an unroll, less the value | 4.1 | `unroll_length` |
| initial temperature | 1 | appendix | `loss.temperature` |
| initial alpha | 5, of continuous actions 1 | appendix | `loss.alpha` |
| bound of the weights, epsilon_eta | 0.01 to 0.1 | appendix | `loss.epsilon_eta` |
| bound of the policy, epsilon_alpha | about 0.001 to 0.01 | appendix | `loss.epsilon_alpha` |
| the same for deviations of a Gaussian | 5e-6 to 5e-5 | appendix | `loss.epsilon_sigma` |
| least temperature and alpha | 1e-8 | 4.3 | |
| steps between copies to the target network | 10 to 100 | 5, appendix | `loss.target_every` |
| optimizer | Adam, 1e-4 | appendix | `optimizer` |

What differs from the paper:

- PopArt (section 5) is left out; `normalise.reward` may scale rewards in its place.
- The network does not get the last action and reward.
- Deviations of Gaussian actions are parameters, not outputs of the network.
- Rows whose advantage is the median itself are learned from, so equal advantages can make these
  rows more than half.
- A truncated episode is bootstrapped from its last observation.
- With a core, the network goes on in each unroll from the state of the target network, which acts.
- The config below is for CartPole: its rate, discount and unroll length were chosen here.

Network and multipliers have one optimizer, which clips their gradients together.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit import experiment
from podracer_jit.agents import action_masks, running_moments
from podracer_jit.losses import lambda_returns
from podracer_jit.losses.algorithm import Algorithm, Aux, Batch
from podracer_jit.options import INT32_MAX, option
from podracer_jit.types import Params, Rollout, TrainState, discounts

LEAST = 1e-8  # of the temperature and of alpha


@dataclasses.dataclass(frozen=True)
class VMPO(Algorithm):
  """On-policy maximum a posteriori policy optimisation (1909.12238, section 4)."""

  targets_read_all_obs = True

  temperature: float = option(1.0, 'temperature of the weights at the first step', above=0,
                              constant=True)
  alpha: float = option(5.0, 'weight of the divergence at the first step', above=0, constant=True)
  epsilon_eta: float = option(0.1, 'bound of the divergence of the weights, in nats', at_least=0)
  epsilon_alpha: float = option(0.01, 'bound of the divergence of the policy', at_least=0)
  epsilon_sigma: float = option(1e-5, "bound for a Gaussian's deviations; its means have "
                                'epsilon_alpha', at_least=0)
  target_every: int = option(10, 'gradient steps between copies to the target network', at_least=1,
                             at_most=INT32_MAX)

  @property
  def bounds(self) -> list[Any]:
    """The bound of each divergence."""
    discrete = action_masks.choices_of(self.parts.spec)
    return [self.epsilon_alpha] if discrete else [self.epsilon_alpha, self.epsilon_sigma]

  def init(self, key: jax.Array) -> Params:
    """Returns the network, and the two Lagrange multipliers beside its variables."""
    duals = {'temperature': jnp.float32(self.temperature),
             'alpha': jnp.full(len(self.bounds), jnp.float32(self.alpha))}
    return super().init(key) | {'duals': duals}

  def init_target(self, params: Params) -> Params:
    """Returns the target network, which acts."""
    return {'params': params['params']}

  def acting(self, state: TrainState) -> Params:
    """Returns the target network."""
    return running_moments.with_moments_of(state.target.params, state.params)

  def targets(self, state: TrainState, rollout: Rollout) -> dict[str, jax.Array]:
    """Returns n-step returns, and the advantages by the online value, [T, N] each."""
    value = self.unroll(state.params, rollout)[1]
    ends = rollout.terminated | rollout.truncated
    returns = jax.vmap(lambda *a: lambda_returns(*a, 1.0), in_axes=1, out_axes=1)(
        value[1:], rollout.reward, discounts(rollout, self.discount), ends)
    return {'return': returns, 'advantage': returns - value[:-1]}

  def statistics(self, state: TrainState, valid: jax.Array, targets: Any
                 ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the minibatch's advantages, their median, and which rows are learned from."""
    advantage = targets['advantage']
    median = jnp.nanmedian(jnp.where(valid, advantage, jnp.nan))
    # A minibatch without valid rows must not divide by zero.
    return advantage, median, valid & (advantage >= median) | ~jnp.any(valid)

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns the losses of policy, value and multipliers, added; see `Algorithm.loss`."""
    rollout = batch.items
    policy = self.parts.policy
    dist_params, value = (x[:-1] for x in self.unroll(params, rollout))
    target_dist_params = self.unroll(self.acting(state), rollout)[0][:-1]

    # The temperature's loss is the whole minibatch's (equation 4), so each valid row has it.
    advantage, median, best = batch.statistics
    eta = params['duals']['temperature']
    log_sum = jax.nn.logsumexp(advantage / eta, where=best)
    temperature_loss = eta * (self.epsilon_eta + log_sum - jnp.log(jnp.sum(best)))

    # Weights of this microbatch's rows (equation 3). They sum to 1 over the minibatch, and `Aux`
    # and `batch.count` take means, hence the factor. The exponential of an invalid row could be
    # infinite, and its product with 0 is no number.
    is_best = rollout.valid & (batch.targets['advantage'] >= median)
    log_weight = jnp.where(is_best, batch.targets['advantage'] / eta - log_sum, -jnp.inf)
    weight = batch.count * jnp.exp(lax.stop_gradient(log_weight))

    # Equation 5, with a multiplier for each divergence (appendix C).
    kl = self.divergences(target_dist_params, dist_params)
    alpha = params['duals']['alpha']
    fixed_alpha = state.params['duals']['alpha']
    bounds = jnp.stack(self.bounds)
    losses = {
        'policy_loss': -weight * policy.log_prob(dist_params, rollout.action),
        'value_loss': 0.5 * jnp.square(value - batch.targets['return']),
        'temperature_loss': jnp.broadcast_to(temperature_loss, value.shape),
        'alpha_loss': jnp.sum(alpha * (bounds - lax.stop_gradient(kl)) + fixed_alpha * kl, axis=-1)}
    more = {'kl': jnp.sum(kl, axis=-1), 'entropy': policy.entropy(dist_params),
            'temperature': jnp.broadcast_to(eta, value.shape),
            'alpha': jnp.broadcast_to(jnp.mean(alpha), value.shape)}
    aux = Aux.of(losses | more, rollout.valid)
    return sum(aux.terms[name] for name in losses) / batch.count, aux

  def divergences(self, old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns KL(old || new) of policies with parameters [..., K], [..., D] in nats.

    D is 1 for choices. For Gaussians it is 2: one divergence if only the mean changes, and one if
    only the deviations change (appendix C).
    """
    kl = self.parts.policy.kl
    if action_masks.choices_of(self.parts.spec):
      return kl(old, new)[..., None]
    old_mean, old_log_std = jnp.split(old, 2, axis=-1)
    mean, log_std = jnp.split(new, 2, axis=-1)
    return jnp.stack([kl(old, jnp.concatenate([mean, old_log_std], axis=-1)),
                      kl(old, jnp.concatenate([old_mean, log_std], axis=-1))], axis=-1)

  def update(self, state: TrainState, grads: Params, aux: Aux) -> TrainState:
    """Takes a step, keeps the multipliers positive, and copies the network in time."""
    state = super().update(state, grads, aux)
    duals = jax.tree.map(lambda x: jnp.maximum(x, LEAST), state.params['duals'])
    state = state._replace(params=state.params | {'duals': duals})
    return state.with_target(optax.periodic_update(
        self.init_target(state.params), state.target.params, state.target.gradient_steps + 1,
        self.target_every))


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('vmpo:VMPO', 'mlp', 'adam', scheme='fused')
  config.env.task = 'CartPole-v1'
  config.env.num_envs = 32
  config.unroll_length = 16
  config.total_steps = 400_000
  config.normalise.reward = True  # the first temperature suits advantages of this size
  config.loss.discount = 0.98
  config.optimizer.learning_rate = 2e-3
  config.optimizer.anneal = False
  config.optimizer.max_grad_norm = 40.0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 5_000
  return config
