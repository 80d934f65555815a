"""Environments stepped by Python in whole schemes: equal bits on any placement."""

import functools

import pytest

from podracer_jit import loops
from tests.runs import changed, prepared, run, small


def config_of(loss='impala', **fields):
  config = small(loss, 'gymnasium:CartPole-v1', num_shards=2, num_grad_shards=2)
  return changed(config, **fields)


@functools.cache
def receipts(scheme, actors=(0,), learners=(0,), threads=1, serial=False):
  config = config_of(scheme=scheme, placement__actor_devices=actors,
                     placement__learner_devices=learners, placement__env_threads=threads)
  return run(config, loops.run_serial if serial else loops.run, updates=4)[0]


def test_a_run_is_repeatable():
  assert len(set(receipts('sync'))) == 4
  repeated = run(config_of(scheme='sync', placement__env_threads=1), updates=4)[0]
  assert receipts('sync') == repeated


@pytest.mark.same_bits('Gymnasium: devices, worker processes, schemes without a lag',
                       'IMPALA: MLP (`sync`, `fused`, `ddppo`)')
@pytest.mark.parametrize('scheme, place', [
    ('fused', {}), ('sync', dict(actors=(0, 1), learners=(2, 3))), ('sync', dict(threads=4)),
    ('ddppo', dict(actors=(0, 1), learners=(0, 1))), ('sync', dict(serial=True))])
def test_schemes_without_a_lag_have_equal_bits(scheme, place):
  assert receipts(scheme, **place) == receipts('sync')


@pytest.mark.same_bits('Gymnasium: devices, actors, worker processes', 'IMPALA: MLP (`cleanba`)')
@pytest.mark.parametrize('place', [
    dict(actors=(0, 1), learners=(2,)), dict(actors=(0, 0), learners=(1,)), dict(threads=3)])
def test_cleanba_has_equal_bits_on_every_placement(place):
  assert receipts('cleanba', **place) == receipts('cleanba')
  assert receipts('cleanba') != receipts('sync')


@pytest.mark.same_bits('Gymnasium: one actor and two', 'DQN: MLP (`apex_lockstep`)')
def test_apex_lockstep_has_equal_bits_on_every_placement():
  def config(**place):
    config = config_of('dqn', scheme='apex_lockstep', num_minibatches=1, **place)
    config['replay'] |= dict(capacity=512, min_size=64, batch_size=32)
    return config

  one_device = run(config())[0]
  three_devices = run(config(placement__actor_devices=(0, 1), placement__learner_devices=(2,)))[0]
  assert one_device == three_devices
  assert len(set(one_device)) == 6


def test_the_next_segment_has_other_environments():
  prepared_run = prepared(config_of(scheme='sync'))
  first = run(None, prepared_run=prepared_run, updates=2)[0]
  second = run(None, prepared_run=prepared_run, updates=2, index=1)[0]
  assert first != second
