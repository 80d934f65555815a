"""Indexing with integers that are never negative gives what NumPy gives."""

import jax.numpy as jnp
import numpy as np
import pytest

from podracer_jit.numerics import indexing

X = np.arange(60).reshape(5, 4, 3)
ROWS = np.array([0, 4, 2, 2])
COLUMNS = np.array([3, 0, 1, 3])


def test_reads_are_those_of_numpy():
  x = jnp.asarray(X)
  np.testing.assert_array_equal(indexing.read(x, ROWS), X[ROWS])
  np.testing.assert_array_equal(indexing.read(x, ROWS, COLUMNS), X[ROWS, COLUMNS])
  np.testing.assert_array_equal(indexing.read(x, slice(None), COLUMNS), X[:, COLUMNS])


def test_reads_out_of_range_give_the_default():
  """Also at negative indices, which do not count from the end."""
  read = indexing.read_or(-1, jnp.asarray(X), np.array([1, 5, -1]), np.array([2, 0, 0]))
  np.testing.assert_array_equal(read, [X[1, 2], [-1] * 3, [-1] * 3])


def test_writes_out_of_range_are_ignored():
  written = indexing.write(jnp.asarray(X), np.array([1, 5, -1]), np.array([2, 0, 0]),
                           value=jnp.array([[100], [200], [300]]))
  expected = X.copy()
  expected[1, 2] = 100
  np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize(('index', 'changed'), [(0, 0), (3, 3), (4, 4), (9, 4)])
def test_write_row(index, changed):
  expected = X.copy()
  expected[changed] = -7
  written = indexing.write_row(jnp.asarray(X), jnp.full((4, 3), -7), jnp.int32(index))
  np.testing.assert_array_equal(written, expected)


def test_divide():
  quotient, rest = indexing.divide(jnp.arange(20), 6)
  np.testing.assert_array_equal(quotient, np.arange(20) // 6)
  np.testing.assert_array_equal(rest, np.arange(20) % 6)
