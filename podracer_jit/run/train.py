"""Training: `podracer_jit --config=configs/impala_atari.py --workdir=runs/x`."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags, logging

from podracer_jit import loops
from podracer_jit.envs.protocol import environment_failure
from podracer_jit.numerics.fingerprints import canary
from podracer_jit.run import (
    build,
    changes,
    checkpoint,
    command_line,
    exit_codes,
    history,
    journal,
    life,
    lock,
    memory,
    stopping,
    workdirs,
)
from podracer_jit.run.metrics import Diverged, Files, Meter, check_finite
from podracer_jit.run.output import complain, give_up_lost_streams
from podracer_jit.run.progress import Progress
from podracer_jit.run.resolve import placement_of, resolve
from podracer_jit.runtime import host, placement
from podracer_jit.schemes.reports import Report
from podracer_jit.types import TrainState


def main(argv: Sequence[str]) -> int:
  """Trains; returns one of `exit_codes`."""
  warnings.filterwarnings('ignore', module='gymnasium')  # about bounds that we do not use
  # absl's global flags belong to the importing program, and main may be called again.
  values = flags.FlagValues()
  flags.DEFINE_string('workdir', None, 'A folder for checkpoints and metrics; default: runs/ and '
                      'the name of the config.', flag_values=values)
  flags.DEFINE_string('profile_dir', None, 'A folder for a jax.profiler trace of a few updates.',
                      flag_values=values)
  flags.DEFINE_string('repeat', None, 'A workdir. This run has the segments of that run, also '
                      'those that a signal ended, and so the same bits.', flag_values=values)
  life.define_flags(values)
  flags.DEFINE_bool('distributed', False, 'This is one of several processes of the run.',
                    flag_values=values)
  flags.DEFINE_string('coordinator_address', None, 'host:port of process 0; default: that of '
                      'SLURM, Open MPI, Kubernetes or the TPU pod.', flag_values=values)
  flags.DEFINE_integer('num_processes', None, 'Number of processes; default: that of SLURM, Open '
                       'MPI, Kubernetes or the TPU pod.', flag_values=values)
  flags.DEFINE_integer('process_id', None, 'Index of this process, from 0; default: that of SLURM, '
                       'Open MPI, Kubernetes or the TPU pod.', flag_values=values)
  flags.DEFINE_integer('coordinator_timeout_s', 60, 'Seconds that a process waits until process 0 '
                       'listens and all other processes have joined.', flag_values=values)
  with stopping.handled() as stop:
    try:
      return _main(argv, values, stop)
    finally:
      give_up_lost_streams()


def _main(argv: Sequence[str], values: flags.FlagValues, stop: stopping.Stopping) -> int:
  """Trains as the flags say; returns the exit code."""
  with contextlib.ExitStack() as stack:
    try:
      config = command_line.parse(argv, values)
      if config is None:
        print(f'{__doc__}\n{values.get_help()}')
        return exit_codes.FINISHED
      options = life.of_flags(values)
      joining = (values.coordinator_address, values.num_processes, values.process_id)
      if values.distributed or joining != (None, None, None):
        # Processes join before JAX starts, and to make some environments starts JAX.
        place = placement_of(config)
        host.prepare_host(place)
        host.join(place, *joining, values.coordinator_timeout_s)
      experiment = resolve(config)
      host.prepare_host(experiment.placement)
      run = build.make_run(experiment)
      for warning in memory.check(run):
        complain(f'podracer_jit: warning: {warning}')
      workdir = Path(values.workdir or command_line.default_workdir(argv))
      if values.repeat and not experiment.deterministic:
        raise ValueError(f'--repeat: {experiment.non_deterministic_setting} is not deterministic, '
                         'so a run cannot be repeated')
      ends = _ends_of(Path(values.repeat)) if values.repeat else None
      update, notes = stack.enter_context(_opened(workdir, run, options))
      entries = workdirs.read_history(workdir)
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
      complain(f'podracer_jit: {error}')
      return _leave(exit_codes.REFUSED)
    for note in notes:
      complain(f'podracer_jit: {note}')
    stop.begin_training()
    try:
      finished = _train_stages(run, workdir, entries, update, values.profile_dir, ends, stop)
    except KeyboardInterrupt:
      complain('podracer_jit: interrupted; what was made since the newest checkpoint is not saved')
      return _leave(_code_of_a_stop(workdir))
    except checkpoint.NotSaved as error:
      complain(f'podracer_jit: {error}')
      return _leave(exit_codes.FAILED)
    except Exception as error:  # noqa: BLE001 - the one place where a failed run becomes a message
      if environment_failure(error):
        complain(f'podracer_jit: {environment_failure(error)}')
        return _leave(exit_codes.FAILED)
      logging.exception('the run failed')
      complain(f'podracer_jit: {type(error).__name__}: {error}')
      return _leave(exit_codes.FAILED)
    finally:
      stop.end()
    return exit_codes.FINISHED if finished else _code_of_a_stop(workdir)


def _code_of_a_stop(workdir: Path) -> int:
  """Returns the exit code after a signal, which depends on whether there is a checkpoint."""
  return exit_codes.STOPPED if checkpoint.updates_in(workdir) else exit_codes.INTERRUPTED


def _ends_of(repeated: Path) -> list[int]:
  """Returns the last update of each segment of a run.

  Raises:
    ValueError: the run has no readable receipts.
  """
  try:
    return journal.segment_ends(repeated)
  except OSError as error:
    raise ValueError(f'--repeat: the receipts of {repeated} cannot be read: '
                     f'{error.strerror}') from None


def _leave(code: int) -> int:
  """Returns the exit code of a failure; with several processes, ends this process at once.

  JAX would wait for the other processes at a normal exit.
  """
  if jax.distributed.is_initialized():
    if code == exit_codes.REFUSED:
      # The other processes refuse, too, and need time to print why: JAX aborts them if process 0
      # is gone.
      time.sleep(3)
    give_up_lost_streams()
    os._exit(code)
  return code


@contextlib.contextmanager
def _opened(workdir: Path, run: build.Run, options: life.Life
            ) -> Iterator[tuple[int | None, list[str]]]:
  """Opens the workdir in all processes.

  Process 0 creates and locks it. The other processes compare their config with that of process 0.

  Args:
    workdir: of the run.
    run: that begins or goes on.
    options: where it begins, and what may differ if it goes on.

  Yields:
    The update of the checkpoint to resume from, None without one, and lines about repairs and
    changes.

  Raises:
    ValueError: the workdir is in use, of another experiment, or cannot be repaired.
    OSError: it cannot be written to.
  """
  beginning = life.begin(run, workdir, options)
  inherited = beginning.inherited
  is_first = run.place.process == 0
  with contextlib.ExitStack() as stack:
    update = None
    notes = []
    problem = None
    if is_first:
      try:
        workdirs.make(workdir)
        stack.enter_context(contextlib.closing(lock.WorkdirLock(workdir)))
        checkpoint.remove_unfinished(workdir)
        if beginning.has_begun:
          update, notes = life.resume_workdir(run, workdir, options)
        else:
          checkpoint.set_all_aside(workdir)
      except (ValueError, OSError) as error:
        problem = error
    _raise_everywhere(problem)
    if inherited:
      life.write_first_state(run, workdir, inherited)
    if is_first and not beginning.has_begun:
      try:
        notes = life.start_workdir(run, workdir, options, inherited)
        update = checkpoint.newest_whole(workdir)
      except (ValueError, OSError) as error:
        problem = error
    _raise_everywhere(problem)
    if not is_first:
      if not (workdir / workdirs.CONFIG).exists():
        raise ValueError(f'--workdir: this process does not see what process 0 wrote to {workdir}; '
                         'all processes need one file system')
      workdirs.check_same(workdir, run.experiment.fields)
    del beginning, inherited  # else its state would stay in memory while the run trains
    yield host.of_process_0(update), notes


def _raise_everywhere(problem: Exception | None) -> None:
  """Waits for process 0, and raises its error, if it has one, in all processes.

  Args:
    problem: the error of this process, which only process 0 may have.
  """
  if not host.of_process_0(int(problem is None)):
    raise problem or ValueError('process 0 refuses the workdir; its message says why')


def _train_stages(run: build.Run, workdir: Path, entries: Sequence[history.Entry],
                  update: int | None, profile_dir: str | None, ends: Sequence[int] | None,
                  stop: stopping.Stopping) -> bool:
  """Trains with each config that updates are still to be made with; usually there is one.

  Args:
    run: of the newest config.
    workdir: of the run.
    entries: the history of the run.
    update: of the checkpoint to resume from, None without one.
    profile_dir: as in `train`.
    ends: as in `train`.
    stop: as in `train`.

  Returns:
    As `train`.
  """
  for stage, last in life.stages(run, entries, update or 0):
    finished = train(stage, workdir, profile_dir, ends, stop, update, entries, last)
    # A repeated run may end before its config has changed; then this one does so, too.
    if last is None or not finished or last not in checkpoint.saved_updates(workdir):
      return finished
    update = last
  raise AssertionError('the last stage has no last update')


def train(run: build.Run, workdir: Path, profile_dir: str | None = None,
          ends: Sequence[int] | None = None, stop: stopping.Stopping | None = None,
          update: int | None = None, entries: Sequence[history.Entry] = (),
          last: int | None = None) -> bool:
  """Trains segment by segment until total_steps, from a checkpoint of the workdir if it has one.

  A signal ends the segment at its next update (with `fused`, after the current call), and the run
  is saved.

  Args:
    run: the run to train.
    workdir: of the run; it has the config.
    profile_dir: a folder for a trace of a few updates; None: no trace.
    ends: the last update of each segment; None: as the config says.
    stop: handles signals; by default, signals keep their handlers.
    update: of the checkpoint to resume from, whose files were checked; by default the newest
      complete checkpoint.
    entries: the history of the run.
    last: the last update; None: as many as total_steps say.

  Returns:
    True if total_steps or `last` are reached, False if a signal stopped the training.

  Raises:
    checkpoint.Broken: the checkpoint is not what was saved.
    checkpoint.NotSaved: a file cannot be written; the message names it and the newest good
      checkpoint.
  """
  experiment = run.experiment
  learner = run.learner
  stop = stop or stopping.Stopping()
  state = run.initial_state()
  envs: Any = ()
  saved = checkpoint.Checkpoints(workdir, experiment.checkpoint.keep)
  meta: Mapping[str, Any] = {'segment': 0}
  title = f'{experiment.env.task}  {experiment.scheme_name} {experiment.loss_name}  {workdir}'

  def stopped() -> bool:
    return placement.any_process(stop.asked(), run.place.mesh)

  with contextlib.ExitStack() as stack:
    stack.enter_context(contextlib.closing(saved))
    progress = stack.enter_context(Progress(experiment, title, quiet=run.place.process > 0))
    update = checkpoint.newest_whole(workdir) if update is None else update
    if update is not None:
      # The replay is restored into shapes: memory need not hold a second, empty replay.
      like = state._replace(replay=learner.replay_shapes())
      state, meta = _restore(run, saved, workdir, like, update, entries, progress.note)
      envs = saved.restore_envs(build.kept_env_shapes(run), int(state.update))
    if update:
      progress.note(f'going on from update {int(state.update)} ({int(state.steps):,} steps)')
      for words in _changed_rate(run, _entry_before(entries, int(state.update)), int(state.steps)):
        progress.note(words)
    else:
      progress.note(f'{title}: starting')
    if experiment.spec.calls_python:
      progress.note(f'slow environments: Python steps {experiment.env.task}, in worker processes; '
                    'EnvPool or JAX functions would be faster')
    if int(state.steps) < experiment.total_steps:
      progress.compiling()
    files = None
    if run.place.process == 0 and int(state.steps) < experiment.total_steps:
      files = stack.enter_context(contextlib.closing(Files(
          workdir, int(state.update), int(state.steps), experiment.log.tensorboard)))
      for problem in files.problems:
        progress.note(problem)
    newest = history.newest_config(experiment.fields, entries, int(state.update) + 1)
    record = workdirs.record_of(newest, entries)
    began = int(state.update)
    profiler = Profiler(profile_dir)
    while (int(state.steps) < experiment.total_steps and int(state.update) != last
           and not stopped()):
      length = experiment.checkpoint.every_updates
      if ends is not None:
        length = next((end - int(state.update) for end in ends if end > int(state.update)), 0)
      if last is not None:
        length = min(length, last - int(state.update))
      if not length:
        break
      state = learner.allocate(state)
      state, meta, envs = _segment(
          run, state, meta, envs, length, workdir, files, progress, profiler, stop.asked,
          _entry_before(entries, int(state.update)))
      if not experiment.checkpoint.replay:
        # A resumed run has no replay either, so that both have the same bits.
        state = state._replace(replay=())
      with stop.saving():
        if files:
          files.flush()
        saved.save(state, meta | {'run': record}, envs)
    profiler.close()
    if profile_dir and not profiler.traced:
      progress.note(f'no trace: it begins with the third report, and there were '
                    f'{profiler.reports}')
    done = int(state.update)
    finished = int(state.steps) >= experiment.total_steps
    if done == last:
      progress.finish(f'update {done}: the config changes after it, as the history says')
      return True
    hint = '' if finished else '; the same command goes on'
    if finished and done == began:
      hint = '; to go on: --extend with a larger --config.total_steps'
    progress.finish(f'{"finished" if finished else "stopped"} at update {done} '
                    f'({int(state.steps):,} steps); {workdir} has it all{hint}')
  return finished or not stop.asked()


def _entry_before(entries: Sequence[history.Entry], update: int) -> history.Entry | None:
  """Returns the entry of the history that holds from the update after this one on, if any."""
  return next((entry for entry in entries if entry.first_update == update + 1), None)


def _changed_rate(run: build.Run, entry: history.Entry | None, steps: int) -> Iterator[str]:
  """Yields what a new total_steps does to an annealed learning rate.

  Args:
    run: with the new config.
    entry: of the history, with the changes; None without any.
    steps: valid steps learned from so far.
  """
  change = entry.changes.get(changes.TOTAL) if entry else None
  if change is None:
    return
  before, after = (float(run.experiment.optimizer.schedule(change[key])(np.int32(steps)))
                   for key in ('was', 'now'))
  if before != after:
    yield (f'the learning rate is that of a run of {change["now"]:,} steps from here on: '
           f'{after:.3g}; with {change["was"]:,} steps it was {before:.3g}')


def _restore(run: build.Run, saved: checkpoint.Checkpoints, workdir: Path, like: TrainState,
             update: int, entries: Sequence[history.Entry], note: Callable[[str], None]
             ) -> tuple[TrainState, dict[str, Any]]:
  """Returns the state and `meta` of a checkpoint, or of an earlier one if it is broken.

  Args:
    run: of the experiment.
    saved: the checkpoints of the workdir.
    workdir: of the run.
    like: the shapes of the state.
    update: of the checkpoint, whose files were checked.
    entries: the history of the run.
    note: called with a line about each broken checkpoint.

  Raises:
    checkpoint.Broken: no earlier checkpoint is good or was made with this config, or there are
      other processes, which may have restored this one.
  """
  points = history.change_points(entries)
  since = max((number - 1 for number in points if number <= update + 1), default=0)
  while True:
    try:
      return saved.restore(like, update, files_checked=True)
    except checkpoint.Broken as error:
      earlier = [number for number in checkpoint.saved_updates(workdir)
                 if number < update and not checkpoint.problem(workdir, number)]
      if not earlier or run.place.processes > 1:
        raise
      note(checkpoint.set_aside(workdir, update, error.words))
      update = earlier[-1]
      if update < since:  # the same command then begins with the config that was before
        raise


def _segment(run: build.Run, state: TrainState, meta: Mapping[str, Any], envs: Any, length: int,
             workdir: Path, files: Files | None, progress: Progress, profiler: Profiler,
             asked_to_stop: Callable[[], bool], entry: history.Entry | None
             ) -> tuple[TrainState, dict[str, Any], Any]:
  """Runs a segment.

  Args:
    run: of the experiment.
    state: the train state to begin with; donated.
    meta: of the checkpoint that the segment begins with.
    envs: the state of environments that go on from that checkpoint; () if they begin anew.
    length: number of updates.
    workdir: of the run.
    files: metrics and receipts, in process 0; None in other processes.
    progress: shows each update.
    profiler: counts reports.
    asked_to_stop: called after every update; the segment ends if it returns True.
    entry: of the history, if it begins with this segment.

  Returns:
    The state after the segment, the `meta` of its checkpoint, and the state of environments that
    go on.

  Raises:
    checkpoint.NotSaved: metrics or receipts cannot be written.
    Diverged: a loss or a gradient is not finite.
  """
  experiment = run.experiment
  place = run.place
  index = meta['segment']
  saved = int(state.update)
  noted = {history.KEY: entry.as_json()} if entry else {}
  safe = f'that of update {saved}' if saved else 'none: the run had just begun'

  def report(item: Report) -> None:
    for record, receipt in meter.records(item):
      if files:
        try:
          files.write(record, receipt)
        except OSError as error:
          raise checkpoint.NotSaved(
              f'{error}; the last good checkpoint is {safe}, in {workdir}') from error
      progress.show(record)
      try:
        check_finite(record)
      except Diverged as error:
        raise Diverged(f'{error}; the last good checkpoint is {safe}, in {workdir}') from None
    profiler.reported()

  with contextlib.ExitStack() as stack:
    if files:
      with jax.default_device(place.learners[0]):
        files.begin_segment(dict(segment=index, first_update=saved + 1,
                                 versions=workdirs.versions(), canary=canary(), **noted))
    segment = stack.enter_context(build.segment(
        run, state, index, length, report, asked_to_stop, envs))
    meter = Meter(experiment.log.window, experiment.spec.frame_skip, segment.waits, meta)
    try:
      states = loops.run(segment.workers)
    except loops.Stuck as error:
      # EnvPool's receive cannot be interrupted, so nothing else ends those threads. A normal exit
      # would wait for them.
      cause = environment_failure(error) or repr(error.__cause__)
      complain(f'podracer_jit: {cause}; {error}')
      os._exit(exit_codes.FAILED)
    envs = build.envs_after(run, states, saved)
  return states['learner'].train, meter.meta() | {'segment': index + 1}, envs


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
    """Ends a trace that is still on."""
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()
