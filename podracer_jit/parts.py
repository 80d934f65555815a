"""Parts by name: a shipped one by its name in a table, a user's own as `module:attribute`."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from podracer_jit.options import shorten, shown

_folders: list[Path] = []  # searched before sys.path


class NameTaken(ImportError):
  """A file cannot be loaded under a name that another module has."""


def look_beside(path: Path) -> None:
  """From now on modules of a user's parts are found beside the file `path`, too."""
  folder = path.resolve().parent
  if folder not in _folders:
    _folders.insert(0, folder)


def find(field: str, name: str, shipped: Mapping[str, Any]) -> Any:
  """The part called `name`.

  Args:
    field: the config's field that names it, for errors: 'loss.name'.
    name: a key of `shipped`, or 'module:attribute' of a user's own part.
    shipped: the table of parts that the package has.

  Raises:
    ValueError: there is no such part, in one line.
  """
  if isinstance(name, str) and name in shipped:
    return shipped[name]
  module, colon, attribute = str(name).partition(':')
  if colon and not (module.replace('.', '').isidentifier() and attribute):
    raise ValueError(f'{field}: must be a name or module:attribute, got {shown(name)}')
  if not colon:
    raise ValueError(f'{field}: there is no {shown(name)}; known are {", ".join(shipped)}, and '
                     'module:attribute of your own')
  try:
    part = _module(module)
  except ImportError as error:
    raise ValueError(f'{field}: cannot import {shown(module)} of {shown(name)} '
                     f'({shorten(str(error))}); it is looked for '
                     'beside the config file and on PYTHONPATH') from None
  except Exception as error:  # noqa: BLE001 - a module is a program: it may raise anything
    raise ValueError(f'{field}: {module}.py fails: {type(error).__name__}: '
                     f'{shorten(str(error))}') from error
  for step in attribute.split('.'):
    if not hasattr(part, step):
      raise ValueError(f'{field}: {module} has no {shown(attribute)}')
    part = getattr(part, step)
  return part


def file_of(name: str) -> str:
  """Returns the file that importing a user's module would run first, without running anything."""
  for folder in _folders:
    path = folder.joinpath(*name.split('.')).with_suffix('.py')
    if path.is_file():
      return str(path)
  # Only the first part of a dotted name can be looked up without importing the others.
  top = name.partition('.')[0]
  spec = importlib.machinery.PathFinder.find_spec(top)
  return spec.origin if spec and spec.origin else f'a module {top} that is not here'


def _module(name: str) -> ModuleType:
  """Imports a user's module: from beside the config file if it is there, else as Python does."""
  for folder in _folders:
    path = folder.joinpath(*name.split('.')).with_suffix('.py')
    if path.is_file():
      return load(path, name)
  return importlib.import_module(name)


def load(path: Path, name: str, again: bool = False) -> ModuleType:
  """Returns the module in a file, which other code then imports by `name`.

  Args:
    path: of the file.
    name: of the module.
    again: run the file even if it was loaded before.

  Raises:
    NameTaken: another module has that name, imported or not.
  """
  path = path.resolve()
  known = sys.modules.get(name)
  where = getattr(known, '__file__', None)
  if known is None:
    other = importlib.util.find_spec(name)
    where = other and other.origin
  if (known is not None or where) and (where is None or Path(where).resolve() != path):
    raise NameTaken(f'{path} cannot be called {name}: that is the name of '
                    f'{where or "a built-in module"}')
  if known is not None and not again:
    return known
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except BaseException:
    del sys.modules[name]
    raise
  return module
