"""One run of a training: where it is, its workdir, and what it tells."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from podracer_jit import schedules
from podracer_jit.errors import Broken, EnvironmentFailed, Refused
from podracer_jit.experiment.build import Snapshot
from podracer_jit.experiment.schema import Experiment
from podracer_jit.numerics import counters
from podracer_jit.schemes.reports import Report
from podracer_jit.training import restoring, stopping
from podracer_jit.training.evaluator import Evaluator
from podracer_jit.training.meter import LIVES, Meter, environment_check, wall_clock
from podracer_jit.training.opening import Opened
from podracer_jit.training.sinks import (
  Diverged,
  Finite,
  Journals,
  Record,
  Saved,
  Sink,
  Sinks,
  Standstill,
  Start,
  closing,
)
from podracer_jit.training.trackers import TRACKERS, TensorBoard
from podracer_jit.workdir import actions, checkpoints, journal, record

_LONG_REPLAY_S = 600.0  # above which a replay is worth a warning
# After so many segments in which no episode has ended, the run says so.
_SEGMENTS_WITHOUT_END = 2


class Lane:
  """One run in training: where it is, its workdir, and what it tells."""

  def __init__(self, opened: Opened, name: str, print_line: Callable[[str], None],
               began_s: float):
    """Restores the newest checkpoint, or begins anew.

    Args:
      opened: the run, whose workdir this process has opened.
      name: in front of its lines, such as 'seed 3'; '' if it is the only run.
      print_line: prints a line.
      began_s: when the command began, by `time.perf_counter`.

    Raises:
      Broken: see `_restored`.
    """
    self.run = opened.run
    self.workdir = opened.workdir
    self._record = opened.record
    self._name = name
    self._print = print_line
    self._saved = checkpoints.Checkpoints(self.workdir, self.run.experiment.checkpoint.keep)
    self._own: list[Sink] = []
    self._sinks = Sinks(())
    self._log: actions.Log | None = None
    self._evaluator: Evaluator | None = None
    self._have_sinks_begun = False
    meta: Mapping[str, Any] = {}
    if opened.update is None:
      # Seeds share one program, which should be compiled once.
      first_state = self.run.initial_state() if name else self.run.initial_state_later()
      self._first: Snapshot | None = Snapshot(first_state, first=0)
      self.update = self.steps = 0
    else:
      self._first, meta = self._restored(opened.update)
      self.update = self._first.update
      self.steps = counters.fetch_int(self._first.state.steps)
    self._saved_update = self.update
    self._longest = restoring.longest_replay(self.run)
    self._meter = Meter(self.run.experiment, meta, wall_clock(meta, began_s))
    self._standstill = Standstill(
        name, quiet=self.run.place.process > 0 or self.is_finished, past=meta)

  def _restored(self, update: int) -> tuple[Snapshot, dict[str, Any]]:
    """Returns where a checkpoint is, or an earlier one if it is broken, and its `meta`.

    Raises:
      Broken: no earlier checkpoint of this config is whole, or there are other
        processes, which may have restored the broken checkpoint.
      Refused: the environments cannot go on where they were.
    """
    since = max((number - 1 for number in self._record.changes if number <= update + 1), default=0)
    while True:
      try:
        return restoring.snapshot(self.run, self._saved, self.workdir, self._record, update)
      except Broken as error:
        earlier = [number for number in checkpoints.saved_updates(self.workdir)
                   if number < update and not checkpoints.problem(self.workdir, number)]
        if not earlier or self.run.place.processes > 1:
          raise
        self._print(checkpoints.set_aside(self.workdir, update, error.problem))
        update = earlier[-1]
        # An earlier config made that checkpoint; the same command goes on with it, stage by stage.
        if update < since:
          raise
        damage = restoring.problem_of_actions(self.run, self.workdir, self._record, update)
        if damage:
          raise Refused(damage) from None

  @functools.cached_property
  def _surroundings(self) -> dict[str, Any]:
    return restoring.surroundings(self.run)

  def compute_canary(self) -> None:
    """Starts to compute the canary, behind the first state, while this thread goes on.

    Both compile. One after the other they leave a core to what this thread does.
    """
    state = self._first.state

    def compute():
      # Errors are raised again where the results are used. `canary` keeps its result.
      with contextlib.suppress(Exception):
        if callable(state):
          state()
      with contextlib.suppress(Exception):
        restoring.surroundings(self.run)

    threading.Thread(target=compute, name=stopping.BESIDE).start()

  def take_first(self) -> Snapshot:
    """Returns where the run begins; it must not stay in memory while the run trains."""
    first = self._first
    self._first = None
    return first

  def changed_options(self) -> Iterator[str]:
    """Yields a line for each option that changes here as its schedule has a new total_steps."""
    change = self._record.changes.get(self.update + 1, {}).get(record.TOTAL)
    if change is None:
      return
    steps = np.float32(self.steps)
    optimizer = self.run.experiment.optimizer
    values = {'the learning rate': lambda total: optimizer.schedule(total)(steps)}
    for section, part in (('loss', self.run.experiment.loss), ('optimizer', optimizer)):
      for name, schedule in schedules.scheduled(part).items():
        if (section, name) != ('optimizer', 'learning_rate'):
          values[f'{section}.{name}'] = functools.partial(schedule.at, steps)
    for name, value_of in values.items():
      before, after = (f'{float(value_of(change[key])):.3g}' for key in ('was', 'now'))
      if before != after:
        yield (f'{name} changes from {before} to {after} here: its schedule is over '
               f'{change["now"]:,} steps instead of {change["was"]:,}')

  @property
  def is_finished(self) -> bool:
    """Whether the run has its total_steps."""
    return self.steps >= self.run.experiment.total_steps

  @property
  def is_evaluating(self) -> bool:
    """Whether evaluations have begun, now or before a stop, whose results are not written."""
    return self._evaluator is not None and self._evaluator.has_more

  def open(self, users: Sequence[Sink], stop: stopping.Stopping) -> None:
    """Opens the run's files, and makes its sinks.

    Args:
      users: a user's sinks, which stay open.
      stop: handles signals; after one, nothing is waited for.

    Raises:
      OSError: a file cannot be read or written; the error names it.
    """
    experiment = self.run.experiment
    is_first = self.run.place.process == 0
    sinks = self._own  # `closing` also closes what was opened before an error
    problems: Sequence[str] = ()
    sinks.append(self._standstill)
    if is_first:
      evaluator = Evaluator(self.run, self.workdir, lambda: stop.asked() or self.ask_to_stop,
                            self._print, self._tell_evaluation)
      sinks.append(evaluator)  # before the files: it adds to the records
      self._evaluator = evaluator
      evaluator.resume(self._saved, self._first.state, self.update)
      self._cut_actions()
    if is_first and not self.is_finished:
      journals = Journals(self.workdir, self.update, experiment.logs)
      sinks.append(journals)
      problems = journals.problems
    if is_first and (not self.is_finished or self.is_evaluating):
      if experiment.log.tensorboard:
        sinks.append(TensorBoard(self.workdir, self.update, self.steps))
      if experiment.log.tracker in TRACKERS:
        sinks.append(TRACKERS[experiment.log.tracker](self.workdir, self.update))
    sinks.append(Finite())
    self._sinks = Sinks([*sinks, *users])
    for problem in problems:
      self._note(problem)

  @property
  def ask_to_stop(self) -> bool:
    """Whether a sink has asked for an end."""
    return self._sinks.ask_to_stop

  def _cut_actions(self) -> None:
    """Removes actions that were sent after the checkpoint from which the run goes on.

    A run that was killed may have left actions of later segments, and of earlier ones whose
    checkpoints it had deleted.
    """
    self._saved.remove_actions()
    if self._first.sent is not None:
      segment = self._first.segment
      prefix = checkpoints.prefix_of(self.workdir, self.update, actions.name_of(segment))
      actions.cut(self.workdir, segment, prefix)

  def begin_segment(self, segment: int, fields: Mapping[str, Any]) -> None:
    """Begins a segment, or goes on with it.

    Args:
      segment: its index.
      fields: further fields of its header in the receipts.
    """
    every = self.run.experiment.log.every_updates
    flags = os.environ.get('XLA_FLAGS', '')
    header = dict(segment=segment, first_update=self.update + 1, **self._surroundings,
                  **({journal.EVERY: every} if every > 1 else {}),
                  numerics=dataclasses.asdict(self.run.experiment.numerics),
                  **({journal.XLA_FLAGS: flags} if flags else {}),
                  **self._record.header(self.update + 1), **fields)
    self._close_log()
    if self.run.experiment.resumes_exactly:
      self._log = actions.Log(self.workdir, segment, self.run.place.process == 0)
    if segment == _SEGMENTS_WITHOUT_END and not self._meter.episodes:
      for line in _without_end(self.run.experiment):
        self._note(line)
    self._check = environment_check(self.run.experiment, segment)
    self._meter.begin(fields.get(LIVES))
    self._begin_sinks(header)

  def _begin_sinks(self, header: Mapping[str, Any]) -> None:
    """Tells the sinks of a beginning."""
    experiment = self.run.experiment
    self._sinks.begin(Start(self.workdir, self.run.place.process, experiment.seed, self.update,
                            self.steps, header, experiment.fields))
    self._have_sinks_begun = True

  def report(self, report: Report) -> tuple[Record, Record]:
    """Tells the updates of a report; returns the last record and receipt.

    Raises:
      CallbackFailed: a user's sink has failed.
      NotSaved: metrics or receipts cannot be written.
      Diverged: a loss, a gradient or the train state is not finite.
      EnvironmentFailed: an environment has returned a value that cannot be learned from.
    """
    last: tuple[Record, Record] = {}, {}
    try:
      self._check(report)
      for last in self._meter.records(report):
        self._sinks.update(*last)
    except (Diverged, EnvironmentFailed) as error:
      if not self._name:
        raise
      # Of several runs, each has its own last good checkpoint.
      raise type(error)(f'{self._name}, {error}; {checkpoints.last_good(self.workdir)}') from None
    return last

  @property
  def is_ahead(self) -> bool:
    """Whether there are updates that are not saved."""
    return self.update > self._saved_update

  @property
  def must_wait(self) -> bool:
    """Whether a save would wait for an evaluation."""
    return self._evaluator is not None and self._evaluator.must_wait

  def replaying(self, done: int, total: int) -> None:
    """Tells the sinks how far environments are that are made again."""
    self._sinks.replaying(done, total)

  def move(self, update: int, steps: int, sent: Sequence[Sequence[jax.Array]]) -> None:
    """Notes that updates were made; all processes call it.

    Args:
      update: updates done.
      steps: valid steps learned from.
      sent: what environments were sent meanwhile.

    Raises:
      NotSaved: it cannot be written.
    """
    self.update = update
    self.steps = steps
    if self._log and sent:
      self._log.add(sent)

  def before_save(self) -> None:
    """Has all sinks keep what they were told, before a checkpoint and at the end."""
    if self._log:
      self._log.sync()
    self._sinks.before_save()

  def finish(self) -> None:
    """Waits for evaluations that have begun, and has all sinks keep what they were told."""
    if self.is_evaluating and not self._have_sinks_begun:
      self._begin_sinks({})  # no update was made, and a stop had cut an evaluation
    if self._evaluator:
      self._evaluator.wait()
    self._sinks.before_save()

  def save(self, snapshot: Snapshot) -> None:
    """Saves a checkpoint.

    Raises:
      NotSaved: it cannot be written.
    """
    state = snapshot.state
    if not self.run.experiment.checkpoint.replay:
      snapshot = snapshot._replace(state=state._replace(replay=None))
    meta = self._meter.meta() | self._standstill.meta() | {
        'run': self._record.as_json(), restoring.SURROUNDINGS: self._surroundings}
    self._saved.save(snapshot, meta, self._sinks.keeps())
    self._saved_update = snapshot.update
    self._params = self.run.learner.algorithm.acting(state)

  def tell_saved(self) -> None:
    """Tells the sinks about the checkpoint that was saved."""
    self._sinks.saved(Saved(self.workdir, self.update, self.steps, self._params))
    del self._params
    if self._longest and self._meter.acting_s:
      seconds = self._longest.steps * self._meter.acting_s
      if seconds > _LONG_REPLAY_S:
        self._note(f'warning: to go on after a stop may take up to {seconds / 60:.0f} minutes, as '
                   f'up to {self._longest.steps:,} steps are replayed; a smaller '
                   'env.renew_every_updates, now '
                   f'{self.run.experiment.env.renew_every_updates:,}, makes that shorter')
      self._longest = None  # it is said once

  def _tell_evaluation(self, record: Mapping[str, Any], line: str) -> None:
    """Tells the sinks about an evaluation, whose line was printed."""
    self._sinks.evaluated(record)
    self._sinks.note(line)

  def _note(self, line: str) -> None:
    """Prints a line, and tells it to the sinks."""
    self._print(f'{self._name}: {line}' if self._name else line)
    self._sinks.note(line)

  @contextlib.contextmanager
  def closing(self) -> Iterator[None]:
    """Closes the run's own sinks, and its checkpoints, at the end of a block."""
    with contextlib.closing(self._saved), closing(self._own):
      try:
        yield
      finally:
        self._close_log()

  def _close_log(self) -> None:
    if self._log:
      self._log.close()
    self._log = None


def _without_end(experiment: Experiment) -> Iterator[str]:
  """Yields a line if no episode may ever end because environments begin anew."""
  if not experiment.keeps_envs:
    steps = experiment.segment_steps
    limit = experiment.spec.max_episode_steps
    length = limit if limit > steps else 10 * steps
    least = math.ceil(length / experiment.unroll_length)
    yield (f'warning: no episode has ended yet: environments begin anew after {steps:,} steps of '
           f'each (env.renew_every_updates = {experiment.env.renew_every_updates}), and longer '
           f'episodes never end; episodes of {length:,} steps need env.renew_every_updates = '
           f'{least:,} or more, or 0 for never')
