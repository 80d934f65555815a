"""The first day on a GPU, on CPUs with small sizes."""

import json
import subprocess
import sys
import tarfile

import pytest

from benchmarks.gpu_day import __main__ as gpu_day
from benchmarks.gpu_day import make_site, measurements, processes
from benchmarks.tests.run import ROOT
from tests.runs import QUICK


def records_of(folder):
  return [json.loads(line) for line in (folder / 'results.jsonl').read_text().splitlines()]


def failures(value):
  """Returns the errors anywhere in a record."""
  if isinstance(value, dict):
    return ([value['failed']] if 'failed' in value else []) + failures(list(value.values()))
  if isinstance(value, list):
    return [error for item in value for error in failures(item)]
  return []


@pytest.mark.full
def test_a_dry_day_runs_every_step(tmp_path):
  command = [sys.executable, '-P', '-m', 'benchmarks.gpu_day', f'--out={tmp_path}', '--dry',
             '--budget=840']
  result = subprocess.run(command, cwd=ROOT, env=QUICK | {'PYTHONPATH': str(ROOT)}, text=True,
                          capture_output=True, timeout=900, check=False)
  assert result.returncode == 0, result.stdout + result.stderr
  records = records_of(tmp_path)
  bad = [record for record in records if record['ok'] is False or failures(record)]
  assert not bad, bad
  steps = {record['step']: record for record in records}
  assert not any('skipped' in record for record in records)
  assert {'probe', 'cart_fused', 'pong', 'bench_gpu', 'anakin', 'life', 'life_killed',
          'gaps of life', 'bench_cpu', 'traced', 'busy', 'learners', 'bf16',
          'pong_18'} <= steps.keys()
  same = {step for step in steps if step.startswith('same: ')}
  assert same == {'same: fused and sync, MLP', 'same: killed and resumed',
                  'same: cleanba and rapid, MLP'}
  assert steps['life_killed']['killed_after'] >= gpu_day.KILLED_AFTER
  assert steps['life_killed']['first_new_update_after_s'] > 0
  assert steps['busy']['data'][0]['ours_count_ms']['learn'][0] > 0
  with tarfile.open(tmp_path / 'logs.tar.gz') as logs:
    assert {'logs/probe.log', 'runs/life/receipts.jsonl'} <= set(logs.getnames())
  assert (tmp_path / 'trace.tar.gz').exists()


def test_a_step_that_does_not_fit_into_the_budget_is_skipped(tmp_path):
  day = processes.Day(tmp_path / 'out', tmp_path / 'work', budget_s=20, only=['anakin', 'bf16'])
  assert gpu_day.run_steps(day)
  skipped = {record['step']: record['skipped'] for record in records_of(tmp_path / 'out')}
  assert skipped == {'anakin': '20 s left, needs 80', 'bf16': '20 s left, needs 25'}


@pytest.mark.parametrize('limit_s, budget_s', [(1, 100), (100, 6)])
def test_a_command_ends_at_its_limit_and_with_the_budget(tmp_path, limit_s, budget_s):
  day = processes.Day(tmp_path / 'out', tmp_path / 'work', budget_s)
  sleeps = processes.Command('sleeps', ['-c', 'import time; time.sleep(60)'], limit_s)
  record = day.run('sleeps', 0, [sleeps])['sleeps']
  assert record['late'] and not record['ok'] and record['seconds'] < 30
  assert 'most recent call first' in record['tail']  # the stack of the process


def test_a_machine_without_a_gpu_is_told_at_once(tmp_path, capsys):
  assert gpu_day.run_day(processes.Day(tmp_path / 'out', tmp_path / 'work', 100),
                         steps=lambda day: False) == 1
  assert 'probe failed' in capsys.readouterr().err


def test_unknown_steps_are_refused(capsys):
  with pytest.raises(SystemExit):
    gpu_day.main(['--out=x', '--only=bits,bytes'])
  assert "there is no step 'bytes'; known are probe, smoke" in capsys.readouterr().err


def test_the_busy_share_of_a_trace():
  def event(name, pid, ts, dur):
    return {'ph': 'X', 'name': name, 'pid': pid, 'ts': ts, 'dur': dur}

  events = [{'name': 'process_name', 'pid': 1, 'args': {'name': '/device:GPU:0'}},
            {'name': 'process_name', 'pid': 2, 'args': {'name': '/host:CPU'}},
            # The second kernel begins within the first; nothing runs from 30 to 40 us.
            event('kernel', 1, 10, 10), event('kernel', 1, 15, 15), event('kernel', 1, 40, 10),
            event('learn', 2, 0, 2000), event('learn', 2, 3000, 1000), event('other', 2, 0, 9)]
  assert measurements.busy_share(events) == dict(
      gpu_events=3, span_ms=0.04, gpu_busy_share=0.75, ours_count_ms={'learn': (2, 3.0)})


def test_an_archive_has_what_the_machine_lacks(tmp_path):
  site = tmp_path / 'site'
  for path in ('flax/core.py', 'flax/tests/x.py', 'numpy/core.py', 'envpool/entry.py',
               'envpool/atari/atari_envpool.so', 'envpool/box2d/box2d_envpool.so',
               'envpool_assets/__init__.py', 'envpool_assets/atari/pong.bin',
               'envpool_assets/other/large.bin'):
    (site / path).parent.mkdir(parents=True, exist_ok=True)
    (site / path).touch()
  for name in ('flax', 'numpy', 'envpool'):
    card = site / f'{name}-1.0.dist-info'
    card.mkdir()
    (card / 'RECORD').write_text(f'{name}/core.py,,\n../../bin/{name},,\n')
  (tmp_path / 'host.txt').write_text('NumPy\n')
  archive = tmp_path / 'site.tar.xz'
  assert make_site.main([str(site), str(tmp_path / 'host.txt'), str(archive)]) == 0
  with tarfile.open(archive) as packed:
    files = {name.removeprefix('./') for name in packed.getnames() if '.' in name[2:]}
  assert files == {'flax/core.py', 'flax-1.0.dist-info', 'flax-1.0.dist-info/RECORD',
                   'envpool-1.0.dist-info', 'envpool-1.0.dist-info/RECORD', 'envpool/entry.py',
                   'envpool/atari/atari_envpool.so', 'envpool_assets/__init__.py',
                   'envpool_assets/atari/pong.bin'}
