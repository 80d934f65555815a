"""Compiled programs as bytes in which the addresses of simulators can be exchanged.

A program that calls a simulator contains the simulator's address, so it is of no use to another
simulator. It is compiled with placeholders in place of the addresses here, and stored as bytes.
Loading them with the addresses of other simulators takes milliseconds instead of the seconds of a
compilation. The bytes also go to the folder of JAX's compilation cache, for later processes.

JAX's own cache cannot do this: a program that it has loaded cannot be serialized again (it fails
when it is called, jaxlib 0.10.2).

Seen on CPUs only. For other platforms it is unknown whether XLA stores an address as text.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

# XLA stores the numbers of a call as decimal text. A placeholder and the address in its place have
# the same number of digits.
_DIGITS = 19
_FIRST_PLACEHOLDER = 9_187_201_950_435_737_000


def is_supported(device: jax.Device) -> bool:
  """Returns whether addresses can be exchanged in programs for a device."""
  return device.platform == 'cpu'


def placeholder(index: int) -> int:
  """Returns the number that stands for the address of simulator `index` of a program."""
  return _FIRST_PLACEHOLDER + index


class StoredProgram(NamedTuple):
  """A compiled program for one device, as bytes with placeholders."""

  content: bytes
  in_tree: Any  # structure of the arguments
  out_tree: Any  # structure of the results

  def load(self, addresses: Sequence[int], device: jax.Device) -> jax.stages.Compiled:
    """Returns the program with the addresses of simulators in place of the placeholders.

    Args:
      addresses: of simulators 0, 1, ...
      device: that the program was compiled for.

    Raises:
      ValueError: the program does not call one of the simulators.
    """
    content = self.content
    for index, address in enumerate(addresses):
      text = str(placeholder(index)).encode()
      if text not in content:
        raise ValueError(f'the program does not call simulator {index} of {len(addresses)}')
      content = content.replace(text, str(address).zfill(_DIGITS).encode())
    return serialize_executable.deserialize_and_load(
        content, self.in_tree, self.out_tree, device.client, [device])


def compile_or_read(lowered: jax.stages.Lowered, device: jax.Device) -> StoredProgram:
  """Returns a program from the compilation cache, or else compiles it.

  Args:
    lowered: the program, with placeholders.
    device: that it was lowered for.
  """
  file = _file(lowered, device)
  content = _read(file)
  if content is None:
    start = time.monotonic()
    with outside_of_jax_cache():
      compiled = lowered.compile()
    seconds = time.monotonic() - start
    content, _, _ = serialize_executable.serialize(compiled)
    if seconds >= jax.config.jax_persistent_cache_min_compile_time_secs:
      _write(file, content)
  return StoredProgram(content, jax.tree.structure(lowered.args_info), lowered.out_tree)


@contextlib.contextmanager
def outside_of_jax_cache() -> Iterator[None]:
  """Keeps programs that are compiled in the block out of JAX's compilation cache."""
  name = 'jax_persistent_cache_min_compile_time_secs'
  previous_seconds = getattr(jax.config, name)
  jax.config.update(name, math.inf)
  try:
    yield
  finally:
    jax.config.update(name, previous_seconds)


def _file(lowered: jax.stages.Lowered, device: jax.Device) -> Path | None:
  """Returns the file of a program in the folder of JAX's cache; None if there is no cache."""
  folder = jax.config.jax_compilation_cache_dir
  if folder is None or not jax.config.jax_enable_compilation_cache:
    return None
  # All that the result of the compiler depends on. The folder itself is for one kind of processor.
  parts = (lowered.as_text(), lowered.args_info, lowered.out_tree, device.id, device.device_kind,
           jax.__version__, importlib.metadata.version('jaxlib'), os.environ.get('XLA_FLAGS'))
  name = hashlib.sha256('\n'.join(map(str, parts)).encode()).hexdigest()
  return Path(folder) / 'with_simulators' / f'{name}-cache'


def _read(file: Path | None) -> bytes | None:
  """Returns the content of a stored program; None if there is none, or the file is damaged."""
  if file is None:
    return None
  try:
    stored = file.read_bytes()
  except OSError:
    return None
  digest = stored[:32]
  content = stored[32:]
  return content if hashlib.sha256(content).digest() == digest else None


def _write(file: Path | None, content: bytes) -> None:
  """Stores a program with its digest; does nothing if the disk refuses it."""
  if file is None:
    return
  with contextlib.suppress(OSError):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as unfinished:
      try:
        unfinished.write(hashlib.sha256(content).digest() + content)
        unfinished.flush()
        os.replace(unfinished.name, file)
      except OSError:
        os.unlink(unfinished.name)
