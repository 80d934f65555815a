"""Only one run can use a workdir; with real processes and kills."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from podracer_jit.errors import InUse
from podracer_jit.workdir.lock import FALLBACK_NAME, NAME, WorkdirLock

# Takes the lock, prints so, and waits; with a second argument it also has a child that waits.
HOLDER = textwrap.dedent('''
    import os, pathlib, sys, time
    from podracer_jit.workdir.lock import WorkdirLock
    lock = WorkdirLock(pathlib.Path(sys.argv[1]))
    if sys.argv[2:]:
      child = os.fork()
    if not sys.argv[2:] or child:
      print(child if sys.argv[2:] else 'locked', flush=True)
    time.sleep(100)
''')


def hold(workdir, *args):
  process = subprocess.Popen([sys.executable, '-c', HOLDER, str(workdir), *args],
                             stdout=subprocess.PIPE, text=True)
  return process, process.stdout.readline().strip()


def end(process):
  process.kill()
  process.wait()
  process.stdout.close()


def test_a_second_process_is_refused_and_learns_who_holds_the_lock(tmp_path):
  process, _ = hold(tmp_path)
  try:
    with pytest.raises(InUse) as refused:
      WorkdirLock(tmp_path)
    assert str(refused.value).startswith(
        f'--workdir: {tmp_path} is in use by process {process.pid} on {socket.gethostname()}, '
        'since ')
    # A refused attempt does not free the lock.
    with pytest.raises(InUse):
      WorkdirLock(tmp_path)
  finally:
    end(process)
  WorkdirLock(tmp_path).close()


def test_a_child_of_a_killed_run_does_not_keep_the_lock(tmp_path):
  process, child = hold(tmp_path, 'with a child')
  with pytest.raises(InUse):
    WorkdirLock(tmp_path)
  process.kill()
  process.wait()
  try:
    os.kill(int(child), 0)  # the child is alive
    WorkdirLock(tmp_path).close()
  finally:
    os.kill(int(child), signal.SIGKILL)
    process.stdout.close()


def test_runs_of_one_process_exclude_each_other(tmp_path):
  lock = WorkdirLock(tmp_path)
  with pytest.raises(InUse, match='another run of this process'):
    WorkdirLock(tmp_path)
  lock.close()
  assert list(tmp_path.iterdir()) == []
  WorkdirLock(tmp_path).close()


@pytest.fixture
def no_locks(monkeypatch):
  """Replaces the file system by one that cannot lock."""
  def refuse(*args):
    raise OSError(errno.ENOLCK, 'No locks available')
  monkeypatch.setattr(fcntl, 'lockf', refuse)


def test_without_locks_the_file_is_the_lock(tmp_path, no_locks):
  lock = WorkdirLock(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == [FALLBACK_NAME]
  lock.close()
  assert list(tmp_path.iterdir()) == []


def _leave_file(workdir, **fields):
  """Writes a lock file of this process, with changed fields."""
  lock = WorkdirLock(workdir)
  path = workdir / FALLBACK_NAME
  holder = json.loads(path.read_text()) | fields
  lock.close()
  path.write_text(json.dumps(holder))


def test_without_locks_a_dead_process_of_this_host_frees_the_workdir(tmp_path, no_locks):
  dead = subprocess.Popen(['true'])
  dead.wait()
  _leave_file(tmp_path, pid=dead.pid)
  WorkdirLock(tmp_path).close()


def test_without_locks_a_reused_process_id_frees_the_workdir(tmp_path, no_locks):
  _leave_file(tmp_path, pid=os.getpid(), begun='another boot 12345')
  WorkdirLock(tmp_path).close()


@pytest.mark.parametrize('fields', [{}, {'host': 'another', 'pid': 1}])
def test_without_locks_a_living_process_or_another_host_keeps_the_workdir(
    tmp_path, no_locks, fields):
  _leave_file(tmp_path, **fields)
  with pytest.raises(InUse) as refused:
    WorkdirLock(tmp_path)
  assert f'remove {tmp_path.resolve() / FALLBACK_NAME}' in str(refused.value)
  assert (tmp_path / FALLBACK_NAME).exists() and not (tmp_path / NAME).exists()
