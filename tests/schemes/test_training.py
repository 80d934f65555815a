"""Whole schemes: exact lags, and the same bits for the same experiment on any placement."""

import copy
import dataclasses
import functools
import random
import time

import jax
import pytest
from numpy.testing import assert_allclose

from podracer_jit import loops
from podracer_jit.run import build
from tests.runs import changed, initial_state, prepared, run, small
from tests.workers import wrap

CASES = {
    'impala-mlp': lambda: small('impala'),
    'ppo-mlp': lambda: small('ppo', num_epochs=2),
    'impala-cnn': lambda: small('impala', 'Pong-v5', 'impala_resnet'),
    'ppo-cnn': lambda: small('ppo', 'Pong-v5', 'nature_cnn', num_epochs=2),
}


@pytest.mark.parametrize('case', ['impala-mlp', 'ppo-mlp'])
@pytest.mark.same_bits('`fused` and `sync`', 'IMPALA, PPO: MLP')
def test_fused_and_sync_give_the_same_bits(case):
  config = CASES[case]()
  sync, _, _ = run(config)
  fused, reports, _ = run(changed(config, scheme='fused', placement__updates_per_call=4))
  assert [report.count for report in reports] == [4, 2]
  assert fused == sync
  assert len(set(sync)) == 6


@pytest.mark.parametrize('scheme,lags', [('sync', [0] * 6), ('cleanba', [0, 1, 1, 1, 1, 1])])
def test_lags_are_exact_and_serial_runs_are_equal(scheme, lags):
  config = changed(small(), scheme=scheme, num_shards=2, placement__actor_devices=(0, 1))
  threads, reports, _ = run(config)
  num_minibatches = 2
  cgd = [num_minibatches * lag + (num_minibatches - 1) / 2 for lag in lags]
  assert [report.cgd for report in reports] == [(x,) for x in cgd]
  serial, reports, _ = run(config, loops.run_serial)
  assert [report.cgd for report in reports] == [(x,) for x in cgd]
  assert threads == serial


def _config(scheme, loss='impala'):
  return changed(small(loss), scheme=scheme, placement__updates_per_call=2)


def _run(scheme, loss='impala', **options):
  return run(_config(scheme, loss), **options)


@functools.cache
def _receipts(scheme, loss='impala'):
  return _run(scheme, loss)[0]


def test_lag_1_differs_from_lag_0():
  assert _receipts('sync') != _receipts('cleanba')


@pytest.mark.parametrize('loss', ['impala', 'ppo'])
@pytest.mark.parametrize('scheme', ['sync', 'cleanba'])
@pytest.mark.parametrize('slow', ['learner', 'actor', 'writer'])
@pytest.mark.same_bits('a slow learner, actor or writer', 'IMPALA, PPO: MLP (`sync`, `cleanba`)')
def test_slow_workers_change_no_bit(loss, scheme, slow):
  slowly = wrap(slow, before=lambda *_: time.sleep(random.random() * 0.1))
  assert _run(scheme, loss, tamper=slowly)[0] == _receipts(scheme, loss)


@pytest.mark.parametrize('case', ['impala-cnn', 'ppo-cnn'])
@pytest.mark.same_bits('two actors and learners, split meshes',
                       'IMPALA: ResNet, PPO: CNN (`sync`, `fused`)')
def test_placement_changes_no_bit(case):
  config = changed(CASES[case](), num_shards=2, num_grad_shards=2)
  expected, _, _ = run(config)
  assert run(changed(config, scheme='fused', placement__updates_per_call=4))[0] == expected
  for actors, learners, per_device in (((0, 1), (0, 1), 1), ((0,), (2, 3), 2)):
    placed = changed(config, placement__actor_devices=actors, placement__learner_devices=learners,
                     placement__actors_per_device=per_device, placement__env_threads=1)
    assert run(placed)[0] == expected, (actors, learners, per_device)


@pytest.mark.parametrize('loss, shape, places', [
    # Four shards on 1, 2 and 4 actors, interleaved or not; 1, 2 and 4 learners, on the same devices
    # as the actors or on others. A place: actors, learners, actors per device, environment threads.
    ('impala', dict(num_shards=4, num_grad_shards=4),
     [((0, 1, 2, 3), (0, 1, 2, 3), 1, 1), ((0, 1), (2, 3), 2, 2), ((4, 5), (0,), 1, 2)]),
    ('ppo', dict(num_shards=4, num_grad_shards=4, scheme='cleanba'),
     [((0, 1, 2, 3), (0, 1, 2, 3), 1, 1), ((0, 1), (2, 4), 1, 2)]),
    pytest.param(
        'impala', dict(num_shards=4, num_grad_shards=4, scheme='cleanba'),
        [((0, 1, 2, 3), (0, 1, 2, 3), 1, 1)], marks=pytest.mark.quick),
    ('ppo', dict(num_shards=4, num_grad_shards=4), [((0, 1, 2, 3), (0, 1, 2, 3), 1, 1)]),
    # No number is a power of two.
    ('ppo', dict(num_shards=3, num_grad_shards=3, num_minibatches=1, unroll_length=7,
                 env__num_envs=9),
     [((0, 1, 2), (0, 1, 2), 1, 2), ((3,), (0, 1, 2), 3, 1)])])
@pytest.mark.same_bits('1 to 4 actors and learners, shared or split, 1 to 4 shards an actor, '
                       '1 and 2 threads',
                       'IMPALA, PPO: MLP (`sync`, `cleanba`, `fused`)')
def test_shards_devices_and_threads_change_no_bit(loss, shape, places):
  config = changed(small(loss), **shape)
  expected, _, _ = run(config)
  if config['scheme'] == 'sync':
    assert run(changed(config, scheme='fused', placement__updates_per_call=5))[0] == expected
  for actors, learners, per_device, threads in places:
    place = dict(placement__actor_devices=actors, placement__learner_devices=learners,
                 placement__actors_per_device=per_device, placement__env_threads=threads)
    assert run(changed(config, **place))[0] == expected, place


def test_a_plain_reduction_gives_the_same_training_but_for_rounding():
  """Without `exact_reduce` the first batch is the same and the parameters are nearly equal."""
  config = changed(small(), num_grad_shards=4, num_minibatches=1, placement__learner_devices=(0, 1))
  (exact,), _, exact_state = run(config, updates=1)
  (plain,), _, plain_state = run(changed(config, exact_reduce=False), updates=1)
  assert plain[0] == exact[0] and plain[1] != exact[1]
  jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain_state.params,
               exact_state.params)


def test_another_seed_or_segment_gives_other_bits():
  first = _receipts('sync')
  assert run(small())[0] == first
  assert run(changed(small(), seed=2))[0] != first
  assert _run('sync', index=1)[0] != first


def test_a_run_ends_at_the_update_that_reaches_total_steps():
  config = changed(small(), total_steps=150)  # 8 envs x 8 rows, some of them invalid
  for scheme in ('sync', 'cleanba', 'fused'):
    receipts, _, state = run(changed(config, scheme=scheme))
    assert len(receipts) == int(state.update) == 3
    assert int(state.steps) >= 150


@pytest.mark.parametrize('scheme', ['sync', 'fused'])
def test_a_segment_donates_its_train_state(scheme):
  prepared_run = prepared(_config(scheme))
  state = initial_state(prepared_run)
  with build.segment(prepared_run, state, 0, 2, lambda report: None) as segment:
    loops.run(segment.workers)
  assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))


def test_a_learner_is_started_while_the_rollout_is_made():
  config = changed(small(), scheme='sync', unroll_length=3000)
  ready = []

  def look(call, state, item):
    ready.append(jax.tree.leaves(item.value)[-1].is_ready())

  run(config, updates=4, tamper=wrap('learner', before=look))
  assert len(ready) == 4 and not all(ready)


def test_on_one_device_the_learner_uses_the_actors_arrays():
  rollouts = []
  batches = []
  prepared_run = prepared(small())

  def learner(state, batch):
    batches.append(batch)
    return program(state, batch)

  program = prepared_run.learner.program
  watched = copy.copy(prepared_run.learner)
  watched.program = learner
  run(None, loops.run_serial, 3, prepared_run=dataclasses.replace(prepared_run, learner=watched),
      tamper=wrap('actor 0', after=lambda call, state, outputs: rollouts.append(outputs[0].value)))
  for (rollout,), batch in zip(rollouts, batches, strict=True):
    assert jax.tree.all(jax.tree.map(lambda x, y: x is y, rollout, batch))


class Broken(Exception):
  pass


@pytest.mark.parametrize('scheme', ['sync', 'cleanba', 'fused'])
@pytest.mark.parametrize('name', ['actor 0', 'learner', 'writer'])
def test_an_error_of_any_worker_ends_the_run(scheme, name):
  if scheme == 'fused' and name == 'actor 0':
    pytest.skip('fused has no actor of its own')
  def breaks(call, *_):
    if call.number == 3:
      raise Broken(f'{name} is broken')

  start = time.monotonic()
  with pytest.raises(Broken, match=f'{name} is broken'):
    _run(scheme, tamper=wrap(name, before=breaks))
  assert time.monotonic() - start < 60  # with compilation
