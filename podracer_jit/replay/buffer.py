"""Prioritised replay on the learner's devices: `init`, `add`, `draw`, `read`, `set_priorities`.

It implements Ape-X (1803.00933) for jitted programs. There is one distribution over all items, in
one sum tree, which all devices of the learner have. The rows, which take nearly all of the memory,
are split by environment: each device stores some blocks of environments, and sends what others
draw. So neither draws nor their order depend on the devices, nor on the blocks. Two kinds of
eviction are possible: 'fifo' stores each frame once, in a ring; 'prioritised' stores whole items,
in slots.

Priorities are (|TD error| + LEAST)^exponent. An `add` cuts the replay to its capacity, counted in
items, of which 'fifo' also counts places of the ring where none begins; or `evict` does, every so
many gradient steps, as in the paper.

flashbax's prioritised buffer does not fit: it gives new transitions the largest priority so far
instead of their own, its tree adds differences to sums, and it evicts by age only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from podracer_jit.losses.items import Items
from podracer_jit.numerics import indexing
from podracer_jit.numerics.deterministic import AXIS
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.options import INT32_MAX
from podracer_jit.replay import ring, slots, tree
from podracer_jit.types import Experience

LEAST = 1e-6  # added to priorities, so that an item with a TD error of 0 can still be drawn


class State(NamedTuple):
  """State of a replay, seen from one device; `SHARDED` tells what differs between devices."""

  ring: ring.Ring
  slots: slots.Slots | None  # for 'prioritised'; None for 'fifo', which draws from the ring
  # One tree, of priority^exponent of each place. A place is a slot; or in the ring
  # ((row / stride) * environments + environment) * copies + copy, for each row in which an item may
  # begin.
  priorities: tree.Tree
  size: jax.Array  # [1] i32: items that can be drawn
  inserted: jax.Array  # [1] i32: items added since the beginning, see `Replay.add`


# Whether each device has its own blocks; if not, all devices have the same.
SHARDED = State(ring.SHARDED, slots.SHARDED, False, False, False)


class Replay(NamedTuple):
  """Replay of all environments, as functions of a `State`.

  'fifo' has rows for `capacity` items, valid or not, and further rows that cannot be drawn.
  'prioritised' has slots for `capacity` items, and further slots for one rollout, which an `add`
  fills before it evicts. With a `spare` both have room for so many further rollouts, which `evict`
  removes.
  """

  capacity: int  # items that are kept; each copy counts
  blocks: Groups  # of all environments, seen from this device
  unroll_length: int  # rows of the experience that is added, T
  stack: int  # frames in an observation
  items: Items
  eviction: str  # 'fifo' or 'prioritised'
  priority_exponent: float
  eviction_exponent: float  # exponent of priorities in draws for eviction, with 'prioritised'
  copies: int = 1  # times that each item is stored, with priorities of their own
  spare: int = 0  # rollouts of all environments that are stored beyond the capacity

  @property
  def fifo(self) -> bool:
    """True if items are drawn from the ring."""
    return self.eviction == 'fifo'

  @property
  def envs(self) -> int:
    """Number of environments on all devices, E."""
    return self.blocks.count * self.blocks.envs

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
    return self._rows(self.spare if self.fifo else 0)

  def _rows(self, spare: int) -> int:
    """Returns the rows of the ring with room for so many rollouts beyond the capacity."""
    rows = self.unroll_length
    if self.fifo:
      rows = -(-self.capacity // (self.envs * self.copies)) * self.items.period
    rows += spare * self.unroll_length
    return -(-(rows + self.margin) // self.stride) * self.stride

  @property
  def new_items(self) -> int:
    """Number of items of an environment that experience may complete, without copies."""
    return self.unroll_length // self.stride

  @property
  def round(self) -> int:
    """Number of items that the experience of all environments may complete, with copies."""
    return self.new_items * self.envs * self.copies

  @property
  def _delay(self) -> int:
    """Strides from the row in which an item begins to the row that completes it."""
    return self.items.length // self.stride

  @property
  def _behind(self) -> int:
    """Strides behind the newest items in which no item can begin.

    The next rows have incomplete items, and the oldest rows have lost frames of their stacks.
    """
    return self._delay + (self.stack - 1) // self.stride + 1 if self.fifo else 0

  def specs(self) -> State:
    """Returns which arrays of a state are sharded by their leading axis, for `shard_map`."""
    specs = jax.tree.map(
        lambda is_sharded: PartitionSpec(AXIS) if is_sharded else PartitionSpec(), SHARDED)
    return specs._replace(slots=None) if self.fifo else specs

  def init(self, like: Experience) -> State:
    """Allocates an empty replay on all devices, shaped like `like`, one block's experience."""
    blocks = self.blocks.count
    frames = ring.init(blocks, self.rows, like,
                       self.unroll_length if self.items.is_sequence else 0)
    places = self.rows // self.stride * self.envs * self.copies
    slot_state = None
    if not self.fifo:
      places = self.capacity + (1 + self.spare) * self.round
      # One item has the shapes of a batch [1, ...] without its first axis.
      alone = self._replace(blocks=Groups(blocks, self.blocks.envs))
      batch = jax.eval_shape(lambda: alone.from_ring(frames, jnp.zeros(1, jnp.int32)))
      item = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), batch)
      slot_state = slots.init(blocks, places, item)

    # Each counter gets a buffer of its own, since states are donated.
    def zeros():
      return jnp.zeros(1, jnp.int32)
    return State(ring=frames, slots=slot_state, priorities=tree.init(1, places), size=zeros(),
                 inserted=zeros())

  def add(self, state: State, number: jax.Array, experience: Experience, key: jax.Array,
          clock: jax.Array, is_sharded: bool = False) -> State:
    """Adds experience, and evicts items for which there is no room.

    Args:
      state: the state.
      number: [k] i32, the blocks of the experience among all blocks, all different.
      experience: [k, T, B, ...].
      key: PRNG key, for evictions.
      clock: [] i32, the caller's time, which is stored with the rows.
      is_sharded: True if each device adds the experience of its own blocks; False if all devices
        have the same experience, and each stores what is its own.

    Returns:
      The new state.
    """
    chex.assert_shape([experience.priority, experience.starts],
                      (len(number), self.new_items, self.blocks.envs))
    chex.assert_type(experience.starts, bool)
    start = ring.first_row(state.ring, number, experience.began[:, 0, 0], self.unroll_length)
    frames = ring.write(state.ring, self.blocks.local_index(number), experience, start)

    # All devices note what there is now.
    known = number, start, experience.priority, experience.starts
    number, start, error, starts = self.blocks.gather(known) if is_sharded else known
    frames = ring.advance(frames, number, start, self.unroll_length, clock)
    error, starts = self._by_row(error), self._by_row(starts)

    inserted = state.inserted + self.copies * jnp.sum(starts)
    # Beyond 2^31 it goes on from 2^30: it stays large, and differs from addition to addition.
    inserted = jnp.where(inserted < 0, inserted & INT32_MAX | 2**30, inserted)
    state = state._replace(ring=frames, inserted=inserted)
    # The items that are complete now began so many strides before the experience.
    row = start[:, None] + self.stride * (
        jnp.arange(self.new_items + self._behind) - self._delay)
    place = self._places(number, row)
    if not self.fifo:
      return self._to_slots(state, place, error, starts, key)

    value = jnp.where(starts, _mass(error, self.priority_exponent), 0.0)
    value = self._copied(jnp.pad(value, (0, len(place) - len(value))))
    return self._set_mass(state, self._copies_of(place), value)

  def evict(self, state: State, key: jax.Array, due: jax.Array) -> State:
    """Evicts the items beyond the capacity at once, if that is due; only with a `spare`.

    Args:
      state: the state.
      key: PRNG key.
      due: [] bool; otherwise the state does not change.
    """
    chex.assert_rank(due, 0)
    if not self.fifo:
      most = jnp.where(due, self.capacity, INT32_MAX)
      return self._evict_slots(state, key, most)
    # The oldest rows, which a ring without the spare would not have any more.
    count = (self.rows - self._rows(0)) // self.stride
    row = state.ring.head[:, None] + self.stride * (
        jnp.arange(count) + self._behind - self._delay)
    place = self._copies_of(self._places(jnp.arange(self.blocks.count), row))

    def once(carry):
      priorities, size, _ = carry
      after = self._set_mass(state._replace(priorities=priorities, size=size), place,
                             jnp.zeros(len(place)))
      return after.priorities, after.size, jnp.bool_(False)

    # A loop changes the tree in place; a conditional might copy it.
    priorities, size, _ = lax.while_loop(
        lambda carry: carry[2], once, (state.priorities, state.size, due))
    return state._replace(priorities=priorities, size=size)

  def _set_mass(self, state: State, place: jax.Array, value: jax.Array) -> State:
    """Sets the weights [m] of places [m] of the ring; 0 removes an item."""
    group = jnp.arange(1)
    before = tree.get(state.priorities, group, place[None]) > 0
    # The size changes by the new items, minus the overwritten ones.
    change = jnp.sum(value > 0) - jnp.sum(before)
    # The condition is always false. It makes the writes depend on what was read, so XLA changes the
    # tree in place.
    place = jnp.where(change < -len(place), tree.NOWHERE, place)
    return state._replace(priorities=tree.put(state.priorities, group, place[None], value[None]),
                          size=state.size + change)

  def _to_slots(self, state: State, place: jax.Array, error: jax.Array, starts: jax.Array,
                key: jax.Array) -> State:
    """Stores the items that begin in the given places of the ring, then evicts.

    Args:
      state: the state.
      place: [m] i32, places in the ring, without copies.
      error: [m] f32, priorities.
      starts: [m] bool, whether an item begins in the place.
      key: PRNG key, for evictions.
    """
    items = jax.tree.map(self._copied, self.from_ring(state.ring, place))
    added = self._copied(self._added_to_ring(state.ring, place))
    slot_state, slot = slots.write(state.slots, self.blocks, items, added, self._copied(starts))
    state = self._set_slots(state._replace(slots=slot_state), slot, self._copied(error))
    return self._evict_slots(state, key, self.capacity + self.spare * self.round)

  def _evict_slots(self, state: State, key: jax.Array, most: int | jax.Array) -> State:
    """Evicts items by their priorities until at most `most` are left."""
    slot_state, priorities = slots.evict(state.slots, state.priorities, key, most, self.round)
    return state._replace(slots=slot_state, priorities=priorities,
                          size=slot_state.free.shape[1] - slot_state.room)

  def _set_slots(self, state: State, slot: jax.Array, error: jax.Array) -> State:
    """Sets the weights of slots [m], all different, from their priorities [m]."""
    group = jnp.arange(1)
    slot_state = state.slots._replace(eviction=tree.put(
        state.slots.eviction, group, slot[None], _mass(error, self.eviction_exponent)[None]))
    return state._replace(slots=slot_state, priorities=tree.put(
        state.priorities, group, slot[None], _mass(error, self.priority_exponent)[None]))

  def _by_row(self, x: jax.Array) -> jax.Array:
    """Returns an array [k, n, B] of blocks as [n * k * B], in the order of rows."""
    return jnp.moveaxis(x, 0, 1).reshape(-1)

  def _places(self, number: jax.Array, row: jax.Array) -> jax.Array:
    """Returns the places of all items that may begin in rows, without copies, in their order.

    Args:
      number: [k] i32, blocks among all blocks.
      row: [k, n] i32, rows of the blocks, from minus the number of rows on.
    """
    of_block = number[:, None] * self.blocks.envs + jnp.arange(self.blocks.envs)
    row, _ = indexing.divide(ring.wrapped(row, self.rows), self.stride)
    return self._by_row(row[..., None] * self.envs + of_block[:, None])

  def _copied(self, x: jax.Array) -> jax.Array:
    """Returns an array [m, ...] of items with a row for each copy, [m * copies, ...]."""
    return jnp.repeat(x, self.copies, axis=0) if self.copies > 1 else x

  def _copies_of(self, place: jax.Array) -> jax.Array:
    """Returns the places of all copies [m * copies] of places [m] without copies."""
    if self.copies == 1:
      return place
    return (place[:, None] * self.copies + jnp.arange(self.copies)).reshape(-1)

  def from_ring(self, frames: ring.Ring, place: jax.Array) -> Any:
    """Returns the items that begin in places [n] of the ring, without copies."""
    number, row, env = self._where(place)
    return self.items.make(ring.Window(
        frames, self.stack, self.blocks, number, row, env, self.items.length))

  def _added_to_ring(self, frames: ring.Ring, place: jax.Array) -> jax.Array:
    """Returns the times at which rows were added, of places [n] without copies."""
    number, row, _ = self._where(place)
    return indexing.read(frames.added, number, row)

  def _where(self, place: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns blocks, rows of the ring, and environments within the block, of places [n]."""
    row, env = indexing.divide(place, self.envs)
    number, env = indexing.divide(env, self.blocks.envs)
    return number, row * self.stride, env

  def _original(self, place: jax.Array) -> jax.Array:
    """Returns the places without copies of places [n] of the ring."""
    return indexing.divide(place, self.copies)[0]

  def draw(self, state: State, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Draws `count` items in proportion to their priorities; all devices draw the same.

    Args:
      state: the state.
      key: PRNG key.
      count: items to draw.

    Returns:
      Places in ascending order [count] i32, and the probability of each draw [count] f32.
    """
    place, probability = tree.draw(state.priorities, key[None], count)
    return place[0], probability[0]

  def read(self, state: State, place: jax.Array) -> Any:
    """Returns the items in places [n] i32, which may differ between devices."""
    chex.assert_rank(place, 1)
    if self.fifo:
      return self.from_ring(state.ring, self._original(place))
    return slots.read(state.slots, self.blocks, place)

  def added(self, state: State, place: jax.Array) -> jax.Array:
    """Returns the times at which items were added, on the caller's clock, [n] i32."""
    if not self.fifo:
      return indexing.read(state.slots.added, 0, place)
    return self._added_to_ring(state.ring, self._original(place))

  def set_priorities(self, state: State, place: jax.Array, error: jax.Array) -> State:
    """Sets the priorities of drawn items; all devices set the same.

    Args:
      state: the state.
      place: [n] i32, places that `draw` returned, in ascending order. If a place occurs several
        times, its first priority counts.
      error: [n] f32, new priorities.
    """
    chex.assert_rank(place, 1)
    chex.assert_equal_shape([place, error])
    # `tree.put` must not get a place twice; equal places are neighbours.
    previous = jnp.pad(place, (1, 0), constant_values=-1)[:-1]
    place = jnp.where(place == previous, tree.NOWHERE, place)
    if not self.fifo:
      return self._set_slots(state, place, error)
    mass = _mass(error, self.priority_exponent)
    return state._replace(priorities=tree.put(
        state.priorities, jnp.arange(1), place[None], mass[None]))


def _mass(error: jax.Array, exponent: float) -> jax.Array:
  """Returns the weight of each item in draws, [n], from its priority."""
  return island('priorities')(lambda error: jnp.power(error + LEAST, exponent))(error)
