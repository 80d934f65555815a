"""Channels: exact lags, who waits, how it ends; and the moves of placement.py between devices."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_array_equal

from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import (
  Channel,
  Closed,
  DoubleBuffer,
  DrainQueue,
  FifoQueue,
  LatestValue,
  Versioned,
)

HANG_S = 60  # a guard: nothing here takes so long


class Side(threading.Thread):
  """One side of a channel on a thread of its own, and what it returned or raised."""

  def __init__(self, function):
    super().__init__(daemon=True)
    self._function, self.result, self.error = function, None, None
    self.start()

  def run(self):
    try:
      self.result = self._function()
    except BaseException as error:  # noqa: BLE001 - for the test to see
      self.error = error

  def end(self):
    self.join(HANG_S)
    assert not self.is_alive(), 'hangs'
    if self.error is not None:
      raise self.error
    return self.result

  def blocks(self):
    self.join(0.1)
    return self.is_alive()


def numbers(channel, count, first=1):
  for version in range(first, first + count):
    channel.put(Versioned(10 * version, version))


def versions(channel, count):
  return Side(lambda: [channel.get().version for _ in range(count)]).end()


# Lags.


@pytest.mark.quick
@pytest.mark.parametrize('lag, lags', [(0, [0, 0, 0, 0, 0, 0]), (1, [0, 1, 1, 1, 1, 1])])
def test_the_kth_value_is_min_k_lag_behind(lag, lags):
  channel = DoubleBuffer('parameters', 6, lag)
  channel.prime(Versioned(0, 0))
  learner = Side(lambda: numbers(channel, 5))  # update k ends once value k was used
  assert [k - seen for k, seen in enumerate(versions(channel, 6))] == lags
  learner.end()


@pytest.mark.parametrize('lag', [0, 1])
def test_the_primed_value_is_given_lag_plus_1_times(lag):
  channel = DoubleBuffer('parameters', 5, lag)
  channel.prime(Versioned('primed', 7))
  for _ in range(lag + 1):
    assert channel.can_get()
    assert channel.get() == Versioned('primed', 7)
  assert not channel.can_get()
  assert Side(channel.get).blocks()
  channel.close()


def test_without_a_lag_nothing_is_primed():
  channel = DoubleBuffer('rollouts', 3)
  channel.prime(Versioned('primed', 0))
  assert not channel.can_get()
  numbers(channel, 1)
  assert channel.get() == Versioned(10, 1)


@pytest.mark.parametrize('lag', [-1, 2, 0.5, 'one'])
def test_no_other_lag(lag):
  with pytest.raises(ValueError, match=f'lag must be 0, 1 or None, got {lag}'):
    DoubleBuffer('parameters', 3, lag)


@pytest.mark.parametrize('lag', [0, 1, None])
def test_a_value_nobody_will_read_is_not_put_nor_moved(lag):
  moved = []
  channel = DoubleBuffer('parameters', 4, lag, transfer=lambda value: moved.append(value) or value)
  channel.prime(Versioned(0, 0))
  producer = Side(lambda: numbers(channel, 9))  # more than will be read: it does not block
  seen = versions(channel, 4)
  producer.end()
  primed = [] if lag is None else [0]
  assert moved == primed + [10 * v for v in sorted(set(seen)) if v]
  assert channel.can_put() and not channel.can_get()


# Who waits for whom.


def test_values_come_in_the_order_they_were_put():
  channel = DoubleBuffer('rollouts', 200)
  producer = Side(lambda: numbers(channel, 200))
  assert versions(channel, 200) == list(range(1, 201))
  producer.end()


def test_put_blocks_while_the_slot_is_full():
  channel = DoubleBuffer('rollouts', 3)
  assert channel.can_put()
  numbers(channel, 1)
  assert not channel.can_put()
  producer = Side(lambda: numbers(channel, 1, first=2))
  assert producer.blocks()
  assert channel.get().version == 1
  producer.end()
  assert channel.get().version == 2


def test_get_blocks_while_the_slot_is_empty():
  channel = DoubleBuffer('rollouts', 3)
  assert not channel.can_get()
  consumer = Side(channel.get)
  assert consumer.blocks()
  numbers(channel, 1)
  assert consumer.end() == Versioned(10, 1)


def test_waits_are_measured_on_the_side_that_waited(monkeypatch):
  def waited(first, then):
    channel, long = DoubleBuffer('rollouts', 2, patience_s=0.5), threading.Event()
    monkeypatch.setattr(logging, 'warning', lambda *args: long.set())
    side = Side(lambda: first(channel))
    assert long.wait(HANG_S)
    then(channel)
    side.end()
    return channel.put_wait_s, channel.get_wait_s

  put_wait, get_wait = waited(lambda h: h.get(), lambda h: numbers(h, 1))
  assert get_wait >= 0.5 and get_wait > put_wait
  put_wait, get_wait = waited(lambda h: numbers(h, 2), lambda h: h.get())
  assert put_wait >= 0.5 and put_wait > get_wait


@pytest.mark.parametrize('make', [
    lambda transfer: DoubleBuffer('rollouts', 2, transfer=transfer),
    lambda transfer: FifoQueue('rollouts', 2, transfer),
    lambda transfer: DrainQueue('rollouts', 2, lambda: (1, 1), transfer),
    lambda transfer: LatestValue('rollouts', transfer)])
def test_the_producer_moves_the_value_and_waits_until_it_is_ready(make):
  movers, moved = [], []
  def transfer(value):
    movers.append(threading.current_thread())
    moved.append(jnp.sin(value))
    return moved[-1]

  channel = make(transfer)
  def produce():
    channel.put(Versioned(jnp.ones(1 << 20), 0))
    channel.flush()
    assert moved[0].is_ready()

  producer = Side(produce)
  item = channel.get()
  channel.wait_ready(item, time.perf_counter())
  assert moved[0].is_ready()
  producer.end()
  assert movers == [producer]


class Slow:
  """A value that is computed once it is told to be, as jax.block_until_ready sees it."""

  def __init__(self, error=None):
    self.begun, self.done, self._error = threading.Event(), threading.Event(), error

  def block_until_ready(self):
    self.begun.set()
    assert self.done.wait(HANG_S)
    if self._error:
      raise self._error
    return self


def test_a_value_is_handed_over_before_it_is_computed(monkeypatch):
  channel, value, long = DoubleBuffer('rollouts', 2, patience_s=0.5), Slow(), threading.Event()
  monkeypatch.setattr(logging, 'warning', lambda *args: long.set())
  channel.put(Versioned(value, 3))  # does not block
  item = Side(channel.get).end()
  assert item == Versioned(value, 3) and not channel.can_wait_ready(item)
  producer = Side(channel.flush)
  consumer = Side(lambda: channel.wait_ready(item, time.perf_counter()))
  assert producer.blocks() and consumer.blocks() and long.wait(HANG_S)
  value.done.set()
  producer.end()
  consumer.end()
  assert channel.can_wait_ready(item)
  assert channel.get_wait_s >= 0.5 and channel.get_wait_s > channel.put_wait_s


@pytest.mark.parametrize('make', [
    lambda: FifoQueue('rollouts', 2), lambda: DrainQueue('rollouts', 2, lambda: (1, 1)),
    lambda: LatestValue('rollouts')])
def test_what_is_taken_as_it_comes_has_come_when_it_is_computed(make):
  channel, value = make(), Slow()
  producer = Side(lambda: channel.put(Versioned(value, 0)))
  assert value.begun.wait(HANG_S)
  assert producer.blocks() and not channel.can_get()
  value.done.set()
  producer.end()
  assert channel.can_get() and channel.can_wait_ready(channel.get())


def test_the_primed_value_is_ready():
  channel = DoubleBuffer('parameters', 3, lag=0)
  channel.prime(Versioned(0, 0))
  item = channel.get()
  channel.put(Versioned(Slow(), 1))
  assert channel.can_wait_ready(item)
  Side(lambda: channel.wait_ready(item, time.perf_counter())).end()


def test_a_failure_ends_the_wait_for_a_value_and_a_close_does_not():
  """A producer closes after its last value is computed; when it failed that may never be."""
  channel = DoubleBuffer('rollouts', 2)
  channel.put(Versioned(Slow(), 0))
  item = channel.get()
  consumer = Side(lambda: channel.wait_ready(item, time.perf_counter()))
  channel.close()
  assert consumer.blocks()
  channel.fail()
  with pytest.raises(Closed):
    consumer.end()


def test_a_value_that_cannot_be_computed_fails_the_hand_off():
  """Its consumer waits neither for ever nor goes on with it."""
  channel, value = DoubleBuffer('rollouts', 2), Slow(error=ZeroDivisionError())
  channel.put(Versioned(value, 0))
  item = channel.get()
  consumer = Side(lambda: channel.wait_ready(item, time.perf_counter()))
  assert consumer.blocks()
  value.done.set()
  with pytest.raises(ZeroDivisionError):
    channel.flush()
  with pytest.raises(Closed):
    consumer.end()


# Without an order.


def test_arrivals_are_taken_in_the_order_they_came_whoever_made_them():
  channel = FifoQueue('gradients', 3)
  for producer, version in ((1, 10), (0, 20), (1, 11)):
    Side(lambda p=producer, v=version: channel.put(Versioned(p, v))).end()
  assert not channel.can_put()
  late = Side(lambda: numbers(channel, 1))
  assert late.blocks()
  taken = [Side(channel.get).end() for _ in range(4)]
  late.end()
  assert taken == [(1, 10), (0, 20), (1, 11), (10, 1)]
  assert Side(channel.get).blocks()


def test_arrivals_that_were_put_survive_a_close_and_not_a_failure():
  channel = FifoQueue('gradients', 2)
  numbers(channel, 1)
  channel.close()
  assert channel.can_get() and channel.can_put()
  assert versions(channel, 1) == [1]
  with pytest.raises(Closed, match='gradients'):
    versions(channel, 1)
  with pytest.raises(Closed):
    numbers(channel, 1)
  channel = FifoQueue('gradients', 2)
  numbers(channel, 1)
  channel.fail()
  with pytest.raises(Closed):
    versions(channel, 1)


def test_an_inbox_gives_all_there_is_and_waits_for_no_more_than_it_must():
  wants = [(0, 9), (0, 9), (1, 9), (0, 1), (0, 0), (0, 9)]
  channel = DrainQueue('rollouts', 3, lambda: wants[0])

  def taken():
    item = channel.get()
    wants.pop(0)
    return [x.version for x in item.value], item.version

  assert taken() == ([], 0)  # none is there, and none is needed
  numbers(channel, 3)
  assert taken() == ([1, 2, 3], 1)
  getter = Side(taken)
  assert not channel.can_get() and getter.blocks()
  numbers(channel, 1, first=4)
  assert getter.end() == ([4], 4)
  numbers(channel, 3, first=5)
  assert not channel.can_put()
  putter = Side(lambda: numbers(channel, 1, first=8))
  assert putter.blocks()
  assert taken() == ([5], 5)  # no more than it wants, and there is room for one more
  putter.end()
  assert taken() == ([], 0)  # though three are there
  assert taken() == ([6, 7, 8], 6)


def test_the_latest_is_given_again_and_again_and_never_waited_for():
  moved = []
  channel = LatestValue('parameters', transfer=lambda value: moved.append(value) or value)
  waiting = Side(channel.get)
  assert waiting.blocks() and not channel.can_get()
  channel.prime(Versioned(0, 0))
  waiting.end()
  assert versions(channel, 2) == [0, 0]
  numbers(channel, 3)
  assert channel.can_put() and moved == [0, 10, 20, 30]
  assert versions(channel, 3) == [3, 3, 3]
  channel.close()
  numbers(channel, 1, first=4)  # nobody will read it: that is no error of the producer's
  with pytest.raises(Closed, match='parameters'):
    versions(channel, 1)


# How it ends.


def test_close_lets_what_was_put_be_taken():
  channel = DoubleBuffer('rollouts', 5)
  numbers(channel, 1)
  channel.close()
  assert channel.can_get() and channel.get().version == 1
  with pytest.raises(Closed, match='rollouts'):
    versions(channel, 1)
  with pytest.raises(Closed, match='rollouts'):
    Side(lambda: numbers(channel, 1)).end()


def test_close_lets_the_primed_value_be_taken():
  channel = DoubleBuffer('parameters', 5, lag=1)
  channel.prime(Versioned(0, 0))
  channel.close()
  assert versions(channel, 2) == [0, 0]
  with pytest.raises(Closed):
    versions(channel, 1)


@pytest.mark.parametrize('lag', [None, 0])
def test_fail_does_not(lag):
  channel = DoubleBuffer('rollouts', 5, lag)
  channel.prime(Versioned(0, 0))
  numbers(channel, 1)
  channel.fail()
  with pytest.raises(Closed):
    versions(channel, 1)
  with pytest.raises(Closed):
    Side(lambda: numbers(channel, 1)).end()


@pytest.mark.parametrize('end', [Channel.close, Channel.fail])
@pytest.mark.parametrize('make, side', [
    (lambda: DoubleBuffer('rollouts', 5), 'get'), (lambda: DoubleBuffer('rollouts', 5), 'put'),
    (lambda: FifoQueue('rollouts', 1), 'get'), (lambda: FifoQueue('rollouts', 1), 'put'),
    (lambda: DrainQueue('rollouts', 1, lambda: (1, 1)), 'get'),
    (lambda: DrainQueue('rollouts', 1, lambda: (1, 1)), 'put'),
    (lambda: LatestValue('rollouts'), 'get')])
def test_a_blocked_wait_ends_from_another_thread(end, make, side):
  channel = make()
  if side == 'get':
    waiting = Side(channel.get)
  else:
    waiting = Side(lambda: numbers(channel, 2))
  assert waiting.blocks()
  end(channel)
  with pytest.raises(Closed):
    waiting.end()


@pytest.mark.parametrize('side, what', [
    ('get', 'to be made'), ('put', 'to be taken'), ('wait_ready', 'to be made')])
def test_the_watchdog_names_the_hand_off_and_the_thread_that_waits(side, what, monkeypatch):
  said, enough = [], threading.Event()
  def warning(message, *args):
    said.append(message % args)
    if len(said) == 2:
      enough.set()
  monkeypatch.setattr(logging, 'warning', warning)
  channel = DoubleBuffer('rollouts of actor 3', 5, patience_s=0.02)
  waiting = Side(dict(
      get=channel.get, put=lambda: numbers(channel, 2),
      wait_ready=lambda: (numbers(channel, 1), channel.wait_ready(channel.get(), 0.0)))[side])
  assert enough.wait(HANG_S)  # it goes on saying so
  channel.fail()
  with pytest.raises(Closed):
    waiting.end()
  assert all(text.startswith(f'{waiting.name}: waiting for ') for text in said)
  assert all(text.endswith(f' s for the rollouts of actor 3 {what}') for text in said)


@pytest.mark.parametrize('side', ['get', 'put', 'wait_ready'])
def test_who_waits_is_known_until_the_wait_can_end(side):
  channel = DoubleBuffer('rollouts', 3)
  if side != 'get':
    numbers(channel, 1)
  item = channel.get() if side == 'wait_ready' else None
  waiting = Side(dict(get=channel.get, put=lambda: numbers(channel, 1, first=2),
                      wait_ready=lambda: channel.wait_ready(item, 0.0))[side])
  assert waiting.blocks()
  with channel.locked() as blocked:
    assert blocked == {waiting}
    closing = Side(channel.close)
    assert closing.blocks()
  closing.end()
  channel.fail()
  with pytest.raises(Closed):
    waiting.end()
  with channel.locked() as blocked:
    assert blocked == set()


def test_who_may_go_on_but_has_not_woken_does_not_wait():
  channel = DoubleBuffer('rollouts', 3)
  consumer = Side(channel.get)
  assert consumer.blocks()
  with channel.locked() as blocked:
    assert blocked == {consumer}
    numbers(channel, 1)  # this thread has the lock, so the consumer does not wake yet
    with channel.locked() as blocked_now:
      assert blocked_now == set()
  assert consumer.end() == Versioned(10, 1)


def test_a_failed_transfer_is_the_producers_error():
  channel = DoubleBuffer('rollouts', 2, transfer=lambda value: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    numbers(channel, 1)


# Placement: what transfers do.


def mesh(devices):
  return jax.sharding.Mesh(np.array(devices), ('learner',))


@pytest.mark.parametrize('learners', [1, 2])
def test_parameters_survive_the_donation_of_the_learners_own(learners):
  devices = jax.devices()
  for actor in devices[:3]:  # one of the learner's devices, and one that is none
    params = placement.replicate({'w': jnp.arange(1000.0)}, mesh(devices[:learners]))
    mine = placement.put_params(params, actor)
    jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda x: x * 0 - 1, p),
                                  donate_argnums=0)(params))
    assert params['w'].is_deleted()  # it was donated
    assert mine['w'].devices() == {actor}
    assert_array_equal(mine['w'], np.arange(1000.0))


def test_a_replica_survives_the_donation_of_another():
  """The checkpoint's state may be replicated twice."""
  state = jnp.arange(1000.0)
  one, other = (placement.replicate(state, mesh(jax.devices()[:1])) for _ in range(2))
  jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(one))
  assert one.is_deleted()
  assert_array_equal(other, np.arange(1000.0))
  assert_array_equal(state, np.arange(1000.0))


def batch(num_envs, steps=3):
  rng = np.random.default_rng(num_envs)
  return {'obs': rng.integers(0, 255, (steps + 1, num_envs, 2, 5)).astype(np.uint8),
          'reward': rng.normal(size=(steps, num_envs)).astype(np.float32),
          'count': np.arange(steps * num_envs, dtype=np.int32).reshape(steps, num_envs)}


def cut(tree, first, width):
  return jax.tree.map(lambda x: x[:, first:first + width], tree)


@pytest.mark.parametrize('actors', [1, 2, 3])
@pytest.mark.parametrize('learners', [1, 2, 3, 4])
@pytest.mark.parametrize('shards_per_actor', [1, 2])
def test_gathered_rollouts_are_plain_concatenation(actors, learners, shards_per_actor):
  """36 environments to 2 or 4 learners: cuts fall inside the shards of 3 or 1 actors, too."""
  num_envs, devices = 36, jax.devices()
  whole, to = batch(num_envs), mesh(devices[-learners:])
  width = num_envs // actors // shards_per_actor
  slices = []
  for a in range(actors):
    first = a * width * shards_per_actor
    shards = [jax.device_put(cut(whole, first + s * width, width), devices[a])
              for s in range(shards_per_actor)]
    slices.append(placement.scatter(shards, first, num_envs, to))
  for made in slices:  # rows go straight to where they are used
    for device, parts in zip(devices[-learners:], made.parts, strict=True):
      assert all(x.devices() == {device} for x in jax.tree.leaves(parts))
  gathered = placement.gather(slices, to)
  jax.tree.map(assert_array_equal, gathered, whole)
  for x in jax.tree.leaves(gathered):
    assert x.sharding == NamedSharding(to, PartitionSpec(None, 'learner'))
    assert {s.data.shape[1] for s in x.addressable_shards} == {num_envs // learners}


def test_a_batch_that_one_actor_made_for_one_learner_is_what_is_learned_from():
  to = mesh(jax.devices()[1:2])
  whole = jax.device_put(batch(6), placement.by_env(to))
  gathered = placement.gather([placement.scatter([whole], 0, 6, to)], to)
  assert jax.tree.all(jax.tree.map(lambda x, y: x is y, gathered, whole))


def test_shards_of_unequal_width_are_cut_where_the_devices_meet():
  """5 + 1 + 2 + 4 environments on 3 devices: 4, 1 of it; the next three; the rest."""
  widths, devices = [5, 1, 2, 4], jax.devices()
  whole, to = batch(12), mesh(devices[:3])
  firsts = np.cumsum([0, *widths])
  slices = [placement.scatter([cut(whole, first, width)], first, 12, to)
            for first, width in zip(firsts, widths, strict=False)]
  assert [[len(parts) for parts in s.parts] for s in slices] == [
      [1, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]]
  jax.tree.map(assert_array_equal, placement.gather(slices, to), whole)
