"""Compiled programs as bytes in which the device and the addresses of simulators can be exchanged.

A program that calls a simulator contains the simulator's address, so it is of no use to another
simulator. Here it is stored as bytes, and loaded with the addresses of other simulators in their
place, for its device or another one. That takes milliseconds instead of the seconds of a
compilation. The bytes also go to the folder of JAX's compilation cache, for later processes.

JAX's own cache cannot do this: a program that it has loaded cannot be serialized again (it fails
when it is called, jaxlib 0.10.2).

Seen on CPUs only. For other platforms it is unknown whether XLA stores an address as text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import math
import os
import pickle
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src import cache_key  # what else the key of a compiled program depends on
from jax._src import config as jax_config  # the options of this thread only
from jax.experimental import serialize_executable
from jax.extend.backend import get_compile_options

from podracer_jit.options import shorten

_FOLDER = 'with_simulators'  # in that of JAX's cache
# In the names of calls of Python (`jax.debug.print`, `io_callback`), whose addresses are unknown.
_CALLS_PYTHON = 'python_cpu_callback'


def is_supported(device: jax.Device) -> bool:
  """Returns whether addresses can be exchanged in programs for a device."""
  return device.platform == 'cpu'


class _Unpickler(pickle.Unpickler):
  """Reads a serialized program for a device, whichever device it was compiled for.

  The one of `serialize_executable.deserialize_and_load` knows only the device of the compilation.
  """

  def __init__(self, content: bytes, device: jax.Device):
    super().__init__(io.BytesIO(content))
    self._device = device

  def persistent_load(self, pid: tuple[Any, ...]) -> Any:
    """Returns what stands for an object that is not pickled itself: its kind and a value."""
    match pid:
      case ('device', _):
        return self._device
      case ('client',):
        return self._device.client
      case ('exec', executable):
        options = get_compile_options(num_replicas=1, num_partitions=1,
                                      device_assignment=[[self._device.id]])
        return self._device.client.deserialize_executable(executable, [self._device], options)
    raise pickle.UnpicklingError(f'unknown kind of object in a program: {pid[0]}')


class StoredProgram(NamedTuple):
  """A compiled program for one device, as bytes."""

  content: bytes
  addresses: tuple[int, ...]  # of simulators 0, 1, ... in the content, where they are decimal text
  in_tree: Any  # structure of the arguments
  out_tree: Any  # structure of the results

  def fits(self, addresses: Sequence[int]) -> bool:
    """Returns whether each of these addresses has at most as many digits as the one it replaces."""
    return all(len(str(new)) <= len(str(old))
               for new, old in zip(addresses, self.addresses, strict=True))

  def load(self, addresses: Sequence[int], device: jax.Device) -> jax.stages.Compiled:
    """Returns the program with other addresses of simulators.

    Args:
      addresses: of simulators 0, 1, ...; they must fit (`fits`).
      device: to run it on, of the kind that it was compiled for.
    """
    new_texts = {str(old).encode(): str(new).zfill(len(str(old))).encode()
                 for old, new in zip(self.addresses, addresses, strict=True)}
    # In one pass, since a new simulator may have the old address of another one.
    content = _pattern(self.addresses).sub(lambda match: new_texts[match[0]], self.content)
    unloaded, args_info, no_kwargs = _Unpickler(content, device).load()
    return jax.stages.Compiled(unloaded.load(), [], self.in_tree.unflatten(args_info),
                               self.out_tree, no_kwargs=no_kwargs)


def load_or_compile(lowered: jax.stages.Lowered, addresses: Sequence[int], device: jax.Device
                    ) -> tuple[jax.stages.Compiled, StoredProgram | None]:
  """Returns a program from the compilation cache, or else compiles it.

  Args:
    lowered: the program.
    addresses: of its simulators.
    device: that it was lowered for.

  Returns:
    The program, and what it is stored as; None if it cannot be stored, because it calls Python, or
    because its bytes do not have the addresses where they are expected.
  """
  text = lowered.as_text()
  if _CALLS_PYTHON in text:
    return compile_uncached(lowered), None
  file = _file(text, lowered, addresses, device)
  trees = jax.tree.structure(lowered.args_info), lowered.out_tree
  stored = _read(file)
  if stored is not None:
    program = StoredProgram(*stored, *trees)
    if program.fits(addresses):
      return program.load(addresses, device), program

  start = time.monotonic()
  compiled = compile_uncached(lowered)
  seconds = time.monotonic() - start
  content, _, _ = serialize_executable.serialize(compiled)
  if not _has_addresses(content, text, addresses):
    return compiled, None
  if seconds >= jax.config.jax_persistent_cache_min_compile_time_secs:
    _write(file, content, addresses)
  return compiled, StoredProgram(content, tuple(addresses), *trees)


def compile_uncached(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
  """Compiles a program with references to simulators, which are useless in JAX's cache."""
  with outside_of_jax_cache():
    return lowered.compile()


def _has_addresses(content: bytes, text: str, addresses: Sequence[int]) -> bool:
  """Returns whether the bytes of a program have all addresses where they are expected.

  XLA stores each call twice: in the program's text, and among the steps that it takes.

  Args:
    content: the bytes.
    text: of the program before it was compiled.
    addresses: of its simulators.
  """
  for address in addresses:
    pattern = _pattern([address])
    calls = len(pattern.findall(text.encode()))
    if not calls or len(pattern.findall(content)) != 2 * calls:
      return False
  return True


def _pattern(addresses: Sequence[int]) -> re.Pattern[bytes]:
  """Returns the pattern of any of these numbers in text; it matches nothing if there are none."""
  numbers = '|'.join(map(str, addresses))
  return re.compile(rf'(?<!\d)(?:{numbers or "(?!)"})(?!\d)'.encode())


@contextlib.contextmanager
def outside_of_jax_cache() -> Iterator[None]:
  """Keeps programs that are compiled in the block out of JAX's compilation cache."""
  # For this thread only: others may compile meanwhile.
  with jax_config.persistent_cache_min_compile_time_secs(math.inf):
    yield


@functools.cache
def processor() -> str:
  """Returns a digest of the kind of this processor: code for one may not run on another."""
  lines = Path('/proc/cpuinfo').read_text().splitlines()
  features = sorted({x for x in lines if x.startswith(('model name', 'flags', 'Features'))})
  return hashlib.sha256('\n'.join(features).encode()).hexdigest()[:12]


def processor_and_threads() -> tuple[str, int, str | None]:
  """Returns the processor, its threads and those of XLA's pool.

  XLA splits some loops over as many threads as there are in both.
  """
  return processor(), len(os.sched_getaffinity(0)), os.environ.get('NPROC')


def name_by_processor() -> None:
  """Adds `processor_and_threads` to the names of programs in JAX's compilation cache; call it once.

  Otherwise machines that share a folder would take each other's programs.
  """
  given = cache_key.custom_hook
  cache_key.custom_hook = lambda: f'{given()} {processor_and_threads()}'


def make_private(folder: Path) -> None:
  """Makes a folder, and the missing ones above it, in which only the user can write.

  Raises:
    OSError: it cannot be made.
  """
  # Oldest first. `Path.mkdir` would make the ones above with write bits that the umask leaves.
  for path in (*reversed(folder.parents), folder):
    if not path.is_dir():
      path.mkdir(mode=0o700, exist_ok=True)


def danger_of(folder: str) -> str:
  """Returns how others could put programs into a folder from which they are executed.

  The folder must belong to the user, or to root, and nobody else may write to it: the names and
  digests of programs are no secret. Nobody else may write to the folders above it either, since
  they could put another folder in its place; in a sticky one, such as /tmp, they cannot if what is
  in it belongs to the user. The owners of other folders above are trusted: they give the user a
  place.

  Args:
    folder: a path; it need not exist. Nothing is known about addresses with '://'.

  Returns:
    A phrase; '' if only the user can.
  """
  if '://' in folder:
    return ''
  path = Path(folder).absolute()
  # Links are in folders of the first path, and lead to folders of the second.
  return _danger_of_path(path) or _danger_of_path(path.resolve())


def _danger_of_path(folder: Path) -> str:
  """Returns what `danger_of` returns, for a path in which links are followed unseen."""
  is_shared = False  # the folder above is a sticky one, in which others make folders, too
  for path in (*reversed(folder.parents), folder):
    try:
      info = path.stat()
    except OSError:  # the user will make a missing folder
      return ''
    is_last = path == folder
    if (is_last or is_shared) and info.st_uid not in (os.geteuid(), 0):
      return f'{shorten(str(path))} belongs to another user'
    others_write = bool(info.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    is_shared = others_write and bool(info.st_mode & stat.S_ISVTX)
    if others_write and is_last:
      return f'others can write to {shorten(str(path))} (delete it, or empty it and chmod go-w)'
    if others_write and not is_shared:
      return f'others can write to {shorten(str(path))} (chmod go-w)'
  return ''


def _only_mine(info: os.stat_result) -> bool:
  """Returns whether a file belongs to the user, or to root, and nobody else may write to it."""
  return (info.st_uid in (os.geteuid(), 0)
          and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _file(text: str, lowered: jax.stages.Lowered, addresses: Sequence[int], device: jax.Device
          ) -> Path | None:
  """Returns the file of a program in the folder of JAX's cache; None if there is no cache.

  Args:
    text: of the program.
    lowered: the program.
    addresses: of its simulators.
    device: that it was lowered for.
  """
  folder = jax.config.jax_compilation_cache_dir
  if folder is None or not jax.config.jax_enable_compilation_cache or '://' in folder:
    return None
  if danger_of(folder) or danger_of(os.path.join(folder, _FOLDER)):
    return None
  numbers = {str(address).encode(): b'simulator %d' % i for i, address in enumerate(addresses)}
  without_addresses = _pattern(addresses).sub(lambda match: numbers[match[0]], text.encode())
  # All that the result of the compiler depends on.
  parts = (without_addresses, lowered.args_info, lowered.out_tree, device.device_kind,
           jax.__version__, importlib.metadata.version('jaxlib'), os.environ.get('XLA_FLAGS'),
           *processor_and_threads())
  name = hashlib.sha256('\n'.join(map(str, parts)).encode()).hexdigest()
  return Path(folder) / _FOLDER / f'{name}-cache'


def _read(file: Path | None) -> tuple[bytes, tuple[int, ...]] | None:
  """Returns the content and the addresses of a stored program.

  Returns:
    The pair; None if there is no such file, or it is damaged.
  """
  if file is None:
    return None
  try:
    if not _only_mine(file.stat()):
      return None
    stored = file.read_bytes()
  except OSError:
    return None
  digest, rest = stored[:32], stored[32:]
  if hashlib.sha256(rest).digest() != digest:
    return None
  addresses, content = rest.split(b'\n', 1)
  return content, tuple(map(int, addresses.split()))


def _write(file: Path | None, content: bytes, addresses: Sequence[int]) -> None:
  """Stores a program: its digest, its addresses in a line, its content.

  Does nothing if the disk refuses it.
  """
  if file is None:
    return
  rest = ' '.join(map(str, addresses)).encode() + b'\n' + content
  with contextlib.suppress(OSError):
    make_private(file.parent)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as unfinished:
      try:
        unfinished.write(hashlib.sha256(rest).digest() + rest)
        unfinished.flush()
        os.replace(unfinished.name, file)
      except OSError:
        os.unlink(unfinished.name)
