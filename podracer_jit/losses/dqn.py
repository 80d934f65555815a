"""Ape-X DQN (1803.00933, section 3.1): double Q-learning with n-step returns."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax

from podracer_jit.agents import policies, q_networks
from podracer_jit.losses import returns
from podracer_jit.losses.algorithm import MAX_N_STEP, Acted, Algorithm, Aux, Batch, weighted_loss
from podracer_jit.losses.items import Items, transitions
from podracer_jit.options import INT32_MAX, option
from podracer_jit.types import Carry, Params, Rollout, TrainState


@dataclasses.dataclass(frozen=True)
class DQN(Algorithm):
  """Double Q-learning with a dueling network, for discrete actions."""

  learns_from_replay: ClassVar[bool] = True
  policy_reads: ClassVar[str] = policies.ACTION_VALUES
  takes: ClassVar[frozenset[str]] = frozenset()
  normalises: ClassVar[frozenset[str]] = frozenset({'obs'})

  n_step: int = option(3, 'steps of a return before it is bootstrapped', at_least=1,
                       at_most=MAX_N_STEP)
  target_every: int = option(2500, 'gradient steps between copies to the target network',
                             at_least=1, at_most=INT32_MAX)
  epsilon: float = option(0.4, 'exploration of the first environment', at_least=0, at_most=1)
  epsilon_alpha: float = option(
      7.0, 'environment i of N explores with probability epsilon^(1 + epsilon_alpha i / (N - 1))',
      at_least=0)
  epsilons: tuple = option((), 'exploration of the environments, in turn; (): by epsilon and '
                           'epsilon_alpha', at_least=0, at_most=1, element=0.0)

  def make_network(self) -> nn.Module:
    """Returns the dueling network around the config's torso."""
    p = self.parts
    return q_networks.dueling(p.torso, p.policy, moments=p.moments)

  def init_target(self, params: Params) -> Params:
    """Returns the target network."""
    return params

  def exploration(self, num_envs: int) -> np.ndarray:
    """Returns each environment's probability of a random action, [num_envs] f32.

    It follows section 4.1, or `epsilons`, a fixed set as in appendix B.
    """
    if self.epsilons:
      return np.resize(np.float32(self.epsilons), num_envs)
    place = np.arange(num_envs) / max(num_envs - 1, 1)
    return (self.epsilon ** (1 + self.epsilon_alpha * place)).astype(np.float32)

  def act(self, params: Any, obs: jax.Array, carry: Carry, valid: jax.Array,
          key: jax.Array | None, exploration: jax.Array | None) -> Acted:
    """Acts epsilon-greedily, or greedily without `exploration`.

    Args:
      params: of the network.
      obs: [B, ...].
      carry: not read.
      valid: not read.
      key: PRNG key of the row; None: take the best action.
      exploration: [B] f32, the probabilities of a random action; None: none is.
    """
    del carry, valid
    q, value = (x[0] for x in self.network.apply(params, obs[None])[:2])
    return self.acted(q, value, key, exploration)

  def acted(self, q: jax.Array, value: jax.Array, key: jax.Array | None,
            exploration: jax.Array | None) -> Acted:
    """Chooses actions by their values.

    Args:
      q: [B, A] f32, action values.
      value: [B] f32, the largest of each.
      key: see `Algorithm.act`.
      exploration: see `Algorithm.act`.
    """
    policy = self.parts.policy
    action = policy.mode(q) if exploration is None else policy.explore(key, q, exploration)
    action_value = q_networks.values_of(q, action)
    return Acted(action, {'action_value': action_value, 'value': value}, None, q)

  def items(self) -> Items:
    """Returns transitions over n steps."""
    return transitions(self.n_step, self.discount)

  def priority(self, rows: Rollout) -> jax.Array:
    """Returns |n-step TD error| by the acting network's values; see `Algorithm.priority`."""
    return returns.n_step_priority(rows, self.discount)

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns the weighted loss of the Q-network, and sums of terms.

    Args:
      params: of the Q-network, to differentiate.
      state: its target has the target network.
      batch: N transitions of the replay, and their importance weights [N].
      key: not read.
    """
    del key
    transition = batch.items

    def values(params, obs):
      # Networks take [T, N, ...]; transitions are a single step.
      return self.network.apply(params, obs[None])[0][0]

    q_tm1 = values(params, transition.obs)
    error = jax.vmap(dqn_td_error)(
        q_tm1, transition.action, transition.reward, transition.discount,
        values(state.target.params, transition.next_obs), values(params, transition.next_obs))
    return weighted_loss(error, batch, dict(q=jnp.max(q_tm1, axis=-1)))

  def update(self, state: TrainState, grads: Params, aux: Aux) -> TrainState:
    """Takes a step, and copies the network to the target network in time."""
    state = super().update(state, grads, aux)
    return state.with_target(optax.periodic_update(
        state.params, state.target.params, state.target.gradient_steps + 1, self.target_every))


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
