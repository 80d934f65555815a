"""Ape-X DPG (1803.00933, section 3.2): deterministic policy gradients with n-step returns."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit.agents import kinds
from podracer_jit.losses.algorithm import MAX_N_STEP, ReplayAlgorithm, weighted_loss
from podracer_jit.options import INT32_MAX, option
from podracer_jit.types import Metrics, Params, Transition


@dataclasses.dataclass(frozen=True)
class DPG(ReplayAlgorithm):
  """Deterministic policy gradients for continuous actions.

  Policy and critic have separate weights, so the gradient of the summed loss contains the gradient
  of each; max_grad_norm clips both together. Both losses are weighted by importance.
  """

  network_kind: ClassVar[kinds.Kind] = kinds.DETERMINISTIC

  n_step: int = option(5, 'steps of a return before it is bootstrapped', at_least=1,
                       at_most=MAX_N_STEP)
  target_every: int = option(100, 'gradient steps between copies to the target network',
                             at_least=1, at_most=INT32_MAX)
  noise: float = option(0.3, 'deviation of the noise of exploration, of actions from -1 to 1',
                        at_least=0)
  dqda_clip: float = option(1.0, "bound of each element of the critic's gradient by the action",
                            at_least=0)

  def exploration(self, num_envs: int) -> np.ndarray:
    """Returns the standard deviation of each environment's noise, [num_envs] f32."""
    return np.full(num_envs, self.noise, np.float32)

  def loss(self, network: nn.Module, params: Params, target_params: Params, batch: Transition,
           weight: jax.Array) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
    """Returns the sum of the weighted losses of critic and policy.

    Args and results: see `ReplayAlgorithm.loss`. The TD errors are the critic's.
    """

    def q(params, obs, action):
      return network.apply(params, obs, action, method='criticise')

    error = jax.vmap(critic_td_error)(
        q(params, batch.obs, batch.action), batch.reward, batch.discount,
        network.apply(target_params, batch.next_obs[None])[1][0])

    # The policy's loss must not change the critic, so its gradient stops at the critic's weights.
    action = network.apply(params, batch.obs, method='act')
    critic_params = lax.stop_gradient(params)
    value, vjp = jax.vjp(lambda a: q(critic_params, batch.obs, a), lax.stop_gradient(action))
    (dqda,) = vjp(jnp.ones_like(value))
    actor_loss = jax.vmap(lambda a, dqda: policy_loss(a, dqda, self.dqda_clip))(action, dqda)

    critic_loss, aux = weighted_loss(error, weight, dict(q=value))
    return critic_loss + jnp.sum(weight * actor_loss), aux


def critic_td_error(q_tm1: jax.Array, r_t: jax.Array, discount_t: jax.Array, q_t: jax.Array
                    ) -> jax.Array:
  """Returns the critic's n-step TD error, r_t + discount_t * q_t - q_tm1.

  The gradient flows through q_tm1 only. The critic's loss is half the squared error.

  Args:
    q_tm1: [] f32, the critic's value of the transition's first observation and action.
    r_t: [] f32, the discounted sum of rewards of the n steps.
    discount_t: [] f32, gamma^n, or zero after a termination.
    q_t: [] f32, the target critic's value of the last observation and the target policy's action.

  Returns:
    The TD error [].

  Raises:
    AssertionError: the shapes differ from those above (chex).
  """
  chex.assert_type([q_tm1, r_t, discount_t, q_t], float)
  chex.assert_equal_shape([q_tm1, r_t, discount_t, q_t])
  return jax.lax.stop_gradient(r_t + discount_t * q_t) - q_tm1


def policy_loss(a_t: jax.Array, dqda_t: jax.Array, clip: float) -> jax.Array:
  """Returns the loss [] whose gradient by a_t is -dqda_t, clipped elementwise to [-clip, clip].

  `rlax.dpg_loss` clips the norm of dqda_t instead.

  Args:
    a_t: [A] f32, the policy's action.
    dqda_t: [A] f32, the gradient of the critic's value by the action at a_t.
    clip: bound of each element; 1 in appendix D of the paper.

  Raises:
    AssertionError: the shapes differ from those above (chex).
  """
  chex.assert_rank(a_t, 1)
  chex.assert_equal_shape([a_t, dqda_t])
  return -jnp.sum(jax.lax.stop_gradient(jnp.clip(dqda_t, -clip, clip)) * a_t)
