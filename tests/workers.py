"""Wraps workers, for tests of runs that are slow, fail or are watched."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from podracer_jit.loops import Worker


class Call(NamedTuple):
  """One firing of a wrapped worker.

  Attributes:
    worker: the worker's name.
    number: which of its firings this is; the first is 1.
    fire: the worker's own function.
  """

  worker: str
  number: int
  fire: Callable[..., tuple[Any, Sequence[Any]]]


def wrap(which: str | Callable[[str], bool], *,
         before: Callable[..., Any] | None = None,
         after: Callable[..., Any] | None = None,
         instead: Callable[..., tuple[Any, Sequence[Any]]] | None = None):
  """Returns a function from workers to workers that wraps some of them.

  `tests.runs.run` takes it as `tamper`. The callbacks run on the worker's thread, and their errors
  are errors of the worker.

  Args:
    which: the name of a worker; or the name of several without their number, such as 'actor' for
      'actor 0' and 'actor 1'; or a predicate of names. At least one worker must match.
    before: called as `before(call, state, *inputs)`, then the worker fires.
    after: called as `after(call, state, outputs)` after the worker fired.
    instead: called as `instead(call, state, *inputs)` in place of the worker's own function; it may
      call `call.fire(state, *inputs)`.
  """
  def matches(name):
    return which(name) if callable(which) else name == which or name.startswith(f'{which} ')

  def wrapped(worker):
    count = 0

    def fire(*args):
      nonlocal count
      count += 1
      call = Call(worker.name, count, worker.fire)
      if before:
        before(call, *args)
      state, outputs = instead(call, *args) if instead else worker.fire(*args)
      if after:
        after(call, state, outputs)
      return state, outputs
    return worker._replace(fire=fire)

  def tamper(workers: Sequence[Worker]) -> list[Worker]:
    assert any(matches(worker.name) for worker in workers), which
    return [wrapped(worker) if matches(worker.name) else worker for worker in workers]
  return tamper


def not_writer(name: str) -> bool:
  """Tells whether a worker computes results; the writer only stores them."""
  return name != 'writer'
