"""What environments are to the rest: a spec, and shards that a program steps.

An environment family makes both. EnvPool's is the module `envpool_envs`; a user's own is given as
`env.task = 'module:attribute'`, an object with the functions of `Family`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np


class EnvSpec(NamedTuple):
  """What a task is, known without starting an environment."""

  task: str
  obs_shape: tuple[int, ...]
  obs_dtype: np.dtype  # as the learner sees it: float64 arrives as float32
  num_actions: int  # 0 where actions are continuous
  action_low: tuple[float, ...]  # the least and the most of each number of an action; empty where
  action_high: tuple[float, ...]  # actions are discrete
  frame_skip: int
  max_episode_steps: int
  stack: int = 1  # frames of an observation, if `frames.Frames` can hold them; else 1


class TimeStep(NamedTuple):
  """What one step of B environments gave back; of an asynchronous shard, of the first B ready."""

  obs: jax.Array  # [B, ...]
  reward: jax.Array  # [B] f32
  terminated: jax.Array  # [B] bool; with episodic_life also where a life was lost
  truncated: jax.Array  # [B] bool
  raw_reward: jax.Array  # [B] f32: before any clipping
  game_over: jax.Array  # [B] bool: terminated, lives aside
  env_id: jax.Array  # [B] i32: which environments of the shard these are


class Shard(Protocol):
  """Environments that are stepped together, by traceable calls.

  `send` and `recv` thread a token, which orders the calls of all shards of a program.
  """

  num_envs: int
  batch_size: int  # environments of one step: all of them, unless the shard is asynchronous
  first_obs: Any  # [num_envs, ...], of a shard that is not asynchronous

  @property
  def handle(self) -> np.ndarray:
    """The first token."""

  def send(self, handle: jax.Array, action: jax.Array, env_id: jax.Array | None = None
           ) -> jax.Array:
    """Hands actions [batch_size, ...] to the environments and does not wait."""

  def recv(self, handle: jax.Array) -> tuple[jax.Array, TimeStep]:
    """Waits for what came back."""

  def close(self) -> None:
    """Ends the environments; nothing that contains them may run any more."""


class Family(Protocol):
  """A kind of environments."""

  def make_spec(self, task: str, options: Mapping[str, Any]) -> EnvSpec:
    """What a task is, known without starting an environment.

    Args:
      task: `env.task` of the config.
      options: the other fields of `env` but num_envs.

    Raises:
      ValueError: one line that names the field, its value and what would be right.
    """

  def make_shard(self, task: str, options: Mapping[str, Any], seeds: Sequence[int],
                 num_threads: int, batch_size: int) -> Shard:
    """Starts environments.

    Args:
      task: as of `make_spec`.
      options: as of `make_spec`.
      seeds: one an environment, all different.
      num_threads: of the environments' own; 0: as many as the family likes.
      batch_size: 0: a step is of all environments; else of the first so many that are ready.
    """
