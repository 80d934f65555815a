"""The benchmark of asynchronous actors measures both kinds of actors."""

import json

import pytest

from benchmarks.tests.run import run_benchmark


@pytest.mark.full
def test_the_benchmark_measures_both_kinds_of_actors(tmp_path):
  args = ['--config=configs/ppo_cartpole.py', '--config.env.num_envs=4',
          '--config.unroll_length=4', '--config.num_minibatches=1', '--batches=1,2',
          '--shards=1,2', '--rounds=2', '--seconds=0.1', '--steps=200',
          f'--json={tmp_path / "x.json"}']
  process = run_benchmark('async_actors', *args)
  assert process.returncode == 0, process.stderr[-4000:]
  figures = json.loads((tmp_path / 'x.json').read_text())
  assert set(figures['sps']) == {'async 1', 'async 2', 'sync 1', 'sync 2'}
  assert all(len(rates) == 2 and min(rates) > 0 for rates in figures['sps'].values())
  assert figures['step_ms']['p50'] <= figures['step_ms']['p99'] <= figures['step_ms']['max']
  process = run_benchmark('async_actors', args[0], '--shards=')
  assert process.returncode == 2 and '--shards' in process.stderr
