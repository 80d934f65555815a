"""Actions that environments were sent: a file for each segment, to which each update adds.

A simulator cannot be saved, but it goes on exactly if a new one is stepped through these actions.
`actions/N` has an array [num_shards, T, B, ...] for each update of segment N. Checkpoints within
the segment have the size and the SHA-256 that it had.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from podracer_jit.workdir import files, journal

FOLDER = 'actions'
_BUFFER_BYTES = 2**24  # of actions in memory, before they are written


def name_of(segment: int) -> str:
  """Returns the name of a segment's file in its workdir."""
  return f'{FOLDER}/{segment}'


class Log:
  """The file of a segment, open for appending; all processes add to it, and process 0 writes."""

  def __init__(self, workdir: Path, segment: int, is_first: bool):
    """Opens the file; it is made with the first actions.

    Args:
      workdir: the workdir of the run.
      segment: index of the segment.
      is_first: this is process 0.
    """
    self.path = workdir / name_of(segment)
    self._is_first = is_first
    self._waiting: list[np.ndarray] = []
    self._file: files.Lines | None = None

  def add(self, sent: Sequence[Sequence[jax.Array]]) -> None:
    """Adds the actions of updates; all processes call it for the same updates.

    Args:
      sent: for each update, [T, B, ...] of each of this process's vector environments.

    Raises:
      NotSaved: the file cannot be written.
    """
    for update in sent:
      self._waiting.append(np.stack([np.asarray(x) for x in update]))
    if sum(x.nbytes for x in self._waiting) >= _BUFFER_BYTES:
      self.write()

  def write(self) -> None:
    """Writes the actions that are still in memory; all processes call it.

    Raises:
      NotSaved: the file cannot be written.
    """
    if not self._waiting:
      return
    new = np.stack(self._waiting)  # [R, local num_shards, T, B, ...]
    self._waiting = []
    if jax.process_count() > 1:
      new = np.concatenate(np.asarray(multihost_utils.process_allgather(new)), axis=1)
    if not self._is_first:
      return
    with files.writing():
      if self._file is None:
        files.make_folder(self.path.parent)
        self._file = files.Lines(self.path)
      self._file.add(new.tobytes())

  def sync(self) -> None:
    """Writes all to the disk, before a checkpoint is saved that counts on it.

    Raises:
      NotSaved: the file cannot be written.
    """
    self.write()
    if self._file:
      with files.writing():
        self._file.sync()

  def close(self) -> None:
    """Closes the file; drops what is still in memory."""
    if self._file:
      self._file.close()
      self._file = None


def problem(workdir: Path, segment: int, prefix: journal.Prefix | None,
            like: jax.ShapeDtypeStruct) -> str:
  """Returns what is wrong with the file of a segment; '' if it is what was written.

  Args:
    workdir: the workdir of the run.
    segment: index of the segment.
    prefix: the size and the SHA-256 of the file that the checkpoint has.
    like: the shape [R, num_shards, T, B, ...] and the type of the actions up to the checkpoint.
  """
  path = workdir / name_of(segment)
  if prefix is None or prefix.size != math.prod(like.shape) * like.dtype.itemsize:
    return f'{path} is not of these environments'
  try:
    return '' if journal.is_unchanged(path, prefix) else f'{path} is not what was written'
  except OSError as error:
    return f'{path} cannot be read: {error.strerror}'


def read(workdir: Path, segment: int, like: jax.ShapeDtypeStruct) -> np.ndarray:
  """Returns the actions of a segment, a view of its file, in which `problem` has found nothing.

  Args:
    workdir: the workdir of the run.
    segment: index of the segment.
    like: the shape [R, num_shards, T, B, ...] and the type.
  """
  return np.memmap(workdir / name_of(segment), like.dtype, 'r', shape=like.shape)


def cut(workdir: Path, segment: int, prefix: journal.Prefix) -> None:
  """Removes what was added after a checkpoint; the file begins as the checkpoint says.

  Raises:
    OSError: the file cannot be written; the error names it.
  """
  files.truncate(workdir / name_of(segment), prefix.size)


def remove_others(workdir: Path, needed: Collection[int]) -> None:
  """Removes the files of all segments but those `needed`."""
  folder = workdir / FOLDER
  if folder.is_dir():
    for path in folder.iterdir():
      if path.name not in map(str, needed):
        files.remove(path)
    files.remove_if_empty(folder)
