"""Storage of frame-stacked observations that keeps each frame once."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.numerics import indexing


class Frames(NamedTuple):
  """Observations of rows 0 to T, each a stack of S frames.

  A stack either continues the previous row's stack, or repeats its newest frame S times.
  `EnvSpec.stack` says for which tasks this holds.
  """

  # [T + S, B, C, ...]: the S frames of row 0, the oldest first, then each row's newest frame.
  frame: jax.Array
  is_reset_stack: jax.Array  # [T, B] bool: the stack of row t + 1 repeats its newest frame

  @property
  def stack(self) -> int:
    """Number of frames in a stack, S."""
    return len(self.frame) - len(self.is_reset_stack)


Observations = Any  # Frames, or an array [T + 1, B, ...] if observations are not stacks


def begin(obs: jax.Array, steps: int, stack: int) -> Observations:
  """Allocates rows 0 to `steps` and sets row 0 to obs [B, stack * C, ...].

  Row 0 may be any S frames.
  """
  if stack == 1:
    return jnp.zeros((steps + 1, *obs.shape), obs.dtype).at[0].set(obs)
  chex.assert_is_divisible(obs.shape[1], stack)
  first = jnp.stack(jnp.split(obs, stack, axis=1))
  later = jnp.zeros((steps, *first.shape[1:]), obs.dtype)
  return Frames(jnp.concatenate([first, later]), jnp.zeros((steps, len(obs)), bool))


def add(rows: Observations, t: jax.Array, before: jax.Array, obs: jax.Array) -> Observations:
  """Sets row t.

  Args:
    rows: rows 0 to T.
    t: [] i32, index of the row.
    before: [B, ...], observations of row t - 1; ignored at t = 0.
    obs: [B, ...], observations of row t.

  Returns:
    The rows with row t set.
  """
  chex.assert_equal_shape([before, obs])
  if not isinstance(rows, Frames):
    return indexing.write_row(rows, obs, t)
  newest, is_reset_stack = _difference(before, obs, rows.stack)
  # At t = 0 this sets a placeholder for row 1, which the call for row 1 overwrites.
  return Frames(indexing.write_row(rows.frame, newest, t + rows.stack - 1),
                indexing.write_row(rows.is_reset_stack, is_reset_stack, jnp.maximum(t - 1, 0)))


def from_stacks(obs: jax.Array, stack: int) -> Observations:
  """Returns complete observations [T + 1, B, stack * C, ...] in the stored form."""
  if stack == 1:
    return obs
  newest, is_reset_stack = jax.vmap(lambda *pair: _difference(*pair, stack))(obs[:-1], obs[1:])
  first = jnp.stack(jnp.split(obs[0], stack, axis=1))
  return Frames(jnp.concatenate([first, newest]), is_reset_stack)


def _difference(before: jax.Array, obs: jax.Array, stack: int) -> tuple[jax.Array, jax.Array]:
  """Returns the newest frame of obs [B, ...], and whether obs does not continue `before`.

  Both arrays are stacks. The second result, [B] bool, is true if the older frames of obs differ
  from the newer frames of `before`.
  """
  chex.assert_equal_shape([before, obs])
  channels = obs.shape[1] // stack
  differs = obs[:, :-channels] != before[:, channels:]
  return obs[:, -channels:], jnp.any(differs, axis=tuple(range(1, obs.ndim)))


def _goes_back(rows: Frames) -> list[jax.Array]:
  """Returns S - 1 masks [T + 1, B] bool, for 1 to S - 1 rows back.

  A mask is true if the stack of a row contains the frame that came so many rows before. Row 0 is
  treated as a continued stack, since all its frames are stored.
  """
  steps, num_envs = rows.is_reset_stack.shape
  masks = []
  continued = jnp.ones((steps + 1, num_envs), bool)
  for back in range(1, rows.stack):
    shifted = jnp.concatenate([jnp.zeros((back, num_envs), bool), rows.is_reset_stack])
    continued &= ~shifted[:steps + 1]
    masks.append(continued)
  return masks


def stacks(rows: Observations) -> jax.Array:
  """Returns the complete observations of all rows, [T + 1, B, stack * C, ...]."""
  if not isinstance(rows, Frames):
    return rows
  chex.assert_rank(rows.is_reset_stack, 2)

  first = rows.stack - 1
  channels = rows.frame.shape[2]
  frame = rows.frame[first:]
  num_rows = len(rows.is_reset_stack) + 1

  # The result is filled frame by frame: inside a loop XLA's CPU compiler makes a concatenation slow
  # (2 ns a byte).
  obs = jnp.zeros((*frame.shape[:2], rows.stack * channels, *frame.shape[3:]), frame.dtype)
  obs = lax.dynamic_update_slice_in_dim(obs, frame, first * channels, axis=2)

  # Where a stack does not reach further back, its oldest frame is repeated. A select is faster here
  # than a gather.
  for back, mask in enumerate(_goes_back(rows), start=1):
    mask = mask.reshape(mask.shape + (1,) * (frame.ndim - 2))
    frame = jnp.where(mask, rows.frame[first - back:first - back + num_rows], frame)
    obs = lax.dynamic_update_slice_in_dim(obs, frame, (first - back) * channels, axis=2)
  return obs


def pick(rows: Observations, step: jax.Array, env: jax.Array) -> jax.Array:
  """Returns the observations [n, ...] of rows `step` [n] i32 and environments `env` [n] i32."""
  chex.assert_rank([step, env], 1)
  chex.assert_equal_shape([step, env])
  if not isinstance(rows, Frames):
    return indexing.read(rows, step, env)
  # [n]: how many rows a stack reaches back.
  older = indexing.read(sum(x.astype(jnp.int32) for x in _goes_back(rows)), step, env)
  # [n, S]: how many rows back each frame of a stack came; the oldest frame is repeated.
  back = jnp.minimum(jnp.arange(rows.stack)[::-1], older[:, None])
  # [n, S, C, ...]
  stacked = indexing.read(rows.frame, step[:, None] + rows.stack - 1 - back, env[:, None])
  return stacked.reshape(len(step), -1, *stacked.shape[3:])


def last(rows: Observations) -> jax.Array:
  """Returns the observations of row T, [1, B, ...]."""
  if not isinstance(rows, Frames):
    return rows[-1:]
  steps, num_envs = rows.is_reset_stack.shape
  return pick(rows, jnp.full(num_envs, steps), jnp.arange(num_envs))[None]
