"""Ape-X DQN (1803.00933, section 3.1): double Q-learning with n-step returns."""

from __future__ import annotations

import dataclasses

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import rlax

from podracer_jit.losses.algorithm import ReplayAlgorithm, weighted_loss
from podracer_jit.options import option
from podracer_jit.types import Metrics, Params, Transition


@dataclasses.dataclass(frozen=True)
class DQN(ReplayAlgorithm):
  """Double Q-learning with a dueling network, for discrete actions."""

  epsilon: float = option(0.4, 'exploration of the first environment', at_least=0, at_most=1)
  epsilon_alpha: float = option(
      7.0, 'environment i of N explores with probability epsilon^(1 + epsilon_alpha i / (N - 1))',
      at_least=0)

  def exploration(self, num_envs: int) -> np.ndarray:
    """Returns each environment's probability of a random action, [num_envs] f32 (section 4.1)."""
    place = np.arange(num_envs) / max(num_envs - 1, 1)
    return np.power(self.epsilon, 1 + self.epsilon_alpha * place).astype(np.float32)

  def loss(self, network: nn.Module, params: Params, target_params: Params, batch: Transition,
           weight: jax.Array) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
    """Returns the weighted loss of the Q-network.

    Args and results: see `ReplayAlgorithm.loss`.
    """

    def values(params, obs):
      # Networks take [T, N, ...]; transitions are a single step.
      return network.apply(params, obs[None])[0][0]

    q_tm1 = values(params, batch.obs)
    error = jax.vmap(dqn_td_error)(
        q_tm1, batch.action, batch.reward, batch.discount, values(target_params, batch.next_obs),
        values(params, batch.next_obs))
    return weighted_loss(error, weight, dict(q=jnp.max(q_tm1, axis=-1)))


def dqn_td_error(
    q_tm1: jax.Array,
    a_tm1: jax.Array,
    r_t: jax.Array,
    discount_t: jax.Array,
    q_t_value: jax.Array,
    q_t_selector: jax.Array,
) -> jax.Array:
  """Returns the n-step TD error of double Q-learning.

  The gradient flows through q_tm1 only. The loss is half the squared error.

  Args:
    q_tm1: [A] f32, the network's action values of the transition's first observation.
    a_tm1: [] i32, the action taken there.
    r_t: [] f32, the discounted sum of rewards of the n steps.
    discount_t: [] f32, gamma^n, or zero after a termination.
    q_t_value: [A] f32, the target network's action values of the last observation.
    q_t_selector: [A] f32, the network's action values of the last observation; their argmax
      selects the element of q_t_value to bootstrap from.

  Returns:
    The TD error [].

  Raises:
    AssertionError: the shapes differ from those above (chex).
  """
  chex.assert_rank([q_tm1, a_tm1, r_t, discount_t], [1, 0, 0, 0])
  chex.assert_equal_shape([q_tm1, q_t_value, q_t_selector])
  return rlax.double_q_learning(q_tm1, a_tm1, r_t, discount_t, q_t_value, q_t_selector)
