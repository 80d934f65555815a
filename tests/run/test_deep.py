"""Where two remade updates part, and by how much."""

import numpy as np
import pytest

from podracer_jit.run import deep

ONE = np.float32([1.0, -2.0, 0.0])


@pytest.mark.parametrize('other, words', [
    (ONE, ''),
    (np.nextafter(ONE, np.float32(9)), '3 of 3 numbers differ, by at most 1 units'),
    (np.float32([1.0, -2.0, -0.0]), '1 of 3 numbers differ, by at most 0 units'),
    # The smallest number on either side of zero: two places apart, with zero between.
    (np.float32([1.0, -2.0, 1e-45]), '1 of 3 numbers differ, by at most 1 units'),
    # 2^23 floats are in [1, 2).
    (np.float32([2.0, -2.0, 0.0]), f'1 of 3 numbers differ, by at most {2**23:,} units'),
    (np.int32([1, -2, 0]), 'float32 (3,) in A, int32 (3,) in B')])
def test_differences_are_counted_in_units_in_the_last_place(other, words):
  found = deep.difference(ONE, other)
  assert found.startswith(words) and bool(found) == bool(words)


def test_across_zero_each_number_counts_once():
  assert '2 units' in deep.difference(np.float32(-1e-45), np.float32(1e-45))


def test_nan_is_equal_to_itself():
  assert not deep.difference(np.float32([np.nan]), np.float32([np.nan]))


def test_the_first_stage_that_differs_is_named():
  same = {'rollout|reward': ONE, 'gradient step 1: gradient|params/w': ONE}
  more = {'gradient step 1: parameters|params/w': ONE, 'state after the update|params/w': ONE}
  other = {name: ONE * 2 for name in more}
  lines = deep.first_stage(same | more, same | other)
  assert lines[0] == 'the first to differ: gradient step 1: parameters'
  assert lines[1].startswith('  params/w: 2 of 3 numbers differ') and len(lines) == 2


def test_programs_of_whole_updates_may_be_to_blame():
  same = {'gradient step 1: gradient|params/w': ONE}
  after = 'state after the update|params/w'
  lines = deep.first_stage(same | {after: ONE}, same | {after: ONE + 1})
  assert lines[0].startswith('in separate programs, step by step, all gradients')
  assert lines[1] == 'the first to differ: state after the update'
  (line,) = deep.first_stage(same, same)
  assert line.startswith('repeated here, the update is the same on both sides')


def test_many_leaves_are_not_all_named():
  one = {f'moments|{i}': ONE for i in range(12)}
  lines = deep.first_stage(one, {name: -ONE for name in one})
  assert len(lines) == 1 + deep.LEAVES + 1 and lines[-1] == '  and 2 more'
