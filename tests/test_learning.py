"""Agents learn, with shipped configs and three seeds; a broken agent misses the thresholds.

Random play: Catch -0.6 of 1, CartPole 22 of 500, the pendulum 6 of 1000, the slippery lake 0.015
of 0.74 (the best policy of all, within its 100 steps), shapes 0 of 1, doors 1.3 of 6 among the
legal ones and -0.9 among all, Pong -20.5 of 21.
"""

import collections
import dataclasses
import functools
import json

import jax
import pytest

from podracer_jit import experiment, loops
from podracer_jit.configs import (
  apex_dpg_walker_walk,
  apex_dqn_catch,
  impala_cartpole,
  impala_catch,
  pong_laptop,
  ppo_cartpole,
  ppo_mujoco,
  pqn_cartpole,
  r2d2_memory,
  sac_pendulum,
  td3_pendulum,
)
from podracer_jit.experiment import build
from tests import processes
from tests.runs import changed, fresh

TWO_WORKERS = dict(num_shards=2, num_grad_shards=2, placement__actor_devices=(0, 0))
# An asynchronous parameter server makes a step for the gradient of each worker. With the config's
# four epochs one run in fifty lost its policy near the end, too late to recover.
ASYNCHRONOUS = dict(TWO_WORKERS, placement__learner_devices=(0, 0), num_epochs=2,
                    total_steps=300_000)
CNN = dict(experiment.config('ppo', 'nature_cnn', 'adam').network.to_dict(), channels=(16,),
           kernels=(3,), strides=(1,), hidden=64, centre=True)  # 102,819 parameters
# A picture is answered before the next one comes, so later rewards do not count.
SHAPES = dict(env__task='tests.envs.shapes:Shapes', env__num_envs=64, unroll_length=32,
              num_epochs=2, num_minibatches=8, total_steps=80_000, loss__discount=0.0,
              loss__entropy_coef=0.01, loss__value_coef=1.0, optimizer__learning_rate=1e-3)
# Each step shows which of twelve doors is right; an illegal one ends the episode with -1.
DOORS = dict(env__task='tests.envs.masked:Doors', env__choices=(12,), env__penalty=1.0,
             env__num_envs=16, total_steps=10_000, scheme='fused', loss__discount=0.9)
RECURRENT = dict(experiment.config('r2d2', 'mlp', 'adam').network.to_dict(), core='gru',
                 core_size=32)
CASES = {
    'impala_catch': (impala_catch, {}, 0.8),
    'ppo_cartpole': (ppo_cartpole, {}, 400.0),
    'impala_cartpole': (impala_cartpole, {}, 400.0),
    'dppo_async_cartpole': (ppo_cartpole, dict(ASYNCHRONOUS, scheme='dppo_async'), 400.0),
    'rapid_async_cartpole': (ppo_cartpole, dict(ASYNCHRONOUS, scheme='rapid_async'), 400.0),
    'lagged_ppo_cartpole': (ppo_cartpole, dict(
        TWO_WORKERS, scheme='impala', loss__vtrace=True), 400.0),
    # Bounded rates: where a machine is slow to compile, free actors leave too few gradient steps.
    'apex_catch': (apex_dqn_catch, dict(
        scheme='apex', total_steps=60_000, replay__samples_per_insert=2.0,
        replay__tolerance=1_000), 0.7),
    'dpg_pendulum': (apex_dpg_walker_walk, dict(
        env__task='InvertedPendulum-v4', total_steps=80_000, loss__noise=0.1, replay__batch_size=64,
        network__actor_hidden=(64, 64), network__critic_hidden=(64, 64)), 250.0),
    'pqn_cartpole': (pqn_cartpole, {}, 400.0),
    # All hundred episodes, of which the first ones are random, with -1,200.
    'sac_pendulum': (sac_pendulum, {}, -500.0),
    'td3_pendulum': (td3_pendulum, {}, -650.0),
    'ppo_slippery_lake': (ppo_cartpole, dict(
        env__task='FrozenLake-v1', total_steps=150_000, loss__discount=0.99, loss__value_coef=0.5,
        loss__entropy_coef=0.01), 0.5),
    'ppo_pendulum': (ppo_mujoco, dict(env__task='InvertedPendulum-v4', total_steps=60_000), 350.0),
    'ppo_gymnasium': (ppo_cartpole, dict(env__task='gymnasium:CartPole-v1', total_steps=80_000),
                      200.0),
    'ppo_cnn': (ppo_cartpole, dict(SHAPES, network=CNN), 0.4),
    'ppo_pong': (pong_laptop, dict(total_steps=900_000), 0.0),
    'ppo_doors': (ppo_cartpole, dict(DOORS, loss__value_coef=0.5, loss__entropy_coef=0.003), 4.4),
    'impala_doors': (impala_catch, dict(
        DOORS, unroll_length=8, num_minibatches=1, optimizer__learning_rate=5e-3,
        loss__entropy_coef=0.003, loss__discount=0.5), 4.4),
    'pqn_doors': (pqn_cartpole, dict(DOORS, unroll_length=32, num_minibatches=4), 4.4),
    'dqn_doors': (apex_dqn_catch, DOORS, 4.4),
    'r2d2_doors': (r2d2_memory, dict(
        DOORS, network=RECURRENT, unroll_length=8, loss__burn_in=2, loss__trace_length=6,
        loss__n_step=2, loss__target_every=50, replay__min_size=100,
        replay__gradient_steps=2), 4.4),
}
# One seed of each of these is in `scripts/test`.
ESSENTIAL = ('impala_catch', 'ppo_cartpole', 'apex_catch', 'ppo_pendulum', 'ppo_cnn',
             'pqn_cartpole', 'sac_pendulum', 'td3_pendulum', 'dqn_doors')


@functools.cache
def _run_of(name):
  """Returns the Run of a case, compiled once for all seeds."""
  module, fields, _ = CASES[name]
  # One segment, so that all of them learn from the same number of episodes.
  return fresh(changed(module.get_config().to_dict(), env__renew_every_updates=0, **fields))


pytestmark = pytest.mark.as_shipped  # running takes longer than compiling

RUNS = [pytest.param(name, seed, marks=[] if name in ESSENTIAL and seed == 1 else pytest.mark.full)
        for name in CASES for seed in ((1,) if name == 'ppo_pong' else (1, 2, 3))]
RUNS[0].marks.append(pytest.mark.quick)


def mean_return(name, seed):
  """Trains; returns the mean return of the last 100 episodes."""
  run = _run_of(name)
  run = dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, seed=seed))
  returns = collections.deque(maxlen=100)

  def report(item):
    metrics = jax.device_get(item.metrics)
    for i in range(item.count):
      episodes = jax.tree.map(lambda x, i=i: x[i], metrics['episodes'])
      returns.extend(episodes.episode_return[episodes.ended])

  state = run.learner.allocate(run.initial_state())
  with build.segment(run, build.Snapshot(state), 10**6, report) as segment:
    loops.run(segment.workers)
  assert len(returns) == 100
  return sum(returns) / 100


@pytest.mark.parametrize('name, seed', RUNS)
def test_learns(name, seed):
  assert mean_return(name, seed) >= CASES[name][-1]


@pytest.mark.full
@pytest.mark.parametrize('name', [name for name in CASES if name.endswith('_doors')])
def test_without_the_mask_the_same_agent_learns_less_in_the_same_steps(name, monkeypatch):
  """The mask is a part of its observation then, so it can learn what is illegal."""
  module, fields, threshold = CASES[name]
  monkeypatch.setitem(CASES, f'{name}_unmasked', (
      module, dict(fields, env__action_mask=''), None))
  assert mean_return(f'{name}_unmasked', 1) < threshold


@pytest.mark.full
def test_an_mlp_of_that_size_does_not_learn_what_a_cnn_learns(monkeypatch):
  """So `ppo_cnn` is a test of convolutions."""
  mlp = dict(experiment.config('ppo', 'mlp', 'adam').network.to_dict(), hidden=(256, 256))
  monkeypatch.setitem(CASES, 'ppo_mlp', (ppo_cartpole, dict(SHAPES, network=mlp), None))
  assert mean_return('ppo_mlp', 1) < 0.2


def test_several_seeds_at_once_learn(tmp_path):
  result = processes.run(processes.command(
      '--config=ppo_cartpole.py', '--config.env.task=gymnax:CartPole-v1', '--num_seeds=3',
      '--config.total_steps=200_000', f'--workdir={tmp_path}'))
  assert result.returncode == 0, result.stderr
  for seed in (1, 2, 3):
    *_, last = (tmp_path / f'seed{seed}' / 'metrics.jsonl').read_text().splitlines()
    assert json.loads(last)['episode_return'] >= 300
