"""Look-up of parts: shipped ones by their name in a table, a user's own as `module:attribute`."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from podracer_jit.options import hint, shorten, shown

# Folders in which a user's modules are found; see `look_beside`.
_folders: list[Path] = []
# Files of a user's that this process may run: config files, and files that somebody has allowed.
_files: list[Path] = []

# Files of users' modules as they were when they were imported, by path, with the spec of the module
# at that time, which is another one after a reload.
_contents: dict[str, tuple[ModuleSpec | None, bytes]] = {}
# In a worker, the contents of files as its parent has imported them, by path.
_given: dict[str, bytes] = {}
_INSTALLED = {'site-packages', 'dist-packages'}  # folders of packages that pip installs
_OURS = __name__.partition('.')[0]
MAIN = '__main__'  # the name of a notebook, or of the program that Python runs
_PLAIN = {type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset}
# Names and modules of earlier versions that own parts import.
_GONE = {
    'RolloutAlgorithm': 'losses.algorithm.Algorithm',
    'ReplayAlgorithm': 'losses.algorithm.Algorithm with learns_from_replay = True',
    'unroll': 'self.unroll(params, rollout)',
    'unroll_with_heads': 'self.unroll(params, rollout, rollout.action)',
    'Model': 'self.network and self.parts.policy',
    'Objective': 'losses.algorithm.Algorithm',
    'objective': 'losses.algorithm.Algorithm',
    'init_params': 'the method init',
    'RecurrentState': 'types.Carry',
    'minibatches': 'the method items, with losses.items',
    'kinds': 'the method make_network',
    'Family': 'policies.PolicyFamily or protocol.EnvFamily'}


class NameTaken(ImportError):
  """Raised if a file would be loaded under the name of another module."""


class Search(NamedTuple):
  """Where a process finds a user's modules, to be sent to other processes of this machine."""

  folders: tuple[str, ...]  # the first is searched first
  files: tuple[str, ...]
  contents: Mapping[str, bytes] = {}  # of files, as this process has imported them


def look_beside(path: Path) -> None:
  """Makes the modules in the folder of a file importable, as `python file.py` does.

  Modules of Python itself and installed ones come first, so a file of the user's cannot take their
  place. Modules on PYTHONPATH come later, and those in the current folder last. The newest folder
  comes before older ones.
  """
  path = path.resolve()
  if path.parent not in _folders:
    _add_folder(path.parent, 0)
  if path.is_file() and path not in _files:
    _files.append(path)


def search() -> Search:
  """Returns where this process finds a user's modules."""
  return Search(tuple(map(str, _folders)), tuple(map(str, _files)),
                {path: content for path, (_, content) in _contents.items()})


def set_search(where: Search) -> None:
  """Lets this process find a user's modules where another process does.

  Files that were edited since that process has imported them are imported as they were.
  """
  _files[:] = map(Path, where.files)
  for folder in where.folders:
    _add_folder(Path(folder), len(_folders))
  _given.update(where.contents)
  if _AsGiven not in sys.meta_path:
    sys.meta_path.insert(0, _AsGiven)


def _add_folder(folder: Path, index: int) -> None:
  _folders.insert(index, folder)
  # New files in it may be younger than what Python has noted about it.
  importlib.invalidate_caches()
  if _Beside not in sys.meta_path:
    sys.meta_path.insert(0, _Beside)


def _current_folder() -> list[Path]:
  """Returns the current folder; empty if it was removed."""
  try:
    return [Path.cwd()]
  except OSError:
    return []


def _add_current_folder() -> None:
  """Lets Python find modules in the current folder, after all others.

  Only a user's own config or module does this, since the folder may be a stranger's.
  """
  sys.path += [str(folder) for folder in _current_folder()
               if not {'', str(folder)} & set(sys.path)]


class _Beside:
  """Python's import system asks this class first."""

  @staticmethod
  def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    """Returns the module of this name in `_folders`; None leaves the name to other finders."""
    del target
    if path is not None or name in sys.stdlib_module_names or name == _OURS:
      return None
    spec = PathFinder.find_spec(name, [str(folder) for folder in _folders])
    other = spec and PathFinder.find_spec(name)
    # A folder without __init__.py has no origin; any other module comes before it, as in Python.
    if other and (spec.origin is None or other.origin and _is_installed(Path(other.origin))):
      return None
    return spec


class _AsGiven:
  """Python's import system asks this class first in a worker."""

  @staticmethod
  def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    """Returns the module that other finders find, with the content that the parent has imported."""
    if name.rpartition('.')[2] not in {_last_name(Path(file)) for file in _given}:
      return None  # without asking others twice
    specs = (finder.find_spec(name, path, target) for finder in sys.meta_path
             if finder is not _AsGiven)
    spec = next(filter(None, specs), None)
    if spec and spec.origin and str(Path(spec.origin).resolve()) in _given:
      spec.loader = _Loader(name, spec.origin)
      return spec
    return None


class _Loader(SourceFileLoader):
  """Loads a file with the content in `_given`; files beside it are read as they are."""

  def get_data(self, path: str) -> bytes:
    """Returns the content of a file."""
    content = _given.get(str(Path(path).resolve()))
    return super().get_data(path) if content is None else content

  def path_stats(self, path: str) -> Mapping[str, Any]:
    """Raises OSError, so that no cached bytecode is used, which may be of another content."""
    raise OSError


def _last_name(path: Path) -> str:
  return path.parent.name if path.name == '__init__.py' else path.stem


def _is_installed(path: Path) -> bool:
  return bool(_INSTALLED & set(path.parts))


def find(field: str, name: str, shipped: Mapping[str, Any]) -> Any:
  """Returns the part with a name; imports its module if it is a user's own.

  A name may come from a stranger's workdir, and to allow a module must not allow all that it
  imports. So `attribute` is one name without dots, and what it leads to must come from the module
  itself, or from inside of it if it is a package.

  Args:
    field: the config's field with the name, for error messages, such as 'loss.name'.
    name: a key of `shipped`, or 'module:attribute' of a user's own part.
    shipped: the package's parts by name.

  Raises:
    ValueError: no part has this name, its module cannot be imported, or the part is another
      module's; the message has one line.
  """
  if isinstance(name, str) and name in shipped:
    return shipped[name]
  module, colon, attribute = str(name).partition(':')
  if colon and not (attribute and (_can_be_imported(module) or _file_named(module))):
    raise ValueError(f'{field}: must be a name or module:attribute, got {shown(name)}')
  if not colon:
    if name is None:
      raise ValueError(f'{field}: is missing; known are {", ".join(shipped)}')
    if not shipped:
      raise ValueError(f'{field}: there is no {shown(name)}; write module:attribute')
    raise ValueError(f'{field}: there is no {shown(name)}; known are {", ".join(shipped)}, and '
                     'module:attribute for a part of your own')
  if '.' in attribute:
    raise ValueError(f'{field}: {shown(name)} leads through {shown(attribute.partition(".")[0])}; '
                     'must be module:attribute, where attribute is one name of the module, '
                     'without dots')

  # Not `getattr`, which also gives what every module inherits, and runs a module's `__getattr__`.
  values = vars(import_module(field, name, module))
  if attribute not in values:
    near = hint(attribute, (known for known in values if not known.startswith('_')))
    raise ValueError(f'{field}: {module} has no {shown(attribute)}{near}')
  part = values[attribute]
  _check_origin(field, name, module, part)
  return part


def import_module(field: str, name: str, module: str) -> ModuleType:
  """Imports a module that the config's field names.

  Args:
    field: the config's field, for error messages, such as 'env.task'.
    name: the value of the field, for error messages.
    module: the name of the module, a part of `name`.

  Raises:
    ValueError: the module cannot be imported; the message has one line.
  """
  try:
    imported = _module(module)
    sources_of(module)  # now, as somebody may edit the files while this process runs
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise any exception
    if gone_from(error):
      raise ValueError(of_earlier_version(field, name, gone_from(error))) from None
    if isinstance(error, ImportError):
      raise ValueError(f'{field}: cannot import {shown(module)} of {shown(name)} '
                       f'({shorten(str(error))}); it is looked for '
                       'beside the config file, on PYTHONPATH and in the current folder') from None
    raise ValueError(f'{field}: {module}.py fails{line_of(error, [file_of(module)])}: '
                     f'{type(error).__name__}: {shorten(str(error))}') from error
  return imported


def line_of(error: BaseException, files: Iterable[str | None]) -> str:
  """Returns the last line of a user's files that an exception came through: ' (mine.py, line 3)'.

  Args:
    error: the exception.
    files: the paths of the files.

  Returns:
    The line; '' if it came through none of them.
  """
  known = {str(Path(file).resolve()) for file in files if file}
  frames = [frame for frame in traceback.extract_tb(error.__traceback__)
            if str(Path(frame.filename).resolve()) in known]
  return f' ({Path(frames[-1].filename).name}, line {frames[-1].lineno})' if frames else ''


def gone_from(error: BaseException) -> str:
  """Returns 'imports NAME, now REPLACEMENT' if an import failed on a name of an earlier version.

  It is '' for any other error.
  """
  if isinstance(error, AttributeError) and inspect.ismodule(error.obj):
    module, name = error.obj.__name__, error.name
  elif isinstance(error, ModuleNotFoundError):
    module, _, name = str(error.name).rpartition('.')
  elif isinstance(error, ImportError):
    match = re.match(r"cannot import name '(\w+)'", str(error))
    module, name = str(error.name), match and match[1]
  else:
    return ''
  is_gone = name in _GONE and _is_inside(module, _OURS)
  return f'imports {name}, now {_GONE[name]}' if is_gone else ''


def of_earlier_version(field: str, name: str, what: str) -> str:
  """Returns the error message for a user's part that is written for an earlier version.

  Args:
    field: the config's field, or the flag, that names the part.
    name: of the part, or of its file.
    what: what the file does that this version does not know, with its replacement, such as
      'imports RolloutAlgorithm, now Algorithm'.
  """
  return (f'{field}: {shorten(name)} is written for an earlier version (it {what}); '
          'CHANGELOG.md says what to change')


def _check_origin(field: str, name: str, module: str, part: Any) -> None:
  """Refuses a part that a module has only imported; see `find`.

  An instance is judged by its class, which may also be one of this package, such as `Scheme`. Plain
  values of Python cannot be executed, so the caller says what they should be.

  Raises:
    ValueError: the part is of another module; the message has one line.
  """
  if type(part) in _PLAIN:
    return
  for layer in _layers(part):
    if inspect.ismodule(layer):
      origin = words = layer.__name__
      is_own = False
    elif isinstance(layer, type) or inspect.isroutine(layer):
      origin = str(getattr(layer, '__module__', None))
      words = f'{origin}.{getattr(layer, "__qualname__", name)}'
      is_own = _is_inside(origin, module)
    else:
      origin = type(layer).__module__
      words = f'an instance of {origin}.{type(layer).__qualname__}'
      is_own = _is_inside(origin, module) or _is_inside(origin, _OURS)
    if not is_own:
      raise ValueError(f'{field}: {shown(name)} leads to {shorten(words)}, which {module} does not '
                       f'define; must be a class or a function that {module} defines, or be named '
                       'by the module that does')


def _is_inside(origin: str, module: str) -> bool:
  return f'{origin}.'.startswith(f'{module}.')


def _layers(part: Any) -> Iterator[Any]:
  """Yields what has a module of its own: a part, or what wrappers of functools and JAX call.

  Of a function with `__wrapped__`, both count.
  """
  for _ in range(100):  # a wrapper may wrap itself
    if type(part) is functools.partial:
      part = part.func
      continue
    of_library = type(part).__module__.partition('.')[0] in ('functools', 'jax', 'jaxlib')
    wrapped = getattr(part, '__dict__', {}).get('__wrapped__') if of_library else None
    if wrapped is not None:
      part = wrapped
      continue
    yield part
    part = part.__dict__.get('__wrapped__') if inspect.isfunction(part) else None
    if part is None:
      return


def file_of(name: str) -> str:
  """Returns the file that the import of a user's module would run first; runs nothing.

  Args:
    name: the name of the module, possibly dotted.

  Returns:
    The path, or a phrase that says that the module is missing.
  """
  if name == MAIN:
    return 'the main program'
  path = _file_named(name)
  if path:
    return str(path)
  # Looking up a submodule would import its package, so only the first name is looked up.
  top = name.partition('.')[0]
  spec = (_Beside.find_spec(top) or PathFinder.find_spec(top)
          or PathFinder.find_spec(top, [str(folder) for folder in _current_folder()]))
  return spec.origin if spec and spec.origin else f'a module {top} that is not here'


def _can_be_imported(name: str) -> bool:
  """Returns whether an import statement could have this name of a module."""
  return all(step.isidentifier() for step in name.split('.'))


def _file_named(name: str) -> Path | None:
  """Returns NAME.py in the first folder that has it; NAME need not be one that Python can import.

  So parts can be in a config file called ppo-v1.2.py.
  """
  if Path(name).name != name:
    return None
  folders = _folders if _can_be_imported(name) else [*_folders, *_current_folder()]
  return next((path for path in (folder / f'{name}.py' for folder in folders) if path.is_file()),
              None)


def sources_of(name: str) -> Mapping[str, bytes]:
  """Returns the source files of a user's module and of the modules beside it that it imports.

  A file is read once after each import of its module, so it is what this process runs. Imports are
  found in the text; nothing is executed. Of an installed package, only its own modules count.

  Args:
    name: of the module, possibly dotted.

  Returns:
    Contents by path, relative to the folder in which the import of `name` looks; empty for a module
    that is no file of Python.
  """
  path = Path(getattr(sys.modules.get(name), '__file__', None) or file_of(name))
  is_source = path.suffix == '.py' and (path.is_file() or str(path.resolve()) in _contents)
  return _read_with_imports(path, name) if is_source else {}


def _read_with_imports(path: Path, name: str) -> dict[str, bytes]:
  """Returns the contents of a module's file, and of the files that it imports; see `sources_of`."""
  root = root_of(path, name)
  top = name.partition('.')[0]
  is_installed = _is_installed(root)
  content = _content_of(path, name)
  contents = {str(path.resolve().relative_to(root)): content}
  names = [name, *_imports(content, name, path.name == '__init__.py')]
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
        contents[key] = _content_of(file, of)
        names += _imports(contents[key], of, file.name == '__init__.py')
  return contents


def _content_of(path: Path, name: str) -> bytes:
  """Returns the content of the file of a module, as it was when the module was imported."""
  key = str(path.resolve())
  spec = getattr(sys.modules.get(name), '__spec__', None)
  if spec is None or key not in _contents or _contents[key][0] is not spec:
    _contents[key] = (spec, path.read_bytes())
  return _contents[key][1]


def root_of(path: Path, name: str) -> Path:
  """Returns the folder in which the import of a module looks for its first name.

  Args:
    path: the file of the module.
    name: the name of the module, possibly dotted.
  """
  if path.stem == name:
    return path.resolve().parent  # a file like ppo_v1.2.py is in no package
  return path.resolve().parents[name.count('.') + (path.name == '__init__.py')]


def _files_beside(root: Path, module: str) -> Iterator[tuple[Path, str]]:
  """Yields the files under a folder that the import of a module runs, and their modules.

  Raises:
    NameTaken: a file of another folder has the name of one of them in this process.
  """
  odd = root / f'{module}.py'
  if odd.is_file() and ('.' in module or not _can_be_imported(module)):
    yield odd, module
    return
  steps = module.split('.')
  for count in range(1, len(steps) + 1):
    name = '.'.join(steps[:count])
    base = root.joinpath(*steps[:count])
    for file in (base / '__init__.py', base.with_suffix('.py')):
      if not file.is_file():
        continue
      known = getattr(sys.modules.get(name), '__file__', None)
      if known is None or Path(known).resolve() == file.resolve():
        yield file, name
      elif not (_is_installed(Path(known)) or steps[0] in sys.stdlib_module_names):
        raise NameTaken(f'{name} is {known} in this process, and not {file}: give one of them '
                        'another name, or use another process')
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
  _add_current_folder()
  path = _file_named(name)
  return load(path, name) if path else importlib.import_module(name)


def run_file(path: Path, again: bool = True) -> ModuleType:
  """Runs a file of the user's, which can import the modules beside it.

  Args:
    path: the path of the file.
    again: whether to run the file even if it was run before.

  Returns:
    The file as a module. It has the file's name, if that is not the name of another module.
  """
  if not path.resolve().is_relative_to(Path(__file__).parent):  # no config that is shipped
    look_beside(path)
    _add_current_folder()
  try:
    module = load(path, path.stem, again)
  except NameTaken:
    # This matters only for a file that also has parts.
    module = load(path, f'_file_{zlib.crc32(bytes(path.resolve()))}', again)
  _read_with_imports(path, module.__name__)  # refuses modules that it did not mean
  return module


def run_files() -> bool:
  """Runs the files that this process may run and has not run; returns whether there were any."""
  # Not `getattr`, which lets some modules import others.
  imported = {vars(module).get('__file__') for module in list(sys.modules.values())
              if isinstance(module, ModuleType)}
  files = [path for path in _files if str(path) not in imported]
  for path in files:
    run_file(path, again=False)
  return bool(files)


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
  if known is None and '.' not in name:
    # A module that is not imported yet may have the name, too.
    spec = importlib.util.find_spec(name)
    where = spec and spec.origin
  if (known is not None or where) and (where is None or Path(where).resolve() != path):
    raise NameTaken(f'{path} cannot be called {name}: that is the name of '
                    f'{where or "a built-in module"}')
  if known is not None and not again:
    return known

  loader = _Loader(name, str(path)) if str(path) in _given else None
  spec = importlib.util.spec_from_file_location(name, path, loader=loader)
  module = importlib.util.module_from_spec(spec)
  # Registered before it runs, so that the module can import itself.
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except BaseException:
    del sys.modules[name]
    raise
  return module


def user_path(path: str | Path) -> Path:
  """Returns a path that a user gave, in which ~ at its beginning means the home folder.

  Raises:
    ValueError: the user, or the user's home folder, is not known; or it is the address of a store,
      such as gs://bucket/x.
  """
  # A `Path` has a single slash. Without this line, a local folder `gs:` would be made.
  if re.match(r'[A-Za-z][A-Za-z0-9+.-]+:/', str(path)):
    raise ValueError(f'{path}: is an address, not a path; mount the bucket or server as a file '
                     'system, and give its folder there, or train in a local folder with a copy '
                     'there, --mirror (docs/pods.md says more)')
  try:
    return Path(path).expanduser()
  except RuntimeError:
    raise ValueError(f'{path}: the home folder is not known; give a path without ~') from None
