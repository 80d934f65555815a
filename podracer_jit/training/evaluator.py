"""Evaluates checkpoints of a run while it trains, and finds the best checkpoint."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

from podracer_jit.errors import environment_failure
from podracer_jit.experiment import build
from podracer_jit.experiment.schema import EvalOptions
from podracer_jit.numerics import counters
from podracer_jit.options import shorten
from podracer_jit.play import evaluation
from podracer_jit.training.sinks import EVAL_WAIT_S, Saved, Sink
from podracer_jit.types import TrainState
from podracer_jit.workdir import checkpoints, files, journal

NAME = 'evaluations.jsonl'
VIDEOS = 'videos'  # a folder of a workdir, with UPDATE.mp4 of evaluations
# Seconds that an evaluation has to end; nothing can interrupt an environment's step.
_GRACE_S = 30.0
_POLL_S = 0.1
Record = dict[str, Any]  # a line of the file


class _Cancelled(Exception):  # noqa: N818 - not an error
  """Raised to end an evaluation if the run ends earlier."""


def read(workdir: Path) -> list[Record]:
  """Returns the evaluations of a run, in order; empty if there are none.

  An evaluation has 'update', 'steps', 'num_episodes', its duration in 'seconds', and the statistics
  of `evaluation.statistics`, or an 'error', or both if the returns are not finite.
  """
  path = workdir / NAME
  return journal.read_lines(path, dict(update=int)) if path.exists() else []


def best_of(records: Sequence[Mapping[str, Any]]) -> int | None:
  """Returns the first update with the highest mean return; None if no evaluation succeeded."""
  # Earlier versions wrote means that are NaN, and no error.
  succeeded = [record for record in records if 'error' not in record
               and isinstance(record.get('mean'), float) and math.isfinite(record['mean'])]
  return max(succeeded, key=lambda record: record['mean'])['update'] if succeeded else None


def best_update(workdir: Path) -> int:
  """Returns the update of the best checkpoint of a run.

  Raises:
    ValueError: there is no run, or no checkpoint of it was evaluated.
  """
  best = best_of(read(workdir))
  if best is None:
    raise ValueError(f'--workdir: no checkpoint in {workdir} was evaluated during training; set '
                     'eval.every_updates to evaluate checkpoints')
  return best


def chosen_update(text: str | None, workdir: Path) -> int | None:
  """Returns the update that a flag --update means; None for the newest.

  Args:
    text: a number or 'best'; None: the newest.
    workdir: of the run.

  Raises:
    ValueError: it is something else, or no checkpoint was evaluated.
  """
  if text is None:
    return None
  if text == 'best':
    return best_update(workdir)
  if not text.isdecimal():
    raise ValueError(f'--update: must be a number or best, got {text!r}')
  return int(text)


class _Task(NamedTuple):
  """A checkpoint to evaluate."""

  player: evaluation.Player  # with a copy of the parameters
  result: futures.Future[tuple[Record, str]]  # the record, which is written, and a line


class Evaluator(Sink):
  """Evaluates checkpoints of a run on a thread of its own, one after another.

  The evaluator's environments, seeds and random numbers depend only on the seed of the run and on
  the update. So its results do not depend on timing, and training does not depend on its results. A
  checkpoint that waits for its evaluation is not deleted, so a killed run can make up for a missing
  evaluation when it resumes. Training waits only if the next evaluation is due, and the metrics of
  the next update say for how long. Several processes also wait before each checkpoint, as they
  cannot make up for an evaluation.
  """

  def __init__(self, run: build.Run, workdir: Path, asked_to_stop: Callable[[], bool],
               print_line: Callable[[str], None], tell: Callable[[Record, str], None]):
    """Creates an evaluator; evaluates nothing yet.

    Args:
      run: the run of the experiment.
      workdir: the workdir of the run.
      asked_to_stop: returns True to end a wait for an evaluation early.
      print_line: called with a line about each evaluation, by the evaluator's thread.
      tell: called with its record and that line, later, by the thread that trains.
    """
    self._run = run
    self._options: EvalOptions = run.experiment.eval
    self._workdir = workdir
    self._asked_to_stop = asked_to_stop
    self._print = print_line
    self._tell = tell
    self._records: list[Record] = []
    self._last = 0  # the update whose evaluation began last
    self._pending: list[_Task] = []
    self._waited_s = 0.0  # since the newest update
    self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
    self._cancelled = threading.Event()
    self._thread: threading.Thread | None = None  # from the first evaluation on

  def keeps(self) -> set[int]:
    """Returns the updates of the best checkpoint and of those that wait for an evaluation."""
    best = best_of(self._records)
    return {task.player.update for task in self._pending} | ({best} if best else set())

  def resume(self, saved: checkpoints.Checkpoints, state: TrainState, update: int) -> None:
    """Drops evaluations of updates after a checkpoint, and begins evaluations that are missing.

    Args:
      saved: the checkpoints of the run.
      state: the state in the checkpoint that the run goes on from; not read if that is update 0.
      update: of the state.

    Raises:
      OSError: the file cannot be written.
    """
    before = read(self._workdir)
    self._records = [record for record in before if record['update'] <= update]
    if len(self._records) < len(before):
      lines = ''.join(json.dumps(record) + '\n' for record in self._records)
      files.write(self._workdir / NAME, lines)
    self._last = max((record['update'] for record in self._records), default=0)
    if not self._options.every_updates:
      return
    # All processes would have to restore an earlier checkpoint together.
    acting = self._run.learner.algorithm.acting
    earlier = checkpoints.saved_updates(self._workdir) if self._run.place.processes == 1 else []
    for number in earlier:
      if 0 < number < update and self._is_due(number) \
          and not checkpoints.problem(self._workdir, number):
        restored, _ = saved.restore(state._replace(replay=None), number, files_checked=True)
        self._begin(acting(restored), number, counters.fetch_int(restored.steps))
    if update:
      self._offer(acting(state), update, counters.fetch_int(state.steps))

  def saved(self, at: Saved) -> None:
    """Begins to evaluate a checkpoint, if an evaluation is due; its parameters are copied.

    It waits for the evaluation before.
    """
    if self._is_wanted(at.update, at.steps):
      self.wait()
    self._offer(at.params, at.update, at.steps)

  def update(self, record: Record, receipt: Record) -> None:
    """Adds to a record how long training waited for evaluations since the update before."""
    if self._options.every_updates:
      record[EVAL_WAIT_S] = self._waited_s
      self._waited_s = 0.0

  @property
  def has_more(self) -> bool:
    """Whether evaluations have begun that were not told."""
    return bool(self._pending)

  @property
  def must_wait(self) -> bool:
    """Whether `before_save` would wait for an evaluation."""
    return self._run.place.processes > 1 and any(
        not task.result.done() for task in self._pending)

  def before_save(self) -> None:
    """Tells the evaluations that have ended; several processes wait for those that have begun.

    Raises:
      NotSaved: the file cannot be written.
    """
    waits = self._run.place.processes > 1
    self._tell_while(lambda: waits or self._pending[0].result.done())

  def wait(self) -> None:
    """Waits for the evaluations that have begun, and tells each.

    Raises:
      NotSaved: the file cannot be written.
    """
    self._tell_while(lambda: True)

  def _tell_while(self, may_tell: Callable[[], bool]) -> None:
    """Tells evaluations in order, waiting for each, as long as `may_tell` returns True."""
    began_s = time.monotonic()
    while self._pending and may_tell() and (result := self._result_of(self._pending[0])):
      del self._pending[0]
      self._tell(*result)
    self._waited_s += time.monotonic() - began_s

  def close(self) -> None:
    """Ends the thread; drops an unfinished evaluation."""
    self._cancelled.set()
    self._tasks.put(None)
    if self._thread:
      self._thread.join(_GRACE_S)

  def _is_due(self, update: int) -> bool:
    return update > self._last and update % self._options.every_updates == 0

  def _offer(self, params: Any, update: int, steps: int) -> None:
    """Begins to evaluate a checkpoint if that is due."""
    if self._is_wanted(update, steps):
      self._begin(params, update, steps)

  def _is_wanted(self, update: int, steps: int) -> bool:
    """Returns whether a checkpoint is to be evaluated; the last one of a run always is."""
    is_final = steps >= self._run.experiment.total_steps
    return bool(self._options.every_updates) and (
        self._is_due(update) or is_final and update > self._last)

  def _begin(self, params: Any, update: int, steps: int) -> None:
    self._last = update
    player = evaluation.make_player(self._run, params, update, steps)
    # One thread only: the actors need the other cores.
    player = player._replace(threads=1)
    player = evaluation.exploring(player, self._options.greedy, self._options.epsilon)
    self._pending.append(_Task(player, futures.Future()))
    self._tasks.put(self._pending[-1])
    if self._thread is None:
      # A daemon, because an environment that never answers must not keep the process alive.
      self._thread = threading.Thread(target=self._work, name='evaluator', daemon=True)
      self._thread.start()

  def _work(self) -> None:
    """Evaluates one checkpoint after another."""
    while (task := self._tasks.get()) and not self._cancelled.is_set():
      try:
        task.result.set_result(self._evaluate(task.player))
      except _Cancelled:
        return
      except BaseException as error:  # noqa: BLE001 - raised again where it is told
        task.result.set_exception(error)

  def _evaluate(self, player: evaluation.Player) -> tuple[Record, str]:
    """Plays the episodes of an evaluation; writes its record, and returns it with a line.

    Raises:
      OSError: the file cannot be written.
    """
    options = self._options
    record: Record = dict(update=player.update, steps=player.steps,
                          num_episodes=options.num_episodes)
    began_s = time.monotonic()
    try:
      settings = evaluation.Settings(options.num_episodes, options.num_envs,
                                     self._run.experiment.seed, options.max_steps, player.update)
      episodes = evaluation.play(player, settings, self._check_cancelled)
    except _Cancelled:
      raise
    except Exception as error:  # noqa: BLE001 - an environment may raise anything
      message = environment_failure(error) or f'{type(error).__name__}: {error}'
      record['error'] = shorten(message, 400)
      outcome = f'failed: {record["error"]}'
    else:
      record |= evaluation.statistics(player.task, episodes)
      best = best_of([*self._records, record]) == player.update
      outcome = (f'failed: {record["error"]}' if 'error' in record else
                 f'return {record["mean"]:.2f}' + (', the best so far' if best else ''))
      if self._is_filmed(player):
        outcome += self._film(player, settings, record)
    record['seconds'] = time.monotonic() - began_s
    files.append_line(self._workdir / NAME, json.dumps(record))
    # A new list, because another thread may be reading the old one.
    self._records = [*self._records, record]
    line = f'evaluation of update {player.update:,} ({options.num_episodes} episodes): {outcome}'
    self._print(line)
    return record, line

  def _is_filmed(self, player: evaluation.Player) -> bool:
    """Returns whether an evaluation has a video: each n-th one from the first, and the last one."""
    every = self._options.video_every
    is_final = player.steps >= self._run.experiment.total_steps
    return bool(every) and (len(self._records) % every == 0 or is_final)

  def _film(self, player: evaluation.Player, settings: evaluation.Settings, record: Record) -> str:
    """Films an episode and adds its path to the record; returns the end of the line about it.

    A task that cannot be filmed is evaluated all the same.
    """
    from podracer_jit.play import video  # only runs with videos need it
    path = self._workdir / VIDEOS / f'{player.update}.mp4'
    try:
      files.make_folder(path.parent)
      film = video.film(player, path, settings, lambda: self._check_cancelled(0))
    except _Cancelled:
      raise
    except Exception as error:  # noqa: BLE001 - an environment may raise anything
      message = environment_failure(error) or f'{type(error).__name__}: {error}'
      return f'; {shorten(message, 200)}'
    record['video'] = f'{VIDEOS}/{path.name}'
    return f'; {record["video"]} shows an episode of return {film.episode_return:.2f}'

  def _result_of(self, task: _Task) -> tuple[Record, str] | None:
    """Waits for an evaluation; returns None if a stop ends the wait.

    Raises:
      NotSaved: the file cannot be written.
    """
    while not task.result.done():
      if self._asked_to_stop():
        return None
      futures.wait([task.result], _POLL_S)
    with files.writing():
      return task.result.result()

  def _check_cancelled(self, count: int) -> None:
    del count
    if self._cancelled.is_set():
      raise _Cancelled
