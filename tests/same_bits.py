"""Prints the table of docs/exactness.md, "What was checked where": python -m tests.same_bits

Each row is a test with the mark same_bits(what_varies, of_what).
"""

import contextlib
import io
import sys

import pytest


class _Collector:
  """Keeps the tests that pytest collects."""

  def __init__(self):
    self.items = []

  def pytest_collection_modifyitems(self, items):
    self.items = list(items)


def table() -> list[str]:
  """Returns the lines of the table."""
  collector = _Collector()
  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    if pytest.main(['--collect-only', '-q', 'tests'], plugins=[collector]):
      raise RuntimeError(output.getvalue())
  rows = {}
  for item in collector.items:
    mark = item.get_closest_marker('same_bits')
    if mark:
      as_shipped = any(item.get_closest_marker(name) for name in ('as_shipped', 'implementation'))
      name = f'{item.path.stem}.{item.originalname}'
      rows[name] = (*mark.args, 'yes' if as_shipped else '', f'`{name}`')
  head = ('what varies', 'of what', 'compiled as shipped', 'test')
  lines = [head, ('---',) * len(head), *sorted(rows.values())]
  return [f'| {" | ".join(line)} |' for line in lines]


if __name__ == '__main__':
  print('\n'.join(table()))
  sys.exit(0)
