"""A copy of a workdir in an object store (gs://, s3:// and others), kept by the run itself.

A workdir needs files that grow, names that change in one step, and locks, which object stores do
not have. So a run trains in a local folder, and copies it after each checkpoint, while it trains
on. On another machine, or on one that has lost its disk, the same command first fetches the copy.

An object INDEX says which files, and how many bytes of each, are a whole copy; it is replaced last.
Thus a copy that was cut short leaves the one before. Objects have no locks, but the newest command
puts its name into HOLDER, and an older one that finds another name there ends.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import json
import os
import secrets
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from podracer_jit.errors import NotSaved
from podracer_jit.runtime.output import complain
from podracer_jit.training.sinks import Saved, Sink, Start
from podracer_jit.workdir import checkpoints, files, journal, lock, record

INDEX = 'mirror.json'
HOLDER = 'mirror.holder.json'
_CHUNK = 2**24  # bytes that are copied at once
# Files that a run only appends to: a longer one has the copy's bytes at its beginning.
_GROWING = ('.jsonl', '/actions/')
_KEPT = ('checkpoints/', 'actions/')  # files that a run keeps until they are copied

# For each file of a workdir, by its path there, the bytes that belong to a copy.
Sizes = Mapping[str, int]


class Mirror(Sink):
  """Copies a workdir to a store after each checkpoint, in a thread of its own."""

  def __init__(self, url: str, workdir: Path):
    """Finds the store, and fetches the workdir from it if there is none here.

    Args:
      url: of the copy, such as gs://bucket/runs/x.
      workdir: the local folder.

    Raises:
      ValueError: there is no such kind of store, a package for it is missing, it cannot be read, or
        its copy does not fit to the workdir.
    """
    self._url = url
    self._workdir = workdir
    self._token = secrets.token_hex(8)
    self._copied: dict[str, tuple[int, int]] = {}  # size and time of change of what was copied
    self._kept: Collection[int] = ()  # checkpoints that are being copied
    self._copier = concurrent.futures.ThreadPoolExecutor(1, 'mirror')
    self._copying: concurrent.futures.Future | None = None
    self._has_begun = False
    self._files_at_start: Sizes = {}  # of the copy
    self.note_of_start = ''
    if '://' not in url:
      raise ValueError(f'--mirror: must be the address of a store, such as gs://bucket/runs/x, got '
                       f'{url}')
    try:
      self._store, self._root = fsspec.core.url_to_fs(url)
      index = self._read(INDEX)
      if index is not None:
        self._go_on(index)
        self._files_at_start = index['files']
    except Exception as error:  # noqa: BLE001 - each store has errors of its own
      if isinstance(error, ValueError) and str(error).startswith('--mirror: '):
        raise
      raise ValueError(f'--mirror: {url}: {type(error).__name__}: {error}') from error

  def _go_on(self, index: Mapping[str, Any]) -> None:
    """Fetches the copy, or checks that the workdir is as far as the copy.

    Args:
      index: of the copy.

    Raises:
      ValueError: the copy does not fit to the workdir.
    """
    if not (self._workdir / record.NAME).exists():
      self._fetch(index['files'])
      self.note_of_start = (f'{self._workdir} was fetched from {self._url}, as update '
                            f'{index["update"]} left it')
      return
    ours = self._run()
    if ours and index['run'] not in ('', ours):
      raise ValueError(f'--mirror: {self._url} is the copy of another run than that in '
                       f'{self._workdir}; choose another address')
    newest = max(checkpoints.saved_updates(self._workdir), default=0)
    if newest < index['update']:
      raise ValueError(
          f'--mirror: {self._url} has update {index["update"]}, and {self._workdir} only update '
          f'{newest}; remove or rename {self._workdir}, and the same command fetches the copy')

  def _fetch(self, sizes: Sizes) -> None:
    """Makes the workdir from the copy; it is there as a whole or not at all."""
    if self._workdir.exists() and any(self._workdir.iterdir()):
      raise ValueError(f'--mirror: {self._workdir} is no workdir and not empty; choose another '
                       '--workdir')
    unfinished = self._workdir.with_name(f'{self._workdir.name}.fetching')
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
      self._fetch_to(unfinished, sizes)
      if self._workdir.exists():
        self._workdir.rmdir()
      unfinished.rename(self._workdir)
    finally:
      shutil.rmtree(unfinished, ignore_errors=True)
    self._copied |= {name: self._version(name, size) for name, size in sizes.items()}

  def _fetch_to(self, unfinished: Path, sizes: Sizes) -> None:
    """Fetches files of these sizes to a folder."""
    for name, size in sizes.items():
      target = unfinished / name
      # The index may be a stranger's.
      if not target.resolve().is_relative_to(unfinished.resolve()):
        raise ValueError(f'--mirror: {self._url}: its {INDEX} names {name}, outside of the copy')
      target.parent.mkdir(parents=True, exist_ok=True)
      with self._store.open(f'{self._root}/{name}', 'rb') as source, target.open('wb') as out:
        shutil.copyfileobj(source, out, _CHUNK)
      is_growing = any(part in f'/{name}' for part in _GROWING)
      # A shorter one is that of a run that went on from a checkpoint. It has what this one needs,
      # which the start checks.
      if is_growing and target.stat().st_size > size:
        os.truncate(target, size)

  def begin(self, start: Start) -> None:
    """Takes the copy over from any other command, once."""
    del start
    if not self._has_begun:
      self._take_over()

  def _take_over(self) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    holder = dict(token=self._token, host=socket.gethostname(), pid=os.getpid(), since=now)
    try:
      self._write(HOLDER, holder)
    except Exception as error:  # noqa: BLE001
      raise NotSaved(f'--mirror: {self._url}: {type(error).__name__}: {error}') from error
    self._has_begun = True

  def saved(self, at: Saved) -> None:
    """Begins to copy what the workdir has now, unless the copy before has not ended.

    Raises:
      NotSaved: another command has taken the copy over.
    """
    if self._copying is not None and not self._copying.done():
      return
    self._tell_failure()
    self._kept = checkpoints.saved_updates(self._workdir)
    self._copying = self._copier.submit(self._copy, at.update, dict(self._sizes()))

  def keeps(self) -> Collection[int]:
    """Returns the checkpoints that are being copied."""
    return self._kept if self._copying is not None and not self._copying.done() else ()

  def close(self) -> None:
    """Copies what the workdir has at the end.

    Raises:
      NotSaved: it cannot be copied; the workdir has it.
    """
    if not self._has_begun:  # no segment was left to make, but perhaps the copy before had failed
      has_run = (self._workdir / record.NAME).exists()
      if not has_run or self._files_at_start == dict(self._sizes()):
        return
      self._take_over()
    if self._copying is not None:
      concurrent.futures.wait([self._copying])
    updates = checkpoints.saved_updates(self._workdir)
    try:
      self._copy(max(updates, default=0), dict(self._sizes()))
    except NotSaved:
      raise
    except Exception as error:  # noqa: BLE001
      raise NotSaved(f'--mirror: {self._url}: {type(error).__name__}: {error}; {self._workdir} has '
                     'all of the run, and the same command copies it') from error
    finally:
      self._copier.shutdown()

  def _tell_failure(self) -> None:
    """Tells of a copy that has failed; the next one makes it up.

    Raises:
      NotSaved: another command has taken the copy over.
    """
    error = self._copying.exception() if self._copying is not None else None
    if isinstance(error, NotSaved):
      raise error
    if error is not None:
      complain(f'podracer_jit: warning: --mirror: {self._url}: {type(error).__name__}: {error}; it '
               'is copied again after this checkpoint')

  def _sizes(self) -> Iterator[tuple[str, int]]:
    """Yields the files of the workdir that belong to a copy, with their sizes."""
    whole = {str(update) for update in checkpoints.saved_updates(self._workdir)}
    for folder, _, names in os.walk(self._workdir):
      inside = Path(folder).relative_to(self._workdir)
      if inside.parts[:1] == ('checkpoints',) and not whole & set(inside.parts[1:2]):
        continue
      if inside.parts[:1] == (files.BROKEN,):
        continue
      for name in names:
        if name in (lock.NAME, lock.FALLBACK_NAME) or files.DRAFT in Path(name).suffixes:
          continue
        with contextlib.suppress(FileNotFoundError):  # another command may have replaced it
          yield str(inside / name), (Path(folder) / name).stat().st_size

  def _copy(self, update: int, sizes: Sizes) -> None:
    """Copies files that have changed, then replaces the index, then removes what is not in it.

    Args:
      update: the newest checkpoint.
      sizes: what belongs to the copy.

    Raises:
      NotSaved: another command has taken the copy over.
    """
    holder = self._read(HOLDER) or {}
    if holder.get('token') != self._token:
      raise NotSaved(
          f'--mirror: process {holder.get("pid")} on {holder.get("host")} has taken {self._url} '
          f'over since {holder.get("since")}; this run ends, and {self._workdir} has all of it')
    before = self._read(INDEX) or {}
    copied = {name: size for name, size in sizes.items() if self._copy_file(name, size)}
    # A deleted checkpoint is removed as a folder, where the store has folders. If it was made again
    # under the same number, only the files that are gone are removed.
    kept = set(map(_unit, copied))
    gone = {name if _unit(name) in kept else _unit(name) for name in before.get('files', {})
            if name not in copied}
    # A process that was killed may have left some of what it removed.
    gone |= set(before.get('removed', ())) - kept - set(copied)
    self._write(INDEX, dict(run=self._run(), update=update, files=copied, removed=sorted(gone)))
    for name in gone:
      with contextlib.suppress(FileNotFoundError):
        self._store.rm(f'{self._root}/{name}', recursive=True)

  def _copy_file(self, name: str, size: int) -> bool:
    """Copies the first bytes of a file, if they have changed since they were copied.

    Returns:
      Whether there is such a file: another command may have removed it meanwhile.
    """
    try:
      version = self._version(name, size)
      if self._copied.get(name) == version:
        return True
      source = (self._workdir / name).open('rb')
    except FileNotFoundError:
      if name.startswith(_KEPT):
        raise
      return False
    with source, self._created(name) as target:
      left = size
      while left and (chunk := source.read(min(left, _CHUNK))):
        target.write(chunk)
        left -= len(chunk)
    self._copied[name] = version
    return True

  def _version(self, name: str, size: int) -> tuple[int, int]:
    """Returns (bytes to copy, time of the last change); if equal, a file need not go again."""
    return size, (self._workdir / name).stat().st_mtime_ns

  def _run(self) -> str:
    """Returns what tells runs apart: the first receipt, behind its header; '' without one."""
    try:
      with files.open_regular(self._workdir / journal.RECEIPTS) as lines:
        lines.readline()
        return lines.readline().decode().strip()
    except FileNotFoundError:
      return ''

  def _read(self, name: str) -> Any:
    """Returns an object of JSON; None if it is not there."""
    try:
      return json.loads(self._store.cat_file(f'{self._root}/{name}'))
    except FileNotFoundError:
      return None

  def _write(self, name: str, value: Any) -> None:
    with self._created(name) as target:
      target.write(json.dumps(value).encode())

  def _created(self, name: str) -> BinaryIO:
    """Opens an object for writing, which replaces another one of its name."""
    path = f'{self._root}/{name}'
    # Servers of files have folders; stores of objects have none, and do nothing.
    self._store.makedirs(path.rpartition('/')[0], exist_ok=True)
    return self._store.open(path, 'wb')


def _unit(name: str) -> str:
  """Returns the folder of a checkpoint's file; another file by itself."""
  return '/'.join(name.split('/')[:2]) if name.startswith('checkpoints/') else name
