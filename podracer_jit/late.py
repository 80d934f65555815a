"""Modules of libraries that are loaded when they are first used, to start sooner."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_lock = threading.RLock()  # a module may be first used by two threads


@contextlib.contextmanager
def loaded_late(is_late: Callable[[importlib.machinery.ModuleSpec], bool]) -> Iterator[None]:
  """Has modules that are imported in the block loaded at the first use of one of their names.

  Submodules of such a package can be imported without it. `importlib.util.LazyLoader` would load
  the package then.

  Args:
    is_late: whether a module is loaded late.
  """
  finder = _Finder(is_late)
  sys.meta_path.insert(0, finder)
  try:
    yield
  finally:
    sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
  """Finds modules as Python does; the ones that are late get another loader."""

  def __init__(self, is_late: Callable[[importlib.machinery.ModuleSpec], bool]):
    self._is_late = is_late

  def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None
                ) -> importlib.machinery.ModuleSpec | None:
    """See `importlib.abc.MetaPathFinder`."""
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is None or spec.loader is None or not self._is_late(spec):
      return None
    spec.loader = _Loader(spec.loader)
    return spec


class _Loader(importlib.abc.Loader):
  """Makes modules that load themselves."""

  def __init__(self, loader: importlib.abc.Loader):
    self._loader = loader

  def exec_module(self, module: types.ModuleType) -> None:
    """See `importlib.abc.Loader`."""
    module.__spec__.loader = module.__loader__ = self._loader
    module.__class__ = _LateModule


class _LateModule(types.ModuleType):
  """A module that was not executed yet."""

  def __getattr__(self, name: str) -> Any:
    """Executes the module when a name is used that it does not have yet."""
    if name.startswith('__'):  # Python's import system asks for these
      raise AttributeError(f'module {self.__name__!r} has no attribute {name!r}')
    with _lock:
      # The module itself may ask while it is executed.
      if type(self) is _LateModule and not self.__dict__.get('__is_loading__'):
        self.__dict__['__is_loading__'] = True
        try:
          with warnings.catch_warnings():  # some libraries add filters
            self.__spec__.loader.exec_module(self)
        finally:
          del self.__dict__['__is_loading__']
        self.__class__ = types.ModuleType
    return types.ModuleType.__getattribute__(self, name)
