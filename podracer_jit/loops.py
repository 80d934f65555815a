"""Workers that fire, and the two ways to run a graph of them: on threads, or one by one."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from podracer_jit.runtime.channels import Closed, HandOff, Stamped


class Port(NamedTuple):
  """One end of a hand-off and its rate: used once in `every` firings.

  A reader uses it at the first of them and keeps what it got, a writer at the last.
  """

  handoff: HandOff
  every: int = 1


class Worker(NamedTuple):
  """An operation fired again and again by one thread.

  `fire(state, *inputs)` returns `(state, outputs)`, for each port a Stamped, or None where nothing
  is to be put; neither these nor the inputs need be computed yet, and inputs must not be donated.
  After `firings` of them, or as soon as `until(state)` holds, the worker ends and closes its
  hand-offs, so that its neighbours end too.
  """

  name: str
  fire: Callable[..., tuple[Any, Sequence[Stamped | None]]]
  state: Any
  reads: Sequence[Port]
  writes: Sequence[Port]
  firings: int
  until: Callable[[Any], bool] = lambda state: False


class Stuck(RuntimeError):
  """Threads that did not end after a failure: only leaving the process can end them."""


def _steps(worker: Worker, states: dict[str, Any]) -> Iterator[Callable[[], bool]]:
  """Runs the worker, leaving its newest state in `states`.

  Before each get, settle and put it yields what tells whether that would block.
  """
  state, inputs = worker.state, [None] * len(worker.reads)
  for k in range(worker.firings):
    for i, port in enumerate(worker.reads):
      if k % port.every == 0:
        yield port.handoff.can_get
        inputs[i] = port.handoff.get()
    since = time.perf_counter()
    state, outputs = worker.fire(state, *inputs)
    states[worker.name] = state
    try:
      for i, port in enumerate(worker.reads):
        yield functools.partial(port.handoff.can_settle, inputs[i])
        since = port.handoff.settle(inputs[i], since)
        if k % port.every == port.every - 1:
          inputs[i] = None  # what is large is not kept while the next is waited for
      yield from _hand_over(worker, k, outputs)
    except Closed:
      # The neighbour that ended may not be the one that took an output of this firing: its reader
      # waits to be told that the output is computed.
      for port in worker.writes:
        port.handoff.finish()
      # What was started is waited for here, where a run knows of threads that do not end.
      jax.block_until_ready(outputs)
      raise
    outputs = None
    if worker.until(state):
      return


def _hand_over(worker: Worker, k: int, outputs: Sequence[Stamped | None]
               ) -> Iterator[Callable[[], bool]]:
  """Puts what is due after firing k: first what need not be computed, and waits until it is."""
  for early in (True, False):
    for port, item in zip(worker.writes, outputs, strict=True):
      if item is not None and port.handoff.early == early and k % port.every == port.every - 1:
        yield port.handoff.can_put
        port.handoff.put(item)
    for port in worker.writes:
      port.handoff.finish()


def _end(worker: Worker) -> None:
  for port in (*worker.reads, *worker.writes):
    port.handoff.close()


def _no_worker_can_go_on(names: Iterable[str]) -> RuntimeError:
  return RuntimeError(f'no worker can go on; still running: {", ".join(names)}')


def _wait_for_each_other(threads: Iterable[threading.Thread], workers: Sequence[Worker]) -> bool:
  """Returns whether each of these threads waits for another of them, so that none will go on.

  It looks at all hand-offs at one moment: while it has the locks of all, no thread can wake and
  change one. A wait on a hand-off with one end outside the graph does not count.
  """
  written = {port.handoff for worker in workers for port in worker.writes}
  with contextlib.ExitStack() as locks:
    blocked: set[threading.Thread] = set()
    for handoff in {port.handoff for worker in workers for port in worker.reads} & written:
      blocked |= locks.enter_context(handoff.locked())
    return blocked.issuperset(threads)


def run(workers: Sequence[Worker], grace_s: float = 30.0) -> dict[str, Any]:
  """Runs each worker on its own thread until all have ended; returns their last states by name.

  A hand-off that a worker reads and a worker writes must be used by nobody else meanwhile.

  Raises:
    Exception: the first one that any worker raised, after closing every hand-off.
    RuntimeError: all workers that have not ended wait for each other.
    Stuck: from that exception, where threads did not end within `grace_s`.
  """
  states: dict[str, Any] = {}
  errors: list[BaseException] = []

  def fail(error: BaseException) -> None:
    errors.append(error)
    for worker in workers:
      for port in (*worker.reads, *worker.writes):
        port.handoff.fail()

  def work(worker: Worker) -> None:
    try:
      for _ in _steps(worker, states):
        pass
    except Closed:
      pass
    except BaseException as error:  # noqa: BLE001 - whatever it is, the others must end
      fail(error)
    _end(worker)
    ended[worker.name].set()

  # These are waited for, and not `Thread.join`: Python 3.10 to 3.12 take a thread for ended whose
  # join was interrupted by a signal.
  ended = {worker.name: threading.Event() for worker in workers}
  threads = [threading.Thread(target=work, args=(worker,), name=worker.name, daemon=True)
             for worker in workers]
  try:
    for thread in threads:
      thread.start()
    while not errors and not all(event.is_set() for event in ended.values()):
      for event in ended.values():
        event.wait(0.05)  # short, so that signals reach the main thread
      running = [thread for thread in threads if not ended[thread.name].is_set()]
      if running and _wait_for_each_other(running, workers):
        raise _no_worker_can_go_on(thread.name for thread in running)
  except BaseException as error:  # noqa: BLE001 - a KeyboardInterrupt ends the workers like any
    fail(error)
  started = [thread for thread in threads if thread.ident is not None]
  deadline = time.monotonic() + grace_s
  for thread in started:
    if ended[thread.name].wait(max(0.0, deadline - time.monotonic())):
      thread.join()
  if errors:
    alive = [thread.name for thread in started if not ended[thread.name].is_set()]
    if alive:
      raise Stuck(f'{", ".join(alive)} did not end within {grace_s:.0f} s') from errors[0]
    raise errors[0]
  return states


def run_serial(workers: Sequence[Worker]) -> dict[str, Any]:
  """Runs the same graph on this thread, one step of one worker at a time: the oracle for `run`.

  Raises:
    RuntimeError: where no worker can go on and not all have ended.
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
