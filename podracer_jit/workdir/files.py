"""Files of a workdir: only regular ones are read, and all changes of the disk are made here.

Nothing else changes a workdir, but for Orbax, the lock, the open files of a run's journals and
trackers, ffmpeg, and a mirror that fetches a whole workdir.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from podracer_jit.errors import NotSaved
from podracer_jit.options import nested_too_deeply

_MOST_JSON = 2**26  # bytes of a file of JSON; a manifest of 400,000 files has as many
BROKEN = 'broken'  # folder of a workdir for broken files
DRAFT = '.tmp'  # a suffix of files that get their names when they are whole


@contextlib.contextmanager
def writing() -> Iterator[None]:
  """Turns an OSError of the block into a `NotSaved`."""
  try:
    yield
  except OSError as error:
    raise NotSaved(str(error)) from error


def open_regular(path: Path) -> BinaryIO:
  """Opens a file of a workdir for reading.

  A workdir may be a stranger's: a pipe in it would never answer, and a device would never end.

  Raises:
    OSError: it cannot be read, or is not a regular file.
  """
  if not stat.S_ISREG(path.stat().st_mode):
    raise OSError(errno.EINVAL, 'it is not a regular file', str(path))
  return path.open('rb')


def read_json(path: Path, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
  """Returns the content of a file of JSON in a workdir.

  Args:
    path: the path of the file.
    hook: makes the value of an object from its pairs; default: a dict.

  Raises:
    OSError: it cannot be read, or is not a regular file.
    ValueError: it is not JSON, or too large.
  """
  with open_regular(path) as file:
    content = file.read(_MOST_JSON + 1)
  if len(content) > _MOST_JSON:
    raise ValueError(f'{path} has more than {_MOST_JSON:,} bytes')
  return parse_json(content, hook)


def parse_json(content: bytes, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
  """Returns a value of JSON from a workdir.

  Args:
    content: the text.
    hook: see `read_json`.

  Raises:
    ValueError: it is not JSON, or has so many levels that code for whole trees would fail.
  """
  try:
    value = json.loads(content, object_pairs_hook=hook)
  except RecursionError:
    value = None
    is_deep = True
  else:
    is_deep = nested_too_deeply(value)
  if is_deep:
    raise ValueError('it is nested too deeply')
  return value


def write(path: Path, content: str | bytes | Iterable[bytes], is_shared: bool = False) -> None:
  """Writes a whole file in one step: a reader sees either the old or the new content.

  Args:
    path: the path of the file.
    content: its new content, which may come in parts.
    is_shared: other processes may write the file at the same time.

  Raises:
    OSError: the file cannot be written; the error names it. The old content is unchanged.
  """
  draft = path.with_name(f'{path.name}{f".{secrets.token_hex(8)}" if is_shared else ""}{DRAFT}')
  content = content.encode() if isinstance(content, str) else content
  with naming(path):
    # One that a killed process has left, or a link of a stranger's workdir.
    draft.unlink(missing_ok=True)
    try:
      with draft.open('xb') as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        file.flush()
        # Without fsync, a power failure could leave an empty file under the new name.
        os.fsync(file.fileno())
      os.replace(draft, path)
    finally:
      draft.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
  """Appends a line in one write, so that lines which processes append at once do not mix.

  Args:
    path: the path of the file, which need not exist.
    line: the line, without its newline.

  Raises:
    OSError: it cannot be written; the error names the file.
  """
  content = line.encode() + b'\n'
  # A stranger's workdir may have a link to another file of the user's, or a pipe without a reader.
  how = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
  with naming(path):
    descriptor = os.open(path, how, 0o666)
    try:
      status = os.fstat(descriptor)
      if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, 'it is not a regular file', str(path))
      if status.st_size and os.pread(descriptor, 1, status.st_size - 1) != b'\n':
        content = b'\n' + content  # a full disk has cut the line before
      if os.write(descriptor, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


class Lines:
  """A file that gets lines, or bytes, at its end, and is open meanwhile."""

  def __init__(self, path: Path):
    """Opens the file, which need not exist.

    Raises:
      OSError: it cannot be written; the error names the file, as for the other methods.
    """
    self._path = path
    with naming(path):
      # As in `append_line`: no link, and no pipe.
      how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
      self._file = os.fdopen(os.open(path, how, 0o666), 'ab')
    sync_folder(path.parent)

  def write(self, line: str) -> None:
    """Appends a line, which is given without its newline."""
    self.add(f'{line}\n'.encode())

  def add(self, content: bytes) -> None:
    """Appends bytes."""
    with naming(self._path):
      self._file.write(content)
      self._file.flush()

  def sync(self) -> None:
    """Has all lines reach the disk."""
    with naming(self._path):
      os.fsync(self._file.fileno())

  def close(self) -> None:
    """Closes the file."""
    # A file that could not be written fails again here. That error was raised before.
    with contextlib.suppress(OSError):
      self._file.close()


def truncate(path: Path, size: int) -> None:
  """Cuts a file to its first bytes.

  Raises:
    OSError: the file cannot be written; the error names it.
  """
  with naming(path):
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
      os.ftruncate(descriptor, size)
    finally:
      os.close(descriptor)


def rename(path: Path, target: Path) -> None:
  """Gives a file or a folder another name in one step, which outlasts a power failure."""
  os.rename(path, target)
  sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
  """Has the names of new files in a folder outlast a power failure, if its file system can."""
  with contextlib.suppress(OSError):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def make_folder(path: Path) -> None:
  """Makes a folder, and those above it, unless it exists."""
  path.mkdir(parents=True, exist_ok=True)


def remove_folder(path: Path) -> None:
  """Removes a folder with all that is in it, as far as that is possible."""
  shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
  """Removes a file, if that is possible."""
  with contextlib.suppress(OSError):
    path.unlink()


def remove_if_empty(path: Path) -> None:
  """Removes a folder unless something is in it, or it cannot be removed."""
  with contextlib.suppress(OSError):
    path.rmdir()


def set_aside(workdir: Path, path: Path) -> Path:
  """Moves a broken file or folder to WORKDIR/broken/NAME, with a number if that exists.

  Returns:
    The new path.
  """
  folder = workdir / BROKEN
  make_folder(folder)
  target = folder / path.name
  number = 1
  while target.exists():
    number += 1
    target = folder / f'{path.name}.{number}'
  rename(path, target)
  return target


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
  """Adds the file's name to an OSError that has none; errors of `write` have none."""
  try:
    yield
  except OSError as error:
    if error.filename is None and error.errno is not None:
      raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    raise
