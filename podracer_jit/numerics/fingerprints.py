"""Fingerprints: 64-bit hashes of an update's inputs and results, computed on the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from podracer_jit.numerics import blocks
from podracer_jit.numerics.thread_pool import independent_of_threads


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

_SALT = 0x9E3779B9  # 2^32 divided by the golden ratio; its multiples tell arrays apart


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
  chex.assert_rank(first_env, 0)
  leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
  if env_axis is not None:
    chex.assert_equal_shape(leaves, dims=env_axis)
  leaves = [_merged(leaf, env_axis) for leaf in leaves]
  shapes = [jax.eval_shape(_words, leaf).shape for leaf in leaves]
  if env_axis is None:  # one array after the other, as if they were one
    starts = [_SALT + sum(map(math.prod, shapes[:i])) for i in range(len(leaves))]
  else:
    starts = [(i + 1) * _SALT for i in range(len(leaves))]
  starts = [np.uint32(start % 2**32) for start in starts]
  whole = _Whole(env_axis, first_env, num_envs)

  total = jnp.zeros(2, jnp.uint32)
  short = [i for i, shape in enumerate(shapes) if math.prod(shape) < blocks.JOIN_BELOW]
  if short:
    indices = {shape: whole.indices(shape) for shape in dict.fromkeys(shapes[i] for i in short)}
    words = jnp.concatenate([_words(leaves[i]).reshape(-1) for i in short])
    places = jnp.concatenate([(indices[shapes[i]] + starts[i]).reshape(-1) for i in short])
    total += jnp.sum(_hash(words, places, _MULTIPLIERS.T[..., None]), axis=1, dtype=jnp.uint32)
  for leaf, shape, start in zip(leaves, shapes, starts, strict=True):
    if math.prod(shape) >= blocks.JOIN_BELOW:
      total += lax.platform_dependent(
          leaf, cpu=functools.partial(_sum_of_blocks, whole, start),
          default=functools.partial(_sum, whole, start))
  return total


def _merged(x: jax.Array, env_axis: int | None) -> jax.Array:
  """Returns an array with as few axes as the indices of its numbers allow.

  The axes after that of environments become one, or all, if there is none; XLA vectorises over the
  last axis. Bytes get a last axis of 4 if they are packed to words: if the size of their last axis
  is a multiple of 4, and it is neither the first axis nor the axis of environments.
  """
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  packed = x.dtype == jnp.uint8 and x.ndim - 1 > (env_axis or 0) and x.shape[-1] % 4 == 0
  kept = 0 if env_axis is None else env_axis + 1
  if env_axis is None or x.ndim > kept:
    x = x.reshape(*x.shape[:kept], *((-1, 4) if packed else (-1,)))
  if packed or x.dtype.itemsize > 1:
    return x
  return lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint16)


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of an array of `_merged` as uint32, a word a number or for four bytes."""
  if x.dtype == jnp.uint8:
    return lax.bitcast_convert_type(x, jnp.uint32)
  unsigned = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


class _Whole(NamedTuple):
  """The whole arrays that leaves are slices of; see `fingerprint`."""

  env_axis: int | None
  first_env: Any
  num_envs: int

  def indices(self, shape: Sequence[int]) -> jax.Array:
    """Returns the index of each word of a slice in the whole array, modulo 2^32; uint32 [shape]."""
    index = jnp.zeros((), jnp.uint32)
    for axis in range(len(shape)):
      place = lax.broadcasted_iota(jnp.uint32, shape, axis)
      if axis == self.env_axis:
        place += jnp.asarray(self.first_env, jnp.uint32)
      index += place * np.uint32(self.stride(shape, axis) % 2**32)
    return index

  def stride(self, shape: Sequence[int], axis: int) -> int:
    """Returns the difference between the indices of neighbours along an axis."""
    return math.prod(self.num_envs if i == self.env_axis else shape[i]
                     for i in range(axis + 1, len(shape)))


def _sum(whole: _Whole, start: Any, leaf: jax.Array) -> jax.Array:
  """Returns the sums [2] of the hashes of a leaf, whose first index is `start`."""
  words = _words(leaf)
  places = whole.indices(words.shape) + start
  # XLA takes twice as long for the sums if they are rows of one array.
  return jnp.stack([jnp.sum(_hash(words, places, multipliers), dtype=jnp.uint32)
                    for multipliers in _MULTIPLIERS])


def _sum_of_blocks(whole: _Whole, start: Any, leaf: jax.Array) -> jax.Array:
  """Returns the same as `_sum`, without arrays of its size."""
  shape = jax.eval_shape(_words, leaf).shape
  stride = np.uint32(whole.stride(shape, 0) % 2**32)

  def hashes(rows, first):
    words = _words(rows)
    places = whole.indices(words.shape) + (start + jnp.asarray(first, jnp.uint32) * stride)
    return tuple(_hash(words, places, multipliers) for multipliers in _MULTIPLIERS)

  return blocks.sums(hashes, leaf, math.prod(shape[1:]))


@functools.cache
def canary() -> str:
  """Returns the fingerprint of the gradients of fixed small networks on fixed inputs.

  It changes with the arithmetic of this process: the device, the versions of libraries, the
  compiler's flags, and whether XLA's pool has one thread. From two threads on, their number does
  not matter, as in islands. The batches are large because XLA does not split the sums of small ones
  among threads.

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
  inputs = weights, numbers(1, 4096, 64), numbers(5, 640, 20, 20, 4)
  gradients = independent_of_threads(jax.make_jaxpr(jax.grad(loss))(*inputs))
  return as_hex(jax.jit(lambda *args: fingerprint(jaxpr_as_fun(gradients)(*args)))(
      *jax.tree.leaves(inputs)))


def as_hex(pair: Sequence[int]) -> str:
  """Returns a fingerprint [2] as 16 hexadecimal digits."""
  chex.assert_shape(np.asarray(pair), (2,))
  high, low = (int(x) for x in np.asarray(pair, np.uint32))
  return f'{high:08x}{low:08x}'
