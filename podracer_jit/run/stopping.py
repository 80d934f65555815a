"""Signals that stop a command: what they do depends on what would be lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
  """What SIGINT, SIGTERM and SIGHUP do in the course of a command.

  Before training they interrupt at once, since nothing can be lost. While it trains, the first one
  asks for an end, and a second one interrupts. While something is being saved, none interrupts: the
  end comes when all is saved.
  """

  def __init__(self):
    self._asked = threading.Event()
    self._training = self._saving = False

  def asked(self) -> bool:
    """Returns whether a signal has asked for an end."""
    return self._asked.is_set()

  def begin_training(self) -> None:
    """From now on the first signal does not interrupt."""
    self._training = True

  @contextlib.contextmanager
  def saving(self) -> Iterator[None]:
    """Keeps signals from interrupting the block."""
    self._saving = True
    try:
      yield
    finally:
      self._saving = False

  def handle(self, number: int, frame: object) -> None:
    """Handles a signal; Python calls it in the main thread.

    Raises:
      KeyboardInterrupt: unless an end will be made that saves.
    """
    asked_before = self._asked.is_set()
    self._asked.set()
    if not self._saving and (asked_before or not self._training):
      raise KeyboardInterrupt


@contextlib.contextmanager
def handled() -> Iterator[Stopping]:
  """Handles the signals for the time of the block; outside of the main thread it cannot.

  A SIGHUP that was ignored from the start, as nohup has it, stays ignored.
  """
  stopping = Stopping()
  before = {}
  if threading.current_thread() is threading.main_thread():
    for number in SIGNALS:
      if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
        before[number] = signal.signal(number, stopping.handle)
  try:
    yield stopping
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
