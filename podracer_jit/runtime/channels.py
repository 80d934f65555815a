"""Channels between threads: blocking, lag of values, transfer to devices."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

_logger = logging.getLogger(__name__)
PATIENCE_S = 60.0  # seconds of waiting between two warnings that say which side is stuck


class Versioned(NamedTuple):
  """A value with the version of its parameters: those in it, or those that made it."""

  value: Any
  version: int


class Closed(Exception):
  """Raised if the other side of a channel has ended, so that no value can pass."""


class Channel:
  """Base class of channels: values, end, failure, and waiting times.

  Every wait ends: with a value, or once the other side closes or fails the channel.
  """

  # True if a value may be put, and taken, before it is computed.
  allows_async_dispatch = False

  def __init__(self, name: str, transfer: Callable[[Any], Any] = lambda value: value,
               patience_s: float = PATIENCE_S):
    """Creates an empty channel.

    Args:
      name: name of the values, for messages, such as 'rollouts of actor 0'.
      transfer: moves a value to the consumer's devices; called by the producer.
      patience_s: seconds of waiting between two warnings that say which side is stuck.
    """
    self.name = name
    # Seconds that the producer waited, without the computation of its own values.
    self.put_wait_s = 0.0
    # Seconds that the consumer waited.
    self.get_wait_s = 0.0
    self._slots: collections.deque[Versioned] = collections.deque()
    self._transfer = transfer
    self._patience_s = patience_s
    self._changed = threading.Condition()
    self._ended = self._failed = False
    # The condition that each waiting thread waits for. A thread removes itself before it releases
    # the lock that it woke with. So the holder of the lock sees exactly the threads that wait.
    self._waiting: dict[threading.Thread, Callable[[], Any]] = {}

  @property
  def ended(self) -> bool:
    """True once a side has closed or failed the channel."""
    return self._ended

  def get(self) -> Versioned:
    """Takes the next value; blocks while there is none.

    Raises:
      Closed: the producer has ended and every value was taken.
    """
    with self._changed:
      self.get_wait_s += self._wait(lambda: self._slots or self._ended, 'to be made')
      if not self._slots:
        raise Closed(self.name)
      item = self._slots.popleft()
      self._changed.notify_all()
      return item

  def can_get(self) -> bool:
    """Returns whether `get` would return without blocking."""
    return bool(self._slots or self._ended)

  def flush(self) -> None:
    """Blocks until the values that the producer has put are computed; the producer calls it."""

  def wait_ready(self, since: float) -> float:
    """Blocks until the value that the consumer took last is computed; the consumer calls it.

    Args:
      since: time (`time.perf_counter`) from which waiting counts. It may lie before this call,
        because the call of a program may wait for its inputs, too.

    Returns:
      When the value became ready, or `since` if it already was; the difference counts as waiting
      time.
    """
    return since

  def can_wait_ready(self) -> bool:
    """Returns whether `wait_ready` would return without blocking."""
    return True

  def close(self) -> None:
    """Ends the transfer: further puts raise `Closed`, but values in it can still be taken."""
    with self._changed:
      self._ended = True
      self._changed.notify_all()

  def fail(self) -> None:
    """Ends the channel and drops its values: further puts and gets raise `Closed`."""
    with self._changed:
      self._ended = self._failed = True
      self._slots.clear()
      self._changed.notify_all()

  @contextlib.contextmanager
  def locked(self) -> Iterator[set[threading.Thread]]:
    """Holds the channel's lock; yields the threads that wait for another thread to change it."""
    with self._changed:
      yield {thread for thread, ready in self._waiting.items() if not ready()}

  def _moved(self, item: Versioned) -> Versioned:
    """Starts the transfer of the value to the consumer's devices."""
    with jax.profiler.TraceAnnotation(f'transfer: {self.name}'):
      return item._replace(value=self._transfer(item.value))

  def _computed(self, item: Versioned) -> Versioned:
    """Blocks until the value is computed."""
    with jax.profiler.TraceAnnotation(f'make: {self.name}'):
      return jax.block_until_ready(item)

  def _ready(self, item: Versioned) -> Versioned:
    """Transfers the value; blocks until it has arrived."""
    return self._computed(self._moved(self._computed(item)))

  def _append(self, item: Versioned, capacity: int) -> None:
    """Adds an item; blocks while there are `capacity` items."""
    with self._changed:
      self.put_wait_s += self._wait(
          lambda: len(self._slots) < capacity or self._ended, 'to be taken')
      if self._ended:
        raise Closed(self.name)
      self._slots.append(item)
      self._changed.notify_all()

  def _wait(self, ready: Callable[[], Any], event: str) -> float:
    """Waits for a condition, with the lock held on entry and exit; returns the seconds."""
    start = time.perf_counter()
    thread = threading.current_thread()
    self._waiting[thread] = ready
    try:
      with jax.profiler.TraceAnnotation(f'wait: {self.name} {event}'):
        while not self._changed.wait_for(ready, self._patience_s):
          _logger.warning('%s: waiting for %.0f s for the %s %s', thread.name,
                          time.perf_counter() - start, self.name, event)
    finally:
      del self._waiting[thread]
    return time.perf_counter() - start


class DoubleBuffer(Channel):
  """Channel with one slot between one producer and one consumer, with an exact lag.

  `put` blocks while the slot is full, `get` while it is empty. With a lag, the consumer first gets
  lag + 1 primed values. If these are one value, its k-th value (from 0) is min(k, lag) versions
  behind the producer. A lag of 0 is synchronous. With a lag of 1 the consumer works on one value
  while the producer makes the next (Cleanba). Without a lag nothing is primed, and the channel is a
  queue of length one. The sequence of values does not depend on timing.

  A value may be handed over before it is computed. The consumer then starts its own program, which
  waits for the value on the device, and waits itself in `wait_ready`. So no thread has to wake up
  between the two programs. The consumer must not donate the value, since the producer waits for it,
  too.
  """

  allows_async_dispatch = True

  def __init__(self, name: str, firings: int, lag: int | None = None,
               transfer: Callable[[Any], Any] = lambda value: value,
               patience_s: float = PATIENCE_S):
    """Creates an empty channel.

    Args:
      name: see `Channel`.
      firings: number of gets. Later puts are dropped. With a lag of 1 the first dropped value is
        still transferred: `recent` returns it, and the next graph begins with it.
      lag: 0 or 1, or None for a queue without a primed value.
      transfer: see `Channel`.
      patience_s: see `Channel`.

    Raises:
      ValueError: `lag` is not None, 0 or 1.
    """
    if lag not in (None, 0, 1):
      raise ValueError(f'lag must be 0, 1 or None, got {lag}')
    super().__init__(name, transfer, patience_s)
    self._num_primed = 0 if lag is None else lag + 1
    self._puts_left = firings - self._num_primed
    self._primed: collections.deque[Versioned] = collections.deque()
    self._recent: collections.deque[Versioned] = collections.deque(maxlen=self._num_primed)
    # Values are numbered from 1 in the order of puts; primed values are number 0.
    self._put = 0  # number of the newest value that was put
    self._finished = 0  # number of the newest value that is known to be computed
    self._taken = 0  # number of the newest value that was taken
    # The value that was put, and maybe taken, but is not known to be computed.
    self._unfinished: Versioned | None = None
    # Times at which values became ready, by number, until the consumer has waited for them.
    self._finished_at: dict[int, float] = {}

  def prime(self, *items: Versioned) -> None:
    """Transfers lag + 1 items, which the first gets take in order; a single item is repeated."""
    if self._num_primed:
      moved = [self._computed(self._moved(item)) for item in items]
      self._primed.extend(moved * self._num_primed if len(moved) == 1 else moved)
      self._recent.extend(moved)

  def recent(self, version: int) -> Any:
    """Returns the transferred value of one of the last lag + 1 items; the producer calls it."""
    return next(item.value for item in self._recent if item.version == version)

  def put(self, item: Versioned) -> None:
    """Starts the transfer of `item` and hands it over; blocks while the slot is full.

    Raises:
      Closed: the consumer has ended.
    """
    self._puts_left -= 1
    if self._puts_left < 0:
      if self._puts_left == -1 and self._num_primed > 1:
        self._recent.append(self._moved(item))  # the next graph begins with it
      return
    self._put += 1
    self._unfinished = item = self._moved(item)
    self._recent.append(item)
    self._append(item, 1)

  def flush(self) -> None:
    """Blocks until the last value put is computed and transferred; then wakes the consumer.

    If the computation fails, the channel fails too, so that the consumer does not go on with the
    value.
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

  def wait_ready(self, since: float) -> float:
    """Blocks until the producer has finished the value that was taken last.

    Args:
      since: time (`time.perf_counter`) from which waiting counts.

    Returns:
      When the item became ready, or `since` if it already was; the difference counts as waiting
      time.

    Raises:
      Closed: the channel has failed.
    """
    with self._changed:
      self._wait(self.can_wait_ready, 'to be made')
      if self._failed:
        raise Closed(self.name)
      # Time between readiness and this thread's wake-up does not count as waiting.
      until = max(since, self._finished_at.pop(self._taken, since))
      self.get_wait_s += until - since
      return until

  def can_wait_ready(self) -> bool:
    """Returns whether `wait_ready` would return without blocking."""
    return self._taken <= self._finished or self._failed

  def get(self) -> Versioned:
    """Takes the next value; blocks while there is none.

    Raises:
      Closed: the producer has ended and every value was taken.
    """
    with self._changed:
      if self._primed and not self._failed:
        return self._primed.popleft()
      item = super().get()
      self._taken += 1
      return item

  def can_put(self) -> bool:
    """Returns whether `put` would return without blocking."""
    return self._puts_left <= 0 or not self._slots or self._ended

  def can_get(self) -> bool:
    """Returns whether `get` would return without blocking."""
    return bool(self._primed) or super().can_get()


class FifoQueue(Channel):
  """First-in-first-out queue of several producers; the order of values depends on timing."""

  def __init__(self, name: str, capacity: int, transfer: Callable[[Any], Any] = lambda value: value
               ):
    """Creates an empty queue.

    Args:
      name: see `Channel`.
      capacity: most values in the queue.
      transfer: see `Channel`.
    """
    super().__init__(name, transfer)
    self._capacity = capacity

  def put(self, item: Versioned) -> None:
    """Adds `item` once it is computed and transferred; blocks while the queue is full.

    Raises:
      Closed: the consumer, or any producer, has ended.
    """
    self._append(self._ready(item), self._capacity)

  def can_put(self) -> bool:
    """Returns whether `put` would return without blocking."""
    return len(self._slots) < self._capacity or self._ended


class DrainQueue(FifoQueue):
  """Queue of several producers whose consumer takes many values at once."""

  def __init__(self, name: str, capacity: int, wants: Callable[[], tuple[int, int]],
               transfer: Callable[[Any], Any] = lambda value: value):
    """Creates an empty queue.

    Args:
      name: see `Channel`.
      capacity: most values in the queue.
      wants: returns the least and the most values that the next get takes; called before each get.
        With (0, 0) the get takes none, and producers wait once the queue is full.
      transfer: see `Channel`.
    """
    super().__init__(name, capacity, transfer)
    self._wants = wants

  def get(self) -> Versioned:
    """Takes as many values as `wants` says; blocks while the queue has fewer than the least.

    Returns:
      A Versioned whose value is a list of Versioned, with the version of the first (0 if empty).

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
      return Versioned(items, items[0].version if items else 0)

  def can_get(self) -> bool:
    """Returns whether `get` would return without blocking."""
    return len(self._slots) >= self._wants()[0] or self._ended


class LatestValue(Channel):
  """Channel of the newest value: a put overwrites it, a get returns it without removing it."""

  def prime(self, item: Versioned) -> None:
    """Sets the first value."""
    self.put(item)

  def put(self, item: Versioned) -> None:
    """Replaces the value once `item` is computed and transferred; ignored after the end."""
    item = self._ready(item)
    with self._changed:
      if not self._ended:
        self._slots.clear()
        self._slots.append(item)
        self._changed.notify_all()

  def get(self) -> Versioned:
    """Returns the newest value; blocks only before the first put.

    Raises:
      Closed: the producer has ended.
    """
    with self._changed:
      self.get_wait_s += self._wait(lambda: self._slots or self._ended, 'to be made')
      if self._ended:
        raise Closed(self.name)
      return self._slots[-1]

  def can_put(self) -> bool:
    """Returns True: `put` never waits for the consumer."""
    return True
