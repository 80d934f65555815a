"""Sums in a fixed order, on one device and on many."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numpy.testing import assert_array_equal

from podracer_jit.numerics import deterministic
from tests.runs import on_mesh


@pytest.mark.quick
def test_pairwise_sum_has_a_fixed_order():
  rng = np.random.default_rng(0)
  x = (rng.normal(size=(7, 50)) * 10.0 ** rng.integers(-3, 4, size=(7, 50))).astype(np.float32)
  a, b, c, d, e, f, g = x
  expected = {
      1: a, 2: a + b, 3: (a + b) + c, 4: (a + b) + (c + d), 5: ((a + b) + (c + d)) + e,
      6: ((a + b) + (c + d)) + (e + f), 7: ((a + b) + (c + d)) + ((e + f) + g)}
  for count, total in expected.items():
    assert_array_equal(jax.jit(deterministic.pairwise_sum)(x[:count]), total)
  # Sums of these numbers in other orders have other bits.
  for other_order in (functools.reduce(np.add, x), functools.reduce(np.add, x[::-1])):
    assert (other_order != expected[7]).any()


@pytest.mark.parametrize('groups, sizes', [(8, (1, 2, 4, 8)), (12, (1, 2, 4))])
def test_exact_sum_equals_the_pairwise_sum_on_any_mesh(groups, sizes):
  rng = np.random.default_rng(1)
  tree = {name: (rng.normal(size=(groups, *shape)) * 10.0 ** rng.integers(-3, 4, size=(groups, 1))
                 .reshape(-1, *[1] * len(shape))).astype(np.float32)
          for name, shape in dict(w=(70, 71), b=(3,), scale=()).items()}
  expected = jax.jit(lambda tree: jax.tree.map(deterministic.pairwise_sum, tree))(tree)
  used_reduce_scatter = set()
  for size in sizes:
    rows = 1 if (groups // size).bit_count() == 1 else groups // size
    used_reduce_scatter.add(deterministic.use_reduce_scatter(rows, 4974, size))
    by_group = PartitionSpec(deterministic.AXIS)
    total = on_mesh(lambda tree, size=size: deterministic.exact_sum(tree, size), size, (by_group,),
                    PartitionSpec())(tree)
    jax.tree.map(assert_array_equal, total, expected)
  assert used_reduce_scatter == {True, False}
  # The sum of these numbers in another order has other bits.
  assert (sum(tree['w'][::-1]) != expected['w']).any()
