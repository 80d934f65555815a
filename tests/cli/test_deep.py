"""Deep comparison of two repeated updates: the first stage that differs, and by how much."""

import numpy as np
import pytest

from podracer_jit.cli import deep

NUMBERS = np.float32([1.0, -2.0, 0.0])


@pytest.mark.parametrize('changed, message', [
    (NUMBERS, ''),
    (np.nextafter(NUMBERS, np.float32(9)), '3 of 3 numbers differ, by at most 1 units'),
    (np.float32([1.0, -2.0, -0.0]), '1 of 3 numbers differ, by at most 0 units'),
    # The smallest positive number is one unit from zero.
    (np.float32([1.0, -2.0, 1e-45]), '1 of 3 numbers differ, by at most 1 units'),
    # 2^23 floats are in [1, 2).
    (np.float32([2.0, -2.0, 0.0]), f'1 of 3 numbers differ, by at most {2**23:,} units'),
    (np.int32([1, -2, 0]), 'float32 (3,) in A, int32 (3,) in B')])
def test_differences_are_counted_in_units_in_the_last_place(changed, message):
  difference = deep.difference(NUMBERS, changed)
  assert difference.startswith(message) and bool(difference) == bool(message)


def test_zero_counts_once_between_positive_and_negative_numbers():
  assert '2 units' in deep.difference(np.float32(-1e-45), np.float32(1e-45))


def test_nan_is_equal_to_itself():
  assert not deep.difference(np.float32([np.nan]), np.float32([np.nan]))


def test_the_first_stage_that_differs_is_named():
  same = {'rollout|reward': NUMBERS, 'gradient step 1: gradient|params/w': NUMBERS}
  later = {'gradient step 1: parameters|params/w': NUMBERS,
           'state after the update|params/w': NUMBERS}
  changed = {name: NUMBERS * 2 for name in later}
  lines = deep.first_stage(same | later, same | changed)
  assert lines[0] == 'the first to differ: gradient step 1: parameters'
  assert lines[1].startswith('  params/w: 2 of 3 numbers differ') and len(lines) == 2


def test_a_difference_only_in_whole_updates_is_reported():
  same = {'gradient step 1: gradient|params/w': NUMBERS}
  after = 'state after the update|params/w'
  lines = deep.first_stage(same | {after: NUMBERS}, same | {after: NUMBERS + 1})
  assert lines[0].startswith('in separate programs, step by step, all gradients')
  assert lines[1] == 'the first to differ: state after the update'
  (line,) = deep.first_stage(same, same)
  assert line.startswith('repeated here, the update is the same on both sides')


def test_only_some_of_many_leaves_are_named():
  leaves = {f'moments|{i}': NUMBERS for i in range(12)}
  lines = deep.first_stage(leaves, {name: -NUMBERS for name in leaves})
  assert len(lines) == 1 + deep.LEAVES + 1 and lines[-1] == '  and 2 more'
