"""Prioritised replay on the learner's devices: `init`, `add`, `draw`, `read`, `set_priorities`.

It implements Ape-X (1803.00933) for jitted programs. The environments are split into groups, the
same as for gradients. Each group has a replay of its own and gives an equal share of every batch.
So results do not depend on how many devices share the groups. Two kinds of eviction are possible:
'fifo' stores each frame once, in a ring; 'prioritised' stores whole items, in slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.losses.items import Items
from podracer_jit.numerics import indexing
from podracer_jit.numerics.islands import island
from podracer_jit.options import INT32_MAX
from podracer_jit.replay import ring, slots, tree
from podracer_jit.types import Experience

LEAST = 1e-6  # added to priorities, so that an item with a TD error of 0 can still be drawn


class State(NamedTuple):
  """State of the replays of one device's groups; leading axis [groups]."""

  ring: ring.Ring
  slots: slots.Slots | None  # for 'prioritised'; None for 'fifo', which draws from the ring
  # priority^exponent of each place. A place is a slot; or in the ring row / stride * B +
  # environment, for each row in which an item may begin.
  priorities: tree.Tree
  size: jax.Array  # [groups] i32: items that can be drawn
  inserted: jax.Array  # [groups] i32: items added since the beginning, see `Replay.add`


class Replay(NamedTuple):
  """Replay of each group, as functions of a `State`.

  'fifo' has rows for `capacity` items, valid or not, and further rows that cannot be drawn.
  'prioritised' has slots for `capacity` items, and further slots for one rollout, which an `add`
  fills before it evicts.
  """

  capacity: int  # items that a group keeps
  envs: int  # environments of a group, B
  unroll_length: int  # rows of the experience that is added, T
  stack: int  # frames in an observation
  items: Items
  eviction: str  # 'fifo' or 'prioritised'
  priority_exponent: float
  eviction_exponent: float  # exponent of priorities in draws for eviction, with 'prioritised'

  @property
  def fifo(self) -> bool:
    """True if items are drawn from the ring."""
    return self.eviction == 'fifo'

  @property
  def margin(self) -> int:
    """Number of rows that cannot be drawn: their end or their stack's frames are missing."""
    return self.items.length + self.stack

  @property
  def stride(self) -> int:
    """Number of rows from one in which an item may begin to the next such row."""
    return self.items.stride(self.unroll_length)

  @property
  def rows(self) -> int:
    """Number of rows of the ring, a multiple of the stride."""
    rows = -(-self.capacity // self.envs) * self.items.period if self.fifo else self.unroll_length
    return -(-(rows + self.margin) // self.stride) * self.stride

  @property
  def new_items(self) -> int:
    """Number of items of an environment that experience may complete."""
    return self.unroll_length // self.stride

  def init(self, groups: int, like: Experience) -> State:
    """Allocates empty replays for `groups` groups, shaped like `like`, one group's experience."""
    frames = ring.init(groups, self.rows, like,
                       self.unroll_length if self.items.is_sequence else 0)
    places = self.rows // self.stride * self.envs
    slot_state = None
    if not self.fifo:
      places = self.capacity + self.unroll_length * self.envs
      # One item has the shapes of a batch [1, ...] without its first axis.
      batch = jax.eval_shape(
          lambda: self._from_ring(frames, jnp.int32(0), jnp.zeros(1, jnp.int32)))
      item = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), batch)
      slot_state = slots.init(groups, places, item)

    # Each counter gets a buffer of its own, since states are donated.
    def zeros():
      return jnp.zeros(groups, jnp.int32)
    return State(ring=frames, slots=slot_state, priorities=tree.init(groups, places), size=zeros(),
                 inserted=zeros())

  def add(self, state: State, group: jax.Array, experience: Experience, keys: jax.Array,
          clock: jax.Array) -> State:
    """Adds experience and evicts items beyond the capacity.

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
                      (len(group), self.new_items, self.envs))
    chex.assert_type(experience.starts, bool)
    frames, start = ring.write(state.ring, group, experience, clock)

    # The items that are complete now began so many strides before the experience. Those behind them
    # get priority 0: the next rows have incomplete items, and the oldest rows have lost frames of
    # their stacks.
    delay = self.items.length // self.stride
    behind = delay + (self.stack - 1) // self.stride + 1 if self.fifo else 0
    row = start[:, None] + self.stride * (jnp.arange(self.new_items + behind) - delay)
    number, _ = indexing.divide(ring.around(row, self.rows), self.stride)
    place = (number[..., None] * self.envs + jnp.arange(self.envs)).reshape(len(group), -1)
    error = experience.priority.reshape(len(group), -1)
    starts = experience.starts.reshape(len(group), -1)

    inserted = state.inserted.at[group].add(jnp.sum(starts, axis=1), mode='drop')
    # Beyond 2^31 it goes on from 2^30: it stays large, and differs from addition to addition.
    inserted = jnp.where(inserted < 0, inserted & INT32_MAX | 2**30, inserted)
    state = state._replace(ring=frames, inserted=inserted)
    if not self.fifo:
      return self._to_slots(state, group, place, error, starts, keys)

    value = jnp.where(starts, _mass(error, self.priority_exponent), 0.0)
    value = jnp.pad(value, ((0, 0), (0, behind * self.envs)))
    # The size changes by the new items, minus the overwritten ones.
    before = tree.get(state.priorities, group, place) > 0
    change = jnp.sum(value > 0, axis=1) - jnp.sum(before, axis=1)
    return state._replace(priorities=tree.put(state.priorities, group, place, value),
                          size=state.size.at[group].add(change, mode='drop'))

  def _to_slots(self, state: State, group: jax.Array, place: jax.Array, error: jax.Array,
                starts: jax.Array, keys: jax.Array) -> State:
    """Stores the items that begin in the given places of the ring, then evicts.

    Args:
      state: the state of all groups of the device.
      group: [k] i32, the groups to write to.
      place: [k, T * B] i32, places in the ring.
      error: [k, T * B] f32, priorities.
      starts: [k, T * B] bool, whether an item begins in the place.
      keys: [groups], one PRNG key for each group, for evictions.
    """
    # One group at a time, since an island's shapes must not depend on how many there are.
    items = lax.map(lambda x: self._from_ring(state.ring, *x), (group, place))
    row, _ = self._row(place)
    added = indexing.read(state.ring.added, group[:, None], row)
    slot_state, slot = slots.write(state.slots, group, items, added, starts)
    slot_state = slot_state._replace(eviction=tree.put(
        slot_state.eviction, group, slot, _mass(error, self.eviction_exponent)))
    priorities = tree.put(state.priorities, group, slot, _mass(error, self.priority_exponent))

    slot_state, priorities = slots.evict(slot_state, priorities, keys, self.capacity,
                                         place.shape[1])
    return state._replace(slots=slot_state, priorities=priorities,
                          size=slot_state.free.shape[1] - slot_state.room)

  def _from_ring(self, frames: ring.Ring, group: jax.Array, place: jax.Array) -> Any:
    """Returns the items of a group that begin in places [n] of the ring."""
    row, env = self._row(place)
    return self.items.make(
        ring.Window(frames, self.stack, group, row, env, self.items.length))

  def _row(self, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns rows of the ring and environments, for places of the ring."""
    number, env = indexing.divide(place, self.envs)
    return number * self.stride, env

  def draw(self, state: State, keys: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Draws `count` items of each group in proportion to their priorities.

    Args:
      state: the state of all groups of the device.
      keys: [groups], one PRNG key for each group.
      count: items to draw in each group.

    Returns:
      Places within the group in ascending order [groups, count] i32, and the probability of each
      draw within the group [groups, count] f32.
    """
    chex.assert_axis_dimension(state.size, 0, len(keys))
    return tree.draw(state.priorities, keys, count)

  def read(self, state: State, group: jax.Array, place: jax.Array) -> Any:
    """Returns the items in places [n] i32 of a group [] i32 of the device."""
    chex.assert_rank([group, place], [0, 1])
    if self.fifo:
      return self._from_ring(state.ring, group, place)
    return jax.tree.map(lambda x: indexing.read(x, group, place), state.slots.transitions)

  def added(self, state: State, place: jax.Array) -> jax.Array:
    """Returns the times at which items were added, on the caller's clock, [groups, n] i32."""
    group = jnp.arange(len(place))[:, None]
    if not self.fifo:
      return indexing.read(state.slots.added, group, place)
    return indexing.read(state.ring.added, group, self._row(place)[0])

  def set_priorities(self, state: State, place: jax.Array, error: jax.Array) -> State:
    """Sets the priorities of drawn items.

    Args:
      state: the state of all groups of the device.
      place: [groups, count] i32, places that `draw` returned, in ascending order. If a place occurs
        several times, its first priority counts.
      error: [groups, count] f32, new priorities.
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
  """Returns the weight of each item in draws, [groups, n], from its priority."""
  of_group = island('priorities')(lambda error: jnp.power(error + LEAST, exponent))
  return lax.map(of_group, error)
