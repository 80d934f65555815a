"""Double Q-learning with n-step returns, for one transition (1803.00933, section 3.1)."""

from __future__ import annotations

import chex
import jax
import rlax


def dqn_td_error(
    q_tm1: jax.Array,
    a_tm1: jax.Array,
    r_t: jax.Array,
    discount_t: jax.Array,
    q_t_value: jax.Array,
    q_t_selector: jax.Array,
) -> jax.Array:
  """G_t - q(S_t, A_t), []; the gradient reaches q_tm1 alone. The loss is half its square.

  Args:
    q_tm1: [A], the network's values of the transition's first observation.
    a_tm1: [], what was done there.
    r_t: [], the n-step return.
    discount_t: [], gamma^n, or zero after a termination.
    q_t_value: [A], the target network's values of the last observation.
    q_t_selector: [A], the network's: they choose whose value counts.

  Raises:
    AssertionError: where the shapes are not as above (chex).
  """
  chex.assert_equal_shape([q_tm1, q_t_value, q_t_selector])
  return rlax.double_q_learning(q_tm1, a_tm1, r_t, discount_t, q_t_value, q_t_selector)
