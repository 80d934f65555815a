"""Shows the progress of a training: a live block in a terminal, otherwise plain lines."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from podracer_jit.experiment.schema import Experiment
from podracer_jit.options import printable
from podracer_jit.runtime.output import LastingStream
from podracer_jit.training.sinks import Record, Sink


def bottleneck(actor_wait_s: float, learner_wait_s: float, seconds: float) -> str:
  """Returns in words which side limits the speed, actors or learner.

  Args:
    actor_wait_s: seconds that actors waited in a period.
    learner_wait_s: seconds that the learner waited in the period.
    seconds: length of the period.
  """
  actor, learner = (min(100, 100 * wait / seconds) for wait in (actor_wait_s, learner_wait_s))
  if max(actor, learner) < 5:
    return 'none (neither side waits)'
  if min(actor, learner) > 20:
    # With lag 0, each side waits while the other works.
    return f'both take turns (acting {learner:.0f}% of the time, learning {actor:.0f}%)'
  if actor > learner:
    return f'learner (the actors wait {actor:.0f}% of the time)'
  return f'actors (the learner waits {learner:.0f}% of the time)'


def waited(records: Sequence[tuple[float, Record]], side: str) -> float:
  """Returns the seconds that a side waited since the first record.

  A wait counts in the update in which it ends. So the second record may contain a wait that began
  long before the first, while programs were compiled. Up to each record, a side cannot have waited
  longer than the time since the first record; the excess is subtracted.

  Args:
    records: (time in seconds, record) of updates, in order.
    side: 'actor_wait_s' or 'learner_wait_s'.
  """
  start_s = records[0][0]
  total = 0.0
  excess = 0.0
  for time_s, record in records[1:]:
    total += record[side]
    excess = max(excess, total - (time_s - start_s))
  return total - excess


def _duration(seconds: float) -> str:
  if seconds >= 86400:
    return f'{seconds / 86400:.1f} days'
  return time.strftime('%H:%M:%S', time.gmtime(max(seconds, 0)))


class Progress(Sink):
  """Shows the newest record."""

  def __init__(self, experiment: Experiment, title: str, console: Console | None = None,
               quiet: bool = False):
    """Creates a display; a block is shown from now on.

    Args:
      experiment: has the number of steps and the interval of lines.
      title: title of the block.
      console: to print to; default: stdout.
      quiet: shows nothing at all, as in processes other than 0.
    """
    self._total = experiment.total_steps
    self._every_s = experiment.log.every_seconds
    self._title = Text(printable(title))  # `Text`, as a task's name may have Rich's markup
    self._unit = experiment.items.unit if experiment.replay else ''
    self._split = not experiment.scheme.graph.one_program
    self._environments = ''
    if experiment.spec.calls_python:
      how = 'results repeat' if experiment.deterministic else 'results do not repeat'
      self._environments = f'Python steps them; {how}'
    # Training must continue if its terminal is closed.
    self._console = console or Console(file=LastingStream(sys.stdout), highlight=False,
                                       soft_wrap=True, quiet=quiet)
    self._recent: collections.deque[tuple[float, Record]] = collections.deque()
    self._live: Live | None = None
    self._printed_s = time.monotonic()  # when the last line was printed
    # While environments are made again: (time, steps done, all steps) at the beginning, after the
    # first call, and now.
    self._replay: list[tuple[float, int, int]] = []
    self._shown = False  # whether the newest record was printed
    if self._console.is_terminal:
      # Asks for the block four times a second, however short an update is.
      self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._block)
      self._live.start()

  def note(self, line: str) -> None:
    """Prints a line above the block."""
    self._console.print(printable(line), markup=False)

  def replaying(self, done: int, total: int) -> None:
    """Shows how far environments are that are made again, and how long it will take."""
    now_s = time.monotonic()
    if not done:
      self._replay = [(now_s, done, total)]
      return
    # The second point begins the rate: before it, a program is compiled.
    self._replay = [*self._replay[:2], (now_s, done, total)]
    began_s, rate_began_s = (point[0] for point in self._replay[:2])
    if done == total:
      self.note(f'replayed {total:,} steps in {now_s - began_s:.0f} s')
      self._replay = []
    elif not self._live and now_s - rate_began_s >= 1 and (
        self._printed_s < rate_began_s or now_s - self._printed_s >= self._every_s):
      self._printed_s = now_s
      self.note(self._replay_line(self._replay))

  @staticmethod
  def _replay_line(replay: Sequence[tuple[float, int, int]]) -> str:
    """Returns how far environments are that are made again."""
    (began_s, first, _), (now_s, done, total) = replay[:2][-1], replay[-1]
    if done == first:
      return f'replaying {total:,} steps'
    left_s = (now_s - began_s) / (done - first) * (total - done)
    return f'replaying {total:,} steps, about {left_s:.0f} s'

  def compiling(self) -> None:
    """Prints that the programs are being compiled; the block shows this until the first update."""
    if not self._live:
      self.note('compiling ...')

  def finish(self, line: str) -> None:
    """Shows the last update, and prints the last line below it."""
    if self._live:
      self.close()
    elif self._recent and not self._shown:
      self._console.print(self._line(), markup=False)
    self.note(line)

  def close(self) -> None:
    """Ends the block."""
    if self._live:
      self._live.stop()
      self._live = None

  def update(self, record: Record, receipt: Record) -> None:
    """Adds a report; prints a line every `log.every_seconds` if there is no block."""
    now_s = time.monotonic()
    self._recent.append((now_s, record))
    # Rates are over the last half minute.
    while len(self._recent) > 2 and now_s - self._recent[0][0] > 30:
      self._recent.popleft()
    self._shown = False
    if not self._live and (now_s - self._printed_s >= self._every_s
                           or record['steps'] >= self._total):
      self._printed_s = now_s
      self._shown = True
      self._console.print(self._line(), markup=False)

  def _rates(self) -> tuple[float | None, str]:
    """Returns valid steps a second (None if not yet known), and the bottleneck in words."""
    # A copy, since the block is drawn by another thread.
    recent = list(self._recent)
    start, first = recent[0]
    end, last = recent[-1]
    if end - start < 1.0:
      # The time of the first update includes compiling.
      return (last['sps'] if len(recent) > 1 else None), ''
    sps = (last['steps'] - first['steps']) / (end - start)
    if not self._split:
      return sps, 'one program (rollout and learning take turns)'
    waits = [waited(recent, side) for side in ('actor_wait_s', 'learner_wait_s')]
    return sps, bottleneck(*waits, end - start)

  def _numbers(self) -> dict[str, str]:
    """Returns the numbers of the newest record as text, by their labels."""
    _, record = self._recent[-1]
    sps, limit = self._rates()
    numbers = {
        'steps': f'{record["steps"]:,} of {self._total:,}',
        'frames': f'{record["frames"]:,}',
    }
    if 'wall_s' in record:
      numbers['elapsed'] = _duration(record['wall_s'])
    if sps is not None:
      numbers['speed'] = f'{sps:,.0f} SPS'
      numbers['left'] = _duration((self._total - record['steps']) / max(sps, 1e-9))
    numbers['return'] = '-' if record['episode_return'] is None else (
        f'{record["episode_return"]:.2f} (length {record["episode_length"]:.0f}, '
        f'{record["episodes"]} episodes)')
    losses = [f'{name.removesuffix("_loss")} {value:.3g}' for name, value in record.items()
              if name.endswith('_loss')]
    if 'loss' in record:
      losses.insert(0, f'{record["loss"]:.3g}')
    if losses:
      numbers['loss'] = ', '.join(losses)
    if 'approx_kl' in record:
      numbers['KL'] = f'{record["approx_kl"]:.2g}'
    numbers['delays'] = (f'{record["cgd"]:.1f} gradient steps from collection to gradient (CGD), '
                         f'{record["gud"]:.1f} from gradient to update (GUD)')
    if self._split:
      numbers['waits'] = (f'actor {record["actor_wait_s"]:.3f} s, learner '
                          f'{record["learner_wait_s"]:.3f} s an update')
    if 'actors_alive' in record:
      numbers['cluster'] = (
          f'{record["actors_alive"]} processes, {record["actors_pending"]} pending, '
          f'{record["actor_restarts"]} restarts; {record["cluster_mb_per_s"]:,.1f} MB/s, '
          f'{record["cluster_get_ms"]:.1f} ms to get each')
    if 'replay_size' in record:
      numbers['replay'] = (
          f'{record["replay_size"]:,.0f} {self._unit}s, {record["samples_per_s"]:,.0f} drawn a '
          f'second, {record["replay_ratio"]:.2f} for each added, '
          f'{record["sampled_age"]:,.0f} gradient steps old')
    if limit:
      numbers['bottleneck'] = limit
    if 'warning' in record:
      numbers['warning'] = record['warning']
    return numbers

  def _line(self) -> str:
    return '  '.join(f'{name} {value}' for name, value in self._numbers().items())

  def _block(self) -> Table:
    table = Table.grid(padding=(0, 2))
    table.title = self._title
    if self._environments:
      table.add_row('environments', self._environments)
    replay = self._replay  # another thread may end it meanwhile
    if replay:
      _, done, total = replay[-1]
      table.add_row('environments', ProgressBar(total=total, completed=done, width=50))
      table.add_row('', self._replay_line(replay))
      return table
    if not self._recent:
      table.add_row('compiling ...')
      return table
    steps = min(self._recent[-1][1]['steps'], self._total)
    table.add_row('progress', ProgressBar(total=self._total, completed=steps, width=50))
    for name, value in self._numbers().items():
      table.add_row(name, value)
    return table
