"""Whole schemes: exact lags, ends, errors; `tests.exact` compares bits."""

import copy
import dataclasses
import time

import jax
import pytest
from numpy.testing import assert_allclose

from podracer_jit import loops
from podracer_jit.experiment import build
from tests.runs import changed, initial_state, prepared, run, small
from tests.workers import wrap


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


def test_a_call_of_fused_reports_each_of_its_updates():
  _, reports, _ = run(changed(small(), scheme='fused', placement__updates_per_call=4))
  assert [report.count for report in reports] == [4, 2]


def _config(scheme, loss='impala'):
  return changed(small(loss), scheme=scheme, placement__updates_per_call=2)


def _run(scheme, loss='impala', **options):
  return run(_config(scheme, loss), **options)


def test_a_plain_reduction_gives_the_same_training_but_for_rounding():
  """Without `exact_reduce` the first batch is the same and the parameters are nearly equal."""
  config = changed(small(), num_grad_shards=4, num_minibatches=1, placement__learner_devices=(0, 1))
  (exact,), _, exact_state = run(config, updates=1)
  (plain,), _, plain_state = run(changed(config, exact_reduce=False), updates=1)
  assert plain[0] == exact[0] and plain[1] != exact[1]
  jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain_state.params,
               exact_state.params)


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
  with build.segment(prepared_run, build.Snapshot(state), 2, lambda report: None) as segment:
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
  learner.lower = program.lower
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
