"""Three ways to act with one interface: in lockstep, asynchronously, and for a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.actor import asynchronous, priorities, rollouts
from podracer_jit.envs.protocol import VectorEnv


class Acting(Protocol):
  """Interface of the ways in which the actors of a run collect experience."""

  unroll_length: int

  def rollout(self, vector_envs: Sequence[VectorEnv]) -> Callable:
    """Returns rollout(params, actor_state) -> (actor_state, experience), to be jitted."""

  def initial_state(self, vector_envs: Sequence[VectorEnv], keys: Sequence[jax.Array],
                    first_env: int) -> rollouts.ActorState:
    """Returns the state of an actor whose vector environments have just been started.

    Args:
      vector_envs: the environments, the same number in each vector environment.
      keys: one PRNG key for each vector environment.
      first_env: index of the actor's first environment among all environments of the run.
    """


class InStep(NamedTuple):
  """Lockstep acting, used without a replay: a step waits for all its environments."""

  network: nn.Module
  unroll_length: int
  stack: int  # frames in an observation, see `protocol.EnvSpec`
  discount: float | None  # gamma of the discounted returns; None if rewards are not normalised

  def rollout(self, vector_envs: Sequence[VectorEnv]) -> Callable:
    """Returns the rollout of `Acting`; its experience is one Rollout a vector environment."""
    return rollouts.make_rollout(vector_envs, self.network.apply, self.network.policy,
                                 self.unroll_length, self.stack, self.discount)

  def initial_state(self, vector_envs: Sequence[VectorEnv], keys: Sequence[jax.Array],
                    first_env: int) -> rollouts.ActorState:
    """Returns the initial state; see `Acting`."""
    return rollouts.initial_state(vector_envs, keys, self.network.initial_recurrent_state,
                                  first_env=first_env)


class FirstReady(NamedTuple):
  """Asynchronous acting: a step waits for the first environments only.

  The experience depends on timing.
  """

  network: nn.Module
  unroll_length: int
  stack: int  # frames in an observation, see `protocol.EnvSpec`
  obs: jax.ShapeDtypeStruct  # shape and dtype of one observation

  def rollout(self, vector_envs: Sequence[VectorEnv]) -> Callable:
    """Returns the rollout of `Acting`; its experience is one Rollout."""
    (vector_env,) = vector_envs
    return asynchronous.make_rollout(vector_env, self.network.apply, self.network.policy,
                                     self.unroll_length, self.stack)

  def initial_state(self, vector_envs: Sequence[VectorEnv], keys: Sequence[jax.Array],
                    first_env: int) -> rollouts.ActorState:
    """Returns the initial state; see `Acting`."""
    (vector_env,) = vector_envs
    (key,) = keys
    return asynchronous.initial_state(vector_env, key, self.obs, self.network.policy,
                                      self.unroll_length, first_env)


class ForReplay(NamedTuple):
  """Lockstep acting for a replay: each environment explores by its own amount.

  The experience carries initial priorities.
  """

  network: nn.Module
  unroll_length: int
  stack: int  # frames in an observation, see `protocol.EnvSpec`
  n_step: int  # steps of a transition
  discount: float  # gamma
  exploration: np.ndarray  # [num_envs] f32, for all environments of the run

  def rollout(self, vector_envs: Sequence[VectorEnv]) -> Callable:
    """Returns the rollout of `Acting`; it gives one Experience for each vector environment."""
    def action_value(params: Any, *args: jax.Array) -> jax.Array:
      return self.network.apply(params, *args, method='action_value')

    plain = rollouts.make_rollout(
        vector_envs, self.network.apply, self.network.policy, self.unroll_length, self.stack,
        action_value=action_value)
    return priorities.with_priorities(plain, self.n_step, self.discount)

  def initial_state(self, vector_envs: Sequence[VectorEnv], keys: Sequence[jax.Array],
                    first_env: int) -> rollouts.ActorState:
    """Returns the initial state; see `Acting`."""
    # The actor's vector environments have consecutive environments, `width` each.
    width = vector_envs[0].num_envs
    first_envs = range(first_env, first_env + width * len(vector_envs), width)
    exploration = [jnp.array(self.exploration[first:first + width]) for first in first_envs]
    state = rollouts.initial_state(vector_envs, keys, self.network.initial_recurrent_state,
                                   exploration, first_env)
    return priorities.initial_state(state, self.n_step)
