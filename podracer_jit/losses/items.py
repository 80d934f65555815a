"""Items: the elements of minibatches and replays, windows of consecutive rows of one environment.

A window is read when its item is made, so stacks of frames are rebuilt for a microbatch only. An
item does not know where its rows are: in the rollout of an update, or in the ring of a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from podracer_jit.losses.returns import n_step_return
from podracer_jit.numerics.islands import island
from podracer_jit.types import Rollout, Transition


class Window(Protocol):
  """N windows of L rows each."""

  def rows(self) -> Rollout:
    """Returns the rows without their observations, [L, N, ...].

    The carry [1, N, ...] is there if the windows begin where rollouts begin; in a replay, carry and
    mask of valid rows are there for `Items` that are sequences.
    """

  def obs(self, step: jax.Array) -> jax.Array:
    """Returns the observations [N, ...] of rows `step` [N] i32, from 0 to L, with their stacks."""

  def all_obs(self) -> Any:
    """Returns the observations of rows 0 to L, [L + 1, N, ...] or `frames.Frames` of these."""


class Items(NamedTuple):
  """A kind of items."""

  length: int  # rows of an item, L
  period: int  # rows from the beginning of an item to that of the next
  make: Callable[[Window], Any]  # makes the items of N windows; arithmetic is in islands
  network_rows: int  # rows of an item in one pass of the network
  # The items are whole rows in order, with the carry before the first and masks of valid rows. They
  # begin where rollouts begin, also in an invalid row.
  is_sequence: bool = False

  @property
  def unit(self) -> str:
    """Noun for an item of a replay, for messages."""
    return 'sequence' if self.is_sequence else 'transition'

  def count(self, unroll_length: int) -> int:
    """Returns the number of items that begin and end in one environment's rollout."""
    return (unroll_length - self.length) // self.period + 1

  def stride(self, unroll_length: int) -> int:
    """Returns the rows from one in which an item of a replay may begin to the next such row."""
    return min(self.period, unroll_length)


def rows() -> Items:
  """Returns single rows: `Rollout` [1, N, ...], with one observation each."""
  def make(window: Window) -> Rollout:
    row = window.rows()
    first = jnp.zeros(row.reward.shape[1], jnp.int32)
    return row._replace(obs=window.obs(first)[None])
  return Items(1, 1, make, network_rows=1)


def sequences(length: int, period: int) -> Items:
  """Returns `Rollout` [L, N, ...] with L + 1 observations and the carry before the first row.

  Episodes may end within a sequence: its rows have masks, and the carry after an invalid row is the
  initial one.

  Args:
    length: L.
    period: rows from the beginning of a sequence to that of the next. For a replay it must be a
      multiple of the unroll length, because a carry is known where rollouts begin.
  """
  def make(window: Window) -> Rollout:
    return window.rows()._replace(obs=window.all_obs())
  return Items(length, period, make, network_rows=length + 1, is_sequence=True)


def environments(unroll_length: int) -> Items:
  """Returns the whole rollouts of environments: `Rollout` [T, N, ...], with T + 1 observations."""
  return sequences(unroll_length, unroll_length)


def transitions(n_step: int, discount: float) -> Items:
  """Returns `Transition` [N, ...] over n steps, or fewer if the episode ends before."""
  @island('n_step_return')
  def returns(reward: jax.Array, terminated: jax.Array, truncated: jax.Array
              ) -> tuple[jax.Array, jax.Array, jax.Array]:
    return n_step_return(reward, terminated, truncated, discount)

  def make(window: Window) -> Transition:
    rows = window.rows()
    reward, discount_after, steps = returns(rows.reward, rows.terminated, rows.truncated)
    return Transition(obs=window.obs(jnp.zeros_like(steps)), action=rows.action[0], reward=reward,
                      discount=discount_after, next_obs=window.obs(steps))
  return Items(n_step, 1, make, network_rows=1)
