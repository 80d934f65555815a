"""Hand-offs: who waits for whom between two threads, how old a value may be, and its transfer."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from absl import logging


class Stamped(NamedTuple):
  """A value with the version of the parameters that it is, or that it was made with."""

  value: Any
  version: int


class Closed(Exception):
  """The other side has ended; nothing more will come, or be taken."""


class HandOff:
  """What all hand-offs share: an end, a failure, waits that are counted and never for ever."""

  early = False  # whether a value may be put, and given, before it is computed

  def __init__(self, name: str, transfer: Callable[[Any], Any] = lambda value: value,
               patience_s: float = 60.0):
    """Of nothing yet.

    Args:
      name: what is handed over, for people: 'rollouts of actor 0'.
      transfer: moves a value to where the consumer wants it; run by the producer.
      patience_s: after so long a wait, and each time again, say which side is stuck.
    """
    self.name = name
    self.put_wait_s = 0.0  # waited by the producer, readiness of its own value not counted
    self.get_wait_s = 0.0  # waited by the consumer
    self._slots: collections.deque[Stamped] = collections.deque()
    self._transfer = transfer
    self._patience_s = patience_s
    self._changed = threading.Condition()
    self._ended = self._failed = False
    # What each waiting thread waits for. A thread takes itself out before it gives up the lock that
    # it woke with, so who has the lock sees every thread that waits, and what it waits for.
    self._waiting: dict[threading.Thread, Callable[[], Any]] = {}

  def get(self) -> Stamped:
    """The next value; blocks while there is none.

    Raises:
      Closed: the producer has ended and everything it put was taken.
    """
    with self._changed:
      self.get_wait_s += self._wait(lambda: self._slots or self._ended, 'to be made')
      if not self._slots:
        raise Closed(self.name)
      item = self._slots.popleft()
      self._changed.notify_all()
      return item

  def can_get(self) -> bool:
    """Whether `get` would not block."""
    return bool(self._slots or self._ended)

  def finish(self) -> None:
    """Called by the producer after its puts: waits until what it put is computed."""

  def settle(self, item: Stamped, since: float) -> float:
    """Called by the consumer with what it got: waits until that is computed.

    It began to wait at `since`; returns until when it had to. A call of a program may wait, too.
    """
    return since

  def can_settle(self, item: Stamped) -> bool:
    """Whether `settle` would not block."""
    return True

  def close(self) -> None:
    """Ends the hand-off: puts are refused, what was put may still be taken."""
    with self._changed:
      self._ended = True
      self._changed.notify_all()

  def fail(self) -> None:
    """Ends the hand-off at once: nothing can be put or taken any more."""
    with self._changed:
      self._ended = self._failed = True
      self._slots.clear()
      self._changed.notify_all()

  @contextlib.contextmanager
  def locked(self) -> Iterator[set[threading.Thread]]:
    """Lets nobody change the hand-off; gives the threads that wait for another to change it."""
    with self._changed:
      yield {thread for thread, ready in self._waiting.items() if not ready()}

  def _moved(self, item: Stamped) -> Stamped:
    with jax.profiler.TraceAnnotation(f'hand-off: {self.name}'):
      return item._replace(value=self._transfer(item.value))

  def _computed(self, item: Stamped) -> Stamped:
    with jax.profiler.TraceAnnotation(f'make: {self.name}'):
      return jax.block_until_ready(item)

  def _ready(self, item: Stamped) -> Stamped:
    """Computed and transferred: for hand-offs that give what is there, whatever is under way."""
    return self._computed(self._moved(self._computed(item)))

  def _append(self, item: Stamped, capacity: int) -> None:
    """Adds an item once there are fewer than `capacity`."""
    with self._changed:
      self.put_wait_s += self._wait(
          lambda: len(self._slots) < capacity or self._ended, 'to be taken')
      if self._ended:
        raise Closed(self.name)
      self._slots.append(item)
      self._changed.notify_all()

  def _wait(self, ready: Callable[[], Any], what: str) -> float:
    start = time.perf_counter()
    thread = threading.current_thread()
    self._waiting[thread] = ready
    try:
      with jax.profiler.TraceAnnotation(f'wait: {self.name} {what}'):
        while not self._changed.wait_for(ready, self._patience_s):
          logging.warning('%s: waiting for %.0f s for the %s %s', thread.name,
                          time.perf_counter() - start, self.name, what)
    finally:
      del self._waiting[thread]
    return time.perf_counter() - start


class DoubleBuffer(HandOff):
  """One slot between one producer and one consumer, with an exact lag.

  `put` blocks while the slot is full, `get` while it is empty. With a lag of 0 or 1 the consumer is
  first given the primed value lag + 1 times, so that its k-th value (from 0) is min(k, lag) behind
  what the producer will have made by then: 0 is synchronous; with 1 the consumer works on the front
  value while the producer makes the back one (Cleanba). Without a lag nothing is primed: a queue of
  one. Blocking, first in first out: what flows through does not depend on timing.

  So a value may be handed over before it is computed: the consumer has its own program wait for it
  on the device, and only then waits itself, in `settle`. No thread has to wake between the two. It
  must not donate the value, which the producer waits for, too.
  """

  early = True

  def __init__(self, name: str, firings: int, lag: int | None = None,
               transfer: Callable[[Any], Any] = lambda value: value, patience_s: float = 60.0):
    """A hand-off for `firings` gets in all: a value beyond that is not put.

    Args:
      firings: how many times the consumer will get.
      lag: see the class.
      name, transfer, patience_s: see HandOff.

    Raises:
      ValueError: a lag other than None, 0 or 1.
    """
    if lag not in (None, 0, 1):
      raise ValueError(f'lag must be 0, 1 or None, got {lag}')
    super().__init__(name, transfer, patience_s)
    self._primed_gets = 0 if lag is None else lag + 1
    self._puts_left = firings - self._primed_gets
    self._primed: Stamped | None = None
    # Values are numbered from 1 as they are put; the primed value is 0, and computed. These are
    # the newest that was put, that is known to be computed, and that was taken.
    self._put = self._finished = self._taken = 0
    self._unfinished: Stamped | None = None  # put, perhaps taken, not known to be computed
    self._finished_at: dict[int, float] = {}  # when, by number, of those that are not settled

  def prime(self, item: Stamped) -> None:
    """Transfers and sets the value that the first gets receive."""
    if self._primed_gets:
      self._primed = self._computed(self._moved(item))

  def put(self, item: Stamped) -> None:
    """Hands `item` over, its transfer begun; blocks while the slot is full.

    Raises:
      Closed: the consumer has ended.
    """
    if self._puts_left <= 0:
      return
    self._puts_left -= 1
    self._put += 1
    self._unfinished = item = self._moved(item)
    self._append(item, 1)

  def finish(self) -> None:
    """Waits until what was put is computed and transferred, and says so.

    If that fails, so does the hand-off: the consumer must not wait for it, nor go on with it.
    """
    if self._unfinished is not None:
      try:
        self._computed(self._unfinished)
      except BaseException:
        self.fail()
        raise
      with self._changed:
        self._finished = self._put
        self._finished_at[self._finished] = time.perf_counter()
        self._unfinished = None
        self._changed.notify_all()

  def settle(self, item: Stamped, since: float) -> float:
    """Waits until the producer has finished `item`, the newest that was taken.

    Raises:
      Closed: the hand-off has failed.
    """
    with self._changed:
      self._wait(lambda: self.can_settle(item), 'to be made')
      if self._failed:
        raise Closed(self.name)
      until = max(since, self._finished_at.pop(self._taken, since))
      self.get_wait_s += until - since
      return until

  def can_settle(self, item: Stamped) -> bool:
    """Whether `settle` would not block."""
    return self._taken <= self._finished or self._failed

  def get(self) -> Stamped:
    """The next value; blocks while there is none. Raises Closed as HandOff's."""
    with self._changed:
      if self._primed_gets and not self._failed:
        self._primed_gets -= 1
        item = self._primed
        if not self._primed_gets:
          self._primed = None  # free its memory once the last one is used
        return item
      item = super().get()
      self._taken += 1
      return item

  def can_put(self) -> bool:
    """Whether `put` would not block."""
    return self._puts_left <= 0 or not self._slots or self._ended

  def can_get(self) -> bool:
    """Whether `get` would not block."""
    return bool(self._primed_gets) or super().can_get()


class Arrival(HandOff):
  """A queue of several producers, first come first served; so what flows depends on timing."""

  def __init__(self, name: str, capacity: int, transfer: Callable[[Any], Any] = lambda value: value,
               patience_s: float = 60.0):
    """Of at most `capacity` values; see HandOff for the rest."""
    super().__init__(name, transfer, patience_s)
    self._capacity = capacity

  def put(self, item: Stamped) -> None:
    """Hands `item` over, computed; blocks while full. Raises Closed once any other side ended."""
    self._append(self._ready(item), self._capacity)

  def can_put(self) -> bool:
    """Whether `put` would not block."""
    return len(self._slots) < self._capacity or self._ended


class Inbox(Arrival):
  """A queue of several producers whose reader takes all there is, and waits only if it has to."""

  def __init__(self, name: str, capacity: int, wants: Callable[[], tuple[int, int]],
               transfer: Callable[[Any], Any] = lambda value: value, patience_s: float = 60.0):
    """Of at most `capacity` values; see HandOff for the rest.

    wants: asked by the reader before each get, how many values it must have and how many it takes
      at most. With (0, 0) it takes none, and producers wait once the queue is full.
    """
    super().__init__(name, capacity, transfer, patience_s)
    self._wants = wants

  def get(self) -> Stamped:
    """A list of what is there, as Stamped, with the version of the oldest (0 of none).

    Raises:
      Closed: the consumer, or a producer, has ended.
    """
    least, most = self._wants()
    with self._changed:
      self.get_wait_s += self._wait(lambda: len(self._slots) >= least or self._ended, 'to be made')
      if self._ended:
        raise Closed(self.name)
      items = [self._slots.popleft() for _ in range(min(most, len(self._slots)))]
      self._changed.notify_all()
      return Stamped(items, items[0].version if items else 0)

  def can_get(self) -> bool:
    """Whether `get` would not block."""
    return len(self._slots) >= self._wants()[0] or self._ended


class Latest(HandOff):
  """The newest value alone: a put overwrites, a get takes it again and again and never waits."""

  def prime(self, item: Stamped) -> None:
    """Sets the first value."""
    self.put(item)

  def put(self, item: Stamped) -> None:
    """Replaces the value, once this one is ready and transferred; never blocks."""
    item = self._ready(item)
    with self._changed:
      if not self._ended:
        self._slots.clear()
        self._slots.append(item)
        self._changed.notify_all()

  def get(self) -> Stamped:
    """The newest value; blocks only before the first. Raises Closed once the producer ended."""
    with self._changed:
      self.get_wait_s += self._wait(lambda: self._slots or self._ended, 'to be made')
      if self._ended:
        raise Closed(self.name)
      return self._slots[-1]

  def can_put(self) -> bool:
    """It never blocks."""
    return True
