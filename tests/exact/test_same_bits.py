"""Each experiment gives equal bits on any placement, in any scheme of the same lag.

The tables here are the first table of docs/exactness.md: `python -m tests.same_bits` prints it.
"""

import functools
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import optax
import pytest

from podracer_jit import loops
from podracer_jit.types import TrainState
from tests.runs import changed, run, run_in_segments, small
from tests.schemes import test_apex, test_function_envs
from tests.workers import wrap


class Way(NamedTuple):
  """How an experiment is run."""

  scheme: str
  actors: tuple[int, ...] = (0,)  # indices of devices
  learners: tuple[int, ...] = (0,)
  per_device: int = 1  # actors of each device
  threads: int = 0  # of each environment pool; 0: the default
  calls: int = 1  # updates of a call of `fused`
  serial: bool = False  # all workers on one thread
  slow: str = ''  # a worker that sleeps before it fires
  segments: tuple[int, ...] = ()  # updates of each; empty: one segment

  def __str__(self):
    places = '/'.join(','.join(map(str, place)) for place in (self.actors, self.learners))
    words = [f'`{self.scheme}`' + f' {places}' * (places != '0/0')]
    words += [f'{value} {what}' for what, value, default in (
        ('actors a device', self.per_device, 1), ('updates a call', self.calls, 1)
    ) if value != default]
    if self.threads:
      words.append(f'{self.threads} thread{"s" * (self.threads > 1)} a pool')
    if self.serial:
      words.append('all workers on one thread')
    if self.slow:
      words.append(f'slow {self.slow}')
    if self.segments:
      words.append(f'segments of {", ".join(map(str, self.segments))} updates')
    return ', '.join(words)


class Row(NamedTuple):
  """An experiment, and ways to run it that must give equal bits."""

  what: str
  config: Callable[[], dict[str, Any]]
  same: tuple[Way, ...]  # as `sync` on one device, or `cleanba` if it is the row's scheme
  full: tuple[Way, ...] = ()  # further ones, for scripts/test --all
  scheme: str = 'sync'
  updates: int = 6
  is_quick: bool = False
  holds: Callable[[TrainState], bool] = lambda state: True  # of the last state: the row is no toy


TWO = dict(actors=(0, 1), learners=(0, 1))
FOUR = dict(actors=(0, 1, 2, 3), learners=(0, 1, 2, 3))
SPLIT = dict(actors=(0, 1), learners=(2, 3))
WITH_LAG_1 = dict(scheme='cleanba')


def large(loss, **fields):
  """Groups have 2,048 rows; XLA does not split smaller sums between threads."""
  config = small(loss, num_shards=2, num_grad_shards=2, num_epochs=2 if loss == 'ppo' else 1)
  sizes = dict(unroll_length=64, num_minibatches=8, env__num_envs=64)
  return changed(config, **sizes | fields)


def four_shards(loss):
  return small(loss, num_shards=4, num_grad_shards=4)


def odd():
  """No number is a power of two."""
  config = small('ppo', num_shards=3, num_grad_shards=3)
  return changed(config, num_minibatches=1, unroll_length=7, env__num_envs=9)


def images(loss, network, **fields):
  config = small(loss, 'Pong-v5', network, num_shards=2, num_grad_shards=2,
                 num_epochs=2 if loss == 'ppo' else 1)
  return changed(config, **fields)


def recurrent(loss, core):
  config = small(loss, num_shards=2, num_grad_shards=2)
  return changed(config, network__core=core, network__core_size=16)


def normalised(loss='ppo', **fields):
  config = small(loss, 'InvertedPendulum-v4', num_shards=2, num_grad_shards=2,
                 **dict(num_epochs=2) if loss == 'ppo' else dict(policy='scaled_gaussian'))
  moments = {'obs': True, 'reward': True, 'value': loss == 'ppo'}
  return changed(config, normalise=moments, **fields)


def gymnasium(loss='impala'):
  config = small(loss, 'gymnasium:CartPole-v1', num_shards=2, num_grad_shards=2)
  if loss == 'dqn':
    config = changed(config, num_minibatches=1, replay__capacity=512, replay__min_size=64,
                     replay__batch_size=32)
  return config


def vmpo():
  return large('examples.vmpo:VMPO', num_minibatches=1, loss__target_every=2)


def ppg():
  """An auxiliary phase follows every other update."""
  return large('examples.ppg:PPG', network__separate_critic=True, normalise__reward=True,
               loss__policy_updates=2, loss__aux_epochs=2, loss__aux_minibatches=4)


def rnd():
  return large('examples.rnd:RND', num_epochs=2, loss__embedding=16)


def eight_groups(kind):
  """Returns a config with more gradient groups than blocks, copies, and evictions all at once."""
  fields = dict(env__num_envs=12, num_shards=4, num_grad_shards=8, replay__copies=3,
                replay__evict_every=4)
  if kind != 'r2d2':
    fields['replay__capacity'] = 900
  return changed(test_apex.config(kind), **fields)


def has_evicted(state):
  """Returns whether a replay of `eight_groups` has had more than it may keep."""
  return state.replay.inserted[0] > 1500 and state.replay.size[0] < 1500


# As the authors of PQN have it.
PQN_CNN = dict(network__layer_norm=True, num_epochs=2)
LAG_0 = (Way('fused', calls=2), Way('ppo'), Way('ddppo', **TWO), Way('dppo', **TWO))
ROWS = (
    Row('IMPALA, MLP, four shards', lambda: four_shards('impala'),
        (),
        (Way('fused', calls=5), Way('sync', (0, 1), (2, 3), 2, 2), Way('sync', slow='actor'),
         Way('fused', calls=4), Way('sync', **FOUR, threads=1), Way('sync', (4, 5), (0,), 1, 2),
         Way('sync', slow='learner'), Way('sync', slow='writer'), Way('sync', serial=True))),
    Row('IMPALA, MLP, four shards', lambda: four_shards('impala'),
        (Way('cleanba', **FOUR, threads=1), Way('cleanba', slow='learner')),
        (Way('cleanba', slow='actor'), Way('cleanba', slow='writer'),
         Way('cleanba', (0, 1), (2,), serial=True)), is_quick=True, **WITH_LAG_1),
    Row('PPO, MLP, four shards', lambda: four_shards('ppo'),
        (Way('sync', **FOUR, threads=1),),
        (Way('fused', calls=5), Way('sync', slow='learner'), Way('sync', slow='actor'),
         Way('sync', slow='writer'))),
    Row('PPO, MLP, four shards', lambda: four_shards('ppo'), (),
        (Way('cleanba', **FOUR, threads=1), Way('cleanba', (0, 1), (2, 4), 1, 2),
         Way('cleanba', slow='learner'), Way('cleanba', slow='actor'),
         Way('cleanba', slow='writer')), **WITH_LAG_1),
    Row('PPO, MLP, no number a power of two', odd, (),
        (Way('sync', (3,), (0, 1, 2), 3, 1), Way('fused', calls=5),
         Way('sync', (0, 1, 2), (0, 1, 2), 1, 2))),
    Row('PPO, MLP, large batches', lambda: large('ppo'), (),
        (*LAG_0, Way('dppo', **TWO, serial=True)), updates=4),
    Row('PPO, MLP, large batches', lambda: large('ppo'), (Way('rapid', **SPLIT),),
        (Way('rapid', **SPLIT, serial=True), Way('cleanba', (0, 1), (2,))), updates=4,
        **WITH_LAG_1),
    Row('IMPALA, MLP, large batches', lambda: large('impala'), (), LAG_0, updates=4),
    Row('IMPALA, MLP, large batches', lambda: large('impala'), (),
        (Way('rapid', **SPLIT), Way('cleanba', (0, 1), (2,))), updates=4, **WITH_LAG_1),
    Row('PPO, CNN', lambda: images('ppo', 'nature_cnn'), (Way('sync', (0,), (2, 3), 2, 1),),
        (Way('fused', calls=4), Way('sync', **TWO, threads=1))),
    Row('PPO, CNN, running moments of images', lambda: images('ppo', 'nature_cnn', normalise={
        'obs': True, 'reward': True, 'value': True}), (Way('sync', (0,), (2, 3), 2, 1),),
        (Way('fused', calls=4), Way('sync', **TWO, threads=1))),
    Row('IMPALA, ResNet', lambda: images('impala', 'impala_resnet'), (),
        (Way('fused', calls=4), Way('sync', **TWO, threads=1), Way('sync', (0,), (2, 3), 2, 1))),
    Row('PPO, GRU', lambda: recurrent('ppo', 'gru'), (),
        (Way('dppo', **TWO), Way('fused', calls=4), Way('sync', (0, 1), (2, 1)))),
    Row('IMPALA, LSTM', lambda: recurrent('impala', 'lstm'), (Way('fused', calls=4),),
        (Way('sync', (0, 1), (2, 1)),)),
    Row('PPO, running moments', normalised, (Way('sync', (0, 1), (2, 1)),),
        (Way('fused', calls=4),)),
    Row('PPO, running moments, V-trace, tanh-squashed actions, a KL target', lambda: normalised(
        policy='tanh_gaussian', loss__vtrace=True, optimizer__kl_target=0.01,
        optimizer__anneal=False), (Way('cleanba', (0, 1), (2, 1)),),
        holds=lambda state: optax.tree.get(state.opt_state, 'kl_factor') != 1, **WITH_LAG_1),
    Row('IMPALA, running moments', lambda: normalised('impala'), (),
        (Way('sync', (0, 1), (2, 1)), Way('fused', calls=4))),
    Row('IMPALA, Gymnasium', gymnasium, (Way('sync', **SPLIT, threads=4),),
        (Way('sync', threads=1), Way('fused'), Way('ddppo', **TWO), Way('sync', serial=True)),
        updates=4),
    Row('IMPALA, Gymnasium', gymnasium, (Way('cleanba', (0, 0), (1,)),),
        (Way('cleanba', (0, 1), (2,)), Way('cleanba', threads=3)), updates=4, **WITH_LAG_1),
    Row('DQN, Gymnasium', lambda: gymnasium('dqn'), (),
        (Way('apex_lockstep'), Way('apex_lockstep', (0, 1), (2,))), **WITH_LAG_1),
    Row('PPO, JAX environments', test_function_envs.experiment,
        (Way('fused', **TWO, calls=3, segments=(3, 4)),),
        (Way('ddppo', **TWO, segments=(4, 3)), Way('fused', calls=3),
         Way('fused', calls=3, segments=(2, 4, 1)), Way('fused', **FOUR, calls=3),
         Way('sync', segments=(1, 6)), Way('dppo', **TWO, segments=(5, 2))), updates=7),
    Row('DQN, JAX environments', lambda: test_function_envs.experiment('dqn'), (),
        (Way('fused', **TWO, calls=3, segments=(3, 4)), Way('fused', calls=3),
         Way('sync', segments=(2, 5))), updates=7),
    Row('PPO, GRU, running moments, JAX environments', lambda: test_function_envs.experiment(
        network__core='gru', network__core_size=8, normalise__reward=True, normalise__obs=True),
        (),
        (Way('sync', segments=(2, 5)), Way('fused', calls=3),
         Way('fused', **TWO, calls=3, segments=(3, 4))), updates=7),
    Row('DQN, MLP', lambda: test_apex.config('dqn'), (Way('fused'),),
        (Way('ddppo', **TWO),), updates=8),
    Row('DQN, MLP', lambda: test_apex.config('dqn'), (Way('apex_lockstep'),),
        (Way('apex_lockstep', serial=True), Way('cleanba', **SPLIT)), updates=8, **WITH_LAG_1),
    Row('DPG', lambda: test_apex.config('dpg'), (Way('sync', (0,), (1, 2)),), updates=8),
    Row('DPG', lambda: test_apex.config('dpg'), (),
        (Way('apex_lockstep'), Way('cleanba', **SPLIT)), updates=8, **WITH_LAG_1),
    Row('R2D2, GRU', lambda: test_apex.config('r2d2'), (),
        (Way('fused', calls=3), Way('ddppo', **TWO), Way('sync', (0,), (2, 1))), updates=8),
    Row('R2D2, GRU', lambda: test_apex.config('r2d2'), (),
        (Way('apex_lockstep'), Way('cleanba', **SPLIT)), updates=8, **WITH_LAG_1),
    Row('R2D2, GRU, JAX environments', lambda: test_function_envs.experiment(
        'r2d2', network__core='gru', network__core_size=8, loss__burn_in=2, loss__trace_length=8,
        replay__min_size=32), (),
        (Way('fused', **TWO, calls=3, segments=(3, 4)), Way('sync', segments=(2, 5))), updates=7),
    *(Row(name, lambda kind=kind: test_apex.config(kind), (),
          (Way('fused', calls=3), Way('ddppo', **TWO), Way('sync', (0,), (2, 1))), updates=8)
      for name, kind in (('SAC', 'sac'), ('TD3', 'td3'))),
    *(Row(name, lambda kind=kind: test_apex.config(kind), (),
          (Way('apex_lockstep'), Way('cleanba', **SPLIT)), updates=8, **WITH_LAG_1)
      for name, kind in (('SAC', 'sac'), ('TD3', 'td3'))),
    Row('PQN, MLP, large batches', lambda: large('pqn'), (),
        (*LAG_0, Way('ddppo'), Way('dppo')), updates=4),
    Row('PQN, JAX environments', lambda: test_function_envs.experiment('pqn'), (),
        (Way('fused', **TWO, calls=3, segments=(3, 4)), Way('sync', segments=(2, 5))), updates=7),
    Row('PQN, GRU', lambda: recurrent('pqn', 'gru'), (),
        (Way('dppo', **TWO), Way('fused', calls=4), Way('sync', (0, 1), (2, 1)))),
    Row('PQN, MLP, large batches', lambda: large('pqn'), (),
        (Way('rapid', **SPLIT), Way('rapid', (0,), (1,)), Way('cleanba', (0, 1), (2,))),
        updates=4, **WITH_LAG_1),
    Row('PQN, CNN', lambda: images('pqn', 'nature_cnn', **PQN_CNN), (),
        (Way('fused', calls=4), Way('sync', **TWO, threads=1), Way('sync', (0,), (2, 3), 2, 1))),
    Row('PQN, CNN', lambda: images('pqn', 'nature_cnn', **PQN_CNN), (),
        (Way('cleanba', (0, 1), (2, 3)), Way('rapid', **SPLIT)), **WITH_LAG_1),
    Row('V-MPO, MLP, large batches', vmpo, (), LAG_0, updates=4),
    Row('V-MPO, MLP, large batches', vmpo, (),
        (Way('rapid', **SPLIT), Way('cleanba', (0, 1), (2,))), updates=4, **WITH_LAG_1),
    Row('PPG, MLP, large batches', ppg, (),
        (Way('fused', calls=2), Way('ppo'), Way('ddppo', **TWO)), updates=4),
    Row('PPG, MLP, large batches', ppg, (), (Way('cleanba', (0, 1), (2,)), Way('cleanba', **SPLIT)),
        updates=4, **WITH_LAG_1),
    Row('RND, MLP, large batches', rnd, (), LAG_0, updates=4),
    Row('RND, MLP, large batches', rnd, (),
        (Way('rapid', **SPLIT), Way('cleanba', (0, 1), (2,))), updates=4, **WITH_LAG_1),
    Row('DQN, CNN', lambda: test_apex.config('pixels'), (), (Way('ddppo', **TWO),), updates=8),
    Row('DQN, CNN, running moments of images', lambda: test_apex.config(
        'pixels', normalise__obs=True, env__stack_num=1), (),
        (Way('ddppo', **TWO), Way('fused', calls=3)), updates=8),
    # The eight gradient groups of a batch share no environments, which have four blocks.
    Row('DQN, MLP, 12 environments, 8 gradient groups, 3 copies', lambda: eight_groups('dqn'),
        (Way('sync', **FOUR),), (Way('sync', (0,), (1, 2)), Way('fused', calls=3)), updates=8,
        holds=has_evicted),
    Row('DQN, MLP, 12 environments, 8 gradient groups, 3 copies', lambda: eight_groups('dqn'), (),
        (Way('apex_lockstep'), Way('cleanba', (0, 1), (2, 3, 4, 5))), updates=8, holds=has_evicted,
        **WITH_LAG_1),
    Row('DPG, 12 environments, 8 gradient groups, 3 copies', lambda: eight_groups('dpg'),
        (Way('sync', (0,), (1, 2)),), (Way('sync', **FOUR),), updates=8, holds=has_evicted),
    Row('DQN, CNN, 12 environments, 8 gradient groups, 3 copies', lambda: eight_groups('pixels'),
        (), (Way('sync', **FOUR), Way('sync', (0,), (1, 2))), updates=6, holds=has_evicted),
    Row('R2D2, GRU, 12 environments, 8 gradient groups, 3 copies', lambda: eight_groups('r2d2'), (),
        (Way('sync', **FOUR), Way('sync', (0,), (1, 2))), updates=8),
)


@functools.lru_cache(maxsize=2)
def reference(index: int):
  """Returns the receipts of a row on one device."""
  row = ROWS[index]
  expected, _, state = run(config_of(row, Way(row.scheme)), updates=row.updates)
  assert len(set(expected)) == len(expected) == row.updates
  assert row.holds(state)
  return expected


def config_of(row: Row, way: Way):
  return changed(row.config(), scheme=way.scheme, placement__actor_devices=way.actors,
                 placement__learner_devices=way.learners,
                 placement__actors_per_device=way.per_device,
                 placement__env_threads=way.threads, placement__updates_per_call=way.calls)


def receipts(row: Row, way: Way):
  if way.segments:
    assert sum(way.segments) == row.updates
    return run_in_segments(config_of(row, way), way.segments)
  options = {}
  if way.slow:
    naps = random.Random(0)
    options['tamper'] = wrap(way.slow, before=lambda *_: time.sleep(naps.random() * 0.1))
  return run(config_of(row, way), loops.run_serial if way.serial else loops.run, row.updates,
             **options)[0]


def _cases():
  for i, row in enumerate(ROWS):
    name = f'{row.what}, {row.scheme}'
    if row.same:
      yield pytest.param(i, row.same, id=name, marks=[pytest.mark.quick] * row.is_quick)
    if row.full:
      yield pytest.param(i, row.full, id=f'{name}, further ways', marks=pytest.mark.full)


@pytest.mark.parametrize('index, ways', [*_cases()])
def test_all_ways_give_the_same_bits(index, ways):
  expected = reference(index)
  different = {str(way) for way in ways if receipts(ROWS[index], way) != expected}
  assert not different


def test_another_lag_seed_or_segment_gives_other_bits():
  """So equal receipts say something."""
  first = run(small())[0]
  assert run(small())[0] == first
  for other in (dict(scheme='cleanba'), dict(seed=2)):
    assert run(changed(small(), **other))[0] != first
  assert run(small(), index=1)[0] != first
