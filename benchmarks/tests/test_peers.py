"""The comparison with peers: its plan, how it goes on, its table, and real measurements."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import processes as measuring
from benchmarks.peers import __main__ as command
from benchmarks.peers import table, tasks, venvs
from benchmarks.peers.tasks import CASES, OURS, PEERS, TASKS, Measurement
from benchmarks.processes import Failed, Window
from benchmarks.tests.run import ROOT, run_benchmark
from tests import processes

pytestmark = pytest.mark.full
QUICK = Window(warmup_updates=1, warmup_s=0.0, seconds=0.01)


def _line(case, program, run, sps, cores=2, **more):
  return dict(case=case, program=program, cores=cores, run=run, threads=0, sps=sps,
              cores_busy=1.5, peak_mb=800, took_s=20.0) | more


def test_the_plan_tries_threads_first_and_takes_turns():
  plan = tasks.plan(['cheetah_64', 'cartpole_gymnasium'], ['sb3_envpool', 'sbx_envpool'], 2, 2)
  assert plan[:2] == [Measurement('cheetah_64', 'sb3_envpool', 2, 0, threads) for threads in (1, 2)]
  names = ['ours', 'sb3_envpool', 'sbx_envpool']
  assert plan[2:] == [
      *(Measurement('cheetah_64', name, cores, 1) for cores in (2, 1) for name in names),
      Measurement('cartpole_gymnasium', 'ours', 2, 1),
      *(Measurement('cheetah_64', name, cores, 2) for cores in (2, 1) for name in names[::-1]),
      Measurement('cartpole_gymnasium', 'ours', 2, 2)]
  assert {name for m in tasks.plan(list(TASKS), list(PEERS), 1, 1) for name in [m.cores]} == {1}


def test_threads_are_those_of_one_two_and_all_cores():
  assert [tasks.thread_counts(cores) for cores in (1, 2, 8)] == [[1], [1, 2], [1, 2, 8]]


def test_peers_get_the_sizes_and_the_loss_of_our_configs():
  for name, case in CASES.items():
    config = command.Measuring(Path(), None, QUICK, {})._config(name)
    for field in ('num_epochs', 'num_minibatches', 'unroll_length'):
      assert config[field] > 0
    assert f'{config["unroll_length"]}' in case.title
    assert set(case.peers) <= set(PEERS)
  assert config['loss']['clip_value']


class _Trial:
  """Runs measurements in no time; a program may fail, and a measurement may be interrupted."""

  def __init__(self, results, fails=(), interrupted_by=None):
    self.results, self.fails, self.interrupted_by = results, fails, interrupted_by
    self.ran = []

  def __call__(self, measurement):
    self.ran.append(measurement)
    if measurement == self.interrupted_by:
      raise KeyboardInterrupt
    works = measurement.program not in self.fails
    figures = dict(sps=100.0, took_s=1.0) if works else dict(error='it broke', took_s=1.0)
    self.results.add(measurement, figures | dict(threads=measurement.threads))
    return works


def test_a_call_goes_on_where_an_earlier_one_was_interrupted(tmp_path):
  plan = tasks.plan(['cheetah_64'], ['sb3_envpool', 'sbx_envpool'], 2, 2)
  results = command.Results(tmp_path)
  results.begin(dict(cpu='a'))
  first = _Trial(results, interrupted_by=plan[4])
  with pytest.raises(KeyboardInterrupt):
    command.measure_all(plan, results, time.monotonic() + 1e6, first)
  with (tmp_path / 'results.jsonl').open('a') as file:
    file.write('{"case": "chee')  # a line that was not finished
  again = command.Results(tmp_path)
  again.begin(dict(cpu='a'))
  second = _Trial(again)
  assert command.measure_all(plan, again, time.monotonic() + 1e6, second) == 0
  assert second.ran == plan[4:]
  third = _Trial(command.Results(tmp_path))
  assert command.measure_all(plan, third.results, time.monotonic() + 1e6, third) == 0
  assert not third.ran


def test_a_program_that_fails_is_named_and_does_not_end_the_rest(tmp_path):
  plan = tasks.plan(['cheetah_64'], ['sb3_envpool', 'sbx_envpool'], 2, 3)
  results = command.Results(tmp_path)
  results.begin(dict(cpu='a'))
  trial = _Trial(results, fails=['sbx_envpool'])
  command.measure_all(plan, results, time.monotonic() + 1e6, trial)
  assert [(m.cores, m.run) for m in trial.ran if m.program == 'sbx_envpool'] == [(2, 1), (1, 1)]
  assert sum(m.program == OURS for m in trial.ran) == 6
  assert table.failures(results.lines) == ['cheetah_64, 2 cores, sbx_envpool: it broke',
                                           'cheetah_64, 1 cores, sbx_envpool: it broke']
  again = _Trial(command.Results(tmp_path))
  command.measure_all(plan, again.results, time.monotonic() + 1e6, again)
  assert {m.program for m in again.ran} == {'sbx_envpool'} and len(again.ran) == 6
  assert not table.failures(again.results.lines)


def test_what_does_not_fit_into_the_time_is_left_out(tmp_path):
  plan = tasks.plan(['cheetah_1x2048'], ['sb3'], 1, 1)
  results = command.Results(tmp_path)
  results.begin(dict(cpu='a'))
  trial = _Trial(results)
  assert command.measure_all(plan, results, time.monotonic() + 30, trial) == len(plan) == 2
  results.add(plan[0]._replace(run=2), dict(sps=1.0, took_s=1.0))
  assert command.measure_all(plan, results, time.monotonic() + 30, trial) == 1
  assert trial.ran == plan[:1]


def test_other_settings_are_refused(tmp_path, capsys):
  flags = [f'--folder={tmp_path}', '--tasks=cartpole_jax', '--minutes=0']
  assert command.main([*flags, '--seconds=3']) == 3
  assert command.main([*flags, '--seconds=4']) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert 'was measured with seconds 3.0, not 4.0' in error and 'another --folder' in error


def test_the_fastest_number_of_threads_is_taken(tmp_path):
  results = command.Results(tmp_path)
  results.begin(dict(cpu='a'))
  for threads, sps in ((1, 400.0), (2, 500.0), (8, 300.0)):
    results.add(Measurement('pong_ppo', 'sb3', 8, 0, threads), dict(sps=sps, took_s=1.0))
  run = Measurement('pong_ppo', 'sb3', 8, 1)
  assert results.threads(run) == 2
  assert results.threads(run._replace(cores=1)) == 1
  assert results.threads(run._replace(program=OURS)) == 0
  assert results.threads(Measurement('pong_ppo', 'sb3', 8, 0, 8)) == 8


def test_the_table_has_medians_ranges_and_ratios_of_runs():
  lines = [_line('cheetah_64', OURS, run, sps) for run, sps in ((1, 100), (2, 300), (3, 200))]
  lines += [_line('cheetah_64', 'sb3_envpool', run, sps, threads=2, peak_mb=500)
            for run, sps in ((1, 100), (2, 150), (3, 50))]
  lines += [_line('cheetah_64', 'sb3_envpool', 0, 9999, threads=1),
            _line('cheetah_64', OURS, 1, 50, cores=1),
            dict(case='cheetah_64', program='sbx_envpool', cores=2, run=1, threads=0, error='gone',
                 took_s=1.0)]
  title = 'PPO HalfCheetah 64 x 64, 2 epochs x 4'
  assert table.table(lines)[2:] == [
      f'| {title} | 2 | ours | 200 (100 to 300) |  | 1.50 | 800 | 3 |',
      f'| {title} | 2 | sb3_envpool (2 threads) | 100 (50 to 150) | 2.00 (1.00 to 4.00) | 1.50 '
      '| 500 | 3 |',
      f'| {title} | 1 | ours | 50 |  | 1.50 | 800 | 1 |']
  assert table.failures(lines) == ['cheetah_64, 2 cores, sbx_envpool: gone']


def _record(update, wall_s):
  return dict(update=update, steps=10 * update, wall_s=wall_s)


def test_updates_of_one_call_are_measured_to_the_end_of_the_call():
  """Calls of two updates end at 1, 2, ... seconds; the last call is not written to its end."""
  records = [_record(update, 1.0 + (update - 1) // 2) for update in range(1, 12)]
  first, last = measuring.measured(records, Window(1, 1.0, 2.0))
  assert (first['update'], last['update']) == (4, 10)
  assert measuring.measured(records[:8], Window(1, 1.0, 2.0)) is None
  assert measuring.measured(records, Window(1, 1.0, 10.0)) is None
  assert measuring.measured(records, Window(20, 0.0, 1.0)) is None
  assert measuring.measured([], QUICK) is None


@pytest.mark.parametrize('warmup_updates, first', [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_a_measurement_begins_with_the_end_of_the_warm_up(warmup_updates, first):
  records = [_record(update, float(update)) for update in range(1, 20)]
  assert measuring.measured(records, Window(warmup_updates, 0.0, 3.0))[0]['update'] == first


def test_lines_are_read_once_and_written_whole(tmp_path):
  path = tmp_path / 'lines.jsonl'
  new = measuring._NewLines()
  new.read(path)
  assert new.records == [] and measuring.read(path) == []
  measuring.append(path, {'a': 1})
  measuring.append(path, {'b': 2})
  new.read(path)
  assert new.records == measuring.read(path) == [{'a': 1}, {'b': 2}]
  with path.open('a') as file:
    file.write('{"c": ')  # a process is writing, or was killed
  new.read(path)
  assert len(new.records) == 2
  with path.open('a') as file:
    file.write('3}\n{"d"')
  new.read(path)
  assert new.records == [{'a': 1}, {'b': 2}, {'c': 3}]
  measuring.append(path, {'e': 5})
  assert measuring.read(path) == [{'a': 1}, {'b': 2}, {'c': 3}, {'e': 5}]


@pytest.mark.parametrize('command, line', [('peers', '{"config": "x"}'),
                                           ('tune', '{"settings": {}}')])
def test_a_folder_of_another_command_is_no_traceback(command, line, tmp_path):
  (tmp_path / 'results.jsonl').write_text(line + '\n')
  process = run_benchmark(command, f'--folder={tmp_path}', '--table')
  assert 'Traceback' not in process.stderr
  assert ('is not of this command' in process.stderr) == (command == 'peers')


def _measure(program, tmp_path, window=QUICK):
  """Measures a Python program, which gets the file for metrics as an argument."""
  metrics = tmp_path / 'metrics.jsonl'
  return measuring.measure([sys.executable, '-S', '-c', program, str(metrics)], metrics,
                           tmp_path / 'log', window, os.sched_getaffinity(0), os.environ)


def test_a_process_that_fails_is_told_by_its_error(tmp_path):
  with pytest.raises(Failed, match='exit code 1: ValueError: no such task'):
    _measure('raise ValueError("no such task")', tmp_path)


def test_a_process_and_its_children_are_ended(tmp_path):
  """The child writes the updates; its memory and its time count."""
  program = ('import subprocess, sys; subprocess.run([sys.executable, "-S", "-c", """\n'
             'import json, os, sys, time\n'
             'kept = bytearray(b"x" * 2**26)\n'
             'file = open(sys.argv[1], "w")\n'
             'print(os.getpid(), flush=True)\n'
             'update = 0\n'
             'while True:\n'
             '  update += 1\n'
             '  print(json.dumps(dict(update=update, steps=update, wall_s=time.perf_counter())),\n'
             '        file=file, flush=True)\n'
             '  end = time.perf_counter() + 0.05\n'
             '  while time.perf_counter() < end:\n'
             '    pass\n'
             '""", sys.argv[1]])')
  figures = _measure(program, tmp_path, Window(2, 0.1, 0.5))
  assert figures['peak_mb'] > 64 and figures['cores_busy'] > 0
  assert 0 < figures['sps'] < 20.1
  child = int((tmp_path / 'log').read_text())
  assert not Path(f'/proc/{child}').exists() or 'Z' in Path(f'/proc/{child}/stat').read_text()


def test_a_venv_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
  monkeypatch.setitem(venvs.PACKAGES, 'rejax', ['--no-index', 'no-such-package-of-ours'])
  with pytest.raises(venvs.CannotMake) as raised:
    venvs.python_of(tmp_path, 'rejax')
  message = str(raised.value)
  assert '-m pip install' in message and 'no-such-package-of-ours' in message
  assert '\n' not in message and not (tmp_path / 'rejax' / 'versions.json').exists()


@pytest.mark.parametrize('flags, error', [
    (['--tasks=pong'], "--tasks: there is no 'pong'; known are pong_impala"),
    (['--peers=sb4'], "--peers: there is no 'sb4'; known are sb3"),
    (['--peers=cleanba'], '--peers: cleanba needs --cleanba=CHECKOUT'),
    (['--cleanrl=/nowhere'], '--cleanrl: /nowhere has no cleanrl/ppo_atari_envpool.py'),
    (['--table'], 'results.jsonl does not exist')])
def test_wrong_flags_are_refused_in_one_line(flags, error, tmp_path, capsys):
  assert command.main([f'--folder={tmp_path}', *flags]) == 2
  assert error in capsys.readouterr().err.splitlines()[-1]


def test_ours_and_a_peer_are_measured(tmp_path, monkeypatch, capsys):
  """The real command with smoke sizes: one training of ours, PureJaxRL's shape, a missing peer."""
  flags = ['--config=ppo_cartpole:smoke', '--config.env.task=gymnax:CartPole-v1',
           '--config.network.separate_critic=True']
  case = CASES['cartpole_64']._replace(flags=flags)
  monkeypatch.setitem(CASES, 'cartpole_64', case)
  monkeypatch.setitem(TASKS, 'cartpole_jax', {'cartpole_64': case})
  monkeypatch.setitem(venvs.PACKAGES, 'rejax', ['--no-index', 'no-such-package-of-ours'])
  call = [f'--folder={tmp_path}', '--tasks=cartpole_jax', '--runs=1', '--seconds=0.2',
          '--warmup_s=0', '--warmup_updates=1']
  assert command.main(call) == 1
  out = capsys.readouterr().out
  lines = [json.loads(line) for line in (tmp_path / 'results.jsonl').read_text().splitlines()]
  assert lines[0]['settings']['cpu'] and [x['program'] for x in lines[1:]] == [
      'ours', 'scanned', 'rejax']
  for line in lines[1:3]:
    assert line['sps'] > 0 and line['cores_busy'] > 0 and line['peak_mb'] > 50
    assert f'{line["sps"]:,.0f}' in out
  assert 'failed: cartpole_64, ' in out and 'rejax: ' in out
  assert not (tmp_path / 'process').exists()  # it had a workdir
  assert command.main([f'--folder={tmp_path}', '--table']) == 0
  assert capsys.readouterr().out == out


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_measured_process_and_keeps_what_there_is(tmp_path, number):
  """The signal comes in the second measurement, which would take a day."""
  day = [f'--folder={tmp_path}', '--tasks=cartpole_jax', '--peers=', '--runs=1',
         '--seconds=86400', '--warmup_s=0', '--warmup_updates=1']
  plan = tasks.plan(['cartpole_jax'], [], len(os.sched_getaffinity(0)), 1)
  results = command.Results(tmp_path)
  results.begin(command.machine() | dict(seconds=86400.0, warmup_s=0.0, warmup_updates=1))
  results.add(plan[0], _line('cartpole_64', OURS, 1, 123_456))
  with processes.Popen([sys.executable, '-P', '-m', 'benchmarks.peers', *day], cwd=ROOT,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
    metrics = tmp_path / 'process' / 'workdir' / 'metrics.jsonl'
    while not metrics.exists():
      assert process.poll() is None
      time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
  assert process.returncode == 3
  assert '123,456' in out and err.splitlines()[-1] == (
      'peers: interrupted; the same command goes on')
  assert not (tmp_path / 'process').exists()
  assert not [path for path in Path('/proc').glob('[0-9]*/cmdline')
              if str(tmp_path).encode() in _read(path)]


def _read(path):
  try:
    return path.read_bytes()
  except OSError:  # it has ended
    return b''


def test_the_table_alone_needs_results(tmp_path):
  done = run_benchmark('peers', f'--folder={tmp_path}', '--table')
  assert done.returncode == 2 and done.stderr.startswith('peers: --folder: ')
