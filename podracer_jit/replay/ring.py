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
from jax import lax

from podracer_jit.numerics import indexing
from podracer_jit.numerics.islands import island
from podracer_jit.types import Experience, Transition


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


def init(groups: int, rows: int, like: Experience) -> Ring:
  """Allocates an empty ring of `rows` rows per group, shaped like `like`.

  `like` is one group's experience [T, B, ...]; arrays or shapes.
  """
  def zeros(x):
    return jnp.zeros((groups, rows, *x.shape[1:]), x.dtype)

  return Ring(
      frame=zeros(like.obs),
      is_reset_stack=zeros(like.is_reset_stack),
      action=zeros(like.action),
      reward=zeros(like.reward),
      terminated=zeros(like.terminated),
      truncated=zeros(like.truncated),
      added=jnp.zeros((groups, rows), jnp.int32),
      head=jnp.zeros(groups, jnp.int32))


def around(row: jax.Array, rows: int) -> jax.Array:
  """Returns row mod `rows`, for a row of at least -rows."""
  return indexing.divide(row + rows, rows)[1]


def write(ring: Ring, group: jax.Array, experience: Experience, clock: jax.Array
          ) -> tuple[Ring, jax.Array]:
  """Writes T rows per group; out-of-range groups are ignored.

  If the experience began with a reset, its row 0 becomes a new row. Otherwise row 0 is the row at
  the head, whose frame the previous call wrote.

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
  start = around(indexing.read_or(0, ring.head, group) + began, rows)
  steps = experience.reward.shape[1]
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
      head=indexing.write(ring.head, group, value=target[:, -1]))
  return written, start


def read(ring: Ring, group: jax.Array, row: jax.Array, env: jax.Array, stack: int, n_step: int,
         discount: float) -> Transition:
  """Reads the transitions that begin in the given rows.

  The n-step returns are computed in an island, once for each entry of the first axis.

  Args:
    ring: the ring of all groups of the device.
    group: [k, ...] i32, group of each transition.
    row: [k, ...] i32, row in which each transition begins.
    env: [k, ...] i32, environment of each transition within its group.
    stack: frames in an observation.
    n_step: steps of a transition.
    discount: gamma.

  Returns:
    Transitions, with the leading axes of the indices.
  """
  chex.assert_equal_shape([group, row, env])
  rows = ring.is_reset_stack.shape[1]
  ahead = around(row[..., None] + jnp.arange(n_step), rows)
  g = group[..., None]
  e = env[..., None]

  @island('n_step_return')
  def of_group(*steps):
    return n_step_return(*(jnp.moveaxis(x, -1, 0) for x in steps), discount)

  reward, discount_after, steps = lax.map(
      lambda steps: of_group(*steps),
      tuple(indexing.read(x, g, ahead, e) for x in (ring.reward, ring.terminated, ring.truncated)))
  return Transition(
      obs=_obs(ring, group, row, env, stack),
      action=indexing.read(ring.action, group, row, env),
      reward=reward,
      discount=discount_after,
      next_obs=_obs(ring, group, around(row + steps, rows), env, stack),
      added=indexing.read(ring.added, group, row))


def _obs(ring: Ring, group: jax.Array, row: jax.Array, env: jax.Array, stack: int) -> jax.Array:
  """Returns the observations of rows, with stacks rebuilt.

  A stack reaches back to the newest row with a reset stack, whose frame fills the older places.

  Args:
    ring: the ring of all groups of the device.
    group: [k, ...] i32.
    row: [k, ...] i32.
    env: [k, ...] i32, environment within its group.
    stack: frames in an observation.

  Returns:
    [k, ..., stack * c, H, W], or [k, ..., *observation] without stacks.
  """
  if stack == 1:
    return indexing.read(ring.frame, group, row, env)
  rows = ring.is_reset_stack.shape[1]
  back = jnp.arange(stack)
  g = group[..., None]
  e = env[..., None]

  # The first row with a reset stack, going back; at most stack - 1 rows.
  filled = indexing.read(ring.is_reset_stack, g, around(row[..., None] - back, rows), e)
  oldest = jnp.argmax(filled.at[..., -1].set(True), axis=-1)[..., None]
  # The oldest frame comes first in a stack.
  age = jnp.minimum(back[::-1], oldest)
  # [..., stack, c, H, W]
  frames = indexing.read(ring.frame, g, around(row[..., None] - age, rows), e)
  return frames.reshape(*row.shape, -1, *frames.shape[row.ndim + 2:])


def n_step_return(reward: jax.Array, terminated: jax.Array, truncated: jax.Array, discount: float
                  ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns n-step returns, which stop at the end of the episode if that comes first.

  Args:
    reward: [n, ...] f32, rewards of the n steps.
    terminated: [n, ...] bool.
    truncated: [n, ...] bool; the value of the last observation follows a truncation.
    discount: gamma.

  Returns:
    The discounted sum of rewards [...] f32; the discount of the value that follows [...] f32, zero
    after a termination; and the number of steps taken [...] i32.
  """
  chex.assert_equal_shape([reward, terminated, truncated])
  goes_on = jnp.ones(reward.shape[1:], bool)
  gamma = jnp.ones(reward.shape[1:])
  total = jnp.zeros(reward.shape[1:])
  steps = jnp.zeros(reward.shape[1:], jnp.int32)
  for r, over, cut in zip(reward, terminated, truncated, strict=True):
    total = total + jnp.where(goes_on, gamma * r, 0.0)
    steps = steps + goes_on
    gamma = jnp.where(goes_on, gamma * discount * (1.0 - over), gamma)
    goes_on = goes_on & ~(over | cut)
  return total, gamma, steps
