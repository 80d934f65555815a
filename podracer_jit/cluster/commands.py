"""Commands of the package as tasks of a Ray cluster, whose machines share the files."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from podracer_jit.runtime import children

_POLL_S = 0.5


class Commands:
  """Commands that run on the cluster, by name."""

  def __init__(self, cpus: float, gpus: float):
    """Begins without any.

    Args:
      cpus: CPUs that each reserves.
      gpus: GPUs that each reserves.
    """
    self._task = ray.remote(_run)
    # Without retries: whoever began a command decides about that.
    self._options = dict(num_cpus=cpus, num_gpus=gpus, max_retries=0)
    self._running: dict[str, tuple[ray.ObjectRef, Path]] = {}

  def begin(self, name: str, arguments: Sequence[str], log: Path, memory: int) -> None:
    """Begins a command as soon as the cluster has room for it.

    Args:
      name: of the command.
      arguments: of `podracer_jit`.
      log: the file to which its output is appended; LOG.stop beside it asks it to end.
      memory: bytes that it reserves.
    """
    stop = log.with_name(f'{log.name}.stop')
    stop.unlink(missing_ok=True)
    environment = {'PYTHONPATH': os.pathsep.join(path for path in sys.path if path)}
    reference = self._task.options(memory=memory, **self._options).remote(
        list(arguments), str(log), str(stop), os.getcwd(), environment)
    self._running[name] = reference, stop

  def ended(self) -> Iterator[tuple[str, int]]:
    """Yields the names of the commands that have ended since the last call, and exit codes.

    A command whose machine was lost has exit code 1.
    """
    for name, (reference, stop) in list(self._running.items()):
      if not ray.wait([reference], timeout=0)[0]:
        continue
      del self._running[name]
      stop.unlink(missing_ok=True)
      try:
        yield name, ray.get(reference)
      except ray.exceptions.RayError as error:
        words = ' '.join(str(error).split())[:300]
        with contextlib.suppress(OSError), stop.with_suffix('').open('a') as log:
          log.write(f'podracer_jit: the process on the cluster was lost: {words}\n')
        yield name, 1

  def stop(self, name: str) -> None:
    """Asks a command to save and end."""
    self._running[name][1].touch()


@contextlib.contextmanager
def connected() -> Iterator[int]:
  """Connects this process to the cluster at RAY_ADDRESS during the block.

  Yields:
    The CPUs of the cluster.

  Raises:
    ValueError: there is none.
  """
  address = os.environ.get('RAY_ADDRESS')
  if not address:
    raise ValueError('--ray: set RAY_ADDRESS to the address of the cluster, such as 10.0.0.1:6379')
  handler = signal.getsignal(signal.SIGTERM)
  try:
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
  except Exception as error:  # noqa: BLE001 - Ray raises errors of many kinds
    ray.shutdown()
    words = ' '.join(str(error).split())[:300]
    raise ValueError(f'--ray: no Ray cluster at RAY_ADDRESS={address}: {words}') from None
  finally:
    signal.signal(signal.SIGTERM, handler)  # Ray's own would end the process at once
  try:
    yield int(ray.cluster_resources().get('CPU', 0))
  finally:
    ray.shutdown()


def _run(arguments: Sequence[str], log: str, stop: str, folder: str,
         environment: Mapping[str, str]) -> int:
  """Runs a command to its end, on a machine of the cluster; returns its exit code.

  Args:
    arguments: of the command.
    log: the file for its output.
    stop: a file; when it appears, the command is asked to end.
    folder: in which it runs, if this machine has it.
    environment: variables that it gets.
  """
  with Path(log).open('ab') as output:
    process: Any = children.start(
        arguments, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        env=os.environ | environment, cwd=folder if Path(folder).is_dir() else None)
  asked = False
  while process.poll() is None:
    if not asked and Path(stop).exists():
      asked = True
      process.send_signal(signal.SIGTERM)
    time.sleep(_POLL_S)
  # A signal counts as in a shell.
  return process.returncode if process.returncode >= 0 else 128 - process.returncode
