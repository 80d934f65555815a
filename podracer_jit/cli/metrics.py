"""Lists all metrics: what each means, its unit, what is unusual, and both of its names.

  podracer_jit metrics           all of them
  podracer_jit metrics losses    those with this in one of their names

Each has its name in metrics.jsonl (or evaluations.jsonl) and, if it is shown as a curve, its name
in TensorBoard and in trackers. Terms that an algorithm of your own adds are losses/NAME.

Exit code: 0, or 2 if nothing matches.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from podracer_jit.cli import verb
from podracer_jit.errors import Refused
from podracer_jit.metrics import EVALUATIONS, UPDATES, Metric

WIDTH = 100
FILES = {'metrics.jsonl': UPDATES, 'evaluations.jsonl': EVALUATIONS}


@verb
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  if set(argv[1:]) & {'-h', '--help'}:
    print(__doc__)
    return 0
  if len(argv) > 2 or any(arg.startswith('-') for arg in argv[1:]):
    raise Refused('one word is enough: podracer_jit metrics losses')
  lines = [line for file, metrics in FILES.items() for line in table(file, metrics, argv[1:])]
  if not lines:
    raise Refused(f'{argv[1]}: no metric has this in its name')
  print('\n'.join(lines))
  return 0


def table(file: str, metrics: Mapping[str, Metric], words: Sequence[str] = ()) -> Iterator[str]:
  """Yields the lines about the metrics of a file.

  Args:
    file: its name.
    metrics: by their names in the file.
    words: only metrics of which one name has all of these.
  """
  chosen = [metric for metric in metrics.values()
            if all(word.lower() in f'{metric.name} {metric.shown}'.lower() for word in words)]
  if chosen:
    yield f'{file}:'
  for metric in chosen:
    unit = f' [{metric.unit}]' if metric.unit else ''
    yield f'  {metric.name:20} {metric.shown or "-"}{unit}'
    yield from _wrapped(metric.meaning)
    if metric.unusual:
      yield from _wrapped(f'unusual: {metric.unusual}')


def _wrapped(text: str) -> list[str]:
  return textwrap.wrap(text, WIDTH, initial_indent=' ' * 6, subsequent_indent=' ' * 6,
                       break_on_hyphens=False)
