"""The connection to a Ray cluster: processes, shared values, shipped code, figures.

Only this room imports Ray, and only if a run asks for a cluster.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray
from ray._private.ray_logging import global_worker_stdstream_dispatcher as streams

from podracer_jit.cluster.process import Process
from podracer_jit.cluster.remote import Counters, Remote

_logger = logging.getLogger(__name__)
MB = 2**20
_LEAST_STORE = 80 * MB  # Ray refuses less
_LAST_LINES = 10  # lines of each process that are kept
_SPILL_LOOK_S = 5.0  # seconds between two looks at whether Ray has spilled


class Cluster:
  """A connection of this process to a cluster."""

  def __init__(self, cpus: float, gpus: float, most_deaths: int, spill_folder: Path | None):
    """Notes how processes are begun; `connected` has connected this process.

    Args:
      cpus: CPUs that each process reserves.
      gpus: GPUs that each process reserves.
      most_deaths: deaths of a process in a row after which calls fail; see `Remote`.
      spill_folder: the folder to which Ray writes arrays that do not fit its memory; None if it is
        not known.
    """
    self._cpus = cpus
    self._gpus = gpus
    self.most_deaths = most_deaths
    self._spill_folder = spill_folder
    self._spilled = False
    self._looked_s = -math.inf
    self.counters = Counters()
    self._owner: Any = None
    # Whether all waits end; the owner sets it.
    self.gives_up: Callable[[], bool] = bool
    self._remotes: list[Remote] = []
    self._lines: dict[str, collections.deque[str]] = collections.defaultdict(
        lambda: collections.deque(maxlen=_LAST_LINES))
    # Parameters for actors, and for gradient workers.
    self._published: collections.deque[tuple[Any, ray.ObjectRef]] = collections.deque(maxlen=2)
    self._publish_lock = threading.Lock()
    self._last = (time.perf_counter(), 0, 0, 0.0)  # time, bytes, gets, seconds of them

  def takes_over(self, owner: Any) -> bool:
    """Ends the processes of another owner; returns whether there was one, or none at all."""
    if self._owner is owner:
      return False
    self.close()
    self._remotes.clear()
    self._owner = owner
    return True

  def remote(self, name: str, factory: str, args: Callable[[int], Sequence[Any]]) -> Remote:
    """Begins an object in a process of its own, and a new one whenever it dies.

    Args:
      name: the name of the object, for messages.
      factory: 'module:attribute' that makes the object.
      args: life of the process -> arguments of the factory.
    """
    env = {} if self._gpus else {'JAX_PLATFORMS': 'cpu'}
    actor = ray.remote(Process).options(
        num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0, max_task_retries=0,
        runtime_env={'env_vars': env}, name=None)
    needs = [f'{count:g} {unit}{"s" if count != 1 else ""} (placement.actor_{unit.lower()}s)'
             for count, unit in ((self._cpus, 'CPU'), (self._gpus, 'GPU')) if count]
    new = Remote(name, lambda life: actor.remote(factory, args(life)),
                 ' and '.join(needs) or 'none', self)
    self._remotes.append(new)
    return new

  def last_words(self, pid: str) -> Sequence[str]:
    """See `remote.Shared`."""
    return tuple(self._lines[pid])

  def publish(self, tree: Any) -> ray.ObjectRef:
    """Returns a reference to a copy of the arrays of a tree, which each machine fetches once.

    Args:
      tree: a tree of arrays. The same object gets the same reference, if at most one other has come
        since.
    """
    with self._publish_lock:
      for published, reference in self._published:
        if published is tree:
          return reference
      # From NumPy: Ray copies a jax.Array ten times as slowly.
      reference = ray.put(jax.tree.map(np.asarray, tree))
      self._published.append((tree, reference))
      return reference

  def lives(self) -> dict[str, int]:
    """Returns the lives of the objects whose first process has died, by name."""
    return {remote.name: remote.life for remote in self._remotes if remote.life}

  def metrics(self) -> dict[str, float]:
    """Returns figures since the last call, and warns if Ray has spilled."""
    self._look_at_spills()
    now = time.perf_counter()
    counters = self.counters
    newest = (now, counters.nbytes, counters.gets, counters.get_s)
    seconds, nbytes, gets, get_s = (new - old for new, old in zip(newest, self._last, strict=True))
    self._last = newest
    alive = sum(remote.about is not None for remote in self._remotes)
    return dict(
        actors_alive=alive, actors_pending=len(self._remotes) - alive,
        actor_restarts=counters.restarts, cluster_mb_per_s=nbytes / 1e6 / max(seconds, 1e-9),
        cluster_get_ms=1000 * get_s / gets if gets else 0.0)

  def _look_at_spills(self) -> None:
    """Warns, once, if what is under way does not fit into Ray's memory."""
    if self._spill_folder is None or time.perf_counter() - self._looked_s < _SPILL_LOOK_S:
      return
    self._looked_s = time.perf_counter()
    if any(path.is_file() for path in self._spill_folder.rglob('*')):
      self._warn_of_spills()

  def _warn_of_spills(self) -> None:
    if not self._spilled:
      self._spilled = True
      remedy = ('set a larger --config.placement.store_gb' if self._spill_folder else
                'start Ray with a larger --object-store-memory')
      _logger.warning("Ray's memory for arrays under way is full, so it writes them to disk, which "
                      'is slow: %s', remedy)

  def note_output(self, batch: dict[str, Any]) -> None:
    """Keeps the last lines of each process; called by Ray with all that processes print."""
    lines = batch.get('lines', ())
    self._lines[str(batch.get('pid'))].extend(lines)
    if str(batch.get('pid')) == 'raylet' and any('Spilled ' in line for line in lines):
      self._warn_of_spills()

  def close(self) -> None:
    """Ends all processes."""
    for remote in self._remotes:
      with contextlib.suppress(ray.exceptions.RayError):
        remote.close()


@contextlib.contextmanager
def connected(cpus: float, gpus: float, most_deaths: int, processes: int, store_bytes: int,
              files: Callable[[Path], None]) -> Iterator[Cluster]:
  """Connects to the cluster of RAY_ADDRESS, or begins one on this machine.

  Ray starts its daemons by forks, so call this before JAX has threads.

  Args:
    cpus: CPUs that each process reserves.
    gpus: GPUs that each process reserves.
    most_deaths: deaths of a process in a row after which calls fail; see `Remote`.
    processes: the number of processes that will begin. A cluster of this machine has room for all.
    store_bytes: memory for arrays under way, of a cluster begun here; 0: Ray decides.
    files: copies the code that all processes need into a folder.

  Yields:
    The cluster. On the way out, its processes end, and a cluster that was begun here ends, too.

  Raises:
    ValueError: there is no cluster.
  """
  if ray.is_initialized():
    # The program has connected itself, and has shipped its code.
    with _watched(Cluster(cpus, gpus, most_deaths, None)) as cluster:
      yield cluster
    return
  address = os.environ.get('RAY_ADDRESS')
  handler = signal.getsignal(signal.SIGTERM)
  with tempfile.TemporaryDirectory(prefix='podracer_jit-ray-') as folder:
    code = Path(folder) / 'code'
    code.mkdir()
    files(code)
    arguments: dict[str, Any] = dict(
        runtime_env={'working_dir': str(code)}, logging_level=logging.ERROR)
    spill = None
    if not address:
      spill = Path(folder) / 'spilled'
      spill.mkdir()
      arguments |= dict(
          address='local', include_dashboard=False, object_spilling_directory=str(spill),
          num_cpus=max(os.cpu_count() or 1, math.ceil(cpus * processes)))
      if store_bytes:
        arguments['object_store_memory'] = max(store_bytes, _LEAST_STORE)
    try:
      ray.init(**arguments)
    except Exception as error:  # noqa: BLE001 - Ray raises errors of many kinds
      ray.shutdown()
      words = ' '.join(str(error).split())[:300]
      where = f'at RAY_ADDRESS={address}' if address else 'on this machine'
      raise ValueError(f'placement.cluster: no Ray cluster {where}: {words}') from None
    finally:
      # Ray's own handler would end the process at once.
      if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
    try:
      if address:
        _compare_store(store_bytes)
      with _watched(Cluster(cpus, gpus, most_deaths, spill)) as cluster:
        yield cluster
    finally:
      ray.shutdown()


def _compare_store(nbytes: int) -> None:
  """Warns if Ray's memory on this machine is smaller than the bytes that will be under way."""
  own_node = ray.get_runtime_context().get_node_id()
  store = next((node['Resources'].get('object_store_memory', 0) for node in ray.nodes()
                if node['NodeID'] == own_node), 0)
  if store < nbytes:
    _logger.warning("Ray's memory on this machine has %.2g GB, and up to %.2g GB may be under way: "
                    'start Ray with --object-store-memory=%d', store / 1e9, nbytes / 1e9, nbytes)


@contextlib.contextmanager
def _watched(cluster: Cluster) -> Iterator[Cluster]:
  """Lets a cluster see what its processes print; closes it on the way out."""
  streams.add_handler('podracer_jit', cluster.note_output)
  try:
    yield cluster
  finally:
    streams.remove_handler('podracer_jit')
    cluster.close()


def copy_code(paths: Sequence[Path], folder: Path) -> None:
  """Copies modules, and packages with the data in their folders, into a folder.

  Args:
    paths: .py files, and folders of packages.
    folder: to copy to.
  """
  for path in paths:
    if path.is_dir():
      shutil.copytree(path, folder / path.name, dirs_exist_ok=True,
                      ignore=shutil.ignore_patterns('__pycache__', '*.pyc'))
    else:
      shutil.copy(path, folder)
