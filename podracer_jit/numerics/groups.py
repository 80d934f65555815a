"""The groups of environments that a gradient is summed over, as one device of a mesh has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.numerics.deterministic import AXIS, exact_sum, plain_sum


class Groups(NamedTuple):
  """Which groups a device has, and how the results of all groups are added up.

  What is computed for a group has the shapes of one group on any mesh, so it does not depend on how
  many devices share the groups.
  """

  count: int  # groups of all devices
  envs: int  # environments of a group
  mesh_size: int = 1  # devices that share the groups evenly
  exact: bool = True  # whether sums have one fixed order; else XLA's all-reduce adds

  @property
  def local(self) -> int:
    """Groups on this device."""
    return self.count // self.mesh_size

  def numbers(self) -> jax.Array:
    """Returns the numbers of this device's groups among all groups, [local] i32."""
    return self._device() * self.local + jnp.arange(self.local)

  def first_env(self) -> jax.Array | int:
    """Returns the number of this device's first environment among all environments."""
    return self._device() * self.local * self.envs

  def _device(self) -> jax.Array | int:
    return lax.axis_index(AXIS) if self.mesh_size > 1 else 0

  def split(self, tree: Any) -> Any:
    """Returns arrays [T, local * envs, ...] by group, [local, T, envs, ...]."""
    def by_group(x):
      return x.reshape(x.shape[0], self.local, self.envs, *x.shape[2:]).swapaxes(0, 1)
    return jax.tree.map(by_group, tree)

  def join(self, tree: Any) -> Any:
    """Returns arrays [local, T, envs, ...] side by side, [T, local * envs, ...]."""
    return jax.tree.map(lambda x: jnp.concatenate(list(x), axis=1), tree)

  def map(self, function: Callable, *xs: Any) -> Any:
    """Returns function(*row) of each group, stacked.

    Args:
      function: its arithmetic is an island; else it would depend on how many groups are here.
      xs: pytrees of arrays [local, ...].
    """
    return lax.map(lambda row: function(*row), xs)

  def total(self, tree: Any) -> Any:
    """Returns the sums of arrays [local, ...] over the groups of all devices."""
    return (exact_sum if self.exact else plain_sum)(tree, self.mesh_size)

  def total_of_integers(self, tree: Any) -> Any:
    """Returns the sums of arrays of integers, of any shape, over all devices."""
    return lax.psum(tree, AXIS) if self.mesh_size > 1 else tree

  def smallest(self, x: jax.Array) -> jax.Array:
    """Returns the smallest number of an array over all devices."""
    return lax.pmin(jnp.min(x), AXIS) if self.mesh_size > 1 else jnp.min(x)

  def gather(self, tree: Any) -> Any:
    """Returns arrays [local, ...] of all devices, [count, ...]."""
    if self.mesh_size == 1:
      return tree
    return jax.tree.map(lambda x: lax.all_gather(x, AXIS, tiled=True), tree)
