"""Deterministic sums over devices: the same bits on any mesh.

The sums consist of additions in one fixed order, and their inputs come out of islands
(`numerics.islands`), so XLA cannot change their rounding.
`test_exact_sum_equals_the_pairwise_sum_on_any_mesh` fails without the fixed order.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Name of the learner mesh's axis.
AXIS = 'learner'
# Numbers from which an array may be summed by slices; see `use_reduce_scatter`.
SLICE_FROM = 4096
# Numbers from which an array is sent by a collective of its own.
JOIN_BELOW = 1 << 18


def pairwise_sum(x: jax.Array) -> jax.Array:
  """Returns the sum of x [n, ...] over the leading axis, [...].

  Neighbours are added first, then neighbours of the results, and so on. The order depends on n
  alone.
  """
  chex.assert_axis_dimension_gt(x, 0, 0)
  return _add_neighbours(x, 1)[0]


def _add_neighbours(x: jax.Array, most: int) -> jax.Array:
  """Adds neighbours of x [n, ...] in the order of `pairwise_sum` until at most `most` remain."""
  while x.shape[0] > most:
    even = x.shape[0] // 2 * 2
    sums = x[:even:2] + x[1:even:2]
    # A last row without a neighbour waits for the next round.
    x = sums if even == x.shape[0] else jnp.concatenate([sums, x[even:]])
  return x


def partial_sums(tree: Any) -> Any:
  """Adds this device's groups, if their number is a power of two.

  Args:
    tree: arrays [groups on this device, ...].

  Returns:
    Arrays [1, ...] if the number of groups is a power of two, else `tree` unchanged.
  """
  def add(x):
    # A power of two of aligned groups is one subtree of the pairwise sum, so it can be added before
    # it is sent.
    return pairwise_sum(x)[None] if x.shape[0].bit_count() == 1 else x
  return jax.tree.map(add, tree)


def exact_sum(tree: Any, mesh_size: int) -> Any:
  """Returns sums over the groups of all devices, with the same bits on any mesh.

  Args:
    tree: arrays [groups on this device, ...].
    mesh_size: devices of the mesh; with more than one, call it inside `shard_map`.

  Returns:
    Arrays [...], equal on all devices.
  """
  chex.assert_equal_shape(jax.tree.leaves(tree), dims=0)
  if mesh_size == 1:
    return jax.tree.map(pairwise_sum, tree)

  leaves, treedef = jax.tree.flatten(partial_sums(tree))
  # Small arrays of one type share a collective; each large array has its own.
  together = collections.defaultdict(list)
  for i, x in enumerate(leaves):
    together[x.dtype, i if x[0].size >= JOIN_BELOW else None].append(i)
  for places in together.values():
    for i, total in zip(places, _sum_rows([leaves[i] for i in places], mesh_size), strict=True):
      leaves[i] = total
  return treedef.unflatten(leaves)


def use_reduce_scatter(rows: int, numbers: int, mesh_size: int) -> bool:
  """Returns whether `exact_sum` lets each device add one slice of the numbers.

  With D devices, a device then receives (D - 1) / D * (rows + 2) values for each number. If every
  device adds everything, it receives (D - 1) * rows. Two collectives and a copy pay off if that is
  at most half as much.

  Args:
    rows: partial sums on each device.
    numbers: how many numbers each partial sum has.
    mesh_size: D.
  """
  return numbers >= SLICE_FROM and mesh_size * rows >= 2 * (rows + 2)


def _sum_rows(leaves: Sequence[jax.Array], mesh_size: int) -> list[jax.Array]:
  """Returns the sums of arrays [rows on this device, ...] of one dtype over all devices, [...].

  The arrays are joined to one: between processes each collective waits some milliseconds for the
  other processes, however little it sends. Copying JOIN_BELOW numbers would take longer than that.
  """
  chex.assert_type(leaves, leaves[0].dtype)
  flat = jnp.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)
  rows, size = flat.shape
  if use_reduce_scatter(rows, size, mesh_size):
    flat = jnp.pad(flat, ((0, 0), (0, -size % mesh_size)))
    own_slice = lax.all_to_all(flat, AXIS, split_axis=1, concat_axis=0, tiled=True)
    # Two partial sums of each slice remain, which every device adds below.
    flat = lax.all_gather(_add_neighbours(own_slice, 2), AXIS, axis=1, tiled=True)
  else:
    flat = lax.all_gather(flat, AXIS, tiled=True)

  ends = np.cumsum([x[0].size for x in leaves])
  return [pairwise_sum(flat[:, end - x[0].size:end]).reshape(x.shape[1:])
          for x, end in zip(leaves, ends, strict=True)]


def plain_sum(tree: Any, mesh_size: int) -> Any:
  """Returns the sums of `exact_sum` by XLA's all-reduce, whose order depends on the mesh.

  Args:
    tree: arrays [groups on this device, ...].
    mesh_size: devices of the mesh; with more than one, call it inside `shard_map`.

  Returns:
    Arrays [...], equal on all devices.
  """
  chex.assert_equal_shape(jax.tree.leaves(tree), dims=0)

  def total(x):
    x = jnp.sum(x, axis=0)
    return lax.psum(x, AXIS) if mesh_size > 1 else x
  return jax.tree.map(total, tree)
