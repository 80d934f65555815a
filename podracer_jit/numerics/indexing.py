"""Indexing of arrays with integers that are never negative, in few operations.

JAX's plain indexing, `//` and `%` also take negative integers. For that they add up to twenty
operations each to a program, which take time to compile.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def read(x: jax.Array, *indices: Any) -> jax.Array:
  """Returns x[indices].

  Args:
    x: an array.
    *indices: integer arrays or slices, for the first axes of x. An index beyond the end gives
      some number of x.
  """
  return x.at[indices].get(mode='promise_in_bounds', wrap_negative_indices=False)


def read_or(default: Any, x: jax.Array, *indices: Any) -> jax.Array:
  """Returns x[indices], and a default for indices out of range."""
  return x.at[indices].get(mode='fill', fill_value=default, wrap_negative_indices=False)


def write(x: jax.Array, *indices: Any, value: Any) -> jax.Array:
  """Returns x with x[indices] = value; ignores indices out of range."""
  return x.at[indices].set(value, mode='drop', wrap_negative_indices=False)


def write_row(x: jax.Array, row: jax.Array, index: Any) -> jax.Array:
  """Returns x [N, ...] with x[index] = row; an index [] i32 beyond the end counts as N - 1."""
  return lax.dynamic_update_slice_in_dim(x, row[None], index, 0, allow_negative_indices=False)


def divide(x: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
  """Returns x // by and x % by of integers that are not negative."""
  by = lax.full_like(x, by)
  return lax.div(x, by), lax.rem(x, by)
