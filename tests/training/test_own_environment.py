"""The example environments with every command, and with two processes."""

import json
import shutil
from pathlib import Path

import pytest

from podracer_jit.cli import compare
from podracer_jit.workdir import checkpoints
from podracer_jit.workdir.workdir import Workdir
from tests import extras, made, processes
from tests.tiers import essential

EXAMPLES = Path(__file__).parents[2] / 'examples'
GRIDWORLD = EXAMPLES / 'gridworld.py'
THERMOSTAT = EXAMPLES / 'thermostat.py'
SMALL_GRIDWORLD = [f'--config={GRIDWORLD}:smoke', '--config.env.num_envs=16',
                   '--config.network.channels=(4,4)', '--config.network.hidden=16',
                   '--config.total_steps=1250', '--config.log.tensorboard=False']
SMALL_THERMOSTAT = [f'--config={THERMOSTAT}:smoke', '--config.log.tensorboard=False']
CATCH = ['--config=configs/ppo_cartpole.py', '--config.env.task=gymnax:Catch-bsuite',
         '--config.env.num_envs=8', '--config.num_shards=2', '--config.num_grad_shards=2',
         '--config.scheme=sync', '--config.unroll_length=16', '--config.total_steps=1000',
         '--config.network.hidden=(16,)', '--config.log.tensorboard=False']


def binary(*args):
  """Runs `podracer_jit`; returns its output, and fails with it if the exit code is not 0."""
  result = processes.run(processes.command(*args))
  if 'MuJoCo cannot draw here' in result.stderr:
    pytest.skip(result.stderr)
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Two workdirs of one experiment, with checkpoints at different updates."""
  return [made.once(tmp_path_factory, f'gridworld_{every}', lambda workdir, every=every: binary(
      *SMALL_GRIDWORLD, f'--workdir={workdir}', f'--config.checkpoint.every_updates={every}'))
          for every in (2, 1000)]


@pytest.mark.full
def test_checkpoints_do_not_change_the_bits(trained, capsys):
  often, once = trained
  assert len(checkpoints.saved_updates(often)) == 3 and len(checkpoints.saved_updates(once)) == 1
  assert compare.main(['compare', str(often), str(once)]) == 0
  assert 'identical: 6 updates' in capsys.readouterr().out


def test_rerun_repeats_an_update_of_a_later_segment(trained):
  out = binary('rerun', f'--workdir={trained[0]}', '--update=4', f'--allow_modules={GRIDWORLD}')
  assert 'as its receipt says' in out


def test_an_own_jax_environment_is_evaluated_with_a_video(trained):
  workdir = trained[0]
  out = binary('evaluate', f'--workdir={workdir}', '--num_episodes=4', '--video=gif',
               f'--allow_modules={GRIDWORLD}')
  assert 'rendered by the environment' in out and (workdir / 'video.gif').stat().st_size > 1000
  record = json.loads((workdir / 'evaluation.json').read_text())
  assert len(record['returns']) == 4 and max(record['lengths']) <= 24


@pytest.mark.full
def test_options_are_arguments_of_the_class(tmp_path):
  args = [*SMALL_GRIDWORLD, f'--workdir={tmp_path}']
  result = processes.run(processes.command(*args, '--config.env.sise=8'))
  assert result.returncode == 2 and 'env.sise' in result.stderr
  assert len(result.stderr.strip().splitlines()) == 1
  binary(*args, '--config.env.size=5', '--config.total_steps=200')
  assert Workdir(tmp_path).config({'gridworld'})['env']['size'] == 5


@pytest.mark.full
@pytest.mark.same_bits('2 processes and 1, JAX environments', 'PPO: MLP (`sync`)')
def test_two_processes_keep_the_environments_of_both(tmp_path, capsys):
  of_one = tmp_path / 'one'
  of_two = tmp_path / 'two'
  binary(*CATCH, f'--workdir={of_one}')
  binary('launch', '-n', 2, '--', *CATCH, f'--workdir={of_two}',
         '--config.checkpoint.every_updates=3')
  assert compare.main(['compare', str(of_one), str(of_two)]) == 0
  assert 'identical: ' in capsys.readouterr().out


@pytest.fixture(scope='module')
def heated(tmp_path_factory):
  """A trained workdir of the Gymnasium example."""
  workdir = tmp_path_factory.mktemp('heated')
  binary(*SMALL_THERMOSTAT, f'--workdir={workdir}', '--config.checkpoint.every_updates=2')
  return workdir


@pytest.mark.parametrize('example', essential(['gridworld', 'thermostat'], 'gridworld'))
def test_a_run_of_an_example_resumes_with_the_same_bits(example, request, tmp_path, capsys):
  if example == 'gridworld':
    args = SMALL_GRIDWORLD
    whole, _ = request.getfixturevalue('trained')
  else:
    args = SMALL_THERMOSTAT
    whole = request.getfixturevalue('heated')
  resumed = tmp_path / 'resumed'
  shutil.copytree(whole, resumed)
  updates = checkpoints.saved_updates(resumed)
  for update in updates[1:]:
    shutil.rmtree(resumed / 'checkpoints' / str(update))
  binary(*args, f'--workdir={resumed}', '--config.checkpoint.every_updates=2')
  assert checkpoints.saved_updates(resumed) == updates
  assert compare.main(['compare', str(whole), str(resumed)]) == 0
  assert f'identical: {updates[-1]} updates' in capsys.readouterr().out


@pytest.mark.full
def test_an_own_gymnasium_environment_is_evaluated_with_a_video(heated):
  out = binary('evaluate', f'--workdir={heated}', '--num_episodes=4', '--video=gif',
               f'--allow_modules={THERMOSTAT}')
  assert 'rendered by the environment' in out and (heated / 'video.gif').stat().st_size > 1000
  record = json.loads((heated / 'evaluation.json').read_text())
  assert record['lengths'] == [100] * 4


@pytest.mark.full
def test_a_playground_task_is_trained_and_evaluated_with_a_video(tmp_path):
  extras.skip_without('ppo_playground')
  binary('--config=ppo_playground', f'--workdir={tmp_path}', '--config.env.num_envs=8',
         '--config.env.episode_length=50', '--config.network.hidden=(16,)',
         '--config.total_steps=1500', '--config.checkpoint.every_updates=3',
         '--config.log.tensorboard=False')
  assert checkpoints.saved_updates(tmp_path) == [3, 6]
  # With one environment the programs are closer to those of the video.
  out = binary('evaluate', f'--workdir={tmp_path}', '--num_episodes=4', '--num_envs=1',
               '--video=gif')
  assert 'rendered by the environment' in out and (tmp_path / 'video.gif').stat().st_size > 1000
  record = json.loads((tmp_path / 'evaluation.json').read_text())
  assert record['lengths'] == [50] * 4
  # Rewards are from 0 to 1, and the pole begins upright.
  assert all(10 < x < 50 for x in record['returns'])
