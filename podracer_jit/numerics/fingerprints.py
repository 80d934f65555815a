"""Fingerprints: 64 bits that say which numbers an update read and made, computed on the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _mix(x: Any, multipliers: tuple[int, int]) -> Any:
  """A bijection of 32 bits in which every input bit reaches every output bit."""
  x = x ^ (x >> 16)
  x *= np.uint32(multipliers[0])
  x ^= x >> 15
  x *= np.uint32(multipliers[1])
  return x ^ (x >> 16)


_MIXES = ((0x7FEB352D, 0x846CA68B), (0x85EBCA6B, 0xC2B2AE35))


def _words(x: jax.Array, env_axis: int | None) -> jax.Array:
  """The bit patterns as uint32; of bytes, four to a word along the last axis where that divides."""
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  if x.dtype == jnp.uint8 and x.ndim - 1 > (env_axis or 0) and x.shape[-1] % 4 == 0:
    x = x.reshape(*x.shape[:-1], x.shape[-1] // 4, 4)
    return lax.bitcast_convert_type(x, jnp.uint32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def fingerprint(tree: Any, env_axis: int | None = None, first_env: Any = 0,
                num_envs: int = 0) -> jax.Array:
  """Two uint32 sums of mix(bits XOR mix(logical index)), each with another mix, [2].

  The index names the leaf and the place of a number in the *whole* array, never in memory: where
  the tree is one device's slice of the environments, `env_axis` says which axis they are on,
  `first_env` where the slice begins and `num_envs` how many there are in all. Then the sums of the
  slices add up (modulo 2^32) to the value of the whole, however it was cut. Swapping two
  environments or shifting rows changes it, which a plain sum would miss.
  """
  leaves = [_words(jnp.asarray(leaf), env_axis) for leaf in jax.tree.leaves(tree)]
  if env_axis is None:  # end to end, as one leaf, which compiles sooner
    leaves = [jnp.concatenate([words.reshape(-1) for words in leaves])]
  total = jnp.zeros(2, jnp.uint32)
  for i, words in enumerate(leaves):
    index = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(words.shape):
      place = jnp.arange(size, dtype=jnp.uint32)
      if axis == env_axis:
        place, size = place + jnp.asarray(first_env, jnp.uint32), num_envs
      index = index[..., None] * jnp.uint32(size) + place
    salt = jnp.uint32((i + 1) * 0x9E3779B9 & 0xFFFFFFFF)
    for which, mix in enumerate(_MIXES):
      mixed = _mix(words ^ _mix(index + salt, mix), mix)
      total = total.at[which].add(jnp.sum(mixed, dtype=jnp.uint32))
  return total


@functools.cache
def canary() -> str:
  """The fingerprint of the gradients of fixed small networks on fixed numbers.

  It stands for the arithmetic of this process: the device, the versions, the compiler's flags, the
  size of its thread pool. Large batches, since small ones hide how sums are split.
  """
  def numbers(salt, *shape):  # NumPy's: its operations need no compiling, one after the other
    bits = _mix(np.arange(math.prod(shape), dtype=np.uint32) + np.uint32(salt), _MIXES[0])
    return (bits >> 8).astype(np.float32).reshape(shape) / np.float32(2**23) - np.float32(1)

  def loss(weights, rows, images):
    dense, bias, last, kernel, shift = weights
    y = jnp.tanh(rows @ dense + bias) @ last
    z = lax.conv_general_dilated(images, kernel, (2, 2), 'VALID',
                                 dimension_numbers=('NHWC', 'HWIO', 'NHWC')) + shift
    return jnp.sum(jnp.square(y)) + jnp.sum(jnp.square(jax.nn.relu(z)))

  weights = (numbers(2, 64, 64), np.zeros(64, np.float32), numbers(3, 64, 8),
             numbers(4, 4, 4, 4, 16), np.zeros(16, np.float32))
  gradients = jax.jit(lambda *args: fingerprint(jax.grad(loss)(*args)))
  return as_hex(gradients(weights, numbers(1, 4096, 64), numbers(5, 640, 20, 20, 4)))


def as_hex(pair: Sequence[int]) -> str:
  """The fingerprint as 16 hexadecimal digits."""
  high, low = (int(x) for x in np.asarray(pair, np.uint32))
  return f'{high:08x}{low:08x}'
