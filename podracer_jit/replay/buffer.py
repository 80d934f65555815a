"""Prioritised replay on the learner's devices: `init`, `add`, `sample`, `set_priorities`.

It implements Ape-X (1803.00933) for jitted programs. The environments are split into groups, the
same as for gradients. Each group has a replay of its own and gives an equal share of every batch.
So results do not depend on how many devices share the groups. Two kinds of eviction are possible:
'fifo' stores each frame once, in a ring; 'prioritised' stores whole transitions, in slots.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.numerics import indexing
from podracer_jit.numerics.islands import island
from podracer_jit.replay import ring, slots, tree
from podracer_jit.replay.ring import n_step_return as n_step_return
from podracer_jit.types import Experience, Transition

LEAST = 1e-6  # added to TD errors, so that a transition with a TD error of 0 can still be drawn


class State(NamedTuple):
  """State of the replays of one device's groups; leading axis [groups]."""

  ring: ring.Ring
  slots: slots.Slots | None  # for 'prioritised'; None for 'fifo', which draws from the ring
  # |TD error|^exponent of each place. A place is row * B + environment in the ring, or a slot.
  priorities: tree.Tree
  size: jax.Array  # [groups] i32: transitions that can be drawn
  inserted: jax.Array  # [groups] i32: transitions added since the beginning


class Sample(NamedTuple):
  """Drawn transitions; leading axes [groups, count]."""

  place: jax.Array  # i32, place within the group
  probability: jax.Array  # f32, probability of each draw within the group
  transition: Transition


class Replay(NamedTuple):
  """Replay of each group, as functions of a `State`.

  'fifo' has rows for `capacity` transitions, valid or not, and n_step + stack further rows that
  cannot be drawn. 'prioritised' has slots for `capacity` transitions, and further slots for one
  rollout, which an `add` fills before it evicts.
  """

  capacity: int  # transitions that a group keeps
  envs: int  # environments of a group, B
  unroll_length: int  # rows of the experience that is added, T
  stack: int  # frames in an observation
  n_step: int  # steps of a transition
  discount: float  # gamma
  eviction: str  # 'fifo' or 'prioritised'
  priority_exponent: float
  eviction_exponent: float  # exponent of priorities in draws for eviction, with 'prioritised'

  @property
  def fifo(self) -> bool:
    """True if transitions are drawn from the ring."""
    return self.eviction == 'fifo'

  @property
  def margin(self) -> int:
    """Number of rows that cannot be drawn: their end or their stack's frames are missing."""
    return self.n_step + self.stack

  @property
  def rows(self) -> int:
    """Number of rows of the ring."""
    return (-(-self.capacity // self.envs) if self.fifo else self.unroll_length) + self.margin

  def init(self, groups: int, like: Experience) -> State:
    """Allocates empty replays for `groups` groups, shaped like `like`, one group's experience."""
    frames = ring.init(groups, self.rows, like)
    places = self.rows * self.envs
    slot_state = None
    if not self.fifo:
      places = self.capacity + self.unroll_length * self.envs
      # One transition has the shapes of a batch [1, ...] without its first axis.
      batch = jax.eval_shape(lambda: self._read(frames, jnp.zeros(1, int), jnp.zeros(1, int)))
      transition = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), batch)
      slot_state = slots.init(groups, places, transition)

    # Each counter gets a buffer of its own, since states are donated.
    def zeros():
      return jnp.zeros(groups, jnp.int32)
    return State(ring=frames, slots=slot_state, priorities=tree.init(groups, places), size=zeros(),
                 inserted=zeros())

  def add(self, state: State, group: jax.Array, experience: Experience, keys: jax.Array,
          clock: jax.Array) -> State:
    """Adds experience and evicts transitions beyond the capacity.

    Args:
      state: the state of all groups of the device.
      group: [k] i32, the groups of the experience, all different; out-of-range groups are ignored.
      experience: [k, T, B, ...].
      keys: [groups], one PRNG key for each group, for evictions.
      clock: [] i32, the caller's time, which is stored with the rows.

    Returns:
      The new state.
    """
    chex.assert_shape([experience.priority, experience.starts],
                      (len(group), self.unroll_length, self.envs))
    chex.assert_type(experience.starts, bool)
    frames, start = ring.write(state.ring, group, experience, clock)

    # Row t of the experience has the priority of the transition that began n_step rows before.
    steps = self.unroll_length + (self.margin if self.fifo else 0)
    row = ring.around(start[:, None] - self.n_step + jnp.arange(steps), self.rows)
    place = (row[..., None] * self.envs + jnp.arange(self.envs)).reshape(len(group), -1)
    error = experience.priority.reshape(len(group), -1)
    starts = experience.starts.reshape(len(group), -1)

    inserted = state.inserted.at[group].add(jnp.sum(starts, axis=1), mode='drop')
    state = state._replace(ring=frames, inserted=inserted)
    if not self.fifo:
      return self._to_slots(state, group, place, error, starts, keys)

    # The rows behind the new transitions get priority 0: the next n_step rows are incomplete, and
    # the oldest rows have lost frames of their stacks.
    value = jnp.where(starts, _mass(error, self.priority_exponent), 0.0)
    value = jnp.pad(value, ((0, 0), (0, self.margin * self.envs)))
    # The size changes by the new transitions, minus the overwritten ones.
    before = tree.get(state.priorities, group, place) > 0
    change = jnp.sum(value > 0, axis=1) - jnp.sum(before, axis=1)
    return state._replace(priorities=tree.put(state.priorities, group, place, value),
                          size=state.size.at[group].add(change, mode='drop'))

  def _to_slots(self, state: State, group: jax.Array, place: jax.Array, error: jax.Array,
                starts: jax.Array, keys: jax.Array) -> State:
    """Stores the transitions that begin in the given places of the ring, then evicts.

    Args:
      state: the state of all groups of the device.
      group: [k] i32, the groups to write to.
      place: [k, T * B] i32, places in the ring.
      error: [k, T * B] f32, absolute TD errors.
      starts: [k, T * B] bool, whether a transition begins in the place.
      keys: [groups], one PRNG key for each group, for evictions.
    """
    transitions = self._read(state.ring, jnp.broadcast_to(group[:, None], place.shape), place)
    slot_state, slot = slots.write(state.slots, group, transitions, starts)
    slot_state = slot_state._replace(eviction=tree.put(
        slot_state.eviction, group, slot, _mass(error, self.eviction_exponent)))
    priorities = tree.put(state.priorities, group, slot, _mass(error, self.priority_exponent))

    slot_state, priorities = slots.evict(slot_state, priorities, keys, self.capacity,
                                         place.shape[1])
    return state._replace(slots=slot_state, priorities=priorities,
                          size=slot_state.free.shape[1] - slot_state.room)

  def _read(self, frames: ring.Ring, group: jax.Array, place: jax.Array) -> Transition:
    """Reads the transitions that begin in places of the ring."""
    row, env = indexing.divide(place, self.envs)
    return ring.read(frames, group, row, env, self.stack, self.n_step, self.discount)

  def sample(self, state: State, keys: jax.Array, count: int) -> Sample:
    """Draws `count` transitions of each group in proportion to their priorities.

    Args:
      state: the state of all groups of the device.
      keys: [groups], one PRNG key for each group.
      count: transitions to draw in each group.
    """
    chex.assert_axis_dimension(state.size, 0, len(keys))
    place, probability = tree.draw(state.priorities, keys, count)
    group = jnp.broadcast_to(jnp.arange(len(keys))[:, None], place.shape)
    if self.fifo:
      return Sample(place, probability, self._read(state.ring, group, place))
    transition = jax.tree.map(lambda x: indexing.read(x, group, place), state.slots.transitions)
    return Sample(place, probability, transition)

  def set_priorities(self, state: State, place: jax.Array, error: jax.Array) -> State:
    """Sets the priorities of drawn transitions.

    Args:
      state: the state of all groups of the device.
      place: [groups, count] i32, places that `sample` returned, in ascending order. If a place
        occurs several times, its first error counts.
      error: [groups, count] f32, absolute TD errors.
    """
    chex.assert_rank(place, 2)
    chex.assert_equal_shape([place, error])
    groups = jnp.arange(len(place))
    # `tree.put` must not get a place twice; equal places are neighbours.
    previous = jnp.pad(place, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    place = jnp.where(place == previous, tree.NOWHERE, place)
    if not self.fifo:
      state = state._replace(slots=state.slots._replace(eviction=tree.put(
          state.slots.eviction, groups, place, _mass(error, self.eviction_exponent))))
    return state._replace(priorities=tree.put(
        state.priorities, groups, place, _mass(error, self.priority_exponent)))


def _mass(error: jax.Array, exponent: float) -> jax.Array:
  """Returns the weight of each transition in draws, [groups, n], from its TD error."""
  of_group = island('priorities')(lambda error: jnp.power(error + LEAST, exponent))
  return lax.map(of_group, error)
