"""Ring buffer of the newest rows of each block of environments, which stores each frame once.

A block is a group of neighbouring environments whose rows are added together. Each device has some
of the blocks. A row is one step of all environments of a block. If observations are stacks of
frames, only the newest frame of each stack is stored, and stacks are rebuilt when they are read. A
row holds the observation, the action, and the reward and flags that came back. The next row holds
the observation that came back.

Items, with stacks, n-step returns and last observations, are made when they are drawn. An item of L
rows cannot be drawn before its L rows are there, or once the frames of its stack are overwritten.
So the ring has L + stack more rows than the capacity. For sequences it also has the masks of valid
rows and the carry of each rollout. A rollout begins in a multiple of T rows, so a sequence's place
in the tree, and its carry, follow from its first row. Sequences overlap, and their rows are stored
once.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podracer_jit.envs import frames
from podracer_jit.numerics import indexing
from podracer_jit.numerics.groups import Groups
from podracer_jit.types import Carry, Experience, Rollout


class Ring(NamedTuple):
  """Ring of rows for each block; `SHARDED` tells which arrays have a device's own blocks only."""

  frame: jax.Array  # [blocks, rows, B, c, ...]: newest frame; the whole observation if not stacked
  is_reset_stack: jax.Array  # [blocks, rows, B] bool: all frames of the row's stack are this frame
  action: jax.Array  # [blocks, rows, B, ...]
  reward: jax.Array  # [blocks, rows, B] f32
  terminated: jax.Array  # [blocks, rows, B] bool
  truncated: jax.Array  # [blocks, rows, B] bool
  added: jax.Array  # [blocks, rows] i32: time at which the row was added, on the caller's clock
  head: jax.Array  # [blocks] i32: index of the row with the newest frame
  # For items that are sequences, which begin in each T-th row:
  valid: jax.Array | None = None  # [blocks, rows, B] bool
  carry: Carry = None  # [blocks, rows / T, B, ...] each: before these rows


# All devices know when rows of all blocks were added, and where; the rest is the owner's.
SHARDED = Ring(*[True] * len(Ring._fields))._replace(added=False, head=False)


def init(blocks: int, rows: int, like: Experience, sequence_steps: int = 0) -> Ring:
  """Allocates an empty ring.

  Args:
    blocks: number of blocks.
    rows: rows of each block; for sequences a multiple of T.
    like: one block's experience [T, B, ...]; arrays or shapes.
    sequence_steps: T, the rows of a rollout, if items are sequences; else 0.
  """
  def zeros(x, rows=rows):
    return jnp.zeros((blocks, rows, *x.shape[1:]), x.dtype)

  return Ring(
      frame=zeros(like.obs),
      is_reset_stack=zeros(like.is_reset_stack),
      action=zeros(like.action),
      reward=zeros(like.reward),
      terminated=zeros(like.terminated),
      truncated=zeros(like.truncated),
      added=jnp.zeros((blocks, rows), jnp.int32),
      head=jnp.zeros(blocks, jnp.int32),
      valid=zeros(like.valid) if sequence_steps else None,
      carry=jax.tree.map(lambda x: zeros(x, rows // sequence_steps), like.carry))


def wrapped(row: jax.Array, rows: int) -> jax.Array:
  """Returns row mod `rows`, for a row of at least -rows."""
  return indexing.divide(row + rows, rows)[1]


def first_row(ring: Ring, number: jax.Array, began: jax.Array, steps: int) -> jax.Array:
  """Returns the index of the row at which experience of `steps` rows begins, [k] i32.

  If the experience began with a reset, its row 0 becomes a new row; with sequences, T rows after
  the head, so that rollouts always begin in a multiple of T. Otherwise row 0 is the row at the
  head, whose frame the previous call wrote.

  Args:
    ring: the ring.
    number: [k] i32, blocks among all blocks.
    began: [k] bool, whether their experience began with a reset.
    steps: rows of the experience, T.
  """
  chex.assert_equal_shape([number, began])
  gap = 1 if ring.valid is None else steps
  return wrapped(indexing.read(ring.head, number) + gap * began, ring.added.shape[1])


def write(ring: Ring, block: jax.Array, experience: Experience, start: jax.Array) -> Ring:
  """Writes T rows of each block, except for the time; out-of-range blocks are ignored.

  Args:
    ring: the ring.
    block: [k] i32, blocks of the device to write to, all different.
    experience: [k, T, B, ...].
    start: [k] i32, as `first_row` returns it.
  """
  chex.assert_rank([block, experience.reward, experience.is_reset_stack], [1, 3, 3])
  chex.assert_equal_shape_prefix(
      [block, experience.reward, experience.is_reset_stack, experience.action, experience.obs], 1)
  chex.assert_equal_shape([experience.reward, experience.terminated, experience.truncated])

  steps = experience.reward.shape[1]
  # A rollout of T steps has T + 1 observations.
  target = wrapped(start[:, None] + jnp.arange(steps + 1), ring.added.shape[1])

  # The experience does not say whether a continued row 0 has a reset stack, so it keeps the flag
  # that the ring has.
  began = experience.began[:, 0, 0]
  kept_flag = indexing.read_or(False, ring.is_reset_stack, block, start)
  is_reset_stack = experience.is_reset_stack.at[:, 0].set(
      experience.is_reset_stack[:, 0] | ~began[:, None] & kept_flag)

  def put(field, value, row=target[:, :steps]):
    return indexing.write(field, block[:, None], row, value=value)

  return ring._replace(
      frame=put(ring.frame, experience.obs, target),
      is_reset_stack=put(ring.is_reset_stack, is_reset_stack, target),
      action=put(ring.action, experience.action),
      reward=put(ring.reward, experience.reward),
      terminated=put(ring.terminated, experience.terminated),
      truncated=put(ring.truncated, experience.truncated),
      valid=None if ring.valid is None else put(ring.valid, experience.valid),
      carry=jax.tree.map(lambda x, carry: put(x, carry, indexing.divide(start, steps)[0][:, None]),
                         ring.carry, experience.carry))


def advance(ring: Ring, number: jax.Array, start: jax.Array, steps: int, clock: jax.Array) -> Ring:
  """Moves the heads of blocks behind their new rows, and notes the time of these rows.

  Args:
    ring: the ring.
    number: [k] i32, blocks among all blocks, all different.
    start: [k] i32, as `first_row` returned it.
    steps: rows that were added, T.
    clock: [] i32, the caller's time.
  """
  target = wrapped(start[:, None] + jnp.arange(steps + 1), ring.added.shape[1])
  times = jnp.broadcast_to(clock, (len(number), steps))
  return ring._replace(
      added=indexing.write(ring.added, number[:, None], target[:, :steps], value=times),
      head=indexing.write(ring.head, number, value=target[:, -1]))


class Window(NamedTuple):
  """Windows of rows of any blocks; see `items.Window`."""

  ring: Ring
  stack: int  # frames in an observation
  blocks: Groups  # of all devices
  number: jax.Array  # [N] i32, blocks among all blocks
  row: jax.Array  # [N] i32, first rows
  env: jax.Array  # [N] i32, environments within the block
  length: int  # L

  def rows(self) -> Rollout:
    """See `items.Window`; there are no extras and episodes."""
    ring = self.ring

    def read(block: jax.Array, row: jax.Array, env: jax.Array) -> Rollout:
      rows = _wrapped(ring, row + jnp.arange(self.length)[:, None])

      def all_rows(field: jax.Array) -> jax.Array:
        return indexing.read(field, block, rows, env[None])

      def first(field: jax.Array) -> jax.Array:
        number, _ = indexing.divide(row, ring.added.shape[1] // field.shape[1])
        return indexing.read(field, block, number[None], env[None])

      return Rollout(
          obs=None, action=all_rows(ring.action), extras=None, reward=all_rows(ring.reward),
          terminated=all_rows(ring.terminated), truncated=all_rows(ring.truncated),
          valid=None if ring.valid is None else all_rows(ring.valid), episodes=None,
          carry=jax.tree.map(first, ring.carry))

    return self.blocks.fetch(read, self.number, self.row, self.env, axis=1)

  def obs(self, step: jax.Array) -> jax.Array:
    """See `items.Window`."""
    return self.blocks.fetch(
        lambda *index: _stack(self.ring, self.stack, *index), self.number, self.row + step,
        self.env)

  def all_obs(self) -> frames.Observations:
    """See `items.Window`."""
    ring = self.ring

    def read(block: jax.Array, row: jax.Array, env: jax.Array) -> tuple[jax.Array, ...]:
      rows = _wrapped(ring, row + jnp.arange(self.length + 1)[:, None])
      if self.stack == 1:
        return (indexing.read(ring.frame, block, rows, env[None]),)
      oldest_first = jnp.stack(jnp.split(_stack(ring, self.stack, block, row, env), self.stack,
                                         axis=1))
      newer = indexing.read(ring.frame, block, rows[1:], env[None])
      return (jnp.concatenate([oldest_first, newer]),
              indexing.read(ring.is_reset_stack, block, rows[1:], env[None]))

    obs = self.blocks.fetch(read, self.number, self.row, self.env, axis=1)
    return obs[0] if self.stack == 1 else frames.Frames(*obs)


def _wrapped(ring: Ring, row: jax.Array) -> jax.Array:
  return wrapped(row, ring.added.shape[1])


def _stack(ring: Ring, stack: int, block: jax.Array, row: jax.Array, env: jax.Array) -> jax.Array:
  """Returns observations [N, ...] with their stacks.

  A stack reaches back to the newest row with a reset stack, whose frame fills the older places.

  Args:
    ring: the ring.
    stack: frames in an observation.
    block: [N] i32, blocks of the device.
    row: [N] i32, from 0 to twice the rows of the ring.
    env: [N] i32, environments within the block.
  """
  row = _wrapped(ring, row)
  if stack == 1:
    return indexing.read(ring.frame, block, row, env)
  back = jnp.arange(stack)
  block = block[..., None]
  env = env[..., None]

  # The first row with a reset stack, going back; at most stack - 1 rows.
  older = _wrapped(ring, row[..., None] - back)
  filled = indexing.read(ring.is_reset_stack, block, older, env)
  oldest = jnp.argmax(filled.at[..., -1].set(True), axis=-1)[..., None]
  # The oldest frame comes first in a stack.
  age = jnp.minimum(back[::-1], oldest)
  # [N, stack, c, H, W]
  stacked = indexing.read(ring.frame, block, _wrapped(ring, row[..., None] - age), env)
  return stacked.reshape(len(row), -1, *stacked.shape[3:])
