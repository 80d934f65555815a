"""Signals that stop a command: what they do depends on what would be lost."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from podracer_jit.run import exit_codes
from podracer_jit.run.output import complain

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals that come closer together are one: a terminal and a launcher may both send it, and the
# kernel tells of a parent's end once for each thread that the parent had.
ONE_S = 0.5


def leave() -> None:
  """Ends the process at once, with a line.

  An exception would not do: raised while libraries are imported, it was seen to end in a
  segmentation fault.
  """
  complain('podracer_jit: interrupted before there was anything to save')
  os._exit(exit_codes.INTERRUPTED)


class Stopping:
  """Handles SIGINT, SIGTERM and SIGHUP in the course of a command.

  Before training they end the process, since nothing can be lost. While it trains, the first one
  asks for an end, and a second one interrupts. While something is being saved, none interrupts: the
  end comes when all is saved.
  """

  def __init__(self, leave: Callable[[], None] = leave,
               clock: Callable[[], float] = time.monotonic):
    self._leave = leave
    self._clock = clock
    self._last_s = -math.inf  # when the last signal came
    self._asked = threading.Event()
    self._training = self._saving = self._ended = False

  def asked(self) -> bool:
    """Returns whether a signal has asked for an end."""
    return self._asked.is_set()

  def begin_training(self) -> None:
    """Makes the first signal from now on ask for an end, in place of ending the process."""
    self._training = True

  def end(self) -> None:
    """Makes signals do nothing from now on, as the command ends and its exit code says how."""
    self._ended = True

  @contextlib.contextmanager
  def saving(self) -> Iterator[None]:
    """Keeps signals from interrupting the block."""
    self._saving = True
    try:
      yield
    finally:
      self._saving = False

  def handle(self, number: int, frame: FrameType | None) -> None:
    """Handles a signal; Python calls it in the main thread.

    Raises:
      KeyboardInterrupt: an end was asked for before, and nothing is being saved.
    """
    is_new = self._clock() - self._last_s >= ONE_S
    asked_before = self._asked.is_set()
    self._last_s = self._clock()
    self._asked.set()
    if self._ended:
      return
    if not self._training:
      self._leave()
    elif asked_before and is_new and not self._saving:
      raise KeyboardInterrupt


def numbers() -> list[signal.Signals]:
  """Returns the signals to handle: a SIGHUP that was ignored from the start stays ignored.

  That is what nohup asks for.
  """
  return [number for number in SIGNALS
          if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextlib.contextmanager
def handled(leave: Callable[[], None] = leave, clock: Callable[[], float] = time.monotonic
            ) -> Iterator[Stopping]:
  """Handles the signals for the time of the block; outside of the main thread it cannot.

  Args:
    leave: called by a signal that comes before training.
    clock: in seconds.
  """
  stopping = Stopping(leave, clock)
  before = {}
  if threading.current_thread() is threading.main_thread():
    for number in numbers():
      before[number] = signal.signal(number, stopping.handle)
  try:
    yield stopping
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def ignore() -> None:
  """Ignores the signals from now on: the process is about to end, with its exit code."""
  for number in SIGNALS:
    signal.signal(number, signal.SIG_IGN)
