"""Trains a run segment by segment, and saves it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podracer_jit import loops
from podracer_jit.experiment import build
from podracer_jit.experiment.experiment import Experiment
from podracer_jit.numerics.fingerprints import canary
from podracer_jit.runtime import placement
from podracer_jit.runtime.output import complain
from podracer_jit.schemes.reports import Report
from podracer_jit.training import stopping
from podracer_jit.training.callbacks import Callbacks, SegmentEnd
from podracer_jit.training.metrics import (
  LIVES,
  Files,
  Meter,
  Record,
  Standstill,
  check_finite,
  environment_check,
  wall_clock,
)
from podracer_jit.training.periodic import Evaluator
from podracer_jit.training.progress import Progress
from podracer_jit.types import TrainState
from podracer_jit.workdir import checkpoints
from podracer_jit.workdir import record as record_lib

# After so many segments in which no episode has ended, the run says so.
_SEGMENTS_WITHOUT_END = 2


def train(run: build.Run, workdir: Path, profile_dir: str | None = None,
          ends: Sequence[int] | None = None, stop: stopping.Stopping | None = None,
          update: int | None = None, of_run: record_lib.Record | None = None,
          last: int | None = None, callbacks: Callbacks | None = None,
          quiet: bool = False, began_s: float | None = None) -> bool:
  """Trains segment by segment until total_steps, from a checkpoint of the workdir if it has one.

  A signal ends the segment at its next update (with `fused`, after the current call), and the run
  is saved.

  Args:
    run: the run to train.
    workdir: the workdir of the run; it has the config.
    profile_dir: a folder for a trace of a few updates; None: no trace.
    ends: the last update of each segment; None: the config decides.
    stop: handles signals; by default, signals keep their handlers.
    update: the update of the checkpoint to resume from, whose files were checked; by default the
      newest complete checkpoint.
    of_run: the record of the run; None: it is new.
    last: the last update; None: the run ends at total_steps.
    callbacks: called with each update and at the end of each segment.
    quiet: prints nothing but warnings.
    began_s: when the command began, by `time.perf_counter`; None: now.

  Returns:
    True if total_steps or `last` are reached, False if a signal or a callback stopped the training.

  Raises:
    callbacks.CallbackFailed: a callback has raised an exception.
    checkpoints.Broken: the contents of the checkpoint have changed since it was saved.
    checkpoints.NotSaved: a file cannot be written; the message names it.
    loops.Stuck: threads did not end after a failure or a second signal.
  """
  began_s = time.perf_counter() if began_s is None else began_s
  experiment = run.experiment
  learner = run.learner
  stop = stop or stopping.Stopping()
  callbacks = callbacks or Callbacks()
  of_run = of_run or record_lib.new(experiment.fields)
  state = run.initial_state()
  envs: Any | None = None
  saved = checkpoints.Checkpoints(workdir, experiment.checkpoint.keep)
  meta: Mapping[str, Any] = {'segment': 0}
  title = f'{experiment.env.task}  {experiment.scheme_name} {experiment.loss_name}  {workdir}'

  def asked_to_stop() -> bool:
    return stop.asked() or callbacks.ask_to_stop

  def evaluated(record: Mapping[str, Any]) -> None:
    if files:
      files.show_evaluation(record)
    callbacks.evaluated(record)

  def stopped() -> bool:
    return placement.any_process(asked_to_stop(), run.place.mesh)

  with contextlib.ExitStack() as stack:
    stack.enter_context(contextlib.closing(saved))
    progress = stack.enter_context(
        Progress(experiment, title, quiet=quiet or run.place.process > 0))
    update = checkpoints.newest_whole(workdir) if update is None else update
    if update is not None:
      # The replay is restored into shapes: memory need not hold a second, empty replay.
      like = state._replace(replay=learner.replay_shapes())
      state, meta = restore(run, saved, workdir, like, update, of_run, progress.note)
      envs = saved.restore_envs(build.kept_env_shapes(run), int(state.update))
    if update:
      progress.note(f'going on from update {int(state.update)} ({int(state.steps):,} steps)')
      for line in _changed_rate(run, of_run, state):
        progress.note(line)
    else:
      progress.note(f'{title}: starting')
    if experiment.spec.calls_python:
      progress.note(f'slow environments: Python steps {experiment.env.task}, in worker processes; '
                    'EnvPool or JAX functions would be faster')
      progress.note(_repetition(experiment))
    if int(state.steps) < experiment.total_steps:
      progress.compiling()
    files = None
    if run.place.process == 0 and int(state.steps) < experiment.total_steps:
      files = stack.enter_context(contextlib.closing(Files(
          workdir, int(state.update), int(state.steps), experiment.log.tensorboard)))
      for problem in files.problems:
        progress.note(problem)
    first_done = int(state.update)
    evaluator = None
    if run.place.process == 0:
      evaluator = stack.enter_context(contextlib.closing(
          Evaluator(run, workdir, saved, progress.note, evaluated)))
      evaluator.resume(state, int(state.steps) >= experiment.total_steps)
    profiler = Profiler(profile_dir)
    wall_s = wall_clock(meta, began_s)
    standstill = Standstill()
    while (int(state.steps) < experiment.total_steps and int(state.update) != last
           and not stopped()):
      length = experiment.checkpoint.every_updates
      if ends is not None:
        length = next((end - int(state.update) for end in ends if end > int(state.update)), 0)
      if last is not None:
        length = min(length, last - int(state.update))
      if not length:
        break
      before = int(state.update)
      state, envs = build.allocated(run, state, envs)
      state, meta, envs = _segment(
          run, state, meta, envs, length, workdir, files, progress, profiler, asked_to_stop,
          callbacks, of_run.header(int(state.update) + 1), wall_s, standstill)
      if int(state.update) == before:
        break
      if not experiment.checkpoint.replay:
        # A resumed run begins with an empty replay, so this run does, too, for the same bits.
        state = state._replace(replay=None)
      if evaluator:
        evaluator.wait(asked_to_stop)
      with stop.saving():
        if files:
          files.flush()
        saved.save(state, meta | {'run': of_run.as_json()}, envs,
                   evaluator.keeps if evaluator else ())
      if evaluator:
        evaluator.offer(state, int(state.steps) >= experiment.total_steps)
      callbacks.end_segment(SegmentEnd(int(state.update), int(state.steps), workdir))
      if meta['segment'] == _SEGMENTS_WITHOUT_END and not meta['episodes']:
        for line in _without_end(experiment):
          progress.note(line)
    if evaluator:
      evaluator.wait(asked_to_stop)
    profiler.close()
    if profile_dir and not profiler.traced:
      progress.note(f'no trace: it begins with the third report, and there were '
                    f'{profiler.reports}')
    last_done = int(state.update)
    finished = int(state.steps) >= experiment.total_steps
    if last_done == last:
      progress.finish(f'update {last_done}: the config changes after it, as the history says')
      return True
    hint = '' if finished else '; the same command goes on'
    if finished and last_done == first_done:
      hint = '; to go on: --extend with a larger --config.total_steps'
    progress.finish(f'{"finished" if finished else "stopped"} at update {last_done} '
                    f'({int(state.steps):,} steps); {workdir} has it all{hint}')
  # A signal to one process has stopped them all, so all have the exit code of a stop.
  return finished or not stopped()


def _without_end(experiment: Experiment) -> Iterator[str]:
  """Yields a line if no episode may ever end because environments begin anew at checkpoints."""
  if not experiment.keeps_envs:
    steps = experiment.segment_steps
    limit = experiment.spec.max_episode_steps
    length = limit if limit > steps else 10 * steps
    least = math.ceil(length / experiment.unroll_length)
    yield (f'warning: no episode has ended yet: environments begin anew at each checkpoint, after '
           f'{steps:,} steps of each (checkpoint.every_updates = '
           f'{experiment.checkpoint.every_updates}), and longer episodes never end; episodes of '
           f'{length:,} steps need checkpoint.every_updates = {least:,} or more')


def _repetition(experiment: Experiment) -> str:
  """Returns a line that says whether a run of environments that Python steps can be repeated."""
  if not experiment.deterministic:
    return f'results do not repeat: {experiment.non_deterministic_setting} is not deterministic'
  return 'results repeat, if all that the environments draw follows from the seed of their reset'


def _changed_rate(run: build.Run, of_run: record_lib.Record, state: TrainState) -> Iterator[str]:
  """Yields a line if a new total_steps changes an annealed learning rate.

  Args:
    run: the run with the new config.
    of_run: its record.
    state: the state that it goes on from.
  """
  change = of_run.changes.get(int(state.update) + 1, {}).get(record_lib.TOTAL)
  if change is None:
    return
  before, after = (float(run.experiment.optimizer.schedule(change[key])(np.int32(state.steps)))
                   for key in ('was', 'now'))
  if before != after:
    yield (f'the learning rate changes from {before:.3g} to {after:.3g} here: it is annealed over '
           f'{change["now"]:,} steps instead of {change["was"]:,}')


def restore(run: build.Run, saved: checkpoints.Checkpoints, workdir: Path, like: TrainState,
             update: int, of_run: record_lib.Record, note: Callable[[str], None]
             ) -> tuple[TrainState, dict[str, Any]]:
  """Returns the state and `meta` of a checkpoint, or of an earlier one if it is broken.

  Args:
    run: the run of the experiment.
    saved: the checkpoints of the workdir.
    workdir: the workdir of the run.
    like: the shapes of the state.
    update: the update of the checkpoint, whose files were checked.
    of_run: the record of the run.
    note: called with a line about each broken checkpoint.

  Raises:
    checkpoints.Broken: no earlier checkpoint of this config is whole, or there are other processes,
      which may have restored the broken checkpoint.
  """
  since = max((number - 1 for number in of_run.changes if number <= update + 1), default=0)
  while True:
    try:
      return saved.restore(like, update, files_checked=True)
    except checkpoints.Broken as error:
      earlier = [number for number in checkpoints.saved_updates(workdir)
                 if number < update and not checkpoints.problem(workdir, number)]
      if not earlier or run.place.processes > 1:
        raise
      note(checkpoints.set_aside(workdir, update, error.problem))
      update = earlier[-1]
      # An earlier config made that checkpoint; the same command goes on with it, stage by stage.
      if update < since:
        raise


def _segment(run: build.Run, state: TrainState, meta: Mapping[str, Any], envs: Any, length: int,
             workdir: Path, files: Files | None, progress: Progress, profiler: Profiler,
             asked_to_stop: Callable[[], bool], callbacks: Callbacks,
             change: Mapping[str, Any], wall_s: Callable[[], float], standstill: Standstill
             ) -> tuple[TrainState, dict[str, Any], Any]:
  """Runs a segment.

  Args:
    run: the run of the experiment.
    state: the train state to begin with; donated.
    meta: the `meta` of the checkpoint that the segment begins with.
    envs: the state of environments that go on from that checkpoint; None if they begin anew.
    length: number of updates.
    workdir: the workdir of the run.
    files: metrics and receipts, in process 0; None in other processes.
    progress: shows each update.
    profiler: counts reports.
    asked_to_stop: called after every update; the segment ends if it returns True.
    callbacks: called with each update.
    change: the field of the header that names a change before the segment; see `Record.header`.
    wall_s: see `Meter`.
    standstill: notices that nothing is learned.

  Returns:
    The state after the segment, the `meta` of its checkpoint, and the state of environments that
    go on.

  Raises:
    CallbackFailed: a callback has failed.
    checkpoints.NotSaved: metrics or receipts cannot be written.
    Diverged: a loss, a gradient or the train state is not finite.
    EnvironmentFailed: an environment has returned a value that cannot be learned from.
  """
  experiment = run.experiment
  place = run.place
  index = meta['segment']
  saved = int(state.update)
  check = environment_check(run, index)

  def write(record: Record, receipt: Record) -> None:
    warning = standstill.notice(record, receipt)
    if files:
      if warning:
        complain(f'podracer_jit: warning: update {record["update"]:,}: {warning}')
      files.write(record, receipt)
    progress.show(record)
    check_finite(record)
    callbacks.update(record)

  def report(item: Report) -> None:
    check(item)
    for record, receipt in meter.records(item):
      write(record, receipt)
    profiler.reported()

  with contextlib.ExitStack() as stack:
    if files:
      with jax.default_device(place.learners[0]):
        files.begin_segment(dict(segment=index, first_update=saved + 1,
                                 versions=record_lib.versions(), canary=canary(), **change,
                                 **_lives(run)))
    segment = stack.enter_context(build.segment(
        run, state, index, length, report, asked_to_stop, envs))
    meter = Meter(experiment.log.window, experiment.spec.frame_skip, segment.waits, meta,
                  run.machines, wall_s)
    states = loops.run(segment.workers)
    envs = build.envs_after(run, states, saved)
  # A segment that is stopped while it waits for its first rollouts leaves the state as it was.
  last = states['learner'].train if 'learner' in states else state
  return last, meter.meta() | {'segment': index + 1}, envs


def _lives(run: build.Run) -> dict[str, dict[str, int]]:
  """Returns the field of receipts with the lives of actors that were begun again, if there are."""
  lives = run.machines.lives() if run.machines else {}
  return {LIVES: lives} if lives else {}


class Profiler:
  """Traces the reports from FIRST to LAST; before FIRST, programs are compiled and warm up."""

  FIRST = 3
  LAST = 6

  def __init__(self, directory: str | None):
    self._directory = directory
    self._tracing = False
    self.reports = 0
    self.traced = False

  def reported(self) -> None:
    """Counts a report; starts or ends the trace."""
    self.reports += 1
    if self._directory and self.reports == self.FIRST:
      jax.profiler.start_trace(self._directory)
      self.traced = self._tracing = True
    elif self.reports == self.LAST:
      self.close()

  def close(self) -> None:
    """Ends the trace, if it has not ended yet."""
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()
