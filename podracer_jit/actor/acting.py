"""Two ways to act with one interface: in lockstep and asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from podracer_jit.actor import asynchronous, priorities, rollouts
from podracer_jit.envs.protocol import VectorEnv
from podracer_jit.losses.algorithm import Algorithm


class Acting(Protocol):
  """Interface of the ways in which the actors of a run collect experience."""

  algorithm: Algorithm

  def rollout(self, vector_envs: Sequence[VectorEnv]) -> Callable:
    """Returns rollout(`ForActors`, actor_state) -> (actor_state, experience), to be jitted.

    The experience has one Rollout, or for a replay one Experience, for each vector environment.
    """

  def initial_state(self, vector_envs: Sequence[VectorEnv], keys: Sequence[jax.Array],
                    first_env: int) -> rollouts.ActorState:
    """Returns the state of an actor whose vector environments have just been started.

    Args:
      vector_envs: the environments, the same number in each vector environment.
      keys: one PRNG key for each vector environment.
      first_env: index of the actor's first environment among all environments of the run.
    """


class InStep(NamedTuple):
  """Lockstep acting: a step waits for all its environments."""

  algorithm: Algorithm
  exploration: np.ndarray | None  # of all environments of the run, see `Algorithm.exploration`
  discount: float | None  # gamma of the discounted returns; None if rewards are not normalised
  first_apart: bool = False  # see `rollouts.make_rollout`

  def rollout(self, vector_envs: Sequence[VectorEnv]) -> Callable:
    """See `Acting`."""
    parts = self.algorithm.parts
    rollout = rollouts.make_rollout(self.algorithm, vector_envs, parts.unroll_length,
                                    self.discount, first_apart=self.first_apart)
    if self.algorithm.learns_from_replay:
      return priorities.with_priorities(rollout, self.algorithm)
    return rollout

  def initial_state(self, vector_envs: Sequence[VectorEnv], keys: Sequence[jax.Array],
                    first_env: int) -> rollouts.ActorState:
    """See `Acting`."""
    state = rollouts.note_actions(rollouts.initial_state(
        self.algorithm, vector_envs, keys, first_env, self.exploration), self.algorithm)
    if self.algorithm.learns_from_replay:
      return priorities.initial_state(state, self.algorithm)
    return state


class FirstReady(NamedTuple):
  """Asynchronous acting: a step waits for the first environments only.

  The experience depends on timing.
  """

  algorithm: Algorithm

  def rollout(self, vector_envs: Sequence[VectorEnv]) -> Callable:
    """See `Acting`; the experience is one Rollout."""
    (vector_env,) = vector_envs
    return asynchronous.make_rollout(self.algorithm, vector_env)

  def initial_state(self, vector_envs: Sequence[VectorEnv], keys: Sequence[jax.Array],
                    first_env: int) -> rollouts.ActorState:
    """See `Acting`."""
    (vector_env,) = vector_envs
    (key,) = keys
    return asynchronous.initial_state(self.algorithm, vector_env, key, first_env)
