"""Interface of environments: a spec, and vector environments that a compiled program steps.

An environment family creates both. EnvPool's family is the module `envpool_envs`. A user's family
is an object with the functions of `Family`, given as `env.task = 'module:attribute'`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import chex
import jax
import numpy as np


class ObsPart(NamedTuple):
  """Part of an observation that is a flat vector of several arrays; see `take_apart`."""

  name: str  # names of nested dicts are joined by '/'
  shape: tuple[int, ...]  # of the part in one observation
  dtype: np.dtype  # bool for a one-hot or a mask; float64 is converted to float32
  start: int  # index of the part's first element in the flat observation
  channels_last: bool = False  # the part is an image (H, W, C)
  num_values: int = 0  # the part is one number from 0 to num_values - 1; 0 for other parts

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def is_image(self) -> bool:
    """True if the part is an image, in which neighbouring elements belong together."""
    return len(self.shape) == 3


def take_apart(obs: jax.Array, parts: Sequence[ObsPart]) -> dict[str, jax.Array]:
  """Returns the parts of flat observations by name.

  Args:
    obs: [..., D], flat observations.
    parts: `EnvSpec.parts`, which cover all D elements.

  Returns:
    An array [..., *part.shape] of the part's dtype for each part.
  """
  chex.assert_axis_dimension(obs, -1, sum(part.size for part in parts))
  return {
      part.name: obs[..., part.start:part.start + part.size]
      .reshape(*obs.shape[:-1], *part.shape).astype(part.dtype)
      for part in parts}


class EnvSpec(NamedTuple):
  """Specification of a task, known without starting an environment."""

  task: str
  obs_shape: tuple[int, ...]  # of one observation
  obs_dtype: np.dtype  # as the learner sees it: float64 is converted to float32
  num_actions: int  # 0 if an action is a vector
  action_low: tuple[float, ...]  # lower bound of each element of an action; () if not continuous
  action_high: tuple[float, ...]  # upper bound of each element of an action; () if not continuous
  frame_skip: int  # frames of one step
  max_episode_steps: int
  stack: int = 1  # frames in an observation if `frames.Frames` can hold them, else 1
  channels_last: bool = False  # observations are images (H, W, C), not (C, H, W)
  parts: tuple[ObsPart, ...] = ()  # of a flat observation; () if it is a single array
  # An action is a vector of integers; element i is from 0 to action_choices[i] - 1. () for others.
  action_choices: tuple[int, ...] = ()


class TimeStep(NamedTuple):
  """Results of one step of B environments: all of them, or the first B that are ready."""

  obs: jax.Array  # [B, ...]
  reward: jax.Array  # [B] f32
  terminated: jax.Array  # [B] bool; with episodic_life also true when a life was lost
  truncated: jax.Array  # [B] bool
  raw_reward: jax.Array  # [B] f32: before any clipping
  game_over: jax.Array  # [B] bool: terminated, but not by the loss of a life
  env_id: jax.Array  # [B] i32: indices of the environments within the vector environment


class VectorEnv(Protocol):
  """Vector of environments that are stepped together, by traceable calls.

  `send` and `recv` take and return a token, which orders all calls in a program.
  """

  num_envs: int
  batch_size: int  # environments in one step: num_envs, or fewer if asynchronous
  first_obs: Any  # [num_envs, ...]; absent if asynchronous

  @property
  def handle(self) -> np.ndarray:
    """Token for the first call."""

  def send(self, handle: jax.Array, action: jax.Array, env_id: jax.Array | None = None
           ) -> jax.Array:
    """Starts a step with actions [batch_size, ...] and does not wait; returns the next token.

    If asynchronous, env_id [batch_size] i32 are the environments that take the actions.
    """

  def recv(self, handle: jax.Array) -> tuple[jax.Array, TimeStep]:
    """Waits for batch_size environments. Returns the next token and their results."""

  def close(self) -> None:
    """Ends the environments. No program that contains them may run afterwards."""


class Family(Protocol):
  """Interface of environment families."""

  def make_spec(self, task: str, options: Mapping[str, Any]) -> EnvSpec:
    """Returns the spec of a task without starting an environment.

    Args:
      task: `env.task` of the config.
      options: the other fields of the config's `env`, without num_envs.

    Raises:
      ValueError: one line that names the field, its value and a valid value.
    """

  def make_vector_env(self, task: str, options: Mapping[str, Any], seeds: Sequence[int],
                      num_threads: int, batch_size: int) -> VectorEnv:
    """Starts a vector environment.

    Args:
      task: `env.task` of the config.
      options: the other fields of the config's `env`, without num_envs.
      seeds: one for each environment, all different.
      num_threads: threads that step the environments; 0 lets the family choose.
      batch_size: 0 for lockstep; otherwise a step waits for this many environments only.

    Returns:
      The vector environment, already reset.
    """
