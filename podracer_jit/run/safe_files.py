"""Files that are never half written and never deleted: replaced in one step, or set aside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

BROKEN = 'broken'  # the folder of a workdir for files that cannot be used


def write_text(path: Path, text: str) -> None:
  """Writes a whole file in one step: a reader sees the old content or the new, never a part.

  Raises:
    OSError: naming the file. The old content is still there, and no draft is left.
  """
  draft = path.with_name(f'{path.name}.tmp')
  with naming(path):
    try:
      with draft.open('w') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
      os.replace(draft, path)
    finally:
      draft.unlink(missing_ok=True)


def set_aside(workdir: Path, path: Path) -> Path:
  """Moves a file or folder that cannot be used into the workdir's folder of broken things.

  Returns:
    Where it is now: WORKDIR/broken/NAME, with a number where that is taken.
  """
  folder = workdir / BROKEN
  folder.mkdir(exist_ok=True)
  target, number = folder / path.name, 1
  while target.exists():
    number += 1
    target = folder / f'{path.name}.{number}'
  os.rename(path, target)
  return target


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
  """Adds the file to an OSError that does not name one, as those of `write` do not."""
  try:
    yield
  except OSError as error:
    if error.filename is None and error.errno is not None:
      raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    raise
