"""Evaluations while a run trains: whole episodes by its checkpoints, and which one is the best."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

from podracer_jit.envs.protocol import environment_failure
from podracer_jit.options import shorten
from podracer_jit.run import build, checkpoint, evaluation, journal, safe_files
from podracer_jit.run.settings import EvalOptions
from podracer_jit.types import TrainState

NAME = 'evaluations.jsonl'
_GRACE_S = 30.0  # that an evaluation has to end in; nothing can interrupt an environment's step
_POLL_S = 0.1
Record = dict[str, Any]  # a line of the file


class _Cancelled(Exception):  # noqa: N818 - not an error
  """The run ends before an evaluation does."""


def read(workdir: Path) -> list[Record]:
  """Returns the evaluations of a run, in order; empty if there are none.

  Each has 'update', 'steps', 'num_episodes', 'seconds' that it took, and the statistics of
  `evaluation.statistics`; or an 'error' in their place.
  """
  path = workdir / NAME
  return journal.read_lines(path) if path.exists() else []


def best_of(records: Sequence[Mapping[str, Any]]) -> int | None:
  """Returns the update with the highest mean return, the first one of equals; None without any."""
  played = [record for record in records if 'error' not in record]
  return max(played, key=lambda record: record['mean'])['update'] if played else None


def best_update(workdir: Path) -> int:
  """Returns the update of the best checkpoint of a run.

  Raises:
    ValueError: there is no run, or none of its checkpoints was evaluated.
  """
  best = best_of(read(workdir))
  if best is None:
    raise ValueError(f'--workdir: no checkpoint in {workdir} was evaluated while it trained; '
                     'eval.every_updates would have them evaluated')
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
  result: futures.Future[Record]


class Evaluator:
  """Evaluates checkpoints of a run on a thread of its own, one after another.

  It has environments, seeds and random numbers of its own, which depend on the seed of the run and
  the update alone. So the results do not depend on timing, and training does not depend on them.
  The next checkpoint is saved only when those from before are evaluated, or must be kept until
  they are: so a killed run can make up for a missing evaluation when it resumes.
  """

  def __init__(self, run: build.Run, workdir: Path, saved: checkpoint.Checkpoints,
               note: Callable[[str], None], show: Callable[[Record], None]):
    """Creates an evaluator; begins nothing.

    Args:
      run: of the experiment.
      workdir: of the run.
      saved: its checkpoints.
      note: called with a line about each evaluation, by the evaluator's thread.
      show: called with each evaluation, by the thread that calls `wait`.
    """
    self._run = run
    self._options: EvalOptions = run.experiment.eval
    self._workdir = workdir
    self._saved = saved
    self._note = note
    self._show = show
    self._records: list[Record] = []
    self._last = 0  # the update that was evaluated, or begun to be, last
    self._pending: list[_Task] = []
    self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
    self._cancelled = threading.Event()
    # A daemon: an environment that never answers must not keep the process.
    self._thread = threading.Thread(target=self._work, name='evaluator', daemon=True)
    self._thread.start()

  @property
  def keeps(self) -> set[int]:
    """The updates of the checkpoints that must stay: the best one, and those not evaluated yet."""
    best = best_of(self._records)
    return {task.player.update for task in self._pending} | ({best} if best else set())

  def resume(self, state: TrainState, is_final: bool) -> None:
    """Drops evaluations after a checkpoint, and begins those of checkpoints that are missing.

    Args:
      state: of the checkpoint that the run goes on from.
      is_final: the run is finished.

    Raises:
      OSError: the file cannot be written.
    """
    update = int(state.update)
    before = read(self._workdir)
    self._records = [record for record in before if record['update'] <= update]
    if len(self._records) < len(before):
      self._write()
    self._last = max((record['update'] for record in self._records), default=0)
    if not self._options.every_updates:
      return
    # All processes would have to restore an earlier checkpoint together.
    earlier = checkpoint.saved_updates(self._workdir) if self._run.place.processes == 1 else []
    for number in earlier:
      if 0 < number < update and self._is_due(number) \
          and not checkpoint.problem(self._workdir, number):
        restored, _ = self._saved.restore(state._replace(replay=()), number, files_checked=True)
        self._begin(restored)
    if update:
      self.offer(state, is_final)

  def offer(self, state: TrainState, is_final: bool) -> None:
    """Begins to evaluate a checkpoint that was just saved, if it is time.

    Args:
      state: of the checkpoint; its parameters are copied.
      is_final: the run is finished, and its last checkpoint is evaluated in any case.
    """
    update = int(state.update)
    if self._options.every_updates and (
        self._is_due(update) or is_final and update > self._last):
      self._begin(state)

  def wait(self, asked_to_stop: Callable[[], bool]) -> None:
    """Waits for the evaluations that were begun, and shows them.

    Args:
      asked_to_stop: if it returns True, the others are left.

    Raises:
      checkpoint.NotSaved: the file cannot be written.
    """
    while self._pending and not asked_to_stop():
      try:
        record = self._pending[0].result.result(_POLL_S)
      except TimeoutError:
        continue
      except OSError as error:
        raise checkpoint.NotSaved(str(error)) from error
      del self._pending[0]
      self._show(record)

  def close(self) -> None:
    """Ends the thread; an evaluation that is not finished is dropped."""
    self._cancelled.set()
    self._tasks.put(None)
    self._thread.join(_GRACE_S)

  def _is_due(self, update: int) -> bool:
    return update - self._last >= self._options.every_updates

  def _begin(self, state: TrainState) -> None:
    self._last = int(state.update)
    player = evaluation.make_player(self._run, state.params, self._last, int(state.steps))
    player = player._replace(threads=1)  # the actors need the others
    if self._options.greedy:
      player = evaluation.greedy(player)
    self._pending.append(_Task(player, futures.Future()))
    self._tasks.put(self._pending[-1])

  def _work(self) -> None:
    """Evaluates one checkpoint after another."""
    while (task := self._tasks.get()) and not self._cancelled.is_set():
      try:
        task.result.set_result(self._evaluate(task.player))
      except _Cancelled:
        return
      except BaseException as error:  # noqa: BLE001 - raised again by `wait`
        task.result.set_exception(error)

  def _evaluate(self, player: evaluation.Player) -> Record:
    """Plays, and writes and notes the result.

    Raises:
      OSError: the file cannot be written.
    """
    options = self._options
    record: Record = dict(update=player.update, steps=player.steps,
                          num_episodes=options.num_episodes)
    began_s = time.monotonic()
    try:
      episodes = evaluation.play(
          player, options.num_episodes, options.num_envs, self._run.experiment.seed,
          options.max_steps, self._check_cancelled, index=player.update)
    except _Cancelled:
      raise
    except Exception as error:  # noqa: BLE001 - an environment may raise anything
      words = environment_failure(error) or f'{type(error).__name__}: {error}'
      record['error'] = shorten(words, 400)
      said = f'failed: {record["error"]}'
    else:
      record |= evaluation.statistics(player.task, episodes)
      best = best_of([*self._records, record]) == player.update
      said = f'return {record["mean"]:.2f}' + (', the best so far' if best else '')
    record['seconds'] = time.monotonic() - began_s
    self._records = [*self._records, record]  # other threads may be reading the list
    self._write()
    self._note(f'evaluation of update {player.update:,} ({options.num_episodes} episodes): {said}')
    return record

  def _check_cancelled(self, done: int) -> None:
    del done
    if self._cancelled.is_set():
      raise _Cancelled

  def _write(self) -> None:
    lines = ''.join(json.dumps(record) + '\n' for record in self._records)
    safe_files.write_text(self._workdir / NAME, lines)
