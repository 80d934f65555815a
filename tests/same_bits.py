"""Prints the table of docs/exactness.md, "What was checked where": python -m tests.same_bits

A row is a test that is marked same_bits(what_varies, of_what).
"""

import contextlib
import io
import sys

import pytest


class _Collected:
  """What pytest finds."""

  def __init__(self):
    self.items = []

  def pytest_collection_modifyitems(self, items):
    self.items = list(items)


def table() -> list[str]:
  """Returns the lines of the table."""
  found, silence = _Collected(), io.StringIO()
  with contextlib.redirect_stdout(silence):
    if pytest.main(['--collect-only', '-q', 'tests'], plugins=[found]):
      raise RuntimeError(silence.getvalue())
  rows = {}
  for item in found.items:
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
