"""Actors and gradient workers on a cluster: how a run begins them, and what each process does.

A process makes one object of the class `Service` from a config, a number and a life. It starts the
environments of a segment at the first call for this segment, and prepares an update at the first
call for a gradient of it. So a new process needs nothing from the one before. If G runs in the
cluster, too, experience stays in the process that made it, and channels pass a reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from podracer_jit import parts
from podracer_jit.cluster import set_ray_environment
from podracer_jit.envs.families import may_start_jax
from podracer_jit.errors import EnvironmentFailed, environment_failure
from podracer_jit.experiment import build, memory, modules
from podracer_jit.experiment.resolve import changed, placement_of, resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.learner import sharding, updates
from podracer_jit.runtime import host, placement

if TYPE_CHECKING:  # the imports of Ray take a second
  from podracer_jit.cluster.ray_cluster import Cluster

_SERVICE = f'{__name__}:Service'
# The folder of the user's modules in the code that is sent to processes.
_BESIDE = 'beside'
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
  for field, module in modules.named(config).items():
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
  actors = max(1, len(options.actor_devices)) * max(1, options.actors_per_device)
  processes = 2 * max(actors, len(options.learner_devices))
  store_bytes = int(options.store_gb * 1e9)
  if not may_start_jax(str(config.get('env', {}).get('task', ''))):
    experiment = resolve(config)  # a wrong config need not wait for Ray
    processes = num_processes(experiment)
    store_bytes = store_bytes or bytes_under_way(experiment)
  set_ray_environment()
  from podracer_jit.cluster import ray_cluster

  def files(folder: Path) -> None:
    ray_cluster.copy_code([Path(build.__file__).parents[1]], folder)
    # In a folder of their own, as Ray puts the first one before the modules of Python itself.
    (folder / _BESIDE).mkdir()
    ray_cluster.copy_code(code(config), folder / _BESIDE)

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
  build.check_network(experiment)
  _, rollout, _ = memory.bytes_of_pool(experiment, build.make_acting(experiment))
  rollouts = rollout * experiment.num_shards
  state = experiment.algorithm.state_shapes
  params = memory.nbytes(state.params)
  published = memory.nbytes(jax.eval_shape(experiment.algorithm.for_actors, state))
  gradients = 0
  if experiment.scheme.graph.separate_updates:
    workers = len(experiment.placement.learner_devices)
    published += memory.nbytes(updates.view(state))
    gradients = params * workers
  return _COPIES * (rollouts + published + gradients)


def code(config: Mapping[str, Any]) -> list[Path]:
  """Returns the files that processes import: the user's modules with all beside them.

  Installed packages are not among them: each machine has its own.
  """
  # A module that this process has need not be one that an import would find.
  sources = {module: Path(getattr(sys.modules.get(module), '__file__', None)
                          or parts.file_of(module))
             for module in modules.named(config).values()}
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


class Crew:
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
    """Begins the processes, unless they run already; those of another crew end."""
    if not self._cluster.takes_over(self):
      return
    from podracer_jit.schemes import remote
    experiment = self._experiment
    place = experiment.placement
    # Other machines must not choose for themselves what is left open.
    fields = changed(experiment, placement={'cluster': 'none', 'auto': False} | {
        name: getattr(place, name) for name in place.chosen}).fields
    config_files = tuple(Path(file).name for file in parts.search().files)

    def begin(name: str, actor: int) -> Any:
      return self._cluster.remote(name, _SERVICE, lambda life: (fields, config_files, actor, life))

    self._actors = [begin(f'actor {i}', i) for i in range(place.num_actors)]
    # With a lag of None, an actor may be any number of updates behind.
    self._paces = [remote.Pace(2 if experiment.scheme.lag is None else 1) for _ in self._actors]
    if experiment.scheme.graph.separate_updates:
      self._workers = self._actors
      if not experiment.scheme.colocated:
        self._workers = [begin(f'worker {i}', 0) for i in range(len(place.learner_devices))]

  def of(self, experiment: Experiment) -> Crew:
    """See `build.Crew`."""
    return Crew(self._cluster, experiment)

  def actors(self, index: int, stop: Callable[[], bool]) -> list[Any]:
    """See `build.Crew`."""
    from podracer_jit.schemes.remote import RemoteActor
    self._begin()
    self._cluster.gives_up = overdue(stop)
    experiment = self._experiment
    width = experiment.env.num_envs // len(self._actors)
    return [RemoteActor(actor, pace, index, i * width, self._cluster.publish, bool(self._workers))
            for i, (actor, pace) in enumerate(zip(self._actors, self._paces, strict=True))]

  def gradient_workers(self) -> list[Any]:
    """See `build.Crew`."""
    from podracer_jit.schemes.remote import RemoteGradients
    self._begin()
    return [RemoteGradients(worker, self._cluster.publish) for worker in self._workers]

  def metrics(self) -> dict[str, float]:
    """See `build.Crew`."""
    return self._cluster.metrics()

  def lives(self) -> dict[str, int]:
    """See `build.Crew`."""
    return self._cluster.lives()


class Service:
  """R and G of a process. A segment begins with the first call for it."""

  def __init__(self, fields: Mapping[str, Any], config_files: Sequence[str], actor: int,
               life: int):
    """Builds all but environments and programs.

    Args:
      fields: the config as plain values, with the placement of the whole run, but for the cluster.
      config_files: names of config files, which may register environments.
      actor: number of the process's actor.
      life: the number of processes before this one that had its part and died. Each life has
        random numbers of its own.
    """
    warnings.filterwarnings('ignore', module='gymnasium')  # about bounds that we do not use
    parts.look_beside(Path(_BESIDE) / 'config.py')
    for name in config_files:
      parts.look_beside(Path(_BESIDE) / name)
    self._actor = actor
    whole = resolve(fields)
    options = self._of_run = whole.placement
    own_options = dataclasses.replace(options, actor_devices=(0,), learner_devices=(0,),
                                      actors_per_device=1, cluster='none')
    host.prepare_host(own_options, whole.numerics.deterministic)
    device = jax.local_devices(backend=None if options.actor_gpus else 'cpu')[0]
    # The vector environments of the process share its cores.
    pools = whole.num_shards // options.num_actors
    threads = options.env_threads or max(1, int(options.actor_cpus) // pools)
    place = placement.Placement((device,), placement.mesh_of([device]), (device,), threads)
    run = build.make_run(dataclasses.replace(whole, placement=own_options), place=place)
    self._run = dataclasses.replace(run, life=life)
    self._device = device
    self._segment: int | None = None
    self._envs = contextlib.ExitStack()
    self._program: Any = None
    self._state: Any = None
    self._prepared: tuple[int, Any] | None = None
    self._gradients: sharding.GradientPrograms | None = None

  def rollout(self, segment: int, params: Any) -> tuple[int, Any]:
    """Makes a rollout.

    Args:
      segment: the index of the segment. The first call for a segment starts its environments.
      params: what actors get of a state, arrays.

    Returns:
      The bytes of the experience, and the experience as NumPy arrays.
    """
    with _one_line_failures():
      params = jax.device_put(params, self._device)
      if segment != self._segment:
        self._begin(segment, params)
      self._state, experience = self._program(params, self._state)
      return _as_numpy(experience)

  def _begin(self, segment: int, params: Any) -> None:
    """Starts the environments of a segment, and compiles their program."""
    self._program = self._state = None
    self._envs.close()
    run = self._run
    ids = build.shards_of(run.experiment, self._actor, self._of_run.num_actors)
    actor = build.make_actor(run, segment, ids, self._device)
    self._envs.callback(actor.rollout_program.close)
    rollout = run.acting.rollout(actor.rollout_program.vector_envs)
    self._program = actor.rollout_program.load(rollout, (params, actor.state), donate=(1,),
                                               kept=run.kept_programs)
    self._state = actor.state
    self._segment = segment

  def gradient(self, view: Any, update: int, step: int, key: np.ndarray,
               references: Sequence[Any]) -> tuple[int, Any]:
    """Takes a gradient step of an update.

    Args:
      view: of the state, arrays.
      update: the number of the update.
      step: the number of the gradient step in the update, from 0.
      key: data of the run's PRNG key.
      references: references to the view at the beginning of the update, and to the experience
        of each of the worker's actors.

    Returns:
      The bytes of the answer, and the answer of `GradientWorker.gradient`; None in its place if
      experience was lost with its machine.
    """
    from podracer_jit.cluster.process import fetch
    workers = len(self._of_run.learner_devices)
    programs = self._gradients = self._gradients or self._run.learner.gradient_programs(
        self._run.place.mesh, workers)
    if self._prepared is None or self._prepared[0] != update or step == 0:
      values = fetch(references)
      if values is None:
        return 0, None
      first, *rollouts = values
      batch = placement.gather([placement.scatter(
          [each for rollout in rollouts for each in rollout], 0,
          self._run.experiment.env.num_envs // workers, programs.mesh)], programs.mesh)
      run_key = jax.random.fold_in(jax.random.wrap_key_data(key), update)
      self._prepared = update, programs.prepare(
          *placement.everywhere((first, run_key), programs.mesh), batch)
    prepared = self._prepared[1]
    sums = programs.gradient(placement.everywhere(view, programs.mesh), prepared, step)
    last = step == self._run.learner.gradient_steps - 1
    return _as_numpy((sums, prepared.batch_stats if last else None))


def _as_numpy(tree: Any) -> tuple[int, Any]:
  """Returns the bytes of a tree's arrays, and the tree with NumPy arrays."""
  tree = jax.tree.map(np.asarray, jax.block_until_ready(tree))
  return sum(x.nbytes for x in jax.tree.leaves(tree)), tree


@contextlib.contextmanager
def _one_line_failures():
  """Shortens the errors of environments to the line that says what went wrong."""
  try:
    yield
  except Exception as error:
    words = environment_failure(error)
    if words:
      raise EnvironmentFailed(words) from None
    raise
