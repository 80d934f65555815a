"""Returns over n steps, and the priorities that belong to them, for items of a replay."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from podracer_jit.types import Rollout


def n_step_return(reward: jax.Array, terminated: jax.Array, truncated: jax.Array, discount: float
                  ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns n-step returns, which stop at the end of the episode if that comes first.

  rlax's n-step returns need the values of all steps; a replay knows only where the return ends.

  Args:
    reward: [n, ...] f32, rewards of the n steps.
    terminated: [n, ...] bool.
    truncated: [n, ...] bool; the value of the last observation follows a truncation.
    discount: gamma.

  Returns:
    The discounted sum of rewards [...] f32; the discount of the value that follows [...] f32, zero
    after a termination; and the number of steps taken [...] i32.
  """
  chex.assert_equal_shape([reward, terminated, truncated])
  goes_on = jnp.ones(reward.shape[1:], bool)
  gamma = jnp.ones(reward.shape[1:])
  total = jnp.zeros(reward.shape[1:])
  steps = jnp.zeros(reward.shape[1:], jnp.int32)
  for r, over, cut in zip(reward, terminated, truncated, strict=True):
    total = total + jnp.where(goes_on, gamma * r, 0.0)
    steps = steps + goes_on
    gamma = jnp.where(goes_on, gamma * discount * (1.0 - over), gamma)
    goes_on = goes_on & ~(over | cut)
  return total, gamma, steps


def n_step_returns(reward: jax.Array, terminated: jax.Array, truncated: jax.Array, n_step: int,
                   discount: float) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the n-step returns from each row that n - 1 rows follow; see `n_step_return`.

  Args:
    reward: [T, ...] f32.
    terminated: [T, ...] bool.
    truncated: [T, ...] bool.
    n_step: n.
    discount: gamma.

  Returns:
    The sums of rewards, the discounts of the values that follow, and the steps, each
    [T - n + 1, ...].
  """
  def ahead(x: jax.Array) -> jax.Array:
    return jnp.stack([x[i:len(x) - n_step + 1 + i] for i in range(n_step)])

  return n_step_return(ahead(reward), ahead(terminated), ahead(truncated), discount)


def n_step_priority(rows: Rollout, discount: float) -> jax.Array:
  """Returns |n-step TD error| of transitions, by the values that the network gave while it acted.

  So nothing is computed twice (1803.00933, appendix F).

  Args:
    rows: [n + 1, N], with the extras 'action_value', Q(obs, action), and 'value', V(obs).
    discount: gamma.

  Returns:
    [N] f32.
  """
  reward, discount_after, steps = n_step_return(
      *(x[:-1] for x in (rows.reward, rows.terminated, rows.truncated)), discount)
  next_value = jnp.take_along_axis(rows.extras['value'], steps[None], axis=0)[0]
  return jnp.abs(reward + discount_after * next_value - rows.extras['action_value'][0])
