"""Programs that make the updates of one run, or of several at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from podracer_jit import loops
from podracer_jit.experiment import build
from podracer_jit.experiment.build import Snapshot
from podracer_jit.schemes.reports import Report
from podracer_jit.training.meter import LIVES

# Called with the reports of all runs that have made updates, each with the number of its run.
ReportTo = Callable[[Sequence[tuple[int, Report]]], None]


class Program(Protocol):
  """Makes updates of runs, which have numbers from 0, and holds their states."""

  def header(self) -> Mapping[str, Any]:
    """Returns fields for the headers of segments in receipts."""

  def segment(self, updates: int, report: ReportTo, asked_to_stop: Callable[[], bool]) -> None:
    """Makes a segment; returns when it has ended.

    Args:
      updates: most updates of each run. A run that has its total_steps makes no more.
      report: called in order, by one thread; what it raises ends the segment.
      asked_to_stop: called after every update; the segment ends if it returns True.
    """

  def snapshot(self, number: int) -> Snapshot:
    """Returns where a run is, between two segments."""

  def close(self) -> None:
    """Closes environments that go on from one segment to the next."""


class GraphProgram:
  """The program of one run: the graph of its scheme, on threads."""

  def __init__(self, run: build.Run, snapshot: Snapshot):
    """Takes over the snapshot, whose state is donated."""
    self._run = run
    self._snapshot = snapshot

  def header(self) -> dict[str, Any]:
    """Returns the lives of actors that were begun again, if there are any."""
    lives = self._lives()
    return {LIVES: lives} if lives else {}

  def _lives(self) -> Mapping[str, int]:
    return self._run.crew.lives() if self._run.crew else {}

  def segment(self, updates: int, report: ReportTo, asked_to_stop: Callable[[], bool]) -> None:
    """See `Program`.

    Raises:
      Exception: the first failure of a worker.
      loops.Stuck: threads did not end after a failure or a second signal.
    """
    run = self._run
    snapshot = self._snapshot
    first = int(snapshot.state.update)

    def write(item: Report) -> None:
      machines = run.crew.metrics() if run.crew else {}
      report([(0, item._replace(since_s=since_s, waits=segment.waits(), machines=machines,
                                lives=self._lives()))])

    with build.segment(run, snapshot, updates, write, asked_to_stop) as segment:
      since_s = time.perf_counter()
      states = loops.run(segment.workers)
      envs = build.envs_after(run, states, first)
    # A segment that is stopped while it waits for its first rollouts leaves the state as it was.
    state = states['learner'].train if 'learner' in states else snapshot.state
    if not run.experiment.checkpoint.replay:
      # A resumed run begins with an empty replay, so this run does, too, for the same bits.
      state = state._replace(replay=None)
    self._snapshot = Snapshot(state, envs, snapshot.segment + 1)

  def snapshot(self, number: int) -> Snapshot:
    """See `Program`."""
    return self._snapshot

  def close(self) -> None:
    """Does nothing: each segment has environments of its own."""
