"""Actors and gradient workers on a cluster: what a run needs to begin them."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from podracer_jit import parts
from podracer_jit.agents import networks
from podracer_jit.cluster import set_ray_environment
from podracer_jit.envs.families import may_start_jax
from podracer_jit.experiment import build, memory
from podracer_jit.experiment import schema as config_lib
from podracer_jit.experiment.experiment import Experiment
from podracer_jit.experiment.resolve import changed, placement_of, resolve

if TYPE_CHECKING:  # the imports of Ray take a second
  from podracer_jit.cluster.ray_cluster import Cluster

_SERVICE = 'podracer_jit.training.service:Service'
# Copies of each rollout in Ray's memory: two under way, two waiting, one learned from, one freed.
_COPIES = 6

_GRACE_S = 4.0  # after a signal, until waits for processes end


@contextlib.contextmanager
def joined(config: Mapping[str, Any]) -> Iterator[Cluster | None]:
  """Connects to the cluster that a config asks for; yields None if it asks for none.

  Ray starts its daemons by forks, so call this before anything that starts JAX.

  Args:
    config: the config as plain values.

  Raises:
    ValueError: the config is wrong, or there is no cluster.
  """
  place = config.get('placement')
  if not isinstance(place, Mapping) or place.get('cluster', 'none') == 'none':
    yield None
    return
  for field, module in config_lib.modules(config).items():
    if module == parts.MAIN:
      raise ValueError(f'{field}: is in the main program ({module}), which the processes of the '
                       'cluster cannot import; move it into a file of its own, mine.py, and name '
                       'it mine:...')
  options = placement_of(config)
  if jax.distributed.is_initialized():
    raise ValueError('placement.cluster: one process learns with all its devices, and the cluster '
                     'acts; must be none with --distributed')
  if importlib.util.find_spec('ray') is None:
    raise ValueError(f'placement.cluster: ray is not installed: {sys.executable} -m pip install '
                     'ray')
  processes = 2 * max(options.num_actors, len(options.learner_devices))
  store_bytes = int(options.store_gb * 1e9)
  if not may_start_jax(str(config.get('env', {}).get('task', ''))):
    experiment = resolve(config)  # a wrong config need not wait for Ray
    processes = num_processes(experiment)
    store_bytes = store_bytes or bytes_under_way(experiment)
  set_ray_environment()
  from podracer_jit.cluster import ray_cluster
  from podracer_jit.training.service import BESIDE

  def files(folder: Path) -> None:
    ray_cluster.copy_code([Path(build.__file__).parents[1]], folder)
    # In a folder of their own, as Ray puts the first one before the modules of Python itself.
    (folder / BESIDE).mkdir()
    ray_cluster.copy_code(code(config), folder / BESIDE)

  with ray_cluster.connected(options.actor_cpus, options.actor_gpus, options.actor_lives,
                             processes, store_bytes, files) as cluster:
    yield cluster


def num_processes(experiment: Experiment) -> int:
  """Returns the number of processes that a run has on its cluster."""
  place = experiment.placement
  graph = experiment.scheme.graph
  apart = graph.separate_updates and not experiment.scheme.colocated
  return place.num_actors + (len(place.learner_devices) if apart else 0)


def bytes_under_way(experiment: Experiment) -> int:
  """Returns the bytes that Ray's memory on the machine of the learner needs; starts nothing."""
  network = build.make_network(experiment)
  acting = build.make_acting(experiment, network)
  _, rollout, _ = memory.bytes_of_pool(experiment, network, acting)
  rollouts = rollout * experiment.num_shards
  spec = experiment.spec
  params = memory.nbytes(jax.eval_shape(
      lambda: networks.init_params(network, jax.random.key(0), spec.obs_shape, spec.obs_dtype)))
  gradients = 0
  if experiment.scheme.graph.separate_updates:
    workers = len(experiment.placement.learner_devices)
    groups = experiment.num_grad_shards // workers
    # A power of two of groups is added before it is sent; see `deterministic.partial_sums`.
    gradients = params * workers * (1 if groups.bit_count() == 1 else groups)
  return _COPIES * (rollouts + params + gradients)


def code(config: Mapping[str, Any]) -> list[Path]:
  """Returns the files that processes import: the user's modules with all beside them.

  Installed packages are not among them: each machine has its own.
  """
  # A module that this process has need not be one that an import would find.
  sources = {module: Path(getattr(sys.modules.get(module), '__file__', None)
                          or parts.file_of(module))
             for module in config_lib.modules(config).values()}
  if may_start_jax(str(config.get('env', {}).get('task', ''))):
    # A config file may register environments.
    sources |= {Path(file).stem: Path(file) for file in parts.search().files}
  files = {}
  for module, source in sources.items():
    if source.is_file() and not {'site-packages', 'dist-packages'} & set(source.parts):
      top = parts.root_of(source, module)
      files |= dict.fromkeys(top.glob('*.py'))
      files |= dict.fromkeys(path.parent for path in top.glob('*/__init__.py')
                             if path.parent.name != 'podracer_jit')
      package = top / module.partition('.')[0]
      files |= {package: None} if package.is_dir() else {}
  return list(files)


def overdue(stop: Callable[[], bool], grace_s: float = _GRACE_S) -> Callable[[], bool]:
  """Returns a function that tells whether a stop was asked for so many seconds ago.

  Args:
    stop: whether the run shall stop. Usually its learner then ends with the next update.
    grace_s: seconds that the learner has. Then no wait for a process goes on.
  """
  since: list[float] = []

  def is_overdue() -> bool:
    if not since and stop():
      since.append(time.monotonic())
    return bool(since) and time.monotonic() - since[0] >= grace_s

  return is_overdue


class Team:
  """The processes of a run on its cluster."""

  def __init__(self, cluster: Cluster, experiment: Experiment):
    """Begins the processes; those that find no room on a machine wait in Ray's scheduler.

    Args:
      cluster: the cluster of the run.
      experiment: the run's experiment.
    """
    self._experiment = experiment
    self._cluster = cluster
    self._actors: list[Any] = []
    self._paces: list[Any] = []
    self._workers: list[Any] = []
    self._begin()

  def _begin(self) -> None:
    """Begins the processes, unless they run already; those of another team end."""
    if not self._cluster.takes_over(self):
      return
    from podracer_jit.schemes import remote
    from podracer_jit.training.service import Role
    experiment = self._experiment
    place = experiment.placement
    workers = len(place.learner_devices)
    fields = changed(experiment, placement={'cluster': 'none'}).fields

    def begin(name: str, number: int) -> Any:
      role = Role(number, place.num_actors, workers, experiment.num_shards // place.num_actors,
                  tuple(Path(file).name for file in parts.search().files))
      return self._cluster.remote(name, _SERVICE, lambda life: (fields, role, life))

    self._actors = [begin(f'actor {i}', i) for i in range(place.num_actors)]
    # With a lag of None, an actor may be any number of updates behind.
    self._paces = [remote.Pace(2 if experiment.scheme.lag is None else 1) for _ in self._actors]
    if experiment.scheme.graph.separate_updates:
      self._workers = self._actors
      if not experiment.scheme.colocated:
        self._workers = [begin(f'worker {i}', 0) for i in range(workers)]

  def of(self, experiment: Experiment) -> Team:
    """See `build.Machines`."""
    return Team(self._cluster, experiment)

  def actors(self, index: int, stop: Callable[[], bool]) -> list[Any]:
    """See `build.Machines`."""
    from podracer_jit.schemes.remote import RemoteActor
    self._begin()
    self._cluster.gives_up = overdue(stop)
    experiment = self._experiment
    width = experiment.env.num_envs // len(self._actors)
    return [RemoteActor(actor, pace, index, i * width, self._cluster.publish, bool(self._workers))
            for i, (actor, pace) in enumerate(zip(self._actors, self._paces, strict=True))]

  def gradient_workers(self) -> list[Any]:
    """See `build.Machines`."""
    from podracer_jit.schemes.remote import RemoteGradients
    self._begin()
    return [RemoteGradients(worker, self._cluster.publish) for worker in self._workers]

  def metrics(self) -> dict[str, float]:
    """See `build.Machines`."""
    return self._cluster.metrics()

  def lives(self) -> dict[str, int]:
    """See `build.Machines`."""
    return self._cluster.lives()
