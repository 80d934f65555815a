"""States of a workdir, and what each command does in each of them."""

import contextlib
import json
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest

from podracer_jit.cli import compare, rerun
from podracer_jit.play import evaluation
from podracer_jit.training import opening
from podracer_jit.workdir import checkpoints, journal, record
from podracer_jit.workdir.workdir import OpenWorkdir, Request, State, Workdir
from tests import made, runs
from tests.runs import changed, fresh, open_workdir, prepared, small
from tests.workdir import test_lock

CONFIG = changed(small(), total_steps=10**6, env__renew_every_updates=2,
                 checkpoint__every_updates=2, log__tensorboard=False)
STEPS = 8 * 8 * 4  # at least the valid steps of four updates


def train_in(workdir):
  open_workdir(workdir, CONFIG)
  runs.train_in(prepared(CONFIG), workdir, [runs.StopAt(4)])


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
  return made.once(tmp_path_factory, 'stopped', train_in)


def as_it_is(workdir):
  del workdir


def empty(workdir):
  for path in workdir.iterdir():
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def only_a_first_state(workdir):
  """A run was killed before it wrote config.json."""
  (workdir / 'checkpoints' / '2').rename(workdir / 'checkpoints' / '0')
  shutil.rmtree(workdir / 'checkpoints' / '4')
  for path in workdir.glob('*.json*'):
    path.unlink()


def no_update(workdir):
  shutil.rmtree(workdir / 'checkpoints')
  for path in workdir.glob('*.jsonl'):
    path.unlink()


def finished(workdir):
  saved = record.read(workdir)
  saved.changed(changed(CONFIG, total_steps=STEPS), 1).write(workdir)
  meta = workdir / 'checkpoints' / '4' / 'meta' / 'metadata'
  assert json.loads(meta.read_text())['steps'] <= STEPS
  meta.write_text(meta.read_text().replace('"steps": ', f'"steps": {STEPS}, "were": '))
  digest = checkpoints.read_manifest(workdir / 'checkpoints' / '4')['state_sha256']
  checkpoints.write_manifest(workdir / 'checkpoints' / '4', digest)


def lost_record(workdir):
  shutil.rmtree(workdir / 'checkpoints')
  (workdir / 'config.json').unlink()


def garbled_record(workdir):
  no_update(workdir)
  (workdir / 'config.json').write_text('{')


def lost_config(workdir):
  (workdir / 'config.json').unlink()


def broken_checkpoints(workdir):
  for update in (2, 4):
    (workdir / 'checkpoints' / str(update) / checkpoints.MANIFEST).write_text('{')


def lost_first_state(workdir):
  shutil.rmtree(workdir / 'checkpoints')
  origin = record.Origin('/gone', 4, ('parameters',), (), (), '0' * 64)
  record.new(CONFIG, origin).write(workdir)


class Expected(NamedTuple):
  """The result of each command: '' if it works, otherwise words of its refusal."""

  state: State
  train: str
  evaluate: str
  compare: str
  rerun: str


# A held lock is added by the test for `running`.
TABLE = [
    (empty, Expected(State.NEW, '', 'holds no run', 'holds no run', 'holds no run')),
    (only_a_first_state, Expected(State.NEW, '', 'holds no run', 'holds no run', 'holds no run')),
    (no_update, Expected(State.STOPPED, '', 'has no checkpoint yet', 'No such file',
                         'No such file')),
    (as_it_is, Expected(State.STOPPED, '', '', '', '')),
    (lost_config, Expected(State.STOPPED, '', 'holds no run', 'holds no run', 'holds no run')),
    (finished, Expected(State.FINISHED, '', '', '', '')),
    (lost_record, Expected(State.BROKEN, 'has updates of a run, and no config.json',
                           'holds no run', 'holds no run', 'holds no run')),
    (garbled_record, Expected(State.BROKEN, 'is not of a run', 'is not of a run',
                              'is not of a run', 'is not of a run')),
    (broken_checkpoints, Expected(State.BROKEN, 'none of the checkpoints', 'is whole', '',
                                  'is broken')),
    (lost_first_state, Expected(State.BROKEN, 'has no checkpoint left', 'has no checkpoint yet',
                                '', 'has no checkpoint left|of the updates 0 to 3 is needed')),
]


def total_steps(make):
  return STEPS if make is finished else CONFIG['total_steps']


def contents(workdir):
  return {path: path.read_bytes() if path.is_file() else b'' for path in workdir.rglob('*')
          if path.name != 'lock'}


def commands(workdir, fields, capsys):
  """Yields the name of each command, and the function that runs it in this process."""
  def train_here():
    with opening.opened_run(fresh(fields), workdir, Request()):
      pass

  def evaluate():
    evaluation.restore(workdir, evaluation.read_experiment(workdir))

  def compare_here():
    code = compare.main(['podracer_jit compare', str(workdir), str(workdir)])
    error = capsys.readouterr().err
    if code and error:
      raise ValueError(error)

  def rerun_here():
    rerun.one_device_experiment(workdir, (), 4)
    headers, receipts, _ = journal.read_receipts(workdir)
    rerun.header_of(headers, receipts, 4)
    rerun.snapshot_before(prepared(CONFIG), workdir, 4)

  return dict(evaluate=evaluate, compare=compare_here, rerun=rerun_here, train=train_here)


@pytest.mark.parametrize('make, expected', TABLE, ids=[make.__name__ for make, _ in TABLE])
def test_each_command_works_or_is_refused_and_changes_nothing(
    make, expected, stopped, tmp_path, capsys):
  workdir = tmp_path / 'run'
  shutil.copytree(stopped, workdir)
  make(workdir)
  before = contents(workdir)
  assert Workdir(workdir).look().state is expected.state
  fields = changed(CONFIG, total_steps=total_steps(make))
  for name, function in commands(workdir, fields, capsys).items():
    words = getattr(expected, name)
    if words:
      with pytest.raises((ValueError, OSError), match=words):
        function()
    else:
      function()
    if words or name != 'train':
      assert contents(workdir) == before, name


def test_a_run_that_trains_can_be_read_and_not_trained(stopped, tmp_path, capsys):
  workdir = tmp_path / 'run'
  shutil.copytree(stopped, workdir)
  process, _ = test_lock.hold(workdir)
  try:
    assert Workdir(workdir).look().state is State.RUNNING
    # Looking has not freed the lock.
    assert Workdir(workdir).look().state is State.RUNNING
    before = contents(workdir)
    for name, function in commands(workdir, CONFIG, capsys).items():
      if name == 'train':
        with pytest.raises(ValueError, match=f'is in use by process {process.pid}'):
          function()
      else:
        function()
    assert contents(workdir) == before
  finally:
    test_lock.end(process)
  assert Workdir(workdir).look().state is State.STOPPED


def test_a_start_looks_once_and_after_the_lock(stopped, tmp_path, monkeypatch):
  workdir = tmp_path / 'run'
  shutil.copytree(stopped, workdir)
  looks = []
  look = OpenWorkdir.look

  def noted(self):
    child = subprocess.run([sys.executable, '-c', 'import sys, pathlib\n'
                            'from podracer_jit.workdir import lock\n'
                            'print(lock.is_held(pathlib.Path(sys.argv[1])))', workdir],
                           capture_output=True, text=True, check=True)
    looks.append(child.stdout)
    return look(self)

  monkeypatch.setattr(OpenWorkdir, 'look', noted)
  open_workdir(workdir, CONFIG)
  assert looks == ['True\n']


def test_a_refused_start_that_asks_for_a_change_writes_nothing(stopped, tmp_path):
  """The newest checkpoint is broken, and is set aside only once the start is not refused."""
  workdir = tmp_path / 'run'
  shutil.copytree(stopped, workdir)
  (workdir / 'checkpoints' / '4' / checkpoints.MANIFEST).write_text('{')
  before = contents(workdir)
  with pytest.raises(ValueError, match='loss.discount: .*--change=loss.discount allows it'):
    open_workdir(workdir, changed(CONFIG, loss__discount=0.5))
  with contextlib.suppress(FileNotFoundError):
    (workdir / 'lock').unlink()
  assert contents(workdir) == before
  notes = open_workdir(workdir, changed(CONFIG, loss__discount=0.5), change=['loss.discount'])
  assert [note.partition(' is ')[0].partition(': ')[0] for note in notes] == [
      'the checkpoint of update 4', 'changed before update 3']
  assert list(record.read(workdir).changes) == [3]
