"""The benchmark of replays: complete rows, correct bytes, and skipped capacities."""

import json

import pytest

from benchmarks.tests.run import run_benchmark

TOO_LARGE = 10**9


def run(*args):
  process = run_benchmark('replay', '--seconds=0.05', *args)
  return process.returncode, process.stdout, process.stderr


def check(row, line, capacity):
  assert row['capacity'] == row['stored'] == capacity
  for name, value in row.items():
    assert name == 'device' or value > 0, name
  assert row['share'] == pytest.approx((row['sample_ms'] + row['update_ms']) / row['step_ms'])
  assert row['bytes_per_transition'] == row['replay_bytes'] / capacity
  assert row['peak_bytes'] >= row['before_bytes']
  cells = line.split()
  for name, form, unit in (
      ('capacity', ',', 1), ('add_ms', '.2f', 1), ('added_per_s', ',.0f', 1),
      ('sample_ms', '.3f', 1), ('update_ms', '.3f', 1), ('step_ms', '.2f', 1),
      ('share', '.1%', 1), ('replay_bytes', ',.1f', 1e6), ('bytes_per_transition', ',.1f', 1),
      ('temporary_bytes', ',.1f', 1e6), ('peak_bytes', ',.1f', 1e6),
      ('before_bytes', ',.1f', 1e6)):
    assert cells.pop(0) == f'{row[name] / unit if unit > 1 else row[name]:{form}}', name
  assert not cells


def tree_bytes(leaves):
  """Returns the bytes of a tree with 16 children a node and one root; levels have whole nodes."""
  total = 1
  while leaves > 1:
    leaves = -(-leaves // 16)
    total += 16 * leaves
  return 4 * total


def frames_bytes(capacity, envs=4, n_step=3, stack=4):
  """Returns the bytes of a ring of frames.

  A row has a frame, `fresh`, an action, a reward and two ends for each environment, and a time.
  """
  rows = -(-capacity // envs) + n_step + stack
  return rows * (envs * (84 * 84 + 1 + 4 + 4 + 2) + 4) + tree_bytes(rows * envs) + 3 * 4


def slots_bytes(capacity, envs=16, unroll=16, n_step=5, obs=24, action=6):
  """Returns the bytes of a replay of whole transitions.

  It has slots for the capacity and one rollout, a ring for incomplete transitions, and two trees.
  """
  slots = capacity + unroll * envs
  rows = unroll + n_step + 1
  ring = rows * (envs * (4 * obs + 1 + 4 * action + 4 + 2) + 4)
  transition = 4 * (2 * obs + action + 3)
  return ring + slots * (transition + 4) + 2 * tree_bytes(slots) + 4 * 4


@pytest.mark.full
def test_every_capacity_of_frames_has_its_row(tmp_path):
  path = tmp_path / 'figures.json'
  code, out, err = run('--config=configs/apex_dqn_atari.py:smoke', f'--json={path}',
                       '--config.replay.evict_every=0',
                       f'--capacities=1000,2000,{TOO_LARGE}', '--config.network.hidden=16')
  assert code == 0, err
  rows = json.loads(path.read_text())
  lines = out.splitlines()
  for row, line, capacity in zip(rows, lines[2:], (1000, 2000), strict=False):
    check(row, line, capacity)
    assert row['replay_bytes'] == frames_bytes(capacity)
  assert 'Pong-v5, dqn: 4 environments x 10 rows at once, batches of 8,' in lines[0]
  assert len(rows) == 3 and len(lines) == 5

  # No program copies the ring.
  small, large, skipped = rows
  grown = large['replay_bytes'] - small['replay_bytes']
  assert large['temporary_bytes'] - small['temporary_bytes'] < grown / 20

  # A capacity that does not fit is skipped.
  assert skipped['capacity'] == TOO_LARGE and set(skipped) == {'capacity', 'skipped'}
  assert f'{TOO_LARGE:,}  skipped: does not fit' in lines[4]
  assert f'takes {frames_bytes(TOO_LARGE) / 1e6:,.1f} MB' in lines[4]


@pytest.mark.full
def test_a_replay_of_whole_transitions_has_the_right_bytes(tmp_path):
  path = tmp_path / 'figures.json'
  code, out, err = run('--config=configs/apex_dpg_walker_walk.py:smoke', '--capacities=4000',
                       '--config.replay.gradient_steps=2', f'--json={path}')
  assert code == 0, err
  (row,) = json.loads(path.read_text())
  check(row, out.splitlines()[2], 4000)
  assert row['replay_bytes'] == slots_bytes(4000)


@pytest.mark.parametrize('arg, message', [
    ('--capacities=1e6', ("'1e6'", 'whole numbers')),
    ('--config=configs/impala_catch.py', ('loss.name', 'impala', 'no replay'))])
def test_bad_arguments_of_the_benchmark_are_refused(arg, message):
  code, _, err = run(arg)
  assert code == 2 and err.count('\n') == 1
  assert all(word in err for word in message)
