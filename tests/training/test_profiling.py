"""Traces of jax.profiler: which updates they have, and what is refused."""

import gzip
import socket
import sys
import time

import jax
import pytest

from podracer_jit.cli import train
from tests import processes
from tests.cli.test_main import binary, only_checks
from tests.processes import command

CATCH = '--config=configs/impala_catch.py:smoke'


def test_profile_dir_contains_a_trace_with_named_regions(tmp_path):
  result = binary(CATCH, f'--workdir={tmp_path}/run', f'--profile_dir={tmp_path}/trace')
  assert result.returncode == 0, result.stderr
  (trace,) = tmp_path.glob('trace/plugins/profile/*/*.xplane.pb')
  content = trace.read_bytes()
  for region in (b'rollout', b'learn', b'channel'):
    assert region in content
  assert steps_of(content) and steps_of(content) <= set(range(3, 10))
  assert gzip.decompress((tmp_path / 'trace' / 'memory.prof').read_bytes())


def steps_of(trace, name='learn'):
  """Returns the numbers of the steps of this name in a trace."""
  events = [event for plane in jax.profiler.ProfileData.from_serialized_xspace(trace).planes
            for line in plane.lines for event in line.events if event.name == name]
  return {value for event in events for stat, value in event.stats if stat == 'step_num'}


def test_a_trace_has_the_updates_that_were_asked_for(tmp_path):
  """The first update is traced from its beginning on; a run that goes on has none of them left."""
  args = [CATCH, f'--workdir={tmp_path}/run', '--profile_updates=1:2']
  result = binary(*args, f'--profile_dir={tmp_path}/trace')
  assert result.returncode == 0, result.stderr
  (trace,) = tmp_path.glob('trace/plugins/profile/*/*.xplane.pb')
  steps = steps_of(trace.read_bytes())
  assert {1, 2} <= steps and max(steps) <= 4  # the learner may be ahead of its reports
  result = binary(*args, f'--profile_dir={tmp_path}/second', '--extend',
                  '--config.total_steps=9000')
  assert 'no trace: this command has not made updates 1 to 2' in result.stdout + result.stderr
  assert not list((tmp_path / 'second').iterdir())


@pytest.mark.parametrize('args, message', [
    (['--profile_updates=3:5'], '--profile_updates: is for --profile_dir'),
    *[([f'--profile_updates={text}', '--profile_dir=x'],
       '--profile_updates: must be the first and the last update of the trace, such as 100:105')
      for text in ('5', '5:3', '0:3', 'a:b', '1:2:3')],
    (['--profile_updates=', '--profile_dir=x'], '--profile_updates: has no value'),
    (['--profile_dir=/dev/null/x'], '/dev/null'),
    (['--profile_port=0'], '--profile_port: must be 1 to 65535, got 0')])
def test_profiling_that_is_impossible_is_refused(args, message, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(train.host, 'prepare_host', only_checks(train.host.prepare_host))
  assert train.main(['x', CATCH, f'--workdir={tmp_path}/run', *args]) == 2
  assert message in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('scheme, region', [('rapid', 'learn'), ('dppo_async', 'update')])
def test_updates_on_a_device_of_their_own_are_steps_of_a_trace(scheme, region, tmp_path):
  result = binary(CATCH, f'--workdir={tmp_path}/run', f'--profile_dir={tmp_path}/trace',
                  '--profile_updates=2:3', f'--config.scheme={scheme}')
  assert result.returncode == 0, result.stderr
  (trace,) = tmp_path.glob('trace/plugins/profile/*/*.xplane.pb')
  steps = steps_of(trace.read_bytes(), region)
  assert {2, 3} <= steps and max(steps) <= 5


def test_whole_calls_of_one_program_are_traced(tmp_path):
  """The update is within a call, which is traced from its beginning on."""
  args = ['--config=ppo_cartpole:smoke', '--config.placement.updates_per_call=2',
          '--config.log.tensorboard=False', f'--workdir={tmp_path}/run']
  result = binary(*args, f'--profile_dir={tmp_path}/trace', '--profile_updates=4:6')
  assert result.returncode == 0 and 'no trace' not in result.stdout, result.stderr
  (trace,) = tmp_path.glob('trace/plugins/profile/*/*.xplane.pb')
  assert 3 in steps_of(trace.read_bytes(), 'updates')


def test_updates_without_gradient_steps_are_not_traced(tmp_path):
  def traced(min_size):
    """Trains for twelve updates or more of 128 rows."""
    result = binary('--config=apex_dqn_catch:smoke', '--config.log.tensorboard=False',
                    f'--workdir={tmp_path}/{min_size}', f'--profile_dir={tmp_path}/trace',
                    '--config.total_steps=1500', f'--config.replay.min_size={min_size}')
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr

  assert ('no trace: it begins with the third report that has gradient steps, and there were 0'
          in traced(5000))
  assert 'no trace' not in traced(400)
  assert list(tmp_path.glob('trace/plugins/profile/*/*.xplane.pb'))


def test_a_trace_of_the_users_own_program_is_left_alone(tmp_path):
  script = f"""
import jax
import podracer_jit as pj
with jax.profiler.trace({str(tmp_path / 'own')!r}):
  pj.train('impala_catch:smoke', {str(tmp_path / 'run')!r}, profile_dir={str(tmp_path / 'x')!r})
"""
  result = processes.run([sys.executable, '-c', script])
  assert result.returncode == 0, result.stderr
  assert 'no trace: ' in result.stdout + result.stderr
  assert list(tmp_path.glob('own/plugins/profile/*/*.xplane.pb'))


def test_a_profiler_can_connect_to_a_training(tmp_path):
  with socket.socket() as taken:
    taken.bind(('', 0))
    taken.listen()
    port = taken.getsockname()[1]
    refused = binary(CATCH, f'--workdir={tmp_path}/run', f'--profile_port={port}')
    assert refused.returncode == 2, refused.stdout
    assert f'--profile_port: cannot listen at {port}: Address already in use' in refused.stderr
    assert not (tmp_path / 'run').exists()
  process = processes.Popen(command(CATCH, f'--workdir={tmp_path}/run', f'--profile_port={port}',
                                    '--config.total_steps=100000000'))
  try:
    while not (tmp_path / 'run' / 'metrics.jsonl').exists():
      assert process.poll() is None
      time.sleep(0.1)
    socket.create_connection(('127.0.0.1', port), timeout=10).close()
  finally:
    process.terminate()
    process.wait()
