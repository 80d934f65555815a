"""Small benchmarks measure something and write a file."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks import back_again, compiled, gymnasium_stress, in_turn
from benchmarks.tests.run import run_benchmark


@pytest.mark.full
def test_schemes_are_measured(tmp_path):
  path = tmp_path / 'x.json'
  process = run_benchmark('schemes', '--config=configs/ppo_cartpole.py:smoke',
                          '--config.placement.updates_per_call=2', '--schemes=sync,fused,impala',
                          '--workers=1', '--seconds=0', f'--json={path}')
  assert process.returncode == 0, process.stderr
  rows = json.loads(path.read_text())
  assert [(row['scheme'], row['workers']) for row in rows] == [
      ('sync', 1), ('fused', 1), ('impala', 1)]
  assert all(row['fps'] > 0 for row in rows)


@pytest.mark.full
def test_networks_are_measured(tmp_path):
  path = tmp_path / 'x.json'
  process = run_benchmark('networks', '--rows=4', '--rounds=1', '--seconds=0', f'--json={path}')
  assert process.returncode == 0, process.stderr
  rows = json.loads(path.read_text())
  assert [row['variant'] for row in rows] == ['flax', 'formulations', 'max_pool', 'chunks']
  assert all(row['forward'] > row['gradient'] > 0 for row in rows)


@pytest.mark.full
def test_the_cost_of_evaluations_is_measured():
  process = run_benchmark('evaluations', '--every_updates=2', '--episodes=2', '--pairs=1',
                          '--config=ppo_cartpole:smoke')
  assert process.returncode == 0, process.stderr
  assert 'evaluations of' in process.stdout and 'equal receipts' in process.stdout


@pytest.mark.full
def test_the_way_back_of_a_stopped_run_is_measured(tmp_path):
  path = tmp_path / 'x.json'
  process = run_benchmark('back_again', '--configs=impala_catch', '--update=4', f'--json={path}')
  assert process.returncode == 0, process.stderr
  (row,) = json.loads(path.read_text())
  assert row['update'] >= 4 and row['replayed'] == row['update'] * 32 * 20
  assert row['back_s'] > 0 and row['begin_s'] > 0 and row['trained_s'] > 0


def test_simulation_alone_is_measured():
  process = run_benchmark('envs', '--tasks=CartPole-v1,Ant-v4', '--num_envs=1,4',
                          '--batches=2', '--seconds=0.05', '--rounds=2', '--threads=1')
  assert process.returncode == 0, process.stderr
  rows = [[cell.strip() for cell in line.split('|')[1:-1]]
          for line in process.stdout.splitlines()[2:]]
  names = ['for-loop', 'sync', 'rollout', 'subprocess']
  assert [row[:3] for row in rows] == [
      [task, str(num_envs), name] for task in ('CartPole-v1', 'Ant-v4')
      for num_envs, of_more in ((1, []), (4, ['async, first 2'])) for name in names + of_more]
  assert all(float(row[3].split()[0].replace(',', '')) > 0 for row in rows)
  refused = run_benchmark('envs', '--tasks=Pong-v6')
  assert refused.returncode == 2 and "EnvPool has no 'Pong-v6'" in refused.stderr


def test_endless_segments_have_no_middle(capsys):
  flags = ['--configs=impala_catch', '--config.env.renew_every_updates=0']
  assert back_again.main(flags) == 2
  assert 'so no update is the middle of a segment; give --update' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['async_actors', 'back_again', 'envs', 'evaluations', 'gpu_day',
                                  'gymnasium_stress', 'in_turn', 'kill_resume', 'parts',
                                  'peers', 'reduction', 'replay', 'same_receipts', 'scaling',
                                  'schemes', 'startup', 'tune'])
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


@pytest.mark.parametrize('file, older', [
    ('benchmarks/parts/__main__.py', ['podracer_jit/__main__.py', 'scripts/benchmark.py']),
    ('podracer_jit/__main__.py', ['podracer_jit/run/commands/benchmark.py']),
    ('scripts/benchmark.py', ['podracer_jit/__main__.py'])])
def test_in_turn_finds_the_benchmark_of_older_commits(file, older, tmp_path):
  program = ("import json, sys\n"
             "path = next(arg for arg in sys.argv if arg.startswith('--json=')).partition('=')[2]\n"
             "open(path, 'w').write(json.dumps(sys.argv))\n")
  for name in (file, *older):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(program if name == file else 'raise SystemExit("older")')
  figures = in_turn.measure(tmp_path, 'x', 'rollout', 1.0, tmp_path / 'figures.json')
  assert (figures[1] == 'benchmark') == file.startswith('podracer_jit')
  assert '--config=configs/x.py' in figures and '--parts=rollout' in figures


@pytest.mark.parametrize('program, problem', [
    ('import time; time.sleep(60)', 'no update for'), ('import sys; sys.exit(7)', 'exit code 7')])
def test_a_training_that_stands_still_or_fails_is_seen(tmp_path, program, problem):
  with subprocess.Popen([sys.executable, '-S', '-c', program]) as process:
    outcome = gymnasium_stress.watch(process, tmp_path, seconds=60, patience_s=4)
  assert outcome.problem.startswith(problem) and outcome.updates == 0


def test_a_process_that_works_wants_a_core():
  """A process that a process has started counts, too."""
  child = f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-c', 'while True: pass'])"
  with subprocess.Popen([sys.executable, '-c', child]) as process:
    while not (workers := gymnasium_stress.descendants(process.pid)):
      assert process.poll() is None
    time.sleep(1)
    assert all(gymnasium_stress.wants_core(process.pid) for _ in range(20))
    process.kill()
  assert len(workers) == 1
  subprocess.run(['kill', *map(str, workers)], check=True)


def test_numbers_of_actors_are_checked(capsys):
  with pytest.raises(SystemExit):
    gymnasium_stress.main(['--actors=2,5'])
  assert 'must be numbers from 1 to 4, got 2,5' in capsys.readouterr().err


@pytest.mark.parametrize('branches', [
    'branch_computations={%short, %long}', 'true_computation=%long, false_computation=%short'])
def test_the_longer_branch_of_a_conditional_counts_in_each_turn(branches):
  turns = 'backend_config={"known_trip_count":{"n":"3"}}'
  text = f"""HloModule jit_f

%short (p: f32[2]) -> f32[2] {{
  %p = f32[2] parameter(0)
  ROOT %a = f32[2] add(%p, %p)
}}

%long (q: f32[2]) -> f32[2] {{
  %q = f32[2] parameter(0)
  %b = f32[2] add(%q, %q)
  ROOT %c = f32[2] multiply(%b, %q)
}}

%body (r: f32[2]) -> f32[2] {{
  %r = f32[2] parameter(0)
  %i = s32[] constant(0)
  ROOT %d = f32[2] conditional(%i, %r, %r), {branches}
}}

%goes_on (s: f32[2]) -> pred[] {{
  %s = f32[2] parameter(0)
  ROOT %t = pred[] constant(true)
}}

ENTRY %main (x: f32[2]) -> f32[2] {{
  %x = f32[2] parameter(0)
  ROOT %w = f32[2] while(%x), condition=%goes_on, body=%body, {turns}
}}
"""
  assert compiled.launches(text) == 6
