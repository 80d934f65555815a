"""Ring buffer of the newest rows of each group's environments, which stores each frame once.

A row is one step of all environments of a group. If observations are stacks of frames, only the
newest frame of each stack is stored, and stacks are rebuilt when they are read. A row holds the
observation, the action, and the reward and flags that came back. The next row holds the observation
that came back.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podracer_jit.envs import frames
from podracer_jit.numerics import indexing
from podracer_jit.types import Carry, Experience, Rollout


class Ring(NamedTuple):
  """Ring of rows for each group of a device."""

  frame: jax.Array  # [groups, rows, B, c, ...]: newest frame; the whole observation if not stacked
  is_reset_stack: jax.Array  # [groups, rows, B] bool: all frames of the row's stack are this frame
  action: jax.Array  # [groups, rows, B, ...]
  reward: jax.Array  # [groups, rows, B] f32
  terminated: jax.Array  # [groups, rows, B] bool
  truncated: jax.Array  # [groups, rows, B] bool
  added: jax.Array  # [groups, rows] i32: time at which the row was added, on the caller's clock
  head: jax.Array  # [groups] i32: index of the row with the newest frame
  # For items that are sequences, which begin in each T-th row:
  valid: jax.Array | None = None  # [groups, rows, B] bool
  carry: Carry = None  # [groups, rows / T, B, ...] each: before these rows


def init(groups: int, rows: int, like: Experience, sequence_steps: int = 0) -> Ring:
  """Allocates an empty ring.

  Args:
    groups: number of groups.
    rows: rows of each group; for sequences a multiple of T.
    like: one group's experience [T, B, ...]; arrays or shapes.
    sequence_steps: T, the rows of a rollout, if items are sequences; else 0.
  """
  def zeros(x, rows=rows):
    return jnp.zeros((groups, rows, *x.shape[1:]), x.dtype)

  return Ring(
      frame=zeros(like.obs),
      is_reset_stack=zeros(like.is_reset_stack),
      action=zeros(like.action),
      reward=zeros(like.reward),
      terminated=zeros(like.terminated),
      truncated=zeros(like.truncated),
      added=jnp.zeros((groups, rows), jnp.int32),
      head=jnp.zeros(groups, jnp.int32),
      valid=zeros(like.valid) if sequence_steps else None,
      carry=jax.tree.map(lambda x: zeros(x, rows // sequence_steps), like.carry))


def around(row: jax.Array, rows: int) -> jax.Array:
  """Returns row mod `rows`, for a row of at least -rows."""
  return indexing.divide(row + rows, rows)[1]


def write(ring: Ring, group: jax.Array, experience: Experience, clock: jax.Array
          ) -> tuple[Ring, jax.Array]:
  """Writes T rows per group; out-of-range groups are ignored.

  If the experience began with a reset, its row 0 becomes a new row; with sequences, T rows after
  the head, so that rollouts always begin in a multiple of T. Otherwise row 0 is the row at the
  head, whose frame the previous call wrote.

  Args:
    ring: the ring of all groups of the device.
    group: [k] i32, the groups to write to, all different.
    experience: [k, T, B, ...].
    clock: [] i32, the caller's time, which is stored with the rows.

  Returns:
    The ring, and the index of row 0 in each group [k] i32.
  """
  chex.assert_rank([group, experience.reward, experience.is_reset_stack], [1, 3, 3])
  chex.assert_equal_shape_prefix(
      [group, experience.reward, experience.is_reset_stack, experience.action, experience.obs], 1)
  chex.assert_equal_shape([experience.reward, experience.terminated, experience.truncated])

  rows = ring.is_reset_stack.shape[1]
  k = group[:, None]

  # All environments of a rollout are reset at once, so the first flag stands for all.
  began = experience.began[:, 0, 0]
  steps = experience.reward.shape[1]
  gap = 1 if ring.valid is None else steps
  start = around(indexing.read_or(0, ring.head, group) + gap * began, rows)
  # A rollout of T steps has T + 1 observations.
  target = around(start[:, None] + jnp.arange(steps + 1), rows)

  # The experience does not say whether a continued row 0 has a reset stack, so it keeps the flag
  # that the ring has.
  kept_flag = indexing.read_or(False, ring.is_reset_stack, group, start)
  is_reset_stack = experience.is_reset_stack.at[:, 0].set(
      experience.is_reset_stack[:, 0] | ~began[:, None] & kept_flag)

  def put(field, value, row=target[:, :steps]):
    return indexing.write(field, k, row, value=value)

  written = Ring(
      frame=put(ring.frame, experience.obs, target),
      is_reset_stack=put(ring.is_reset_stack, is_reset_stack, target),
      action=put(ring.action, experience.action),
      reward=put(ring.reward, experience.reward),
      terminated=put(ring.terminated, experience.terminated),
      truncated=put(ring.truncated, experience.truncated),
      added=put(ring.added, jnp.broadcast_to(clock, (len(group), steps))),
      head=indexing.write(ring.head, group, value=target[:, -1]),
      valid=None if ring.valid is None else put(ring.valid, experience.valid),
      carry=jax.tree.map(lambda x, carry: put(x, carry, indexing.divide(start, steps)[0][:, None]),
                         ring.carry, experience.carry))
  return written, start


class Window(NamedTuple):
  """Windows of rows of one group; see `items.Window`."""

  ring: Ring  # of all groups of the device
  stack: int  # frames in an observation
  group: jax.Array  # [] i32
  row: jax.Array  # [N] i32, first rows
  env: jax.Array  # [N] i32, environments within the group
  length: int  # L

  def _around(self, row: jax.Array) -> jax.Array:
    return around(row, self.ring.is_reset_stack.shape[1])

  def rows(self) -> Rollout:
    """See `items.Window`; there are no extras and episodes."""
    ring = self.ring
    rows = self._around(self.row + jnp.arange(self.length)[:, None])

    def read(field: jax.Array) -> jax.Array:
      return indexing.read(field, self.group, rows, self.env[None])

    def first(field: jax.Array) -> jax.Array:
      row, _ = indexing.divide(self.row, ring.is_reset_stack.shape[1] // field.shape[1])
      return indexing.read(field, self.group, row[None], self.env[None])

    return Rollout(obs=None, action=read(ring.action), extras=None, reward=read(ring.reward),
                   terminated=read(ring.terminated), truncated=read(ring.truncated),
                   valid=None if ring.valid is None else read(ring.valid), episodes=None,
                   carry=jax.tree.map(first, ring.carry))

  def obs(self, step: jax.Array) -> jax.Array:
    """See `items.Window`.

    A stack reaches back to the newest row with a reset stack, whose frame fills the older places.
    """
    ring = self.ring
    row = self._around(self.row + step)
    if self.stack == 1:
      return indexing.read(ring.frame, self.group, row, self.env)
    back = jnp.arange(self.stack)
    env = self.env[..., None]

    # The first row with a reset stack, going back; at most stack - 1 rows.
    older = self._around(row[..., None] - back)
    filled = indexing.read(ring.is_reset_stack, self.group, older, env)
    oldest = jnp.argmax(filled.at[..., -1].set(True), axis=-1)[..., None]
    # The oldest frame comes first in a stack.
    age = jnp.minimum(back[::-1], oldest)
    # [N, stack, c, H, W]
    stacked = indexing.read(ring.frame, self.group, self._around(row[..., None] - age), env)
    return stacked.reshape(len(row), -1, *stacked.shape[3:])

  def all_obs(self) -> frames.Observations:
    """See `items.Window`."""
    ring = self.ring
    rows = self._around(self.row + jnp.arange(self.length + 1)[:, None])

    def read(field: jax.Array, rows: jax.Array) -> jax.Array:
      return indexing.read(field, self.group, rows, self.env[None])

    if self.stack == 1:
      return read(ring.frame, rows)
    oldest_first = jnp.stack(jnp.split(self.obs(jnp.zeros_like(self.row)), self.stack, axis=1))
    return frames.Frames(jnp.concatenate([oldest_first, read(ring.frame, rows[1:])]),
                         read(ring.is_reset_stack, rows[1:]))
