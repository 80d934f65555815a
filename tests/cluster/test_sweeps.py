"""Sweeps whose members are tasks of a Ray cluster of two nodes."""

import json
import os
import signal
import subprocess
import time

import pytest

from podracer_jit.workdir import checkpoints, journal
from tests.processes import command
from tests.ray_nodes import Nodes
from tests.runs import QUICK

SMOKE = ['--config=ppo_cartpole:smoke', '--config.log.tensorboard=False', '--ray']


@pytest.fixture(scope='module')
def env():
  with Nodes() as cluster:
    for _ in range(2):
      cluster.add(1)
    yield QUICK | cluster.variables


def updates(workdir):
  path = workdir / journal.METRICS
  return path.read_text().count('\n') if path.exists() else 0


@pytest.mark.full
def test_members_are_trained_on_the_cluster(tmp_path, env):
  done = subprocess.run(
      command('sweep', *SMOKE, '--config.total_steps=600', f'--out={tmp_path}',
              '--grid=optimizer.learning_rate=1e-3,1e30'),
      env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 1, done.stderr
  assert '2 members, 2 at once' in done.stdout
  good, bad = json.loads((tmp_path / 'sweep.json').read_text())['members']
  assert good['finished'] and 'not finite' in bad['error']


@pytest.mark.full
def test_members_on_the_cluster_save_when_the_sweep_is_stopped(tmp_path, env):
  workdirs = [tmp_path / f'ppo_cartpole_smoke,seed={seed}' for seed in (1, 2)]
  with subprocess.Popen(
      command('sweep', *SMOKE, '--config.total_steps=4000000', '--seeds=1:2', f'--out={tmp_path}'),
      env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
    while not all(updates(workdir) > 3 for workdir in workdirs):
      assert process.poll() is None, process.communicate()
      time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
  assert process.returncode == 3 and out.count(': stopped') == 2, out
  assert [checkpoints.newest_whole(workdir) for workdir in workdirs] == list(map(updates, workdirs))


def test_a_cluster_is_needed(tmp_path):
  env = {name: value for name, value in os.environ.items() if name != 'RAY_ADDRESS'}
  done = subprocess.run(command('sweep', *SMOKE, f'--out={tmp_path}'), env=env,
                        capture_output=True, text=True, check=False)
  assert done.returncode == 2 and '--ray: set RAY_ADDRESS to the address' in done.stderr


def test_a_command_that_a_signal_has_ended_has_the_exit_code_of_a_shell(tmp_path):
  pytest.importorskip('ray')
  from podracer_jit.cluster import commands
  (tmp_path / 'own.py').write_text('import os, signal; os.kill(os.getpid(), signal.SIGKILL)')
  assert commands._run([f'--config={tmp_path / "own.py"}'], str(tmp_path / 'log'),
                       str(tmp_path / 'stop'), str(tmp_path), {}) == 137
