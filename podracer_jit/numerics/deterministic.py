"""Sums over devices that give the same bits on any mesh.

They are additions alone, in an order that is written down, and what they add comes out of islands
(`numerics.islands`); so nothing here can be compiled to other bits. Without the fixed order
`test_a_sum_by_slices_is_the_pairwise_one_on_any_mesh` fails.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

AXIS = 'learner'  # the name of the learner mesh's axis
FEW = 4096  # numbers: see `sliced`
MANY = 1 << 18  # numbers of an array that travels alone


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
  however little it sends (copying MANY would take longer).
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
