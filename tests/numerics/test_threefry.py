"""Threefry as JAX compiles it for CPUs, beside the vectors of its authors."""

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest

from podracer_jit.numerics import threefry


# tests/kat_vectors of Random123, threefry2x32 with 20 rounds.
@pytest.mark.parametrize('key, counter, expected', [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0))])
def test_vectors_of_the_authors(key, counter, expected):
  words = [jnp.uint32(word) for word in (*key, *counter)]
  assert tuple(map(int, threefry.threefry2x32(*words))) == expected
  # The key of a PRNG is hashed with two words of data by the same function.
  hashed = jax.extend.random.threefry_2x32(jnp.array(key, jnp.uint32),
                                           jnp.array(counter, jnp.uint32))
  assert tuple(map(int, hashed)) == expected


@pytest.mark.parametrize('data', [[0], [1, 2**31 - 1, 2**32 - 1], []])
def test_keys_are_folded_in_numpy(data):
  key = jax.random.fold_in(jax.random.key(2**31 - 1), 7)
  before = np.array(jax.random.key_data(key))
  expected = [jax.random.key_data(jax.random.fold_in(key, np.uint32(word))) for word in data]
  folded = threefry.fold_in(before, data)
  assert folded.dtype == np.uint32
  np.testing.assert_array_equal(folded, np.reshape(expected, (-1, 2)))
  np.testing.assert_array_equal(before, jax.random.key_data(key))  # it was not changed in place


def rounds(function):
  """Returns the number of rounds in each kernel that has any, in the program of a function."""
  text = jax.jit(function).lower(jax.random.key(0)).compile().as_text()
  counts = [kernel.count(' shift-left(') for kernel in text.split('\n}\n')]
  return [count for count in counts if count]


def test_a_hash_is_one_kernel_on_a_cpu():
  """JAX's own lowering has about ten, and a loop."""
  assert rounds(lambda key: jax.random.bits(key, (64,))) == [20]


def test_a_hash_is_not_in_the_kernel_of_the_hash_of_its_key():
  """LLVM would take minutes or hours for such a kernel, and each number would hash the key."""
  def numbers(key):
    key = jax.random.split(key, 3)[1]
    return jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, 5), (8, 8)))(
        jax.random.split(key, 100))

  kernels = rounds(numbers)
  assert len(kernels) >= 4 and max(kernels) <= 40, kernels


def test_numbers_of_jax_stay():
  """They were printed by jax.random without the package."""
  key = jax.random.key(7)
  np.testing.assert_array_equal(jax.random.bits(key, (3,)), [2895194379, 4185947648, 1300703658])
  np.testing.assert_array_equal(jax.random.key_data(jax.random.fold_in(key, 5)),
                                [3583082021, 1947592014])
  np.testing.assert_array_equal(jax.random.permutation(key, 6), [4, 2, 3, 5, 0, 1])
