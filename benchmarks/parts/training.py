"""Training as a part of a benchmark: it runs while it is measured and is paused otherwise."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.parts.segments import Figures, begin
from podracer_jit import loops
from podracer_jit.experiment import build
from podracer_jit.schemes.reports import Report
from podracer_jit.schemes.table import SCHEMES
from podracer_jit.training.meter import Meter
from podracer_jit.types import TrainState


class Training:
  """A segment on its own threads, paused between two firings while other parts are measured."""

  def __init__(self, run: build.Run, state: TrainState, scheme: str, by_python: bool,
               stack: contextlib.ExitStack):
    """Starts the threads, paused.

    Args:
      run: the run of the experiment.
      state: the train state to begin with; it is copied.
      scheme: name of the scheme to train with.
      by_python: whether Python steps the environments.
      stack: ends the threads.
    """
    self._changed = threading.Condition()
    # With a lag, two rollouts may be ready before a pause. The updates that learn from them end too
    # soon after the pause and are not counted.
    self._skipped = 2 * SCHEMES[scheme].lag
    self._open = False
    self._firing = 0
    self._last_outputs: dict[str, jax.Array] = {}  # by worker
    self._enough: Callable[[], bool] = lambda: False
    self._stopping = threading.Event()
    self._reports = []  # (time, steps, updates)
    segment = begin(run, state, scheme, by_python, stack, self._report,
                    self._stopping.is_set)
    self._waits = segment.waits
    self._meter = Meter(run.experiment, {})
    threads = stack.enter_context(ThreadPoolExecutor(1))
    self._future = threads.submit(loops.run, [*map(self._gated, segment.workers[:-1]),
                                              segment.workers[-1]])  # The writer needs no pause.
    self._future.add_done_callback(lambda future: self._set())
    stack.callback(lambda: (self._stopping.set(), self._set(_open=True)))

  def __call__(self, seconds: float) -> Figures:
    """Trains for `seconds`; returns when all workers are paused again."""
    first = len(self._reports) + self._skipped
    # The reporting thread checks this: waking this thread for each report would slow down rounds of
    # a millisecond.
    self._set(_open=True, _enough=lambda: (
        len(self._reports) >= first + 2
        and self._reports[-1][0] - self._reports[first][0] >= seconds))
    self._wait(self._enough)
    start_s, start_steps, start_update = self._reports[first]
    end_s, end_steps, end_update = self._reports[-1]

    # Started computations must end before another part is measured.
    self._set(_open=False)
    self._wait(lambda: not self._firing)
    jax.block_until_ready(self._last_outputs)

    elapsed = end_s - start_s
    return Figures((end_steps - start_steps) / elapsed, elapsed / (end_update - start_update))

  def _report(self, report: Report) -> None:
    report = report._replace(waits=self._waits())
    *_, (record, _) = self._meter.records(report)  # the statistics are part of training
    if record.get('sampled', 1):  # not while a replay is filled
      with self._changed:
        self._reports.append((time.perf_counter(), record['steps'], record['update']))
        if self._enough():
          self._changed.notify_all()

  def _set(self, **fields: Any) -> None:
    with self._changed:
      vars(self).update(fields)
      self._changed.notify_all()

  def _wait(self, ready: Callable[[], bool]) -> None:
    with self._changed:
      self._changed.wait_for(lambda: ready() or self._future.done())
    if self._future.done():
      raise RuntimeError('the training ended during a measurement') from self._future.exception()

  def _gated(self, worker: loops.Worker) -> loops.Worker:
    def fire(state, *inputs):
      with self._changed:
        self._changed.wait_for(lambda: self._open)
        self._firing += 1
      try:
        state, outputs = worker.fire(state, *inputs)
        arrays = [x for x in jax.tree.leaves([item.value for item in outputs])
                  if isinstance(x, jax.Array)]
        # The last array is ready after all others, and it keeps no rollout alive.
        self._last_outputs[worker.name] = arrays[-1]
        return state, outputs
      finally:
        with self._changed:
          self._firing -= 1
          if not self._open:
            self._changed.notify_all()

    return worker._replace(fire=fire)
