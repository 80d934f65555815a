"""Callbacks: a user's functions that a training calls."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podracer_jit.errors import CallbackFailed


class _Stop(enum.Enum):
  STOP = enum.auto()


STOP = _Stop.STOP  # a callback returns this to stop the run


class SegmentEnd(NamedTuple):
  """The end of a segment, after its checkpoint was saved."""

  update: int  # updates done, and the number of the checkpoint
  steps: int  # valid agent steps learned from
  workdir: Path


class Callback:
  """Base class of callbacks for several events; its methods do nothing.

  Callbacks do not change the bits of a run. Each method may return `STOP`: the run then ends, saves
  everything, and can go on later.
  """

  def on_update(self, record: Mapping[str, Any]) -> Any:
    """Called after each update, in a thread of its own.

    Learning goes on meanwhile, and waits only if a callback takes longer than an update. So a run
    that is stopped here may make a few more updates.

    Args:
      record: the metrics of the update, as in metrics.jsonl: 'update', 'steps', 'episode_return'
        (None before the first episode has ended), 'sps', 'loss' and so on.
    """

  def on_segment_end(self, end: SegmentEnd) -> Any:
    """Called after each checkpoint, in the thread that trains, which waits.

    A run that is stopped here ends with this checkpoint.

    Args:
      end: the update, the steps and the workdir of the checkpoint.
    """

  def on_evaluation(self, record: Mapping[str, Any]) -> Any:
    """Called after each evaluation (`eval.every_updates`), in the thread that trains.

    Args:
      record: the line of evaluations.jsonl: 'update', 'steps', 'num_episodes', 'mean',
        'standard_error' and so on; or an 'error'.
    """


class Callbacks:
  """Calls the callbacks of a run."""

  def __init__(self, callbacks: Sequence[Callback | Callable[[Mapping[str, Any]], Any]] = ()):
    """Takes instances of `Callback`, and functions, which are called with each update's record.

    Raises:
      ValueError: a callback is neither.
    """
    for callback in callbacks:
      if isinstance(callback, type) or not (isinstance(callback, Callback) or callable(callback)):
        raise ValueError('callbacks: each must be a function or an instance of Callback, got '
                         f'{callback!r}')
    self._callbacks = list(callbacks)
    self.ask_to_stop = False  # whether a callback has returned STOP

  def update(self, record: Mapping[str, Any]) -> None:
    """Calls each callback with its own copy of an update's record.

    Raises:
      CallbackFailed: a callback has failed.
    """
    for callback in self._callbacks:
      call = callback.on_update if isinstance(callback, Callback) else callback
      self._call(call, dict(record), record['update'])

  def end_segment(self, end: SegmentEnd) -> None:
    """Calls `on_segment_end` of all instances of `Callback`.

    Raises:
      CallbackFailed: a callback has failed.
    """
    for callback in self._callbacks:
      if isinstance(callback, Callback):
        self._call(callback.on_segment_end, end, end.update)

  def evaluated(self, record: Mapping[str, Any]) -> None:
    """Calls `on_evaluation` of all instances of `Callback`.

    Raises:
      CallbackFailed: a callback has failed.
    """
    for callback in self._callbacks:
      if isinstance(callback, Callback):
        self._call(callback.on_evaluation, dict(record), record['update'])

  def _call(self, call: Callable[[Any], Any], argument: Any, update: int) -> None:
    name = getattr(call, '__qualname__', type(call).__name__)
    try:
      returned = call(argument)
    except Exception as error:
      raise CallbackFailed(f'callback {name}, update {update}: {type(error).__name__}: '
                           f'{error}') from error
    if returned is STOP:
      self.ask_to_stop = True
    elif returned is not None:
      raise CallbackFailed(f'callback {name}, update {update}: returned {returned!r}; it must '
                           'return nothing, or STOP to stop the run')
