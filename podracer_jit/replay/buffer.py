"""Prioritised replay on the learner's devices: `init`, `add`, `sample`, `set_priorities`.

Ape-X (1803.00933) for jitted programs. The environments are split into groups (those that gradients
are taken of) and each group has a replay of its own, from which an equal share of every batch is
drawn: so nothing depends on how many devices share the groups. There are two ways to make room:
'fifo' stores each frame once, in a ring; 'prioritised' whole transitions in slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.numerics.islands import island
from podracer_jit.replay import ring, slots, tree
from podracer_jit.replay.ring import n_step_return as n_step_return
from podracer_jit.types import Experience, Transition

LEAST = 1e-6  # added to a TD error: what had none can still be drawn


class State(NamedTuple):
  """A replay, of the groups of one device; leading axis [groups]."""

  ring: ring.Ring
  slots: Any  # slots.Slots, or () where the ring itself is the memory
  priorities: tree.Tree  # |TD error|^exponent by place: a ring's row * B + environment, or a slot
  size: jax.Array  # [groups] i32: transitions that can be drawn
  inserted: jax.Array  # [groups] i32: that ever could


class Sample(NamedTuple):
  """What was drawn; leading axes [groups, count]."""

  place: jax.Array  # i32, within the group
  probability: jax.Array  # f32, within the group
  transition: Transition


class Replay(NamedTuple):
  """The replay of each group, as functions of its state.

  'fifo' keeps rows for as many transitions as fit the capacity, were all valid, and n_step + stack
  rows more, which cannot be drawn; 'prioritised' as many, and during an `add` those of one rollout
  more.
  """

  capacity: int  # transitions of a group that are kept
  envs: int  # of a group, B
  unroll_length: int  # T of the experience that is added
  stack: int  # frames of an observation
  n_step: int  # of transitions
  discount: float  # gamma
  eviction: str  # 'fifo' or 'prioritised'
  priority_exponent: float
  eviction_exponent: float  # of 'prioritised'

  @property
  def fifo(self) -> bool:
    """Whether the ring itself is the memory."""
    return self.eviction == 'fifo'

  @property
  def margin(self) -> int:
    """Rows of the ring whose end, or whose frames, are not there."""
    return self.n_step + self.stack

  @property
  def rows(self) -> int:
    """Of the ring."""
    return (-(-self.capacity // self.envs) if self.fifo else self.unroll_length) + self.margin

  def init(self, groups: int, like: Experience) -> State:
    """The state of `groups` empty replays, for experience of the shapes of `like`, of one group."""
    frames, held, places = ring.init(groups, self.rows, like), (), self.rows * self.envs
    if not self.fifo:
      places = self.capacity + self.unroll_length * self.envs
      one = jax.eval_shape(lambda: self._read(frames, jnp.zeros(1, int), jnp.zeros(1, int)))
      one = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), one)
      held = slots.init(groups, places, one)
    def none():  # each time others: states are donated
      return jnp.zeros(groups, jnp.int32)
    return State(frames, held, tree.init(groups, places), none(), none())

  def add(self, state: State, group: jax.Array, new: Experience, keys: jax.Array,
          now: jax.Array) -> State:
    """Adds experience.

    Args:
      state: of all groups here.
      group: [k], whose experience it is; that of a group which is not here is dropped.
      new: [k, ...] of each field.
      keys: [groups], for evictions.
      now: kept with the rows, by whatever clock.
    """
    frames, start = ring.write(state.ring, group, new, now)
    steps = self.unroll_length + (self.margin if self.fifo else 0)
    row = (start[:, None] - self.n_step + jnp.arange(steps)) % self.rows
    place = (row[..., None] * self.envs + jnp.arange(self.envs)).reshape(len(group), -1)
    error, starts = (x.reshape(len(group), -1) for x in (new.priority, new.starts))
    inserted = state.inserted.at[group].add(jnp.sum(starts, axis=1), mode='drop')
    state = state._replace(ring=frames, inserted=inserted)
    if not self.fifo:
      return self._to_slots(state, group, place, error, starts, keys)
    # After those that are complete now come rows that are not, and old ones with frames lost.
    value = jnp.where(starts, _mass(error, self.priority_exponent), 0.0)
    value = jnp.pad(value, ((0, 0), (0, self.margin * self.envs)))
    before = tree.get(state.priorities, group, place) > 0
    change = jnp.sum(value > 0, axis=1) - jnp.sum(before, axis=1)
    return state._replace(priorities=tree.put(state.priorities, group, place, value),
                          size=state.size.at[group].add(change, mode='drop'))

  def _to_slots(self, state: State, group: jax.Array, place: jax.Array, error: jax.Array,
                starts: jax.Array, keys: jax.Array) -> State:
    """Stores the transitions that begin in these places of the ring, and evicts as many."""
    made = self._read(state.ring, jnp.broadcast_to(group[:, None], place.shape), place)
    held, which = slots.write(state.slots, group, made, starts)
    held = held._replace(eviction=tree.put(
        held.eviction, group, which, _mass(error, self.eviction_exponent)))
    priorities = tree.put(state.priorities, group, which, _mass(error, self.priority_exponent))
    held, priorities = slots.evict(held, priorities, keys, self.capacity, place.shape[1])
    return state._replace(slots=held, priorities=priorities,
                          size=held.free.shape[1] - held.room)

  def _read(self, frames: ring.Ring, group: jax.Array, place: jax.Array) -> Transition:
    return ring.read(frames, group, place // self.envs, place % self.envs, self.stack, self.n_step,
                     self.discount)

  def sample(self, state: State, keys: jax.Array, count: int) -> Sample:
    """Draws `count` transitions of each group in proportion to priorities; `keys` [groups]."""
    place, probability = tree.draw(state.priorities, keys, count)
    group = jnp.broadcast_to(jnp.arange(len(keys))[:, None], place.shape)
    if self.fifo:
      return Sample(place, probability, self._read(state.ring, group, place))
    return Sample(place, probability, jax.tree.map(lambda x: x[group, place], state.slots.held))

  def set_priorities(self, state: State, place: jax.Array, error: jax.Array) -> State:
    """Sets those of what was drawn, [groups, count], by their absolute TD errors.

    `place` is as `sample` gave it, in ascending order; of one drawn twice the first counts.
    """
    groups = jnp.arange(len(place))
    place = jnp.where(place == jnp.pad(place, ((0, 0), (1, 0)), constant_values=-1)[:, :-1],
                      tree.NOWHERE, place)
    if not self.fifo:
      state = state._replace(slots=state.slots._replace(eviction=tree.put(
          state.slots.eviction, groups, place, _mass(error, self.eviction_exponent))))
    return state._replace(priorities=tree.put(
        state.priorities, groups, place, _mass(error, self.priority_exponent)))


def _mass(error: jax.Array, exponent: float) -> jax.Array:
  """Returns the weight by which each transition is drawn, [groups, n], from its TD error."""
  of_group = island('priorities')(lambda error: jnp.power(error + LEAST, exponent))
  return lax.map(of_group, error)
