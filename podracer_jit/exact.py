"""Sums and loops that give the same bits on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LARGEST = float(jnp.finfo(jnp.float32).max)
AXIS = 'learner'  # the name of the learner mesh's axis


def rounded(x: jax.Array) -> jax.Array:
  """x, a product or a quotient, as a number of its own: for where it is added to something.

  In some fusions a product is contracted with a sum (FMA), in others not, and which fusions there
  are depends on the mesh. It cannot be where it is bounded first; barriers do not help, nor does
  `where`.
  """
  return jnp.clip(x, -LARGEST, LARGEST)


def pairwise_sum(x: jax.Array) -> jax.Array:
  """Sum over the leading axis, neighbours first, in one order whatever XLA would prefer."""
  while x.shape[0] > 1:
    even = x.shape[0] // 2 * 2
    x = jnp.concatenate([x[:even:2] + x[1:even:2], x[even:]])
  return x[0]


def branches(tree: Any) -> Any:
  """[groups on this device, ...] with as much added up as the order of `exact_sum` lets."""
  def add(x):  # a whole branch of the tree of sums: added before it travels
    return pairwise_sum(x)[None] if x.shape[0].bit_count() == 1 else x
  return jax.tree.map(add, tree)


def exact_sum(tree: Any, mesh_size: int) -> Any:
  """Sums [groups on this device, ...] over the groups of all devices, equal on any mesh."""
  if mesh_size > 1:
    tree = jax.tree.map(lambda x: lax.all_gather(x, AXIS, tiled=True), branches(tree))
  return jax.tree.map(pairwise_sum, tree)


def plain_sum(tree: Any, mesh_size: int) -> Any:
  """The same with XLA's own all-reduce, whose order depends on the mesh."""
  def total(x):
    x = jnp.sum(x, axis=0)
    return lax.psum(x, AXIS) if mesh_size > 1 else x
  return jax.tree.map(total, tree)


def map_in_loop(function: Callable, xs: Any) -> Any:
  """lax.map that XLA compiles alike for any number of turns.

  A single turn it would take out of the loop, where other fusions give other last bits. So the
  number of turns and what xs holds are hidden (of constant rows it would take out what does not
  depend on the turn), and xs and ys have a row too many, lest the index of the only one be known.
  """
  count = jax.tree.leaves(xs)[0].shape[0]
  xs = lax.optimization_barrier(jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), xs))

  def turn(carry):
    i, ys = carry
    y = function(jax.tree.map(lambda x: x[i], xs))
    return i + 1, jax.tree.map(lambda ys, y: ys.at[i].set(y), ys, y)

  shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], xs))
  ys = jax.tree.map(lambda s: jnp.zeros((count + 1, *s.shape), s.dtype), shapes)
  end = lax.optimization_barrier(jnp.int32(count))
  _, ys = lax.while_loop(lambda carry: carry[0] < end, turn, (jnp.int32(0), ys))
  return jax.tree.map(lambda ys: ys[:count], ys)
