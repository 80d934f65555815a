"""Workers that fire operations, and two ways to run a graph of them: on threads, or serially."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from podracer_jit.errors import Stuck
from podracer_jit.runtime.channels import Channel, Closed, Versioned


class Endpoint(NamedTuple):
  """A worker's end of a channel, and the number of firings between its uses.

  A reader takes a value at the first of `every` firings and reuses it at the others. A writer puts
  a value at the last of them.
  """

  channel: Channel
  every: int = 1


class Worker(NamedTuple):
  """An operation that one thread fires repeatedly.

  `fire(state, *inputs)` returns `(state, outputs)`. The outputs have a Versioned for each endpoint
  of `writes`, or None to put nothing. Inputs and outputs need not be computed yet, so `fire` must
  not donate inputs. The worker ends after `firings` firings, or once `until(state)` is true. Then
  it closes its channels, so that its neighbours end too.
  """

  name: str
  fire: Callable[..., tuple[Any, Sequence[Versioned | None]]]
  state: Any
  reads: Sequence[Endpoint]
  writes: Sequence[Endpoint]
  firings: int
  until: Callable[[Any], bool] = lambda state: False
  begin: Callable[[], None] = lambda: None  # called first, by the worker's thread

  def slower(self, delay_s: float) -> Worker:
    """Returns a worker that waits so long before each firing."""
    def fire(*args):
      time.sleep(delay_s)
      return self.fire(*args)
    return self._replace(fire=fire)


def _steps(worker: Worker, states: dict[str, Any]) -> Iterator[Callable[[], bool]]:
  """Runs a worker step by step.

  Args:
    worker: the worker to run.
    states: receives the worker's newest state under its name.

  Yields:
    Before each get, wait and put: a function that returns whether this would not block.
  """
  worker.begin()
  state = worker.state
  inputs = [None] * len(worker.reads)
  for k in range(worker.firings):
    for i, endpoint in enumerate(worker.reads):
      if k % endpoint.every == 0:
        yield endpoint.channel.can_get
        inputs[i] = endpoint.channel.get()

    since = time.perf_counter()
    state, outputs = worker.fire(state, *inputs)
    states[worker.name] = state

    try:
      for i, endpoint in enumerate(worker.reads):
        yield endpoint.channel.can_wait_ready
        since = endpoint.channel.wait_ready(since)
        if k % endpoint.every == endpoint.every - 1:
          # Frees the memory of a large value while the worker waits for the next.
          inputs[i] = None
      yield from _hand_over(worker, k, outputs)
    except Closed:
      # Another neighbour may have taken an output of this firing, and waits until it is computed.
      for endpoint in worker.writes:
        endpoint.channel.flush()
      # Waits here for the started computations: `run` notices threads that do not end.
      jax.block_until_ready(outputs)
      raise

    # Frees the memory of the outputs during the next waits.
    outputs = None
    if worker.until(state):
      return


def _hand_over(worker: Worker, k: int, outputs: Sequence[Versioned | None]
               ) -> Iterator[Callable[[], bool]]:
  """Puts the outputs that are due after firing k, then blocks until they are computed.

  Channels that take values before they are computed come first, so that their consumers can start.
  """
  for uncomputed in (True, False):
    for endpoint, item in zip(worker.writes, outputs, strict=True):
      is_due = item is not None and k % endpoint.every == endpoint.every - 1
      if is_due and endpoint.channel.allows_async_dispatch == uncomputed:
        yield endpoint.channel.can_put
        endpoint.channel.put(item)
    for endpoint in worker.writes:
      endpoint.channel.flush()


def _end(worker: Worker) -> None:
  """Closes all channels of a worker."""
  for endpoint in (*worker.reads, *worker.writes):
    endpoint.channel.close()


def _no_worker_can_go_on(names: Iterable[str]) -> RuntimeError:
  return RuntimeError(f'no worker can go on; still running: {", ".join(names)}')


def _wait_for_each_other(threads: Iterable[threading.Thread], workers: Sequence[Worker]) -> bool:
  """Returns whether all of these threads wait for each other, which is a deadlock.

  The function holds the locks of all channels at the same time, so no thread can wake up meanwhile.
  Waits on channels with one end outside of the graph do not count.
  """
  written = {endpoint.channel for worker in workers for endpoint in worker.writes}
  with contextlib.ExitStack() as locks:
    blocked: set[threading.Thread] = set()
    for channel in {endpoint.channel for worker in workers for endpoint in worker.reads} & written:
      blocked |= locks.enter_context(channel.locked())
    return blocked.issuperset(threads)


def run(workers: Sequence[Worker], grace_s: float = 30.0,
        busy: Callable[[], bool] = lambda: False) -> dict[str, Any]:
  """Runs each worker on its own thread until all have ended.

  No other thread may use a channel that joins two of the workers.

  Args:
    workers: the graph.
    grace_s: seconds that threads have to end after a failure.
    busy: whether a thread must not be interrupted now, as by a save; the seconds begin after it.

  Returns:
    The last state of each worker, by name.

  Raises:
    Exception: the first one that a worker raised, after all channels have failed.
    RuntimeError: all workers that have not ended wait for each other.
    Stuck: threads did not end within `grace_s`; raised from the first exception.
  """
  states: dict[str, Any] = {}
  errors: list[BaseException] = []

  def fail(error: BaseException) -> None:
    errors.append(error)
    for worker in workers:
      for endpoint in (*worker.reads, *worker.writes):
        endpoint.channel.fail()

  def work(worker: Worker) -> None:
    try:
      for _ in _steps(worker, states):
        pass
    except Closed:
      pass
    except BaseException as error:  # noqa: BLE001 - the other workers must end after any error
      fail(error)
    _end(worker)
    ended[worker.name].set()

  # Events replace `Thread.join`: in Python 3.10 to 3.12 a thread whose join was interrupted by a
  # signal counts as ended.
  ended = {worker.name: threading.Event() for worker in workers}
  threads = [threading.Thread(target=work, args=(worker,), name=worker.name, daemon=True)
             for worker in workers]

  try:
    for thread in threads:
      thread.start()
    while not errors and not all(event.is_set() for event in ended.values()):
      for event in ended.values():
        # A short wait lets signals reach the main thread.
        event.wait(0.05)
      running = [thread for thread in threads if not ended[thread.name].is_set()]
      if running and _wait_for_each_other(running, workers):
        raise _no_worker_can_go_on(thread.name for thread in running)
  except BaseException as error:  # noqa: BLE001 - a KeyboardInterrupt must end the workers, too
    fail(error)

  # A thread is not started if an earlier one could not be.
  started = [thread for thread in threads if thread.ident is not None]
  deadline = time.monotonic() + grace_s
  try:
    for thread in started:
      while not ended[thread.name].wait(min(0.05, max(0.0, deadline - time.monotonic()))):
        if busy():
          deadline = time.monotonic() + grace_s
        elif time.monotonic() >= deadline:
          break
      else:
        thread.join()
  except KeyboardInterrupt as error:  # nobody wants to wait for the others
    grace_s -= max(0.0, deadline - time.monotonic())
    errors.append(error)

  if errors:
    alive = [thread.name for thread in started if not ended[thread.name].is_set()]
    if alive:
      raise Stuck(f'{", ".join(alive)} did not end within {grace_s:.0f} s') from errors[0]
    raise errors[0]
  return states


def run_serial(workers: Sequence[Worker]) -> dict[str, Any]:
  """Runs the graph on this thread, one step of one worker at a time: the oracle for `run`.

  Args:
    workers: the graph.

  Returns:
    The last state of each worker, by name.

  Raises:
    RuntimeError: no worker can go on, but not all have ended.
  """
  states: dict[str, Any] = {}
  steps = {worker.name: _steps(worker, states) for worker in workers}
  can_go_on = {worker.name: lambda: True for worker in workers}
  by_name = {worker.name: worker for worker in workers}
  while steps:
    name = next((name for name in steps if can_go_on[name]()), None)
    if name is None:
      raise _no_worker_can_go_on(steps)
    try:
      can_go_on[name] = next(steps[name])
    except (StopIteration, Closed):
      _end(by_name[name])
      del steps[name]
  return states
