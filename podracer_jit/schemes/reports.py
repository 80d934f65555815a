"""Reports of the learner: metrics of updates, and waiting times; and their way to the writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from podracer_jit.loops import Endpoint, Worker
from podracer_jit.runtime.channels import Closed, FifoQueue, Versioned


class Waits(NamedTuple):
  """Seconds spent waiting since the segment began."""

  actor: float  # mean over actors
  learner: float  # mean over learners


class Report(NamedTuple):
  """Report of `count` updates."""

  metrics: Mapping[str, Any]  # arrays [count or more, ...]; the first `count` rows are set
  count: int
  # NAPPO's delays (2007.02622, section 3) of each update: means over its gradient steps, in
  # versions of the policy, which are gradient steps.
  cgd: tuple[float, ...]  # collection-to-gradient delay
  gud: tuple[float, ...]  # gradient-to-update delay
  # The rest is added where a graph runs.
  since_s: float = 0.0  # when environments and programs were ready, by `time.perf_counter`
  waits: Waits = Waits(0.0, 0.0)  # since then
  machines: Mapping[str, float] = {}  # metrics of actors on other machines, by name
  lives: Mapping[str, int] = {}  # lives of the actors that were begun again, by name


class ReportQueue(FifoQueue):
  """Queue of reports to the writer, for which the learner can wait."""

  def __init__(self):
    super().__init__('reports', 1)
    self._unwritten = 0

  def put(self, item: Versioned) -> None:
    """Adds a report; blocks while another one is in the queue."""
    with self._changed:
      self._unwritten += 1
    super().put(item)

  def writer(self, report: Callable[[Report], None]) -> Worker:
    """Returns the worker that calls `report` with each report."""
    def write(state: None, item: Versioned):
      report(item.value)
      with self._changed:
        self._unwritten -= 1
        self._changed.notify_all()
      return state, ()

    return Worker('writer', write, None, [Endpoint(self)], [], 2**62)

  def wait_written(self) -> None:
    """Blocks until all reports are written; the learner calls it.

    Raises:
      Closed: the writer has ended.
    """
    with self._changed:
      self._wait(lambda: not self._unwritten or self._ended, 'to be written')
      if self._unwritten:
        raise Closed(self.name)
