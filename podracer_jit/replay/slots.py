"""Slots that hold whole items, in any order; unimportant items are evicted first.

All observations of an item are stored, so this suits tasks with small observations. Each device
stores an equal part of the slots, in whole blocks. Any slot takes any item, so a device may store
items of environments that it has no rows of. Items are evicted by draws of
priority^eviction_exponent until the capacity is kept; there are slots for the items of 1 + spare
rounds beyond the capacity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.numerics import indexing
from podracer_jit.numerics.groups import Groups
from podracer_jit.replay import tree


class Slots(NamedTuple):
  """Slots of a replay; `SHARDED` tells which arrays have a device's own blocks only."""

  transitions: Any  # the items, [blocks, slots / blocks, ...]; whatever a free slot has
  added: jax.Array  # [1, slots] i32: time at which the item was added, on the caller's clock
  free: jax.Array  # [1, slots] i32: a stack of slots; the first `room` entries are free slots
  room: jax.Array  # [1] i32: number of free slots
  eviction: tree.Tree  # weight of each slot in draws for eviction; 0 for a free slot


# All devices know which slots are free; the items are the owner's.
SHARDED = Slots(True, False, False, False, False)


def init(blocks: int, slots: int, like: Any) -> Slots:
  """Allocates free slots for items shaped like `like`, one item [...]."""
  each = -(-slots // blocks)
  return Slots(
      transitions=jax.tree.map(lambda x: jnp.zeros((blocks, each, *x.shape), x.dtype), like),
      added=jnp.zeros((1, slots), jnp.int32),
      free=jnp.arange(slots, dtype=jnp.int32)[None],
      room=jnp.full(1, slots, jnp.int32),
      eviction=tree.init(1, slots))


def read(slots: Slots, blocks: Groups, slot: jax.Array) -> Any:
  """Returns the items [n, ...] of slots [n], on any device."""
  block, place = indexing.divide(slot, jax.tree.leaves(slots.transitions)[0].shape[1])
  return blocks.fetch(
      lambda *index: jax.tree.map(lambda x: indexing.read(x, *index), slots.transitions),
      block, place)


def write(slots: Slots, blocks: Groups, items: Any, added: jax.Array, stored: jax.Array
          ) -> tuple[Slots, jax.Array]:
  """Stores items in free slots; all devices store the same.

  Args:
    slots: the slots.
    blocks: the parts of the storage, seen from this device.
    items: [m, ...].
    added: [m] i32, see `Slots`.
    stored: [m] bool, the items to store.

  Returns:
    The slots, and each item's slot [m] i32; tree.NOWHERE if it is not stored.
  """
  chex.assert_rank(stored, 1)
  chex.assert_type(stored, bool)
  chex.assert_equal_shape_prefix([stored, added, *jax.tree.leaves(items)], 1)

  # Items pop free slots from the end of the stack.
  top = slots.room - jnp.cumsum(stored)
  stored &= top >= 0
  slot = indexing.read(slots.free, 0, jnp.maximum(top, 0))
  slot = jnp.where(stored, slot, tree.NOWHERE)
  block, place = indexing.divide(slot, jax.tree.leaves(slots.transitions)[0].shape[1])
  block = blocks.local_index(block)

  return slots._replace(
      transitions=jax.tree.map(lambda x, new: indexing.write(x, block, place, value=new),
                               slots.transitions, items),
      added=indexing.write(slots.added, 0, slot, value=added),
      room=jnp.maximum(slots.room - jnp.sum(stored), 0)), slot


def evict(slots: Slots, priorities: tree.Tree, key: jax.Array, most: int, count: int
          ) -> tuple[Slots, tree.Tree]:
  """Evicts items until at most `most` are left.

  They are drawn in proportion to the eviction tree.

  Args:
    slots: the slots.
    priorities: priorities of all slots, in which evicted items get zero.
    key: PRNG key.
    most: items that are left.
    count: items drawn at a time.

  Returns:
    The slots and the priorities.
  """
  size = slots.free.shape[1]
  group = jnp.arange(1)

  def excess(slots):
    """Returns how many items must still be evicted, [1] i32."""
    return jnp.maximum(size - slots.room - most, 0)

  def once(carry):
    slots, priorities, turn = carry
    key_of_turn = jax.random.fold_in(key, turn)
    leaf = jnp.sort(tree.draw(slots.eviction, key_of_turn[None], count)[0][0])

    # A slot may be drawn several times; only the first draw counts.
    first = jnp.concatenate([jnp.ones(1, bool), leaf[1:] != leaf[:-1]])

    # If more slots were drawn than must be freed, pick among them at random; otherwise low indices
    # would be evicted first.
    random = jax.random.uniform(jax.random.fold_in(key_of_turn, 2), (count,))  # `draw` has 0 and 1
    # Repeated draws go to the end: 2 is above all random numbers.
    order = jnp.argsort(jnp.where(first, random, 2.0))
    leaf = indexing.read(leaf, order)
    evicted = indexing.read(first, order) & (jnp.arange(count) < excess(slots))
    leaf = jnp.where(evicted, leaf, tree.NOWHERE)
    zero = jnp.zeros((1, count))

    # Push the freed slots onto the stack.
    place = jnp.where(evicted, slots.room + jnp.cumsum(evicted) - 1, tree.NOWHERE)
    slots = slots._replace(
        free=indexing.write(slots.free, 0, place, value=leaf),
        room=slots.room + jnp.sum(evicted),
        eviction=tree.put(slots.eviction, group, leaf[None], zero))
    return slots, tree.put(priorities, group, leaf[None], zero), turn + 1

  return lax.while_loop(lambda carry: jnp.any(excess(carry[0]) > 0), once,
                        (slots, priorities, 0))[:2]
