"""Environments stepped by Python in whole schemes."""

from tests.runs import prepared, run, small


def config():
  return small('impala', 'gymnasium:CartPole-v1')


def test_a_run_is_repeatable():
  first = run(config(), updates=4)[0]
  assert len(set(first)) == 4
  assert run(config(), updates=4)[0] == first


def test_the_next_segment_has_other_environments():
  prepared_run = prepared(config())
  first = run(None, prepared_run=prepared_run, updates=2)[0]
  second = run(None, prepared_run=prepared_run, updates=2, index=1)[0]
  assert first != second
