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
  """Returns in words which side the other waits for.

  Args:
    actor_wait_s: time that actors have waited in a period.
    learner_wait_s: time that the learner has waited in it.
    seconds: length of the period.
  """
  actor, learner = (min(100, 100 * wait / seconds) for wait in (actor_wait_s, learner_wait_s))
  if max(actor, learner) < 5:
    return 'none (neither side waits)'
  if min(actor, learner) > 20:  # with a lag of 0 each side waits while the other works
    return f'both take turns (acting {learner:.0f}% of the time, learning {actor:.0f}%)'
  if actor > learner:
    return f'learner (the actors wait {actor:.0f}% of the time)'
  return f'actors (the learner waits {learner:.0f}% of the time)'


def _duration(seconds: float) -> str:
  if seconds >= 86400:
    return f'{seconds / 86400:.1f} days'
  return time.strftime('%H:%M:%S', time.gmtime(max(seconds, 0)))


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
    self._shown = False  # whether the newest record was printed

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

  def compiling(self) -> None:
    """Says that programs are compiled until the first update is made."""
    if not self._live:  # the block says so itself
      self.note('compiling ...')

  def finish(self, line: str) -> None:
    """Shows the last update, and prints a line below it, the last of all."""
    if self._live:
      self._live.__exit__(None, None, None)
      self._live = None
    elif self._recent and not self._shown:
      self._console.print(self._line(), markup=False)
    self.note(line)

  def show(self, record: Record) -> None:
    """Takes in one update."""
    now = time.monotonic()
    self._recent.append((now, record))
    while len(self._recent) > 2 and now - self._recent[0][0] > 30:
      self._recent.popleft()  # rates are those of the last half minute
    self._shown = False
    if not self._live and (now - self._printed >= self._every_s
                           or record['steps'] >= self._total):
      self._printed = now
      self._shown = True
      self._console.print(self._line(), markup=False)

  def _rates(self) -> tuple[float | None, str]:
    """Returns valid steps a second, if enough was seen to say, and the bottleneck in words."""
    recent = list(self._recent)  # a copy, as the block is made by another thread
    (start, first), (end, last) = recent[0], recent[-1]
    if end - start < 1.0:
      # The first update has the time of compiling in it.
      return (last['sps'] if len(recent) > 1 else None), ''
    sps = (last['steps'] - first['steps']) / (end - start)
    if not self._split:
      return sps, 'one program (rollout and learning take turns)'
    waits = [sum(record[side] for _, record in recent[1:])
             for side in ('actor_wait_s', 'learner_wait_s')]
    return sps, bottleneck(*waits, end - start)

  def _numbers(self) -> dict[str, str]:
    record, (sps, words) = self._recent[-1][1], self._rates()
    numbers = {
        'steps': f'{record["steps"]:,} of {self._total:,}',
        'frames': f'{record["frames"]:,}',
    }
    if sps is not None:
      numbers['speed'] = f'{sps:,.0f} SPS'
      numbers['left'] = _duration((self._total - record['steps']) / max(sps, 1e-9))
    numbers['return'] = '-' if record['episode_return'] is None else (
        f'{record["episode_return"]:.2f} (length {record["episode_length"]:.0f}, '
        f'{record["episodes"]} episodes)')
    numbers['delays'] = (f'rollouts {record["cgd"]:.1f} (CGD), gradients {record["gud"]:.1f} (GUD) '
                         'gradient steps old')
    if self._split:
      numbers['waits'] = (f'actor {record["actor_wait_s"]:.3f} s, learner '
                          f'{record["learner_wait_s"]:.3f} s an update')
    if 'replay_size' in record:
      numbers['replay'] = (
          f'{record["replay_size"]:,.0f} transitions, {record["samples_per_s"]:,.0f} drawn a '
          f'second, {record["replay_ratio"]:.2f} for each added, '
          f'{record["sampled_age"]:,.0f} gradient steps old')
    return numbers | ({'bottleneck': words} if words else {})

  def _line(self) -> str:
    return '  '.join(f'{name} {value}' for name, value in self._numbers().items())

  def _block(self) -> Table:
    table = Table.grid(padding=(0, 2))
    table.title = self._title
    if not self._recent:
      table.add_row('compiling ...')
      return table
    steps = min(self._recent[-1][1]['steps'], self._total)
    table.add_row('progress', ProgressBar(total=self._total, completed=steps, width=50))
    for name, value in self._numbers().items():
      table.add_row(name, value)
    return table
