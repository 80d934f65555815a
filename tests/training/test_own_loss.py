"""The example of an own loss and torso with every command, and the sources in workdirs."""

import json
import shlex
import shutil
import warnings
from pathlib import Path

import envpool
import numpy as np
import pytest

from podracer_jit.workdir import checkpoints
from tests import made, processes
from tests.play.test_export import Loaded

EXAMPLE = Path(__file__).parents[2] / 'examples' / 'transformer.py'
FEW = ['--config.scheme=sync', '--config.env.num_envs=8', '--config.unroll_length=4',
       '--config.num_shards=2', '--config.num_grad_shards=2', '--config.total_steps=170',
       '--config.checkpoint.every_updates=3', '--config.log.tensorboard=False']


def binary(*args, code=0):
  """Runs `podracer_jit`; returns its output and errors."""
  done = processes.run(processes.command(*args))
  assert done.returncode == code, done.stdout + done.stderr
  return done.stdout + done.stderr


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Trains with a user's copy of the example; returns the copy and the workdir."""
  def make(folder):
    shutil.copy(EXAMPLE, folder)
    binary(f'--config={folder / EXAMPLE.name}', f'--workdir={folder / "run"}', *FEW)
  folder = made.once(tmp_path_factory, 'own_loss', make)
  return folder / EXAMPLE.name, folder / 'run'


@pytest.mark.full
def test_the_example_learns_to_predict(trained):
  records = [json.loads(line) for line in (trained[1] / 'metrics.jsonl').read_text().splitlines()]
  losses = [record['prediction_loss'] for record in records]
  assert len(losses) == 6 and losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.same_bits('2 processes and 1', 'A2C with an auxiliary loss: transformer (`sync`)')
def test_two_processes_learn_the_same(trained, tmp_path):
  file, workdir = trained
  results = processes.together(2, f'--config={file}', f'--workdir={tmp_path}', *FEW)
  assert [result.returncode for result in results] == [0, 0], results
  assert 'identical: 6 updates' in binary('compare', workdir, tmp_path)


@pytest.mark.full
def test_rerun_and_evaluate_work_with_an_own_loss(trained):
  file, workdir = trained
  allowed = f'--allow_modules={file}'
  of_rerun = binary('rerun', f'--workdir={workdir}', '--update=5', allowed)
  assert 'as its receipt says' in of_rerun
  of_evaluation = binary('evaluate', f'--workdir={workdir}', '--num_episodes=2', allowed)
  assert 'MiniGrid-Empty-Random-6x6-v0 after update 6' in of_evaluation
  # The file has not changed; the next test has one that has.
  assert 'the source of' not in of_rerun + of_evaluation


@pytest.mark.full
def test_a_changed_source_is_reported_and_both_versions_are_kept(trained, tmp_path):
  file, workdir = trained
  mine = tmp_path / file.name
  mine.write_text(file.read_text() + '# changed\n')
  resumed = tmp_path / 'resumed'
  shutil.copytree(workdir, resumed)
  shutil.rmtree(resumed / 'checkpoints' / '6')
  out = binary(f'--config={mine}', f'--workdir={resumed}', *FEW)
  (note,) = [line for line in out.splitlines() if 'the source of' in line]
  assert 'the source of transformer.py has changed since update 3: the run goes on' in note
  assert (resumed / 'sources' / '1' / file.name).read_bytes() == file.read_bytes()
  assert (resumed / 'sources' / '4' / file.name).read_bytes() == mine.read_bytes()
  out = binary('compare', workdir, resumed)  # only a comment has changed
  assert 'source: transformer.py of B changed before update 4' in out
  assert 'identical: 6 updates' in out

  # Commands that read the run say so if they use another source.
  for command in (['evaluate', '--num_episodes=1'], ['rerun', '--update=3']):
    command = [*command, f'--workdir={workdir}']
    out = binary(*command, f'--allow_modules={mine}')
    assert 'the source of transformer.py is not that of update' in out
    assert 'the source of' not in binary(*command, f'--allow_modules={file}')

  # The same command has no more notes.
  assert 'the source of' not in binary(f'--config={mine}', f'--workdir={resumed}', *FEW)


def test_a_kept_source_runs_only_if_it_is_allowed(trained, tmp_path):
  workdir = tmp_path / 'transformer,seed=1'  # as in a sweep; a comma parts a flag's values
  shutil.copytree(trained[1], workdir)
  copy = workdir / 'sources' / '1' / EXAMPLE.name
  copy.write_text(copy.read_text() + f"open({str(tmp_path / 'ran')!r}, 'w')\n")
  command = ['evaluate', f'--workdir={workdir}', '--num_episodes=1']
  error = binary(*command, code=2)
  assert error.count('\n') == 1
  flag, = shlex.split(error.partition('or the copies that are kept with it: ')[2])
  assert 'cannot import' in binary(*command, '--allow_modules=transformer', code=2)
  assert not (tmp_path / 'ran').exists()
  binary(*command, flag)
  assert (tmp_path / 'ran').exists()


def test_the_example_is_exported_with_its_source_and_acts_on_dicts(trained, tmp_path):
  file, workdir = trained
  assert '--allow_modules=transformer' in binary(
      'export', f'--workdir={workdir}', f'--out={tmp_path / "out"}', code=2)
  binary('export', f'--workdir={workdir}', f'--out={tmp_path / "out"}', '--update=3',
         f'--allow_modules={file}')
  assert (tmp_path / 'out' / 'sources' / '1' / file.name).read_bytes() == file.read_bytes()
  assert 'sources/1/transformer.py' in (tmp_path / 'out' / 'manifest.json').read_text()

  loaded = Loaded(tmp_path / 'out')
  assert loaded.about['update'] == 3 and loaded.about['network']['name'] == 'transformer:Cells'
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    pool = envpool.make(loaded.about['task'], env_type='gymnasium', num_envs=3, seed=1)
  obs, _ = pool.reset()
  first = np.ones(3, bool)
  for step in range(3):
    key = np.array([0, step], np.uint32)
    actions, _, logits = loaded.act('drawn', obs, None, first, key)
    assert logits.shape == (3, 7)
    obs, *_ = pool.step(actions)
  pool.close()


def test_the_example_saves_its_checkpoints(trained):
  assert checkpoints.saved_updates(trained[1]) == [3, 6]
