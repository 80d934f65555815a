"""What a person sees while it trains: one live block, or plain lines where there is no terminal."""

from __future__ import annotations

import collections
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from podracer_jit.run.experiment import Experiment
from podracer_jit.run.metrics import Record
from podracer_jit.run.output import LastingStream


def bottleneck(actor_wait_s: float, learner_wait_s: float, seconds: float) -> str:
  """Which side the other waits for, in words."""
  actor, learner = (min(100, 100 * wait / seconds) for wait in (actor_wait_s, learner_wait_s))
  if max(actor, learner) < 5:
    return 'balanced: neither side waits'
  if min(actor, learner) > 20:  # lag 0: each waits while the other works
    return f'they take turns: acting {learner:.0f}% of the time, learning {actor:.0f}%'
  if actor > learner:
    return f'learner is the bottleneck: actors wait {actor:.0f}% of the time'
  return f'actors are the bottleneck: the learner waits {learner:.0f}% of the time'


class Progress:
  """Shows the newest record; a context manager."""

  def __init__(self, experiment: Experiment, title: str, console: Console | None = None,
               quiet: bool = False):
    self._total = experiment.total_steps
    self._every_s = experiment.log.every_seconds
    self._title = title
    self._split = not experiment.scheme.graph.one_program
    # Training goes on when nobody can read its output any more.
    self._console = console or Console(file=LastingStream(sys.stdout), highlight=False,
                                       soft_wrap=True, quiet=quiet)
    self._recent: collections.deque[tuple[float, Record]] = collections.deque()
    self._live: Live | None = None
    self._printed = time.monotonic()

  def __enter__(self) -> Progress:
    if self._console.is_terminal:
      # Asks for the block four times a second, however short an update is.
      self._live = Live(console=self._console, refresh_per_second=4,
                        get_renderable=self._block).__enter__()
    return self

  def __exit__(self, *exc: Any) -> None:
    if self._live:
      self._live.__exit__(*exc)

  def note(self, line: str) -> None:
    """Prints a line above the block."""
    self._console.print(line, markup=False)

  def show(self, record: Record) -> None:
    """Takes in one update."""
    now = time.monotonic()
    self._recent.append((now, record))
    while len(self._recent) > 2 and now - self._recent[0][0] > 30:
      self._recent.popleft()  # rates are those of the last half minute
    if not self._live and (now - self._printed >= self._every_s
                           or record['steps'] >= self._total):
      self._printed = now
      self._console.print(self._line(), markup=False)

  def _rates(self) -> tuple[float, str]:
    """Valid steps a second, and the bottleneck in words."""
    recent = list(self._recent)  # as it is now: the block is made by another thread
    (start, first), (end, last) = recent[0], recent[-1]
    if end - start < 1.0:  # too short to say anything of
      return last['sps'], ''
    sps = (last['steps'] - first['steps']) / (end - start)
    if not self._split:
      return sps, 'one program: rollout and learning take turns'
    waits = [sum(record[side] for _, record in recent[1:])
             for side in ('actor_wait_s', 'learner_wait_s')]
    return sps, bottleneck(*waits, end - start)

  def _numbers(self) -> dict[str, str]:
    record, (sps, words) = self._recent[-1][1], self._rates()
    eta = (self._total - record['steps']) / max(sps, 1e-9)
    numbers = {
        'steps': f'{record["steps"]:,} of {self._total:,}',
        'frames': f'{record["frames"]:,}',
        'speed': f'{sps:,.0f} SPS',
        'left': time.strftime('%H:%M:%S', time.gmtime(max(eta, 0))) if eta < 86400
                else f'{eta / 86400:.1f} days',
        'return': '-' if record['episode_return'] is None else
                  f'{record["episode_return"]:.2f} (length {record["episode_length"]:.0f}, '
                  f'{record["episodes"]} episodes)',
    }
    numbers['delays'] = f'CGD {record["cgd"]:.1f}, GUD {record["gud"]:.1f} gradient steps'
    if self._split:
      numbers['waits'] = (f'actor {record["actor_wait_s"]:.3f} s, learner '
                          f'{record["learner_wait_s"]:.3f} s an update')
    if 'replay_size' in record:
      numbers['replay'] = (
          f'{record["replay_size"]:,.0f} transitions, {record["samples_per_s"]:,.0f} drawn a '
          f'second, {record["replay_ratio"]:.2f} for each added, '
          f'{record["sampled_age"]:,.0f} gradient steps old')
    return numbers | ({'bound by': words} if words else {})

  def _line(self) -> str:
    return '  '.join(f'{name} {value}' for name, value in self._numbers().items())

  def _block(self) -> Table:
    table = Table.grid(padding=(0, 2))
    table.title = self._title
    if not self._recent:
      return table
    steps = min(self._recent[-1][1]['steps'], self._total)
    table.add_row('progress', ProgressBar(total=self._total, completed=steps, width=50))
    for name, value in self._numbers().items():
      table.add_row(name, value)
    return table
