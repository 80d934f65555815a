"""Look-up of parts: shipped ones by their name in a table, a user's own as `module:attribute`."""

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

# Folders of config files, which are searched before sys.path.
_folders: list[Path] = []


class NameTaken(ImportError):
  """Raised if a file would be loaded under the name of another module."""


def look_beside(path: Path) -> None:
  """Adds the folder of a file to the folders in which `find` looks for a user's modules."""
  folder = path.resolve().parent
  if folder not in _folders:
    _folders.insert(0, folder)


def folders() -> list[Path]:
  """Returns the folders that `look_beside` has added, the first to be searched first."""
  return list(_folders)


def find(field: str, name: str, shipped: Mapping[str, Any]) -> Any:
  """Returns the part with a name; imports its module if it is a user's own.

  Args:
    field: the config's field with the name, for error messages, such as 'loss.name'.
    name: a key of `shipped`, or 'module:attribute' of a user's own part.
    shipped: the package's parts by name.

  Raises:
    ValueError: no part has this name, or its module cannot be imported; the message has one line.
  """
  if isinstance(name, str) and name in shipped:
    return shipped[name]
  module, colon, attribute = str(name).partition(':')
  if colon and not (module.replace('.', '').isidentifier() and attribute):
    raise ValueError(f'{field}: must be a name or module:attribute, got {shown(name)}')
  if not colon:
    raise ValueError(f'{field}: there is no {shown(name)}; known are {", ".join(shipped)}, and '
                     'module:attribute for a part of your own')

  try:
    part = _module(module)
  except ImportError as error:
    raise ValueError(f'{field}: cannot import {shown(module)} of {shown(name)} '
                     f'({shorten(str(error))}); it is looked for '
                     'beside the config file and on PYTHONPATH') from None
  except Exception as error:  # noqa: BLE001 - a user's module may raise any exception
    raise ValueError(f'{field}: {module}.py fails: {type(error).__name__}: '
                     f'{shorten(str(error))}') from error

  for step in attribute.split('.'):
    if not hasattr(part, step):
      raise ValueError(f'{field}: {module} has no {shown(attribute)}')
    part = getattr(part, step)
  return part


def file_of(name: str) -> str:
  """Returns the file that the import of a user's module would run first; runs nothing.

  Args:
    name: the name of the module, possibly dotted.

  Returns:
    The path, or a phrase that says that the module is missing.
  """
  for folder in _folders:
    path = folder.joinpath(*name.split('.')).with_suffix('.py')
    if path.is_file():
      return str(path)
  # Looking up a submodule would import its package, so only the first name is looked up.
  top = name.partition('.')[0]
  spec = importlib.machinery.PathFinder.find_spec(top)
  return spec.origin if spec and spec.origin else f'a module {top} that is not here'


def _module(name: str) -> ModuleType:
  """Imports a user's module, from beside the config file if possible, else from sys.path."""
  for folder in _folders:
    path = folder.joinpath(*name.split('.')).with_suffix('.py')
    if path.is_file():
      return load(path, name)
  return importlib.import_module(name)


def load(path: Path, name: str, again: bool = False) -> ModuleType:
  """Loads a file as a module and registers it in `sys.modules`.

  Args:
    path: the path of the file.
    name: the name of the module, by which other code can import it.
    again: whether to run the file even if it was loaded before.

  Returns:
    The module.

  Raises:
    NameTaken: another module, imported or not, has the name.
  """
  path = path.resolve()
  known = sys.modules.get(name)
  where = getattr(known, '__file__', None)
  if known is None:
    # A module that is not imported yet may have the name, too.
    spec = importlib.util.find_spec(name)
    where = spec and spec.origin
  if (known is not None or where) and (where is None or Path(where).resolve() != path):
    raise NameTaken(f'{path} cannot be called {name}: that is the name of '
                    f'{where or "a built-in module"}')
  if known is not None and not again:
    return known

  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  # Registered before it runs, so that the module can import itself.
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except BaseException:
    del sys.modules[name]
    raise
  return module
