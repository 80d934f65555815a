"""Handles the signals that stop a command, so that no finished work is lost."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from podracer_jit.errors import INTERRUPTED
from podracer_jit.runtime.output import complain

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals that are closer together count as one: a terminal and a launcher may both send a signal,
# and the kernel reports a parent's end once for each thread of the parent.
REPEAT_S = 0.5
# The main thread has this long to handle a signal; else it is in a library that is busy.
PATIENCE_S = 2.0
# Name of threads that only prepare what comes later: a process ends without them.
BESIDE = 'beside the training'


def leave() -> None:
  """Prints a line and ends the process at once.

  An exception is not safe here: raised while libraries were imported, it has led to a segmentation
  fault.
  """
  complain('podracer_jit: interrupted while starting; nothing is lost')
  os._exit(INTERRUPTED)


class Stopping:
  """Handler of SIGINT, SIGTERM and SIGHUP.

  Before training, a signal ends the process at once, since nothing can be lost. During training,
  the first signal requests an end, and a second one interrupts. During a save, no signal
  interrupts; the process ends after the save.
  """

  def __init__(self, leave: Callable[[], None] = leave,
               clock: Callable[[], float] = time.monotonic):
    self._leave = leave
    self._clock = clock
    self._last_s = -math.inf  # when the last signal came
    self.signal: int | None = None  # its number
    # Not an Event, which has a lock: a signal may interrupt the handler of another one.
    self._asked = False
    self._training = self._ended = False
    self.is_saving = False

  def asked(self) -> bool:
    """Returns whether a signal has asked for an end."""
    return self._asked

  def begin_training(self) -> None:
    """Lets the first signal from now on request an end, instead of ending the process."""
    self._training = True

  def end(self) -> None:
    """Ignores signals from now on: the command ends, and they must not change its exit code."""
    self._ended = True

  @contextlib.contextmanager
  def saving(self) -> Iterator[None]:
    """Keeps signals from interrupting the block."""
    self.is_saving = True
    try:
      yield
    finally:
      self.is_saving = False

  def handle(self, number: int, frame: FrameType | None) -> None:
    """Handles a signal; Python calls it in the main thread.

    Raises:
      KeyboardInterrupt: an end was asked for before, and nothing is being saved.
    """
    # Another signal may interrupt this one at any line; the order makes it count as the same one.
    asked_before = self._asked
    is_new = self._clock() - self._last_s >= REPEAT_S
    self._last_s = self._clock()
    self.signal = number
    self._asked = True
    # A late signal must not change the exit code of the command.
    if self._ended:
      return
    if not self._training:
      self._leave()
    elif asked_before and is_new and not self.is_saving:
      raise KeyboardInterrupt

  def watch(self, wakeups: socket.socket) -> None:
    """Acts on signals while Python cannot call `handle`: the main thread waits for XLA's compiler.

    Args:
      wakeups: a byte of each signal, see `signal.set_wakeup_fd`, until it is closed.
    """
    is_told = False
    while number := wakeups.recv(1):
      if number[0] not in SIGNALS:  # a user's code may handle further ones
        continue
      if self._was_handled_since(self._clock() - REPEAT_S):
        if self._ended:
          return
        time.sleep(REPEAT_S)
        _drain(wakeups)
        if not is_told:
          self._tell_if_slow(wakeups)
      elif self._ended:
        return
      elif not self._training:
        self._leave()
      elif is_told or self._asked:
        complain('podracer_jit: interrupted while XLA compiles; what was saved stays')
        os._exit(INTERRUPTED)
      else:
        _drain(wakeups)
        complain('podracer_jit: stops when XLA has compiled; a second signal ends it at once')
      is_told = True

  def _was_handled_since(self, since_s: float) -> bool:
    """Returns whether `handle` was called since then; waits a moment, and while the run saves."""
    deadline_s = time.monotonic() + PATIENCE_S
    while self._last_s < since_s:
      if time.monotonic() > deadline_s and not self.is_saving:
        return False
      time.sleep(0.05)
    return True

  def _tell_if_slow(self, wakeups: socket.socket) -> None:
    """Tells that the training stops, if it has not after a moment: a learner may still compile.

    Args:
      wakeups: see `watch`; a further signal ends the wait.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while self._training and not self._ended:
      if time.monotonic() > deadline_s:
        complain('podracer_jit: stops after this update; a second signal ends it at once')
        return
      if select.select([wakeups], [], [], 0.05)[0]:
        return


def _drain(wakeups: socket.socket) -> None:
  """Drops the signals that came meanwhile: they are the same request."""
  with contextlib.suppress(BlockingIOError):
    wakeups.recv(1024, socket.MSG_DONTWAIT)


def numbers() -> list[signal.Signals]:
  """Returns the signals to handle.

  A SIGHUP that was ignored when the process started stays ignored, as nohup requires.
  """
  return [number for number in SIGNALS
          if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextlib.contextmanager
def handled(leave: Callable[[], None] = leave, clock: Callable[[], float] = time.monotonic,
            is_command: bool = True) -> Iterator[Stopping]:
  """Handles the signals during the block; in another thread than the main one, it does nothing.

  Args:
    leave: called by a signal that comes before training.
    clock: returns the time in seconds.
    is_command: the process is ours, so it may be ended at any time, see `Stopping.watch`.
  """
  stopping = Stopping(leave, clock)
  before = {}
  with contextlib.ExitStack() as stack:
    if threading.current_thread() is threading.main_thread():
      if is_command:
        stack.enter_context(_watched(stopping))
      for number in numbers():
        before[number] = signal.signal(number, stopping.handle)
    try:
      yield stopping
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)


_writers: list[socket.socket] = []  # of `_watched`


def _forked() -> None:
  """Separates a forked process, whose signals would wake the thread of this one."""
  if _writers:
    signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def _watched(stopping: Stopping) -> Iterator[None]:
  """Runs `stopping.watch` in a thread during the block."""
  wakeups, writer = socket.socketpair()
  writer.setblocking(False)
  watcher = threading.Thread(target=stopping.watch, args=[wakeups], daemon=True, name=BESIDE)
  watcher.start()
  before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  _writers.append(writer)
  try:
    yield
  finally:
    signal.set_wakeup_fd(before)
    _writers.remove(writer)
    writer.close()
    watcher.join()
    wakeups.close()


def ignore() -> None:
  """Ignores the signals from now on, so that the process ends with its own exit code."""
  for number in SIGNALS:
    signal.signal(number, signal.SIG_IGN)
