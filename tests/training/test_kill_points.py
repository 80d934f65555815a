"""A run that is killed, or whose disk fails, at any change of its workdir loses nothing.

The k-th change fails, for each k and in each way, with real workdirs and Orbax. Then the same
command goes on, and must end with the receipts and metrics of a run that nothing has disturbed.
"""

import contextlib
import errno
import functools
import os
import pathlib
import shutil
import signal

import orbax.checkpoint as ocp
import pytest

from podracer_jit.training import opening, stopping, trainer
from podracer_jit.workdir import actions, checkpoints, files
from podracer_jit.workdir.workdir import make_request
from tests import runs
from tests.runs import changed, contents, fresh, small
from tests.training.fake_program import FakeProgram

# Segments of three updates, which begin after updates 0, 3 and 6.
CONFIG = changed(small(), total_steps=40, network__hidden=(2,), env__renew_every_updates=3,
                 checkpoint__every_updates=2, checkpoint__every_seconds=0.0, checkpoint__keep=1,
                 log__tensorboard=False, optimizer__anneal=False)
LONGER = changed(CONFIG, total_steps=56)  # seven updates in place of five
# The functions that change the disk; those of `Lines` are called for each line, or update.
CHANGES = ('write', 'append_line', 'truncate', 'rename', 'make_folder', 'remove_folder', 'remove',
           'remove_if_empty')
REMOVE = ('remove_folder', 'remove', 'remove_if_empty')  # what they can


class Killed(BaseException):
  """Stands for the end of the process."""


class Disk:
  """Counts changes of the disk; the change number `fails_at` fails in one of the ways of WAYS."""

  def __init__(self, monkeypatch, fails_at=None, way='before'):
    self.changes = []
    self.is_dead = False
    self._fails_at = fails_at
    self._way = way
    for name in CHANGES:
      function = getattr(files, name)
      monkeypatch.setattr(files, name, functools.partial(self._change, name, function))
    for name in ('add', 'sync'):
      method = getattr(files.Lines, name)
      monkeypatch.setattr(files.Lines, name, self._as_method(f'Lines.{name}', method))
    monkeypatch.setattr(ocp.Checkpointer, 'save', self._as_method('save', ocp.Checkpointer.save))

  def _as_method(self, name, function):
    return lambda *args, **kwargs: self._change(name, function, *args, **kwargs)

  def _change(self, name, function, *args, **kwargs):
    if self.is_dead:
      raise Killed  # nothing cleans up after the end of the process
    self.changes.append(name)
    if len(self.changes) - 1 != self._fails_at:
      return function(*args, **kwargs)
    if self._way in ('ENOSPC', 'EIO'):
      if name in REMOVE:
        return None
      code = getattr(errno, self._way)
      raise OSError(code, os.strerror(code))
    if self._way == 'halfway':
      halfway(name, function, *args, **kwargs)
    if self._way == 'after':
      function(*args, **kwargs)
    self.is_dead = True
    raise Killed


def halfway(name, function, *args, **kwargs):
  """Leaves behind what a change leaves that was killed halfway."""
  if name == 'write':
    path, content = args
    path.with_name(f'{path.name}.tmp').write_text(content[:len(content) // 2])
  elif name == 'Lines.add':
    lines, content = args
    lines._file.write(content[:len(content) // 2])  # noqa: SLF001
    lines._file.flush()  # noqa: SLF001
  elif name == 'append_line':
    path, line = args
    with path.open('a') as file:
      file.write(line[:len(line) // 2])
  elif name == 'remove_folder':
    for file in sorted(args[0].rglob('*'))[::2]:
      if file.is_file():
        file.unlink()
  elif name == 'save':
    _, folder = args
    function(*args, **kwargs)
    for file in sorted(pathlib.Path(folder).rglob('*'))[::2]:
      if file.is_file():
        file.unlink()
  else:  # one call of the kernel
    function(*args, **kwargs)


@functools.cache
def run_of(config):
  return fresh({'ours': CONFIG, 'longer': LONGER}[config])


def train(workdir, config='ours', **options):
  """Trains as the command does; returns whether the run has finished."""
  return runs.train(run_of(config), workdir, **options)


def begin(workdir):
  return train(workdir)


def extend(workdir):
  return train(workdir, 'longer', extend=True)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
  monkeypatch.setattr(trainer, 'GraphProgram', FakeProgram)
  monkeypatch.setattr(actions, '_BUFFER_BYTES', 1)  # actions of each update are written at once


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A finished run, to extend."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(trainer, 'GraphProgram', FakeProgram)
    assert train(workdir)
  return workdir


def undisturbed(command, start, tmp_path):
  """Returns the contents of a run that nothing disturbs, and the changes of its workdir."""
  workdir = copy_of(start, tmp_path / 'undisturbed')
  with pytest.MonkeyPatch.context() as monkeypatch:
    disk = Disk(monkeypatch)
    assert command(workdir)
  return contents(workdir), disk.changes


def copy_of(start, workdir):
  if start:
    shutil.copytree(start, workdir)
  return workdir


@pytest.mark.parametrize('command', [begin, extend])
def test_a_run_that_is_killed_at_any_change_of_its_workdir_ends_with_the_same_contents(
    command, finished, tmp_path):
  start = finished if command is extend else None
  expected, changes = undisturbed(command, start, tmp_path)
  assert {'save', 'Lines.add', 'Lines.sync', 'rename', 'write', 'remove_folder',
          'remove'} <= set(changes)
  for k, name in enumerate(changes):
    # Before a change is after the one before it.
    for way in ('halfway', 'after') if k else ('before', 'halfway', 'after'):
      workdir = copy_of(start, tmp_path / f'{k}-{way}')
      with pytest.MonkeyPatch.context() as monkeypatch:
        Disk(monkeypatch, k, way)
        with pytest.raises(Killed):
          command(workdir)
      assert command(workdir), (k, name, way)
      assert contents(workdir) == expected, (k, name, way)
      assert not halves(workdir), (k, name, way)
      shutil.rmtree(workdir)


@pytest.mark.parametrize('error', ['ENOSPC', pytest.param('EIO', marks=pytest.mark.full)])
@pytest.mark.parametrize('command', [begin, pytest.param(extend, marks=pytest.mark.full)])
def test_a_disk_that_fails_at_any_change_leaves_a_run_that_goes_on(command, error, finished,
                                                                   tmp_path):
  start = finished if command is extend else None
  expected, changes = undisturbed(command, start, tmp_path)
  for k, name in enumerate(changes):
    workdir = copy_of(start, tmp_path / str(k))
    with pytest.MonkeyPatch.context() as monkeypatch:
      Disk(monkeypatch, k, error)
      with contextlib.suppress(OSError, ValueError):
        command(workdir)
    # What cannot be removed is removed by the next start.
    assert not {half for half in halves(workdir)
                if (name, half[2:]) != ('remove_folder', 'deleted')}, (k, name)
    assert command(workdir), (k, name)
    assert contents(workdir) == expected, (k, name)
    assert not halves(workdir), (k, name)
    shutil.rmtree(workdir)


def test_signals_during_a_save_wait_until_all_is_saved(tmp_path, monkeypatch):
  stop = stopping.Stopping()
  stop.begin_training()
  save = checkpoints.Checkpoints.save

  def signalled(self, *args):
    for second in (1, 2):  # two signals, long after each other
      monkeypatch.setattr(stop, '_clock', lambda second=second: 1000.0 * second)
      stop.handle(signal.SIGTERM, None)
    save(self, *args)

  monkeypatch.setattr(checkpoints.Checkpoints, 'save', signalled)
  with opening.opened_run(run_of('ours'), tmp_path / 'run', make_request()) as opened:
    assert not trainer.Training([opened], tmp_path / 'run', ()).train(stop, quiet=True)
  assert checkpoints.saved_updates(tmp_path / 'run') == [2]


def halves(workdir):
  """Returns the names of what is half written, or was set aside as broken."""
  return {path.name for path in workdir.rglob('*')
          if path.name.endswith(('.tmp', '.saving', '.deleted')) or 'orbax' in path.name
          or path.name == files.BROKEN}
