"""Sums and loops that give the same bits on any mesh.

XLA compiles the same arithmetic to other instructions in other programs. Three mechanisms here keep
it from that; each says why it is needed, on which version that was seen, and which test fails
without it. Other code uses them as they are and need not know how they work.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LARGEST = float(jnp.finfo(jnp.float32).max)
AXIS = 'learner'  # the name of the learner mesh's axis
FEW = 4096  # numbers: see `sliced`
MANY = 1 << 18  # numbers of an array that travels alone


def rounded(x: jax.Array) -> jax.Array:
  """Returns a product or a quotient rounded, for where it is added to something.

  In some fusions XLA contracts a product with a sum (FMA), in others it does not, and which fusions
  there are depends on the mesh. A product that is bounded first cannot be contracted; barriers and
  `where` do not help. Seen with jax 0.10.2 on CPUs. Without it
  `test_a_rounded_product_is_not_contracted_with_a_sum` and
  `test_moments_are_exact_on_any_placement` fail.
  """
  return jnp.clip(x, -LARGEST, LARGEST)


def pairwise_sum(x: jax.Array) -> jax.Array:
  """Sum over the leading axis, neighbours first, in one order whatever XLA would prefer."""
  return _add_neighbours(x, 1)[0]


def _add_neighbours(x: jax.Array, left: int) -> jax.Array:
  """[n, ...] -> [left, ...] at most: as far as that in the order of `pairwise_sum`."""
  while x.shape[0] > left:
    even = x.shape[0] // 2 * 2
    x = jnp.concatenate([x[:even:2] + x[1:even:2], x[even:]])
  return x


def branches(tree: Any) -> Any:
  """[groups on this device, ...] with as much added up as the order of `exact_sum` lets."""
  def add(x):  # a whole branch of the tree of sums: added before it travels
    return pairwise_sum(x)[None] if x.shape[0].bit_count() == 1 else x
  return jax.tree.map(add, tree)


def exact_sum(tree: Any, mesh_size: int) -> Any:
  """Sums [groups on this device, ...] over the groups of all devices, equal on any mesh."""
  if mesh_size == 1:
    return jax.tree.map(pairwise_sum, tree)
  leaves, treedef = jax.tree.flatten(branches(tree))
  together = collections.defaultdict(list)
  for i, x in enumerate(leaves):
    together[x.dtype, i if x[0].size >= MANY else None].append(i)
  for places in together.values():
    for i, total in zip(places, _sum_rows([leaves[i] for i in places], mesh_size), strict=True):
      leaves[i] = total
  return treedef.unflatten(leaves)


def sliced(rows: int, numbers: int, mesh_size: int) -> bool:
  """Whether each device adds a slice of so many numbers, of which every device has some rows.

  It then receives (D - 1) / D (rows + 2) numbers for each, in place of (D - 1) rows where every
  device adds them all. Two collectives and a copy pay where that is half as much, or less.
  """
  return numbers >= FEW and mesh_size * rows >= 2 * (rows + 2)


def _sum_rows(leaves: Sequence[jax.Array], mesh_size: int) -> list[jax.Array]:
  """Sums [rows on this device, ...] of one dtype over those of all devices.

  As one array: between processes each collective waits some milliseconds for the others to come,
  however little it sends (copying MANY would take longer). The last addition is every device's own,
  also of `sliced` sums: what follows the sum can be contracted with it, so that must find an
  addition there on any mesh.
  """
  flat = jnp.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)
  rows, size = flat.shape
  if sliced(rows, size, mesh_size):
    flat = jnp.pad(flat, ((0, 0), (0, -size % mesh_size)))
    here = lax.all_to_all(flat, AXIS, split_axis=1, concat_axis=0, tiled=True)
    flat = lax.all_gather(_add_neighbours(here, 2), AXIS, axis=1, tiled=True)
  else:
    flat = lax.all_gather(flat, AXIS, tiled=True)
  ends = np.cumsum([x[0].size for x in leaves])
  return [pairwise_sum(flat[:, end - x[0].size:end]).reshape(x.shape[1:])
          for x, end in zip(leaves, ends, strict=True)]


def plain_sum(tree: Any, mesh_size: int) -> Any:
  """The same with XLA's own all-reduce, whose order depends on the mesh."""
  def total(x):
    x = jnp.sum(x, axis=0)
    return lax.psum(x, AXIS) if mesh_size > 1 else x
  return jax.tree.map(total, tree)


def map_in_loop(function: Callable, xs: Any) -> Any:
  """Returns lax.map(function, xs), compiled alike for any number of turns.

  XLA unrolls a loop with one iteration and hoists loop invariants, which changes fusion and
  rounding. An optimization_barrier hides the trip count and the inputs; one padding row keeps the
  index from being constant-folded. Seen with jax 0.10.2 on CPUs. Without it
  `test_a_loop_of_any_number_of_turns_gives_the_same_bits` fails.

  Args:
    function: from one row of xs to a pytree of arrays.
    xs: arrays [turns, ...]; constants are not known to XLA inside of the loop.
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
