"""Changes what workers do when they fire, for tests of runs that are slow, fail or are watched."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from podracer_jit.loops import Worker


class Call(NamedTuple):
  """One firing of a wrapped worker.

  Attributes:
    worker: the worker's name.
    number: which of its firings this is; the first is 1.
    fire: what the worker would have called.
  """

  worker: str
  number: int
  fire: Callable[..., tuple[Any, Sequence[Any]]]


def wrap(which: str | Callable[[str], bool], *,
         before: Callable[..., Any] | None = None,
         after: Callable[..., Any] | None = None,
         instead: Callable[..., tuple[Any, Sequence[Any]]] | None = None):
  """Returns a function from workers to workers, some of which fire in another way.

  It is what `tests.runs.run` takes as `tamper`. The callbacks run on the worker's thread, and an
  error of theirs is an error of the worker.

  Args:
    which: the name of a worker; or what several names share before their number, as 'actor' is for
      'actor 0' and 'actor 1'; or a predicate of names. At least one worker must match.
    before: called as `before(call, state, *inputs)`, then the worker fires.
    after: called as `after(call, state, outputs)` with what the worker has made.
    instead: called as `instead(call, state, *inputs)`; returns what the worker gives. It may call
      `call.fire(state, *inputs)`.
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
  """Whether a worker makes results: the writer only stores them."""
  return name != 'writer'
