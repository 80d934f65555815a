"""Which array differs first in an update that two runs made differently, and by how much."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

LEAVES = 10  # named of a stage, at most


def differences(workdirs: Sequence[Path], update: int, allow_modules: Sequence[str] = ()
                ) -> list[str]:
  """Makes an update of both runs again and says, in lines, where their arrays part.

  Args:
    workdirs: of the two runs.
    update: the first that differs.
    allow_modules: modules, or files, of a user's own parts that may be imported.

  Raises:
    ValueError: it cannot be made again.
  """
  with tempfile.TemporaryDirectory(prefix='podracer_jit-deep-') as folder:
    files = [Path(folder) / f'{side}.npz' for side in 'AB']
    for workdir, file in zip(workdirs, files, strict=True):
      command = [sys.executable, '-P', '-m', 'podracer_jit.run.remake', workdir, str(update), file]
      done = subprocess.run([*command, *allow_modules], capture_output=True, text=True, check=False)
      if done.returncode:
        raise ValueError(f'--deep: {(done.stderr.strip().splitlines() or ["no output"])[-1]}')
    with np.load(files[0]) as one, np.load(files[1]) as two:
      return first_stage(one, two)


def first_stage(one: Mapping[str, np.ndarray], two: Mapping[str, np.ndarray]) -> list[str]:
  """Returns a line for each array of the first stage in which two updates differ.

  Args:
    one: arrays by 'stage|leaf', in the order in which they are made.
    two: those of the other side.
  """
  if set(one) != set(two):
    only = sorted(set(one) ^ set(two))
    return [f'the two updates have other arrays: {", ".join(only[:LEAVES])}']
  by_stage: dict[str, list[str]] = {}
  for name in one:
    stage, leaf = name.split('|')
    words = difference(one[name], two[name])
    if words:
      by_stage.setdefault(stage, []).append(f'  {leaf or "value"}: {words}')
  if not by_stage:
    return ['made again, the update is the same on both sides: the difference is not of the '
            'experiment, but of the machines, versions or moments at which the runs were made']
  stage, lines = next(iter(by_stage.items()))
  more = [f'  and {len(lines) - LEAVES} more'] if len(lines) > LEAVES else []
  note = []
  if stage == 'state after the update' and any(': gradient' in name for name in one):
    note = ['step by step, in programs of their own, all gradients and updates are the same: the '
            'difference is in how the programs of a whole update were compiled']
  return [*note, f'the first to differ: {stage}', *lines[:LEAVES], *more]


def difference(one: np.ndarray, two: np.ndarray) -> str:
  """Returns how two arrays differ, in words; '' where all bits are the same."""
  if one.shape != two.shape or one.dtype != two.dtype:
    return f'{one.dtype} {one.shape} in A, {two.dtype} {two.shape} in B'
  differ = _bits(one) != _bits(two)
  if not differ.any():
    return ''
  words = f'{differ.sum():,} of {differ.size:,} numbers differ'
  if one.dtype != np.float32:
    return words
  apart = np.abs(_place(one) - _place(two)).max()
  return f'{words}, by at most {apart:,} units in the last place'


def _bits(x: np.ndarray) -> np.ndarray:
  return np.atleast_1d(np.ascontiguousarray(x)).view(f'u{x.dtype.itemsize}')


def _place(x: np.ndarray) -> np.ndarray:
  """Returns the rank of each float32 among all of them: neighbours differ by one."""
  bits = np.atleast_1d(np.ascontiguousarray(x)).view(np.int32).astype(np.int64)
  return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
