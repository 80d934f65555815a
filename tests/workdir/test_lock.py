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
from podracer_jit.workdir import files
from podracer_jit.workdir import lock as lock_lib
from podracer_jit.workdir import workdir as workdir_lib
from podracer_jit.workdir.lock import FALLBACK_NAME, NAME, WorkdirLock
from tests import processes
from tests.cli.test_together import CATCH, LONG, wait_for_updates

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


def test_a_strangers_links_change_no_file_of_the_users(tmp_path):
  precious = tmp_path / 'precious.txt'
  precious.write_text('mine')
  workdir = tmp_path / 'w'
  workdir.mkdir()
  (workdir / NAME).symlink_to(precious)
  with pytest.raises(ValueError, match=r'^--workdir: .*w cannot be written to: Too many levels of '
                     'symbolic links$'), workdir_lib.opened(workdir):
    raise AssertionError
  for change in (files.Lines, lambda path: files.truncate(path, 0)):
    with pytest.raises(OSError, match=r"symbolic links: '.*w/lock'$"):
      change(workdir / NAME)
  assert precious.read_text() == 'mine'


def test_a_link_to_nowhere_is_refused_by_its_target(tmp_path):
  (tmp_path / 'w').symlink_to(tmp_path / 'unmounted')
  with pytest.raises(ValueError, match=r'w is a link to .*unmounted, which does not exist$'), (
      workdir_lib.opened(tmp_path / 'w')):
    raise AssertionError


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


@pytest.mark.parametrize('number', lock_lib._NO_LOCKS)
def test_file_systems_say_in_several_ways_that_they_have_no_locks(number, tmp_path, monkeypatch):
  def refuse(*args):
    raise OSError(number, os.strerror(number))
  monkeypatch.setattr(fcntl, 'lockf', refuse)
  lock = WorkdirLock(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == [FALLBACK_NAME]
  lock.close()


WITHOUT_LOCKS = """
import errno, fcntl, os, sys
from podracer_jit.cli import main
def refuse(*args):
  raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
fcntl.lockf = refuse
sys.argv[0] = 'podracer_jit'
main.run()
"""


def test_without_locks_runs_exclude_each_other_and_a_killed_one_is_followed(tmp_path):
  program = [sys.executable, '-P', '-c', WITHOUT_LOCKS, *CATCH, *LONG, f'--workdir={tmp_path}']
  first = processes.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  wait_for_updates(first, tmp_path, 3)
  second = processes.run(program)
  assert second.returncode == 2
  assert second.stderr.startswith(
      f'podracer_jit: --workdir: {tmp_path} is in use by process {first.pid} on '
      f'{socket.gethostname()}, since ')
  assert second.stderr.endswith(f'This file system has no locks: if that run has ended, remove '
                                f'{tmp_path / FALLBACK_NAME}\n')
  end(first)
  updates = len((tmp_path / 'metrics.jsonl').read_text().splitlines())

  third = processes.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  wait_for_updates(third, tmp_path, updates + 1)
  third.send_signal(signal.SIGTERM)
  out, _ = third.communicate(timeout=120)
  assert third.returncode == 3, out
  assert not list(tmp_path.glob('lock*'))


def test_without_locks_a_process_that_comes_later_does_not_remove_the_new_file(
    tmp_path, no_locks, monkeypatch):
  """Two processes find the file of a dead one, and the other is faster."""
  _leave_file(tmp_path, pid=2**22 + 1)
  is_dead = lock_lib._is_dead
  new = {'pid': 1, 'host': 'another', 'since': 'now'}

  def slowly(holder):
    dead = is_dead(holder)
    if dead:
      (tmp_path / FALLBACK_NAME).write_text(json.dumps(new))
    return dead
  monkeypatch.setattr(lock_lib, '_is_dead', slowly)
  with pytest.raises(InUse, match='process 1 on another, since now'):
    WorkdirLock(tmp_path)
  assert json.loads((tmp_path / FALLBACK_NAME).read_text()) == new
  assert [path.name for path in tmp_path.iterdir()] == [FALLBACK_NAME]


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
