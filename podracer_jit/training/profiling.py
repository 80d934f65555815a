"""Traces and memory profiles of jax.profiler while a run trains."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax

from podracer_jit.options import shown
from podracer_jit.runtime.placement import Placement
from podracer_jit.training.sinks import Record, Sink

# Reports that are traced if no updates are named; before them programs are compiled and warm up.
FIRST = 3
LAST = 6
MEMORY = 'memory.prof'


class Profiling(NamedTuple):
  """What jax.profiler records of a training.

  Attributes:
    folder: for a trace and a memory profile; None: neither is made.
    updates: the first and the last update of the trace; None: a few after the programs are warm.
  """

  folder: Path | None = None
  updates: tuple[int, int] | None = None


def make_profiling(folder: Path | None, updates: str | tuple[int, int] | None) -> Profiling:
  """Returns what is recorded.

  Args:
    folder: for the trace and the memory profile.
    updates: the first and the last update, or both as 'A:B'.

  Raises:
    ValueError: there is no folder, or no such updates; the message is one line.
  """
  if updates is None:
    return Profiling(folder)
  if folder is None:
    raise ValueError('--profile_updates: is for --profile_dir, which names the folder of the trace')
  numbers = updates.split(':') if isinstance(updates, str) else updates
  try:
    first, last = map(int, numbers)
  except (TypeError, ValueError):
    first, last = 0, 0
  if not 1 <= first <= last:
    raise ValueError('--profile_updates: must be the first and the last update of the trace, such '
                     f'as 100:105, got {shown(updates)}')
  return Profiling(folder, (first, last))


def serve(port: int) -> None:
  """Lets TensorBoard and xprof connect to this process and trace it.

  Raises:
    ValueError: the port is wrong or in use; the message is one line.
  """
  if not 1 <= port <= 65535:
    raise ValueError(f'--profile_port: must be 1 to 65535, got {port}')
  try:
    jax.profiler.start_server(port)
  except (RuntimeError, ValueError) as error:
    raise ValueError(f'--profile_port: cannot listen at {port}: '
                     f'{" ".join(str(error).split())}') from None


class Profiler(Sink):
  """Traces some updates, and then notes who has the memory of the devices.

  With several processes, each has a folder of its own. A trace has whole reports: one update, or
  one call of several.
  """

  def __init__(self, profiling: Profiling, place: Placement, done: int):
    """Starts the trace if its first update is the next one.

    Args:
      profiling: with a folder.
      place: of this process.
      done: updates that the run has made.
    """
    self._folder = profiling.folder
    if place.processes > 1:
      self._folder /= f'process{place.process}'
    self._updates = profiling.updates
    self._is_tracing = False
    self._is_over = False
    self._reports = 0
    if self._updates:
      self._look(done)

  def update(self, record: Record, receipt: Record) -> None:
    """Starts or ends the trace after a report."""
    self._reports += 1
    if self._updates:
      self._look(record['update'])
    elif self._reports == FIRST:
      self._start()
    elif self._reports == LAST:
      self.close()

  def _look(self, done: int) -> None:
    """Starts or ends the trace after an update."""
    first, last = self._updates
    if not self._is_tracing and first - 1 <= done < last:
      self._start()
    elif done >= last:
      self.close()

  @property
  def missing(self) -> str:
    """A line if there is no trace, '' if there is one."""
    if self._is_over or self._is_tracing:
      return ''
    if self._updates:
      return f'no trace: updates {self._updates[0]} to {self._updates[1]} were not made'
    return f'no trace: it begins with the third report, and there were {self._reports}'

  def _start(self) -> None:
    if not self._is_over:
      jax.profiler.start_trace(str(self._folder))
      self._is_tracing = True

  def close(self) -> None:
    """Ends the trace, if it has not ended yet, and writes the memory profile."""
    if self._is_tracing:
      self._is_tracing = False
      self._is_over = True
      jax.profiler.stop_trace()
      jax.profiler.save_device_memory_profile(str(self._folder / MEMORY))
