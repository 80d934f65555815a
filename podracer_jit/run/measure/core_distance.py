"""Measures how far apart two cores are, which changes on virtual machines while they run.

Cores that share a cache hand a line to each other in 50 ns, others in 250. The host of a virtual
machine moves its cores without notice. Work that several threads share, EnvPool's queues above all,
then takes up to twice as long. So speeds are compared at one distance only.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

# Two of them hand one byte to and fro; prints the least mean time of a turn of both.
_PLAYER = """
import mmap, os, sys, time
core, mine = map(int, sys.argv[1:3])
os.sched_setaffinity(0, {core})
with open(sys.argv[3], 'r+b') as file:
  line = mmap.mmap(file.fileno(), 64)
best, turns = float('inf'), 300
for _ in range(20):
  start = time.perf_counter()
  for _ in range(turns):
    while line[0] != mine:
      pass
    line[0] = 1 - mine
  best = min(best, (time.perf_counter() - start) / turns)
print(best * 1e9)
"""
T = TypeVar('T')


def apart_ns() -> float:
  """Returns the nanoseconds for a byte to go to another core and back; 0 if there is one core."""
  cores = sorted(os.sched_getaffinity(0))[:2]
  if len(cores) < 2:
    return 0.0
  with tempfile.NamedTemporaryFile() as file:
    file.write(bytes(64))
    file.flush()
    players = [subprocess.Popen([sys.executable, '-ISc', _PLAYER, str(core), str(i), file.name],
                                stdout=subprocess.PIPE, text=True) for i, core in enumerate(cores)]
    try:
      return min(float(player.communicate(timeout=30)[0]) for player in players)
    finally:
      for player in players:
        player.kill()


def far(least_ns: float) -> float:
  """Returns the time above which cores are far apart, from the least time measured."""
  return 2 * least_ns


def comparable(measurements: Mapping[str, Sequence[tuple[T, tuple[float, float]]]]
               ) -> tuple[dict[str, list[T]], float]:
  """Returns the measurements made at one distance, near or far, whichever has more of each name.

  A measurement that began near and ended far counts as neither. If some name has no measurement of
  either distance, all measurements are returned.

  Args:
    measurements: by name, each with `apart_ns` before and after it.

  Returns:
    The measurements by name, and the median of their distances.
  """
  limit = far(min(ns for all_of in measurements.values() for _, both in all_of for ns in both))

  def of(kind: Callable[[tuple[float, float]], bool]):
    return {name: [x for x in all_of if kind(x[1])] for name, all_of in measurements.items()}

  chosen = max(of(lambda both: max(both) <= limit), of(lambda both: min(both) > limit),
               key=lambda by_name: min(map(len, by_name.values())))
  if not all(chosen.values()):
    chosen = measurements
  distances = [ns for all_of in chosen.values() for _, both in all_of for ns in both]
  return ({name: [figures for figures, _ in all_of] for name, all_of in chosen.items()},
          statistics.median(distances))
