"""Whole schemes: exact lags, and the same bits however the same experiment is run."""

import collections
import functools
import random
import re
import sys
import time

import jax
import pytest
from numpy.testing import assert_allclose

from podracer_jit import loops
from podracer_jit.actor import rollouts
from podracer_jit.configs import apex_dpg_dmc, apex_dqn_atari, apex_dqn_catch, impala_atari
from podracer_jit.envs import envpool_envs
from podracer_jit.learner import rollout_updates
from podracer_jit.run import build, experiment
from podracer_jit.runtime import channels
from podracer_jit.schemes import wiring
from tests.runs import changed, initial_state, run, small
from tests.workers import not_writer, wrap

CASES = {
    'impala-mlp': lambda: small('impala'),
    'ppo-mlp': lambda: small('ppo', num_epochs=2),
    'impala-cnn': lambda: small('impala', 'Pong-v5', 'impala_resnet'),
    'ppo-cnn': lambda: small('ppo', 'Pong-v5', 'nature_cnn', num_epochs=2),
}


@pytest.mark.parametrize('case', ['impala-mlp', 'ppo-mlp'])
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
  steps = 2  # minibatches
  cgd = [steps * lag + (steps - 1) / 2 for lag in lags]
  assert [report.cgd for report in reports] == [(x,) for x in cgd]
  serial, reports, _ = run(config, loops.run_serial)
  assert [report.cgd for report in reports] == [(x,) for x in cgd]
  assert threads == serial


@functools.cache
def _parts(scheme, loss='impala'):
  """Compiled once for all tests that run it in the same way."""
  return build.make_parts(changed(small(loss), scheme=scheme, placement__updates_per_call=2))


def _run(*which, **how):
  parts = _parts(*which)
  return run(parts.config, parts=parts, **how)


@functools.cache
def _receipts(*which):
  return _run(*which)[0]


def test_lag_one_is_not_lag_zero():
  assert _receipts('sync') != _receipts('cleanba')


@pytest.mark.parametrize('loss', ['impala', 'ppo'])
@pytest.mark.parametrize('scheme', ['sync', 'cleanba'])
@pytest.mark.parametrize('slow', ['learner', 'actor', 'writer'])
def test_a_slow_side_changes_no_bit(loss, scheme, slow):
  slowly = wrap(slow, before=lambda *_: time.sleep(random.random() * 0.1))
  assert _run(scheme, loss, tamper=slowly)[0] == _receipts(scheme, loss)


@pytest.mark.parametrize('case', ['impala-cnn', 'ppo-cnn'])
def test_placement_changes_no_bit(case):
  config = changed(CASES[case](), num_shards=2, num_grad_shards=2)
  expected, _, _ = run(config)
  assert run(changed(config, scheme='fused', placement__updates_per_call=4))[0] == expected
  for actors, learners, per_device in (((0, 1), (0, 1), 1), ((0,), (2, 3), 2)):
    other = changed(config, placement__actor_devices=actors, placement__learner_devices=learners,
                    placement__actors_per_device=per_device, placement__env_threads=1)
    assert run(other)[0] == expected, (actors, learners, per_device)


@pytest.mark.parametrize('loss, shape, places', [
    # Four shards on 1, 2 and 4 actors, interleaved or not; 1, 2 and 4 learners, apart or shared.
    ('impala', dict(num_shards=4, num_grad_shards=4),
     [((0, 1, 2, 3), (0, 1, 2, 3), 1, 1), ((0, 1), (2, 3), 2, 2), ((4, 5), (0,), 1, 2)]),
    ('ppo', dict(num_shards=4, num_grad_shards=4, scheme='cleanba'),
     [((0, 1, 2, 3), (0, 1, 2, 3), 1, 1), ((0, 1), (2, 4), 1, 2)]),
    ('impala', dict(num_shards=4, num_grad_shards=4, scheme='cleanba'),
     [((0, 1, 2, 3), (0, 1, 2, 3), 1, 1)]),
    ('ppo', dict(num_shards=4, num_grad_shards=4), [((0, 1, 2, 3), (0, 1, 2, 3), 1, 1)]),
    # Nothing is a power of two.
    ('ppo', dict(num_shards=3, num_grad_shards=3, num_minibatches=1, unroll_length=7,
                 env__num_envs=9),
     [((0, 1, 2), (0, 1, 2), 1, 2), ((3,), (0, 1, 2), 3, 1)])])
def test_shards_devices_and_threads_change_no_bit(loss, shape, places):
  config = changed(small(loss), **shape)
  expected, _, _ = run(config)
  if config['scheme'] == 'sync':
    assert run(changed(config, scheme='fused', placement__updates_per_call=5))[0] == expected
  for actors, learners, per_device, threads in places:
    place = dict(placement__actor_devices=actors, placement__learner_devices=learners,
                 placement__actors_per_device=per_device, placement__env_threads=threads)
    assert run(changed(config, **place))[0] == expected, place


def test_a_plain_reduction_is_the_same_training_but_for_rounding():
  """`exact_reduce` off: one group a device; the first batch is the same, the parameters nearly."""
  config = changed(small(), num_grad_shards=4, num_minibatches=1, placement__learner_devices=(0, 1))
  (exact,), _, one = run(config, updates=1)
  (plain,), _, other = run(changed(config, exact_reduce=False), updates=1)
  assert plain[0] == exact[0] and plain[1] != exact[1]
  jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-6), one.params, other.params)


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


def test_nothing_is_compiled_within_a_segment():
  config = changed(small(), scheme='cleanba')
  compiled = []

  def watch(call, *_):
    if call.number == 3:  # by then everything has run once, lag and all
      jax.monitoring.register_event_duration_secs_listener(listen)

  def listen(event, duration, **kwargs):
    if 'backend_compile' in event:
      compiled.append(event)

  try:
    run(config, updates=8, tamper=wrap('learner', before=watch))
    assert not compiled
    jax.jit(lambda x: x * 3.25)(1.5)  # the listener does hear
    assert compiled
  finally:
    jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize('scheme', ['sync', 'cleanba', 'fused', 'apex_lockstep'])
def test_programs_are_called_without_python(scheme):
  """After a first call JAX leaves the others to C++, unless a program has effects."""
  config = apex_dqn_catch.get_config().to_dict() if scheme == 'apex_lockstep' else small()
  config = changed(config, scheme=scheme, placement__updates_per_call=1)
  seen = collections.defaultdict(list)

  def profiled(call, *args):
    files = []
    seen[call.worker].append(files)
    sys.setprofile(lambda frame, event, arg: files.append(frame.f_code.co_filename))
    try:
      return call.fire(*args)
    finally:
      sys.setprofile(None)

  run(config, updates=8, tamper=wrap(not_writer, instead=profiled))
  assert {name.split()[0] for name in seen} >= ({'learner'} if scheme == 'fused' else
                                                {'actor', 'learner'})
  for name, calls in seen.items():
    by_python = [sum(file.endswith('interpreters/pxla.py') for file in call) for call in calls]
    assert by_python[0] and len(calls) == 8
    assert not any(by_python[3:]), f'{name}: {by_python}'


@pytest.mark.parametrize('module', [impala_atari, apex_dqn_atari, apex_dpg_dmc])
def test_programs_can_be_made_for_gpus(module):
  """Lowered for CUDA, R has EnvPool's calls, each with side effects, and learning none of a CPU."""
  config = module.get_config('smoke').to_dict()
  config['env']['num_envs'], config['num_grad_shards'] = 16, 4
  parts, shards = build.make_parts(config), config['num_shards']
  pools = rollouts.Pools([
      envpool_envs.Shard(config['env']['task'], experiment.env_options(config),
                 envpool_envs.env_seeds(1, 0, i, 16 // shards)) for i in range(shards)])
  keys = [jax.random.key(i) for i in range(shards)]
  state = initial_state(parts), build.actor_state(parts, pools.shards, keys, 0)
  made = jax.jit(wiring.make_rollout(parts, pools)).trace(state[0].params, state[1])
  text = made.lower(lowering_platforms=('cuda',)).as_text()
  pools.close()
  calls = re.findall(r'custom_call @(\w+)_(\w+)\(.*has_side_effect = (\w+)', text)
  assert len({pool for pool, _, _ in calls}) == shards
  assert {tuple(kind) for _, *kind in calls} == {('recv', 'true'), ('send', 'true')}
  assert text.count('custom_call') == len(calls)
  rollout = jax.eval_shape(rollout_updates.concatenate, made.out_info[1])
  learn = jax.jit(parts.learn).trace(state[0], rollout).lower(lowering_platforms=('cuda',))
  assert 'stablehlo.while' in learn.as_text() and 'custom_call' not in learn.as_text()


@pytest.mark.parametrize('scheme', ['sync', 'fused'])
def test_a_segment_keeps_no_second_train_state(scheme):
  parts = _parts(scheme)
  state = initial_state(parts)
  with build.segment(parts, state, 0, 2, lambda report: None) as segment:
    loops.run(segment.workers)
  assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))


def test_transfers_happen_in_hand_offs_alone(monkeypatch):
  """Every device_put of a running loop is made by a hand-off, one for each value it carries."""
  inside, outside, values = [], [], []
  real_put, real_moved = jax.device_put, channels.DoubleBuffer._moved
  depth = []

  def device_put(*args, **kwargs):
    (inside if depth else outside).append(1)
    return real_put(*args, **kwargs)

  def moved(self, item):
    depth.append(1)
    values.append(self.name)
    try:
      return real_moved(self, item)
    finally:
      depth.pop()

  config = changed(small(), placement__learner_devices=(1,))
  parts = build.make_parts(config)
  with build.segment(parts, build.initial_state(parts), 0, 5, lambda report: None) as segment:
    monkeypatch.setattr(jax, 'device_put', device_put)
    monkeypatch.setattr(channels.DoubleBuffer, '_moved', moved)
    with jax.transfer_guard('disallow'):  # silent on CPU; where there is a GPU it speaks
      loops.run_serial(segment.workers)
  assert not outside
  assert values.count('rollouts of actor 0') == 5
  assert values.count('parameters for actor 0') == 4  # the last version nobody would read
  assert len(inside) == 5 + 4


def test_a_learner_is_started_while_the_rollout_is_made():
  config, ready = changed(small(), scheme='sync', unroll_length=3000), []

  def look(call, state, item):
    ready.append(jax.tree.leaves(item.value)[-1].is_ready())

  run(config, updates=4, tamper=wrap('learner', before=look))
  assert len(ready) == 4 and not all(ready)


def test_a_rollout_is_learned_from_where_it_was_made():
  """On one device the batch is the actor's own arrays."""
  made, learned, parts = [], [], build.make_parts(small())

  def learner(state, batch):
    learned.append(batch)
    return parts.learner(state, batch)

  run(None, loops.run_serial, 3, parts=parts._replace(learner=learner), tamper=wrap(
      'actor 0', after=lambda call, state, outputs: made.append(outputs[0].value)))
  for (rollout,), batch in zip(made, learned, strict=True):
    assert jax.tree.all(jax.tree.map(lambda x, y: x is y, rollout, batch))


class Broken(Exception):
  pass


@pytest.mark.parametrize('scheme', ['sync', 'cleanba', 'fused'])
@pytest.mark.parametrize('name', ['actor 0', 'learner', 'writer'])
def test_an_error_anywhere_ends_the_run_with_its_message(scheme, name):
  if scheme == 'fused' and name == 'actor 0':
    pytest.skip('fused has no actor of its own')
  def breaks(call, *_):
    if call.number == 3:
      raise Broken(f'{name} is broken')

  start = time.monotonic()
  with pytest.raises(Broken, match=f'{name} is broken'):
    _run(scheme, tamper=wrap(name, before=breaks))
  assert time.monotonic() - start < 60  # compiling included; a hang would be for ever
