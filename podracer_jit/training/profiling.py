"""Traces and memory profiles of jax.profiler while a run trains."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from podracer_jit.experiment import build
from podracer_jit.options import shown
from podracer_jit.training.sinks import Record, Sink

# Reports that are traced if no updates are named; before them programs are compiled and warm up.
# Those of a replay that is too small yet do not count.
FIRST = 3
LAST = 6
MEMORY = 'memory.prof'
MOST_PORTS = 65535


class Profiling(NamedTuple):
  """The part of a training that jax.profiler records.

  Attributes:
    folder: of the trace and the memory profile.
    updates: the first and the last update of the trace; None: a few after the programs are warm.
  """

  folder: Path
  updates: tuple[int, int] | None = None


def make_profiling(folder: Path | None, updates: str | None = None) -> Profiling | None:
  """Makes the folder; returns the part of a training to record, None without a folder.

  Args:
    folder: for the trace and the memory profile.
    updates: 'A:B', the first and the last update; None: a few after the programs are warm.

  Raises:
    ValueError: there is no folder, or no such updates; the message is one line.
    OSError: the folder cannot be made.
  """
  if folder is None and updates is not None:
    raise ValueError('--profile_updates: is for --profile_dir, which names the folder of the trace')
  bounds = None if updates is None else _bounds(updates)
  if folder is None:
    return None
  folder.mkdir(parents=True, exist_ok=True)
  return Profiling(folder, bounds)


def _bounds(updates: str) -> tuple[int, int]:
  """Returns the first and the last update of 'A:B'; raises ValueError if it is wrong."""
  parts = updates.split(':')
  if len(parts) == 2 and all(part.isdecimal() for part in parts):
    first, last = map(int, parts)
    if 1 <= first <= last:
      return first, last
  raise ValueError('--profile_updates: must be the first and the last update of the trace, such as '
                   f'100:105, got {shown(updates)}')


def check_port(port: int | None) -> None:
  """Checks that jax.profiler can listen at a port; None: it shall not.

  Raises:
    ValueError: it cannot; the message is one line.
  """
  if port is None:
    return
  if not 1 <= port <= MOST_PORTS:
    raise ValueError(f'--profile_port: must be 1 to {MOST_PORTS}, got {port}')
  # JAX only logs that a port is in use.
  try:
    socket.create_server(('', port)).close()
  except OSError as error:
    raise ValueError(f'--profile_port: cannot listen at {port}: {error.strerror}') from None


@contextlib.contextmanager
def served(port: int | None) -> Iterator[None]:
  """Lets TensorBoard and xprof trace this process meanwhile, at a port that was checked."""
  if port is None:
    yield
    return
  jax.profiler.start_server(port)
  try:
    yield
  finally:
    jax.profiler.stop_server()


class Profiler(Sink):
  """Traces some updates, and then notes who has the memory of the devices.

  With several processes, each has a folder of its own. A trace has whole reports: one update, or
  one call of several.
  """

  def __init__(self, profiling: Profiling, run: build.Run, done: int):
    """Starts the trace if its first update is in the next report.

    Args:
      profiling: the part to record.
      run: the run of this process.
      done: updates that it has made.
    """
    self._folder = profiling.folder
    if run.place.processes > 1:
      self._folder /= f'process{run.place.process}'
    self._updates = profiling.updates
    is_one_program = run.experiment.scheme.graph.one_program
    self._most = run.experiment.placement.updates_per_call if is_one_program else 1
    self._is_tracing = False
    self._is_over = False
    self._reports = 0
    self._refused = ''
    if self._updates:
      self._look(done)

  def update(self, record: Record, receipt: Record) -> None:
    """Starts or ends the trace after a report."""
    self._reports += record.get('sampled', 1) > 0
    if self._updates:
      self._look(record['update'])
    elif self._reports == FIRST and not self._is_tracing:
      self._start()
    elif self._reports == LAST:
      self.close()

  def _look(self, done: int) -> None:
    """Starts or ends the trace after an update."""
    first, last = self._updates
    if done >= last:
      self.close()
    # The learner may already be at the report after the next one.
    elif done + 2 * self._most >= first and not self._is_tracing:
      self._start()

  @property
  def missing(self) -> str:
    """A line if there is no trace, '' if there is one."""
    if self._refused:
      return f'no trace: {self._refused}'
    if self._is_over or self._is_tracing:
      return ''
    if self._updates:
      first, last = self._updates
      return f'no trace: this command has not made updates {first} to {last}'
    return ('no trace: it begins with the third report that has gradient steps, and there were '
            f'{self._reports}')

  def _start(self) -> None:
    if self._is_over:
      return
    try:
      jax.profiler.start_trace(str(self._folder))
      self._is_tracing = True
    except RuntimeError as error:  # a user's program has a trace of its own
      self._is_over = True
      self._refused = ' '.join(str(error).split())

  def close(self) -> None:
    """Ends the trace, if it has not ended yet, and writes the memory profile."""
    if self._is_tracing:
      self._is_tracing = False
      self._is_over = True
      jax.profiler.stop_trace()
      jax.profiler.save_device_memory_profile(str(self._folder / MEMORY))
