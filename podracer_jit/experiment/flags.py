"""The command line: absl flags, a config file, and overrides of its fields."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from podracer_jit import parts, schedules
from podracer_jit.experiment import config_dict, schema
from podracer_jit.options import hint, line_of_flag, literal, refuse_empty, shorten
from podracer_jit.parts import user_path

_PACKAGE = Path(__file__).parents[1]
_ENV = '--config.env.'
_MEANING = ('The experiment: a file, or the name of a shipped config, with its argument: '
            'pong_laptop:smoke. Any field is overridden by --config.FIELD=VALUE; '
            '--config=NAME --help lists the fields.')
_EXAMPLE = 'podracer_jit --config=pong_laptop --workdir=runs/pong'


def parse(argv: Sequence[str], values: flags.FlagValues) -> dict[str, Any] | None:
  """Parses --config with its overrides, and the flags that are defined in `values`.

  A field that chooses a part (`--config.network.name`) is read first: the config then has that
  part's fields, with their defaults, which other flags can override.

  Args:
    argv: the command line.
    values: the command's own flags; receives their values.

  Returns:
    The config as plain values; None with --help, after printing the config's fields.

  Raises:
    ValueError: a wrong flag, file, field or type; the message is one line.
  """
  flags.DEFINE_bool('help', False, 'Show this.', short_name='h', flag_values=values)
  argv, env_options = _take_env_options(_joined(argv, switches=_switches(values)))
  argv, location = _take_config(argv)
  if location is None:
    # For the help text only.
    flags.DEFINE_string('config', None, _MEANING, flag_values=values)
    _parse_flags(argv, values, ())
    if values.help:
      return None
    raise ValueError(f'--config is missing: {_EXAMPLE}')
  config = load_config(location)
  for name, value in _fields(config):
    if config_dict.lacks_required(value):
      raise ValueError(f'--config: {name} is a required_placeholder, which ml_collections lets no '
                       'flag set; make it a placeholder')
  for section in schema.CHOICES:
    # In the order of the command line, so that the last flag counts.
    for arg in argv:
      if arg.startswith(f'--config.{section}.name='):
        with _one_line_errors(), config.unlocked():
          schema.choose(config, section, arg.partition('=')[2])
  _refuse_sections(argv, config)
  argv = _take_numbers(argv, config)
  try:
    config_flags.DEFINE_config_dict('config', config, _MEANING, flag_values=values, sys_argv=argv)
  except (AttributeError, KeyError) as error:
    raise ValueError(_no_field(error, argv)) from None
  except (flags.Error, TypeError, ValueError) as error:
    raise ValueError(f'--config: {_one_line(error)}') from None
  _parse_flags(argv, values, [name for name, _ in _fields(config)])
  fields = config_dict.plain(values.config)
  if env_options:
    fields['env'] = fields.get('env', {}) | env_options
  if values.help:
    _print_fields(fields)
    values['config'].default_as_str = None  # all its fields, once more
    return None
  return fields


def fields_of(arguments: Sequence[str]) -> dict[str, Any]:
  """Returns the config that --config and its overrides give, as plain values.

  Raises:
    ValueError: see `parse`.
  """
  return parse(['podracer_jit', *arguments], flags.FlagValues())


def _print_fields(fields: Mapping[str, Any]) -> None:
  """Prints the fields of a config with values and meanings."""
  print('Fields, as this config has them; --config.FIELD=VALUE overrides one:')
  for name, value, meaning in schema.describe(fields):
    print(f'  {name} = {value!r}\n      {meaning}')
  print("  env.* : any other option of the task's own\n")
  print(f'Fractional numbers of {" and ".join(schema.SCHEDULED)} may change during a run: '
        f'FIELD={schedules.EXAMPLE}; "Schedules" in docs/configs.md explains how.\n')


@contextlib.contextmanager
def _one_line_errors(file: Path | None = None) -> Iterator[None]:
  """Turns any exception of a config file into a ValueError of one line; the file is a program."""
  try:
    yield
  except (ValueError, config_dict.WrongType) as error:
    message = _one_line(error)
    names_field = re.match(r'--config|\w+\.name: ', message)
    raise ValueError(message if names_field else f'--config: {message}') from None
  except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise anything
    if parts.gone_from(error):
      file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
      raise ValueError(parts.of_earlier_version('--config', file.name,
                                            parts.gone_from(error))) from None
    line = parts.line_of(error, [file] if file else [])
    raise ValueError(f'--config{line}: {type(error).__name__}: {_one_line(error)}') from None


def load_config(location: str) -> config_dict.Fields:
  """Returns the config that a file's `get_config` makes, locked.

  Args:
    location: the path of a file, or the name of a shipped config; with its argument after a colon.

  Raises:
    ValueError: there is no such config, the file fails, or it does not define a config; the message
      is one line.
  """
  path, colon, argument = location.partition(':')
  file = _find_config(path)
  with _one_line_errors(file):
    module = parts.run_file(file)
    if not hasattr(module, 'get_config'):
      raise ValueError(f'{file} has no function get_config')
    arguments = [argument] if colon else []
    try:
      inspect.signature(module.get_config).bind(*arguments)
    except TypeError:
      raise ValueError(f'get_config of {file} takes no argument; write --config={path}' if colon
                       else f'get_config of {file} needs an argument; write --config={path}:'
                       'ARGUMENT') from None
    config = module.get_config(*arguments)
    if not isinstance(config, Mapping | ml_collections.ConfigDict):
      raise ValueError(f'get_config of {file} must return the result of experiment.config, got '
                       f'{type(config).__name__}')
    return config_dict.as_fields(config)


def _find_config(path: str) -> Path:
  """Returns the file of --config: an existing file, or a shipped config by its name.

  Raises:
    ValueError: there is no such file or config.
  """
  candidates = [user_path(path), _PACKAGE / path, _PACKAGE / 'configs' / path,
                _PACKAGE / 'configs' / f'{path}.py']
  for candidate in candidates:
    if path and candidate.is_file():
      if candidate.suffix != '.py':
        raise ValueError(f'--config={path}: must be a file of Python, whose name ends in .py')
      return candidate
  shipped = sorted(path.stem for path in (_PACKAGE / 'configs').glob('[!_]*.py'))
  near = hint(path, shipped) or f'; there are {", ".join(shipped)}'
  raise ValueError(f'--config={path}: there is no such file, and no shipped config of that name'
                   f'{near}')


def default_workdir(argv: Sequence[str]) -> Path:
  """Returns the workdir that is named after --config: runs/impala_catch_smoke, for example."""
  _, location = _take_config(_joined(argv))
  path, _, argument = location.partition(':')
  return Path('runs') / re.sub(r'[^A-Za-z0-9._-]', '_', Path(path).stem + f'_{argument}').strip('_')


def _parse_flags(argv: Sequence[str], values: flags.FlagValues, fields: Sequence[str]) -> None:
  """Parses argv; `fields` are the fields of the config, for hints."""
  try:
    arguments = values(list(argv))
  except flags.UnrecognizedFlagError as error:
    # Users often leave out '--config.' or the section, so a field's last name counts, too.
    last = {field.rpartition('.')[2]: field for field in fields[::-1]} | {
        name: field for field in fields for name in (field, f'config.{field}')}
    near = [last[name] for name in difflib.get_close_matches(error.flagname, last, n=1, cutoff=0.8)]
    if not near:
      raise ValueError(_one_line(error)) from None
    raise ValueError(f'--{error.flagname}: there is no such flag; did you mean '
                     f'--config.{near[0]}?') from None
  except flags.Error as error:
    raise ValueError(line_of_flag(error)) from None
  if arguments[1:]:
    raise ValueError(f'{arguments[1]}: not a flag; flags begin with --')
  refuse_empty(values)


def _fields(config: ml_collections.ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yields the name of each field of a config, with dots, and its value or reference."""
  for name, value in config.items(preserve_field_references=True):
    if isinstance(value, ml_collections.ConfigDict):
      yield from _fields(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def _switches(values: flags.FlagValues) -> set[str]:
  """Returns the flags that take no separate value."""
  return {f'--{no}{name}' for name in values if values[name].boolean for no in ('', 'no')}


def _joined(argv: Sequence[str], prefix: str = '--', switches: Collection[str] = ()) -> list[str]:
  """Returns every flag that begins with `prefix` as --name=value.

  absl also takes -name, and a separate value.

  Args:
    argv: the command line.
    prefix: of the flags.
    switches: the flags that take no separate value.
  """
  joined = [argv[0]]
  for arg in argv[1:]:
    before = joined[-1]
    waits = before.startswith(prefix) and '=' not in before and before not in switches
    if len(joined) > 1 and waits and not arg.startswith('-'):
      joined[-1] = f'{before}={arg}'
    else:
      joined.append('-' + arg if re.match(r'-[A-Za-z]\w', arg) else arg)
  return joined


def _one_line(error: Exception) -> str:
  """Returns an error's message on one line."""
  return shorten(str(error), 600)


def _refuse_sections(argv: Sequence[str], config: config_dict.Fields) -> None:
  """Refuses flags that set a whole section.

  Raises:
    ValueError: naming the flag.
  """
  for arg in argv:
    name, _, value = arg.partition('=')
    section = name.removeprefix('--config.')
    if section == name or not isinstance(config.get(section), ml_collections.ConfigDict):
      continue
    is_choice = section in schema.CHOICES and not value.startswith('{')
    raise ValueError(f'{name}: is a section of fields' + (
        f'; did you mean {name}.name={value}?' if is_choice else
        f', such as {name}.{next(iter(config[section]))}'))


def _no_field(error: Exception, argv: Sequence[str]) -> str:
  """Returns the error message for an override of a field that the config does not have."""
  text = str(error.args[0])
  field = re.search(r'\w+', text)[0]
  near = re.search(r'Did you mean "(\w+)"', text)
  names = [arg.partition('=')[0] for arg in argv]
  name = next((n for n in names if field in n.split('.')), f'--config: {field}')
  meant = f'; did you mean {name.rpartition(".")[0]}.{near[1]}?' if near else ''
  return f'{name}: the config has no such field{meant}'


def _take_config(argv: Sequence[str]) -> tuple[list[str], str | None]:
  """Removes --config from argv; returns the other arguments, and the last --config's value."""
  remaining = []
  location = None
  for arg in argv:
    if arg.startswith('--config='):
      location = arg.partition('=')[2]
    elif arg == '--config':
      raise ValueError(f'--config has no value: {_EXAMPLE}')
    else:
      remaining.append(arg)
  return remaining, location


def _take_numbers(argv: Sequence[str], config: config_dict.Fields) -> list[str]:
  """Sets the fields that are numbers or schedules by their flags; returns the other arguments.

  absl would refuse a schedule for a number, and read a number for a schedule as a text. It still
  reads whole numbers, and True and False. What a field may be is checked with the config.
  """
  remaining = []
  for arg in argv:
    name, equals, text = arg.partition('=')
    section, _, field = name.removeprefix('--config.').rpartition('.')
    fields = config.get(section) if section else config
    known = isinstance(fields, ml_collections.ConfigDict) and field in fields
    kind = fields.get_type(field) if known and equals and name.startswith('--config.') else None
    if kind is float or kind in (bool, int) and not _is_read(kind, text) or (
        kind is str and schedules.is_schedule(fields[field])):
      with fields.ignore_type():
        fields[field] = text if kind in (bool, int) else _number_or_text(text)
    else:
      remaining.append(arg)
  return remaining


def _is_read(kind: type, text: str) -> bool:
  """Returns whether absl reads a text as a value of a kind, bool or int."""
  try:
    (flags.BooleanParser() if kind is bool else flags.IntegerParser()).parse(text)
  except (TypeError, ValueError):
    return False
  return True


def _number_or_text(text: str) -> float | str:
  try:
    return float(text)
  except ValueError:
    return text


def take_env_options(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
  """Removes --env.NAME=VALUE from argv; returns the other arguments, and the options of the task.

  Raises:
    ValueError: an option has no value, or is no option of the task's own.
  """
  remaining, options = _take_env_options(_joined(argv, '--env.'), '--env.')
  for arg in remaining:
    if arg.startswith('--env.'):
      name, equals, _ = arg.partition('=')
      raise ValueError(f"{name}: {'cannot be changed here' if equals else 'has no value'}; "
                       "--env.NAME=VALUE sets an option of the run's task")
  return remaining, options


def _take_env_options(argv: Sequence[str], prefix: str = _ENV
                      ) -> tuple[list[str], dict[str, Any]]:
  """Removes the task's own options from argv; returns the other arguments, and the options.

  ml_collections would refuse them, since a config need not list all options of its task.

  Args:
    argv: the command line, with flags as --name=value.
    prefix: the flags' names up to that of the option.
  """
  remaining = []
  options = {}
  for arg in argv:
    name, equals, value = arg.partition('=')
    field = name.removeprefix(prefix)
    if not name.startswith(prefix) or field in ('task', 'num_envs') or not equals:
      remaining.append(arg)
      continue
    options[field] = {'true': True, 'false': False}.get(value.lower(), literal(value))
  return remaining, options
