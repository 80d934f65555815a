"""Runs commands at once, each with a time limit, within one budget; notes their results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULT = 'RESULT '  # begins a line of a command's output that is a record in JSON
_RESERVE_S = 5.0  # of the budget, to end commands and to pack logs
_STACKS_S = 4.0  # to write the stacks of all threads
_SHOWN = 700  # characters of a record that are printed
_TAIL = 2500  # characters of a failed command's output that are kept
_SHOWN_TAIL = 500


class Command(NamedTuple):
  """A command of one step.

  Attributes:
    name: names the log.
    arguments: of this Python.
    limit_s: seconds after which it is ended.
    cache: name of the folder for compiled programs; equal names share one.
    variables: further environment variables.
  """

  name: str
  arguments: Sequence[str]
  limit_s: float
  cache: str = 'shared'
  variables: Mapping[str, str] = {}


class Process:
  """A running command with a log. At its limit it is ended with all its children."""

  def __init__(self, command: Command, log: Path, environment: Mapping[str, str],
               seconds_left: Callable[[], float]):
    """Starts the command.

    Args:
      command: the command.
      log: the file for its output, which is appended.
      environment: all environment variables.
      seconds_left: returns the seconds of the budget that are left.
    """
    self.name = command.name
    self._limit_s = command.limit_s
    self._log = log
    self._seconds_left = seconds_left
    self._start = time.monotonic()
    self._is_late = False
    with log.open('ab') as output:
      self._process = subprocess.Popen(
          [sys.executable, '-P', '-W', 'ignore', *command.arguments], stdout=output,
          stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=ROOT)

  def kill(self) -> None:
    """Ends it and its children at once."""
    self._send(signal.SIGKILL)
    self._process.wait()

  def has_ended(self) -> bool:
    """Returns whether it has ended; ends it if it is late."""
    if self._process.poll() is not None:
      return True
    is_over = time.monotonic() - self._start > self._limit_s
    if not is_over and self._seconds_left() > _RESERVE_S:
      return False
    self._is_late = True
    self._send(signal.SIGABRT)  # faulthandler writes the stacks of all threads into the log
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(_STACKS_S)
    self.kill()
    return True

  def result(self) -> dict[str, Any]:
    """Returns the record of a process that has ended."""
    text = self._log.read_text(errors='replace')
    data = [json.loads(line.removeprefix(RESULT)) for line in text.splitlines()
            if line.startswith(RESULT)]
    is_ok = self._process.returncode == 0 and not self._is_late
    return dict(step=self.name, ok=is_ok, rc=self._process.returncode, late=self._is_late,
                seconds=round(time.monotonic() - self._start, 1), data=data,
                tail='' if is_ok else text[-_TAIL:])

  def _send(self, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, number)


class Day:
  """The budget, the folders and the chosen steps of one call."""

  def __init__(self, out: Path, work: Path, budget_s: float, only: Sequence[str] = (),
               dry: bool = False):
    """Makes the folders.

    Args:
      out: the folder for results.
      work: an empty folder for logs, workdirs and compiled programs.
      budget_s: seconds for everything.
      only: the steps to run; empty for all.
      dry: runs on CPUs, with small sizes.
    """
    self.out = out
    self.work = work
    self.only = tuple(only)
    self.dry = dry
    self._start = time.monotonic()
    self._budget_s = budget_s
    for folder in (out, work / 'logs', work / 'runs'):
      folder.mkdir(parents=True, exist_ok=True)

  def seconds(self) -> float:
    """Returns the seconds since the start."""
    return time.monotonic() - self._start

  def seconds_left(self) -> float:
    """Returns the seconds of the budget that are left."""
    return self._budget_s - self.seconds()

  def wants(self, step: str) -> bool:
    """Returns whether a step was chosen."""
    return not self.only or step in self.only

  def has_time(self, estimate_s: float) -> bool:
    """Returns whether a step of this length fits into the rest of the budget."""
    return self.seconds_left() >= estimate_s

  def put(self, record: Mapping[str, Any]) -> None:
    """Adds a record to results.jsonl, and prints its beginning."""
    timed = dict(record) | {'at': round(self.seconds(), 1)}
    with (self.out / 'results.jsonl').open('a') as file:
      file.write(json.dumps(timed) + '\n')
    tail = timed.pop('tail', '')
    print(json.dumps(timed)[:_SHOWN], flush=True)
    if tail:
      print('   ...', tail[-_SHOWN_TAIL:].replace('\n', '\n   '), flush=True)

  def start(self, command: Command) -> Process:
    """Starts a command."""
    environment = os.environ | {
        'PYTHONFAULTHANDLER': '1', 'PYTHONUNBUFFERED': '1', 'TF_CPP_MIN_LOG_LEVEL': '1',
        'JAX_TRACEBACK_FILTERING': 'off'} | command.variables
    folders = [str(ROOT), environment.get('PYTHONPATH', '')]
    environment['PYTHONPATH'] = os.pathsep.join(filter(None, folders))
    if self.dry:
      command = command._replace(limit_s=self._budget_s)  # limits are for GPUs
      # CPUs know neither the flags of GPUs nor autotuning, so one cache, the user's, is enough.
      environment['JAX_PLATFORMS'] = 'cpu'
      environment['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '')
    else:
      environment['XDG_CACHE_HOME'] = str(self.work / 'cache' / command.cache)
      environment.pop('JAX_COMPILATION_CACHE_DIR', None)
    log = self.work / 'logs' / f'{command.name}.log'
    return Process(command, log, environment, self.seconds_left)

  def run(self, step: str, estimate_s: float, commands: Iterable[Command]
          ) -> dict[str, dict[str, Any]]:
    """Runs the commands of a step at once, unless it was not chosen or does not fit the budget.

    Args:
      step: name of the step.
      estimate_s: seconds that it needs.
      commands: the commands.

    Returns:
      The records of commands by name; empty if the step did not run.
    """
    if not self.wants(step):
      return {}
    if not self.has_time(estimate_s):
      self.put(dict(step=step, ok=None,
                    skipped=f'{self.seconds_left():.0f} s left, needs {estimate_s}'))
      return {}
    running = [self.start(command) for command in commands]
    records = {}
    while running:
      time.sleep(0.1)
      for process in [process for process in running if process.has_ended()]:
        running.remove(process)
        records[process.name] = process.result()
        self.put(records[process.name])
    return records
