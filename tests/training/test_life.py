"""Runs that begin with another run's state, are extended, or change fields."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from podracer_jit import experiment
from podracer_jit.cli import train
from podracer_jit.experiment import schema
from podracer_jit.options import flat
from podracer_jit.play import evaluation
from podracer_jit.training import inherit, opening, sinks, stopping
from podracer_jit.training.trainer import Training
from podracer_jit.workdir import checkpoints, record
from podracer_jit.workdir.workdir import Workdir, make_request
from tests import made, processes, runs
from tests.agents.test_running_moments import of_replay
from tests.cli.test_main import only_checks, saved_to_the_end
from tests.processes import command
from tests.runs import QUICK, changed, fresh, prepared, small
from tests.tiers import essential

CATCH = ['--config=configs/impala_catch.py:smoke', '--config.log.tensorboard=False',
         '--config.env.renew_every_updates=4', '--config.checkpoint.every_updates=3',
         '--config.checkpoint.keep=9']
CONSTANT = [*CATCH, '--config.optimizer.anneal=False']
CARTPOLE = ['--config=configs/ppo_cartpole.py:smoke', '--config.log.tensorboard=False',
            '--config.optimizer.anneal=False']
APEX = ['--config=configs/apex_dqn_catch.py:smoke', '--config.log.tensorboard=False',
        '--config.scheme=apex_lockstep', '--config.env.renew_every_updates=11',
        '--config.checkpoint.every_updates=11', '--config.total_steps=2500',
        '--config.checkpoint.keep=4']  # besides the checkpoint of update 0
STEPS = 576  # steps of an update of CATCH: 32 environments, 20 rows, every tenth row invalid


def binary(*args, code=0):
  """Runs the command; returns its output and error messages."""
  result = processes.run(command(*args))
  assert result.returncode == code, result.stdout + result.stderr
  return result.stdout + result.stderr


def together(*args, code=0):
  """Runs the command as two processes; returns the output of each."""
  results = processes.together(2, *args)
  assert [result.returncode for result in results] == [code, code], results
  return [result.stdout for result in results]


def refused(*args):
  """Runs a command that must be refused; returns its one line of error."""
  output = binary(*args, code=2)
  assert output.startswith('podracer_jit: ') and output.count('\n') == 1, output
  return output


def updates(count):
  return f'--config.total_steps={count * STEPS}'


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def receipts(workdir):
  return [line for line in lines(workdir / 'receipts.jsonl') if 'segment' not in line]


def headers(workdir):
  return [line for line in lines(workdir / 'receipts.jsonl') if 'segment' in line]


def metric(workdir, name):
  return [line[name] for line in lines(workdir / 'metrics.jsonl')]


def arrays(workdir, update, item='state'):
  """Returns the arrays of a checkpoint by name, without the structure of the train state."""
  tree = ocp.StandardCheckpointer().restore(workdir / 'checkpoints' / str(update) / item)
  tree.pop('key', None)
  return {jax.tree_util.keystr(path): np.asarray(leaf)
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def copied(workdir, target):
  """Copies a workdir; returns the copy."""
  return shutil.copytree(workdir, target, dirs_exist_ok=True)


def break_checkpoints(workdir, *numbers):
  for number in numbers:
    (workdir / 'checkpoints' / str(number) / 'manifest.json').write_text('{')


@pytest.fixture(scope='module')
def six(tmp_path_factory):
  """A run of six updates at a constant rate."""
  return made.once(tmp_path_factory, 'six', lambda workdir: binary(
      *CONSTANT, updates(6), f'--workdir={workdir}'))


@pytest.fixture(scope='module')
def twelve(tmp_path_factory):
  """A run of twelve updates at a constant rate, in one part."""
  return made.once(tmp_path_factory, 'twelve', lambda workdir: binary(
      *CONSTANT, updates(12), f'--workdir={workdir}'))


@pytest.fixture(scope='module')
def extended(six, tmp_path_factory):
  """`six` extended to twelve updates."""
  def make(workdir):
    copied(six, workdir)
    output = binary(*CONSTANT, updates(12), f'--workdir={workdir}', '--extend')
    assert 'changed before update 7: total_steps: 3456 before, 6912 since' in output
    assert 'the learning rate' not in output  # the rate is constant
  return made.once(tmp_path_factory, 'extended', make)


@pytest.fixture(scope='module')
def faster(six, tmp_path_factory):
  """`six` extended to twelve updates, with ten times the rate from update 7 on."""
  return made.once(tmp_path_factory, 'faster', lambda workdir: binary(
      *CONSTANT, updates(12), '--config.optimizer.learning_rate=0.01',
      f'--workdir={copied(six, workdir)}', '--extend', '--change=optimizer.learning_rate'))


@pytest.fixture(scope='module')
def heir(six, tmp_path_factory):
  """A run of six updates that began with the state of `six`, whose workdir was then removed."""
  def make(workdir):
    source = copied(six, tmp_path_factory.mktemp('source'))
    output = binary(*CONSTANT, updates(6), f'--workdir={workdir}', f'--init_from={source}',
                    '--config.seed=2')
    assert f'begins with parameters, optimizer of {source} after update 6\n' in output
    shutil.rmtree(source)
  return made.once(tmp_path_factory, 'heir', make)


@pytest.mark.same_bits('total_steps raised with --extend', 'IMPALA: MLP (`cleanba`)')
def test_an_extended_run_equals_the_longer_run(extended, twelve):
  assert receipts(extended) == receipts(twelve) and len(receipts(twelve)) == 12
  assert metric(extended, 'learning_rate') == metric(twelve, 'learning_rate')
  change = {'first_update': 7, 'changes': {'total_steps': {'was': 3456, 'now': 6912}}}
  assert [(header['segment'], header.get('history')) for header in headers(extended)] == [
      (0, None), (1, None), (1, change), (2, None)]
  assert 'history' not in json.loads((twelve / 'config.json').read_text())
  output = binary('compare', extended, twelve)
  assert output.startswith(
      'history: A changed before update 7: total_steps: 3456 before, 6912 since\n'
      'identical: 12 updates')


@pytest.mark.full
@pytest.mark.same_bits('extended within a segment, JAX environments', 'PPO: MLP (`sync`)')
def test_a_run_with_jax_environments_can_be_extended_within_a_segment(tmp_path):
  args = [*CARTPOLE, '--config.env.task=gymnax:CartPole-v1', '--config.scheme=sync',
          '--config.env.renew_every_updates=4']
  binary(*args, f'--workdir={tmp_path}/a')
  first_end = len(receipts(tmp_path / 'a'))
  binary(*args, f'--workdir={tmp_path}/a', '--config.total_steps=9000', '--extend')
  binary(*args, f'--workdir={tmp_path}/b', '--config.total_steps=9000')
  assert first_end % 4 and len(receipts(tmp_path / 'a')) > first_end
  assert receipts(tmp_path / 'a') == receipts(tmp_path / 'b')


def test_a_finished_run_tells_how_to_extend_it_and_changes_nothing(extended, tmp_path):
  workdir = copied(extended, tmp_path)
  output = binary(*CONSTANT, updates(12), f'--workdir={workdir}', '--extend')
  assert 'to go on: --extend with a larger --config.total_steps' in output
  before, after = (json.loads((path / 'config.json').read_text()) for path in (extended, workdir))
  assert after.pop('starts')[:2] == before.pop('starts') and after == before


def test_refusals_name_the_flag_that_allows_the_change(extended, six, tmp_path, capsys,
                                                       monkeypatch):
  """Runs the command in this process, since there are twenty refusals."""
  monkeypatch.setattr(train.host, 'prepare_host', only_checks(train.host.prepare_host))

  def refused(*args):
    assert train.main(['podracer_jit', *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith('podracer_jit: ') and error.count('\n') == 1, error
    return error

  old = copied(extended, tmp_path / 'old')
  workdir = f'--workdir={old}'
  output = refused(*CONSTANT, updates(13), '--config.loss.entropy_coef=0.1', workdir)
  assert 'loss.entropy_coef: 0.01 there, 0.1 now: --change=loss.entropy_coef allows it' in output
  assert 'total_steps: 6912 there, 7488 now: --extend allows it' in output
  assert f'--init_from={old} begins with what this run has learned' in output
  assert 'it can only grow' in refused(*CONSTANT, updates(11), workdir, '--extend')
  assert '--extend allows it' in refused(
      *CONSTANT, updates(13), workdir, '--change=loss.entropy_coef')
  assert 'loss.entropy_coef: 0.01 there' in refused(
      *CONSTANT, updates(12), '--config.loss.entropy_coef=0.1', workdir,
      '--change=loss.discount')
  assert 'seed: 1 there, 2 now: it cannot change, as' in refused(
      *CONSTANT, updates(12), '--config.seed=2', workdir)
  # Fields of another algorithm are others anyway, and what cannot change comes first.
  output = refused('--config=configs/ppo_cartpole.py:smoke', workdir)
  assert 'holds another experiment (env.num_envs' in output and len(output) < 2500
  assert 'loss.name: ' in output and 'loss.clip' not in output and 'None there' not in output
  new = f'--workdir={tmp_path}/new'
  for flag in ('--extend', '--change=loss.discount', '--change=total_steps'):
    assert 'there is no run in' in refused(*CONSTANT, new, flag)
  source = f'--init_from={six}'
  for args, message in [
      (['--change=los.discount'], 'no field los.discount; did you mean loss.discount?'),
      (['--change=network.hidden'], 'network.hidden cannot change, as the checkpoint has the'),
      (['--change=env.num_envs'], 'env.num_envs cannot change, as the batch'),
      (['--init_partly'], '--init_partly: is for --init_from'),
      ([source, '--init_parts=all'], "Unknown command line flag 'init_parts'"),
      ([source, '--extend'], '--init_from: begins a new run; it cannot be combined with --extend'),
      ([f'{source}/none'], 'none does not exist'),
      ([f'--init_from={tmp_path}'], 'has no whole checkpoint'),
      # The workdir itself, which is made and locked before anything is read.
      ([f'--init_from={tmp_path}/new'], 'new has no whole checkpoint')]:
    assert message in refused(*CONSTANT, new, *args)
  assert not (tmp_path / 'new').exists()


def test_a_run_keeps_the_microbatches_that_it_began_with(tmp_path):
  """The config leaves them open, so they would be others on another platform."""
  args = [*CARTPOLE, '--config.total_steps=100', f'--workdir={tmp_path}']
  binary(*args, '--config.microbatch_rows=16')
  assert 'finished at update ' in binary(*args)
  assert json.loads((tmp_path / 'config.json').read_text())['config']['microbatch_rows'] == 16
  output = refused(*args, '--config.microbatch_rows=32')
  assert 'microbatch_rows: 16 there, 32 now' in output


def test_a_run_without_updates_says_nothing_about_microbatches(tmp_path):
  """The next command begins anew, as in a new workdir."""
  args = [*CARTPOLE, '--config.total_steps=100', f'--workdir={tmp_path}']
  binary(*args, '--config.microbatch_rows=16')
  for name in ('metrics.jsonl', 'receipts.jsonl'):
    (tmp_path / name).unlink()
  shutil.rmtree(tmp_path / 'checkpoints')
  binary(*args)
  assert json.loads((tmp_path / 'config.json').read_text())['config']['microbatch_rows'] == 4096


def test_a_lost_config_says_it_in_a_checkpoint(tmp_path):
  args = [*CARTPOLE, '--config.total_steps=100', f'--workdir={tmp_path}']
  binary(*args, '--config.microbatch_rows=16')
  (tmp_path / 'config.json').write_text('{')
  assert 'it was restored from the checkpoint' in binary(*args)
  assert json.loads((tmp_path / 'config.json').read_text())['config']['microbatch_rows'] == 16


@pytest.fixture(scope='module')
def annealed(tmp_path_factory):
  """A run of six updates at a falling rate, extended to twelve."""
  def make(workdir):
    binary(*CATCH, updates(6), f'--workdir={workdir}')
    output = binary(*CATCH, updates(12), f'--workdir={workdir}', '--extend')
    assert ('the learning rate changes from 0 to 0.0005 here: its schedule is over 6,912 steps '
            'instead of 3,456\n') in output
  return made.once(tmp_path_factory, 'annealed', make)


@pytest.mark.full
def test_an_extended_rate_anneals_to_the_new_end(annealed):
  first = [1e-3 * (1 - i / 6) for i in range(6)]
  second = [1e-3 * (1 - i / 12) for i in range(6, 12)]
  np.testing.assert_allclose(metric(annealed, 'learning_rate'), first + second, rtol=1e-5)


@pytest.mark.parametrize('name, update', essential([
    ('annealed', 5), ('annealed', 8), ('faster', 5), ('faster', 11), ('heir', 2), ('heir', 5)],
    ('annealed', 8), ('faster', 5)))
def test_rerun_uses_the_config_and_state_of_that_update(name, update, request):
  workdir = request.getfixturevalue(name)
  output = binary('rerun', f'--workdir={workdir}', f'--update={update}')
  assert f'the rollout of update {update}, as its receipt says' in output


def test_a_changed_rate_applies_from_its_update_on(faster, six, twelve):
  assert receipts(faster)[:6] == receipts(six) == receipts(twelve)[:6]
  np.testing.assert_allclose(metric(faster, 'learning_rate'), [1e-3] * 6 + [1e-2] * 6, rtol=1e-6)
  assert receipts(faster)[6]['batch'] == receipts(twelve)[6]['batch']
  assert receipts(faster)[6]['params'] != receipts(twelve)[6]['params']
  output = binary('compare', faster, twelve, code=1)
  assert ('history: A changed before update 7: optimizer.learning_rate: 0.001 before, 0.01 since; '
          'total_steps: 3456 before, 6912 since\ndiffer at update 7: ') in output


@pytest.mark.full
def test_a_deep_comparison_uses_the_configs_of_that_update(faster, twelve):
  output = binary('compare', '--deep', faster, twelve, code=1)
  assert '\nthe first to differ: gradient step 1: parameters\n' in output
  assert re.search(r'\n  params/\S+: [\d,]+ of [\d,]+ numbers differ, by at most [\d,]+ units in '
                   'the last place\n', output)


@pytest.mark.full
def test_a_run_killed_after_a_change_resumes_to_the_same_bits(six, tmp_path):
  args = [*CONSTANT, updates(60), '--config.optimizer.learning_rate=0.01']
  flags = ['--extend', '--change=optimizer.learning_rate']
  killed = copied(six, tmp_path / 'killed')
  process = processes.Popen(command(*args, *flags, f'--workdir={killed}'),
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  while len((killed / 'metrics.jsonl').read_text().splitlines()) < 12:
    assert process.poll() is None
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.wait()
  done = max(saved_to_the_end(killed))
  assert 9 <= done < 60
  # The changes are in config.json: the flags may be left out or given again.
  output = binary(*args, *flags[:1], f'--workdir={killed}')
  assert f'going on from update {done} ' in output and 'changed before' not in output
  uninterrupted = copied(six, tmp_path / 'uninterrupted')
  binary(*args, *flags, f'--workdir={uninterrupted}')
  assert receipts(killed) == receipts(uninterrupted) and len(receipts(uninterrupted)) == 60
  assert 'history' in headers(killed)[2]


def test_updates_before_a_change_are_made_again_with_their_own_config(faster, tmp_path):
  copied(faster, tmp_path)
  break_checkpoints(tmp_path, 6, 9, 12)
  args = [*CONSTANT, updates(12), '--config.optimizer.learning_rate=0.01', f'--workdir={tmp_path}']
  output = refused(*args, '--config.loss.entropy_coef=0.1', '--change=loss.entropy_coef')
  assert 'cannot change now: the config changes before update 7, and the checkpoint' in output
  output = binary(*args)
  assert 'going on from update 3 ' in output and 'update 6: the config changes after it' in output
  assert receipts(tmp_path) == receipts(faster)
  # It went on within the first segment, and again where the config changes.
  assert [(header['segment'], header['first_update']) for header in headers(tmp_path)] == [
      (0, 1), (0, 4), (1, 5), (1, 7), (2, 9)]
  assert headers(tmp_path)[3]['history'] == headers(faster)[2]['history']


@pytest.fixture(scope='module')
def with_replay(tmp_path_factory):
  """A run of 22 updates with a replay."""
  return made.once(tmp_path_factory, 'with_replay', lambda workdir: binary(
      *APEX, f'--workdir={workdir}'))


@pytest.mark.full
def test_a_field_that_does_not_fit_the_checkpoint_cannot_change(with_replay):
  """Only the shapes of the state show that these fields cannot change."""
  args = [*APEX, f'--workdir={with_replay}']
  before = (with_replay / 'config.json').read_text()
  output = refused(*args, '--config.replay.capacity=9984', '--change=replay.capacity')
  assert 'replay.capacity: cannot change in' in output and ' has the shape ' in output
  output = refused(*args, '--config.optimizer.anneal=False', '--config.optimizer.kl_target=0.0',
                 '--config.env.num_envs=32', '--change=optimizer.anneal')
  assert 'env.num_envs: 16 there, 32 now: it cannot change' in output
  assert (with_replay / 'config.json').read_text() == before


def test_a_run_begins_with_another_runs_parameters_and_moments(heir, six):
  first = arrays(heir, 0)
  source = arrays(six, 6)
  assert first.keys() == source.keys()
  for name, value in first.items():
    if name in ("['update']", "['steps']"):
      assert value == 0
    else:
      np.testing.assert_array_equal(value, source[name])
  assert headers(heir)[0]['history']['init_from']['taken'] == ['parameters', 'optimizer']
  assert metric(heir, 'update') == [1, 2, 3, 4, 5, 6]
  output = binary('compare', heir, six, code=1)
  assert 'history: A began with parameters, optimizer of ' in output
  assert 'history: B began with its seed' in output


@pytest.mark.same_bits('begun with another run, then killed', 'IMPALA: MLP (`cleanba`)')
def test_a_run_begun_with_another_run_resumes_without_it(heir, tmp_path):
  args = [*CONSTANT, updates(6), '--config.seed=2']
  resumed = copied(heir, tmp_path / 'resumed')
  for number in (3, 6):  # as if the run had been killed before its first checkpoint
    shutil.rmtree(resumed / 'checkpoints' / str(number))
  source = record.read(heir).origin.workdir
  output = binary(*args, f'--workdir={resumed}', f'--init_from={source}')
  assert 'starting' in output
  assert receipts(heir) == receipts(resumed)
  assert binary('compare', heir, resumed).startswith('identical: 6 updates')
  assert 'has a run already, which began with parameters, optimizer of' in refused(
      *args, f'--workdir={resumed}', f'--init_from={tmp_path}')


def test_a_run_without_its_first_state_does_not_begin_anew(heir, tmp_path):
  copied(heir, tmp_path)
  shutil.rmtree(tmp_path / 'checkpoints')
  args = [*CONSTANT, updates(6), '--config.seed=2']
  assert 'has no checkpoint left' in refused(*args, f'--workdir={tmp_path}')
  output = binary('rerun', f'--workdir={tmp_path}', '--update=2', code=2)
  assert 'a checkpoint of one of the updates 0 to 1 is needed' in output


def test_a_run_killed_while_starting_begins_anew(heir, six, tmp_path):
  """The run was killed after saving the first state and before writing config.json."""
  copied(heir, tmp_path)
  for path in tmp_path.iterdir():
    if path.name != 'checkpoints':
      shutil.rmtree(path) if path.is_dir() else path.unlink()
  for number in (3, 6):
    shutil.rmtree(tmp_path / 'checkpoints' / str(number))
  binary(*CONSTANT, updates(6), '--config.seed=2', f'--workdir={tmp_path}', f'--init_from={six}')
  assert receipts(tmp_path) == receipts(heir)


STOPPED_WHILE_IT_READS = """
import os, signal, sys
from podracer_jit.training import inherit, opening
from podracer_jit.cli import train
read = inherit.read
def stops_and_reads(*args):
  os.kill(os.getpid(), signal.SIGSTOP)
  return read(*args)
inherit.read = stops_and_reads
sys.exit(train.main(sys.argv))
"""


def test_nothing_can_begin_in_a_workdir_while_a_run_reads_its_first_state(six, tmp_path):
  """The first run has decided that the workdir is new, and may need minutes to read."""
  workdir = tmp_path / 'run'
  first = processes.Popen([sys.executable, '-P', '-c', STOPPED_WHILE_IT_READS, *CONSTANT,
                           updates(6), '--config.seed=2', f'--workdir={workdir}',
                           f'--init_from={six}'])
  stat = Path(f'/proc/{first.pid}/stat')
  while stat.read_text().rpartition(') ')[2][0] != 'T':
    assert first.poll() is None
    time.sleep(0.02)
  try:
    error = refused(*CONSTANT, updates(6), f'--workdir={workdir}')
    assert f'{workdir} is in use by process {first.pid} on ' in error
    assert [path.name for path in workdir.iterdir()] == ['lock']
  finally:
    os.kill(first.pid, signal.SIGCONT)
  assert first.wait(timeout=120) == 0
  assert record.read(workdir).origin.workdir == str(six)
  assert len(receipts(workdir)) == 6


@pytest.fixture(scope='module')
def cartpole(tmp_path_factory):
  """A run of PPO on CartPole with running statistics of observations."""
  return made.once(tmp_path_factory, 'cartpole', lambda workdir: binary(
      *CARTPOLE, '--config.normalise.obs=True', f'--workdir={workdir}'))


def newest(workdir):
  return checkpoints.saved_updates(workdir)[-1]


@pytest.mark.full
def test_init_from_a_task_with_the_same_shapes(cartpole, tmp_path):
  args = [*CARTPOLE, '--config.env.task=gymnax:CartPole-v1', '--config.normalise.obs=True',
          f'--workdir={tmp_path}']
  output = binary(*args, f'--init_from={cartpole}')
  assert 'begins with parameters, normalisation, optimizer of' in output
  first = arrays(tmp_path, 0)
  source = arrays(cartpole, newest(cartpole))
  moments = [name for name in first if 'moments' in name]
  assert moments and all((first[name] == source[name]).all() for name in first
                         if name.startswith("['params']"))
  binary('rerun', f'--workdir={tmp_path}', '--update=2')
  binary(*args, '--extend', '--config.total_steps=9000')
  output = binary('evaluate', f'--workdir={tmp_path}', '--num_episodes=2')
  assert 'gymnax:CartPole-v1 after update' in output


@pytest.mark.full
def test_init_from_a_task_with_some_other_shapes(cartpole, tmp_path):
  """Acrobot has six observed numbers and three actions; CartPole has four and two."""
  args = [*CARTPOLE, '--config.env.task=Acrobot-v1', '--config.normalise.obs=True',
          f'--workdir={tmp_path}', f'--init_from={cartpole}']
  output = refused(*args)
  assert ('--init_from: params/params/policy/bias has the shape (3,) here, (2,) in '
          f'{cartpole}; --init_partly begins with fresh values') in output
  assert not list(tmp_path.iterdir())
  output = binary(*args, '--init_partly')
  origin = record.read(tmp_path).origin
  assert 'began fresh: params/' in output and not origin.unused
  layers = {name for name in origin.fresh if name.startswith('params/params/')}
  assert layers == {'params/params/policy/bias', 'params/params/policy/kernel',
                    'params/params/torso/Dense_0/kernel'}
  first = arrays(tmp_path, 0)
  source = arrays(cartpole, newest(cartpole))
  copied_names = {name for name, value in first.items() if name in source
                  and np.array_equal(value, source[name]) and value.any()}
  kernel = "['params']['torso']['Dense_1']['kernel']"
  assert {f"['params']{kernel}", f"['opt_state'][1]['mu']{kernel}"} <= copied_names
  assert not any('policy' in name for name in copied_names)
  binary('rerun', f'--workdir={tmp_path}', '--update=3')


@pytest.mark.full
def test_another_optimizer_starts_fresh(cartpole, tmp_path):
  args = [*CARTPOLE, '--config.normalise.obs=True', '--config.optimizer.name=rmsprop',
          f'--init_from={cartpole}']
  for flags in ([], ['--init_partly']):
    workdir = tmp_path / f'b{len(flags)}'
    output = binary(*args, *flags, f'--workdir={workdir}')
    assert 'begins with parameters, normalisation of' in output and 'fresh: optimizer\n' in output
    assert not any(value.any() for name, value in arrays(workdir, 0).items()
                   if name.startswith("['opt_state']"))
  output = refused(*CARTPOLE, f'--init_from={cartpole}', f'--workdir={tmp_path}/c')
  assert 'params/moments/' in output and 'is not here, only in' in output


@pytest.mark.full
def test_init_from_a_run_with_fewer_critics_keeps_what_the_optimizer_knows_of_the_others(tmp_path):
  args = ['--config=td3_pendulum:smoke', '--config.total_steps=400']
  binary(*args, f'--workdir={tmp_path}/two')
  binary(*args, '--config.loss.num_critics=3', f'--init_from={tmp_path}/two', '--init_partly',
         f'--workdir={tmp_path}/three')
  fresh = record.read(tmp_path / 'three').origin.fresh
  assert fresh and all('/critic/2/' in name for name in fresh)


@pytest.mark.full
def test_init_from_a_run_with_a_replay_copies_its_parameters_to_the_target(with_replay, tmp_path):
  source = with_replay
  binary(*APEX, f'--workdir={tmp_path}', f'--init_from={source}', '--config.total_steps=200')
  saved = arrays(source, newest(source))
  first = arrays(tmp_path, 0)
  assert first["['target']['gradient_steps']"] == 0
  assert all((saved[name] == first[name]).all() for name in saved
             if name.startswith("['target']['params']"))
  assert metric(tmp_path, 'sampled')[0] == 0
  assert not (tmp_path / 'checkpoints' / '0' / 'replay').exists()


def test_a_change_without_a_saved_update_can_be_taken_back(tmp_path):
  config = small('ppo', total_steps=600)
  run, longer = prepared(config), prepared(changed(config, total_steps=6000))
  assert not runs.train(run, tmp_path, 3)
  saved = (tmp_path / record.NAME).read_bytes()

  def go_on(experiment, **request):
    with opening.opened_run(experiment, tmp_path, make_request(**request)):
      pass
    return record.read(tmp_path)

  assert len(go_on(longer, extend=True).stages) == 2
  with pytest.raises(ValueError, match='total_steps: 6000 there, 5000 now: it can only grow'):
    go_on(prepared(changed(config, total_steps=5000)))
  assert len(go_on(run).stages) == 1
  assert json.loads((tmp_path / record.NAME).read_bytes())['config'] == json.loads(saved)['config']
  go_on(longer, extend=True)
  assert not runs.train(longer, tmp_path, 4)
  with pytest.raises(ValueError, match='total_steps: 6000 there, 600 now: it can only grow'):
    go_on(run)


@pytest.mark.parametrize('loss', essential(['pqn', 'sac', 'td3', 'r2d2', 'dpg'], 'td3'))
def test_a_run_of_a_newer_algorithm_is_evaluated_and_another_begins_with_it(loss, tmp_path):
  of_workdir = prepared(changed(of_replay(loss) if loss != 'pqn' else changed(
      small('pqn'), normalise__obs=True), total_steps=300, checkpoint__every_updates=0,
      log__tensorboard=False))
  assert runs.train(of_workdir, tmp_path)
  player = evaluation.restore(tmp_path, evaluation.read_experiment(tmp_path))
  assert player.update >= 5 and player.steps >= 300
  greedy = player._replace(greedy=True)
  settings = evaluation.Settings(3, 2, 1, 1000)
  returns = [evaluation.play(each, settings).returns for each in (player, greedy, greedy)]
  assert all(map(len, returns)) and returns[1] == returns[2]
  # The others explore only in training.
  assert (returns[0] != returns[1]) == (loss == 'sac')

  state, origin = inherit.read(of_workdir, tmp_path, partly=False)
  parts = [part for part in inherit.PARTS if loss == 'pqn' or part != 'normalisation']
  assert [*origin.taken] == parts and not origin.fresh
  acting = of_workdir.experiment.algorithm.acting(state)
  for part in set(acting) - {'steps'}:
    jax.tree.map(np.testing.assert_array_equal, acting[part], player.params[part])
  first = of_workdir.initial_state()
  assert state.replay is None and state.update == first.update == 0
  assert not jax.tree.all(jax.tree.map(np.array_equal, first.params, state.params))
  if loss != 'pqn':
    target = arrays(tmp_path, player.update)
    for path, array in jax.tree_util.tree_leaves_with_path(state.target.params):
      name = "['target']['params']" + jax.tree_util.keystr(path)
      np.testing.assert_array_equal(array, target[name])


@pytest.mark.parametrize('name, fields', essential([
    ('vmpo:VMPO', {}), ('ppg:PPG', dict(network__separate_critic=True, loss__policy_updates=2)),
    ('rnd:RND', dict(loss__embedding=5))], 'vmpo:VMPO'))
def test_a_run_of_an_example_is_evaluated_and_another_begins_with_it(name, fields, tmp_path):
  of_workdir = prepared(changed(small(f'examples.{name}'), total_steps=300, **fields,
                                checkpoint__every_updates=0, log__tensorboard=False))
  assert runs.train(of_workdir, tmp_path)
  module = f'examples.{name.partition(":")[0]}'
  player = evaluation.restore(tmp_path, evaluation.read_experiment(tmp_path, [module]))
  assert player.update >= 3 and player.steps >= 300
  settings = evaluation.Settings(3, 2, 1, 1000)
  returns = [evaluation.play(player._replace(greedy=True), settings).returns for _ in range(2)]
  assert len(returns[0]) == 3 and returns[0] == returns[1]

  state, origin = inherit.read(of_workdir, tmp_path, partly=False)
  assert 'parameters' in origin.taken and not origin.fresh and state.update == 0
  saved = arrays(tmp_path, player.update)
  for path, array in jax.tree_util.tree_leaves_with_path(state.params):
    # A checkpoint has dicts in place of named tuples.
    name = re.sub(r'\.(\w+)', r"['\1']", jax.tree_util.keystr(path))
    np.testing.assert_array_equal(array, saved[f"['params']{name}"])


@pytest.mark.full
@pytest.mark.parametrize('scheme', ['impala', 'fused'])
def test_init_from_and_extend_with_other_schemes(scheme, cartpole, tmp_path):
  args = [*CARTPOLE, f'--config.scheme={scheme}', '--config.normalise.obs=True',
          '--config.env.renew_every_updates=2', f'--workdir={tmp_path}']
  binary(*args, f'--init_from={cartpole}')
  done = len(receipts(tmp_path))
  binary(*args, '--config.total_steps=9000', '--config.loss.entropy_coef=0.02', '--extend',
         '--change=loss.entropy_coef')
  assert metric(tmp_path, 'update') == list(range(1, len(receipts(tmp_path)) + 1))
  begun = record.read(tmp_path)
  assert begun.origin and list(begun.changes) == [done + 1]


@pytest.mark.full
@pytest.mark.same_bits('2 processes and 1, begun with another run and extended',
                       'IMPALA: MLP (`cleanba`)')
def test_two_processes_can_init_extend_and_change(six, tmp_path):
  shards = [*CATCH, '--config.num_shards=2', '--config.num_grad_shards=2']
  of_two = f'--workdir={tmp_path}/two'
  of_one = f'--workdir={tmp_path}/one'
  for args in ([updates(3), f'--init_from={six}'],
               [updates(6), '--extend', '--config.loss.entropy_coef=0.1',
                '--change=loss.entropy_coef']):
    together(*shards, of_two, *args)
    binary(*shards, of_one, *args)
  assert len(receipts(tmp_path / 'two')) == 6
  assert binary('compare', tmp_path / 'one', tmp_path / 'two').startswith('identical: 6 updates')
  result = subprocess.run(command('launch', '-n', 2, '--', *shards, of_two, updates(6)),
                          capture_output=True, text=True, timeout=300, env=QUICK, check=False)
  assert result.returncode == 2, result.stdout + result.stderr
  assert all(f'[{number}] podracer_jit: ' in result.stdout for number in (0, 1))
  assert result.stdout.count('--change=loss.entropy_coef allows it') == 2


def test_a_record_gives_the_config_of_each_update():
  first = changed(small(), loss__entropy_coef=0.1)
  second = changed(first, loss__entropy_coef=0.2, optimizer__anneal=False)
  third = changed(second, loss__entropy_coef=0.4, total_steps=10**7)
  run = record.new(first).changed(second, 5).changed(
      changed(third, loss__entropy_coef=0.3), 9).changed(third, 9)
  for each in (run, record.parse(run.as_json())):
    assert [stage.first_update for stage in each.stages] == [1, 5, 9]
    for update, expected in ((0, first), (4, first), (5, second), (9, third), (99, third)):
      assert record.json_of(each.at(update)) == record.json_of(expected)
    assert each.changes[9] == {
        'loss.entropy_coef': {'was': 0.2, 'now': 0.4},
        'total_steps': {'was': second['total_steps'], 'now': 10**7}}
    assert each.header(5)['history']['changes'].keys() == {'loss.entropy_coef', 'optimizer.anneal'}
    assert each.header(6) == {}
  # Changing back to the old values before any update used the new ones is no change.
  assert [stage.first_update for stage in run.changed(second, 9).stages] == [1, 5]
  # No update was made with the config before a change before update 1.
  assert record.new(first).changed(second, 1).changes == {}
  with pytest.raises(ValueError, match='changes before update 9'):
    run.changed(first, 7)
  # Fields in which runs of one experiment may differ are no change, and are those of the command.
  placed = changed(third, placement__actors_per_device=2, log__window=7)
  assert not run.differences(placed)
  assert record.with_free_fields(run.at(1), placed)['log']['window'] == 7


def test_a_history_of_version_0_6_becomes_stages():
  """A history of 0.6 notes the earlier values of changed fields."""
  config = record.json_of(changed(small(), loss__entropy_coef=0.4, loss__discount=0.9))
  history = [{'first_update': 5, 'changes': {'loss.entropy_coef': {'was': 0.1, 'now': 0.2},
                                             'loss.discount': {'now': 0.9}}},
             {'first_update': 9, 'changes': {'loss.entropy_coef': {'was': 0.2, 'now': 0.4},
                                             'loss.old': {'was': 3}}}]
  run = record.parse({'config': config, 'history': history})
  assert [(stage.first_update, stage.config['loss'].get('entropy_coef'),
           stage.config['loss'].get('discount'), stage.config['loss'].get('old'))
          for stage in run.stages] == [(1, 0.1, None, 3), (5, 0.2, 0.9, 3), (9, 0.4, 0.9, None)]
  assert run.header(9) == {'history': history[1]} and run.config == config
  assert record.parse(run.as_json()) == run
  assert run.layout == 1


@pytest.mark.parametrize('garbled', [
    3, [3], [{}], [{'first_update': 'x'}], [{'first_update': 1, 'changes': 3}],
    [{'first_update': 1, 'changes': {'a': 3}}], [{'first_update': 1, 'init_from': {}}],
    {}, {'stages': []}, {'stages': [3], 'origin': None},
    {'stages': [{'first_update': 2}], 'origin': None},
    {'stages': [{'first_update': 1, 'config': {}}, {'first_update': 5}], 'origin': None}])
def test_a_garbled_history_is_refused(garbled, six, tmp_path):
  record = json.loads((six / 'config.json').read_text()) | {'history': garbled}
  (tmp_path / 'config.json').write_text(json.dumps(record))
  with pytest.raises(ValueError, match='is not of a run of podracer_jit'):
    Workdir(tmp_path).config()


def test_fields_that_cannot_change_exist():
  """Otherwise a renamed field could silently be changed."""
  for loss, network in (('ppo', 'mlp'), ('dqn', 'mlp'), ('dpg', 'deterministic')):
    fields = flat(experiment.config(loss, network, 'adam').to_dict())
    for field in record._FIXED:
      of_one_loss = field == 'loss.separate_optimizers' and loss != 'dpg'
      assert of_one_loss or any(name == field or name.startswith(field) for name in fields), field


def test_a_run_of_an_earlier_version_keeps_what_its_default_was_then():
  """`Meaning.earlier`: one optimizer of both networks, which new runs have two of."""
  fields = experiment.config('dpg', 'deterministic', 'adam').to_dict()
  assert fields['loss'].pop('separate_optimizers')
  assert schema.complete(fields)['loss']['separate_optimizers'] is False
  assert schema.complete(fields | {'loss': fields['loss'] | {'separate_optimizers': True}})[
      'loss']['separate_optimizers']


NEVER = changed(small(), total_steps=300, checkpoint__every_updates=2)
OTHER = changed(NEVER, network__hidden=(8,), unroll_length=4)


def open_without_an_update(config, workdir, **options):
  """Opens a run that fails before its first update; returns the notes."""
  with opening.opened_run(fresh(config), workdir, make_request(**options)) as opened:
    # The header of the first segment is there, and no update.
    with contextlib.closing(sinks.Journals(workdir, 0)) as files:
      files.begin(sinks.Start(workdir, 0, 1, 0, 0, dict(segment=0, first_update=1)))
    return opened.notes


def config_of(workdir, path=record.NAME):
  return json.loads((workdir / path).read_text())['config']


def test_a_run_that_never_made_an_update_gives_way_to_another(tmp_path):
  assert open_without_an_update(NEVER, tmp_path) == []
  # The same config goes on as before.
  assert open_without_an_update(NEVER, tmp_path) == []
  (note,) = open_without_an_update(OTHER, tmp_path)
  assert note == (f'the run in {tmp_path} never made an update, so it begins anew with this '
                  f'config; the config before is now {tmp_path}/broken/config.json')
  assert config_of(tmp_path)['network']['hidden'] == [8]
  assert config_of(tmp_path, 'broken/config.json')['network']['hidden'] == [64, 64]
  assert headers(tmp_path) == [dict(segment=0, first_update=1)]
  with opening.opened_run(fresh(OTHER), tmp_path, make_request()) as opened:
    assert Training([opened], tmp_path, ()).train(stopping.Stopping(), quiet=True)
  assert len(receipts(tmp_path)) == 10


@pytest.mark.parametrize('spoil, message', [
    # An update that was made, or a line that may be one, belongs to the run.
    (lambda workdir: (workdir / 'receipts.jsonl').open('a').write(
        '{"update": 1, "batch": "a", "params": "b"}\n'), 'holds another experiment'),
    (lambda workdir: (workdir / 'metrics.jsonl').open('a').write('{"upd'),
     'holds another experiment'),
    (lambda workdir: (workdir / 'config.json').write_text('{}'), 'is not of a run'),
    (lambda workdir: (workdir / 'checkpoints' / '6').mkdir(parents=True),
     'none of the checkpoints in .* is whole')])
def test_a_run_with_anything_to_lose_does_not_give_way(tmp_path, spoil, message):
  open_without_an_update(NEVER, tmp_path)
  spoil(tmp_path)
  before = (tmp_path / 'config.json').read_text()
  with pytest.raises(ValueError, match=message):
    open_without_an_update(OTHER, tmp_path)
  assert (tmp_path / 'config.json').read_text() == before
  assert not (tmp_path / 'broken').exists()


def test_a_refused_run_leaves_no_folder_and_no_empty_one_of_its_own(tmp_path):
  (tmp_path / 'mine').mkdir()
  for workdir in (tmp_path / 'a' / 'b', tmp_path / 'mine'):
    with pytest.raises(ValueError, match='--extend: there is no run in'):
      open_without_an_update(NEVER, workdir, extend=True)
  assert list(tmp_path.iterdir()) == [tmp_path / 'mine'] and not list((tmp_path / 'mine').iterdir())
  (tmp_path / 'file').touch()
  with pytest.raises(ValueError, match='file/run cannot be written to: Not a directory$'):
    open_without_an_update(NEVER, tmp_path / 'file' / 'run')


def test_updates_without_a_config_stay(tmp_path):
  (tmp_path / 'receipts.jsonl').write_text('{"update": 1, "batch": "a", "params": "b"}\n')
  with pytest.raises(ValueError, match='has updates of a run, and no config.json; put it back'):
    open_without_an_update(NEVER, tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ['receipts.jsonl']


def test_a_first_state_of_another_run_is_set_aside_and_taken_anew(tmp_path):
  source = tmp_path / 'source'
  with opening.opened_run(fresh(NEVER), source, make_request()) as opened:
    Training([opened], source, ()).train(stopping.Stopping(), quiet=True)
  workdir = tmp_path / 'run'
  open_without_an_update(NEVER, workdir, init_from=source)
  first = (workdir / 'checkpoints' / '0' / 'manifest.json').read_bytes()
  # The same command, with and without --init_from, keeps the first state.
  open_without_an_update(NEVER, workdir, init_from=source)
  open_without_an_update(NEVER, workdir)
  assert (workdir / 'checkpoints' / '0' / 'manifest.json').read_bytes() == first
  notes = open_without_an_update(changed(NEVER, seed=5), workdir, init_from=source)
  assert 'never made an update' in notes[0] and 'the run begins with' in notes[1]
  assert (workdir / 'broken' / '0' / 'manifest.json').read_bytes() == first
  assert config_of(workdir)['seed'] == 5 and checkpoints.saved_updates(workdir) == [0]
  # Without --init_from, the run begins with its seed.
  open_without_an_update(OTHER, workdir)
  assert record.read(workdir).origin is None
  assert checkpoints.saved_updates(workdir) == []
