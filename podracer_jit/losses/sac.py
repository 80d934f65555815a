"""SAC (1812.05905): a soft actor-critic with several critics and a learned temperature."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from podracer_jit.agents import networks, optimizers, policies
from podracer_jit.losses.algorithm import Acted, Aux, Batch
from podracer_jit.losses.off_policy import OffPolicyActorCritic
from podracer_jit.options import option
from podracer_jit.types import Carry, Params, TrainState


class Actor(nn.Module):
  """Means and log standard deviations [N, 2 A], before tanh, of observations [N, ...]."""

  torso: nn.Module
  size: int  # A

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    """Returns the means, followed by the log standard deviations, from -5 to 2."""
    outputs = nn.Dense(2 * self.size)(networks.features_of(self.torso, obs))
    mean, log_std = jnp.split(outputs, 2, axis=-1)
    return jnp.concatenate([mean, 3.5 * jnp.tanh(log_std) - 1.5], axis=-1)


def draw(key: jax.Array, dist_params: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Draws a = tanh(u), where u is Gaussian (appendix C).

  Args:
    key: PRNG key.
    dist_params: [N, 2 A] f32, means and log standard deviations of u.

  Returns:
    a [N, A] and its log density [N], in nats.
  """
  chex.assert_rank(dist_params, 2)
  mean, log_std = jnp.split(dist_params, 2, axis=-1)
  noise = jax.random.normal(key, mean.shape)
  u = mean + jnp.exp(log_std) * noise
  log_normal = -0.5 * jnp.square(noise) - log_std - 0.5 * np.log(2 * np.pi)
  log_slope = policies.log_tanh_slope(u)
  return jnp.tanh(u), jnp.sum(log_normal - log_slope, axis=-1)


@dataclasses.dataclass(frozen=True)
class SAC(OffPolicyActorCritic):
  """Soft actor-critic for continuous actions and observations without images (algorithm 1).

  | option | the paper's value | where |
  |---|---|---|
  | `num_critics` | 2; actor and targets take the smallest value | section 6 |
  | `n_step` | 1 | equation 5 |
  | `tau` | 0.005 | table 1 (appendix D) |
  | `target_entropy` | -1 nat for each element of an action | table 1 |
  | `discount` | 0.99 | table 1 |
  | `replay.gradient_steps` | one for each step of the environments | table 1 |
  | `replay.capacity`, `replay.batch_size` | 1,000,000, 256 | table 1 |
  | `optimizer.learning_rate` (Adam), of all parts | 3e-4 | table 1 |
  | `network.hidden` (ReLU) | 256, 256 | table 1 |

  An update takes `replay.gradient_steps` steps whatever its rollout holds. Rows of resets are no
  steps, so where episodes are short, there are somewhat more gradient steps than steps. A truncated
  episode is bootstrapped from its last observation.

  There are five differences from the paper. Actor, critics and temperature take their gradients at
  the same parameters; in algorithm 1 the critics step first. The temperature is trained by its
  logarithm. Log standard deviations are squashed into -5 to 2. The first `replay.min_size` actions
  are uniform. Hidden layers begin with orthogonal weights; the paper names none. The authors'
  program has the second and the fourth of them, too.
  """

  actor = Actor

  critic_rate: float = option(1.0, "the critics' learning rate, relative to the optimizer's",
                              at_least=0)
  alpha: float = option(1.0, 'temperature at the first step', at_least=0, above=0, constant=True)
  alpha_rate: float = option(
      1.0, "the temperature's learning rate, relative to the optimizer's; 0: it stays", at_least=0)
  target_entropy: float = option(-1.0, 'entropy for each element of an action, in nats')

  def init(self, key: jax.Array) -> Params:
    """Returns the actor, the critics and the temperature's logarithm."""
    return super().init(key) | {'log_alpha': jnp.log(jnp.float32(self.alpha))}

  def init_target(self, params: Params) -> Params:
    """Returns the target critics."""
    return params['critic']

  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns the config's optimizer for each part; each is clipped by itself."""
    own = self.parts.optimizer.transformation()
    return optimizers.by_part(
        actor=own, critic=optax.chain(own, optax.scale(self.critic_rate)),
        log_alpha=optax.chain(own, optax.scale(self.alpha_rate)))

  def exploration(self, num_envs: int) -> np.ndarray:
    """Returns zeros; `act` gets None in evaluations, so an array means training."""
    return np.zeros(num_envs, np.float32)

  def act(self, params: Any, obs: jax.Array, carry: Carry, valid: jax.Array,
          key: jax.Array | None, exploration: jax.Array | None) -> Acted:
    """Draws an action, uniformly in the first steps; takes the mean's without a key.

    Args:
      params: the result of `acting`.
      obs: [B, ...].
      carry: None.
      valid: [B] bool; not read.
      key: PRNG key of the row; None: take the most likely action.
      exploration: [B] f32, zeros; None in evaluations.
    """
    del valid
    dist_params = self.network.apply(params['actor'], obs)
    mode = jnp.tanh(jnp.split(dist_params, 2, axis=-1)[0])
    if key is None:
      return Acted(mode, None, carry, mode)
    action = draw(key, dist_params)[0]
    if exploration is not None:
      action = self.uniform_at_first(params, key, action)
    return Acted(action, None, carry, mode)

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns the losses of critics, actor and temperature, added, and sums of terms.

    Args:
      params: of actor, critics and temperature, to differentiate.
      state: its params equal `params` and have no gradient, so the loss of each part changes only
        that part; its target has the target critics.
      batch: N transitions of the replay, and their importance weights [N].
      key: PRNG key of the actions that are drawn.
    """
    transition = batch.items
    obs, next_obs = transition.obs, transition.next_obs
    fixed = state.params
    alpha = jnp.exp(fixed['log_alpha'])
    key, next_key = jax.random.split(key)

    next_action, next_log_prob = draw(next_key, self.network.apply(fixed['actor'], next_obs))
    next_q = jnp.min(self.q(state.target.params, next_obs, next_action), axis=0)
    target = transition.reward + transition.discount * (next_q - alpha * next_log_prob)
    error = self.q(params['critic'], obs, transition.action) - target

    action, log_prob = draw(key, self.network.apply(params['actor'], obs))
    q = jnp.min(self.q(fixed['critic'], obs, action), axis=0)

    lacking = log_prob + self.target_entropy * action.shape[-1]  # nats below the target entropy
    losses = {
        'critic_loss': 0.5 * jnp.sum(jnp.square(error), axis=0),
        'actor_loss': alpha * log_prob - q,
        'alpha_loss': -jnp.exp(params['log_alpha']) * jax.lax.stop_gradient(lacking)}
    aux = Aux.of(losses | {'q': q, 'entropy': -log_prob, 'alpha': jnp.broadcast_to(alpha, q.shape)},
                 jnp.ones(q.shape, bool))
    return (jnp.sum(batch.weight * sum(losses.values())) / batch.count,
            aux._replace(priority=jnp.max(jnp.abs(error), axis=0)))

  def update(self, state: TrainState, grads: Params, aux: Aux) -> TrainState:
    """Takes a step; the targets follow the critics by `tau`."""
    state = super().update(state, grads, aux)
    return state.with_target(optax.incremental_update(
        state.params['critic'], state.target.params, self.tau))
