"""The train command: real processes, files and signals."""

import contextlib
import functools
import itertools
import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from podracer_jit import loops
from podracer_jit.cli import train
from podracer_jit.errors import FAILED, INTERRUPTED, Diverged, EnvironmentFailed, WorkerLost
from podracer_jit.experiment import flags
from podracer_jit.training import trainer
from podracer_jit.workdir import checkpoints
from tests import made, processes
from tests.processes import command
from tests.runs import QUICK
from tests.tiers import essential

ROOT = Path(__file__).resolve().parents[2]
CATCH = '--config=configs/impala_catch.py:smoke'


def binary(*args, cwd=None):
  return processes.run(command(*args), cwd=cwd)


def lines(path):
  return [json.loads(line) for line in Path(path).read_text().splitlines()]


def receipts(workdir):
  """Returns (update, batch, params) of each update, without the headers of segments."""
  return [tuple(r.values()) for r in lines(workdir / 'receipts.jsonl') if 'segment' not in r]


def saved_to_the_end(workdir):
  """Returns the updates of the checkpoints that have a manifest, which is written last."""
  manifests = workdir.glob('checkpoints/*/manifest.json')
  return [int(path.parent.name) for path in manifests if path.parent.name.isdigit()]


@pytest.mark.parametrize('args,message', [
    ([], '--config is missing'),
    (['--config=configs/nope.py', '--workdir=x'],
     '--config=configs/nope.py: there is no such file'),
    (['--config=impala_cach'], '--config=impala_cach: there is no such file, and no shipped config '
                               'of that name; did you mean impala_catch?'),
    (['--config=nothing'], '--config=nothing: there is no such file, and no shipped config of that '
                           'name; there are apex_'),
    (['--config=README.md'],
     '--config=README.md: must be a file of Python, whose name ends in .py'),
    (['--config=podracer_jit/configs'], '--config=podracer_jit/configs: there is no such file'),
    ([CATCH[:-1]], "--config: there is no argument 'smok'; known are smoke"),
    (['--config=impala_catch:smoke', '--config.seed=-1'], 'seed: must not be negative, got -1'),
    ([CATCH, '--seed=3'], '--seed: there is no such flag; did you mean --config.seed?'),
    ([CATCH, '--foo=1'], 'foo'),
    ([CATCH, 'foo'], 'foo'),
    ([CATCH, '--config.sede=1'],
     '--config.sede: the config has no such field; did you mean --config.seed?'),
    ([CATCH, '--confg.seed=1'], '--confg.seed: there is no such flag; did you mean --config.seed'),
    ([CATCH, '--config.seed=abc'], "seed: must be a whole number, got 'abc'"),
    ([CATCH, '--config.total_steps=1e6'], "total_steps: must be a whole number, got '1e6'"),
    ([CATCH, '--config.normalise.obs=maybe'], "normalise.obs: must be True or False, got 'maybe'"),
    ([CATCH, '--num_seeds=x'], "--num_seeds=x: must be a whole number, got 'x'"),
    ([CATCH, '--config.loss=ppo'],
     '--config.loss: is a section of fields; did you mean --config.loss.name=ppo?'),
    ([CATCH, '--config.env=x'],
     '--config.env: is a section of fields, such as --config.env.action_mask'),
    ([CATCH, "--config.eval={'every_updates': 1}"],
     '--config.eval: is a section of fields, such as --config.eval.epsilon'),
    ([CATCH, '--mirror='], '--mirror: has no value'),
    ([CATCH, '--renew_envs', 'foo'], 'foo: not a flag; flags begin with --'),
    ([CATCH, '--callbacks=foo'], "callbacks: there is no 'foo'; write module:attribute"),
    ([CATCH, '--config.seed=-1'], 'seed: must not be negative, got -1'),
    ([CATCH, '--config.total_steps=0'], 'total_steps: must be at least 1, got 0'),
    ([CATCH, '--config.scheme=synk'], "scheme: there is no 'synk'; known are sync, cleanba, fused"),
    ([CATCH, '--config.env.task=Breakot-v5'], "'Breakot-v5'; did you mean Breakout-v5"),
    ([CATCH, '--config.env.frame_skp=3'],
     'env.frame_skp: not an option of Catch-v0; its options are height'),
    ([CATCH, '--config.env.task=Pong-v5', '--config.env.frame_skp=3'],
     'env.frame_skp: not an option of Pong-v5; did you mean env.frame_skip?'),
    ([CATCH, '--config.env.task=Pong-v5', '--config.env.noop_max=0'], 'env.noop_max'),
    ([CATCH, '--config.env.task=Pong-v5', '--config.env.frame_skip=a'], 'env.frame_skip: must be'),
    ([CATCH, '--config.env.task=HalfCheetah-v4', '--config.policy=categorical'], 'policy: must'),
    ([CATCH, '--config.env.task=FrozenLake-v1', '--config.network.name=nature_cnn'],
     'network.name: nature_cnn wants images, FrozenLake-v1 gives (16,)'),
    ([CATCH, '--config.env.num_envs=33'], '33 minibatch elements'),
    ([CATCH, '--config.num_grad_shards=3'], '32 environments cannot be split evenly'),
    ([CATCH, '--config.num_minibatches=5'], '5 minibatches; take a divisor of 32'),
    ([CATCH, '--config.network.name=nature_cnn'],
     'network.name: nature_cnn wants images, Catch-v0 gives (10, 5)'),
    ([CATCH, '--config.network.core=rnn'], "network.core: must be none, gru or lstm, got 'rnn'"),
    ([CATCH, '--config.network.core=gru', '--config.network.separate_critic=True'],
     'network.separate_critic: the critic would not remember'),
    ([CATCH, '--config.normalise.value=True'],
     'normalise.value: impala cannot learn normalised values; must be False'),
    ([CATCH, '--config.loss.discount=1.5'], 'loss.discount: must be between 0 and 1, got 1.5'),
    ([CATCH, '--config.loss.baseline_coef=nan'],
     'loss.baseline_coef: must be finite and at least 0'),
    ([CATCH, '--config.optimizer.b2=2'], 'optimizer.b2: must be between 0 and 1, got 2'),
    ([CATCH, '--config.optimizer.b2=1'], 'optimizer.b2: must be below 1, got 1'),
    ([CATCH, '--config.optimizer.b1=0.99999999'], 'optimizer.b1: must be below 1, got 0.99999999'),
    ([CATCH, '--config.optimizer.eps=0'], 'optimizer.eps: must be above 0, got 0'),
    (['--config=configs/ppo_atari.py:nature_cnn', '--config.env.img_height=30',
      '--config.env.img_width=30'],
     'leaves nothing of observations of (4, 30, 30)'),
    ([CATCH, '--repeat=nowhere'], "Unknown command line flag 'repeat'"),
    ([CATCH, '--renew_envs'], '--renew_envs: there is no run in'),
    ([CATCH, '--config.network.name=mpl'], "'mpl'"),
    ([CATCH, '--config.loss.name=pppo'],
     "loss.name: there is no 'pppo'; known are impala, ppo, pqn, dqn, dpg, sac, td3, r2d2, and "
     'module'),
    ([CATCH, '--config.loss.name=dqn'], 'num_minibatches: dqn draws from a replay; must be 1'),
    ([CATCH, '--config.loss.name=mine:PPO'], "loss.name: cannot import 'mine' of 'mine:PPO'"),
    ([CATCH, '--config.optimizer.learning_rate=-1'],
     'optimizer.learning_rate: must be at least 0, got -1'),
    ([CATCH, '--config.placement.actor_devices=(0,77)', '--config.num_shards=2'],
     'placement.actor_devices: there is no device 77'),
    ([CATCH, '--config.placement.actor_devices=all'], 'placement.actor_devices: must be a tuple'),
    ([CATCH, '--config.placement.learner_devices=(-1,)'], 'learner_devices: must be a tuple'),
    ([CATCH, '--config.placement.actor_devices=(0,1)'],
     'placement.actor_devices: 2 actors (actor_devices = (0, 1), actors_per_device = 1) cannot '
     'share num_shards = 1 evenly; take 1, or a num_shards that is a multiple of 2'),
    ([CATCH, '--config.placement.actors_per_device=3'],
     'placement.actors_per_device: 3 actors (actor_devices = (0,), actors_per_device = 3) cannot '
     'share num_shards = 1 evenly; take 1, or a num_shards that is a multiple of 3'),
    ([CATCH, '--config.num_shards=4', '--config.placement.actors_per_device=3'],
     'num_shards: 4 shards cannot be split evenly by 3 actors (actor_devices = (0,), '
     'actors_per_device = 3); take a multiple of 3, or a divisor of 4 for the actors'),
    ([CATCH, '--config.placement.learner_devices=(0,1)'],
     'placement.learner_devices: 2 learner devices (learner_devices = (0, 1)) cannot share '
     'num_grad_shards = 1 evenly; take 1, or a num_grad_shards that is a multiple of 2'),
    ([CATCH, '--config.env.num_envs=1', '--config.num_shards=2'],
     'env.num_envs: 1 environment cannot be split evenly by num_shards = 2; take a multiple of 2'),
    ([CATCH, '--config.placement.actor_devices=(0,1,2)'],
     'placement.actor_devices: 3 actors (actor_devices = (0, 1, 2), actors_per_device = 1) cannot '
     'share num_shards = 1 evenly'),
    ([CATCH, '--config.placement.actors_per_device=2147483648'],
     'placement.actors_per_device: must be at most 1,024, got 2147483648'),
    ([CATCH, f'--config.total_steps={10**22}'], 'total_steps: must be at most 9,007,199,254,7'),
    ([CATCH, '--config.optimizer.learning_rate=1e400'],
     'optimizer.learning_rate: must be finite and at least 0, got inf'),
    ([CATCH, f'--config.env.num_envs={"9" * 5000}'],
     "env.num_envs: must be a whole number, got '9999999"),
    ([CATCH, f'--config.env.max_episode_steps={10**22}'],
     'env.max_episode_steps: must be at most 2,147,483,647, got 10000000000'),
    ([CATCH, '--config.unroll_length=60000000'],
     'unroll_length: the run needs at least 881 GB of memory: rollouts 876 GB; this machine has '),
    ([CATCH, '--config.network.hidden=(1000000,1000000)'],
     'network.hidden: the run needs at least 16,001 GB of memory: parameters and optimizer state '
     "12,001 GB, actors' parameters 4,000 GB; this machine has "),
    ([CATCH, '--config.placement.learner_devices=(0,0)'], 'names a device twice'),
    ([CATCH, '--config.placement.actor_platform=gpu'], 'no gpu here'),
    ([CATCH, '--config.scheme=fused', '--config.placement.learner_devices=(0,1)'], 'one device'),
])
def test_bad_input_gives_one_line_and_exit_code_2(args, message, tmp_path, capsys, monkeypatch):
  """Runs the command in this process, since starting Python takes seconds."""
  monkeypatch.setattr(train.host, 'prepare_host', only_checks(train.host.prepare_host))
  monkeypatch.setattr(trainer.memory, 'host_memory', lambda: 24 * 10**9)
  workdir = tmp_path / 'run'
  assert train.main(['podracer_jit', *args, *([f'--workdir={workdir}'] if args else [])]) == 2
  error = capsys.readouterr().err
  assert error.startswith('podracer_jit: ') and error.count('\n') == 1
  assert message in error
  assert not workdir.exists()


def only_checks(real):
  """Returns prepare_host without its effects, since this process has started its backend."""
  def prepare(options, deterministic, devices=1):
    update = train.jax.config.update
    train.jax.config.update = lambda *a: None
    try:
      real(options, deterministic, devices)
    finally:
      train.jax.config.update = update
  return prepare


def test_flags_of_fields_may_come_before_the_config():
  values = train.flags.FlagValues()
  config = flags.parse(['x', '--config.seed=7', '--config.env.frame_skip=2', CATCH], values)
  assert config['seed'] == 7 and config['env']['frame_skip'] == 2


@pytest.mark.parametrize('args', [
    [*CATCH.split('='), '--config.seed', '7', '--config.env.frame_skip', '2'],
    ['-config.env.frame_skip=2', '-config.seed', '7', '-' + CATCH.lstrip('-')]])
def test_flags_may_have_any_form_that_absl_allows(args):
  config = flags.parse(['x', *args], train.flags.FlagValues())
  assert config['seed'] == 7 and config['env']['frame_skip'] == 2


@pytest.mark.parametrize('args, path', [
    ([CATCH], 'runs/impala_catch_smoke'), (['--config', '/a/b.py'], 'runs/b'),
    ([CATCH, '--config=b.py'], 'runs/b'),  # the last one counts, as for the config itself
    (['--config.seed=1', '-config=configs/impala_atari.py:nature_cnn,smoke'],
     'runs/impala_atari_nature_cnn_smoke')])
def test_the_workdir_has_the_configs_name(args, path):
  assert str(flags.default_workdir(['x', *args])) == path


def test_a_workdir_of_something_else_is_refused(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(train.host, 'prepare_host', only_checks(train.host.prepare_host))
  (tmp_path / 'config.json').write_text('{"name": "a web page"}')
  assert train.main(['x', CATCH, f'--workdir={tmp_path}']) == 2
  assert 'config.json is not of a run of podracer_jit' in capsys.readouterr().err


@pytest.mark.quick
def test_a_new_process_reports_bad_input(tmp_path):
  """The test starts Python itself, not the fork server."""
  result = subprocess.run(command(CATCH, '--config.seed=x', f'--workdir={tmp_path}/run'),
                          capture_output=True, text=True, timeout=300, env=QUICK, check=False)
  assert result.returncode == 2
  assert [line for line in result.stderr.splitlines() if 'podracer_jit' in line]
  assert "seed: must be a whole number, got 'x'" in result.stderr


def test_an_unwritable_workdir_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  result = binary(CATCH, f'--workdir={tmp_path}/file/run')
  assert result.returncode == 2 and 'file' in result.stderr


def test_a_workdir_that_cannot_be_created_is_reported_with_its_flag(capsys, monkeypatch):
  monkeypatch.setattr(train.host, 'prepare_host', only_checks(train.host.prepare_host))
  assert train.main(['podracer_jit', CATCH, '--workdir=/proc/x']) == 2
  error = capsys.readouterr().err
  assert error == ('podracer_jit: --workdir: /proc/x cannot be written to: No such file or '
                   'directory\n')


def test_training_writes_a_complete_workdir(tmp_path):
  """Trains from another directory with a packaged config."""
  result = binary(CATCH, '--workdir=run', '--config.log.every_seconds=0.1', cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert 'SPS' in result.stdout and 'finished at update 9' in result.stdout
  run = tmp_path / 'run'
  config = json.loads((run / 'config.json').read_text())
  assert config['config']['seed'] == 1 and config['versions']['jax']
  metrics = lines(run / 'metrics.jsonl')
  assert [m['update'] for m in metrics] == list(range(1, 10))
  fields = {'update', 'steps', 'frames', 'sps', 'episode_return', 'episode_length', 'episodes',
            'actor_wait_s', 'learner_wait_s', 'cgd', 'gud', 'policy_loss', 'baseline_loss',
            'entropy', 'grad_norm', 'learning_rate'}
  assert fields <= metrics[-1].keys()
  assert metrics[-1]['steps'] >= 5000 > metrics[-2]['steps']
  # cleanba with 2 minibatches: lag 0 then 1 update of 2 gradient steps, plus (2 - 1) / 2.
  assert [m['cgd'] for m in metrics] == [0.5] + [2.5] * 8
  assert metrics[-1]['episode_length'] == 9.0  # Catch always takes nine steps
  assert [r[0] for r in receipts(run)] == list(range(1, 10))
  assert list((run / 'tensorboard').glob('events*')) and list((run / 'checkpoints').iterdir())


PENDULUM = ['--config.total_steps=280', '--config.env.renew_every_updates=5',
            '--config.checkpoint.every_updates=3', '--config.log.tensorboard=False']
RUNS = {
    'cleanba impala': [CATCH, '--config.env.renew_every_updates=5',
                       '--config.checkpoint.every_updates=3', '--config.log.tensorboard=False'],
    # The train state has everything: moments, and a rate that adapts to the KL.
    'fused ppo': ['--config=configs/ppo_mujoco_fast.py', '--config.env.task=InvertedPendulum-v4',
                  '--config.env.num_envs=16', '--config.normalise.value=True',
                  '--config.optimizer.kl_target=0.01', '--config.optimizer.anneal=False',
                  '--config.total_steps=8500', '--config.env.renew_every_updates=7',
                  '--config.checkpoint.every_updates=5', '--config.log.tensorboard=False'],
    'fused pqn': ['--config=configs/pqn_cartpole.py:smoke', '--config.env.num_envs=8',
                  '--config.unroll_length=32', '--config.total_steps=2080',
                  '--config.env.renew_every_updates=5', '--config.checkpoint.every_updates=3',
                  '--config.log.tensorboard=False'],
    # Recurrent states, and minibatches of whole environments.
    'fused pqn with a GRU': [
        '--config=configs/pqn_cartpole.py:smoke', '--config.env.num_envs=8',
        '--config.unroll_length=32', '--config.num_minibatches=4', '--config.network.core=gru',
        '--config.network.core_size=16', '--config.total_steps=2080',
        '--config.env.renew_every_updates=5', '--config.checkpoint.every_updates=3',
        '--config.log.tensorboard=False'],
    'lockstep dqn': ['--config=configs/apex_dqn_catch.py:smoke', '--config.replay.min_size=256',
                     '--config.total_steps=980', '--config.env.renew_every_updates=5',
                     '--config.checkpoint.every_updates=3', '--config.log.tensorboard=False'],
    'lockstep dpg': ['--config=configs/apex_dpg_cartpole_swingup.py:smoke',
                     '--config.scheme=apex_lockstep', '--config.total_steps=2300',
                     '--config.env.renew_every_updates=5', '--config.checkpoint.every_updates=3',
                     '--config.log.tensorboard=False'],
    # Three parts with an optimizer each, and target critics.
    'lockstep sac': ['--config=configs/sac_pendulum.py:smoke', *PENDULUM],
    # A count of gradient steps says when the actor learns.
    'lockstep td3': ['--config=configs/td3_pendulum.py:smoke', *PENDULUM],
    # A replay of sequences, with recurrent states.
    'lockstep r2d2': ['--config=configs/r2d2_memory.py:smoke', '--config.total_steps=4300',
                      '--config.env.renew_every_updates=5', '--config.checkpoint.every_updates=3',
                      '--config.log.tensorboard=False'],
    **{f'fused {name}': [
        f'--config={ROOT}/examples/{name}.py:smoke', '--config.env.num_envs=8',
        '--config.unroll_length=16', '--config.total_steps=1040', '--config.scheme=fused',
        '--config.env.renew_every_updates=5', '--config.checkpoint.every_updates=3',
        '--config.log.tensorboard=False'] for name in ('vmpo', 'ppg', 'rnd')}}


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  """Returns a function that gives the workdir of one of RUNS, trained without a stop."""
  def make(name, workdir):
    result = binary(*RUNS[name], f'--workdir={workdir}')
    assert result.returncode == 0, result.stderr
  return lambda name: made.once(tmp_path_factory, f'uninterrupted_{name}',
                                functools.partial(make, name))


@pytest.mark.parametrize('name', essential(RUNS, 'cleanba impala'))
@pytest.mark.same_bits('killed at random and resumed',
                       'IMPALA: MLP (`cleanba`), PPO, PQN: MLP, GRU, V-MPO, PPG, RND (`fused`), '
                       'R2D2: GRU, DQN, DPG, SAC, TD3 (`apex_lockstep`)')
def test_a_killed_run_resumes_to_the_same_bits(name, uninterrupted, tmp_path):
  """The run is killed at a random moment between its start and its end."""
  num_updates = random.randrange(9)
  delay_s = random.random() * 0.3
  print(f'killed {delay_s:.3f} s after {num_updates} updates')
  process = processes.Popen(command(*RUNS[name], f'--workdir={tmp_path}'),
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  path = tmp_path / 'metrics.jsonl'
  while num_updates and (not path.exists() or len(path.read_text().splitlines()) < num_updates):
    assert process.poll() is None
    time.sleep(0.01)
  time.sleep(delay_s)
  process.send_signal(signal.SIGKILL)
  process.wait()
  saved = saved_to_the_end(tmp_path)
  if 9 not in saved and path.exists():  # otherwise the run has not begun
    with path.open('a') as file:
      file.write('{"update": 8, "half a li')
  result = binary(*RUNS[name], f'--workdir={tmp_path}')
  assert result.returncode == 0, result.stderr
  assert not saved or f'going on from update {max(saved)} ' in result.stdout
  assert receipts(tmp_path) == receipts(uninterrupted(name)) and len(receipts(tmp_path)) == 9
  assert [m['update'] for m in lines(path)] == list(range(1, 10))
  last = [lines(w / 'metrics.jsonl')[-1] for w in (tmp_path, uninterrupted(name))]
  assert last[0]['episode_return'] == last[1]['episode_return']
  assert last[0]['episodes'] == last[1]['episodes']


def test_a_signal_saves_and_the_same_command_goes_on_with_the_same_bits(tmp_path):
  def signalled(workdir, number, least):
    """Sends a signal after `least` updates at least; returns the output and the receipts."""
    process = processes.Popen(
        command(CATCH, '--config.total_steps=400000', '--config.log.tensorboard=False',
                f'--workdir={workdir}'), stdout=subprocess.PIPE, text=True)
    path = workdir / 'metrics.jsonl'
    while not path.exists() or len(path.read_text().splitlines()) < least:
      assert process.poll() is None
      time.sleep(0.01)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 3 and 'the same command goes on' in out
    rows = receipts(workdir)
    assert [row[0] for row in rows] == list(range(1, len(rows) + 1))
    assert (workdir / 'checkpoints' / str(len(rows))).is_dir()
    return out, rows

  stopped = tmp_path / 'stopped'
  _, first = signalled(stopped, signal.SIGINT, 4)
  out, both = signalled(stopped, signal.SIGTERM, len(first) + 3)
  assert f'going on from update {len(first)} ' in out
  assert both[:len(first)] == first and len(both) > len(first)
  _, never = signalled(tmp_path / 'never', signal.SIGINT, len(first) + 3)
  count = min(len(both), len(never))
  assert both[:count] == never[:count]


@pytest.mark.full
@pytest.mark.parametrize('scheme', essential(['rapid_async', 'impala'], 'impala'))
def test_an_asynchronous_run_is_saved_and_resumes(scheme, tmp_path):
  args = ['--config=configs/ppo_cartpole.py', f'--config.scheme={scheme}', f'--workdir={tmp_path}',
          '--config.num_shards=2', '--config.num_grad_shards=2', '--config.log.tensorboard=False',
          '--config.placement.actor_devices=(0,0)', '--config.checkpoint.every_updates=3']
  if scheme != 'impala':
    args.append('--config.placement.learner_devices=(0,0)')
  done = 0
  for _ in range(2):
    process = processes.Popen(command(*args, '--config.total_steps=400000'), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    path = tmp_path / 'metrics.jsonl'
    while not path.exists() or len(path.read_text().splitlines()) < done + 5:
      assert process.poll() is None, process.communicate()[1]
      time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 3 and 'the same command goes on' in out, errors
    assert not done or f'going on from update {done} ' in out
    metrics = lines(path)
    done = len(metrics)
    assert [x['update'] for x in metrics] == list(range(1, done + 1))
    assert all(a['steps'] < b['steps'] for a, b in itertools.pairwise(metrics))


def test_a_finished_run_only_reports_that_it_is_finished(uninterrupted, tmp_path):
  workdir = shutil.copytree(uninterrupted('cleanba impala'), tmp_path / 'run')
  before = (workdir / 'receipts.jsonl').read_text()
  result = binary(*RUNS['cleanba impala'], f'--workdir={workdir}')
  assert result.returncode == 0 and 'finished at update 9' in result.stdout
  assert (workdir / 'receipts.jsonl').read_text() == before


def test_a_changed_config_is_refused_and_a_changed_placement_is_not(
    uninterrupted, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(train.host, 'prepare_host', only_checks(train.host.prepare_host))
  workdir = shutil.copytree(uninterrupted('cleanba impala'), tmp_path / 'run')
  args = ['podracer_jit', *RUNS['cleanba impala'], f'--workdir={workdir}']
  assert train.main([*args, '--config.seed=2', '--config.loss.discount=0.9']) == 2
  error = capsys.readouterr().err
  assert '(seed: 1 there, 2 now: it cannot change, as ' in error  # what cannot change comes first
  assert '; loss.discount: 0.99 there, 0.9 now: --change=loss.discount allows it)' in error
  assert train.main([*args, '--config.placement.env_threads=2', '--config.placement.xla_threads=9',
                     '--config.log.window=5']) == 0
  assert json.loads((workdir / 'config.json').read_text())['config']['log']['window'] == 5


def test_a_hanging_thread_does_not_keep_the_process_alive(tmp_path):
  """The learner fails while an actor hangs in its program, as EnvPool's recv could."""
  script = ("""import dataclasses, functools, sys, time
from podracer_jit import loops
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.cli import train
from podracer_jit.schemes.table import SCHEMES
load, scheme = RolloutProgram.load, SCHEMES['cleanba']
def hanging(self, *a, **k):
  program, calls = load(self, *a, **k), []
  def call(*args):
    calls.append(1)
    if len(calls) == 4: time.sleep(1000)
    return program(*args)
  return call
def failing(*a):
  (workers, waits), calls = scheme.graph.wire(*a), []
  *actors, worker = workers
  def fire(*args):
    calls.append(1)
    if len(calls) == 3:
      time.sleep(1)
      raise ValueError("the learner has failed")
    return worker.fire(*args)
  return [*actors, worker._replace(fire=fire)], waits
RolloutProgram.load = hanging
SCHEMES['cleanba'] = dataclasses.replace(scheme, graph=scheme.graph._replace(wire=failing))
loops.run = functools.partial(loops.run, grace_s=1.0)
sys.exit(train.main(sys.argv))""")
  result = processes.run([sys.executable, '-P', '-c', script, CATCH, f'--workdir={tmp_path}'],
                         timeout=200)
  assert result.returncode == 1
  assert 'the learner has failed' in result.stderr
  assert 'actor 0 did not end within 1 s' in result.stderr


HANGING = """
import functools, os, pathlib, signal, sys, threading, time
from podracer_jit import loops
from podracer_jit.actor.rollout_program import RolloutProgram
load, signals, calls = RolloutProgram.load, int(sys.argv.pop()), []
saved = pathlib.Path(sys.argv.pop(), 'checkpoints', '3')
def interrupt():
  while not saved.exists():  # the update with the last rollout that was made
    time.sleep(0.01)
  for _ in range(signals):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)  # longer than stopping.REPEAT_S
def hanging(self, *args, **kwargs):
  program = load(self, *args, **kwargs)
  def call(*args):
    calls.append(1)
    if len(calls) == 4:
      threading.Thread(target=interrupt, daemon=True).start()
      time.sleep(1000)
    return program(*args)
  return call
RolloutProgram.load = hanging
# Two signals: nothing else ends the wait for the thread. Three: nobody waits any longer.
loops.run = functools.partial(loops.run, grace_s={2: 0.5, 3: 1000.0}[signals])
"""


@pytest.mark.parametrize('signals', [2, 3])
def test_a_second_signal_ends_a_run_that_hangs(signals, tmp_path):
  script = f'{HANGING}\nfrom podracer_jit.cli import main\nmain.run()'
  result = processes.run([sys.executable, '-P', '-c', script, CATCH, f'--workdir={tmp_path}',
                          '--config.checkpoint.every_updates=1',
                          '--config.env.renew_every_updates=0', str(tmp_path), str(signals)])
  assert result.returncode == INTERRUPTED, result.stderr
  assert re.fullmatch(
      r'podracer_jit: interrupted; updates since the newest checkpoint are not saved; actor 0 did '
      rf'not end within \d+ s; the last good checkpoint is that of update 3, in {tmp_path}\n',
      result.stderr)


def test_a_program_outlives_a_training_that_hangs(tmp_path):
  """Python can train again, in the same workdir, and ends as usual."""
  script = HANGING + """
import podracer_jit as pj
config = pj.load_config('impala_catch:smoke')
config.checkpoint.every_updates = 1
try:
  pj.train(config, 'run', quiet=True)
except loops.Stuck as error:
  print(f'{type(error.__cause__).__name__}: {error}')
print(pj.train(config, 'run', quiet=True).finished)
"""
  result = processes.run([sys.executable, '-P', '-c', script, 'run', '2'], cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert result.stdout == ('KeyboardInterrupt: actor 0 did not end within 0 s; the last good '
                           'checkpoint is that of update 3, in run\nTrue\n')


FAILURES = [
    (EnvironmentFailed, ['Catch-v0: step 3 failed'], 'Catch-v0: step 3 failed'),
    (jax.errors.JaxRuntimeError, ['INTERNAL: Traceback\nEnvironmentFailed: Catch-v0: it broke\n'
                                  'at the end'], 'Catch-v0: it broke'),
    (jax.errors.JaxRuntimeError, ['RESOURCE_EXHAUSTED: out of memory'],
     'JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory'),
    (WorkerLost, ['actor 1 has died'], 'actor 1 has died'),
    (Diverged, ['update 3: loss not finite'], 'Diverged: update 3: loss not finite'),
    (KeyError, ['a key'], "KeyError: 'a key'"),
    (OSError, [28, 'No space left on device', 'x.jsonl'],
     "[Errno 28] No space left on device: 'x.jsonl'"),
    (checkpoints.NotSaved, ['cannot save it'], 'cannot save it'),
    (TimeoutError, [], 'TimeoutError; '),
    (TimeoutError, [''], 'TimeoutError; '),
    (AssertionError, [], 'AssertionError; '),
    (loops.Stuck, ['actor 0 did not end within 30 s'],
     'ValueError: too late; actor 0 did not end within 30 s')]


@pytest.mark.parametrize('saved', [(), (0, 4)])
@pytest.mark.parametrize('kind, args, message', FAILURES)
def test_each_failure_names_the_last_good_checkpoint(kind, args, message, saved, tmp_path):
  for update in saved:
    (tmp_path / 'checkpoints' / str(update)).mkdir(parents=True)
    (tmp_path / 'checkpoints' / str(update) / 'manifest.json').touch()
  newest = 'that of update 4' if saved else 'none: the run had just begun'
  newest = f'the last good checkpoint is {newest}, in {tmp_path}'
  with pytest.raises(kind) as raised, checkpoints.naming_last_good(tmp_path):
    raise kind(*args) from (ValueError('too late') if kind is loops.Stuck else None)
  notes = getattr(raised.value, '__notes__', [])
  assert ''.join([str(raised.value), *notes]).count(newest) == 1
  code, line = train._failure(raised.value, tmp_path)
  assert code == FAILED
  assert line.startswith(message) and line.endswith(newest) and line.count(newest) == 1


def test_a_checkpoint_that_a_failure_names_itself_is_the_only_one(tmp_path):
  message = f'seed 1, update 3: no loss; {checkpoints.last_good(tmp_path / "seed1")}'
  with pytest.raises(Diverged) as raised, checkpoints.naming_last_good(tmp_path / 'seed2'):
    raise Diverged(message)
  assert train._failure(raised.value, tmp_path / 'seed2')[1] == f'Diverged: {message}'


def test_an_unforeseen_error_before_the_start_names_the_last_good_checkpoint(tmp_path, monkeypatch,
                                                                             capsys):
  def broken(config):
    raise RuntimeError('it is broken')
  monkeypatch.setattr(train, 'resolve', broken)
  assert train.main(['podracer_jit', CATCH, f'--workdir={tmp_path}']) == FAILED
  assert capsys.readouterr().err.endswith(
      'podracer_jit: RuntimeError: it is broken; the last good checkpoint is none: the run had '
      f'just begun, in {tmp_path}\n')


@pytest.mark.parametrize('args', [['--num_seeds=2'], []])
def test_a_failure_without_one_workdir_names_no_checkpoint(args, tmp_path, monkeypatch, capsys):
  """Each seed has a workdir, and a failure may come before the workdir is known."""
  def broken(*args):
    raise RuntimeError('it is broken')
  if args:
    monkeypatch.setattr(train.trainer, 'opened', broken)
  else:
    monkeypatch.setattr(train, 'parse', broken)
  assert train.main(['podracer_jit', CATCH, f'--workdir={tmp_path}', *args]) == FAILED
  assert capsys.readouterr().err.endswith('podracer_jit: RuntimeError: it is broken\n')


class Failing(NamedTuple):
  """A run whose training fails."""

  workdir: Path
  error: BaseException
  notes: Sequence[str] = ()

  def train(self, stop, *args, **kwargs):
    for _ in range(2):
      stop._last_s = -math.inf  # as if long after the one before
      with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    stop._last_s = -math.inf
    raise self.error


@pytest.fixture
def train_and_fail(tmp_path, monkeypatch, capsys):
  """Returns a function that runs the command with such a run: (exit code, stderr)."""
  def run(error):
    monkeypatch.setattr(train, 'resolve', lambda config: None)
    monkeypatch.setattr(train.trainer, 'opened', lambda *args: contextlib.nullcontext(
        Failing(tmp_path, error)))
    code = train.main(['podracer_jit', CATCH, f'--workdir={tmp_path}'])
    return code, capsys.readouterr().err
  return run


def test_a_signal_while_the_line_of_a_failure_is_made_changes_nothing(
    train_and_fail, tmp_path, monkeypatch):
  saved_updates = checkpoints.saved_updates

  def interrupted(workdir):
    signal.raise_signal(signal.SIGINT)
    return saved_updates(workdir)

  monkeypatch.setattr(checkpoints, 'saved_updates', interrupted)
  code, errors = train_and_fail(KeyboardInterrupt())
  assert code == INTERRUPTED
  assert errors == ('podracer_jit: interrupted; updates since the newest checkpoint are not saved; '
                    f'the last good checkpoint is none: the run had just begun, in {tmp_path}\n')


@pytest.mark.parametrize('error, line', [(SystemExit(3), 'SystemExit: 3'),
                                         (SystemExit(), 'SystemExit')])
def test_the_exit_code_of_a_users_code_is_not_the_commands(error, line, train_and_fail, tmp_path):
  assert train_and_fail(error) == (FAILED, (
      f'podracer_jit: {line}; the last good checkpoint is none: the run had just begun, in '
      f'{tmp_path}\n'))


def test_a_full_disk_at_the_beginning_of_a_segment_is_one_line(uninterrupted, tmp_path):
  """The header of a segment is the first line that a resumed run writes."""
  workdir = shutil.copytree(uninterrupted('cleanba impala'), tmp_path / 'run')
  *earlier, newest = sorted(saved_to_the_end(workdir))
  shutil.rmtree(workdir / 'checkpoints' / str(newest))
  path = workdir / 'receipts.jsonl'
  header, *rest = lines(path)
  # No file may be longer than the limit, and these receipts almost are.
  limit = 2**17
  kept = [line for line in rest if line.get('update', line.get('first_update')) <= earlier[-1]]
  text = ''.join(json.dumps(line) + '\n' for line in [header | {'pad': ''}, *kept])
  path.write_text(text.replace('"pad": "', '"pad": "' + 'x' * (limit - 10 - len(text))))
  script = ('import resource, sys\nfrom podracer_jit.cli import train\n'
            f'resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n'
            'sys.exit(train.main(sys.argv))')
  result = processes.run([sys.executable, '-P', '-c', script, *RUNS['cleanba impala'],
                          f'--workdir={workdir}'])
  assert result.returncode == FAILED
  assert result.stderr == (
      f"podracer_jit: [Errno 27] File too large: '{path}'; the last good checkpoint is that of "
      f'update {earlier[-1]}, in {workdir}\n')


def test_an_error_while_writing_files_ends_the_run(tmp_path):
  """A full disk gives one message and exit code 1."""
  script = ('import sys\nfrom podracer_jit.training import sinks\n'
            'from podracer_jit.cli import train as main\n'
            'def full(self, *a): raise OSError(28, "No space left on device")\n'
            'sinks.Journals.update = full\n'
            'sys.exit(main.main(sys.argv))')
  result = processes.run([sys.executable, '-P', '-c', script, CATCH, f'--workdir={tmp_path}'])
  assert result.returncode == 1
  (error,) = [line for line in result.stderr.splitlines() if line.startswith('podracer_jit: ')]
  assert error.startswith('podracer_jit: [Errno 28] No space left on device; the last good '
                          'checkpoint is none')
