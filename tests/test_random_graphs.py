"""Random graphs: `run` ends, gives the same as `run_serial`, and loses no value."""

import functools
import itertools
import math
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import pytest

from podracer_jit.loops import Endpoint, Worker, run, run_serial
from podracer_jit.runtime.channels import (
  Closed,
  DoubleBuffer,
  DrainQueue,
  FifoQueue,
  LatestValue,
  Versioned,
)
from tests.test_loops import must_end

PRIME = 10007
WITHIN_S = 30  # a graph takes some milliseconds unless it hangs
NO_WORKER = 'no worker can go on; still running: '


class Boom(Exception):
  """The error of a worker, its program or its transfer."""


class Value:
  """A number that jax.block_until_ready computes after a nap."""

  def __init__(self, number: int, nap_s: float, error: Exception | None = None):
    self.number = number
    self.computed = False
    self._nap_s = nap_s
    self._error = error

  def block_until_ready(self):
    time.sleep(self._nap_s)
    if self._error:
      raise self._error
    self.computed = True
    return self


class Label(NamedTuple):
  """Identifies an item: `producer` made it in its firing `number`."""

  producer: str
  number: int


class Recorded:
  """Records the puts and gets of a channel by label; a base of each recorded kind of channel.

  Attributes:
    accepted: labels of the items that were put, by producer.
    received: labels of the items that were got, without primed ones.
    drained: whether a get found the channel closed.
    unawaited: labels of the items whose reader never learned that they are computed.
    most: how many items the channel takes; it drops further ones.
  """

  most = math.inf

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.accepted: dict[str, list[Label]] = {}
    self.received: list[Label] = []
    self.drained = False
    self.unawaited: list[Label] = []

  def put(self, item):
    super().put(item)
    if item.value is not None:
      label = item.value[0]
      self.accepted.setdefault(label.producer, []).append(label)

  def get(self):
    try:
      item = super().get()
    except Closed:
      self.drained = True
      raise
    self.newest = item
    items = item.value if isinstance(self, DrainQueue) else [item]
    self.received += [x.value[0] for x in items if x.value[0].number >= 0]
    return item

  def wait_ready(self, since):
    try:
      until = super().wait_ready(since)
    except Closed:
      self.unawaited.append(self.newest.value[0])
      raise
    value = self.newest.value[1] if not isinstance(self.newest.value, list) else None
    assert not isinstance(value, Value) or value.computed, f'{self.name}: ready too soon'
    return until


class RecordedBuffer(Recorded, DoubleBuffer):
  pass


class RecordedFifo(Recorded, FifoQueue):
  pass


class RecordedDrain(Recorded, DrainQueue):
  pass


class RecordedLatest(Recorded, LatestValue):
  pass


@jax.jit
def scramble(number):
  """Returns another number; a program that takes a while and is dispatched asynchronously."""
  return jax.lax.fori_loop(0, 300, lambda _, x: (x * 31 + 7) % PRIME, number)


class Graph(NamedTuple):
  """Workers that may run once, and a record of their numbers.

  Attributes:
    workers: for `run` or `run_serial`.
    channels: all channels between the workers.
    numbers: the numbers that each worker has computed, by name.
    fails: whether a worker, a program or a transfer may raise Boom.
  """

  workers: Sequence[Worker]
  channels: Sequence[Any]
  numbers: dict[str, list[Any]]
  fails: bool


def nap_lengths(rng: random.Random) -> float:
  return rng.choice([0, 0, 0, 0, 1e-4, 2e-3])


def draw(seed: int, ends: bool, as_they_come: bool, naps: random.Random | None = None) -> Graph:
  """Draws a graph; the same seed gives the same graph with any naps.

  Args:
    seed: of the graph.
    ends: whether workers may end before their neighbours, and close channels. Otherwise each
      channel has as many gets as puts.
    as_they_come: whether channels may be of other kinds than DoubleBuffer.
    naps: draws how long programs and firings take; None for no time.
  """
  rng = random.Random(f'{seed} {ends} {as_they_come}')
  names = [f'worker {i}' for i in range(rng.randint(2, 6))]
  firings = {name: rng.choice([4, 8, 12]) for name in names}
  reads: dict[str, list[Endpoint]] = {name: [] for name in names}
  writes: dict[str, list[Endpoint]] = {name: [] for name in names}
  failing = rng.choice(['', '', '', '', 'fire', 'program', 'transfer', 'until'])
  victim = rng.choice(names)
  failing_at = rng.randrange(6)
  numbers: dict[str, list[Any]] = {name: [] for name in names}
  channels = []

  def transfer(name, item):
    if failing == 'transfer' and name == victim and item[0] == Label(name, failing_at):
      raise Boom(name)
    return item

  def connect(producers, consumer, kind):
    label = f'{kind} {len(channels)}: {", ".join(producers)} to {consumer}'
    move = functools.partial(transfer, producers[0])
    gets = math.gcd(firings[consumer], *(firings[name] for name in producers))
    gets //= rng.choice([1, 1, 1, 2])
    if kind == 'latest':
      channel = RecordedLatest(label, move)
    elif kind == 'arrival':
      channel = RecordedFifo(label, rng.randint(1, 3), move)
    elif kind == 'inbox':
      least = rng.randint(0, 2)
      wants = random.Random(seed)
      channel = RecordedDrain(label, rng.randint(2, 4), lambda: (least, wants.randint(2, 4)), move)
    else:
      channel = RecordedBuffer(label, gets, kind, move)
      channel.most = max(0, gets - (0 if kind is None else kind + 1))
    if kind in (0, 1) or kind == 'latest' and rng.random() < 0.8:
      primed = [Versioned((Label(producers[0], -1), rng.randrange(PRIME)), 0)]
      if kind == 1 and primed[0].value[1] % 2:  # as if the run went on
        primed.insert(0, Versioned((Label(producers[0], -2), primed[0].value[1] * 31 % PRIME), -1))
      channel.prime(*primed)
    channels.append(channel)

    def rate(name):
      return rng.randint(1, 4) if ends and rng.random() < 0.2 else firings[name] // gets

    for name in producers:
      writes[name].insert(rng.randint(0, len(writes[name])), Endpoint(channel, rate(name)))
    reads[consumer].insert(rng.randint(0, len(reads[consumer])), Endpoint(channel, rate(consumer)))

  for _ in range(rng.randint(len(names) - 1, len(names) + 3)):
    first, second = sorted(rng.choices(range(len(names)), k=2))
    kinds = [None, 0, 1]
    if first < second and rng.random() < 0.7:
      weights = [6, 1, 1]
    else:  # a channel backwards, or from a worker to itself, is nearly always primed
      first, second = second, first
      # A worker that sends to itself with a lag of 1 fills the slot, and then waits for it.
      weights = [0.3, 5, 5 if first > second else 0.3]
    if as_they_come:
      kinds += ['latest', 'arrival', 'inbox']
      weights += [4, 4, 4]
    (kind,) = rng.choices(kinds, weights)
    producers = [names[first]]
    if kind in ('arrival', 'inbox'):
      producers += rng.sample([x for x in names if x != names[first]], rng.randint(0, 1))
    connect(producers, names[second], kind)

  def number(value):
    if isinstance(value, list):  # from a DrainQueue
      return sum(number(item.value) for item in value)
    return value[1].number if isinstance(value[1], Value) else value[1]

  def worker(name, salt, on_device, last, closes_at):
    def fire(k, *inputs):
      time.sleep(nap_lengths(naps) if naps else 0)
      if name == victim and k == failing_at and failing == 'fire':
        raise Boom(name)
      if k == closes_at:
        rng_of_worker.choice([*reads[name], *writes[name]]).channel.close()
      total = salt + k
      for i, item in enumerate(inputs):
        total = (total * 31 + (i + 3) * number(item.value)) % PRIME
      total = scramble(total) if on_device else total
      numbers[name].append(total)
      broken = Boom(name) if failing == 'program' and name == victim and k == failing_at else None
      value = total if on_device and not broken else Value(
          total, nap_lengths(naps) if naps else 0, broken)
      return k + 1, [Versioned((Label(name, k), value), k)] * len(writes[name])

    def until(k):
      if failing == 'until' and name == victim and k == failing_at:
        raise Boom(name)
      return k >= last

    rng_of_worker = random.Random(salt)
    return Worker(name, fire, 0, reads[name], writes[name], firings[name], until)

  workers = []
  for name in names:
    ends_early = ends and rng.random() < 0.4
    closes = ends and rng.random() < 0.15 and (reads[name] or writes[name])
    last = rng.randint(1, 6) if ends_early else firings[name]
    closes_at = rng.randint(0, 5) if closes else None
    workers.append(worker(name, rng.randrange(PRIME), rng.random() < 0.3, last, closes_at))
  rng.shuffle(workers)
  return Graph(workers, channels, numbers, bool(failing))


def outcome(runner, graph: Graph) -> tuple[str, dict[str, list[int]]]:
  """Returns how a run has ended, and the numbers that its workers have computed."""
  try:
    states = must_end(lambda: runner(graph.workers), WITHIN_S)
    counts = {name: len(numbers) for name, numbers in graph.numbers.items() if numbers}
    # A worker that a failure or an end interrupts in a firing has the state before it.
    assert all(counts[name] - k in (0, 1) for name, k in states.items())
    how = 'ended'
  except Boom as error:
    assert graph.fails
    how = f'raised: {error}'
  except RuntimeError as error:
    assert str(error).startswith(NO_WORKER), error
    how = str(error)
  return how, {name: [int(x) for x in numbers] for name, numbers in graph.numbers.items()}


def is_prefix(prefix: Sequence[Any], full: Sequence[Any]) -> bool:
  return list(full[:len(prefix)]) == list(prefix)


def check_channels(graph: Graph, how: str) -> None:
  """Checks that channels kept the order, and lost and repeated no item.

  A reader takes all items before it finds a channel closed. A reader that waits until an item is
  computed does not wait for a producer that has ended.
  """
  failed = how != 'ended'
  for channel in graph.channels:
    if how.startswith(NO_WORKER):
      running = how.removeprefix(NO_WORKER).split(', ')
      assert all(label.producer in running for label in channel.unawaited), channel.name
    for producer in {label.producer for label in channel.received}:
      received = [label for label in channel.received if label.producer == producer]
      accepted = channel.accepted.get(producer, [])
      if isinstance(channel, LatestValue):  # it overwrites some items and gives some repeatedly
        assert received == sorted(received, key=accepted.index), channel.name
      else:
        assert is_prefix(received, accepted), channel.name
    # The reader of a DrainQueue leaves at once, and a LatestValue loses overwritten items.
    keeps_all = isinstance(channel, DoubleBuffer) or type(channel) is RecordedFifo
    if channel.drained and keeps_all and not failed:
      accepted = sum(map(len, channel.accepted.values()))
      assert len(channel.received) == min(accepted, channel.most), channel.name


# The first ranges are in `scripts/test`.
SEEDS = pytest.mark.parametrize('seeds', [
    range(30), *(pytest.param(range(first, first + 30), marks=pytest.mark.full)
                 for first in (30, 60, 90, 120))], ids=str)


@SEEDS
def test_graphs_in_lockstep_give_the_same_on_threads_as_on_one(seeds):
  for seed in seeds:
    _check_lockstep(seed)


def _check_lockstep(seed):
  how, numbers = outcome(run_serial, draw(seed, ends=False, as_they_come=False))
  graph = draw(seed, ends=False, as_they_come=False, naps=random.Random(seed))
  how_on_threads, numbers_on_threads = outcome(run, graph)
  check_channels(graph, how_on_threads)
  # On threads a transfer may fail before the put waits for room, which is a deadlock on one thread.
  fails_before_deadlock = how.startswith(NO_WORKER) and how_on_threads.startswith('raised')
  assert fails_before_deadlock or how_on_threads == how, seed
  if how_on_threads.startswith('raised'):  # when the other workers end depends on timing
    assert all(is_prefix(*sorted([numbers[name], numbers_on_threads[name]], key=len))
               for name in numbers), seed
  else:
    assert numbers_on_threads == numbers, seed


@SEEDS
def test_graphs_with_early_ends_differ_only_in_how_far_they_come(seeds):
  """Timing decides whether a put comes before an end, and is accepted."""
  for seed in seeds:
    _, numbers = outcome(run_serial, draw(seed, ends=True, as_they_come=False))
    graph = draw(seed, ends=True, as_they_come=False, naps=random.Random(seed))
    how, numbers_on_threads = outcome(run, graph)
    check_channels(graph, how)
    assert all(is_prefix(*sorted([numbers[name], numbers_on_threads[name]], key=len))
               for name in numbers), seed


@SEEDS
def test_graphs_of_all_kinds_of_channels_end_and_lose_nothing(seeds):
  for seed, (runner, naps) in itertools.product(
      seeds, ((run_serial, lambda seed: None), (run, random.Random))):
    graph = draw(seed, ends=seed % 2 == 0, as_they_come=True, naps=naps(seed))
    how, _ = outcome(runner, graph)
    check_channels(graph, how)


def test_the_graphs_end_in_different_ways():
  """Most graphs end normally, some fail and some deadlock."""
  for ends in (False, True):
    hows = [outcome(run_serial, draw(seed, ends, as_they_come=False))[0] for seed in range(150)]
    kinds = [how.split()[0].rstrip(':') for how in hows]
    assert kinds.count('ended') >= 60
    assert kinds.count('raised') >= 20 and kinds.count('no') >= 20
