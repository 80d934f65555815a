"""Deterministic policy gradients with n-step returns, for one transition (1803.00933, 3.2)."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def critic_td_error(q_tm1: jax.Array, r_t: jax.Array, discount_t: jax.Array, q_t: jax.Array
                    ) -> jax.Array:
  """G_t - q(S_t, A_t), []; the gradient reaches q_tm1 alone. The critic's loss is half its square.

  Args:
    q_tm1: [], the critic's value of the transition's first observation and what was done there.
    r_t: [], the n-step return.
    discount_t: [], gamma^n, or zero after a termination.
    q_t: [], the target critic's value of the last observation and the target policy's action.

  Raises:
    AssertionError: where the shapes are not as above (chex).
  """
  chex.assert_equal_shape([q_tm1, r_t, discount_t, q_t])
  return jax.lax.stop_gradient(r_t + discount_t * q_t) - q_tm1


def policy_loss(a_t: jax.Array, dqda_t: jax.Array, clip: float) -> jax.Array:
  """The loss whose gradient by a_t is -dqda_t, each element of it clipped to [-clip, clip].

  (`rlax.dpg_loss` clips its norm, which is something else.)

  Args:
    a_t: [A], the policy's action.
    dqda_t: [A], the gradient of the critic's value by the action, there.
    clip: of appendix D, 1.

  Raises:
    AssertionError: where the shapes are not as above (chex).
  """
  chex.assert_rank(a_t, 1)
  chex.assert_equal_shape([a_t, dqda_t])
  return -jnp.sum(jax.lax.stop_gradient(jnp.clip(dqda_t, -clip, clip)) * a_t)
