"""Benchmarks without tests of their own: each measures something and writes it down."""

import json

import pytest

from benchmarks.tests.run import run_benchmark


def test_schemes_are_measured(tmp_path):
  path = tmp_path / 'x.json'
  done = run_benchmark('schemes', '--config=configs/ppo_cartpole.py:smoke', '--schemes=sync,impala',
                       '--workers=1', '--seconds=0', f'--json={path}')
  assert done.returncode == 0, done.stderr
  rows = json.loads(path.read_text())
  assert [(row['scheme'], row['workers']) for row in rows] == [('sync', 1), ('impala', 1)]
  assert all(row['fps'] > 0 for row in rows)


def test_networks_are_measured(tmp_path):
  path = tmp_path / 'x.json'
  done = run_benchmark('networks', '--rows=4', '--rounds=1', '--seconds=0', f'--json={path}')
  assert done.returncode == 0, done.stderr
  rows = json.loads(path.read_text())
  assert [row['variant'] for row in rows] == ['flax', 'formulations', 'max_pool', 'chunks']
  assert all(row['forward'] > row['gradient'] > 0 for row in rows)


@pytest.mark.parametrize('name', ['async_actors', 'reduction', 'replay', 'scaling', 'schemes',
                                  'startup'])
def test_help_names_the_command(name):
  done = run_benchmark(name, '--help')
  assert done.returncode == 0 and f'python -m benchmarks.{name}' in done.stdout
