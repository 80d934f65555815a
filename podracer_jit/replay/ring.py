"""The newest rows of a group's environments, each frame stored once.

A row is a step of all environments of a group. Where observations are stacks of frames only the
newest frame of each is stored; stacks are put together again when they are read. Row r of the ring
holds what was seen at one step, what was done, and what came back; the observation that came back
is row r + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.numerics.islands import island
from podracer_jit.types import Experience, Transition


class Ring(NamedTuple):
  """Rows of all groups of a device; rows go round."""

  frame: jax.Array  # [groups, rows, B, c, ...] the newest frame; of other tasks the observation
  fresh: jax.Array  # [groups, rows, B] bool: the stack held nothing but this frame
  action: jax.Array  # [groups, rows, B, ...]
  reward: jax.Array  # [groups, rows, B] f32
  terminated: jax.Array  # [groups, rows, B] bool
  truncated: jax.Array  # [groups, rows, B] bool
  added: jax.Array  # [groups, rows] i32: when the row was added, by whatever clock
  head: jax.Array  # [groups] i32: where the newest frame is


def init(groups: int, rows: int, like: Experience) -> Ring:
  """Of `rows` empty rows for experience of the shapes of `like`, [T, B, ...] of one group."""
  def zeros(x):
    return jnp.zeros((groups, rows, *x.shape[1:]), x.dtype)
  return Ring(zeros(like.obs), zeros(like.fresh), zeros(like.action), zeros(like.reward),
              zeros(like.terminated), zeros(like.truncated), jnp.zeros((groups, rows), jnp.int32),
              jnp.zeros(groups, jnp.int32))


def write(ring: Ring, group: jax.Array, new: Experience, now: jax.Array
          ) -> tuple[Ring, jax.Array]:
  """Adds T rows to groups [k] (others than there are do nothing): (ring, where row 0 stands [k]).

  `new` has a leading axis [k]. Where it began with fresh environments its row 0 is a new row; else
  that is the last one of before, whose frame is there already.
  """
  rows, k = ring.fresh.shape[1], group[:, None]
  began = new.began[:, 0, 0]
  start = (ring.head.at[group].get(mode='fill', fill_value=0) + began) % rows
  steps = new.reward.shape[1]
  here = (start[:, None] + jnp.arange(steps + 1)) % rows
  # Of an old row 0 it is not known here whether its stack was fresh: what is there stands.
  fresh = new.fresh.at[:, 0].set(
      new.fresh[:, 0] | ~began[:, None] & ring.fresh.at[group, start].get(mode='fill',
                                                                          fill_value=False))

  def to(old, value, where=here[:, :steps]):
    return old.at[k, where].set(value, mode='drop')
  return Ring(
      to(ring.frame, new.obs, here), to(ring.fresh, fresh, here), to(ring.action, new.action),
      to(ring.reward, new.reward), to(ring.terminated, new.terminated),
      to(ring.truncated, new.truncated), to(ring.added, jnp.broadcast_to(now, (len(group), steps))),
      ring.head.at[group].set(here[:, -1], mode='drop')), start


def read(ring: Ring, group: jax.Array, row: jax.Array, env: jax.Array, stack: int, n_step: int,
         discount: float) -> Transition:
  """The transitions that begin in these rows of these environments (index arrays of one shape).

  What is computed of them is an island for each entry of the first axis, that of groups.
  """
  rows = ring.fresh.shape[1]
  ahead = (row[..., None] + jnp.arange(n_step)) % rows
  g, e = group[..., None], env[..., None]

  @island('n_step_return')
  def of_group(*steps):
    return n_step_return(*(jnp.moveaxis(x, -1, 0) for x in steps), discount)

  reward, to_next, steps = lax.map(
      lambda steps: of_group(*steps),
      tuple(x[g, ahead, e] for x in (ring.reward, ring.terminated, ring.truncated)))
  return Transition(
      _obs(ring, group, row, env, stack), ring.action[group, row, env], reward, to_next,
      _obs(ring, group, (row + steps) % rows, env, stack), ring.added[group, row])


def _obs(ring: Ring, group: jax.Array, row: jax.Array, env: jax.Array, stack: int) -> jax.Array:
  """Observations, [*row.shape, ...]; of stacks the frames back to the one that filled it."""
  if stack == 1:
    return ring.frame[group, row, env]
  rows, back = ring.fresh.shape[1], jnp.arange(stack)
  g, e = group[..., None], env[..., None]
  filled = ring.fresh[g, (row[..., None] - back) % rows, e]
  oldest = jnp.argmax(filled.at[..., -1].set(True), axis=-1)[..., None]
  age = jnp.minimum(back[::-1], oldest)  # the oldest frame comes first
  frames = ring.frame[g, (row[..., None] - age) % rows, e]  # [..., stack, c, H, W]
  return frames.reshape(*row.shape, -1, *frames.shape[row.ndim + 2:])


def n_step_return(reward: jax.Array, terminated: jax.Array, truncated: jax.Array, discount: float
                  ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """n steps, or those to the end of the episode: (their return, discount of what follows, steps).

  Args:
    reward: [n, ...], of the n steps.
    terminated: [n, ...] bool.
    truncated: [n, ...] bool: what follows is the last observation, with its value.
    discount: gamma.
  """
  goes_on, gamma = jnp.ones(reward.shape[1:], bool), jnp.ones(reward.shape[1:])
  total, steps = jnp.zeros(reward.shape[1:]), jnp.zeros(reward.shape[1:], jnp.int32)
  for r, over, cut in zip(reward, terminated, truncated, strict=True):
    total = total + jnp.where(goes_on, gamma * r, 0.0)
    steps = steps + goes_on
    gamma = jnp.where(goes_on, gamma * discount * (1.0 - over), gamma)
    goes_on = goes_on & ~(over | cut)
  return total, gamma, steps
