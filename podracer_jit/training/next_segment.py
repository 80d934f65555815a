"""The environments of the next segment, started while the run trains in this one.

A program that steps simulators contains their addresses. Where other addresses cannot be put in
their place (`runtime.stored_programs`), as on GPUs, each segment compiles programs of its own. A
thread does that beside the training, which would wait for it otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

from podracer_jit import options
from podracer_jit.experiment import build
from podracer_jit.schemes.wiring import LocalActor
from podracer_jit.training import stopping

_logger = logging.getLogger(__name__)


class NextSegment:
  """The actors of a segment that has not begun."""

  def __init__(self, run: build.Run, index: int):
    """Starts the thread.

    Args:
      run: the run that the segment belongs to.
      index: of the segment.
    """
    self._of = run, index
    self._actors: Sequence[LocalActor] = ()
    self._envs = contextlib.ExitStack()
    self._lock = threading.Lock()  # of the following two
    self._is_made = False
    self._is_given_up = False
    # A process whose interpreter ends waits for it, since XLA would crash; see `cli.main.run`.
    self._thread = threading.Thread(target=self._make, name=stopping.BESIDE, daemon=False)
    self._thread.start()

  def take(self, run: build.Run, index: int) -> Sequence[LocalActor]:
    """Waits for the actors; the caller closes their environments. See `Events.early`.

    Args:
      run: the run that the segment belongs to.
      index: of the segment.

    Returns:
      The actors; () if they could not be made, or are of another segment, or of a run on other
      devices.
    """
    if self._of[0] is not run or self._of[1] != index:
      self.close()
      return ()
    try:
      self._thread.join()
    except BaseException:  # a signal
      self.close()
      raise
    self._envs.pop_all()
    return self._actors

  def close(self) -> None:
    """Closes the environments, or lets the thread do so when it has made them."""
    with self._lock:
      self._is_given_up = True
      if self._is_made:
        self._envs.close()

  def _make(self) -> None:
    try:
      self._actors = build.start_early(*self._of, self._envs)
    except Exception as error:  # noqa: BLE001 - the segment begins without this, and fails if need be
      _logger.warning('env.task: the environments of the next segment cannot be started beside the '
                      'training: %s: %s', type(error).__name__, options.shorten(str(error)))
      self._envs.close()
    with self._lock:
      self._is_made = True
      if self._is_given_up:
        self._envs.close()
