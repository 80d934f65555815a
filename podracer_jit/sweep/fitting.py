"""How many members of a sweep fit on this machine at once, and whether all fit on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podracer_jit.runtime.machine import host_memory
from podracer_jit.sweep.members import Member


class Size(NamedTuple):
  """What a member needs."""

  steps: int  # of each of its seeds
  memory: int  # bytes at least
  disk: int  # bytes at least


class Checked(NamedTuple):
  """Members that may begin."""

  members: list[Member]  # seeds that one program can train are one member
  sizes: Mapping[str, Size]  # by the members' names
  configs: Mapping[str, Any]  # what --config and the flags of all members give, as JSON has it
  evaluates: bool  # all members have evaluations while they train


def jobs_that_fit(asked: int | None, slots: int, sizes: Sequence[Size]) -> int:
  """Returns how many members run at once.

  Args:
    asked: with --jobs; None: as many as fit.
    slots: cores, or GPUs.
    sizes: of the members that have not finished.

  Raises:
    ValueError: so many do not fit into the memory, or there is no place for one.
  """
  largest = sorted((size.memory for size in sizes), reverse=True)
  limit = host_memory()
  fit = len(largest)
  if limit is not None:
    # At least one, since each fits alone.
    fit = max(1, next((n for n in range(len(largest)) if sum(largest[:n + 1]) > limit), fit))
  if asked is None:
    return max(1, min(slots, fit))
  if min(asked, len(largest)) > fit:
    raise ValueError(f'--jobs: {asked} members at once would need at least '
                     f'{sum(largest[:asked]) / 1e9:.1f} GB, and this machine has '
                     f'{limit / 1e9:.1f} GB; at most --jobs={fit}')
  return asked


def check_disk(out: Path, sizes: Sequence[Size]) -> None:
  """Checks that members fit on the disk.

  Args:
    out: the folder of the sweep.
    sizes: of the members that have not begun.

  Raises:
    ValueError: they do not.
  """
  free = shutil.disk_usage(out).free
  needed = sum(size.disk for size in sizes)
  if needed > free:
    raise ValueError(f'--out: {len(sizes)} members need at least {needed / 1e9:.1f} GB on the disk '
                     f'of {out}, and {free / 1e9:.1f} GB are free')
