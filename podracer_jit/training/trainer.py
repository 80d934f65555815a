"""Trains runs segment by segment, and saves them: the loop, and the one door to it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh

from podracer_jit.experiment import build, checks, memory, placing, trial
from podracer_jit.experiment.resolve import changed
from podracer_jit.experiment.schema import Experiment
from podracer_jit.options import INT32_MAX
from podracer_jit.runtime import host, placement, tried
from podracer_jit.schemes.reports import Report
from podracer_jit.training import opening, restoring, seeds, stopping, trackers
from podracer_jit.training.adapting import Adapting
from podracer_jit.training.crew import Crew
from podracer_jit.training.lane import Lane
from podracer_jit.training.opening import Opened
from podracer_jit.training.profiling import Profiler, Profiling
from podracer_jit.training.program import GraphProgram, Moment, Program
from podracer_jit.training.progress import Progress
from podracer_jit.training.seeds import SeedsProgram
from podracer_jit.training.sinks import Record, Sink, Sinks, closing
from podracer_jit.workdir import checkpoints, record
from podracer_jit.workdir.workdir import Request

if TYPE_CHECKING:
  from podracer_jit.cluster.ray_cluster import Cluster

# A checkpoint that is due by the clock waits so many times as long as the last one took.
_SAVE_SHARE = 20


class Trainer:
  """The loop of a training: segments, and checkpoints anywhere in them; a `Watcher`."""

  def __init__(self, program: Program, lanes: Sequence[Lane], stop: stopping.Stopping,
               sinks: Sequence[Sink] = (), last: int | None = None):
    """Creates a trainer.

    Args:
      program: makes the updates.
      lanes: its runs, in order, which are open.
      stop: handles signals.
      sinks: told about all runs together: the newest update of each report, as the mean over the
        runs.
      last: the last update; None: the runs end with their total_steps.
    """
    self._program = program
    self._lanes = lanes
    self._stop = stop
    self._sinks = Sinks(sinks)
    self._last = last
    experiment = lanes[0].run.experiment
    self._options = experiment.checkpoint
    # Updates after whose multiples there is a checkpoint.
    self._multiples = [every for every in (
        self._options.every_updates, experiment.eval.every_updates) if every]
    self._next_save_s = time.monotonic() + self._options.every_seconds
    self._is_saving = False
    # Runs, the indices of their segments, and fields of headers, which are not told yet.
    self._begins: Sequence[tuple[Lane, int, Mapping[str, Any]]] = ()

  def asked_to_stop(self) -> bool:
    """Returns whether a signal or a sink of this process has asked for an end."""
    return (self._stop.asked() or self._sinks.ask_to_stop
            or any(lane.ask_to_stop for lane in self._lanes))

  def is_saving(self) -> bool:
    """Returns whether the runs are being saved, or what this needs is awaited."""
    return self._is_saving

  def begin(self) -> None:
    """Tells the runs that go on that a segment begins, once.

    It waits for the canary, for which programs need not wait.
    """
    begins, self._begins = self._begins, ()
    for lane, index, fields in begins:
      lane.begin_segment(index, fields)

  def replaying(self, done: int, total: int) -> None:
    """Tells how far environments are that are made again."""
    self.begin()
    for sinks in (self._sinks, *self._lanes):
      sinks.replaying(done, total)

  def next_pause(self, update: int) -> int:
    """Returns the next update after which a checkpoint is due by its number."""
    ends = [] if self._last is None else [self._last]
    return min([*((update // every + 1) * every for every in self._multiples), *ends],
               default=INT32_MAX)

  def is_due(self, update: int) -> bool:
    """Returns whether the runs are to be saved after an update, as far as this process knows."""
    # The clock of process 0 decides.
    is_time = (self._options.every_seconds and self._lanes[0].run.place.process == 0
               and time.monotonic() >= self._next_save_s
               and not any(lane.must_wait for lane in self._lanes))
    return bool(is_time) or self.asked_to_stop() or update == self._last or any(
        update % every == 0 for every in self._multiples)

  def after(self, moment: Moment) -> bool:
    """Saves the runs if that is due; returns whether they end, see `Watcher`.

    A signal ends them at their next update (with a scheme of one program, after the current call).
    """
    update = max(moment.updates)
    for lane, *where in zip(self._lanes, moment.updates, moment.steps, strict=True):
      lane.move(*where, moment.sent)
    is_last = update == self._last or all(lane.is_finished for lane in self._lanes)
    due, asked = placement.any_process([self.is_due(update), self.asked_to_stop()], self._mesh)
    if due or asked or is_last:
      self._is_saving = True
      try:
        self._save(moment)
      finally:
        self._is_saving = False
      # A sink may have asked for an end when it was told of the checkpoint.
      asked = self._is_stopped()
    return is_last or asked

  def train(self) -> bool:
    """Trains until each run has its total_steps or its last update, or until a stop.

    Returns:
      Whether it was stopped: by a signal in any process, or a sink.
    """
    while not (self._is_stopped() or all(lane.is_finished for lane in self._lanes)
               or self._lanes[0].update == self._last):
      before = [lane.update for lane in self._lanes]
      fields = self._program.header()
      self._begins = [(lane, self._program.segment_index(number), fields)
                      for number, lane in enumerate(self._lanes) if not lane.is_finished]
      self._program.segment(self._report, self)
      if before == [lane.update for lane in self._lanes]:
        break
    # A stop came after the end of a segment, or between two updates. There is no snapshot if it
    # came before the first update of a segment; the newest checkpoint counts then.
    if any(lane.is_ahead for lane in self._lanes) and self._program.snapshot(0) is not None:
      self._save(Moment([lane.update for lane in self._lanes],
                        [lane.steps for lane in self._lanes], (), lambda: None,
                        self._program.snapshot))
    for lane in self._lanes:
      lane.finish()
    # A signal to one process has stopped them all, so all have the exit code of a stop.
    return self._is_stopped()

  @property
  def _mesh(self) -> Mesh:
    return self._lanes[0].run.place.mesh

  def _is_stopped(self) -> bool:
    return placement.any_process([self.asked_to_stop()], self._mesh)[0]

  def _save(self, moment: Moment) -> None:
    """Saves the runs that have made updates since they were saved."""
    moment.wait_written()
    numbers = [number for number, lane in enumerate(self._lanes) if lane.is_ahead]
    for number in numbers:
      self._lanes[number].before_save()
    began_s = time.monotonic()
    with self._stop.saving():
      for number in numbers:
        self._lanes[number].save(moment.snapshot(number))
    now_s = time.monotonic()
    self._next_save_s = now_s + max(self._options.every_seconds,
                                    _SAVE_SHARE * (now_s - began_s))
    for number in numbers:
      self._lanes[number].tell_saved()

  def _report(self, reports: Sequence[tuple[int, Report]]) -> None:
    """Tells the reports of a call to their runs, and their mean to all runs' sinks."""
    told = [self._lanes[number].report(report) for number, report in reports]
    record, receipt = told[0] if len(self._lanes) == 1 else (
        _means([record for record, _ in told]), {})
    self._sinks.update(record, receipt)


def _means(records: Sequence[Record]) -> Record:
  """Returns a record of the means of all runs, of what each of them has."""
  means = {}
  for name, value in records[0].items():
    if name == 'warning':
      continue
    values = [record[name] for record in records if record[name] is not None]
    mean = np.mean(values) if values else None
    means[name] = int(mean) if isinstance(value, int) else mean
  warnings = [record['warning'] for record in records if 'warning' in record]
  if warnings:
    means['warning'] = f'{len(warnings)} of {len(records)} seeds, such as: {warnings[0]}'
  return means


class Training:
  """One run, or the runs of several seeds, whose workdirs this process has opened."""

  def __init__(self, runs: Sequence[Opened], folder: Path, notes: Sequence[str]):
    """Takes opened runs.

    Args:
      runs: of which all but the seeds are equal.
      folder: the workdir, or the folder with those of several seeds.
      notes: lines about memory, what was decided, repairs and changes.
    """
    self.runs = runs
    self.notes = notes
    experiment = runs[0].run.experiment
    self._folder = folder
    self._are_seeds = folder != runs[0].workdir
    self._title = (f'{experiment.env.task}  {experiment.scheme_name} {experiment.loss_name}  '
                   f'{folder}')

  @property
  def workdir(self) -> Path:
    """The workdir of the run; of several seeds, that of the last one, which is saved last."""
    return self.runs[-1].workdir

  def train(self, stop: stopping.Stopping, users: Sequence[Sequence[Sink]] = (),
            profiling: Profiling | None = None, quiet: bool = False, began_s: float | None = None
            ) -> bool:
    """Trains all stages of the rest of the run; usually there is one, see `opening.stages`.

    Args:
      stop: handles signals.
      users: a user's sinks of each run, see `sinks.users`; they are closed.
      profiling: what jax.profiler records; None: nothing.
      quiet: prints nothing but warnings.
      began_s: when the command began, by `time.perf_counter`; None: now.

    Returns:
      True if each run has its total_steps, False if a signal or a sink has
      stopped the training.

    Raises:
      Exception: the training has failed; the message or a note names the last good checkpoint.
    """
    began_s = time.perf_counter() if began_s is None else began_s
    workdir = self.workdir
    run = self.runs[-1].run
    means = f'  means of {len(self.runs)} seeds' if self._are_seeds else ''
    progress = Progress(run.experiment, self._title + means, quiet=quiet or run.place.process > 0)
    sinks: list[Sink] = [progress]
    if profiling:
      sinks.append(Profiler(profiling, run, self.runs[-1].update or 0))
    finished = None
    try:
      with (checkpoints.naming_last_good(workdir),
            closing([*sinks, *(sink for of_run in users for sink in of_run)])):
        finished = self._train_stages(stop, users, sinks, began_s)
    except KeyboardInterrupt:
      # All is saved; a further signal has only cut the closing of a sink short.
      if finished is None:
        raise
    return finished

  def _train_stages(self, stop: stopping.Stopping, users: Sequence[Sequence[Sink]],
                    sinks: Sequence[Sink], began_s: float) -> bool:
    """Trains all stages; see `train` and `_train_stage`."""
    newest = self.runs[-1]
    run = newest.run
    for stage, last in opening.stages(run, newest.record, newest.update or 0):
      if stage is not run:
        self.runs = [newest._replace(run=stage)]
      is_stopped = self._train_stage(last, stop, users, sinks, began_s)
      if last is None or is_stopped or last not in checkpoints.saved_updates(newest.workdir):
        return not is_stopped
      newest = newest._replace(update=last)
      self.runs = [newest]
      began_s = time.perf_counter()  # the checkpoint has the seconds up to now
    raise AssertionError('the last stage has no last update')

  def _train_stage(self, last: int | None, stop: stopping.Stopping,
                   users: Sequence[Sequence[Sink]], sinks: Sequence[Sink], began_s: float) -> bool:
    """Trains one stage.

    Args:
      last: its last update; None: the run ends at total_steps.
      stop: handles signals.
      users: a user's sinks of each run.
      sinks: told about all runs together; the first one is the display.
      began_s: when the command, or the stage, began.

    Returns:
      Whether it was stopped.
    """
    progress = sinks[0]
    with contextlib.ExitStack() as stack:
      lanes = []
      for each in self.runs:
        name = f'seed {each.run.experiment.seed}' if self._are_seeds else ''
        lanes.append(Lane(each, name, progress.note, began_s))
        stack.enter_context(lanes[-1].closing())
      lanes[0].compute_canary()  # all lanes have the same
      before = [lane.update for lane in lanes]
      for line in self._beginning(lanes):
        progress.note(line)
      if not all(lane.is_finished for lane in lanes):
        progress.compiling()
      for lane, of_lane in zip(lanes, users or [()] * len(lanes), strict=True):
        lane.open(of_lane, stop)
      program = stack.enter_context(contextlib.closing(
          _program(lanes, self._are_seeds, progress.note)))
      trainer = Trainer(program, lanes, stop, sinks, last)
      is_stopped = trainer.train()
      for sink in sinks:
        if isinstance(sink, Profiler) and sink.missing:
          progress.note(sink.missing)
      if lanes[0].update == last and not is_stopped:
        progress.note(f'update {last}: the config changes after it, as the history says')
        return False
      progress.finish(self._ending(lanes, is_idle=before == [lane.update for lane in lanes]))
      return is_stopped and not all(lane.is_finished and not lane.is_evaluating for lane in lanes)

  def _beginning(self, lanes: Sequence[Lane]) -> Iterator[str]:
    """Yields the lines before a training."""
    first = lanes[0]
    experiment = first.run.experiment
    if self._are_seeds:
      going_on = sum(lane.update > 0 for lane in lanes)
      how = f'of which {going_on} go on' if going_on else 'starting'
      yield f'{self._title}: {len(lanes)} seeds, {how}'
      return
    if first.update:
      yield f'going on from update {first.update} ({first.steps:,} steps)'
      yield from first.changed_options()
    else:
      yield f'{self._title}: starting'
      longest = restoring.longest_replay(first.run)
      if longest:
        yield longest.words()
    flags = placing.as_flags(experiment.placement)
    if flags:
      yield f'placement on this machine: {flags}'
    yield from _where(first.run)
    if experiment.spec.calls_python:
      yield (f'slow environments: Python steps {experiment.env.task}, in worker processes; '
             'EnvPool or JAX functions would be faster')
      yield (f'results do not repeat: {experiment.non_deterministic_setting} is not deterministic'
             if not experiment.deterministic else
             'results repeat, if all that the environments draw follows from the seed of their '
             'reset')

  def _ending(self, lanes: Sequence[Lane], is_idle: bool) -> str:
    """Returns the line after a training; `is_idle` if it has made no update."""
    is_finished = all(lane.is_finished for lane in lanes)
    how = 'finished' if is_finished else 'stopped'
    hint = '' if is_finished else '; the same command goes on'
    if self._are_seeds:
      names = f'{lanes[0].workdir.name} to {lanes[-1].workdir.name}'
      return (f'{how} at {min(lane.steps for lane in lanes):,} steps of each seed; {self._folder} '
              f'has them all, {names}{hint}')
    if is_finished and any(lane.is_evaluating for lane in lanes):
      hint = ', but for an evaluation that a signal has cut; the same command makes it'
    elif is_finished and is_idle:
      hint = '; to go on: --extend with a larger --config.total_steps'
    return (f'{how} at update {lanes[0].update} ({lanes[0].steps:,} steps); {self._folder} has it '
            f'all{hint}')


def _where(run: build.Run) -> Iterator[str]:
  """Yields a line on what runs where, if simulators run on the CPU beside an accelerator."""
  spec = run.experiment.spec
  acting, learning = (' and '.join(sorted({device.platform for device in devices}))
                      for devices in (run.place.actors, run.place.mesh.devices.flat))
  if spec.is_function or spec.calls_python or run.crew or {acting, learning} == {'cpu'}:
    return
  pools = run.experiment.num_shards // run.place.processes
  threads = f'{run.place.env_threads} threads' + (f' in each of {pools} pools' if pools > 1 else '')
  where = "this host's CPU" if run.place.processes == 1 else "each host's CPU, in each process"
  yield (f'simulators of {spec.task} run on {where} ({threads}), the policy on {acting}, the '
         f'learner on {learning}')


def _program(lanes: Sequence[Lane], are_seeds: bool, say: Callable[[str], None]) -> Program:
  """Returns the program of runs, which takes over their first states.

  Args:
    lanes: the runs.
    are_seeds: of several seeds.
    say: prints a line.
  """
  snapshots = [lane.take_first() for lane in lanes]
  if are_seeds:
    return SeedsProgram([lane.run for lane in lanes], snapshots)
  run = lanes[0].run
  return GraphProgram(run, snapshots[0], Adapting(run, say))


def _untried(run: build.Run) -> Iterator[str]:
  """Yields a line in process 0 if the run uses versions with which the package was not tried."""
  installed = record.versions(*tried.TRIED)
  if not run.experiment.placement.is_remote:
    installed.pop('ray', None)  # it is not loaded
  line = tried.untried(installed)
  if line and run.place.process == 0:
    yield line


@contextlib.contextmanager
def opened(experiment: Experiment, workdir: Path, request: Request,
           cluster: Cluster | None = None, num_seeds: int | None = None) -> Iterator[Training]:
  """Builds a run, or those of several seeds, and opens their workdirs; closes these on exit.

  Args:
    experiment: the experiment to run; with several seeds, the first one has its seed, and the
      others those that follow.
    workdir: the workdir of the run; with several seeds, each has one in it, `seed1` and so on.
    request: where a run begins, and which fields may differ if it goes on.
    cluster: where its actors are, if the placement asks for one; see `crew.joined`.
    num_seeds: number of seeds that train at once; None: one run.

  Yields:
    The runs, ready to train.

  Raises:
    ValueError: the experiment cannot run on this machine, or a workdir is in use, of another
      experiment, or cannot be repaired.
    OSError: a workdir cannot be written to.
  """
  trackers.check_installed(experiment.log.tracker)
  notes = []
  first = workdir if num_seeds is None else workdir / f'seed{experiment.seed}'
  if num_seeds is not None and (workdir / record.NAME).exists():
    raise ValueError(f'--workdir: {workdir} is the workdir of one run; with --num_seeds each seed '
                     'gets a folder in it: choose another')
  experiment = opening.as_it_began(experiment, first)
  renewal = opening.renewal_until_0_7(experiment, first)
  if renewal is not None:
    experiment = changed(experiment, env={'renew_every_updates': renewal})
    notes.append(f'env.renew_every_updates: {renewal:,}, as in {first}; until version 0.7 that was '
                 'checkpoint.every_updates, which is now only how often the run is saved')
  if num_seeds is not None:
    experiment = seeds.on_one_device(experiment)
    for problem in seeds.problems(experiment, num_seeds):
      raise ValueError(problem)
    seeds.allow_open_files(num_seeds, experiment.log.tensorboard)
  host.prepare_host(experiment.placement, experiment.numerics.deterministic, placing.most_devices(
      experiment.num_shards, experiment.num_grad_shards, host.machine()[0]))
  crew = Crew(cluster, experiment) if cluster else None
  run = build.make_run(experiment, crew)
  trial.check(run)
  notes += [*(f'warning: {line}' for line in memory.check(run, num_seeds or 1)),
            *memory.of_replay(run, num_seeds or 1), *checks.notes(experiment), *_untried(run)]
  runs = []
  with contextlib.ExitStack() as stack:
    if num_seeds is None:
      runs = [stack.enter_context(opening.opened_run(run, workdir, request))]
      notes += runs[0].notes
    begin = {}
    for seed in range(experiment.seed, experiment.seed + (num_seeds or 0)):
      # Nothing but the experiment depends on the seed, so the seeds share what is compiled.
      of_seed = dataclasses.replace(run, experiment=dataclasses.replace(
          experiment, seed=seed, fields={**experiment.fields, 'seed': seed}))
      begin[seed] = stack.enter_context(opening.decided(
          of_seed, workdir / f'seed{seed}', request))
    for seed in begin:  # only now: the workdir of one seed may refuse them all
      runs.append(begin[seed]())
      seeds.check_stages(runs[-1], seed)
      notes += [f'seed {seed}: {note}' for note in runs[-1].notes]
    yield Training(runs, workdir, notes)
