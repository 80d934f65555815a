"""Programs that make the updates of one run, or of several at once."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from podracer_jit import loops
from podracer_jit.errors import OtherEpisodes, Refused
from podracer_jit.experiment import build
from podracer_jit.experiment.build import Snapshot
from podracer_jit.runtime.channels import Closed
from podracer_jit.schemes.reports import Report, Waits
from podracer_jit.schemes.wiring import LocalActor, Position
from podracer_jit.training.adapting import Adapting, Leg
from podracer_jit.training.meter import LIVES
from podracer_jit.training.next_segment import NextSegment

# Called with the reports of all runs that have made updates, each with the number of its run.
ReportTo = Callable[[Sequence[tuple[int, Report]]], None]


class Moment(NamedTuple):
  """Where the runs of a program are between two updates; valid until the next one begins."""

  updates: Sequence[int]  # done, of each run
  steps: Sequence[int]  # valid steps that each run has learned from
  sent: Sequence[Sequence[jax.Array]]  # by the only run, see `Position`
  wait_written: Callable[[], None]  # blocks until all reports are written
  snapshot: Callable[[int], Snapshot]  # of the run with a number


class Watcher(Protocol):
  """Interface of the object that a program calls while it makes updates."""

  def asked_to_stop(self) -> bool:
    """Returns whether the runs shall stop."""

  def begin(self) -> None:
    """Called before the first update of a segment, or of its rest, when all is compiled."""

  def is_saving(self) -> bool:
    """Returns whether `after` is saving the runs."""

  def replaying(self, done: int, total: int) -> None:
    """Called while environments are made again.

    Args:
      done: steps that they have made.
      total: steps that they will make.
    """

  def next_pause(self, update: int) -> int:
    """Returns the next update after this one at which `after` must be called."""

  def is_due(self, update: int) -> bool:
    """Returns whether `after` has something to do after this update."""

  def after(self, moment: Moment) -> bool:
    """Called between two updates by the thread that learns; returns whether the segment ends."""


class Program(Protocol):
  """Makes updates of runs, which have numbers from 0, and holds their states."""

  def header(self) -> Mapping[str, Any]:
    """Returns fields for the headers of receipts."""

  def segment_index(self, number: int) -> int:
    """Returns the index of the segment that comes next, or goes on, of a run."""

  def snapshot(self, number: int) -> Snapshot:
    """Returns where a run is, between two segments."""

  def segment(self, report: ReportTo, watcher: Watcher) -> None:
    """Makes a segment, or the rest of one; returns when it has ended.

    Args:
      report: called in order, by one thread; what it raises ends the segment.
      watcher: called meanwhile.
    """

  def close(self) -> None:
    """Closes environments that go on from one segment to the next."""


class GraphProgram:
  """The program of one run: the graph of its scheme, on threads."""

  def __init__(self, run: build.Run, snapshot: Snapshot, adapting: Adapting):
    """Takes over a snapshot.

    Args:
      run: the run.
      snapshot: where it is; the state is donated.
      adapting: decides on which devices it trains.
    """
    self._run = run
    self._adapting = adapting
    self._snapshot: Snapshot | None = snapshot  # None if nothing comes next
    self._leg: Leg | None = None  # with which the next segment begins; None: it is not known
    self._next: NextSegment | None = None  # if it is made early

  def header(self) -> dict[str, Any]:
    """Returns the placement, and the lives of actors that were begun again, if there are any."""
    lives = self._lives()
    self._leg = self._leg or self._adapting.next()
    return {'placement': self._leg.run.described_place} | ({LIVES: lives} if lives else {})

  def _lives(self) -> Mapping[str, int]:
    return self._run.crew.lives() if self._run.crew else {}

  def segment_index(self, number: int) -> int:
    """See `Program`."""
    return self._snapshot.segment

  def snapshot(self, number: int) -> Snapshot:
    """See `Program`."""
    return self._snapshot

  def segment(self, report: ReportTo, watcher: Watcher) -> None:
    """See `Program`.

    Raises:
      Refused: the environments of the run cannot go on where they were.
      Exception: the first failure of a worker.
      loops.Stuck: threads did not end after a failure or a second signal.
    """
    leg = self._leg or self._adapting.next()
    self._leg = None
    run = self._run
    snapshots = [self._snapshot]
    self._snapshot = None  # so that nothing of it stays in memory while the run trains
    index = snapshots[0].segment
    first = snapshots[0].begun
    end = build.segment_end(run.experiment, first)
    rows = run.experiment.batch_rows
    # The update from which on the next segment is made.
    half = (first + end) // 2 if build.compiles_each_segment(run) else end
    at_end: Snapshot | None = None
    # Position at the end of this leg, if the segment goes on with another leg.
    reached: Position | None = None
    # Newest position, unless the segment ended there.
    newest: Position | None = None

    earlier = Waits(0.0, 0.0)  # of the legs of the segment that are over; each has new channels

    def waits() -> Waits:
      return Waits(*map(operator.add, earlier, graph.waits()))

    def write(item: Report) -> None:
      machines = run.crew.metrics() if run.crew else {}
      report([(0, item._replace(since_s=since_s, waits=waits(), machines=machines,
                                lives=self._lives()))])

    def next_pause(update: int) -> int:
      pause = watcher.next_pause(update)
      return min(pause, half) if update < half else pause

    def after(position: Position, wait_written: Callable[[], None]) -> bool:
      nonlocal at_end, reached, newest
      snapshot = None
      self._adapting.told(position.update, position.steps)
      if half <= position.update < end:
        self._prepare(index + 1, position.steps + (end - position.update) * rows)

      def snapshot_of(number: int) -> Snapshot:
        nonlocal snapshot
        snapshot = snapshot or build.snapshot_at(run, position, index, first)
        return snapshot

      with self._adapting.apart():
        is_over = watcher.after(Moment([position.update], [position.steps], position.sent,
                                       wait_written, snapshot_of))
      newest = None if is_over else position
      if position.update == end and not is_over:
        at_end = snapshot_of(0)
      elif position.update == leg_end and not is_over:
        # Its channel forgets what actors got before.
        before = position.before() if run.experiment.scheme.lag else None
        reached = position._replace(before=lambda: before)
      return is_over

    events = build.Events(watcher.asked_to_stop, watcher.replaying, next_pause, after,
                          self._adapting.apart, self._early)
    try:
      if leg.run is not run:
        snapshots = [build.moved(snapshots[0], leg.run)]
      self._run = leg.run
      leg_end = snapshots[0].update + leg.updates
      with build.segment(leg.run, snapshots.pop(), leg.updates, write, events) as graph:
        watcher.begin()
        since_s = time.perf_counter()
        loops.run(graph.workers, busy=watcher.is_saving)
        while reached is not None:
          leg = self._adapting.next()
          self._run = leg.run
          leg_end = reached.update + leg.updates
          earlier = waits()
          graph = graph.go_on(leg.run, reached, leg.updates)
          reached = None
          loops.run(graph.workers, busy=watcher.is_saving)
        if at_end is None and newest is not None:
          # Actors of a cluster did not answer after a signal, so no update began after this one.
          at_end = build.snapshot_at(leg.run, newest, index, first)
    except Closed:  # it was stopped while its environments were made again
      return
    except OtherEpisodes as error:
      raise Refused(f'{error}; --renew_envs goes on with new episodes') from None
    except Exception as error:
      self._adapting.explain(error)
      raise
    self._snapshot = at_end

  def _prepare(self, index: int, steps: int) -> None:
    """Lets the next segment be made, unless that was begun or the run ends before.

    Args:
      index: of the next segment.
      steps: with which the run will have ended this one, at most.
    """
    run = self._adapting.run
    if self._next is None and steps < run.experiment.total_steps:
      self._next = NextSegment(run, index)

  def _early(self, run: build.Run, index: int) -> Sequence[LocalActor]:
    if self._next is None:
      return ()
    made, self._next = self._next, None
    return made.take(run, index)

  def close(self) -> None:
    """Tries no further devices, and closes what was started for the next segment."""
    self._adapting.close()
    if self._next is not None:
      self._next.close()
