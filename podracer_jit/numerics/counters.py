"""Counts of steps on devices, which have no integers of 64 bits.

A count is [] i32, or [2] u32 in runs that may count beyond 2^31: (count mod 2^30, count div 2^30).
Both are exact, so they are equal on any placement.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

_BITS = 30  # of the low number; the sum of it and of a number below 2^31 fits 32 bits
LARGEST = 2**53  # a float of Python holds all whole numbers up to it


def of(number: int, like: jax.Array | np.ndarray) -> np.ndarray:
  """Returns a number as a count of the same kind as another one."""
  if like.ndim == 0:
    return np.int32(number)
  return np.array([number % 2**_BITS, number >> _BITS], np.uint32)


def zero(most: int) -> jax.Array:
  """Returns a count of 0 that can count to `most`."""
  return jnp.int32(0) if most < 2**31 else jnp.zeros(2, jnp.uint32)


def fetch_int(count: jax.Array | np.ndarray) -> int:
  """Returns a count as an int of Python; waits until it is computed."""
  count = np.asarray(jax.device_get(count))
  return int(count) if count.ndim == 0 else int(count[0]) + (int(count[1]) << _BITS)


def add(count: jax.Array, more: jax.Array) -> jax.Array:
  """Returns the sum of a count and a number [] i32 that is not negative."""
  chex.assert_rank(more, 0)
  if count.ndim == 0:
    return count + more
  low = count[0] + more.astype(jnp.uint32)
  return jnp.stack([low & (2**_BITS - 1), count[1] + (low >> _BITS)])


def is_less(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns whether one count is smaller than another of the same kind, [] bool."""
  chex.assert_equal_shape([a, b])
  if a.ndim == 0:
    return a < b
  return (a[1] < b[1]) | (a[1] == b[1]) & (a[0] < b[0])


def as_float(count: jax.Array) -> jax.Array:
  """Returns the count as [] f32, rounded."""
  if count.ndim == 0:
    return count.astype(jnp.float32)
  # The product is exact, so it does not matter whether XLA rounds it before the sum.
  return count[1].astype(jnp.float32) * 2.0**_BITS + count[0].astype(jnp.float32)


def converted(count: jax.Array, like: jax.Array) -> jax.Array:
  """Returns a count in the form and place of another one, for other total_steps."""
  if count.shape == like.shape:
    return count
  return jax.device_put(of(fetch_int(count), like), like.sharding)
