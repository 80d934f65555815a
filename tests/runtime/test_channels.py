"""Hand-offs: exact lags, who waits, how it ends; and the moves of placement.py between devices."""

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
  Arrival,
  Closed,
  DoubleBuffer,
  HandOff,
  Inbox,
  Latest,
  Stamped,
)

HANG_S = 60  # a guard: nothing here takes so long


class Side(threading.Thread):
  """One side of a hand-off on a thread of its own, and what it returned or raised."""

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


def numbers(handoff, count, first=1):
  for version in range(first, first + count):
    handoff.put(Stamped(10 * version, version))


def versions(handoff, count):
  return Side(lambda: [handoff.get().version for _ in range(count)]).end()


# Lags.


@pytest.mark.quick
@pytest.mark.parametrize('lag, lags', [(0, [0, 0, 0, 0, 0, 0]), (1, [0, 1, 1, 1, 1, 1])])
def test_the_kth_value_is_min_k_lag_behind(lag, lags):
  handoff = DoubleBuffer('parameters', 6, lag)
  handoff.prime(Stamped(0, 0))
  learner = Side(lambda: numbers(handoff, 5))  # update k ends once value k was used
  assert [k - seen for k, seen in enumerate(versions(handoff, 6))] == lags
  learner.end()


@pytest.mark.parametrize('lag', [0, 1])
def test_the_primed_value_is_given_lag_plus_1_times(lag):
  handoff = DoubleBuffer('parameters', 5, lag)
  handoff.prime(Stamped('primed', 7))
  for _ in range(lag + 1):
    assert handoff.can_get()
    assert handoff.get() == Stamped('primed', 7)
  assert not handoff.can_get()
  assert Side(handoff.get).blocks()
  handoff.close()


def test_without_a_lag_nothing_is_primed():
  handoff = DoubleBuffer('rollouts', 3)
  handoff.prime(Stamped('primed', 0))
  assert not handoff.can_get()
  numbers(handoff, 1)
  assert handoff.get() == Stamped(10, 1)


@pytest.mark.parametrize('lag', [-1, 2, 0.5, 'one'])
def test_no_other_lag(lag):
  with pytest.raises(ValueError, match=f'lag must be 0, 1 or None, got {lag}'):
    DoubleBuffer('parameters', 3, lag)


@pytest.mark.parametrize('lag', [0, 1, None])
def test_a_value_nobody_will_read_is_not_put_nor_moved(lag):
  moved = []
  handoff = DoubleBuffer('parameters', 4, lag, transfer=lambda value: moved.append(value) or value)
  handoff.prime(Stamped(0, 0))
  producer = Side(lambda: numbers(handoff, 9))  # more than will be read: it does not block
  seen = versions(handoff, 4)
  producer.end()
  primed = [] if lag is None else [0]
  assert moved == primed + [10 * v for v in sorted(set(seen)) if v]
  assert handoff.can_put() and not handoff.can_get()


# Who waits for whom.


def test_values_come_in_the_order_they_were_put():
  handoff = DoubleBuffer('rollouts', 200)
  producer = Side(lambda: numbers(handoff, 200))
  assert versions(handoff, 200) == list(range(1, 201))
  producer.end()


def test_put_blocks_while_the_slot_is_full():
  handoff = DoubleBuffer('rollouts', 3)
  assert handoff.can_put()
  numbers(handoff, 1)
  assert not handoff.can_put()
  producer = Side(lambda: numbers(handoff, 1, first=2))
  assert producer.blocks()
  assert handoff.get().version == 1
  producer.end()
  assert handoff.get().version == 2


def test_get_blocks_while_the_slot_is_empty():
  handoff = DoubleBuffer('rollouts', 3)
  assert not handoff.can_get()
  consumer = Side(handoff.get)
  assert consumer.blocks()
  numbers(handoff, 1)
  assert consumer.end() == Stamped(10, 1)


def test_waits_are_measured_on_the_side_that_waited(monkeypatch):
  def waited(first, then):
    handoff, long = DoubleBuffer('rollouts', 2, patience_s=0.5), threading.Event()
    monkeypatch.setattr(logging, 'warning', lambda *args: long.set())
    side = Side(lambda: first(handoff))
    assert long.wait(HANG_S)
    then(handoff)
    side.end()
    return handoff.put_wait_s, handoff.get_wait_s

  put_wait, get_wait = waited(lambda h: h.get(), lambda h: numbers(h, 1))
  assert get_wait >= 0.5 and get_wait > put_wait
  put_wait, get_wait = waited(lambda h: numbers(h, 2), lambda h: h.get())
  assert put_wait >= 0.5 and put_wait > get_wait


@pytest.mark.parametrize('make', [
    lambda transfer: DoubleBuffer('rollouts', 2, transfer=transfer),
    lambda transfer: Arrival('rollouts', 2, transfer),
    lambda transfer: Inbox('rollouts', 2, lambda: (1, 1), transfer),
    lambda transfer: Latest('rollouts', transfer)])
def test_the_producer_moves_the_value_and_waits_until_it_is_ready(make):
  movers, moved = [], []
  def transfer(value):
    movers.append(threading.current_thread())
    moved.append(jnp.sin(value))
    return moved[-1]

  handoff = make(transfer)
  def produce():
    handoff.put(Stamped(jnp.ones(1 << 20), 0))
    handoff.finish()
    assert moved[0].is_ready()

  producer = Side(produce)
  item = handoff.get()
  handoff.settle(item, time.perf_counter())
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
  handoff, value, long = DoubleBuffer('rollouts', 2, patience_s=0.5), Slow(), threading.Event()
  monkeypatch.setattr(logging, 'warning', lambda *args: long.set())
  handoff.put(Stamped(value, 3))  # does not block
  item = Side(handoff.get).end()
  assert item == Stamped(value, 3) and not handoff.can_settle(item)
  producer, consumer = Side(handoff.finish), Side(lambda: handoff.settle(item, time.perf_counter()))
  assert producer.blocks() and consumer.blocks() and long.wait(HANG_S)
  value.done.set()
  producer.end()
  consumer.end()
  assert handoff.can_settle(item)
  assert handoff.get_wait_s >= 0.5 and handoff.get_wait_s > handoff.put_wait_s


@pytest.mark.parametrize('make', [
    lambda: Arrival('rollouts', 2), lambda: Inbox('rollouts', 2, lambda: (1, 1)),
    lambda: Latest('rollouts')])
def test_what_is_taken_as_it_comes_has_come_when_it_is_computed(make):
  handoff, value = make(), Slow()
  producer = Side(lambda: handoff.put(Stamped(value, 0)))
  assert value.begun.wait(HANG_S)
  assert producer.blocks() and not handoff.can_get()
  value.done.set()
  producer.end()
  assert handoff.can_get() and handoff.can_settle(handoff.get())


def test_the_primed_value_is_settled():
  handoff = DoubleBuffer('parameters', 3, lag=0)
  handoff.prime(Stamped(0, 0))
  item = handoff.get()
  handoff.put(Stamped(Slow(), 1))
  assert handoff.can_settle(item)
  Side(lambda: handoff.settle(item, time.perf_counter())).end()


def test_a_failure_ends_the_wait_for_a_value_and_a_close_does_not():
  """A producer closes after its last value is computed; when it failed that may never be."""
  handoff = DoubleBuffer('rollouts', 2)
  handoff.put(Stamped(Slow(), 0))
  item = handoff.get()
  consumer = Side(lambda: handoff.settle(item, time.perf_counter()))
  handoff.close()
  assert consumer.blocks()
  handoff.fail()
  with pytest.raises(Closed):
    consumer.end()


def test_a_value_that_cannot_be_computed_fails_the_hand_off():
  """Its consumer waits neither for ever nor goes on with it."""
  handoff, value = DoubleBuffer('rollouts', 2), Slow(error=ZeroDivisionError())
  handoff.put(Stamped(value, 0))
  item = handoff.get()
  consumer = Side(lambda: handoff.settle(item, time.perf_counter()))
  assert consumer.blocks()
  value.done.set()
  with pytest.raises(ZeroDivisionError):
    handoff.finish()
  with pytest.raises(Closed):
    consumer.end()


# Without an order.


def test_arrivals_are_taken_in_the_order_they_came_whoever_made_them():
  handoff = Arrival('gradients', 3)
  for producer, version in ((1, 10), (0, 20), (1, 11)):
    Side(lambda p=producer, v=version: handoff.put(Stamped(p, v))).end()
  assert not handoff.can_put()
  late = Side(lambda: numbers(handoff, 1))
  assert late.blocks()
  taken = [Side(handoff.get).end() for _ in range(4)]
  late.end()
  assert taken == [(1, 10), (0, 20), (1, 11), (10, 1)]
  assert Side(handoff.get).blocks()


def test_arrivals_that_were_put_survive_a_close_and_not_a_failure():
  handoff = Arrival('gradients', 2)
  numbers(handoff, 1)
  handoff.close()
  assert handoff.can_get() and handoff.can_put()
  assert versions(handoff, 1) == [1]
  with pytest.raises(Closed, match='gradients'):
    versions(handoff, 1)
  with pytest.raises(Closed):
    numbers(handoff, 1)
  handoff = Arrival('gradients', 2)
  numbers(handoff, 1)
  handoff.fail()
  with pytest.raises(Closed):
    versions(handoff, 1)


def test_an_inbox_gives_all_there_is_and_waits_for_no_more_than_it_must():
  wants = [(0, 9), (0, 9), (1, 9), (0, 1), (0, 0), (0, 9)]
  handoff = Inbox('rollouts', 3, lambda: wants[0])

  def taken():
    item = handoff.get()
    wants.pop(0)
    return [x.version for x in item.value], item.version

  assert taken() == ([], 0)  # none is there, and none is needed
  numbers(handoff, 3)
  assert taken() == ([1, 2, 3], 1)
  getter = Side(taken)
  assert not handoff.can_get() and getter.blocks()
  numbers(handoff, 1, first=4)
  assert getter.end() == ([4], 4)
  numbers(handoff, 3, first=5)
  assert not handoff.can_put()
  putter = Side(lambda: numbers(handoff, 1, first=8))
  assert putter.blocks()
  assert taken() == ([5], 5)  # no more than it wants, and there is room for one more
  putter.end()
  assert taken() == ([], 0)  # though three are there
  assert taken() == ([6, 7, 8], 6)


def test_the_latest_is_given_again_and_again_and_never_waited_for():
  moved = []
  handoff = Latest('parameters', transfer=lambda value: moved.append(value) or value)
  early = Side(handoff.get)
  assert early.blocks() and not handoff.can_get()
  handoff.prime(Stamped(0, 0))
  early.end()
  assert versions(handoff, 2) == [0, 0]
  numbers(handoff, 3)
  assert handoff.can_put() and moved == [0, 10, 20, 30]
  assert versions(handoff, 3) == [3, 3, 3]
  handoff.close()
  numbers(handoff, 1, first=4)  # nobody will read it: that is no error of the producer's
  with pytest.raises(Closed, match='parameters'):
    versions(handoff, 1)


# How it ends.


def test_close_lets_what_was_put_be_taken():
  handoff = DoubleBuffer('rollouts', 5)
  numbers(handoff, 1)
  handoff.close()
  assert handoff.can_get() and handoff.get().version == 1
  with pytest.raises(Closed, match='rollouts'):
    versions(handoff, 1)
  with pytest.raises(Closed, match='rollouts'):
    Side(lambda: numbers(handoff, 1)).end()


def test_close_lets_the_primed_value_be_taken():
  handoff = DoubleBuffer('parameters', 5, lag=1)
  handoff.prime(Stamped(0, 0))
  handoff.close()
  assert versions(handoff, 2) == [0, 0]
  with pytest.raises(Closed):
    versions(handoff, 1)


@pytest.mark.parametrize('lag', [None, 0])
def test_fail_does_not(lag):
  handoff = DoubleBuffer('rollouts', 5, lag)
  handoff.prime(Stamped(0, 0))
  numbers(handoff, 1)
  handoff.fail()
  with pytest.raises(Closed):
    versions(handoff, 1)
  with pytest.raises(Closed):
    Side(lambda: numbers(handoff, 1)).end()


@pytest.mark.parametrize('end', [HandOff.close, HandOff.fail])
@pytest.mark.parametrize('make, side', [
    (lambda: DoubleBuffer('rollouts', 5), 'get'), (lambda: DoubleBuffer('rollouts', 5), 'put'),
    (lambda: Arrival('rollouts', 1), 'get'), (lambda: Arrival('rollouts', 1), 'put'),
    (lambda: Inbox('rollouts', 1, lambda: (1, 1)), 'get'),
    (lambda: Inbox('rollouts', 1, lambda: (1, 1)), 'put'),
    (lambda: Latest('rollouts'), 'get')])
def test_a_blocked_wait_ends_from_another_thread(end, make, side):
  handoff = make()
  if side == 'get':
    waiting = Side(handoff.get)
  else:
    waiting = Side(lambda: numbers(handoff, 2))
  assert waiting.blocks()
  end(handoff)
  with pytest.raises(Closed):
    waiting.end()


@pytest.mark.parametrize('side, what', [
    ('get', 'to be made'), ('put', 'to be taken'), ('settle', 'to be made')])
def test_the_watchdog_names_the_hand_off_and_the_thread_that_waits(side, what, monkeypatch):
  said, enough = [], threading.Event()
  def warning(message, *args):
    said.append(message % args)
    if len(said) == 2:
      enough.set()
  monkeypatch.setattr(logging, 'warning', warning)
  handoff = DoubleBuffer('rollouts of actor 3', 5, patience_s=0.02)
  waiting = Side(dict(
      get=handoff.get, put=lambda: numbers(handoff, 2),
      settle=lambda: (numbers(handoff, 1), handoff.settle(handoff.get(), 0.0)))[side])
  assert enough.wait(HANG_S)  # it goes on saying so
  handoff.fail()
  with pytest.raises(Closed):
    waiting.end()
  assert all(text.startswith(f'{waiting.name}: waiting for ') for text in said)
  assert all(text.endswith(f' s for the rollouts of actor 3 {what}') for text in said)


@pytest.mark.parametrize('side', ['get', 'put', 'settle'])
def test_who_waits_is_known_until_the_wait_can_end(side):
  handoff = DoubleBuffer('rollouts', 3)
  if side != 'get':
    numbers(handoff, 1)
  item = handoff.get() if side == 'settle' else None
  waiting = Side(dict(get=handoff.get, put=lambda: numbers(handoff, 1, first=2),
                      settle=lambda: handoff.settle(item, 0.0))[side])
  assert waiting.blocks()
  with handoff.locked() as blocked:
    assert blocked == {waiting}
    closing = Side(handoff.close)
    assert closing.blocks()
  closing.end()
  handoff.fail()
  with pytest.raises(Closed):
    waiting.end()
  with handoff.locked() as blocked:
    assert blocked == set()


def test_who_may_go_on_but_has_not_woken_does_not_wait():
  handoff = DoubleBuffer('rollouts', 3)
  consumer = Side(handoff.get)
  assert consumer.blocks()
  with handoff.locked() as blocked:
    assert blocked == {consumer}
    numbers(handoff, 1)  # this thread has the lock, so the consumer does not wake yet
    with handoff.locked() as blocked_now:
      assert blocked_now == set()
  assert consumer.end() == Stamped(10, 1)


def test_a_failed_transfer_is_the_producers_error():
  handoff = DoubleBuffer('rollouts', 2, transfer=lambda value: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    numbers(handoff, 1)


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
