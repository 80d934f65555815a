"""The benchmark of asynchronous actors measures both kinds, and refuses to compare with nothing."""

import json

from benchmarks.tests.run import run_benchmark


def test_the_benchmark_measures_both_ways(tmp_path):
  args = ['--config=configs/ppo_cartpole.py', '--config.env.num_envs=4',
          '--config.unroll_length=4', '--config.num_minibatches=1', '--batches=1,2',
          '--shards=1,2', '--rounds=2', '--seconds=0.1', '--steps=200',
          f'--json={tmp_path / "x.json"}']
  done = run_benchmark('async_actors', *args)
  assert done.returncode == 0, done.stderr[-4000:]
  found = json.loads((tmp_path / 'x.json').read_text())
  assert set(found['sps']) == {'async 1', 'async 2', 'sync 1', 'sync 2'}
  assert all(len(rates) == 2 and min(rates) > 0 for rates in found['sps'].values())
  assert found['step_ms']['p50'] <= found['step_ms']['p99'] <= found['step_ms']['max']
  done = run_benchmark('async_actors', args[0], '--shards=')
  assert done.returncode == 2 and '--shards' in done.stderr
