"""The command line: absl flags, a config file, and overrides of its fields."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

_ENV = '--config.env.'
_SWITCHES = ('--help', '--distributed')  # take no value
_EXAMPLE = 'podracer_jit --config=configs/pong_laptop.py --workdir=runs/pong'


def parse(argv: Sequence[str], values: flags.FlagValues) -> dict[str, Any] | None:
  """Parses --config with its overrides, and whatever flags are defined in `values`.

  Returns:
    The config as plain values, or None where --help was asked for.

  Raises:
    ValueError: a wrong flag, file, field or type, in one line.
  """
  config = config_flags.DEFINE_config_file(
      'config', None, 'The experiment, with its argument: configs/pong_laptop.py:smoke. Any field '
      'is overridden by --config.FIELD=VALUE.', flag_values=values)
  flags.DEFINE_bool('help', False, 'Show this.', short_name='h', flag_values=values)
  argv, options = _env_options(_find_config(_joined(argv)))
  sys.argv = list(argv)  # where config_flags looks for overrides, whatever the flags are given
  try:
    rest = values(argv)
    if values.help:
      return None
    config = config.value
  except flags.Error as error:
    raise ValueError(_one_line(error)) from None
  except (AttributeError, KeyError) as error:
    raise ValueError(_no_field(error, argv)) from None
  except Exception as error:  # noqa: BLE001 - a config file is a program: it may raise anything
    raise ValueError(f'--config: {type(error).__name__}: {_one_line(error)}') from None
  if rest[1:]:
    raise ValueError(f'{rest[1]}: not a flag; flags begin with --')
  if config is None:
    raise ValueError(f'--config is missing: {_EXAMPLE}')
  config = config.to_dict()
  config['env'] |= options
  return config


def default_workdir(argv: Sequence[str]) -> Path:
  """runs/impala_catch_smoke of --config=configs/impala_catch.py:smoke, and so on."""
  config = next(a for a in _joined(argv) if a.startswith('--config=')).partition('=')[2]
  path, _, argument = config.partition(':')
  return Path('runs') / re.sub(r'[^A-Za-z0-9._-]', '_', Path(path).stem + f'_{argument}').strip('_')


def _joined(argv: Sequence[str]) -> list[str]:
  """Every flag as --name=value, of all the ways in which absl takes it."""
  joined = [argv[0]]
  for arg in argv[1:]:
    before = joined[-1]
    waits = before.startswith('--') and '=' not in before and before not in _SWITCHES
    if len(joined) > 1 and waits and not arg.startswith('-'):
      joined[-1] = f'{before}={arg}'
    else:
      joined.append('-' + arg if re.match(r'-[A-Za-z]\w', arg) else arg)
  return joined


def _one_line(error: Exception) -> str:
  return ' '.join(str(error).split())


def _no_field(error: Exception, argv: Sequence[str]) -> str:
  """Says which override names a field that the config does not have."""
  text = str(error.args[0])
  field = re.search(r'\w+', text)[0]
  hint = re.search(r'Did you mean "(\w+)"', text)
  names = [arg.partition('=')[0] for arg in argv]
  name = next((n for n in names if field in n.split('.')), f'--config: {field}')
  return f'{name}: the config has no such field' + (f'; did you mean {hint[1]}?' if hint else '')


def _find_config(argv: Sequence[str]) -> list[str]:
  """Where configs/x.py is not here, the packaged one is meant; it goes before its overrides."""
  found: list[str] = []
  for arg in sorted(argv[1:], key=lambda arg: not re.match(r'--config(=|$)', arg)):
    name, equals, value = arg.partition('=')
    path, colon, argument = value.partition(':')
    packaged = Path(__file__).parents[1] / path
    if name == '--config' and not Path(path).exists():
      if not packaged.is_file():
        known = ', '.join(sorted(p.name for p in
                                 Path(__file__).parents[1].glob('configs/[!_]*.py')))
        raise ValueError(f'--config={path}: there is no such file, here or in the package, which '
                         f'has configs/ with {known}')
      arg = f'{name}{equals}{packaged}{colon}{argument}'
    found.append(arg)
  return [argv[0], *found]


def _env_options(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
  """Takes EnvPool's own options out of argv: a config need not list them all to have them."""
  rest, options = [], {}
  for arg in argv:
    name, equals, value = arg.partition('=')
    field = name.removeprefix(_ENV)
    if not name.startswith(_ENV) or field in ('task', 'num_envs') or not equals:
      rest.append(arg)
      continue
    try:
      options[field] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      options[field] = {'true': True, 'false': False}.get(value.lower(), value)
  return rest, options
