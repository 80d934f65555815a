"""Fingerprints: 64-bit hashes of an update's inputs and results, computed on the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _mix(x: Any, multipliers: Any) -> Any:
  """Returns a bijective hash of 32-bit words in which each input bit affects each output bit."""
  x = x ^ (x >> 16)
  x *= multipliers[0]
  x ^= x >> 15
  x *= multipliers[1]
  return x ^ (x >> 16)


def _hash(words: jax.Array, indices: jax.Array, multipliers: Any) -> jax.Array:
  """Returns the hash of each word and its index."""
  return _mix(words ^ _mix(indices, multipliers), multipliers)


# Multipliers of the two hash functions: [hash function, multiplication].
_MULTIPLIERS = np.array([[0x7FEB352D, 0x846CA68B], [0x85EBCA6B, 0xC2B2AE35]], np.uint32)

# Arrays of fewer words are joined to one, which compiles faster. Larger ones take long to copy.
FEW = 1 << 16


def _words(x: jax.Array, env_axis: int | None) -> jax.Array:
  """Returns the bits of x as uint32 words, one for each number or one for four bytes.

  Bytes are packed along the last axis if its size is a multiple of 4 and it is neither the first
  axis nor the axis of environments.
  """
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  if x.dtype == jnp.uint8 and x.ndim - 1 > (env_axis or 0) and x.shape[-1] % 4 == 0:
    x = x.reshape(*x.shape[:-1], x.shape[-1] // 4, 4)
    return lax.bitcast_convert_type(x, jnp.uint32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def fingerprint(tree: Any, env_axis: int | None = None, first_env: Any = 0,
                num_envs: int = 0) -> jax.Array:
  """Returns the fingerprint of a pytree: two sums of mix(bits XOR mix(index)), modulo 2^32.

  The index of a number counts its leaf and its place in the *whole* array, also if the tree is one
  device's slice of the environments. So the fingerprints of slices add up to the fingerprint of the
  whole, however it was cut. A plain sum would miss swapped environments and shifted rows.

  Args:
    tree: arrays of numbers or booleans of at most 32 bits.
    env_axis: the axis of environments, if the tree is a slice of them; else None.
    first_env: index of the slice's first environment among all; a scalar, may be traced.
    num_envs: environments in all.

  Returns:
    [2] uint32, one sum for each of two hash functions.
  """
  if env_axis is not None:
    chex.assert_equal_shape(jax.tree.leaves(tree), dims=env_axis)
  chex.assert_rank(first_env, 0)
  leaves = [_words(jnp.asarray(leaf), env_axis) for leaf in jax.tree.leaves(tree)]
  if env_axis is None:
    leaves = [jnp.concatenate([words.reshape(-1) for words in leaves])]
  else:
    # XLA vectorises over the last axis, so it should be long.
    leaves = [words.reshape(*words.shape[:env_axis + 1], -1) if words.ndim > env_axis + 2 else
              words for words in leaves]
  indices = {shape: _indices(shape, env_axis, first_env, num_envs)
             for shape in dict.fromkeys(words.shape for words in leaves)}
  # A multiple of 2^32 divided by the golden ratio tells leaves apart.
  pairs = [(words, indices[words.shape] + np.uint32((i + 1) * 0x9E3779B9 % 2**32))
           for i, words in enumerate(leaves)]
  long = [pair for pair in pairs if pair[0].size >= FEW]
  short = [pair for pair in pairs if pair[0].size < FEW]

  total = jnp.zeros(2, jnp.uint32)
  if short:
    words, places = (jnp.concatenate([x.reshape(-1) for x in column])
                     for column in zip(*short, strict=True))
    total += jnp.sum(_hash(words, places, _MULTIPLIERS.T[..., None]), axis=1, dtype=jnp.uint32)
  for words, places in long:
    # XLA takes twice as long for the sums if they are rows of one array.
    total += jnp.stack([jnp.sum(_hash(words, places, multipliers), dtype=jnp.uint32)
                        for multipliers in _MULTIPLIERS])
  return total


def _indices(shape: Sequence[int], env_axis: int | None, first_env: Any, num_envs: int
             ) -> jax.Array:
  """Returns the index of each number of a slice in the whole array, modulo 2^32.

  Args:
    shape: of the slice.
    env_axis: the axis along which it is a slice; None if it is the whole array.
    first_env: index of its first environment among all.
    num_envs: environments of the whole array.

  Returns:
    uint32 of this shape.
  """
  index = jnp.zeros((), jnp.uint32)
  stride = 1  # in the whole array
  for axis in reversed(range(len(shape))):
    place = lax.broadcasted_iota(jnp.uint32, shape, axis)
    size = shape[axis]
    if axis == env_axis:
      place += jnp.asarray(first_env, jnp.uint32)
      size = num_envs
    index += place * np.uint32(stride % 2**32)
    stride *= size
  return index


@functools.cache
def canary() -> str:
  """Returns the fingerprint of the gradients of fixed small networks on fixed inputs.

  It changes with the arithmetic of this process: the device, the versions of libraries, the
  compiler's flags, the size of XLA's thread pool. The batches are large because XLA does not split
  the sums of small ones among threads.

  Returns:
    16 hexadecimal digits.
  """
  def numbers(salt, *shape):
    # NumPy needs no compilation, unlike single operations of JAX.
    bits = _mix(np.arange(math.prod(shape), dtype=np.uint32) + np.uint32(salt), _MULTIPLIERS[0])
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
  """Returns a fingerprint [2] as 16 hexadecimal digits."""
  chex.assert_shape(np.asarray(pair), (2,))
  high, low = (int(x) for x in np.asarray(pair, np.uint32))
  return f'{high:08x}{low:08x}'
