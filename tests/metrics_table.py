"""Prints the tables of docs/metrics.md: python -m tests.metrics_table

They come from `podracer_jit.metrics`; scripts/lint fails if the page is out of date.
"""

from __future__ import annotations

from collections.abc import Mapping

from podracer_jit.metrics import EVALUATIONS, UPDATES, Metric


def tables() -> tuple[str, str]:
  """Returns the table of updates and that of evaluations."""
  return _table(UPDATES), _table(EVALUATIONS)


def _table(metrics: Mapping[str, Metric]) -> str:
  rows = [('name', 'in TensorBoard', 'meaning', 'unit', 'unusual'), ('---',) * 5]
  rows += [(f'`{metric.name}`', f'`{metric.shown}`' if metric.shown else '', metric.meaning,
            metric.unit, metric.unusual) for metric in metrics.values()]
  return '\n'.join(f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in row)} |'
                   for row in rows)


if __name__ == '__main__':
  print('\n\n'.join(tables()))
