"""The side of a process on the cluster. It needs no JAX until its object is made."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray

# Packages whose versions must be those of the learner.
PACKAGES = ('jax', 'jaxlib', 'envpool')


class About(NamedTuple):
  """A process, its machine and its versions."""

  pid: int
  host: str
  versions: dict[str, str]
  cpu: str  # model of the processor

  @property
  def place(self) -> str:
    """The process and its machine in words."""
    return f'process {self.pid} on {self.host}'


class Header(NamedTuple):
  """The small part of an answer, which travels ahead of the result."""

  seconds: float  # duration of the call in the process
  nbytes: int  # bytes of the result's arrays


def about() -> About:
  """Returns the description of this process."""
  versions = {'python': platform.python_version()}
  for name in PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = 'missing'
  return About(os.getpid(), socket.gethostname(), versions, _processor())


def _processor() -> str:
  """Returns the model of the processor."""
  try:
    lines = Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    lines = []
  names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
  return names[0] if names else platform.machine()


def fetch(references: Sequence[ray.ObjectRef]) -> list[Any] | None:
  """Returns the values of references; None if one of them was lost with its machine."""
  try:
    return ray.get(list(references))
  except ray.exceptions.ObjectLostError:
    return None


class Process:
  """Makes one object, and calls its methods."""

  def __init__(self, factory: str, args: Sequence[Any]):
    """Notes what to make; the first call makes it, so that an error of it is an error of a call.

    Args:
      factory: 'module:attribute' of a function or class.
      args: arguments of the factory.
    """
    self._factory = factory
    self._args = args
    self._object: Any = None

  def about(self) -> About:
    """Returns the description of this process."""
    return about()

  def call(self, method: str, *args: Any) -> tuple[Header, Any]:
    """Calls a method of the object.

    Args:
      method: the name of the method.
      *args: arguments of the method.

    Returns:
      The header, and the method's result, which is a pair (bytes of arrays, value).
    """
    if self._object is None:
      module, _, attribute = self._factory.partition(':')
      self._object = getattr(importlib.import_module(module), attribute)(*self._args)
    start = time.perf_counter()
    nbytes, value = getattr(self._object, method)(*args)
    return Header(time.perf_counter() - start, nbytes), value
