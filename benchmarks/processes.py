"""Measures one training in a process of its own: its speed, its cores and its memory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gymnasium_stress import descendants

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.1
MEMORY_EVERY_S = 1.0  # reading the pages of a process takes some of its time
END_S = 30  # processes that are killed have their memory freed by then
PATIENCE_S = 240  # a training that makes no update for so long has failed
LIMIT_S = 600  # of a process
LEAST_UPDATES = 2  # of a measurement


class Window(NamedTuple):
  """When a training is measured.

  Attributes:
    warmup_updates: the measurement begins with the end of this update, or of the first one.
    warmup_s: neither do so many seconds after the first update.
    seconds: length of the measurement.
  """

  warmup_updates: int
  warmup_s: float
  seconds: float


class Failed(RuntimeError):
  """A training failed, or made no updates."""


def measure(command: Sequence[str], metrics: Path, log: Path, window: Window,
            cores: set[int], environment: Mapping[str, str]) -> dict[str, Any]:
  """Measures a training, and ends it with all its children.

  Args:
    command: of the training.
    metrics: the file that gets a line for each update, with `steps` and `wall_s`.
    log: the file for its output.
    window: when it is measured.
    cores: the cores that it may use.
    environment: its variables.

  Returns:
    `sps`, `cores_busy`, `peak_mb` and `updates`.

  Raises:
    Failed: the training ended, or made too few updates.
  """
  with log.open('w') as output:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
        env=environment, start_new_session=True,
        preexec_fn=functools.partial(os.sched_setaffinity, 0, cores))
  try:
    return _watch(process, metrics, log, window)
  finally:
    _kill(process)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
  """Lets SIGTERM and SIGHUP end the block as Ctrl-C does, so that what is measured ends, too."""
  def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt

  numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  previous = {number: signal.signal(number, interrupt) for number in numbers}
  try:
    yield
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


def _kill(process: subprocess.Popen) -> None:
  """Ends a process and its children, and waits until they use no core and no memory."""
  children = descendants(process.pid)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  limit = time.monotonic() + END_S
  while any(map(_is_running, children)) and time.monotonic() < limit:
    time.sleep(POLL_S)


def _is_running(pid: int) -> bool:
  """Returns whether a process has not ended; one that nobody has asked about has."""
  try:
    state = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
  except OSError:
    return False
  return state != 'Z'


def _watch(process: subprocess.Popen, metrics: Path, log: Path, window: Window) -> dict[str, Any]:
  """Waits until the measurement is over; see `measure`."""
  started = time.monotonic()
  limit = started + max(LIMIT_S, 4 * (window.warmup_s + window.seconds))
  updates, updated = 0, started
  peak = 0
  next_memory = started
  before = None  # time and CPU seconds when the warm-up was over
  new_lines = _NewLines()
  while True:
    time.sleep(POLL_S)
    now = time.monotonic()
    new_lines.read(metrics)
    records = new_lines.records
    span = measured(records, window)
    if len(records) > updates:
      updates, updated = len(records), now
    if before is None and begun(records, window) is not None:
      before = now, cpu_seconds(process.pid)
    if now >= next_memory or span:
      peak = max(peak, memory_bytes(process.pid))
      next_memory = now + MEMORY_EVERY_S
    if span:
      first, last = span
      busy = (cpu_seconds(process.pid) - before[1]) / max(now - before[0], 1e-9)
      return dict(sps=(last['steps'] - first['steps']) / (last['wall_s'] - first['wall_s']),
                  updates=last['update'] - first['update'], cores_busy=busy, peak_mb=peak / 1e6)
    if process.poll() is not None:
      raise Failed(f'exit code {process.returncode}: {_last_line(log)}')
    if now > min(limit, updated + PATIENCE_S):
      raise Failed(f'{len(records)} updates in {now - started:.0f} s: {_last_line(log)}')


class _NewLines:
  """Reads a file of metrics that grows, each line once: reading takes time from the training."""

  def __init__(self):
    self.records: list[dict[str, Any]] = []
    self._read = 0  # bytes

  def read(self, path: Path) -> None:
    """Adds the whole lines that are new, if there is a file."""
    if not path.exists():
      return
    with path.open('rb') as file:
      file.seek(self._read)
      new = file.read()
    new = new[:new.rfind(b'\n') + 1]
    self._read += len(new)
    self.records += map(json.loads, new.splitlines())


def append(path: Path, line: Mapping[str, Any]) -> None:
  """Appends a line of JSON in one step, so that a process that is killed leaves no half line."""
  write(path, [*read(path), line])


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
  """Replaces a file by lines of JSON in one step."""
  new = path.with_suffix('.new')
  new.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  new.replace(path)


def read(path: Path) -> list[dict[str, Any]]:
  """Returns the whole lines of a file of metrics; none if there is no file."""
  if not path.exists():
    return []
  text = path.read_text()
  return [json.loads(line) for line in text[:text.rfind('\n') + 1].splitlines()]


def begun(records: Sequence[Mapping[str, Any]], window: Window) -> Mapping[str, Any] | None:
  """Returns the last update of the warm-up; None if it is not over.

  Updates that only fill a replay are before it.
  """
  records = [record for record in records if record.get('sampled', 1)]
  return next((record for record in records[max(window.warmup_updates - 1, 0):]
               if record['wall_s'] >= records[0]['wall_s'] + window.warmup_s), None)


def measured(records: Sequence[Mapping[str, Any]], window: Window
             ) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
  """Returns the updates between which the training is measured; None if it is too early.

  The updates of one call of a program have the same time. The last of them tells how far the
  training was then. The file may not have all updates of the newest call yet.
  """
  first = begun(records, window)
  if first is None:
    return None
  ends = [record for record, after in zip(records, records[1:], strict=False)
          if record['wall_s'] < after['wall_s']]
  ends = [record for record in ends if record['wall_s'] >= first['wall_s']]
  if (not ends or ends[-1]['wall_s'] - ends[0]['wall_s'] < window.seconds
      or ends[-1]['update'] - ends[0]['update'] < LEAST_UPDATES):
    return None
  return ends[0], ends[-1]


def cpu_seconds(pid: int) -> float:
  """Returns the CPU seconds of a process, its descendants, and children that have ended."""
  ticks = 0
  for each in {pid, *descendants(pid)}:
    with contextlib.suppress(OSError, IndexError):  # it has ended
      fields = Path(f'/proc/{each}/stat').read_text().rpartition(')')[2].split()
      ticks += sum(int(field) for field in fields[11:15])
  return ticks / os.sysconf('SC_CLK_TCK')


def memory_bytes(pid: int) -> int:
  """Returns the memory of a process and its descendants; pages that they share count once."""
  total = 0
  for each in {pid, *descendants(pid)}:
    with contextlib.suppress(OSError):  # it has ended
      for line in Path(f'/proc/{each}/smaps_rollup').read_text().splitlines():
        if line.startswith('Pss:'):
          total += int(line.split()[1]) * 1024
  return total


def empty(folder: Path) -> Path:
  """Returns the folder, made anew."""
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  return folder


def _last_line(log: Path) -> str:
  """Returns the last line of an output that is an error, or else its last line."""
  lines = [line.strip() for line in log.read_text(errors='replace').splitlines() if line.strip()]
  errors = [line for line in lines if 'Error' in line or line.startswith('podracer_jit: ')]
  return (errors or lines or ['no output'])[-1]
