"""The code of two commits side by side, for the scripts that compare them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def old_and_new(commit: str, folder: Path) -> Iterator[tuple[Path, Path]]:
  """Two folders that hold `podracer_jit`: as the commit has it, and a copy of how it is here.

  The second is a copy so that the code here may change meanwhile.

  Args:
    commit: what git knows the older code by.
    folder: where both are put, until the end of the `with`.

  Raises:
    ValueError: where git has no such commit.
  """
  old, new = folder / 'old-tree', folder / 'new-tree'
  added = subprocess.run(['git', '-C', str(ROOT), 'worktree', 'add', '--detach', str(old), commit],
                         capture_output=True, text=True, check=False)
  if added.returncode:
    raise ValueError(f'--old: {added.stderr.strip()}')
  try:
    shutil.copytree(ROOT / 'podracer_jit', new / 'podracer_jit')
    yield old, new
  finally:
    subprocess.run(['git', '-C', str(ROOT), 'worktree', 'remove', '--force', str(old)], check=False)
