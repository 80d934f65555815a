"""Look-up of parts: shipped ones by their name in a table, a user's own as `module:attribute`."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from podracer_jit.options import shorten, shown

# Folders of config files, which are searched before sys.path.
_folders: list[Path] = []

# Files of users' modules as they were when they were imported, by module; see `sources_of`.
_sources: dict[str, dict[str, bytes]] = {}
_INSTALLED = {'site-packages', 'dist-packages'}  # folders of packages that pip installs
_OURS = __name__.partition('.')[0]


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
    sources_of(module)  # now, as somebody may edit the files while this process runs
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


def sources_of(name: str) -> Mapping[str, bytes]:
  """Returns the source files of a user's module and of the modules beside it that it imports.

  They are read once, when the module is imported, so they are what this process runs. Imports are
  found in the text; nothing is executed. Of an installed package, only its own modules count.

  Args:
    name: of the module, possibly dotted.

  Returns:
    Contents by path, relative to the folder in which the import of `name` looks; empty for a module
    that is no file of Python.
  """
  if name not in _sources:
    path = Path(getattr(sys.modules.get(name), '__file__', None) or file_of(name))
    is_source = path.suffix == '.py' and path.is_file()
    _sources[name] = _read_with_imports(path, name) if is_source else {}
  return _sources[name]


def _read_with_imports(path: Path, name: str) -> dict[str, bytes]:
  """Returns the contents of a module's file, and of the files that it imports; see `sources_of`."""
  root = path.resolve().parents[name.count('.') + (path.name == '__init__.py')]
  top = name.partition('.')[0]
  is_installed = bool(_INSTALLED & set(root.parts))
  contents = {}
  names = [name]
  visited = set()
  while names:
    module = names.pop()
    first = module.partition('.')[0]
    if module in visited or first == _OURS or is_installed and first != top:
      continue
    visited.add(module)
    for file, of in _files_beside(root, module):
      key = str(file.relative_to(root))
      if key not in contents:
        contents[key] = file.read_bytes()
        names += _imports(contents[key], of, file.name == '__init__.py')
  return contents


def _files_beside(root: Path, module: str) -> Iterator[tuple[Path, str]]:
  """Yields the files under a folder that the import of a module runs, and their modules."""
  steps = module.split('.')
  for count in range(1, len(steps) + 1):
    name = '.'.join(steps[:count])
    base = root.joinpath(*steps[:count])
    for file in (base / '__init__.py', base.with_suffix('.py')):
      known = getattr(sys.modules.get(name), '__file__', None)
      # The name may stand for another file, such as a package's that is installed.
      if file.is_file() and (known is None or Path(known).resolve() == file.resolve()):
        yield file, name
        break


def _imports(content: bytes, module: str, is_package: bool) -> Iterator[str]:
  """Yields the names that a module may import, by its text; some may be no modules."""
  try:
    tree = ast.parse(content)
  except (SyntaxError, ValueError):
    return
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      package = module.split('.') + [''] * is_package  # one level is the package itself
      base = '.'.join(filter(None, package[:-node.level])) if node.level else ''
      full = '.'.join(filter(None, (base, node.module)))
      yield full
      yield from (f'{full}.{alias.name}' if full else alias.name for alias in node.names)


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

  _sources.pop(name, None)
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
