"""Finished workdirs that many tests read, made once for all workers of pytest-xdist."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
  """Returns a folder of this run of pytest that `make(folder)` has filled.

  Tests only read it, or copy it first.

  Args:
    factory: the fixture `tmp_path_factory`.
    name: names the folder.
    make: fills the empty folder.
  """
  base = factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:
    base = base.parent  # that of all workers
  done = base / f'{name}.done'
  with (base / f'{name}.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = base / name
    if not done.exists():
      folder.mkdir()  # fails again in other workers if `make` has failed in one
      make(folder)
      done.touch()
  return folder
