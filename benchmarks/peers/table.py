"""The table of the measurements of a folder, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.tasks import CASES, OURS

HEADS = ('training', 'cores', 'program', 'steps a second', 'ours to it', 'cores busy', 'peak MB',
         'runs')


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the table: medians, with the lowest and the highest.

  A ratio is the median of the runs' own ratios, because the programs of a run follow each other.

  Args:
    results: records of measurements; trials and failures are left out.
  """
  groups: dict[tuple[str, int], dict[str, dict[int, Mapping[str, Any]]]] = {}
  for result in results:
    if result['run'] and 'sps' in result:
      programs = groups.setdefault((result['case'], result['cores']), {})
      programs.setdefault(result['program'], {})[result['run']] = result
  order = list(CASES)
  lines = [_row(HEADS), _row(['---'] * len(HEADS))]
  for (case, cores), programs in sorted(groups.items(),
                                        key=lambda item: (order.index(item[0][0]), -item[0][1])):
    names = sorted(programs, key=lambda name: (name != OURS, name))
    for name in names:
      runs = programs[name]
      ours = programs.get(OURS, {})
      ratios = [ours[run]['sps'] / runs[run]['sps'] for run in runs if run in ours]
      threads = next(iter(runs.values())).get('threads')
      title = name + (f' ({threads} thread{"s" if threads > 1 else ""})' if threads else '')
      lines.append(_row([
          CASES[case].title, cores, title, _spread([x['sps'] for x in runs.values()], ',.0f'),
          '' if name == OURS or not ratios else _spread(ratios, '.2f'),
          f'{statistics.median(x["cores_busy"] for x in runs.values()):.2f}',
          f'{statistics.median(x["peak_mb"] for x in runs.values()):,.0f}', len(runs)]))
  return lines


def failures(results: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns a line for each program of a case that has failed and was not measured since."""
  last = {}
  for result in results:
    last[result['case'], result['cores'], result['program'], result['run']] = result
  lines = [f'{x["case"]}, {x["cores"]} cores, {x["program"]}: {x["error"]}'
           for x in last.values() if 'error' in x]
  return list(dict.fromkeys(lines))


def _spread(values: Sequence[float], form: str) -> str:
  """Returns the median, and the lowest and the highest if there are several."""
  middle = format(statistics.median(values), form)
  if len(values) == 1:
    return middle
  return f'{middle} ({min(values):{form}} to {max(values):{form}})'


def _row(cells: Sequence[Any]) -> str:
  return '| ' + ' | '.join(map(str, cells)) + ' |'
