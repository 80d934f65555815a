"""Sums over large arrays, block by block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer_jit.numerics import blocks

# Fewer numbers than a block, a block, several passes over four of them, and a rest.
_SIZES = [1, 8192, 8193, 5 * 8192 - 1, 1 << 16, (1 << 17) + 3]


@pytest.mark.parametrize('size', _SIZES)
@pytest.mark.parametrize('width', [1, 3, 9000])
def test_sums_have_each_term_and_its_index_once(size, width):
  x = np.random.default_rng(size).integers(2**32, size=(-(-size // width), width), dtype=np.uint32)

  def terms(rows, first):
    index = jnp.arange(len(rows), dtype=jnp.uint32)[:, None] + jnp.uint32(first)
    return rows, rows * index

  total = jax.jit(lambda x: blocks.sums(terms, x, width))(x)
  index = np.arange(len(x), dtype=np.uint64)[:, None]
  expected = [np.sum(x, dtype=np.uint64), np.sum(x * index % 2**32, dtype=np.uint64)]
  assert total.tolist() == [int(number % 2**32) for number in expected]


def test_small_arrays_of_a_type_become_one():
  small = [jnp.arange(6.0).reshape(2, 3), jnp.arange(4), jnp.ones(2), jnp.zeros((0, 3), jnp.int8)]
  large = jnp.zeros(blocks.JOIN_BELOW)
  first, *others = blocks.few_arrays([*small, large])
  assert first is large
  assert [x.tolist() for x in others] == [[0, 1, 2, 3, 4, 5, 1, 1], [0, 1, 2, 3]]
