"""Lists the configs of the package, each with one line about it.

  podracer_jit configs

To train with one of them: `podracer_jit --config=NAME`. With NAME:smoke a run has a few updates
only. --config.FIELD=VALUE changes a field; --help explains all fields.

Exit code: 0, or 2 for a wrong argument.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from podracer_jit.cli import verb
from podracer_jit.errors import Refused

FOLDER = Path(__file__).parents[1] / 'configs'


@verb
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  if set(argv[1:]) & {'-h', '--help'}:
    print(__doc__)
    return 0
  if argv[1:]:
    raise Refused(f'{argv[1]}: no arguments are needed')
  by_name = shipped()
  width = max(map(len, by_name))
  for name, meaning in by_name.items():
    print(f'{name:{width}}  {meaning}')
  return 0


def shipped() -> dict[str, str]:
  """Returns the first line of each shipped config's docstring, by the config's short name."""
  first_lines = {}
  for path in sorted(FOLDER.glob('[!_]*.py')):
    # Parsed and not imported, since a config may import all of EnvPool.
    text = ast.get_docstring(ast.parse(path.read_text())) or ''
    first_lines[path.stem] = text.partition('\n')[0]
  return first_lines
