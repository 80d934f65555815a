"""Permutations without a sort: all of them, equally often, and the same ones in any program."""

import itertools
import math

import jax
import numpy as np
import pytest

from podracer_jit.numerics import shuffling


def permutations(count, keys, seed=0):
  """Returns permutations [keys, count] of different keys."""
  of_key = jax.jit(jax.vmap(lambda key: shuffling.permutation(key, count)))
  return np.asarray(of_key(jax.random.split(jax.random.key(seed), keys)))


def deviations(counts, expected):
  """Returns how many standard deviations a chi-squared statistic is from its mean."""
  freedom = counts.size - 1
  chi_squared = np.sum((counts - expected)**2) / expected
  return (chi_squared - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize('count', [*range(7), 9, 97, 1000, 4099, 2**18])
def test_each_number_is_there_once(count):
  np.testing.assert_array_equal(np.sort(permutations(count, 3), axis=1), [np.arange(count)] * 3)


@pytest.mark.parametrize('count', range(2, 8))
def test_all_permutations_are_equally_likely(count):
  keys = 40 * math.factorial(count)
  drawn = permutations(count, keys)
  base = count ** np.arange(count)
  codes = np.sort([np.dot(one, base) for one in itertools.permutations(range(count))])
  counts = np.bincount(np.searchsorted(codes, drawn @ base), minlength=len(codes))
  assert abs(deviations(counts, 40)) < 4


@pytest.mark.parametrize('count', [64, 90, 97])
@pytest.mark.parametrize('first, second', [(0, 1), (0, 8), (3, -1)])
def test_two_places_know_nothing_of_each_other(count, first, second):
  drawn = permutations(count, 50_000)
  counts = np.zeros((count, count))
  np.add.at(counts, (drawn[:, first], drawn[:, second]), 1)
  apart = counts[~np.eye(count, dtype=bool)]
  assert apart.sum() == 50_000
  assert abs(deviations(apart, 50_000 / apart.size)) < 4


def test_half_of_them_are_odd():
  """Rotations of an odd number of places alone would give even permutations only."""
  drawn = permutations(9, 4000)
  inversions = sum((drawn[:, i] > drawn[:, j]).astype(int)
                   for i in range(9) for j in range(i + 1, 9))
  assert abs(np.mean(inversions % 2) - 0.5) < 4 * 0.5 / math.sqrt(4000)


@pytest.mark.parametrize('count', [30, 31])
def test_programs_agree(count):
  key = jax.random.key(5)
  alone = shuffling.permutation(key, count)
  np.testing.assert_array_equal(
      alone, jax.jit(shuffling.permutation, static_argnums=1)(key, count))
  np.testing.assert_array_equal(
      alone, jax.vmap(lambda key: shuffling.permutation(key, count))(key[None])[0])
