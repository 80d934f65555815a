"""Whole transitions in any order, the least important ones evicted first.

For tasks whose observations are small: what begins and what ends a transition are both stored.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.replay import tree
from podracer_jit.types import Transition


class Slots(NamedTuple):
  """Of all groups of a device."""

  held: Transition  # [groups, slots, ...]
  free: jax.Array  # [groups, slots] i32: a stack, the first `room` of which are free
  room: jax.Array  # [groups] i32
  eviction: tree.Tree  # by slot: what it is drawn by to be evicted; 0 of one that is free


def init(groups: int, slots: int, like: Transition) -> Slots:
  """Of free slots for transitions of the shapes of `like`, [...] of one."""
  held = jax.tree.map(lambda x: jnp.zeros((groups, slots, *x.shape), x.dtype), like)
  return Slots(held, jnp.tile(jnp.arange(slots, dtype=jnp.int32), (groups, 1)),
               jnp.full(groups, slots, jnp.int32), tree.init(groups, slots))


def write(slots: Slots, group: jax.Array, new: Transition, there: jax.Array
          ) -> tuple[Slots, jax.Array]:
  """Stores those of new [k, m, ...] that are `there` [k, m] in free slots: (slots, which [k, m]).

  Which of one that is not there, or has no room, is tree.NOWHERE.
  """
  room = slots.room.at[group].get(mode='fill', fill_value=0)[:, None]
  place = room - jnp.cumsum(there, axis=1)  # on the stack
  there &= place >= 0
  which = slots.free.at[group[:, None], jnp.maximum(place, 0)].get(mode='fill', fill_value=0)
  which = jnp.where(there, which, tree.NOWHERE)
  held = jax.tree.map(lambda old, x: old.at[group[:, None], which].set(x, mode='drop'),
                      slots.held, new)
  room = jnp.maximum(room[:, 0] - jnp.sum(there, axis=1), 0)
  return slots._replace(held=held, room=slots.room.at[group].set(room, mode='drop')), which


def evict(slots: Slots, priorities: tree.Tree, keys: jax.Array, most: int, count: int
          ) -> tuple[Slots, tree.Tree]:
  """Frees slots until each group holds at most `most`, and takes them out of the priorities.

  Drawn in proportion to the eviction tree, at most `count` at a time; `keys` [groups].
  """
  size, groups = slots.free.shape[1], jnp.arange(len(keys))

  def excess(slots):
    return jnp.maximum(size - slots.room - most, 0)

  def once(carry):
    slots, priorities, turn = carry
    now = jax.vmap(lambda key: jax.random.fold_in(key, turn))(keys)
    leaf = jnp.sort(tree.draw(slots.eviction, now, count)[0], axis=1)
    first = jnp.concatenate([jnp.ones((len(keys), 1), bool), leaf[:, 1:] != leaf[:, :-1]], axis=1)
    # Of more than are too many those that go are drawn too, lest low slots go first.
    order = jnp.argsort(jnp.where(first, jax.vmap(
        lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (count,)))(now), 2.0), axis=1)
    leaf, first = (jnp.take_along_axis(x, order, axis=1) for x in (leaf, first))
    gone = first & (jnp.arange(count) < excess(slots)[:, None])
    leaf, zero = jnp.where(gone, leaf, tree.NOWHERE), jnp.zeros(leaf.shape)
    place = jnp.where(gone, slots.room[:, None] + jnp.cumsum(gone, axis=1) - 1, tree.NOWHERE)
    free = slots.free.at[groups[:, None], place].set(leaf, mode='drop')
    slots = Slots(slots.held, free, slots.room + jnp.sum(gone, axis=1),
                  tree.put(slots.eviction, groups, leaf, zero))
    return slots, tree.put(priorities, groups, leaf, zero), turn + 1

  return lax.while_loop(lambda carry: jnp.any(excess(carry[0]) > 0), once,
                        (slots, priorities, 0))[:2]
