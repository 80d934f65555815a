"""Checks out an older commit beside the working tree, for scripts that compare the two."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def old_and_new(commit: str, folder: Path) -> Iterator[tuple[Path, Path]]:
  """Yields two folders with the package, benchmarks and examples: the commit's, the working tree's.

  The second is a copy, so that the working tree may be edited while a comparison runs.

  Args:
    commit: a name or hash that git resolves.
    folder: both folders are created in it and exist until the end of the `with`.

  Raises:
    ValueError: git has no such commit.
  """
  old_tree = folder / 'old-tree'
  new_tree = folder / 'new-tree'
  git = ['git', '-C', str(ROOT), 'worktree']
  added = subprocess.run([*git, 'add', '--detach', str(old_tree), commit], capture_output=True,
                         text=True, check=False)
  if added.returncode:
    raise ValueError(f'--old: {added.stderr.strip()}')
  try:
    for name in ('podracer_jit', 'benchmarks', 'examples'):
      shutil.copytree(ROOT / name, new_tree / name)
    yield old_tree, new_tree
  finally:
    subprocess.run([*git, 'remove', '--force', str(old_tree)], check=False)
