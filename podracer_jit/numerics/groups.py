"""Groups of environments that a gradient is summed over, seen from one device of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

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

  def total_of_integers(self, tree: Any) -> Any:
    """Returns the elementwise sums of integer arrays over all devices.

    Integer sums are exact in any order (modulo 2^32), so they need no fixed order.
    """
    chex.assert_type(jax.tree.leaves(tree), int)
    return lax.psum(tree, AXIS) if self.mesh_size > 1 else tree

  def smallest(self, x: jax.Array) -> jax.Array:
    """Returns the smallest number of an array over all devices."""
    return lax.pmin(jnp.min(x), AXIS) if self.mesh_size > 1 else jnp.min(x)

  def gather(self, tree: Any) -> Any:
    """Returns arrays [local, ...] concatenated over all devices, [count, ...]."""
    chex.assert_tree_shape_prefix(tree, (self.local,))
    if self.mesh_size == 1:
      return tree
    return jax.tree.map(lambda x: lax.all_gather(x, AXIS, tiled=True), tree)
