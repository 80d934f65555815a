"""A run that is stopped at drawn updates ends with the bits of one that was never stopped."""

import random

import pytest

from podracer_jit.workdir import journal
from tests.made import once
from tests.runs import changed, prepared, small, train
from tests.schemes import test_apex
from tests.tiers import essential

UPDATES = 14


def config_of(config, **fields):
  """Returns a config of several segments; each checkpoint is one of a stop, or of the end."""
  return changed(config, checkpoint__every_updates=0, checkpoint__every_seconds=0,
                 env__renew_every_updates=5, log__tensorboard=False, **fields)


TWO = dict(placement__actor_devices=(0, 1), placement__learner_devices=(0, 1))
PPO = changed(small('ppo', num_shards=2, num_grad_shards=2), total_steps=UPDATES * 64 - 63)
CATCH = changed(small('impala', 'Catch-v0'), total_steps=UPDATES * 64 - 63)
DQN = changed(test_apex.config('dqn'), total_steps=UPDATES * 256 - 255)
R2D2 = changed(test_apex.config('r2d2'), total_steps=UPDATES * 256 - 255)
FUNCTIONS = changed(PPO, env__task='gymnax:CartPole-v1')
CASES = {
    'PPO, CartPole, sync': (PPO, dict(scheme='sync')),
    'PPO, CartPole, fused': (PPO, dict(scheme='fused', placement__updates_per_call=3)),
    'IMPALA, Catch, cleanba': (CATCH, dict(scheme='cleanba')),
    'PPO, CartPole, cleanba': (PPO, dict(scheme='cleanba', **TWO)),
    'PPO, CartPole, rapid': (PPO, dict(scheme='rapid', placement__actor_devices=(0, 1),
                                       placement__learner_devices=(2, 3))),
    'PPO, CartPole, dppo': (PPO, dict(scheme='dppo', **TWO)),
    'IMPALA, Catch, fused': (CATCH, dict(scheme='fused')),
    'PPO, JAX environments, cleanba': (FUNCTIONS, dict(scheme='cleanba')),
    'PPO, JAX environments, fused': (FUNCTIONS, dict(scheme='fused', **TWO)),
    'DQN, CartPole, sync': (DQN, dict(scheme='sync')),
    'DQN, CartPole, apex_lockstep': (DQN, dict(scheme='apex_lockstep')),
    'R2D2, CartPole, apex_lockstep': (R2D2, dict(scheme='apex_lockstep'))}


def receipts(workdir):
  return [(x['update'], x['batch'], x['params'])
          for x in journal.read_lines(workdir / journal.RECEIPTS) if 'update' in x]


def train_whole(run, workdir, stops):
  """Trains to the end, with stops after these updates."""
  for stop in stops:
    assert not train(run, workdir, stop)
    assert receipts(workdir)[-1][0] == stop
  assert train(run, workdir)


@pytest.mark.parametrize('name', essential(
    CASES, 'PPO, CartPole, sync', 'IMPALA, Catch, cleanba', 'PPO, CartPole, fused'))
@pytest.mark.same_bits('stopped at drawn updates, within segments', 'PPO, IMPALA, DQN, R2D2')
def test_stops_at_any_updates_change_no_bit(name, tmp_path, tmp_path_factory):
  config, fields = CASES[name]
  run = prepared(config_of(config, **fields))
  whole = once(tmp_path_factory, f'whole {name}', lambda folder: train_whole(run, folder, ()))
  expected = receipts(whole)
  assert len(expected) >= UPDATES and len(set(expected)) == len(expected)
  draws = random.Random(name)
  for i in range(2):
    stops = sorted(draws.sample(range(1, UPDATES - 1), 3))
    assert any(update % 5 for update in stops)  # within a segment
    train_whole(run, tmp_path / f'{i}', stops)
    assert receipts(tmp_path / f'{i}') == expected, stops
