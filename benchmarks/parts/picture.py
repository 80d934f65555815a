"""Shows the parts of a round (`rounds.py`) as a table and as a picture."""

from __future__ import annotations

import collections
import importlib.util
import itertools

import numpy as np

from benchmarks.parts.rounds import PARTS, Round


def can_draw() -> bool:
  """Returns whether matplotlib is installed."""
  try:
    return importlib.util.find_spec('matplotlib') is not None
  except ValueError:  # `sys.modules` has None for it, which blocks its import
    return False


def table(measured: Round) -> list[str]:
  """Returns lines with the milliseconds of each part; the column of each worker adds up."""
  names = list(measured.lanes)
  lines = [f'{"a round, ms":18}' + ''.join(f'{name:>12}' for name in names)]
  for part in PARTS:
    if any(part in measured.lanes[name] for name in names):
      lines.append(f'{part:18}' + ''.join(
          f'{1e3 * measured.lanes[name].get(part, 0.0):12.2f}' for name in names))
  lines.append(f'{"all":18}' + ''.join(
      f'{1e3 * sum(measured.lanes[name].values()):12.2f}' for name in names))
  lines += [f'memory of {name}: {sizes["arguments_and_results"] / 1e6:,.1f} MB of arguments and '
            f'results, {sizes["temporaries"] / 1e6:,.1f} MB in between'
            for name, sizes in measured.memory.items()]
  return [*lines, f'traced {1e3 * measured.traced_seconds:.2f} ms a round, '
          f'untraced {1e3 * measured.seconds:.2f} ms: the parts are scaled to the untraced time']


def draw(measured: Round, path: str, bins: int = 1500) -> None:
  """Draws the last round or two: workers one above the other, EnvPool's threads below."""
  # Imported here because only drawing needs it.
  import matplotlib
  matplotlib.use('agg')
  from matplotlib import pyplot

  # The last two rounds lie between the last three ends.
  start = measured.ends[-min(3, len(measured.ends))]
  end = measured.ends[-1]
  figure, (top, below) = pyplot.subplots(
      2, 1, sharex=True, figsize=(13, 1.2 + 0.6 * len(measured.lanes) + 1.5), layout='constrained',
      height_ratios=[len(measured.lanes), 1.5])
  colours = dict(zip(PARTS, pyplot.get_cmap('tab10').colors, strict=True))
  width = (end - start) / bins
  in_legend = set()
  for y, name in enumerate(measured.lanes):
    # A bin gets the colour of the part that took most of its time. Drawing each of many thousands
    # of operations would take minutes.
    longest: list[collections.Counter] = [collections.Counter() for _ in range(bins)]
    for a, b, part in measured.spans[name]:
      for k in range(max(0, int((a - start) / width)), min(bins, int((b - start) / width) + 1)):
        longest[k][part] += min(b, start + (k + 1) * width) - max(a, start + k * width)
    shown = [x.most_common(1)[0][0] if x else None for x in longest]
    bars = collections.defaultdict(list)  # of each part: where neighbouring bins begin and end
    for part, neighbours in itertools.groupby(range(bins), lambda k, shown=shown: shown[k]):
      first, *rest = neighbours
      bars[part].append((1e3 * first * width, 1e3 * (len(rest) + 1) * width))
    bars.pop(None, None)
    for part, places in bars.items():
      top.broken_barh(places, (y - 0.4, 0.8), color=colours[part], linewidth=0,
                      label=None if part in in_legend else part)
      in_legend.add(part)
  top.set_yticks(range(len(measured.lanes)), list(measured.lanes))
  top.legend(loc='lower left', bbox_to_anchor=(0, 1), ncols=len(PARTS), frameon=False)
  for at in measured.ends:
    if start <= at <= end:
      top.axvline(1e3 * (at - start), color='black', linewidth=0.8)
  inside = [(1e3 * (at - start), cores) for at, cores in measured.env_threads if start <= at <= end]
  if inside:
    # Means of neighbours, as the kernel counts in ticks.
    window = max(1, len(inside) // 150)
    at, cores = (np.convolve(x, np.ones(window) / window, 'valid')
                 for x in zip(*inside, strict=True))
    below.fill_between(at, cores)
  below.set(xlabel='ms', ylabel='cores kept busy\nby EnvPool', xlim=(0, 1e3 * (end - start)))
  figure.savefig(path, dpi=110)
