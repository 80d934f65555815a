"""Locks workdirs, so that each has one run at a time; a lock ends with its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Any

from podracer_jit.errors import InUse
from podracer_jit.workdir import files

NAME = 'lock'
FALLBACK_NAME = 'lock.held'  # replaces the lock if the file system has no locks
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# Workdirs that this process has locked. A record lock does not exclude its own process. Closing any
# descriptor of a locked file unlocks it, so the file of such a workdir must not be opened again.
_locked: set[Path] = set()


class WorkdirLock:
  """Lock of a workdir for one process at a time.

  The kernel holds a record lock on WORKDIR/lock. This lock belongs to the process, not to its
  children, and always ends with the process. The file names the process that holds the lock. On a
  file system without locks, the file WORKDIR/lock.held is the lock. A file that a dead process of
  this host has left is removed.
  """

  def __init__(self, workdir: Path):
    """Takes the lock.

    Raises:
      InUse: another process has the lock; the message names it and its host, or the file to remove.
      OSError: the file cannot be written.
    """
    self._path = workdir.resolve() / NAME
    self._workdir = workdir
    self._descriptor: int | None = None
    if self._path in _locked:
      raise InUse(f'--workdir: {workdir} is in use by another run of this process')
    try:
      self._lock()
    except OSError as error:
      if error.errno not in _NO_LOCKS:
        raise
      self._create()
    _locked.add(self._path)

  def close(self) -> None:
    """Releases the lock."""
    _locked.discard(self._path)
    # The file is removed before it is unlocked: the next holder creates its own file.
    if self._descriptor is None:
      self._path.with_name(FALLBACK_NAME).unlink(missing_ok=True)
      return
    self._path.unlink(missing_ok=True)
    os.close(self._descriptor)
    self._descriptor = None

  def _lock(self) -> None:
    while True:
      # A stranger's workdir may have a link to another file of the user's.
      how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
      descriptor = os.open(self._path, how, 0o644)
      try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before may have removed the file between the two calls.
        if _same_file(descriptor, self._path):
          os.ftruncate(descriptor, 0)
          os.write(descriptor, _this_process())
          self._descriptor = descriptor
          return
        os.close(descriptor)
      except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
          raise InUse(self._in_use(_read(self._path))) from None
        raise

  def _create(self) -> None:
    path = self._path.with_name(FALLBACK_NAME)
    self._path.unlink(missing_ok=True)  # `_lock` created it
    for _ in range(2):
      try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
      except FileExistsError:
        holder = _read(path)
        if not _is_dead(holder):
          raise InUse(f'{self._in_use(holder)}. This file system has no locks: if that run has '
                      f'ended, remove {path}') from None
        with contextlib.suppress(FileNotFoundError):
          _remove(path, holder)
        continue
      with os.fdopen(descriptor, 'wb') as file:
        file.write(_this_process())
      return
    raise InUse(f'--workdir: another run has just taken {self._workdir}')

  def _in_use(self, holder: dict[str, Any]) -> str:
    who = 'another run'
    if holder:
      who = (f'process {holder.get("pid")} on {holder.get("host")}, since {holder.get("since")}')
    return (f'--workdir: {self._workdir} is in use by {who}; choose another --workdir or stop that '
            'run')


def _remove(path: Path, holder: dict[str, Any]) -> None:
  """Removes the file of a dead holder, but not one that another process has put there meanwhile."""
  aside = path.with_name(f'{path.name}.{secrets.token_hex(4)}')
  os.rename(path, aside)
  if _read(aside) == holder:
    os.unlink(aside)
  else:
    os.rename(aside, path)


def is_held(workdir: Path) -> bool:
  """Returns whether a process has locked a workdir, which is not changed."""
  path = workdir.resolve() / NAME
  if path in _locked:
    return True
  fallback = path.with_name(FALLBACK_NAME)
  if fallback.exists():
    return not _is_dead(_read(fallback))
  try:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
  except OSError:
    return False
  try:
    # struct flock of Linux: type, whence, start, length and process of a lock that would conflict.
    wanted = struct.pack('hhqqi', fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind, *_ = struct.unpack('hhqqi', fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    return kind != fcntl.F_UNLCK
  except OSError:
    return False
  finally:
    os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
  try:
    return os.path.samestat(os.fstat(descriptor), os.stat(path))
  except FileNotFoundError:
    return False


def _this_process() -> bytes:
  holder = dict(pid=os.getpid(), host=socket.gethostname(), begun=_begun(os.getpid()),
                since=time.strftime('%Y-%m-%d %H:%M:%S'))
  return (json.dumps(holder) + '\n').encode()


def _read(path: Path) -> dict[str, Any]:
  """Returns the holder of a lock; empty if the file does not name it."""
  try:
    holder = files.read_json(path)
  except (OSError, ValueError):
    return {}
  return holder if isinstance(holder, dict) else {}


def _is_dead(holder: dict[str, Any]) -> bool:
  """Returns whether the holder was a process of this host that has ended."""
  if holder.get('host') != socket.gethostname() or not isinstance(holder.get('pid'), int):
    return False
  begun = _begun(holder['pid'])
  # The kernel reuses process numbers, so the number alone does not identify the holder.
  return begun is None or begun != holder.get('begun')


def _begun(pid: int) -> str | None:
  """Returns when a process began, in the kernel's clock; None if there is no such process."""
  try:
    # The name, in parentheses, may contain spaces; the time is the 20th field after it.
    after_name = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
  except OSError:
    return None
  return f'{boot} {after_name[19]}'
