"""Measures the distance of two cores, which changes while a virtual machine runs.

A cache line goes from one core to another in 50 ns if the cores share a cache, otherwise in 250 ns.
The host of a virtual machine moves its cores without notice. Then work that several threads share,
above all EnvPool's queues, may take twice as long. So speeds are compared at one distance only.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

# Two processes pass a byte back and forth; each prints the least mean time of a round trip in ns.
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
  """Returns the measurements made at one distance, near or far: the one with more of each name.

  A measurement whose distance changed counts as neither near nor far. If a name would have no
  measurement left, all measurements are returned.

  Args:
    measurements: measurements by name, each with `apart_ns` before and after it.

  Returns:
    The measurements by name, and the median of their distances.
  """
  limit = far(min(_distances(measurements)))

  def select(condition: Callable[[tuple[float, float]], bool]):
    return {name: [x for x in rounds if condition(x[1])] for name, rounds in measurements.items()}

  near_rounds = select(lambda distances: max(distances) <= limit)
  far_rounds = select(lambda distances: min(distances) > limit)
  # The smallest number of rounds of any name decides, since all names are compared.
  chosen = max(near_rounds, far_rounds, key=lambda by_name: min(map(len, by_name.values())))
  if not all(chosen.values()):
    chosen = measurements
  figures = {name: [x[0] for x in rounds] for name, rounds in chosen.items()}
  return figures, statistics.median(_distances(chosen))


def _distances(measurements: Mapping[str, Sequence[tuple[T, tuple[float, float]]]]
               ) -> list[float]:
  """Returns the distances before and after all measurements."""
  return [ns for rounds in measurements.values() for _, distances in rounds for ns in distances]
