"""Trains the members of a sweep, as many at once as there is room for."""

from __future__ import annotations

import collections
import errno
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from podracer_jit.errors import FAILED, FINISHED, INTERRUPTED, STOPPED
from podracer_jit.sweep.folder import Folder
from podracer_jit.sweep.local import last_line, log_of
from podracer_jit.sweep.members import Member
from podracer_jit.sweep.progress import Board, State
from podracer_jit.training.stopping import Stopping
from podracer_jit.workdir import lock

# Exit codes of members; one that has just started cannot save, and SIGTERM ends it.
STOPPED_BY_A_SIGNAL = (STOPPED, INTERRUPTED, -signal.SIGTERM, 128 + signal.SIGTERM)
_EVERY_S = 0.2
_FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or a user's quota of it
_GRACE_S = 25.0  # to end after a second signal


class Jobs(Protocol):
  """Processes of members: `local.Local`, or those of a cluster."""

  running: Sequence[Member]
  has_room: bool

  def begin(self, member: Member) -> None:
    """Starts a member."""

  def ended(self) -> Iterator[tuple[Member, int]]:
    """Yields the members that have ended since the last call, and their exit codes."""

  def stop(self, member: Member | None = None) -> None:
    """Asks a member to save and end; None: all."""

  def close(self, grace_s: float = 0.0) -> None:
    """Ends all processes."""


class Plan(Protocol):
  """Which member comes next."""

  def next(self) -> Member | None:
    """Returns a member to begin; None: none now."""

  def is_done(self) -> bool:
    """Returns whether no member will follow, once those that run have ended."""

  def ended(self, member: Member, is_finished: bool) -> None:
    """Hears that a member has ended."""

  def given_up(self, running: Sequence[Member]) -> Sequence[Member]:
    """Returns members that shall not go on."""


class Listed:
  """The plan of members that are known from the beginning."""

  def __init__(self, members: Sequence[Member]):
    self._waiting = collections.deque(members)

  def next(self) -> Member | None:
    """See `Plan`, as for the other methods."""
    return self._waiting.popleft() if self._waiting else None

  def is_done(self) -> bool:
    """See `Plan`."""
    return not self._waiting

  def ended(self, member: Member, is_finished: bool) -> None:
    """See `Plan`."""

  def given_up(self, running: Sequence[Member]) -> Sequence[Member]:
    """See `Plan`."""
    return ()


def wait_until_saved(out: Path, members: Sequence[Member]) -> None:
  """Waits until members of a command that was killed have saved and ended.

  Args:
    out: the folder of the sweep.
    members: that will be trained.

  Raises:
    ValueError: one does not end.
  """
  deadline = time.monotonic() + _GRACE_S
  for workdir in (workdir for member in members for workdir in member.workdirs(out)):
    while lock.is_held(workdir):
      if time.monotonic() > deadline:
        raise ValueError(f'--out: {workdir} is in use by another process; stop it first')
      time.sleep(_EVERY_S)


def train(folder: Folder, plan: Plan, jobs: Jobs, stop: Stopping, board: Board) -> int:
  """Trains until the plan is done, a signal comes or the disk is full.

  Args:
    folder: receives what became of each member.
    plan: says which members run.
    jobs: runs them.
    stop: says whether a signal has come.
    board: shows them.

  Returns:
    An exit code of `errors`. If a member has failed, it is FAILED.

  Raises:
    OSError: sweep.json or a log cannot be written; all members were stopped.
  """
  given_up: set[str] = set()
  is_ending = is_full = failed = stopped = False
  try:
    while jobs.running or not (is_ending or plan.is_done()):
      for member, code in jobs.ended():
        error = last_line(log_of(folder.path, member))
        if code == FINISHED:
          folder.finished(member)
          board.tell(member, State.FINISHED)
        elif member.name in given_up:
          folder.pruned(member)
          board.tell(member, State.PRUNED)
        elif code in STOPPED_BY_A_SIGNAL:  # ours, or a sink of the user's has stopped it
          stopped = True
          board.tell(member, State.STOPPED)
        else:
          failed = True
          folder.failed(member, error or f'ended with exit code {code}')
          board.tell(member, State.FAILED, folder.errors[member.name])
          is_full = is_full or any(os.strerror(code) in error for code in _FULL)
        plan.ended(member, code == FINISHED)
      if (stop.asked() or is_full) and not is_ending:
        is_ending = True
        jobs.stop()
      for member in () if is_ending else plan.given_up(jobs.running):
        if member.name not in given_up:
          given_up.add(member.name)
          jobs.stop(member)
      while jobs.has_room and not is_ending:
        member = plan.next()
        if member is None:
          break
        jobs.begin(member)
        board.tell(member, State.RUNNING)
      board.show()
      time.sleep(_EVERY_S)
  except KeyboardInterrupt:
    jobs.stop()
    return INTERRUPTED
  except BaseException:
    jobs.stop()
    raise
  finally:
    jobs.close(_GRACE_S)
  if is_full:
    board.say(f'the disk of {folder.path} is full, so all members were stopped and have saved what '
              'they could')
  if failed:
    return FAILED
  return STOPPED if stopped or is_ending else FINISHED
