"""Shows the members of a sweep: a table in a terminal, otherwise a line when something happens."""

from __future__ import annotations

import enum
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from podracer_jit.options import printable, shorten
from podracer_jit.runtime.output import LastingStream
from podracer_jit.sweep.fitting import Size
from podracer_jit.sweep.members import Member
from podracer_jit.workdir import journal

_EVERY_S = 1.0
_TAIL = 2**16  # bytes at the end of a file that are read
_MOST_ROWS = 30  # of the table


class State(enum.Enum):
  """What became of a member."""

  WAITING = 'waiting'
  RUNNING = 'running'
  STOPPED = 'stopped'
  PRUNED = 'pruned'
  FAILED = 'failed'
  FINISHED = 'finished'


class Progress(NamedTuple):
  """How far a member is."""

  steps: int = 0  # of each seed
  sps: float = 0.0  # of all seeds
  episode_return: float | None = None  # mean of its seeds


def progress_of(member: Member, out: Path) -> Progress:
  """Returns how far a member is, by the newest lines of its metrics."""
  newest = [record for record in map(newest_metrics, member.workdirs(out)) if record]
  if not newest:
    return Progress()
  returns = [record['episode_return'] for record in newest
             if record.get('episode_return') is not None]
  return Progress(min(int(record.get('steps', 0)) for record in newest),
                  sum(float(record.get('sps') or 0) for record in newest),
                  sum(returns) / len(returns) if returns else None)


def newest_metrics(workdir: Path) -> dict[str, Any] | None:
  """Returns the newest whole line of a run's metrics; None without one."""
  path = workdir / journal.METRICS
  try:
    with path.open('rb') as file:
      file.seek(max(0, path.stat().st_size - _TAIL))
      lines = file.read().split(b'\n')
  except OSError:
    return None
  for line in reversed(lines[:-1]):
    try:
      record = json.loads(line)
    except ValueError:
      continue
    if isinstance(record, dict):
      return record
  return None


class Board:
  """Shows members and their states."""

  def __init__(self, out: Path, sizes: Mapping[str, Size]):
    """Shows nothing yet.

    Args:
      out: the folder of the sweep.
      sizes: of each member, by its name.
    """
    self._out = out
    self._sizes = sizes
    self._members: dict[str, Member] = {}
    self._states: dict[str, State] = {}
    self._progress: dict[str, Progress] = {}
    self._shown_s = 0.0
    self._console = Console(file=LastingStream(sys.stdout), soft_wrap=True, highlight=False)
    self._live: Live | None = None
    if self._console.is_terminal:
      self._live = Live(Text(''), console=self._console, auto_refresh=False)
      self._live.start()

  def tell(self, member: Member, state: State, note: str = '') -> None:
    """Changes the state of a member, which need not be known.

    Args:
      member: the member.
      state: its new state.
      note: more about it.
    """
    self._members[member.name] = member
    self._states[member.name] = state
    self._progress[member.name] = progress_of(member, self._out)
    if not self._live and state is not State.WAITING:
      now = self._progress[member.name]
      result = '' if now.episode_return is None or state is State.RUNNING else (
          f', return {now.episode_return:.2f} after {now.steps:,} steps')
      self.say(f'{member.name}: {state.value}{result}{": " if note else ""}{note}')
    self.show(at_once=True)

  def say(self, line: str) -> None:
    """Prints a line, above the table."""
    self._console.print(printable(line), markup=False)

  def show(self, at_once: bool = False) -> None:
    """Draws the table anew, if that is due."""
    if not self._live or not at_once and time.monotonic() - self._shown_s < _EVERY_S:
      return
    self._shown_s = time.monotonic()
    for member in self._members.values():
      if self._states[member.name] is State.RUNNING:
        self._progress[member.name] = progress_of(member, self._out)
    self._live.update(self._table(), refresh=True)

  def count(self, state: State) -> int:
    """Returns the number of members in a state."""
    return sum(each is state for each in self._states.values())

  def close(self) -> None:
    """Draws the last table, which stays."""
    if self._live:
      self.show(at_once=True)
      self._live.stop()
      self._live = None

  def _table(self) -> Table:
    table = Table(title=self._title(), title_justify='left', box=None, padding=(0, 2, 0, 0))
    for name in ('member', 'state'):
      table.add_column(name, overflow='fold')
    for name in ('steps', 'SPS', 'return', 'left'):
      table.add_column(name, justify='right')
    # What is under way comes first, then what failed.
    order = [State.RUNNING, State.FAILED, State.STOPPED, State.WAITING, State.PRUNED,
             State.FINISHED]
    members = sorted(self._members.values(),
                     key=lambda member: order.index(self._states[member.name]))
    for member in members[:_MOST_ROWS]:
      table.add_row(*map(Text, self._row(member)))
    if len(members) > _MOST_ROWS:
      table.add_row(Text(f'and {len(members) - _MOST_ROWS} more'))
    return table

  def _row(self, member: Member) -> Sequence[str]:
    state = self._states[member.name]
    now = self._progress.get(member.name, Progress())
    total = self._sizes[member.name].steps
    is_running = state is State.RUNNING
    left = (total - now.steps) * len(member.seeds)
    return (printable(shorten(member.name, 100)), state.value,
            f'{min(now.steps, total):,} of {total:,}',
            f'{now.sps:,.0f}' if is_running and now.sps else '',
            '' if now.episode_return is None else f'{now.episode_return:.2f}',
            _duration(left / now.sps) if is_running and now.sps else '')

  def _title(self) -> str:
    """Returns how many members are in each state, and the time that the sweep has left."""
    counts = ', '.join(f'{self.count(state)} {state.value}' for state in State
                       if self.count(state))
    left = 0
    sps = 0.0
    for member in self._members.values():
      state = self._states[member.name]
      now = self._progress.get(member.name, Progress())
      if state in (State.RUNNING, State.WAITING):
        left += max(0, self._sizes[member.name].steps - now.steps) * len(member.seeds)
      sps += now.sps if state is State.RUNNING else 0
    ends = f'; {sps:,.0f} SPS, {_duration(left / sps)} left' if sps else ''
    return f'{len(self._members)} members: {counts}{ends}'


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(int(max(seconds, 0)), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours:02}:{minutes:02}:{seconds:02}'
