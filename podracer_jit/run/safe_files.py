"""Paths of users; replaces files in one step, and moves broken files instead of deleting them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

BROKEN = 'broken'  # folder of a workdir for broken files


def user_path(path: str | Path) -> Path:
  """Returns a path that a user gave, in which ~ at its beginning means the home folder.

  Raises:
    ValueError: the user, or the user's home folder, is not known.
  """
  try:
    return Path(path).expanduser()
  except RuntimeError:
    raise ValueError(f'{path}: the home folder is not known; give a path without ~') from None


def write_text(path: Path, text: str) -> None:
  """Writes a whole file in one step, as `write_bytes` does."""
  write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
  """Writes a whole file in one step: a reader sees either the old or the new content.

  Raises:
    OSError: the file cannot be written; the error names it. The old content is unchanged.
  """
  draft = path.with_name(f'{path.name}.tmp')
  with naming(path):
    try:
      with draft.open('wb') as file:
        file.write(content)
        file.flush()
        # Without fsync, a power failure could leave an empty file under the new name.
        os.fsync(file.fileno())
      os.replace(draft, path)
    finally:
      draft.unlink(missing_ok=True)


def set_aside(workdir: Path, path: Path) -> Path:
  """Moves a broken file or folder to WORKDIR/broken/NAME, with a number if that exists.

  Returns:
    The new path.
  """
  folder = workdir / BROKEN
  folder.mkdir(exist_ok=True)
  target = folder / path.name
  number = 1
  while target.exists():
    number += 1
    target = folder / f'{path.name}.{number}'
  os.rename(path, target)
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
