"""Finds the first array that differs in an update of two runs, and measures the difference."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

LEAVES = 10  # most arrays of a stage that are named


def differences(workdirs: Sequence[Path], update: int, allow_modules: Sequence[str] = ()
                ) -> list[str]:
  """Repeats an update of both runs; returns lines about the first arrays that differ.

  Args:
    workdirs: the workdirs of the two runs.
    update: the first update that differs.
    allow_modules: modules, or files, of a user's own parts that may be imported.

  Raises:
    ValueError: the update cannot be repeated.
  """
  with tempfile.TemporaryDirectory(prefix='podracer_jit-deep-') as folder:
    files = [Path(folder) / f'{side}.npz' for side in 'AB']
    for workdir, file in zip(workdirs, files, strict=True):
      command = [sys.executable, '-P', '-m', 'podracer_jit.cli.remake', workdir, str(update), file]
      process = subprocess.run([*command, *allow_modules], capture_output=True, text=True,
                               check=False)
      if process.returncode:
        lines = process.stderr.strip().splitlines() or ['no output']
        raise ValueError(f'--deep: {lines[-1]}')
    with np.load(files[0]) as arrays_a, np.load(files[1]) as arrays_b:
      return first_stage(arrays_a, arrays_b)


def first_stage(arrays_a: Mapping[str, np.ndarray], arrays_b: Mapping[str, np.ndarray]
                ) -> list[str]:
  """Returns a line for each array of the first stage in which two updates differ.

  Args:
    arrays_a: arrays of run A by 'stage|leaf', in the order in which they are made.
    arrays_b: arrays of run B.
  """
  if set(arrays_a) != set(arrays_b):
    only = sorted(set(arrays_a) ^ set(arrays_b))
    return [f'only one of the two updates has these arrays: {", ".join(only[:LEAVES])}']
  by_stage: dict[str, list[str]] = {}
  for name in arrays_a:
    stage, leaf = name.split('|')
    change = difference(arrays_a[name], arrays_b[name])
    if change:
      by_stage.setdefault(stage, []).append(f'  {leaf or "value"}: {change}')
  if not by_stage:
    return ['repeated here, the update is the same on both sides: the runs do not differ by their '
            'experiments, but by the machines, versions or times at which they were made']
  stage, lines = next(iter(by_stage.items()))
  more = [f'  and {len(lines) - LEAVES} more'] if len(lines) > LEAVES else []
  note = []
  if stage == 'state after the update' and any(': gradient' in name for name in arrays_a):
    note = ['in separate programs, step by step, all gradients and updates are the same: the '
            'programs of a whole update were compiled differently']
  return [*note, f'the first to differ: {stage}', *lines[:LEAVES], *more]


def difference(a: np.ndarray, b: np.ndarray) -> str:
  """Returns the difference of two arrays in words; '' if all bits are the same."""
  if a.shape != b.shape or a.dtype != b.dtype:
    return f'{a.dtype} {a.shape} in A, {b.dtype} {b.shape} in B'
  differ = _bits(a) != _bits(b)
  if not differ.any():
    return ''
  count = f'{differ.sum():,} of {differ.size:,} numbers differ'
  if a.dtype != np.float32:
    return count
  apart = np.abs(_rank(a) - _rank(b)).max()
  return f'{count}, by at most {apart:,} units in the last place'


def _bits(x: np.ndarray) -> np.ndarray:
  """Returns the bits of an array's numbers as unsigned integers; NaN equals itself as bits."""
  return np.atleast_1d(np.ascontiguousarray(x)).view(f'u{x.dtype.itemsize}')


def _rank(x: np.ndarray) -> np.ndarray:
  """Returns the rank of each number among all float32 numbers: neighbours differ by one."""
  bits = np.atleast_1d(np.ascontiguousarray(x)).view(np.int32).astype(np.int64)
  # Positive numbers have the order of their bits; negative numbers have the reverse order.
  return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
