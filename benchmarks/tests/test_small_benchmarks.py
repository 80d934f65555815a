"""Small benchmarks measure something and write a file."""

import json

import pytest

from benchmarks import in_turn
from benchmarks.tests.run import run_benchmark


def test_schemes_are_measured(tmp_path):
  path = tmp_path / 'x.json'
  process = run_benchmark('schemes', '--config=configs/ppo_cartpole.py:smoke',
                          '--schemes=sync,impala', '--workers=1', '--seconds=0', f'--json={path}')
  assert process.returncode == 0, process.stderr
  rows = json.loads(path.read_text())
  assert [(row['scheme'], row['workers']) for row in rows] == [('sync', 1), ('impala', 1)]
  assert all(row['fps'] > 0 for row in rows)


def test_networks_are_measured(tmp_path):
  path = tmp_path / 'x.json'
  process = run_benchmark('networks', '--rows=4', '--rounds=1', '--seconds=0', f'--json={path}')
  assert process.returncode == 0, process.stderr
  rows = json.loads(path.read_text())
  assert [row['variant'] for row in rows] == ['flax', 'formulations', 'max_pool', 'chunks']
  assert all(row['forward'] > row['gradient'] > 0 for row in rows)


def test_the_cost_of_evaluations_is_measured():
  process = run_benchmark('evaluations', '--every_updates=2', '--episodes=2', '--pairs=1',
                          '--config=ppo_cartpole:smoke')
  assert process.returncode == 0, process.stderr
  assert 'evaluations of' in process.stdout and 'equal receipts' in process.stdout


@pytest.mark.parametrize('name', ['async_actors', 'evaluations', 'in_turn', 'reduction', 'replay',
                                  'same_receipts', 'scaling', 'schemes', 'startup'])
def test_help_names_the_command(name):
  process = run_benchmark(name, '--help')
  assert process.returncode == 0 and f'python -m benchmarks.{name}' in process.stdout


def _figures(sps, apart):
  return {'parts': {'rollout': {'sps': sps}}, 'derived': {'cores_apart_ns': apart}}


def test_in_turn_counts_pairs_with_the_same_core_distance():
  pairs = [(_figures(100, 90), _figures(90, 95)), (_figures(100, 90), _figures(50, 300)),
           (_figures(100, 300), _figures(110, 280)), (_figures(100, 90), _figures(95, 90))]
  assert in_turn.table('catch', pairs) == [
      'catch                rollout     0.950    0.900    1.100   3 of 4']


def test_in_turn_counts_every_pair_without_a_common_core_distance():
  assert in_turn.table('catch', [(_figures(100, 90), _figures(50, 300))])[0].endswith('1 of 1')
  assert in_turn.table('catch', [(_figures(100, None), _figures(50, None))])[0].endswith('1 of 1')
