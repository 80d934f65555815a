"""Several seeds of an experiment at once: independent agents in one program.

This needs environments that are JAX functions and a scheme that is one program. On CPUs each device
takes an equal share of the seeds, one after the other, and each seed has the bits of its run alone.
On other platforms one device takes all seeds, in a vmapped program, which may round differently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer_jit.actor import kept_envs
from podracer_jit.actor.rollouts import ActorState
from podracer_jit.experiment import build
from podracer_jit.experiment.build import Snapshot
from podracer_jit.experiment.schema import Experiment
from podracer_jit.learner import sharding
from podracer_jit.numerics import counters
from podracer_jit.options import INT32_MAX
from podracer_jit.runtime import host
from podracer_jit.schemes.reports import Report
from podracer_jit.schemes.table import SCHEMES
from podracer_jit.training import opening
from podracer_jit.training.program import Moment, ReportTo, Watcher
from podracer_jit.types import TrainState

MAX_SEEDS = 4096
# Files that are open for each seed while it trains: its lock, metrics and receipts; and with
# TensorBoard its events and two ends of a queue.
FILES_OF_SEED = 3
FILES_OF_EVENTS = 3
_SEEDS = 'seeds'  # axis of the mesh
_OTHER_FILES = 100  # of the process, with those that are open only during a save


def problems(experiment: Experiment, num_seeds: int) -> Iterator[str]:
  """Yields why the experiment cannot be trained with several seeds at once."""
  if not 1 <= num_seeds <= MAX_SEEDS:
    yield f'--num_seeds: must be from 1 to {MAX_SEEDS}, got {num_seeds}'
  if experiment.seed + num_seeds - 1 > INT32_MAX:
    yield (f'--num_seeds: the last seed would be {experiment.seed + num_seeds - 1}; must be at '
           f'most {INT32_MAX}')
  if not experiment.spec.is_function:
    yield (f'--num_seeds: wants environments that are JAX functions; {experiment.env.task} is '
           'none, so train its seeds one after the other')
  if not experiment.scheme.graph.one_program:
    names = [name for name, scheme in SCHEMES.items() if scheme.graph.one_program]
    yield (f'--num_seeds: wants a scheme that is one program, scheme = {" or ".join(names)}; got '
           f'{experiment.scheme_name}')
  if experiment.placement.learner_devices != experiment.placement.actor_devices or len(
      experiment.placement.learner_devices) > 1:
    yield '--num_seeds: wants one device; placement.learner_devices has several'
  if experiment.placement.cluster != 'none':
    yield f'placement.cluster: must be none with --num_seeds, got {experiment.placement.cluster}'
  if experiment.eval.every_updates:
    yield ('eval.every_updates: must be 0 with --num_seeds; evaluate the workdir of a seed '
           'afterwards')


def on_one_device(experiment: Experiment) -> Experiment:
  """Returns the experiment with one device, if the rule has chosen its devices.

  If the config sets those of actors or of learners, the others are the same.
  """
  names = ('actor_devices', 'learner_devices')
  place = experiment.placement
  given = [getattr(place, name) for name in names if name not in place.chosen]
  chosen = {name: given[0] if given else (0,) for name in names if name in place.chosen}
  return dataclasses.replace(
      experiment, placement=dataclasses.replace(experiment.placement, **chosen))


def allow_open_files(num_seeds: int, tensorboard: bool) -> None:
  """Raises this process's limit of open files, if so many seeds need more.

  Args:
    num_seeds: number of seeds.
    tensorboard: whether they write events.

  Raises:
    ValueError: the limit cannot be so high.
  """
  needed = _OTHER_FILES + num_seeds * (FILES_OF_SEED + (FILES_OF_EVENTS if tensorboard else 0))
  limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
  if needed <= limit or limit == resource.RLIM_INFINITY:
    return
  if highest != resource.RLIM_INFINITY and needed > highest:
    raise ValueError(f'--num_seeds: {num_seeds} seeds need {needed:,} open files, and this process '
                     f'may have {highest:,} (ulimit -n); raise that limit, or train fewer at once')
  resource.setrlimit(resource.RLIMIT_NOFILE, (needed, highest))


def check_stages(opened: opening.Opened, seed: int) -> None:
  """Checks that a seed goes on with one config.

  Raises:
    ValueError: updates from before a change of the config must be made again.
  """
  stages = list(opening.stages(opened.run, opened.record, opened.update or 0))
  if len(stages) > 1:
    raise ValueError(f'--num_seeds: updates from before a change of the config are lost in '
                     f'{opened.workdir}; go on there first, with seed {seed} alone')


class SeedsProgram:
  """The `Program` of several seeds: one program, with a leading axis of seeds."""

  def __init__(self, runs: Sequence[build.Run], snapshots: Sequence[Snapshot]):
    """Starts the environments of all seeds, and takes over the snapshots.

    Args:
      runs: the run of each seed; nothing but their experiments differs.
      snapshots: where each run is.
    """
    self._run = runs[0]
    self._num_seeds = len(runs)
    self._begun = [(snapshot.segment, snapshot.begun) for snapshot in snapshots]
    self._updates = [snapshot.update for snapshot in snapshots]
    self._envs = contextlib.ExitStack()
    states = []
    actors = []
    with contextlib.ExitStack() as failing:
      failing.callback(self._envs.close)
      for run, snapshot in zip(runs, snapshots, strict=True):
        actors += build.make_actors(run, snapshot, self._envs)
        # A learner with a replay allocates it here.
        state = run.learner.allocate(snapshot.state)
        states.append(jax.tree.map(lambda x: x.addressable_data(0), state))
      failing.pop_all()
    device = self._run.place.actors[0]
    self._devices = devices_of_seeds(len(runs), device, self._run.experiment)
    by_seed = NamedSharding(Mesh(np.array(self._devices), (_SEEDS,)), PartitionSpec(_SEEDS))
    self._states: TrainState = jax.device_put(_stacked(states), by_seed)
    self._actor_states: ActorState = jax.device_put(
        _stacked([actor.state for actor in actors]), by_seed)
    rollout = self._run.acting.rollout(actors[0].rollout_program.vector_envs)
    self._updates_per_call = min(self._run.experiment.placement.updates_per_call,
                                 build.segment_end(self._run.experiment, 0))
    learner = self._run.learner
    fused = sharding.make_fused(learner.algorithm.for_actors, rollout, learner.learn,
                                self._updates_per_call)
    self._program = jax.jit(_for_each(fused, by_seed), donate_argnums=(0, 1))

  def header(self) -> dict[str, Any]:
    """Returns the placement, and the number of seeds."""
    return {'placement': self._run.described_place,
            'num_seeds': self._num_seeds}

  def segment_index(self, number: int) -> int:
    """See `Program`."""
    return self._segment(number)[0]

  def _segment(self, number: int) -> tuple[int, int]:
    """Returns the index of a run's segment, and the updates done when it began.

    Nothing happens between two segments here: environments go on, and there is no lag.
    """
    index, first = self._begun[number]
    length = build.segment_end(self._run.experiment, 0)
    ended = (self._updates[number] - first) // length
    return index + ended, first + ended * length

  def segment(self, report: ReportTo, watcher: Watcher) -> None:
    """See `Program`; the segment lasts for the whole training."""
    watcher.begin()
    total = counters.of(self._run.experiment.total_steps, self._steps()[0])
    previous = None
    update = max(self._updates)
    while True:
      limit = min(self._updates_per_call, watcher.next_pause(update) - update)
      self._states, self._actor_states, *made = self._program(
          self._states, self._actor_states, limit, total)
      update += limit
      # The reports of a call are written while the device makes the next one.
      is_finished = previous is not None and not self._report(*previous, report)
      previous = made
      if watcher.is_due(update) or is_finished:
        self._report(*previous, report)
        previous = None
        update = max(self._updates)
        steps = [counters.fetch_int(count) for count in self._steps()]
        if watcher.after(Moment(self._updates, steps, (), lambda: None, self.snapshot)):
          return

  def _steps(self) -> np.ndarray:
    """Returns the steps of each seed, [S] or [S, 2]; waits for them."""
    return np.asarray(self._states.steps)

  def _report(self, counts: jax.Array, metrics: Any, report: ReportTo) -> bool:
    """Reports a call; returns False if no seed has made an update.

    Args:
      counts: [S], updates of each seed.
      metrics: [S, updates, ...].
      report: see `segment`.
    """
    counts = np.asarray(counts)
    metrics = jax.tree.map(np.asarray, metrics)
    self._updates = [update + count
                     for update, count in zip(self._updates, counts.tolist(), strict=True)]
    cgd = self._run.learner.mean_cgd(0)
    reports = [
        (i, Report(jax.tree.map(lambda x, i=i: x[i], metrics), count, (cgd,) * count,
                   (0.0,) * count))
        for i, count in enumerate(counts.tolist()) if count]
    if reports:
      report(reports)
    return bool(reports)

  def snapshot(self, number: int) -> Snapshot:
    """See `Program`."""
    experiment = self._run.experiment
    device, index = divmod(number, self._num_seeds // len(self._devices))
    state, actor_state = jax.tree.map(
        lambda x: jax.device_put(x.addressable_shards[device].data[index], self._devices[0]),
        (self._states, self._actor_states))
    envs = kept_envs.gather([actor_state]) if experiment.keeps_envs else None
    return Snapshot(state, envs, *self._segment(number))

  def close(self) -> None:
    """Closes the environments."""
    self._envs.close()


def devices_of_seeds(num_seeds: int, device: jax.Device, experiment: Experiment
                     ) -> list[jax.Device]:
  """Returns the devices that seeds are shared out to, all of them equally.

  Args:
    num_seeds: number of seeds.
    device: of the run of a seed.
    experiment: of a seed; if its config sets devices, there are no others.
  """
  if device.platform != 'cpu' or 'learner_devices' not in experiment.placement.chosen:
    return [device]
  devices = jax.local_devices(backend='cpu')[:host.machine()[0].allowed]
  return devices[:max(n for n in range(1, len(devices) + 1) if num_seeds % n == 0)]


def _for_each(fused: Callable, by_seed: NamedSharding) -> Callable:
  """Returns a function of the states of all seeds, which have a leading axis, and two limits.

  A CPU takes its seeds one after the other: products and convolutions of several networks at once
  are slower there.

  Args:
    fused: of a seed.
    by_seed: sharding of the states.
  """
  def fused_seeds(states, actor_states, limit, total):
    """Runs the seeds of one device, on a GPU at once, on a CPU one after the other.

    Args:
      states: the train states, with a leading axis of seeds.
      actor_states: the states of the actors, with the same axis.
      limit: [] i32, most updates.
      total: count of valid steps after which no update begins.
    """
    if next(iter(by_seed.device_set)).platform != 'cpu':
      return jax.vmap(fused, in_axes=(0, 0, None, None))(states, actor_states, limit, total)
    return jax.lax.map(lambda of_seed: fused(*of_seed, limit, total), (states, actor_states))

  each = by_seed.spec
  return jax.shard_map(fused_seeds, mesh=by_seed.mesh, check_vma=False, out_specs=each,
                       in_specs=(each, each, PartitionSpec(), PartitionSpec()))


def _stacked(trees: Sequence[Any]) -> Any:
  """Returns trees of equal structure as one, with a leading axis."""
  # Python numbers in an environment's state have weak types, which the program does not return.
  # Without the dtype, its second call would compile it again.
  return jax.tree.map(lambda *leaves: jnp.stack(leaves, dtype=leaves[0].dtype), *trees)
