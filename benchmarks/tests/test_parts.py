"""The benchmark: its conventional actor makes the jitted actor's rollouts; its figures agree."""

import contextlib
import gc
import importlib
import json
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from benchmarks.parts import (
  __main__,
  conventional,
  core_distance,
  memory_use,
  picture,
  rounds,
  segments,
  timed_parts,
  training,
)
from benchmarks.tests.run import ROOT, run_benchmark
from podracer_jit import experiment
from podracer_jit.cli import configs
from podracer_jit.experiment.resolve import changed, resolve
from podracer_jit.runtime.channels import Versioned
from tests import processes
from tests.runs import fresh

pytestmark = pytest.mark.full


def _cartpole():
  config = experiment.config('ppo', 'mlp', 'adam', scheme='sync')
  config.env.task = 'CartPole-v1'
  config.env.num_envs = 8
  config.num_shards = 2
  config.unroll_length = 64
  return config.to_dict()


def _pong():
  config = experiment.config('impala', 'nature_cnn', 'adam', scheme='sync')
  config.env.task = 'Pong-v5'
  config.env.num_envs = 4
  config.env.max_episode_steps = 8
  config.unroll_length = 12
  config.network.update(channels=(4,), kernels=(8,), strides=(8,), hidden=16)
  return config.to_dict()


def _metaworld():
  """Its resets have rewards, which are not the agent's."""
  config = experiment.config('ppo', 'mlp', 'adam', scheme='sync')
  config.env.task = 'MetaWorld/Assembly-v3'
  config.env.num_envs = 2
  config.env.max_episode_steps = 5
  config.unroll_length = 12
  return config.to_dict()


def _two_rollouts(worker, params):
  rollouts = []
  state = worker.state
  for version in range(2):
    state, (item,) = worker.fire(state, Versioned(params, version))
    assert item.version == version
    # The conventional actor does not look for values that cannot be learned from.
    rollouts.append(jax.device_get([shard._replace(episodes=shard.episodes._replace(fault=None))
                                    for shard in item.value]))
  return rollouts


@pytest.mark.parametrize('config', [_cartpole, _pong, _metaworld])
def test_the_conventional_actor_makes_the_same_rollouts(config):
  run = fresh(config())
  state = run.initial_state()
  for_actors = run.experiment.algorithm.for_actors(state)
  policy = conventional.make_policy(run.experiment.algorithm)
  pools = segments.pools_of(run, 0)
  with contextlib.ExitStack() as stack:
    segment = segments.begin(run, state, 'sync', False, stack, print, lambda: False)
    conventional_rollouts = []
    for on_host in (True, False):
      worker, close = conventional.replace_actor(
          segment.workers[0], pools, run.place.actors[0], policy, run.experiment.unroll_length,
          run.experiment.spec.stack, on_host)
      stack.callback(close)
      conventional_rollouts.append(_two_rollouts(worker, for_actors))
    jitted = _two_rollouts(segment.workers[0], for_actors)
  assert any(shard.episodes.ended.any() for rollout in jitted for shard in rollout)
  assert not all(shard.valid.all() for rollout in jitted for shard in rollout)
  for rollouts in conventional_rollouts:
    jax.tree.map(_assert_same, jitted, rollouts)


def _assert_same(jitted, expected):
  assert jitted.dtype == expected.dtype and jitted.shape == expected.shape
  if jitted.dtype == np.float32:
    np.testing.assert_allclose(expected, jitted, rtol=1e-5, atol=1e-6)
  else:
    np.testing.assert_array_equal(expected, jitted)


def test_a_failure_of_a_worker_ends_the_measurement(monkeypatch):
  def broken(self, action):
    raise OSError('the emulator is gone')

  monkeypatch.setattr(conventional.Pool, '_step', broken)
  run = fresh(_cartpole())
  with contextlib.ExitStack() as stack:
    part = training.Training(run, run.initial_state(), 'sync', True, stack)
    with pytest.raises(RuntimeError) as raised:
      part(0.0)
  assert 'the emulator is gone' in str(raised.value.__cause__)


def _run(*args, config='impala_catch'):
  done = run_benchmark('parts', f'--config=configs/{config}.py:smoke', '--config.env.num_envs=8',
                       '--config.unroll_length=5', *args)
  return done.returncode, done.stdout, done.stderr


def test_every_part_is_measured(tmp_path):
  path = tmp_path / 'figures.json'
  picture = tmp_path / 'round.png'
  code, out, err = _run('--seconds=0.05', '--rounds=2', f'--json={path}', f'--picture={picture}')
  assert code == 0, err
  figures = json.loads(path.read_text())
  parts = figures['parts']
  assert list(parts) == list(timed_parts.NAMES)
  for name, row in parts.items():
    assert 1 <= len(row['rounds']) == 2 - row['left_out']
    assert all(sps > 0 for sps in row['rounds'])
    assert row['sps'] == pytest.approx(np.median(row['rounds']))
    assert row['seconds_per_update'] > 0
    for base in ('environment', 'conventional_sync', 'conventional_cleanba'):
      assert row[f'to_{base}'] == pytest.approx(row['sps'] / parts[base]['sps'])
    assert any(line.startswith(name + ' ') and f'{row["sps"]:,.0f}' in line
               for line in out.splitlines())
  in_turn = figures['derived']['one_after_another_sps']
  assert in_turn < min(parts['rollout']['sps'], parts['learner']['sps'])
  _check_ratios(figures, parts)
  _check_round(figures['round'], out)
  _check_memory(parts, figures['round']['memory'])
  assert picture.read_bytes().startswith(b'\x89PNG')
  assert figures['machine']['cores'] >= 1 and 'envpool' in figures['machine']['versions']


def _check_ratios(figures, parts):
  """Computes the ratios from the seconds of the table; an unroll has 5 steps."""
  seconds = {name: row['seconds_per_update'] for name, row in parts.items()}
  derived = figures['derived']
  assert derived['rollout_to_slower_of_environment_and_policy'] == pytest.approx(
      seconds['rollout'] / (1.2 * max(seconds['environment'], seconds['policy'])))
  for scheme in ('sync', 'cleanba', 'fused'):
    halves = [seconds['rollout'], seconds['learner']]
    assert derived[f'{scheme}_to_slower_of_rollout_and_learner'] == pytest.approx(
        seconds[scheme] / max(halves))
    assert derived[f'{scheme}_to_sum_of_rollout_and_learner'] == pytest.approx(
        seconds[scheme] / sum(halves))


def _check_memory(parts, programs):
  """A rollout has 8 environments and 5 steps of 50 observed floats, 6 numbers and 4 bytes.

  The first fault of each environment is five numbers more.
  """
  batch = 8 * (6 * 50 * 4 + 5 * (6 * 4 + 4) + 5 * 4) / 1e6
  needs = {name: sum(sizes.values()) / 1e6 for name, sizes in programs.items()}
  total = needs['rollout'] + needs['learner']
  computed = dict(rollout=needs['rollout'], learner=needs['learner'], sync=total - batch,
                  cleanba=total + batch)
  assert {name: parts[name]['computed_mb'] for name in computed} == pytest.approx(computed)
  assert parts['environment']['computed_mb'] < needs['rollout'] / 2  # one observation
  assert parts['environment']['peak_mb'] > 0


def test_memory_in_use_counts_allocated_and_not_freed_memory():
  gc.collect()
  before = memory_use.in_use()
  kept = bytearray(2**26)
  most = memory_use.most_in_use(lambda: (bytearray(2**25), time.sleep(0.05)))
  after = memory_use.in_use() - before
  assert most - before > 90 and 60 <= after < 75 and len(kept)  # 67 MB are kept, 33 MB are freed


def _check_round(measured, out):
  """Checks that the parts of each worker add up to the round, and belong to the right worker."""
  assert set(measured['lanes']) == {'actor 0', 'learner'}
  for name, parts in measured['lanes'].items():
    assert sum(parts.values()) == pytest.approx(measured['seconds']) and name in out
    assert all(seconds >= -1e-9 for seconds in parts.values())
  actor = measured['lanes']['actor 0']
  learner = measured['lanes']['learner']
  assert all(actor[part] > 0 for part in ('environment', 'policy', 'storing', 'transfer'))
  assert all(learner[part] > 0 for part in ('gradient', 'update', 'transfer', 'waiting'))
  assert not actor.get('gradient') and not learner.get('environment') and not learner.get('policy')
  for sizes in measured['memory'].values():
    assert sizes['arguments_and_results'] > 0 and sizes['temporaries'] > 0


def test_a_config_with_a_replay_is_measured(tmp_path):
  path = tmp_path / 'figures.json'
  code, out, err = _run('--seconds=0', '--rounds=1', f'--json={path}', '--rounds_of=sync',
                        config='apex_dqn_catch')
  assert code == 0, err
  figures = json.loads(path.read_text())
  assert list(figures['parts']) == [n for n in timed_parts.NAMES if 'conventional' not in n]
  _check_ratios(figures, figures['parts'])
  _check_round(figures['round'], out)
  assert figures['round']['lanes']['learner']['storing'] > 0
  assert figures['round']['scheme'] == 'sync'
  code, _, err = _run('--parts=conventional_sync', config='apex_dqn_catch')
  assert code == 2 and 'conventional' in err and 'replay' in err


@pytest.mark.parametrize('name', configs.shipped())
def test_every_shipped_config_can_be_measured(name):
  experiment = resolve(importlib.import_module(f'podracer_jit.configs.{name}').get_config())
  measured = changed(experiment, scheme='sync', **segments.small_replay(experiment))
  assert measured.scheme_name == 'sync'
  assert (measured.replay is None) == (experiment.replay is None)


def test_an_asynchronous_actor_is_measured(tmp_path):
  path = tmp_path / 'figures.json'
  code, out, err = _run('--seconds=0', '--rounds=1', f'--json={path}', '--config.env_batch=4')
  assert code == 0, err
  figures = json.loads(path.read_text())
  assert list(figures['parts']) == ['rollout', 'learner', 'sync', 'cleanba']
  assert figures['derived']['sync_to_sum_of_rollout_and_learner'] > 0
  _check_round(figures['round'], out)
  code, _, err = _run('--parts=environment', '--config.env_batch=4')
  assert code == 2 and 'environment' in err and 'env_batch' in err


def test_operations_are_assigned_to_named_scopes():
  text = """HloModule jit_rollout, entry
%body (p: f32[]) -> f32[] {
  %a.1 = f32[2]{0} add(%p, %p), metadata={op_name="jit(rollout)/while/body/policy/Dense/add"}
  %copy.2 = f32[2]{0} copy(%a.1)
  %f.3 = (f32[2]{0}, s32[]) custom-call(%a.1), metadata={op_name="jit(r)/environment/ffi_call"}
  ROOT %b = f32[2]{0} multiply(%a.1, %a.1), metadata={op_name="jit(rollout)/policy/mul"}
}

ENTRY %main (p: f32[]) -> f32[] {
  %while.1 = f32[2]{0} while(%p), condition=%c, body=%body, metadata={op_name="policy/while"}
  ROOT %plus = f32[2]{0} add(%while.1, %while.1), metadata={op_name="jit(rollout)/plus"}
}
"""
  assert rounds.operations(text, ('environment', 'policy')) == {
      'a.1': 'policy', 'copy.2': 'policy', 'f.3': 'environment', 'b': 'policy',
      'plus': 'other arithmetic'}


# Distances of the cores before and after a measurement.
NEAR = (90.0, 110.0)
FAR = (510.0, 490.0)
MOVED = (100.0, 500.0)


@pytest.mark.parametrize('rounds_of, expected', [
    # Every part has at least two near rounds and one far round.
    (dict(a=[(1, NEAR), (2, FAR), (3, NEAR)], b=[(4, MOVED), (5, NEAR), (6, NEAR), (7, FAR)]),
     (dict(a=[1, 3], b=[5, 6]), 100.0)),
    (dict(a=[(1, NEAR), (2, FAR), (3, FAR)], b=[(4, FAR), (5, FAR), (6, NEAR)]),
     (dict(a=[2, 3], b=[4, 5]), 500.0)),
    # Near and far are equally common.
    (dict(a=[(1, NEAR), (2, FAR)], b=[(3, FAR), (4, NEAR)]), (dict(a=[1], b=[4]), 100.0)),
    # No distance is common to all parts.
    (dict(a=[(1, NEAR)], b=[(2, FAR), (3, MOVED)]), (dict(a=[1], b=[2, 3]), 300.0)),
    # There is a single core, or the distance never changes.
    (dict(a=[(1, (0.0, 0.0)), (2, (0.0, 0.0))]), (dict(a=[1, 2]), 0.0)),
    (dict(a=[(1, FAR), (2, FAR)]), (dict(a=[1, 2]), 500.0))])
def test_only_rounds_with_the_most_common_core_distance_count(rounds_of, expected):
  assert core_distance.comparable(rounds_of) == expected


def test_the_distance_of_two_cores_is_plausible(monkeypatch):
  """A round trip between two cores takes more than 10 ns; a single core has distance 0."""
  if len(core_distance.os.sched_getaffinity(0)) > 1:
    assert 10 < core_distance.apart_ns() < 1e6
  monkeypatch.setattr(core_distance.os, 'sched_getaffinity', lambda pid: {3})
  assert core_distance.apart_ns() == 0


def test_shares_of_overlapping_spans_add_up():
  spans = [(-1, 1, 'policy'), (2, 4, 'policy'), (3, 6, 'environment'), (8, 20, 'update')]
  assert rounds.shares(spans, 0.0, 10.0) == pytest.approx(
      {'policy': 1 + 1 + 0.5, 'environment': 0.5 + 2, 'update': 2, 'between': 1 + 2})


def test_the_picture_of_a_round_draws_one_bar_for_a_span(tmp_path):
  pytest.importorskip('matplotlib')
  spans = [(0.0, 4.0, 'environment'), (4.0, 5.0, 'policy'), (5.0, 8.0, 'environment'),
           (8.0, 9.0, 'policy')]
  lanes = {'actor 0': dict(rounds.shares(spans, 0.0, 10.0))}
  measured = rounds.Round(10.0, 10.0, lanes, {'actor 0': spans}, [], [0.0, 10.0], {})
  picture.draw(measured, str(tmp_path / 'round.svg'))
  drawn = (tmp_path / 'round.svg').read_text()
  bars = re.findall(r'<path d="[^"]*" clip-path="[^"]*" style="fill: (#\w+)"', drawn)
  assert len(bars) == len(spans) and len(set(bars)) == 2
  picture.draw(measured, str(tmp_path / 'round.png'))
  assert (tmp_path / 'round.png').stat().st_size > 1000


def test_time_of_a_program_counts_before_its_thread_wakes():
  regions = [(0, 1, 'rollout'), (1, 5, 'wait: parameters for actor 0 to be made'),
             (5, 6, 'transfer: rollouts of actor 0'), (6, 9, 'make: rollouts of actor 0')]
  ops = [(4, 7, 'policy'), (7, 8, 'environment')]
  parts, spans = rounds.lane(regions, ops, 0, 10)
  assert parts == pytest.approx(dict(
      policy=1 + 1, environment=1, waiting=3, transfer=1, between=1 + 1, other=1))
  assert (1, 4, 'waiting') in spans


def test_an_update_is_counted_once():
  regions = [(0, 1, 'learn'), (1, 2, 'make: parameters for actor 0'), (2, 3, 'make: reports'),
             (3, 4, 'transfer: reports'), (4, 5, 'make: reports')]
  assert rounds._workers({7: regions}) == ({'learner': regions}, [4])


def test_between_measurements_a_training_computes_nothing():
  run = fresh(_cartpole())
  with contextlib.ExitStack() as stack:
    part = training.Training(run, run.initial_state(), 'cleanba', False, stack)
    part(0.0)
    outputs = dict(part._last_outputs)
    assert set(outputs) == {'actor 0', 'learner'}
    assert all(isinstance(x, jax.Array) and x.is_ready() for x in outputs.values())


def test_parts_can_be_chosen_and_fused_is_left_out_on_two_devices(tmp_path):
  path = tmp_path / 'figures.json'
  code, _, err = _run('--seconds=0', '--rounds=1', f'--json={path}', '--parts=fused,cleanba',
                      '--rounds_of=',
                      '--config.placement.actor_devices=(0,1)', '--config.num_shards=2',
                      '--config.placement.learner_devices=(0,1)', '--config.num_grad_shards=2')
  assert code == 0, err
  parts = json.loads(path.read_text())['parts']
  assert list(parts) == ['cleanba'] and parts['cleanba']['to_environment'] is None


@pytest.mark.parametrize('part, message', [
    ('shards1_sync', 'cannot share num_shards = 1 evenly'), ('fused', 'nothing is left')])
def test_a_part_that_does_not_fit_the_placement_is_refused(part, message):
  code, out, err = _run(f'--parts={part}', '--config.num_minibatches=4',
                        '--config.placement.actor_devices=(0,1)',
                        '--config.placement.learner_devices=(0,1)', config='pong_laptop')
  assert code == 2 and not out and message in err.splitlines()[-1]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_parts_are_told_as_they_are_measured_and_kept_by_a_signal(tmp_path, number):
  """The signal comes after the first line about a part, far before the last of the rounds."""
  path = tmp_path / 'figures.json'
  command = [sys.executable, '-P', '-m', 'benchmarks.parts', '--config=impala_catch:smoke',
             '--parts=policy,rollout', '--rounds=100000', '--seconds=100000', f'--json={path}']
  with processes.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                       text=True) as process:
    lines = []
    while not lines or not lines[-1].startswith('policy: '):
      lines.append(process.stderr.readline())
      assert lines[-1], lines
    assert not path.exists() and process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
  assert process.returncode == 128 + number
  assert re.fullmatch(r'policy: [\d,]+ SPS \(round 1 of 100000\)\n', lines[-1])
  parts = json.loads(path.read_text())['parts']
  assert 'policy' in parts and parts['policy']['sps'] > 0
  assert any(line.startswith('policy ') and f'{parts["policy"]["sps"]:,.0f}' in line
             for line in out.splitlines())
  last = err.splitlines()[-1]
  assert last.startswith(f'parts: interrupted by {number.name}; not measured: ')
  assert 'the round of cleanba' in last


def test_the_time_ends_a_measurement_and_a_failure_is_raised():
  never = threading.Event()
  assert __main__.ended(never.wait, 0.01) == (
      0, 'a minute is over (--seconds and --parts take as long as they need)')
  never.set()
  assert __main__.ended(never.wait, None) == (0, None)
  with pytest.raises(ZeroDivisionError):
    __main__.ended(lambda: 1 / 0, None)


@pytest.mark.parametrize('names, scheme, expected', [
    (['policy', 'sync', 'cleanba', 'fused'], 'cleanba', ['policy', 'sync', 'cleanba', 'fused']),
    (['policy', 'sync', 'cleanba', 'fused'], 'fused', ['policy', 'fused', 'sync', 'cleanba']),
    (['policy', 'fused'], 'fused', ['policy', 'fused']), (['sync'], 'fused', ['sync'])])
def test_a_config_that_is_fused_is_measured_fused_first(names, scheme, expected):
  assert __main__.in_order(names, scheme) == expected


def test_an_unknown_part_is_refused():
  code, _, err = _run('--parts=rolout')
  assert code == 2
  assert 'rolout' in err and 'rollout' in err


def test_without_matplotlib_a_picture_is_refused_in_one_line(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  monkeypatch.setattr(sys, 'argv', [])  # restores argv after the test
  argv = ['x', '--config=configs/impala_catch.py:smoke', '--picture=round.png']
  assert __main__.main(argv) == 2
  assert capsys.readouterr().err == ('parts: --picture: drawing needs matplotlib: '
                                     'pip install matplotlib\n')
