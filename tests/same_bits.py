"""Prints the tables of docs/exactness.md, "What was checked where": python -m tests.same_bits

The first has the rows of tests/exact/test_same_bits.py. Each row of the second is another test,
with the mark same_bits(what_varies, of_what). The marks are read from the source code, since
collecting all tests takes long.
"""

import ast
import pathlib
from collections.abc import Iterable, Iterator

from tests.exact import test_same_bits

FOLDER = pathlib.Path(__file__).parent


def _marks(nodes: list[ast.expr]) -> dict[str, list[str]]:
  """Returns the arguments of each `pytest.mark.NAME` among expressions, by its name."""
  marks = {}
  for node in nodes:
    call = node if isinstance(node, ast.Call) else None
    function = call.func if call else node
    if ast.unparse(function).startswith('pytest.mark.'):
      marks[function.attr] = call.args if call else []
  return marks


def _rows(path: pathlib.Path) -> Iterator[tuple[str, ...]]:
  """Yields the rows of a file of tests."""
  tree = ast.parse(path.read_text())
  of_module = {}
  for node in tree.body:
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'pytestmark':
      values = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
      of_module = _marks(values)

  for node in tree.body:
    if isinstance(node, ast.FunctionDef):
      marks = _marks(node.decorator_list)
      if 'same_bits' in marks:
        what = [ast.literal_eval(argument) for argument in marks['same_bits']]
        as_shipped = 'as_shipped' in {*marks, *of_module}
        yield (*what, 'yes' if as_shipped else '', f'`{path.stem}.{node.name}`')


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
  lines = [head, ('---',) * len(head), *rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def tables() -> tuple[str, str]:
  """Returns the two tables."""
  ways: dict[str, dict[str, list[str]]] = {}
  for row in test_same_bits.ROWS:
    of_scheme = ways.setdefault(row.what, {'sync': [], 'cleanba': []})
    of_scheme[row.scheme] += map(str, (*row.same, *row.full))
  first = ((what, *('; '.join(each) for each in of_scheme.values()))
           for what, of_scheme in ways.items())
  others = sorted(row for path in FOLDER.rglob('test_*.py') for row in _rows(path))
  return (_table(('experiment', 'same bits as `sync` on one device',
                  'same bits as `cleanba` on one device'), first),
          _table(('what varies', 'of what', 'compiled as shipped', 'test'), others))


if __name__ == '__main__':
  print('\n\n'.join(tables()))
