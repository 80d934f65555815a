"""The estimate of memory, compared with real arrays; and the memory of the machine."""

import collections
import contextlib
import dataclasses
import gc
import threading
import weakref

import jax
import pytest

from podracer_jit.experiment import build, memory
from tests.runs import changed, fresh, initial_state, prepared, small
from tests.runs import run as run_segment
from tests.workers import wrap

CASES = {
    'rollouts': small('ppo', normalise={'obs': True, 'reward': True, 'value': False}),
    'recurrent': changed(small('impala'), network__core='lstm', network__core_size=16),
    'stacks of frames': changed(small('ppo', 'Pong-v5', 'nature_cnn'), num_shards=2),
    'as they come': changed(small('impala'), env_batch=4, scheme='impala'),
    'replay': small('dqn'),
    'whole transitions': small('dqn')}
for _name in ('replay', 'whole transitions'):
  CASES[_name] |= dict(num_minibatches=1)
  CASES[_name]['replay'] |= dict(capacity=640, min_size=64, batch_size=32)
CASES['whole transitions']['replay'] |= dict(eviction='prioritised')
CASES['sequences'] = changed(small('r2d2'), num_minibatches=1, network__core='lstm',
                             network__core_size=16, loss__burn_in=4, loss__trace_length=10)
CASES['sequences']['replay'] |= dict(capacity=80, min_size=16, batch_size=8)
CASES['functions'] = small()
CASES['functions']['env']['task'] = 'gymnax:CartPole-v1'


def real_bytes(run):
  """Returns the bytes of the train state, the replay, the actors' state and one rollout each."""
  state = initial_state(run)
  given = jax.tree.map(lambda x: x.addressable_data(0), run.learner.algorithm.for_actors(state))
  with contextlib.ExitStack() as stack:
    (actor,) = build.make_actors(run, build.Snapshot(state), stack)
    actor_state = memory.nbytes(actor.state.envs)
    program = actor.rollout_program
    rollout = program.load(run.acting.rollout(program.vector_envs), (given, actor.state),
                           donate=())
    _, experience = jax.block_until_ready(rollout(given, actor.state))
    rollouts = memory.nbytes(experience)
  # Checkpoints have an earlier state of a deterministic scheme's actors than the newest.
  actor_state *= 2 if run.experiment.deterministic else 1
  return {'parameters and optimizer state': memory.nbytes(state._replace(replay=())),
          'replay': memory.nbytes(state.replay),
          "environments' observations and states": actor_state, 'rollouts': rollouts}


@pytest.mark.parametrize('case', CASES)
def test_each_part_has_the_bytes_of_the_real_arrays(case):
  run = fresh(CASES[case])
  parts = {part.name: part.nbytes for part in memory.estimate(run)}
  for name, size in real_bytes(run).items():
    assert parts.get(name, 0) == size, name
  assert {part.place for part in memory.estimate(run)} == {memory.HOST}


@pytest.mark.parametrize('fields, rows', [
    (dict(num_minibatches=1), 64 * 64), (dict(num_minibatches=4), 16 * 64),
    (dict(num_minibatches=2, microbatch_rows=256), 256),
    (dict(num_minibatches=2, network__core='gru'), 32 * 65)])
def test_the_observations_of_a_pass_are_among_what_a_program_allocates(fields, rows):
  """One-hots of 500 bytes are gathered, and converted to floats."""
  run = fresh(changed(small('ppo', 'Taxi-v3'), env__num_envs=64, unroll_length=64, **fields))
  estimate = {part.name: part.nbytes for part in memory.estimate(run)}
  needed = estimate['observations of a pass of the network']
  assert needed == rows * 500 * 5
  with contextlib.ExitStack() as stack:
    (actor,) = build.make_actors(run, build.Snapshot(initial_state(run)), stack)
    rollout = run.acting.rollout(actor.rollout_program.vector_envs)
    state = run.learner.state_shapes()
    _, (experience,) = jax.eval_shape(rollout, run.learner.algorithm.for_actors(state), actor.state)
    program = jax.jit(run.learner.learn).lower(state, experience).compile()
  assert program.memory_analysis().temp_size_in_bytes >= needed


def test_drawn_items_are_those_of_one_pass_of_the_network():
  """Groups learn one after the other, and so do their microbatches."""
  sizes = []
  for fields in ({}, dict(num_grad_shards=2), dict(num_grad_shards=2, microbatch_rows=4)):
    run = fresh(changed(CASES['replay'], **fields))
    sizes += [part.nbytes for part in memory.estimate(run)
              if part.name == 'items of a pass of the network']
  whole = memory.nbytes(memory.drawn_shapes(run))
  assert sizes == [whole, whole // 2, whole // 8]


@pytest.mark.parametrize('task', ['CartPole-v1', 'gymnax:CartPole-v1'])
def test_actors_of_one_program_are_counted_once_on_any_mesh(task):
  """Each device has its share of the environments; simulators are on one device."""
  sizes = []
  for devices in ((0,), (0, 1))[:2 if task.startswith('gymnax') else 1]:
    config = changed(small(), env__task=task, scheme='fused', num_shards=2, num_grad_shards=2,
                     placement__actor_devices=devices, placement__learner_devices=devices)
    run = fresh(config)
    named = [part for part in memory.estimate(run) if part.name in (
        'rollouts', "environments' observations and states")]
    sizes.append(sum(part.nbytes for part in named))
    assert len(named) == 2 * len(devices)
  assert len(set(sizes)) == 1


def test_the_rows_of_a_replay_are_counted_once_on_any_mesh():
  """Its tree, and when and where rows were added, are on each device."""
  config = changed(CASES['replay'], num_grad_shards=2)
  shared = changed(config, placement__learner_devices=(0, 1))
  totals = []
  for each in (config, shared):
    totals.append(collections.Counter())
    for part in memory.estimate(fresh(each)):
      totals[-1][part.name] += part.nbytes
  one_device, two_devices = totals
  replay = fresh(shared).learner.replay_shapes()
  on_each = memory.nbytes((replay.priorities, replay.size, replay.inserted, replay.ring.added,
                           replay.ring.head))
  assert 0 < on_each < one_device['replay'] / 2
  assert two_devices['replay'] == one_device['replay'] + on_each
  state = 'parameters and optimizer state'
  assert 2 * one_device[state] == two_devices[state]


def test_with_a_lag_memory_has_two_rollouts():
  def rollouts(scheme):
    parts = memory.estimate(fresh(changed(CASES['rollouts'], scheme=scheme)))
    return sum(part.nbytes for part in parts if part.name == 'rollouts')
  assert rollouts('cleanba') == 2 * rollouts('sync')


@pytest.mark.parametrize('scheme, most', [
    ('sync', 2), ('cleanba', 3), ('dppo', 2), ('fused', 1), ('impala', 1)])
def test_as_many_states_of_an_actor_are_counted_as_are_alive(scheme, most):
  run = prepared(changed(small(), scheme=scheme))
  state = memory.bytes_of_pool(run.experiment, run.acting)[0]
  parts = {part.name: part.nbytes for part in memory.estimate(run)}
  assert parts["environments' observations and states"] == most * state
  if scheme == 'fused':
    return
  alive = []
  counts = []

  def count(call, state, outputs):
    gc.collect()  # the estimate counts what is needed, not what waits for a collection
    alive.append(weakref.ref(state.envs[0].episode_return))
    counts.append(sum(array() is not None and not array().is_deleted() for array in alive))

  def learns_late(call, *_):
    if scheme == 'cleanba':  # each update begins when the actor is a rollout ahead of it
      with acted:
        assert acted.wait_for(lambda: len(counts) >= min(call.number + 1, updates), 60)

  def tell(call, state, outputs):
    with acted:
      count(call, state, outputs)
      acted.notify()

  acted = threading.Condition()
  updates = run.experiment.env.renew_every_updates
  run_segment(None, prepared_run=run, tamper=lambda workers: wrap('learner', before=learns_late)(
      wrap('actor', after=tell)(workers)))
  # The estimate is a lower bound: the learner forgets a state a moment after it sends parameters.
  assert most <= max(counts) <= most + (scheme != 'impala')


def test_a_large_replay_is_told_with_its_memory_and_disk():
  million = dict(replay__capacity=2**20, checkpoint__keep=3)
  run = fresh(changed(CASES['replay'], **million))
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(run.learner.replay_shapes()))
  line = f'replay.capacity: 1,048,576 items take {size / 1e9:.2g} GB of memory'
  on_disk = ('{}, and as much on the disk in each checkpoint, of which there are up to {} while '
             'one is written').format
  assert memory.of_replay(run) == [on_disk(line, 5)]
  endless = changed(CASES['replay'], **million, env__renew_every_updates=0)
  assert memory.of_replay(fresh(endless)) == [on_disk(line, 3)]
  unsaved = changed(CASES['replay'], **million, checkpoint__replay=False)
  (line,) = memory.of_replay(fresh(unsaved), copies=4)
  assert line == f'replay.capacity: 1,048,576 items take {4 * size / 1e9:.2g} GB of memory'
  assert memory.of_replay(fresh(CASES['replay'])) == []
  assert memory.of_replay(fresh(small('ppo'))) == []


def test_a_run_that_does_not_fit_is_refused_and_a_tight_fit_gives_a_warning(monkeypatch):
  run = fresh(changed(CASES['replay'], replay__capacity=64_000))
  needed = sum(part.nbytes for part in memory.estimate(run))
  for has, warnings in ((None, 0), (2 * needed, 0), (needed + 1, 1)):
    monkeypatch.setattr(memory, 'host_memory', lambda has=has: has)
    assert len(memory.check(run)) == warnings
  monkeypatch.setattr(memory, 'host_memory', lambda: needed - 1)
  with pytest.raises(ValueError, match='^replay.capacity: the run needs at least 0.* GB of memory: '
                     'replay 0.*; this machine has 0.* GB$'):
    memory.check(run)


def test_the_memory_of_an_accelerator_is_respected():
  class Gpu:
    platform = 'gpu'

    def memory_stats(self):
      return {'bytes_limit': 1000}

    def __str__(self):
      return 'gpu:0'

  run = fresh(CASES['rollouts'])
  gpu = Gpu()
  with pytest.raises(ValueError, match='; gpu:0 has 1e-06 GB'):
    memory.check(dataclasses.replace(run, place=run.place._replace(actors=(gpu,))))
  assert memory.capacity(gpu) == 1000


MEMINFO = 'MemTotal:       1000 kB\nMemFree:        10 kB\n'


@pytest.mark.parametrize('files, limit', [
    ({}, None),
    ({'proc/meminfo': MEMINFO}, 1_024_000),
    # Version 2: the limit of the group or of a group above it; 'max' is no limit.
    ({'proc/meminfo': MEMINFO, 'proc/self/cgroup': '0::/a/b\n',
      'sys/fs/cgroup/a/b/memory.max': '5000\n'}, 5000),
    ({'proc/meminfo': MEMINFO, 'proc/self/cgroup': '0::/a/b\n',
      'sys/fs/cgroup/a/memory.max': '4000\n', 'sys/fs/cgroup/a/b/memory.max': 'max\n'}, 4000),
    ({'proc/meminfo': MEMINFO, 'proc/self/cgroup': '0::/\n',
      'sys/fs/cgroup/memory.max': '3000\n'}, 3000),
    ({'proc/meminfo': MEMINFO, 'proc/self/cgroup': '0::/a\n',
      'sys/fs/cgroup/a/memory.max': 'max\n'}, 1_024_000),
    # Version 1; in a container the path is one of the machine outside.
    ({'proc/meminfo': MEMINFO, 'proc/self/cgroup': '4:cpu,memory:/a\n3:cpuset:/b\n',
      'sys/fs/cgroup/memory/a/memory.limit_in_bytes': '2000\n',
      'sys/fs/cgroup/memory/b/memory.limit_in_bytes': '1\n'}, 2000),
    ({'proc/meminfo': MEMINFO, 'proc/self/cgroup': '4:memory:/docker/x\n0::/\n',
      'sys/fs/cgroup/memory/memory.limit_in_bytes': '2500\n'}, 2500),
    ({'proc/meminfo': MEMINFO, 'proc/self/cgroup': '4:memory:/\n',
      'sys/fs/cgroup/memory/memory.limit_in_bytes': '9223372036854771712\n'}, 1_024_000)])
def test_the_memory_is_the_least_of_the_machines_and_the_cgroup_limits(files, limit, tmp_path):
  for name, text in files.items():
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  assert memory.host_memory(tmp_path) == limit
