"""Slots that hold whole items, in any order; unimportant items are evicted first.

All observations of an item are stored, so this suits tasks with small observations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.numerics import indexing
from podracer_jit.replay import tree


class Slots(NamedTuple):
  """Slots of all groups of a device."""

  transitions: Any  # the items, [groups, slots, ...]; whatever a free slot has
  added: jax.Array  # [groups, slots] i32: time at which the item was added, on the caller's clock
  free: jax.Array  # [groups, slots] i32: a stack of slots; the first `room` entries are free slots
  room: jax.Array  # [groups] i32: number of free slots
  eviction: tree.Tree  # weight of each slot in draws for eviction; 0 for a free slot


def init(groups: int, slots: int, like: Any) -> Slots:
  """Allocates free slots for items shaped like `like`, one item [...]."""
  return Slots(
      transitions=jax.tree.map(lambda x: jnp.zeros((groups, slots, *x.shape), x.dtype), like),
      added=jnp.zeros((groups, slots), jnp.int32),
      free=jnp.tile(jnp.arange(slots, dtype=jnp.int32), (groups, 1)),
      room=jnp.full(groups, slots, jnp.int32),
      eviction=tree.init(groups, slots))


def write(slots: Slots, group: jax.Array, items: Any, added: jax.Array, stored: jax.Array
          ) -> tuple[Slots, jax.Array]:
  """Stores items in free slots.

  Args:
    slots: the slots of all groups of the device.
    group: [k] i32, the groups to write to, all different; out-of-range groups are ignored.
    items: [k, m, ...].
    added: [k, m] i32, see `Slots`.
    stored: [k, m] bool, the items to store.

  Returns:
    The slots, and each item's slot [k, m] i32; tree.NOWHERE if it is not stored.
  """
  chex.assert_rank([group, stored], [1, 2])
  chex.assert_type(stored, bool)
  chex.assert_equal_shape_prefix([stored, added, *jax.tree.leaves(items)], 2)

  # Items pop free slots from the end of the stack.
  room = indexing.read_or(0, slots.room, group)[:, None]
  top = room - jnp.cumsum(stored, axis=1)
  stored &= top >= 0
  slot = indexing.read_or(0, slots.free, group[:, None], jnp.maximum(top, 0))
  slot = jnp.where(stored, slot, tree.NOWHERE)

  def put(field, x):
    return indexing.write(field, group[:, None], slot, value=x)

  room = jnp.maximum(room[:, 0] - jnp.sum(stored, axis=1), 0)
  slots = slots._replace(transitions=jax.tree.map(put, slots.transitions, items),
                         added=put(slots.added, added),
                         room=indexing.write(slots.room, group, value=room))
  return slots, slot


def evict(slots: Slots, priorities: tree.Tree, keys: jax.Array, most: int, count: int
          ) -> tuple[Slots, tree.Tree]:
  """Evicts items until each group holds at most `most`.

  They are drawn in proportion to the eviction tree.

  Args:
    slots: the slots of all groups of the device.
    priorities: priorities of all slots, in which evicted items get zero.
    keys: [groups], one PRNG key for each group.
    most: items that a group may hold.
    count: items drawn at a time.

  Returns:
    The slots and the priorities.
  """
  chex.assert_axis_dimension(slots.room, 0, len(keys))
  size = slots.free.shape[1]
  groups = jnp.arange(len(keys))

  def excess(slots):
    """Returns how many items each group must still evict, [groups] i32."""
    return jnp.maximum(size - slots.room - most, 0)

  def once(carry):
    slots, priorities, turn = carry
    turn_keys = jax.vmap(lambda key: jax.random.fold_in(key, turn))(keys)
    leaf = jnp.sort(tree.draw(slots.eviction, turn_keys, count)[0], axis=1)

    # A slot may be drawn several times; only the first draw counts.
    first = jnp.concatenate([jnp.ones((len(keys), 1), bool), leaf[:, 1:] != leaf[:, :-1]], axis=1)

    # If more slots were drawn than must be freed, pick among them at random; otherwise low indices
    # would be evicted first.
    random = jax.vmap(
        lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (count,)))(turn_keys)
    # Repeated draws go to the end: 2 is above all random numbers.
    order = jnp.argsort(jnp.where(first, random, 2.0), axis=1)
    leaf = jnp.take_along_axis(leaf, order, axis=1)
    first = jnp.take_along_axis(first, order, axis=1)
    evicted = first & (jnp.arange(count) < excess(slots)[:, None])
    leaf = jnp.where(evicted, leaf, tree.NOWHERE)
    zero = jnp.zeros(leaf.shape)

    # Push the freed slots onto the stack.
    place = jnp.where(evicted, slots.room[:, None] + jnp.cumsum(evicted, axis=1) - 1,
                      tree.NOWHERE)
    free = indexing.write(slots.free, groups[:, None], place, value=leaf)
    slots = slots._replace(free=free, room=slots.room + jnp.sum(evicted, axis=1),
                           eviction=tree.put(slots.eviction, groups, leaf, zero))
    return slots, tree.put(priorities, groups, leaf, zero), turn + 1

  return lax.while_loop(lambda carry: jnp.any(excess(carry[0]) > 0), once,
                        (slots, priorities, 0))[:2]
