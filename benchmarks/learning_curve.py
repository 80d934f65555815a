"""Draws the mean episode return of several runs over their steps, as an SVG.

.venv/bin/python -m benchmarks.learning_curve --out=docs/images/pong_laptop runs/pong_seed*

Reads metrics.jsonl of each workdir (`episode_return` is the mean of the last 100 episodes) and
writes two files: OUT.csv with the points, and OUT.svg. Without workdirs it draws OUT.csv again.
--title, --low and --high set the text above the picture and the range of returns.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

POINTS = 120  # most points of a curve
COLOURS = ('#1f77b4', '#d95f02', '#2ca02c', '#9467bd', '#8c564b')
WIDTH = 720
HEIGHT = 320
# Edges of the plot.
LEFT = 60
RIGHT = 680
TOP = 40
BOTTOM = 270


class Point(NamedTuple):
  """A point of a curve."""

  steps: int  # environment steps, without invalid rows
  seconds: float  # since the start of training
  episode_return: float


Curves = Mapping[str, Sequence[Point]]  # by the name of the workdir


def read_workdir(workdir: Path) -> list[Point]:
  """Returns the curve of a run, with POINTS points at most."""
  records = [json.loads(line) for line in (workdir / 'metrics.jsonl').open()]
  points = [Point(r['steps'], round(r['elapsed_s'], 1), round(r['episode_return'], 3))
            for r in records if r['episode_return'] is not None]
  every = -(-len(points) // POINTS)
  # The points are counted from the end, so that the last one is included.
  return points[::-1][::every][::-1]


def write_csv(curves: Curves, path: Path) -> None:
  """Writes the points of all curves."""
  with path.open('w', newline='') as file:
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow(('run', *Point._fields))
    writer.writerows((name, *point) for name, points in curves.items() for point in points)


def read_csv(path: Path) -> dict[str, list[Point]]:
  """Returns the curves that `write_csv` wrote."""
  curves: dict[str, list[Point]] = {}
  for row in csv.DictReader(path.open()):
    curves.setdefault(row['run'], []).append(
        Point(int(row['steps']), float(row['seconds']), float(row['episode_return'])))
  return curves


def ticks(low: float, high: float) -> list[float]:
  """Returns about five round numbers from low to high: multiples of 1, 2 or 5 times 10^n."""
  power = 10.0 ** math.floor(math.log10((high - low) / 4))
  step = max(power * factor for factor in (1, 2, 5) if power * factor <= (high - low) / 4)
  return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw(curves: Curves, title: str, low: float, high: float) -> str:
  """Returns a picture of the curves as SVG.

  Args:
    curves: the curves to draw.
    title: text above the picture.
    low: return at the lower edge.
    high: return at the upper edge.
  """
  most = max(points[-1].steps for points in curves.values())

  def x(steps: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * steps / most, 1)

  def y(value: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

  lines = [
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
      f'height="{HEIGHT}" font-family="sans-serif" font-size="12">',
      f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
      f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>']
  for value in ticks(low, high):
    lines += [f'<line x1="{LEFT}" y1="{y(value)}" x2="{RIGHT}" y2="{y(value)}" stroke="#ddd"/>',
              f'<text x="{LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:g}</text>']
  for steps in ticks(0, most):
    lines.append(f'<text x="{x(steps)}" y="{BOTTOM + 18}" text-anchor="middle">'
                 f'{steps:,.0f}</text>')
  lines.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 38}" text-anchor="middle">'
               'environment steps</text>')

  for i, (name, points) in enumerate(curves.items()):
    colour = COLOURS[i % len(COLOURS)]
    path = ' '.join(f'{x(p.steps)},{y(min(max(p.episode_return, low), high))}' for p in points)
    lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    lines.append(f'<text x="{LEFT + 12}" y="{TOP + 16 + 18 * i}" fill="{colour}">'
                 f'{escape(name)}</text>')
  return '\n'.join([*lines, '</svg>', ''])


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('workdirs', nargs='*', type=Path)
  parser.add_argument('--out', required=True, type=Path)
  parser.add_argument('--title', default='Mean return of the last 100 episodes')
  parser.add_argument('--low', type=float, default=-21.0)
  parser.add_argument('--high', type=float, default=21.0)
  args = parser.parse_args(argv[1:])
  table = args.out.with_suffix('.csv')
  if args.workdirs:
    write_csv({path.name: read_workdir(path) for path in args.workdirs}, table)
  args.out.with_suffix('.svg').write_text(
      draw(read_csv(table), args.title, args.low, args.high))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
