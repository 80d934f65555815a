"""Modules of a user's that a config names, and whether they may be imported."""

from __future__ import annotations

import contextlib
import csv
import io
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from podracer_jit import options, parts
from podracer_jit.envs.families import own_module
from podracer_jit.experiment import schema
from podracer_jit.parts import user_path

HELP = (  # of the flag --allow_modules
    'Modules, or .py files, of your own parts that may be imported if the config in the workdir '
    'names them; by comma. Importing a module runs it.')


def named(fields: Mapping[str, Any]) -> dict[str, str]:
  """Returns the modules of a user's own parts that a config of plain values names, by field."""
  names = {field: str(name) for field, name in schema.names(fields).items() if ':' in str(name)}
  modules = {field: name.partition(':')[0] for field, name in names.items()}
  if 'env.task' in names:
    modules['env.task'] = own_module(names['env.task'])
    if not modules['env.task']:  # a task of a simulator, such as gymnax:CartPole-v1
      del modules['env.task']
  return modules


@contextlib.contextmanager
def one_line(fields: Mapping[str, Any], where: str) -> Iterator[None]:
  """Turns any exception of a user's own part into a ValueError of one line.

  Args:
    fields: plain values of the config that names the part.
    where: the field, and the part or its method, such as 'loss.name: act of mine:MyLoss'.
  """
  try:
    yield
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a part is a program: it may raise anything
    kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
    files = [getattr(sys.modules.get(name), '__file__', '') for name in named(fields).values()]
    raise ValueError(f'{where}{parts.line_of(error, files)}: {kind}'
                     f'{options.shorten(str(error), 500)}') from error


def sources(fields: Mapping[str, Any]) -> dict[str, bytes]:
  """Returns the source files of all modules that a config of plain values names, by their paths.

  They are those that this process has imported; see `parts.sources_of`.
  """
  files: dict[str, bytes] = {}
  for name in sorted(set(named(fields).values())):
    files = dict(parts.sources_of(name)) | files
  return files


def check(fields: Mapping[str, Any], allowed: Collection[str], where: str,
                  copies: Callable[[str], str] = lambda name: '') -> None:
  """Refuses a config from a workdir that names modules which nobody has allowed.

  Args:
    fields: plain values of the config; nothing is imported.
    allowed: names of modules that may be imported.
    where: the file that the config was read from, for the message.
    copies: returns the path of the workdir's copy of a module, '' if it has none.

  Raises:
    ValueError: a module is not allowed; the message names the files that would be run.
  """
  refused = {field: name for field, name in named(fields).items() if name not in allowed}
  of_program = [field for field, name in refused.items() if name == parts.MAIN]
  if of_program:
    raise ValueError(f'--workdir: {where} names {", ".join(of_program)} of the program that '
                     f'trained it ({parts.MAIN}), which others cannot import; a program that has '
                     f"the same can load it with allow_modules=['{parts.MAIN}']")
  if refused:
    listed = ', '.join(f'{field} = {options.shorten(name)}:..., which runs '
                       f'{options.shorten(parts.file_of(name), 600)}'
                       for field, name in refused.items())
    # Quoted, since people copy the flag into a shell, and names may be a stranger's.
    names = shlex.quote(by_comma(map(options.shorten, dict.fromkeys(refused.values()))))
    kept = by_comma(filter(None, map(copies, dict.fromkeys(refused.values()))))
    or_kept = (', or the copies that are kept with it: '
               f'--allow_modules={shlex.quote(kept)}' if kept else '')
    raise ValueError(f'--workdir: {where} names modules of its own ({listed}); if you trust them: '
                     f'--allow_modules={names}{or_kept}')


def by_comma(entries: Iterable[str]) -> str:
  """Returns entries as the flag --allow_modules takes them: one with a comma is in quotes."""
  text = io.StringIO()
  csv.writer(text, lineterminator='').writerow(entries)
  return text.getvalue()


def allowed(entries: Iterable[str | Path]) -> frozenset[str]:
  """Returns the names of the modules that --allow_modules lists.

  Args:
    entries: names of modules, or paths of .py files; modules are then also looked for beside these
      files.

  Raises:
    ValueError: a file does not exist.
  """
  if isinstance(entries, str | Path):
    raise ValueError(f'allow_modules: must be a list of modules or files, got {str(entries)!r}; '
                     f'write [{str(entries)!r}]')
  names = set()
  for entry in entries:
    if not str(entry).endswith('.py'):
      names.add(str(entry))
      continue
    path = user_path(entry)
    if not path.is_file():
      raise ValueError(f'--allow_modules: there is no file {entry}')
    name = path.stem
    # A file of a package has the package's name before its own.
    for folder in path.resolve().parents:
      names.add(name.removesuffix('.__init__'))
      if not (folder / '__init__.py').is_file():
        break
      name = f'{folder.name}.{name}'
    parts.look_beside(folder / f'{name}.py')
    parts.look_beside(path)
  return frozenset(names)
