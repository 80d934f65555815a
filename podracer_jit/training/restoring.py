"""Where a run goes on: the snapshot that a checkpoint and the actions of its segment hold."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer_jit import schedules
from podracer_jit.experiment import build
from podracer_jit.experiment.build import Snapshot
from podracer_jit.losses.algorithm import ForActors
from podracer_jit.numerics import counters
from podracer_jit.numerics.fingerprints import canary
from podracer_jit.options import shorten
from podracer_jit.runtime import placement
from podracer_jit.workdir import actions, checkpoints, journal, record
from podracer_jit.workdir.checkpoints import Checkpoints

SURROUNDINGS = 'surroundings'  # in the `meta` of a checkpoint
_computing = threading.Lock()  # so that the canary is computed once, and others wait for it
_LARGE_BYTES = 10**9  # of actions, above which a run begins with a warning


def surroundings(run: build.Run) -> dict[str, Any]:
  """Returns what bits depend on beside the experiment: versions, and how this machine rounds.

  On accelerators also the number of learner devices, since the groups of each are one batch.
  """
  others = ('gymnasium', 'ale_py', 'mujoco') if run.experiment.spec.calls_python else ()
  with _computing, jax.default_device(run.place.learners[0]):
    known = {'versions': record.versions(*others), 'canary': canary()}
  if run.place.learners[0].platform != 'cpu':
    known[journal.LEARNERS] = run.place.mesh.size
  return known


def snapshot(run: build.Run, saved: Checkpoints, workdir: Path, of_run: record.Record,
             update: int) -> tuple[Snapshot, dict[str, Any]]:
  """Returns where a run goes on, and the `meta` of the checkpoint.

  Args:
    run: the run.
    saved: the checkpoints of its workdir.
    workdir: the workdir of the run.
    of_run: its record, which says whether environments begin anew here.
    update: the update of the checkpoint; its files, and `problem_of_actions`, were checked.

  Raises:
    Broken: the contents have changed since the checkpoint was saved.
  """
  # The replay is restored into shapes: memory need not hold a second, empty replay.
  like = run.initial_state()
  if not checkpoints.has_replays_of_groups(workdir, update):
    like = like._replace(replay=run.learner.replay_shapes())
  state, meta = saved.restore(like, update, files_checked=True)
  experiment = run.experiment
  segment, first = checkpoints.segment_of(meta, update)
  goes_on = _goes_on(run, workdir, of_run, update)
  keeps_envs = experiment.keeps_envs and update + 1 not in of_run.renewals
  envs = None
  if goes_on or keeps_envs:
    envs = saved.restore_item('envs', build.kept_env_shapes(run), update)
  if not goes_on:
    return Snapshot(state, envs, segment + (first < update)), meta
  before = _before(run, saved, workdir, update) if experiment.scheme.lag else None
  sent = None
  if not experiment.spec.is_function:
    sent = actions.read(workdir, segment, _shape_of_actions(run, update - first))
  return Snapshot(state, envs, segment, first, before, sent), meta


def _goes_on(run: build.Run, workdir: Path, of_run: record.Record, update: int) -> bool:
  """Returns whether a run goes on within the segment of a checkpoint; see `snapshot`."""
  _, first = checkpoints.segment_of(checkpoints.read_meta(workdir, update) or {}, update)
  is_finished = (checkpoints.steps_of(workdir, update) or 0) >= run.experiment.total_steps
  return (first < update and run.experiment.resumes_exactly and not is_finished
          and not of_run.begins_segment(update + 1))


def renewal(run: build.Run, workdir: Path, update: int) -> str:
  """Returns why environments begin anew if a run goes on from a checkpoint; '' if they do not.

  Args:
    run: the run.
    workdir: the workdir of the run.
    update: the update of the checkpoint.
  """
  experiment = run.experiment
  meta = checkpoints.read_meta(workdir, update) or {}
  if checkpoints.has_replays_of_groups(workdir, update):
    return 'each gradient group had a replay of its own, and the one of all begins empty'
  if experiment.deterministic and not experiment.resumes_exactly:
    return 'checkpoint.replay = False'
  if checkpoints.segment_of(meta, update)[1] == update:
    return ''  # they begin anew anyway, or need no actions
  has_steps = 'steps' in checkpoints.saved_leaves(workdir, update, 'before')
  if experiment.scheme.lag and has_steps != bool(schedules.scheduled(run.learner.algorithm)):
    return 'loss has a schedule that actors follow, only before or only after'
  if experiment.spec.is_function:
    return ''
  return '; '.join(_differing(meta.get(SURROUNDINGS), surroundings(run)))


def problem_of_actions(run: build.Run, workdir: Path, of_run: record.Record, update: int) -> str:
  """Returns why the environments of a run cannot go on from a checkpoint; '' if they can.

  It reads all actions of the segment.

  Args:
    run: the run.
    workdir: the workdir of the run.
    of_run: its record, which says whether environments begin anew here.
    update: the update of the checkpoint.
  """
  if run.experiment.spec.is_function or not _goes_on(run, workdir, of_run, update):
    return ''
  segment, first = checkpoints.segment_of(checkpoints.read_meta(workdir, update), update)
  prefix = checkpoints.prefix_of(workdir, update, actions.name_of(segment))
  damage = actions.problem(workdir, segment, prefix, _shape_of_actions(run, update - first))
  return damage and (f'--workdir: the environments cannot go on where they were, as {damage}; '
                     '--renew_envs goes on with new episodes')


class Longest(NamedTuple):
  """The most that a run replays when it goes on: a whole segment."""

  steps: int  # of all environments
  nbytes: int  # of their actions, on the disk

  def words(self) -> str:
    """Returns a line about it."""
    warning = 'warning: ' if self.nbytes > _LARGE_BYTES else ''
    size = f'{self.nbytes / 1e6:,.0f} MB' if self.nbytes >= 1e6 else f'{self.nbytes / 1e3:,.0f} kB'
    return (f'{warning}to go on after a stop, up to {self.steps:,} steps of environments are '
            f'replayed; their actions take up to {size} of the disk')


def longest_replay(run: build.Run) -> Longest | None:
  """Returns the most that a run replays; None if it replays nothing."""
  experiment = run.experiment
  if experiment.spec.is_function or not experiment.resumes_exactly:
    return None
  updates = min(build.segment_end(experiment, 0),
                -(-experiment.total_steps // experiment.batch_rows))
  of_update = _shape_of_actions(run, 1)
  nbytes = math.prod(of_update.shape) * of_update.dtype.itemsize
  return Longest(updates * experiment.batch_rows, updates * nbytes)


def _before(run: build.Run, saved: Checkpoints, workdir: Path, update: int) -> ForActors:
  """Returns what actors got before the last update, on the learner's mesh."""
  like = jax.eval_shape(run.learner.algorithm.for_actors, run.learner.state_shapes())
  leaves = checkpoints.leaves(like)
  # Counts of steps have the form that the total_steps of that time needed.
  saved_leaves = checkpoints.saved_leaves(workdir, update, 'before')
  counts = {name for name in leaves if name.rpartition('/')[2] == 'steps' and name in saved_leaves}
  structure = jax.tree.structure(like)
  restored = saved.restore_item('before', jax.tree.unflatten(structure, [
      saved_leaves[name] if name in counts else leaf for name, leaf in leaves.items()]), update)
  restored = placement.replicate(jax.tree.map(jnp.asarray, restored), run.place.mesh)
  return jax.tree.unflatten(structure, [
      counters.converted(x, leaf) if name in counts else x
      for (name, leaf), x in zip(leaves.items(), jax.tree.leaves(restored), strict=True)])


def _shape_of_actions(run: build.Run, updates: int) -> jax.ShapeDtypeStruct:
  """Returns the shape of what all environments are sent in so many updates."""
  of_pool = build.shapes_of_pool(run.experiment, run.acting).envs[0].sent
  return jax.ShapeDtypeStruct((updates, run.experiment.num_shards, *of_pool.shape), of_pool.dtype)


def _differing(then: Any, now: Mapping[str, Any]) -> Iterator[str]:
  """Yields in words how the surroundings of a checkpoint differ from those of now."""
  if not isinstance(then, dict) or then == now:
    return
  before = then.get('versions')
  before = before if isinstance(before, dict) else {}
  for name in sorted(before.keys() | now['versions'].keys()):
    was, is_now = before.get(name), now['versions'].get(name)
    if was != is_now:
      yield f'{shorten(name)} was {shorten(str(was))} and is {shorten(str(is_now))}'
  if then.get('canary') != now['canary']:
    yield 'this machine rounds differently'
  devices = [known.get(journal.LEARNERS) for known in (then, now)]
  if None not in devices and devices[0] != devices[1]:
    yield f'it learned on {devices[0]} devices and learns on {devices[1]}'
