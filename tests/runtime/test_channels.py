"""Channels: exact lags, waits and ends; and the transfers of placement.py between devices."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_array_equal

from podracer_jit.runtime import channels, placement
from podracer_jit.runtime.channels import (
  Channel,
  Closed,
  DoubleBuffer,
  DrainQueue,
  FifoQueue,
  LatestValue,
  Versioned,
)

HANG_S = 60  # no step of a test takes so long unless it hangs


class Side(threading.Thread):
  """Runs one side of a channel on its own thread; keeps its result or its error."""

  def __init__(self, function):
    super().__init__(daemon=True)
    self._function = function
    self.result = None
    self.error = None
    self.start()

  def run(self):
    try:
      self.result = self._function()
    except BaseException as error:  # noqa: BLE001 - `end` raises it
      self.error = error

  def end(self):
    """Waits for the function's end; returns its result or raises its error."""
    self.join(HANG_S)
    assert not self.is_alive(), 'hangs'
    if self.error is not None:
      raise self.error
    return self.result

  def blocks(self):
    """Tells whether the function is still running after a moment."""
    self.join(0.1)
    return self.is_alive()


def put_numbers(channel, count, first=1):
  """Puts values 10 * version with the versions `first`, `first` + 1, ..."""
  for version in range(first, first + count):
    channel.put(Versioned(10 * version, version))


def get_versions(channel, count):
  """Gets `count` values on another thread; returns their versions."""
  return Side(lambda: [channel.get().version for _ in range(count)]).end()


# Lags.


@pytest.mark.quick
@pytest.mark.parametrize('lag, lags', [(0, [0, 0, 0, 0, 0, 0]), (1, [0, 1, 1, 1, 1, 1])])
def test_the_kth_value_is_min_k_lag_behind(lag, lags):
  channel = DoubleBuffer('parameters', 6, lag)
  channel.prime(Versioned(0, 0))
  learner = Side(lambda: put_numbers(channel, 5))  # update k ends after value k was used
  assert [k - version for k, version in enumerate(get_versions(channel, 6))] == lags
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


def test_two_primed_values_are_given_in_order():
  """They are those of the last two updates of a run that goes on, so the lag is 1 at once."""
  moved = []
  channel = DoubleBuffer('parameters', 6, 1, transfer=lambda value: moved.append(value) or -value)
  channel.prime(Versioned(40, 4), Versioned(50, 5))
  learner = Side(lambda: put_numbers(channel, 4, first=6))
  assert Side(lambda: [channel.get() for _ in range(6)]).end() == [
      Versioned(-10 * version, version) for version in range(4, 10)]
  learner.end()
  assert moved == [10 * version for version in range(4, 10)]


@pytest.mark.parametrize('lag', [0, 1])
def test_the_producer_finds_the_last_lag_plus_1_values(lag):
  channel = DoubleBuffer('parameters', 9, lag, transfer=lambda value: -value)
  channel.prime(Versioned(0, 0))
  assert channel.recent(0) == 0
  for _ in range(lag):
    channel.get()
  for version in range(1, 6):
    channel.get()
    channel.put(Versioned(10 * version, version))
    for recent in range(max(0, version - lag), version + 1):
      assert channel.recent(recent) == -10 * recent
    for missing in (version - lag - 1, version + 1):
      with pytest.raises(StopIteration):
        channel.recent(missing)


def test_primed_values_are_recent_too():
  channel = DoubleBuffer('parameters', 9, 1)
  channel.prime(Versioned('before', 4), Versioned('newest', 5))
  assert (channel.recent(4), channel.recent(5)) == ('before', 'newest')


def test_without_a_lag_nothing_is_primed():
  channel = DoubleBuffer('rollouts', 3)
  channel.prime(Versioned('primed', 0))
  assert not channel.can_get()
  put_numbers(channel, 1)
  assert channel.get() == Versioned(10, 1)


@pytest.mark.parametrize('lag', [-1, 2, 0.5, 'one'])
def test_other_lags_are_refused(lag):
  with pytest.raises(ValueError, match=f'lag must be 0, 1 or None, got {lag}'):
    DoubleBuffer('parameters', 3, lag)


@pytest.mark.parametrize('lag', [0, 1, None])
def test_a_value_that_nobody_will_read_is_not_transferred(lag):
  moved = []
  channel = DoubleBuffer('parameters', 4, lag, transfer=lambda value: moved.append(value) or value)
  channel.prime(Versioned(0, 0))
  producer = Side(lambda: put_numbers(channel, 9))  # more than will be read, but it does not block
  received = get_versions(channel, 4)
  producer.end()
  primed = [] if lag is None else [0]
  read = [10 * v for v in sorted(set(received)) if v]
  # With a lag, the next graph begins with the first of the others.
  assert moved == primed + read + ([read[-1] + 10] if lag == 1 else [])
  assert channel.can_put() and not channel.can_get()


# Waits.


def test_values_are_received_in_the_order_of_put():
  channel = DoubleBuffer('rollouts', 200)
  producer = Side(lambda: put_numbers(channel, 200))
  assert get_versions(channel, 200) == list(range(1, 201))
  producer.end()


def test_put_blocks_while_the_slot_is_full():
  channel = DoubleBuffer('rollouts', 3)
  assert channel.can_put()
  put_numbers(channel, 1)
  assert not channel.can_put()
  producer = Side(lambda: put_numbers(channel, 1, first=2))
  assert producer.blocks()
  assert channel.get().version == 1
  producer.end()
  assert channel.get().version == 2


def test_get_blocks_while_the_slot_is_empty():
  channel = DoubleBuffer('rollouts', 3)
  assert not channel.can_get()
  consumer = Side(channel.get)
  assert consumer.blocks()
  put_numbers(channel, 1)
  assert consumer.end() == Versioned(10, 1)


def test_waits_are_measured_on_the_side_that_waited(monkeypatch):
  def waited(first, second):
    channel = DoubleBuffer('rollouts', 2, patience_s=0.5)
    warned = threading.Event()
    monkeypatch.setattr(channels._logger, 'warning', lambda *args: warned.set())
    side = Side(lambda: first(channel))
    assert warned.wait(HANG_S)
    second(channel)
    side.end()
    return channel.put_wait_s, channel.get_wait_s

  put_wait, get_wait = waited(lambda c: c.get(), lambda c: put_numbers(c, 1))
  assert get_wait >= 0.5 and get_wait > put_wait
  put_wait, get_wait = waited(lambda c: put_numbers(c, 2), lambda c: c.get())
  assert put_wait >= 0.5 and put_wait > get_wait


@pytest.mark.parametrize('make', [
    lambda transfer: DoubleBuffer('rollouts', 2, transfer=transfer),
    lambda transfer: FifoQueue('rollouts', 2, transfer),
    lambda transfer: DrainQueue('rollouts', 2, lambda: (1, 1), transfer),
    lambda transfer: LatestValue('rollouts', transfer)])
def test_the_producer_moves_the_value_and_waits_until_it_is_ready(make):
  movers = []
  moved = []
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
  channel.get()
  channel.wait_ready(time.perf_counter())
  assert moved[0].is_ready()
  producer.end()
  assert movers == [producer]


class Slow:
  """A value for jax.block_until_ready, ready when the test sets `done`."""

  def __init__(self, error=None):
    self.begun = threading.Event()
    self.done = threading.Event()
    self._error = error

  def block_until_ready(self):
    self.begun.set()
    assert self.done.wait(HANG_S)
    if self._error:
      raise self._error
    return self


def test_a_value_is_handed_over_before_it_is_computed(monkeypatch):
  channel = DoubleBuffer('rollouts', 2, patience_s=0.5)
  value = Slow()
  warned = threading.Event()
  monkeypatch.setattr(channels._logger, 'warning', lambda *args: warned.set())
  channel.put(Versioned(value, 3))  # does not block
  item = Side(channel.get).end()
  assert item == Versioned(value, 3) and not channel.can_wait_ready()
  producer = Side(channel.flush)
  consumer = Side(lambda: channel.wait_ready(time.perf_counter()))
  assert producer.blocks() and consumer.blocks() and warned.wait(HANG_S)
  value.done.set()
  producer.end()
  consumer.end()
  assert channel.can_wait_ready()
  assert channel.get_wait_s >= 0.5 and channel.get_wait_s > channel.put_wait_s


@pytest.mark.parametrize('make', [
    lambda: FifoQueue('rollouts', 2), lambda: DrainQueue('rollouts', 2, lambda: (1, 1)),
    lambda: LatestValue('rollouts')])
def test_channels_without_an_order_give_a_value_only_once_it_is_computed(make):
  channel = make()
  value = Slow()
  producer = Side(lambda: channel.put(Versioned(value, 0)))
  assert value.begun.wait(HANG_S)
  assert producer.blocks() and not channel.can_get()
  value.done.set()
  producer.end()
  assert channel.can_get()
  channel.get()
  assert channel.can_wait_ready()


def test_the_primed_value_is_ready():
  channel = DoubleBuffer('parameters', 3, lag=0)
  channel.prime(Versioned(0, 0))
  channel.get()
  channel.put(Versioned(Slow(), 1))
  assert channel.can_wait_ready()
  Side(lambda: channel.wait_ready(time.perf_counter())).end()


def test_a_failure_ends_the_wait_for_a_value_and_a_close_does_not():
  """A producer closes after its last value is computed; a failed producer may never compute it."""
  channel = DoubleBuffer('rollouts', 2)
  channel.put(Versioned(Slow(), 0))
  channel.get()
  consumer = Side(lambda: channel.wait_ready(time.perf_counter()))
  channel.close()
  assert consumer.blocks()
  channel.fail()
  with pytest.raises(Closed):
    consumer.end()


def test_a_value_that_cannot_be_computed_fails_the_channel():
  """The consumer gets an error; it neither waits for ever nor uses the value."""
  channel = DoubleBuffer('rollouts', 2)
  value = Slow(error=ZeroDivisionError())
  channel.put(Versioned(value, 0))
  channel.get()
  consumer = Side(lambda: channel.wait_ready(time.perf_counter()))
  assert consumer.blocks()
  value.done.set()
  with pytest.raises(ZeroDivisionError):
    channel.flush()
  with pytest.raises(Closed):
    consumer.end()


# Channels without an order.


def test_a_fifo_queue_keeps_the_order_of_all_producers():
  channel = FifoQueue('gradients', 3)
  for producer, version in ((1, 10), (0, 20), (1, 11)):
    Side(lambda p=producer, v=version: channel.put(Versioned(p, v))).end()
  assert not channel.can_put()
  late = Side(lambda: put_numbers(channel, 1))
  assert late.blocks()
  received = [Side(channel.get).end() for _ in range(4)]
  late.end()
  assert received == [(1, 10), (0, 20), (1, 11), (10, 1)]
  assert Side(channel.get).blocks()


def test_a_fifo_queue_gives_its_values_after_a_close_but_not_after_a_failure():
  channel = FifoQueue('gradients', 2)
  put_numbers(channel, 1)
  channel.close()
  assert channel.can_get() and channel.can_put()
  assert get_versions(channel, 1) == [1]
  with pytest.raises(Closed, match='gradients'):
    get_versions(channel, 1)
  with pytest.raises(Closed):
    put_numbers(channel, 1)
  channel = FifoQueue('gradients', 2)
  put_numbers(channel, 1)
  channel.fail()
  with pytest.raises(Closed):
    get_versions(channel, 1)


def test_a_drain_queue_gives_all_it_has_and_waits_only_for_what_is_needed():
  wants = [(0, 9), (0, 9), (1, 9), (0, 1), (0, 0), (0, 9)]
  channel = DrainQueue('rollouts', 3, lambda: wants[0])

  def get():
    item = channel.get()
    wants.pop(0)
    return [x.version for x in item.value], item.version

  assert get() == ([], 0)  # the queue is empty, and no value is needed
  put_numbers(channel, 3)
  assert get() == ([1, 2, 3], 1)
  getter = Side(get)
  assert not channel.can_get() and getter.blocks()
  put_numbers(channel, 1, first=4)
  assert getter.end() == ([4], 4)
  put_numbers(channel, 3, first=5)
  assert not channel.can_put()
  putter = Side(lambda: put_numbers(channel, 1, first=8))
  assert putter.blocks()
  assert get() == ([5], 5)  # not more than it wants, which makes room for one put
  putter.end()
  assert get() == ([], 0)  # it wants none, although the queue has three
  assert get() == ([6, 7, 8], 6)


def test_a_latest_value_is_given_again_and_only_the_first_get_waits():
  moved = []
  channel = LatestValue('parameters', transfer=lambda value: moved.append(value) or value)
  waiting = Side(channel.get)
  assert waiting.blocks() and not channel.can_get()
  channel.prime(Versioned(0, 0))
  waiting.end()
  assert get_versions(channel, 2) == [0, 0]
  put_numbers(channel, 3)
  assert channel.can_put() and moved == [0, 10, 20, 30]
  assert get_versions(channel, 3) == [3, 3, 3]
  channel.close()
  put_numbers(channel, 1, first=4)  # a value that nobody will read is no error of the producer
  with pytest.raises(Closed, match='parameters'):
    get_versions(channel, 1)


# Ends.


def test_a_value_can_be_taken_after_close():
  channel = DoubleBuffer('rollouts', 5)
  put_numbers(channel, 1)
  channel.close()
  assert channel.can_get() and channel.get().version == 1
  with pytest.raises(Closed, match='rollouts'):
    get_versions(channel, 1)
  with pytest.raises(Closed, match='rollouts'):
    Side(lambda: put_numbers(channel, 1)).end()


def test_the_primed_value_can_be_taken_after_close():
  channel = DoubleBuffer('parameters', 5, lag=1)
  channel.prime(Versioned(0, 0))
  channel.close()
  assert get_versions(channel, 2) == [0, 0]
  with pytest.raises(Closed):
    get_versions(channel, 1)


@pytest.mark.parametrize('lag', [None, 0])
def test_no_value_can_be_taken_after_fail(lag):
  channel = DoubleBuffer('rollouts', 5, lag)
  channel.prime(Versioned(0, 0))
  put_numbers(channel, 1)
  channel.fail()
  with pytest.raises(Closed):
    get_versions(channel, 1)
  with pytest.raises(Closed):
    Side(lambda: put_numbers(channel, 1)).end()


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
    waiting = Side(lambda: put_numbers(channel, 2))
  assert waiting.blocks()
  end(channel)
  with pytest.raises(Closed):
    waiting.end()


@pytest.mark.parametrize('side, purpose', [
    ('get', 'to be made'), ('put', 'to be taken'), ('wait_ready', 'to be made')])
def test_the_watchdog_names_the_channel_and_the_waiting_thread(side, purpose, monkeypatch):
  warnings = []
  warned_twice = threading.Event()
  def warning(message, *args):
    warnings.append(message % args)
    if len(warnings) == 2:
      warned_twice.set()
  monkeypatch.setattr(channels._logger, 'warning', warning)
  channel = DoubleBuffer('rollouts of actor 3', 5, patience_s=0.02)
  waiting = Side(dict(
      get=channel.get, put=lambda: put_numbers(channel, 2),
      wait_ready=lambda: (put_numbers(channel, 1), channel.get(), channel.wait_ready(0.0)))[side])
  assert warned_twice.wait(HANG_S)  # the warning is repeated
  channel.fail()
  with pytest.raises(Closed):
    waiting.end()
  assert all(text.startswith(f'{waiting.name}: waiting for ') for text in warnings)
  assert all(text.endswith(f' s for the rollouts of actor 3 {purpose}') for text in warnings)


@pytest.mark.parametrize('side', ['get', 'put', 'wait_ready'])
def test_locked_lists_the_waiting_thread_until_its_wait_can_end(side):
  channel = DoubleBuffer('rollouts', 3)
  if side != 'get':
    put_numbers(channel, 1)
  if side == 'wait_ready':
    channel.get()
  waiting = Side(dict(get=channel.get, put=lambda: put_numbers(channel, 1, first=2),
                      wait_ready=lambda: channel.wait_ready(0.0))[side])
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


def test_a_thread_that_can_go_on_but_has_not_woken_is_not_waiting():
  channel = DoubleBuffer('rollouts', 3)
  consumer = Side(channel.get)
  assert consumer.blocks()
  with channel.locked() as blocked:
    assert blocked == {consumer}
    put_numbers(channel, 1)  # this thread has the lock, so the consumer does not wake yet
    with channel.locked() as blocked_after_put:
      assert blocked_after_put == set()
  assert consumer.end() == Versioned(10, 1)


def test_a_failed_transfer_is_the_producers_error():
  channel = DoubleBuffer('rollouts', 2, transfer=lambda value: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    put_numbers(channel, 1)


# Transfers of placement.py.


def mesh(devices):
  return jax.sharding.Mesh(np.array(devices), ('learner',))


@pytest.mark.parametrize('learners', [1, 2])
def test_an_actors_parameters_survive_donation_by_the_learner(learners):
  devices = jax.devices()
  for actor in devices[:3]:  # devices of the learner, and others
    # The larger array travels by itself.
    params = placement.replicate({'w': jnp.arange(1000.0), 'v': jnp.arange(20_000.0)},
                                 mesh(devices[:learners]))
    actor_params = placement.put_params(params, actor)
    jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda x: x * 0 - 1, p),
                                  donate_argnums=0)(params))
    for name, size in (('w', 1000.0), ('v', 20_000.0)):
      assert params[name].is_deleted()  # it was donated
      assert actor_params[name].devices() == {actor}
      assert_array_equal(actor_params[name], np.arange(size))


def test_a_replica_survives_the_donation_of_another():
  """The state of a checkpoint may be replicated twice."""
  state = jnp.arange(1000.0)
  donated, kept = (placement.replicate(state, mesh(jax.devices()[:1])) for _ in range(2))
  jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(donated))
  assert donated.is_deleted()
  assert_array_equal(kept, np.arange(1000.0))
  assert_array_equal(state, np.arange(1000.0))


def tree_of_all_kinds():
  """Returns arrays of several types and sizes on device 0, of which two have 64 KiB and more."""
  rng = np.random.default_rng(0)
  arrays = {
      'matrix': rng.normal(size=(3, 5)).astype(np.float32),
      'nan': np.array([0x7fc00001, 0x80000000], np.uint32).view(np.float32),  # a NaN's bits, and -0
      'scalar': np.float32(2.5),
      'count': np.int32(-7),
      'flags': np.array([True, False, True]),
      'bytes': rng.integers(0, 256, (2, 3, 4)).astype(np.uint8),
      'empty': np.zeros((0, 4), np.float32),
      'halves': np.arange(4).astype(jnp.bfloat16),
      'large': rng.normal(size=(128, 129)).astype(np.float32),
      'large bytes': rng.integers(0, 256, (2**16,)).astype(np.uint8),
  }
  return jax.device_put(arrays | {'key': jax.random.key(3)}, jax.devices()[0])


def bits(x):
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  return np.asarray(x).tobytes()


@pytest.mark.parametrize('goal', ['device', 'mesh', 'numpy'])
def test_a_tree_arrives_with_all_its_bits(goal):
  tree = tree_of_all_kinds()
  where = jax.devices()[1]
  if goal == 'mesh':
    where = NamedSharding(mesh(jax.devices()[:3]), PartitionSpec())
  sent = tree
  if goal == 'numpy':
    del tree['key']
    sent = jax.tree.map(np.asarray, tree)
  arrived = placement.put(sent, where)
  assert list(arrived) == list(tree)
  for name, x in arrived.items():
    assert (x.shape, x.dtype) == (tree[name].shape, tree[name].dtype), name
    assert x.devices() == (where.device_set if goal == 'mesh' else {where}), name
    for shard in x.addressable_shards:
      assert bits(shard.data) == bits(tree[name]), name


def test_a_tree_that_is_there_is_not_copied():
  tree = tree_of_all_kinds()
  assert placement.put(tree, jax.devices()[0]) is tree
  assert placement.everywhere(tree, mesh(jax.devices()[:1])) is tree


def test_a_tree_survives_the_donation_of_what_arrived():
  tree = tree_of_all_kinds()
  arrived = placement.put(tree, jax.devices()[1])
  jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(arrived['large']))
  assert arrived['large'].is_deleted()
  assert bits(tree['large']) == bits(tree_of_all_kinds()['large'])


def batch(num_envs, steps=3):
  rng = np.random.default_rng(num_envs)
  return {'obs': rng.integers(0, 255, (steps + 1, num_envs, 2, 5)).astype(np.uint8),
          'reward': rng.normal(size=(steps, num_envs)).astype(np.float32),
          'count': np.arange(steps * num_envs, dtype=np.int32).reshape(steps, num_envs)}


def columns(tree, first, width):
  """Returns the columns of environments `first` to `first` + `width` - 1."""
  return jax.tree.map(lambda x: x[:, first:first + width], tree)


@pytest.mark.parametrize('actors', [1, 2, 3])
@pytest.mark.parametrize('learners', [1, 2, 3, 4])
@pytest.mark.parametrize('shards_per_actor', [1, 2])
def test_gathered_rollouts_equal_concatenation(actors, learners, shards_per_actor):
  """With 36 environments and 2 or 4 learners, devices also split the shards of 3 or 1 actors."""
  num_envs = 36
  devices = jax.devices()
  full_batch = batch(num_envs)
  learner_mesh = mesh(devices[-learners:])
  width = num_envs // actors // shards_per_actor
  slices = []
  for a in range(actors):
    first = a * width * shards_per_actor
    shards = [jax.device_put(columns(full_batch, first + s * width, width), devices[a])
              for s in range(shards_per_actor)]
    slices.append(placement.scatter(shards, first, num_envs, learner_mesh))
  for part_of_batch in slices:  # rows go straight to the device that uses them
    for device, parts in zip(devices[-learners:], part_of_batch.parts, strict=True):
      assert all(x.devices() == {device} for x in jax.tree.leaves(parts))
  gathered = placement.gather(slices, learner_mesh)
  jax.tree.map(assert_array_equal, gathered, full_batch)
  for x in jax.tree.leaves(gathered):
    assert x.sharding == NamedSharding(learner_mesh, PartitionSpec(None, 'learner'))
    assert {s.data.shape[1] for s in x.addressable_shards} == {num_envs // learners}


def test_a_batch_from_one_actor_to_one_learner_is_not_copied():
  learner_mesh = mesh(jax.devices()[1:2])
  full_batch = jax.device_put(batch(6), placement.by_env(learner_mesh))
  scattered = placement.scatter([full_batch], 0, 6, learner_mesh)
  gathered = placement.gather([scattered], learner_mesh)
  assert jax.tree.all(jax.tree.map(lambda x, y: x is y, gathered, full_batch))


def test_shards_of_unequal_width_are_split_at_device_boundaries():
  """3 devices get 4 environments each of shards of 5, 1, 2 and 4."""
  widths = [5, 1, 2, 4]
  full_batch = batch(12)
  learner_mesh = mesh(jax.devices()[:3])
  firsts = np.cumsum([0, *widths])
  slices = [placement.scatter([columns(full_batch, first, width)], first, 12, learner_mesh)
            for first, width in zip(firsts, widths, strict=False)]
  assert [[len(parts) for parts in s.parts] for s in slices] == [
      [1, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]]
  jax.tree.map(assert_array_equal, placement.gather(slices, learner_mesh), full_batch)
