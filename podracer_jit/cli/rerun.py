"""Repeats one update of a run, from the nearest checkpoint before it, and writes its rollout.

  podracer_jit rerun --workdir=runs/pong --update=1234

The command runs on one device, whatever devices the run had, and checks each update on the way
against the run's receipts. It writes the rollout to WORKDIR/update_1234.npz (time-major arrays,
named as in types.Rollout).

Exit code: 0, 1 if an update differs from its receipt or something failed, 2 if it could not start.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags

from podracer_jit import loops
from podracer_jit.cli import arguments, runs, verb
from podracer_jit.envs import frames
from podracer_jit.errors import Broken, Differs, refusing
from podracer_jit.experiment import build, modules, schema
from podracer_jit.experiment.resolve import changed
from podracer_jit.experiment.schema import Experiment
from podracer_jit.numerics.fingerprints import as_hex, canary
from podracer_jit.parts import user_path
from podracer_jit.play import evaluation
from podracer_jit.runtime import host, placement
from podracer_jit.runtime.output import complain
from podracer_jit.schemes.reports import Report
from podracer_jit.schemes.wiring import Position
from podracer_jit.training import restoring
from podracer_jit.types import Rollout, TrainState
from podracer_jit.workdir import checkpoints, files, journal, record, sources


@verb
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  values = runs.run_flags()
  flags.DEFINE_integer('update', None, 'The update to repeat.', flag_values=values)
  if not arguments.read_flags(argv, values, __doc__, ['workdir', 'update']):
    return 0
  workdir = user_path(values.workdir)
  update = values.update
  with refusing(OSError):
    allowed = modules.allowed(values.allow_modules)
    experiment = one_device_experiment(workdir, allowed, update)
    headers, receipts, _ = journal.read_receipts(workdir)
    header = header_of(headers, receipts, update)
    host.prepare_host(experiment.placement, experiment.numerics.deterministic)
    run = build.make_run(experiment)
    snapshot = snapshot_before(run, workdir, update)
    note = sources.change_since(workdir, modules.sources(experiment.fields), update)
  if note:
    complain(f'podracer_jit rerun: {note}')
  if header['canary'] != canary():
    complain('podracer_jit rerun: this machine rounds differently from the machine of the run, '
             'so updates may differ')
  rollout = rerun(run, snapshot, update, receipts)
  path = workdir / f'update_{update}.npz'
  _write(rollout, path)
  print(f'{path}: the rollout of update {update}, as its receipt says')
  return 0


def one_device_experiment(workdir: Path, allow_modules: Collection[str], update: int
                          ) -> Experiment:
  """Returns the experiment of a run on one device, with a scheme that has a separate learner.

  The learner's inputs are then the rollouts.

  Args:
    workdir: the workdir of the run.
    allow_modules: modules of a user's own parts that may be imported if the config names them.
    update: the update to repeat, since the config may have changed during the run.

  Raises:
    ValueError: there is no run, or it cannot be repeated on one device.
  """
  experiment = evaluation.read_experiment(workdir, allow_modules, update, on_one_device=False)
  if not experiment.exact_reduce:
    raise ValueError('the run has exact_reduce = False, so its bits depend on its devices')
  if not experiment.deterministic:
    raise ValueError(f'{experiment.non_deterministic_setting} is not deterministic, so updates of '
                     'the run cannot be repeated')
  place = schema.ONE_DEVICE | {'actor_platform': experiment.placement.actor_platform}
  # These two schemes give the same bits as all others with the same lag.
  return changed(experiment, scheme='cleanba' if experiment.scheme.lag else 'sync', placement=place)


def header_of(headers: Sequence[dict], receipts: Mapping[int, dict], update: int) -> dict:
  """Returns the newest header of the receipts before an update.

  Raises:
    ValueError: the update has no receipt, or a run on one device has other bits.
  """
  if update not in receipts:
    raise ValueError(f'--update: there is no receipt of update {update}; the receipts are of '
                     f'updates 1 to {max(receipts, default=0)}')
  header = max((h for h in headers if h['first_update'] <= update),
               key=lambda h: h['first_update'])
  if header.get(journal.LEARNERS, 1) > 1:
    raise ValueError(f'--update: the run learned on {header[journal.LEARNERS]} GPUs or TPUs, on '
                     'whose number its bits depend; updates can be repeated only if it was one')
  return header


def snapshot_before(run: build.Run, workdir: Path, update: int) -> build.Snapshot:
  """Returns where a run was before an update, or some updates earlier.

  Args:
    run: the run, with the config of the update.
    workdir: the workdir of the run.
    update: the update.

  Raises:
    ValueError: no checkpoint before it is whole, or something has changed since.
  """
  of_run = record.read(workdir)
  # Before these updates the run had another config, or its environments began anew.
  since = max(first for first in (1, *of_run.changes, *of_run.renewals) if first <= update) - 1
  saved = [number for number in checkpoints.saved_updates(workdir) if since <= number < update]
  if since == 0 and of_run.origin is None:
    saved.insert(0, 0)
  if not run.experiment.resumes_exactly:  # the replay went on, and checkpoints do not have it
    saved = [number for number in saved if number == since]
  if not saved:
    raise ValueError(f'--update: to repeat update {update}, a checkpoint of one of the updates '
                     f'{since} to {update - 1} is needed, and {workdir} has none '
                     '(checkpoint.keep sets how many stay)')
  if saved[-1] == 0 and of_run.origin is None:
    return build.Snapshot(run.initial_state())
  damage = checkpoints.problem(workdir, saved[-1])
  if damage:
    raise ValueError(f'--update: the checkpoint of update {saved[-1]} is broken: {damage}')
  damage = restoring.problem_of_actions(run, workdir, of_run, saved[-1])
  if damage:
    raise ValueError(damage)
  with contextlib.closing(checkpoints.Checkpoints(workdir)) as folder:
    try:
      snapshot, _ = restoring.snapshot(run, folder, workdir, of_run, saved[-1])
    except Broken as error:
      raise ValueError(f'--update: {error}') from None
  if saved[-1] == 0 and (checkpoints.digest(snapshot.state._replace(replay=None))
                         != of_run.origin.state_sha256):
    raise ValueError(f'--update: the checkpoint of update 0 in {workdir} is not the state that the '
                     'run began with')
  return snapshot


def rerun(run: build.Run, snapshot: build.Snapshot, update: int, receipts: Mapping[int, dict]
          ) -> Rollout:
  """Runs up to an update; returns the rollout of that update.

  Args:
    run: the run.
    snapshot: where it begins; donated.
    update: the last update to make.
    receipts: receipts of the run, by update; an update without a receipt is not checked.

  Raises:
    Differs: an update on the way differs from its receipt.
  """
  rollouts = []

  def check(report):
    metrics = jax.device_get(report.metrics)
    for i in range(report.count):
      receipt = dict(update=int(metrics['update'][i]), batch=as_hex(metrics['batch'][i]),
                     params=as_hex(metrics['params'][i]))
      expected = receipts.get(receipt['update'], receipt)
      if receipt != expected:
        raise Differs(f'update {receipt["update"]} differs from its receipt: {receipt}, the '
                      f'receipt is {expected}')

  def watched(worker: loops.Worker) -> loops.Worker:
    def fire(carry, *batch):
      if int(carry.train.update) == update - 1:
        whole = placement.gather([item.value for item in batch], run.place.mesh)
        rollouts.append(jax.device_get(whole))
      return worker.fire(carry, *batch)
    return worker._replace(fire=fire) if worker.name == 'learner' else worker

  made(run, snapshot, update, check, watched)
  return rollouts[0]


def made(run: build.Run, snapshot: build.Snapshot, update: int,
         report: Callable[[Report], None] = lambda report: None,
         watched: Callable[[loops.Worker], loops.Worker] = lambda worker: worker) -> TrainState:
  """Makes updates, over the ends of segments; returns the state after the last one.

  Args:
    run: the run.
    snapshot: where it begins; donated.
    update: the last update to make.
    report: called with each report.
    watched: replaces a worker.
  """
  positions = []

  def after(position: Position, wait_written: Callable[[], None]) -> bool:
    positions[:] = [position]
    return False

  while True:
    where = snapshot.segment, snapshot.begun  # the state is donated
    count = update - snapshot.update
    with build.segment(run, snapshot, count, report, build.Events(after=after)) as segment:
      loops.run([watched(worker) for worker in segment.workers])
    if positions[0].update >= update:
      return positions[0].state
    snapshot = build.snapshot_at(run, positions[0], *where)


def _write(rollout: Rollout, path: Path) -> None:
  """Writes a rollout as arrays."""
  rows = rollout._replace(obs=np.asarray(frames.stacks(rollout.obs)), episodes=None)
  arrays = checkpoints.leaves(rows) | checkpoints.leaves(rollout.episodes)
  content = io.BytesIO()
  np.savez_compressed(content, **arrays)
  files.write(path, content.getbuffer().tobytes())
