"""Groups of environments that a gradient is summed over, seen from one device of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from podracer_jit.numerics import indexing
from podracer_jit.numerics.deterministic import AXIS, exact_sum, plain_sum


class Groups(NamedTuple):
  """Partition of environments into groups, and the sums over all groups.

  Unless groups are computed `together`, a computation for one group has the shapes of one group on
  any mesh, so its result does not depend on how many devices share the groups. If `mesh_size`
  exceeds 1, call the methods that use other devices inside `shard_map`.
  """

  count: int  # groups on all devices
  envs: int  # environments in a group
  mesh_size: int = 1  # devices that share the groups evenly
  exact: bool = True  # True: sums have one fixed order; False: XLA's all-reduce adds
  together: bool = False  # `map` computes all groups of a device at once

  @property
  def local(self) -> int:
    """Groups on this device."""
    return self.count // self.mesh_size

  def numbers(self) -> jax.Array:
    """Returns the indices of this device's groups among all groups, [local] i32."""
    return self._device() * self.local + jnp.arange(self.local)

  def first_env(self) -> jax.Array | int:
    """Returns the index of this device's first environment among all, a scalar."""
    return self._device() * self.local * self.envs

  def _device(self) -> jax.Array | int:
    return lax.axis_index(AXIS) if self.mesh_size > 1 else 0

  def split(self, tree: Any) -> Any:
    """Returns arrays [T, local * envs, ...] split by group, [local, T, envs, ...]."""
    for x in jax.tree.leaves(tree):
      chex.assert_shape(x, (None, self.local * self.envs, ...))

    def by_group(x):
      return x.reshape(x.shape[0], self.local, self.envs, *x.shape[2:]).swapaxes(0, 1)
    return jax.tree.map(by_group, tree)

  def join(self, tree: Any) -> Any:
    """Returns arrays [local, T, envs, ...] with the groups side by side, [T, local * envs, ...]."""
    for x in jax.tree.leaves(tree):
      chex.assert_shape(x, (self.local, None, self.envs, ...))
    return jax.tree.map(lambda x: jnp.concatenate(list(x), axis=1), tree)

  def map(self, function: Callable, *xs: Any) -> Any:
    """Applies a function to each group of this device: one after the other, or `together`.

    One after the other suits CPUs, where the arrays of a group fit into a cache, and the bits do
    not depend on the number of groups on the device. Together suits accelerators, whose time
    follows from the number of kernels.

    Args:
      function: takes one row of each of `xs`. Its arithmetic must be an island, or its rounding
        would depend on the number of groups on this device.
      *xs: pytrees of arrays [local, ...].

    Returns:
      The results, stacked along a leading axis [local].
    """
    chex.assert_tree_shape_prefix(xs, (self.local,))
    if self.together:
      return jax.vmap(function)(*xs)
    return lax.map(lambda row: function(*row), xs)

  def total(self, tree: Any) -> Any:
    """Returns the sums of arrays [local, ...] over the groups of all devices, [...]."""
    chex.assert_tree_shape_prefix(tree, (self.local,))
    return (exact_sum if self.exact else plain_sum)(tree, self.mesh_size)

  def local_index(self, number: jax.Array) -> jax.Array:
    """Returns the indices on this device of groups, from their indices among all groups.

    A group of another device gets the index `local`, which is out of range.
    """
    index = number - self._device() * self.local
    return jnp.where((index >= 0) & (index < self.local), index, self.local)

  def fetch(self, read: Callable, number: jax.Array, *args: jax.Array, axis: int = 0) -> Any:
    """Reads rows of arrays whose groups are on any device.

    Each device asks for rows of its own choice, and as many as the others. Every device reads what
    all ask for, and each gets the rows of the owners. Bytes are moved, and never added.

    Args:
      read: (group [n], *args) -> pytree of arrays whose axis `axis` has one row for each group. The
        groups are indices on the device; of one that is out of range, the row does not matter.
      number: [n] i32, indices among all groups.
      *args: i32 arrays.
      axis: axis of the rows in the results.

    Returns:
      The pytree of `read`.
    """
    chex.assert_rank(number, 1)
    chex.assert_type([number, *args], jnp.int32)
    if self.mesh_size == 1:
      return read(number, *args)
    wanted, unravel = ravel_pytree((number, *args))
    # Asked for by each device, [mesh_size, ...].
    numbers, *args_of_all = jax.vmap(unravel)(lax.all_gather(wanted, AXIS))
    rows = jax.vmap(read)(self.local_index(numbers), *args_of_all)
    owner, _ = indexing.divide(number, self.local)

    def pick(x):
      # [owner, rows, ...]
      x = jnp.moveaxis(lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0), axis + 1, 1)
      return jnp.moveaxis(indexing.read(x, owner, jnp.arange(len(number))), 0, axis)

    return jax.tree.map(pick, rows)

  def total_of_integers(self, tree: Any) -> Any:
    """Returns the elementwise sums of integer arrays over all devices.

    Integer sums are exact in any order (modulo 2^32), so they need no fixed order.
    """
    chex.assert_type(jax.tree.leaves(tree), int)
    return lax.psum(tree, AXIS) if self.mesh_size > 1 else tree

  def gather(self, tree: Any) -> Any:
    """Returns arrays [local, ...] concatenated over all devices, [count, ...]."""
    chex.assert_tree_shape_prefix(tree, (self.local,))
    if self.mesh_size == 1:
      return tree
    return jax.tree.map(lambda x: lax.all_gather(x, AXIS, tiled=True), tree)
