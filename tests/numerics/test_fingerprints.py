"""Fingerprints do not depend on how arrays are split, and change with any bit of them."""

import copy
import math
import sys

import jax
import numpy as np
import pytest

from podracer_jit.numerics import blocks, fingerprints
from tests import processes

T = 6
B = 8


def _mix(x, shift_multiply):
  for shift, multiplier in shift_multiply:
    x = ((x ^ (x >> shift)) * multiplier) % 2**32
  return x ^ (x >> 16)


MIXES = (((16, 0x7FEB352D), (15, 0x846CA68B)), ((16, 0x85EBCA6B), (15, 0xC2B2AE35)))


def _bits(leaf, has_trailing):
  """Returns the leaf's bits as unsigned ints; bytes are packed by fours if the last axis allows."""
  raw = np.ascontiguousarray(leaf).tobytes()
  width = leaf.dtype.itemsize
  if leaf.dtype.itemsize == 1 and has_trailing and leaf.shape[-1] % 4 == 0:
    width = 4
  return [int.from_bytes(raw[i:i + width], 'little') for i in range(0, len(raw), width)]


def _expected(leaves, env_axis=None):
  """Computes the fingerprint in Python's integers.

  It is two sums of mix(bits XOR mix(index + salt of the leaf)) modulo 2^32. Without an axis of
  environments all leaves count as one long leaf.
  """
  numbers = [_bits(leaf, leaf.ndim - 1 > (env_axis or 0)) for leaf in leaves]
  if env_axis is None:
    numbers = [sum(numbers, [])]
  sums = []
  for mix in MIXES:
    total = 0
    for i, leaf in enumerate(numbers):
      salt = (i + 1) * 0x9E3779B9
      for index, bits in enumerate(leaf):
        total += _mix(bits ^ _mix((index + salt) % 2**32, mix), mix)
    sums.append(total % 2**32)
  return sums


def _tree():
  rng = np.random.default_rng(0)
  return {
      'frames': rng.integers(256, size=(T + 1, B, 2, 3, 4)).astype(np.uint8),
      'odd_frames': rng.integers(256, size=(T + 1, B, 3, 5)).astype(np.uint8),
      'bytes': rng.integers(256, size=(T, B)).astype(np.uint8),
      'flag': rng.random((T, B)) < 0.5,
      'number': rng.normal(size=(T, B)).astype(np.float32),
      'other': rng.normal(size=(T, B)).astype(np.float32),
      'action': rng.integers(-3, 3, size=(T, B)).astype(np.int32),
  }


_jitted = jax.jit(fingerprints.fingerprint, static_argnums=(1, 3))


def _fingerprint(tree):
  return np.array(_jitted(tree, 1, 0, B))


def test_the_fingerprint_of_each_kind_of_array_equals_that_in_integers():
  for name, leaf in _tree().items():
    assert _fingerprint([leaf]).tolist() == _expected([leaf], 1), name
    assert np.array(_jitted([leaf])).tolist() == _expected([leaf]), name


def test_the_fingerprint_of_a_tree_equals_that_in_integers():
  tree = _tree()
  leaves = jax.tree.leaves(tree)
  assert _fingerprint(tree).tolist() == _expected(leaves, 1)
  # Without environments: parameters, with a scalar among them.
  params = [np.float32(3.5), np.arange(5, dtype=np.int32), tree['number']]
  assert np.array(_jitted(params)).tolist() == _expected([np.asarray(x) for x in params])


@pytest.mark.parametrize('cuts', [(4, 8), (2, 4, 6, 8), (1, 2, 3, 4, 5, 6, 7, 8), (3, 8)])
def test_fingerprints_of_slices_sum_to_that_of_the_whole(cuts):
  tree = _tree()
  total = 0
  first = 0
  for stop in cuts:
    part = jax.tree.map(lambda x, a=first, b=stop: x[:, a:b], tree)
    total += np.array(_jitted(part, 1, first, B)).astype(np.int64)
    first = stop
  assert (total % 2**32).tolist() == _fingerprint(tree).tolist()


def test_large_arrays_have_the_fingerprint_in_integers_and_slices_of_them_sum_to_it():
  """Large arrays are hashed one by one, and small ones, such as the slices here, together."""
  tree = _tree() | {'video': np.random.default_rng(1).integers(
      256, size=(T + 1, B, 30, 40, 4)).astype(np.uint8)}
  whole = _fingerprint(tree).tolist()
  assert whole == _expected(jax.tree.leaves(tree), 1)
  parts = [_jitted(jax.tree.map(lambda x, a=first: x[:, a:a + 4], tree), 1, first, B)
           for first in (0, 4)]
  assert np.sum(np.array(parts, np.uint32), axis=0, dtype=np.uint32).tolist() == whole
  assert tree['video'][..., 0].size >= blocks.JOIN_BELOW > tree['video'][:, :4, ..., 0].size


_LARGE = {
    'bytes': ((21, B, 30, 40, 4), np.uint8),  # blocks of a row or two, and a rest
    'numbers': ((19, B, 1000), np.float32),
    'rows_of_few': ((9001, B), np.int32),
    'one_row': ((1, B, 9000), np.float32),
    'odd_bytes': ((37, B, 15, 15), np.uint8),
}


@pytest.mark.parametrize('name', _LARGE)
def test_blocks_of_a_large_array_add_up_to_the_fingerprint_in_integers(name):
  shape, dtype = _LARGE[name]
  x = np.random.default_rng(2).integers(256, size=shape).astype(dtype)
  assert np.array(_jitted([x], 1, 0, B)).tolist() == _expected([x], 1)
  assert np.array(_jitted([x[:3], x])).tolist() == _expected([x[:3], x])
  parts = [_jitted([x[:, first:first + 4]], 1, first, B) for first in (0, 4)]
  assert np.sum(np.array(parts, np.uint32), axis=0, dtype=np.uint32).tolist() == _expected([x], 1)


def test_a_cpu_holds_no_hashes_of_a_large_array():
  x = jax.ShapeDtypeStruct((128, B, 4000), np.float32)
  whole = 4 * math.prod(x.shape)
  taken = _jitted.lower([x], 1, 0, B).compile().memory_analysis().temp_size_in_bytes
  assert taken < whole / 8


def _flip(leaf, place):
  """Flips one bit of an array, in place."""
  flat = leaf.reshape(-1).view(np.uint8)
  flat[place % flat.size] ^= 1 if leaf.dtype == bool else 1 << place % 8


def _change(kind, leaf, tree):
  """Returns a copy of the tree with one change in one leaf.

  `kind` is 'environments' or 'rows' (swaps two), 'shift' (moves rows), or the number of a bit.
  """
  tree = copy.deepcopy(tree)
  x = tree[leaf]
  if kind == 'environments':
    x[:, [2, 5]] = x[:, [5, 2]]
  elif kind == 'rows':
    x[[1, 4]] = x[[4, 1]]
  elif kind == 'shift':
    x[1:] = x[:-1].copy()
  else:
    _flip(x, int(kind))
  return tree


@pytest.mark.parametrize('kind', ['environments', 'rows', 'shift', '0', '77', '1001'])
def test_any_change_of_a_leaf_changes_the_fingerprint(kind):
  tree = _tree()
  before = _fingerprint(tree)
  for leaf in tree:
    changed = _change(kind, leaf, tree)
    assert not np.array_equal(tree[leaf], changed[leaf])
    after = _fingerprint(changed)
    assert before[0] != after[0] and before[1] != after[1], leaf


def test_swaps_across_all_leaves_change_the_fingerprint():
  tree = _tree()
  for leaves in (
      {k: x[:, [0, 1, 5, 3, 4, 2, 6, 7]] for k, x in tree.items()},  # two environments
      {k: np.concatenate([x[[1, 0]], x[2:]]) for k, x in tree.items()},  # two rows
      tree | {'number': tree['other'], 'other': tree['number']}):  # two leaves
    assert (_fingerprint(leaves) != _fingerprint(tree)).all()


def test_signed_zeros_have_different_fingerprints():
  zeros = np.zeros((T, B), np.float32)
  signed = zeros.copy()
  signed[2, 3] = -0.0
  assert (_fingerprint([zeros]) != _fingerprint([signed])).all()


def test_as_hex_writes_16_digits():
  assert fingerprints.as_hex((0xDEADBEEF, 0x1F)) == 'deadbeef0000001f'
  assert fingerprints.as_hex(np.zeros(2, np.uint32)) == '0' * 16
  ones = np.ones(3, np.float32)
  high, low = _expected([ones])
  assert int(fingerprints.as_hex(_jitted([ones])), 16) == high << 32 | low


CANARY = """
import os
os.environ['NPROC'] = '{threads}'
from podracer_jit.numerics import fingerprints
print(fingerprints.canary())
"""


def test_the_canary_of_two_threads_is_that_of_many():
  """XLA splits sums among threads; with a single one it computes in another way."""
  canaries = []
  for threads in (1, 2, 5, 16):
    done = processes.run([sys.executable, '-P', '-c', CANARY.format(threads=threads)])
    assert done.returncode == 0, done.stderr
    canaries.append(done.stdout)
  assert canaries[1] == canaries[2] == canaries[3] != canaries[0]
