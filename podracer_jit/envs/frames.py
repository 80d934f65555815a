"""Observations that are stacks of frames, kept with each frame once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Frames(NamedTuple):
  """Observations of rows 0 to T, stacks of S frames each.

  A stack goes on from that of the row before, or it holds its newest frame S times (`envs.EnvSpec`
  says of which tasks that is true).
  """

  frame: jax.Array  # [T + S, B, C, ...]: those of row 0, the oldest first; of other rows the newest
  fresh: jax.Array  # [T, B] bool: the stack of row t + 1 holds nothing but its newest frame

  @property
  def stack(self) -> int:
    """S."""
    return len(self.frame) - len(self.fresh)


Observations = Any  # Frames; or, of observations that are no stacks, [T + 1, B, ...]


def begin(obs: jax.Array, steps: int, stack: int) -> Observations:
  """Room for rows 0 to `steps`; the first is obs [B, stack * C, ...], whatever its frames are."""
  if stack == 1:
    return jnp.zeros((steps + 1, *obs.shape), obs.dtype).at[0].set(obs)
  first = jnp.stack(jnp.split(obs, stack, axis=1))
  rest = jnp.zeros((steps, *first.shape[1:]), obs.dtype)
  return Frames(jnp.concatenate([first, rest]), jnp.zeros((steps, len(obs)), bool))


def add(rows: Observations, t: jax.Array, before: jax.Array, obs: jax.Array) -> Observations:
  """Sets row t to obs [B, ...], which follows `before`, the row t - 1 (at t = 0 anything)."""
  put = lax.dynamic_update_index_in_dim
  if not isinstance(rows, Frames):
    return put(rows, obs, t, 0)
  newest, fresh = _difference(before, obs, rows.stack)
  # With t = 0 row 1 is said to be fresh, or not, for the time being.
  return Frames(put(rows.frame, newest, t + rows.stack - 1, 0),
                put(rows.fresh, fresh, jnp.maximum(t - 1, 0), 0))


def of(obs: jax.Array, stack: int) -> Observations:
  """The same of observations that are all here, [T + 1, B, stack * C, ...]."""
  if stack == 1:
    return obs
  newest, fresh = jax.vmap(lambda *pair: _difference(*pair, stack))(obs[:-1], obs[1:])
  return Frames(jnp.concatenate([jnp.stack(jnp.split(obs[0], stack, axis=1)), newest]), fresh)


def _difference(before: jax.Array, obs: jax.Array, stack: int) -> tuple[jax.Array, jax.Array]:
  """The newest frame of obs [B, ...], and whether the others are not those of `before`."""
  channels = obs.shape[1] // stack
  others = obs[:, :-channels] != before[:, channels:]
  return obs[:, -channels:], jnp.any(others, axis=tuple(range(1, obs.ndim)))


def _goes_back(rows: Frames) -> list[jax.Array]:
  """For 1 to S - 1 rows back, [T + 1, B]: whether a stack has a frame of so long before."""
  steps, num_envs = rows.fresh.shape
  found, so_far = [], jnp.ones((steps + 1, num_envs), bool)
  for back in range(1, rows.stack):
    so_far &= ~jnp.concatenate([jnp.zeros((back, num_envs), bool), rows.fresh])[:steps + 1]
    found.append(so_far)
  return found


def stacks(rows: Observations) -> jax.Array:
  """All observations as they were, [T + 1, B, ...]."""
  if not isinstance(rows, Frames):
    return rows
  first, channels = rows.stack - 1, rows.frame.shape[2]
  frame, end = rows.frame[first:], len(rows.fresh) + 1
  # Set one after the other: of a concatenation XLA's CPU compiler makes, in a loop, 2 ns a byte.
  found = jnp.zeros((*frame.shape[:2], rows.stack * channels, *frame.shape[3:]), frame.dtype)
  found = lax.dynamic_update_slice_in_dim(found, frame, first * channels, axis=2)
  for back, goes_on in enumerate(_goes_back(rows), start=1):  # selected, which is faster than taken
    mask = goes_on.reshape(goes_on.shape + (1,) * (frame.ndim - 2))
    frame = jnp.where(mask, rows.frame[first - back:first - back + end], frame)
    found = lax.dynamic_update_slice_in_dim(found, frame, (first - back) * channels, axis=2)
  return found


def pick(rows: Observations, step: jax.Array, env: jax.Array) -> jax.Array:
  """The observations of steps [n] of environments [n], [n, ...]."""
  if not isinstance(rows, Frames):
    return rows[step, env]
  older = sum(x.astype(jnp.int32) for x in _goes_back(rows))[step, env]
  back = jnp.minimum(jnp.arange(rows.stack)[::-1], older[:, None])  # [n, S]
  found = rows.frame[step[:, None] + rows.stack - 1 - back, env[:, None]]  # [n, S, C, ...]
  return found.reshape(len(step), -1, *found.shape[3:])


def last(rows: Observations) -> jax.Array:
  """The observations of row T, [1, B, ...]."""
  if not isinstance(rows, Frames):
    return rows[-1:]
  steps, num_envs = rows.fresh.shape
  return pick(rows, jnp.full(num_envs, steps), jnp.arange(num_envs))[None]
