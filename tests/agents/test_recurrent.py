"""Recurrent cores against NumPy, and their states through real rollouts and whole schemes."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.actor import rollouts
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.agents.networks import MLP, TorsoOptions
from podracer_jit.envs import envpool_envs
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.losses.algorithm import ForActors
from podracer_jit.losses.impala import IMPALA
from tests.made import bound
from tests.runs import changed, run, small

SIZE = 5
FEATURES = 3
STEPS = 7
ENVS = 4


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def gru(w, h, x):
  """1406.1078, section 2.3, with the reset gate where PyTorch has it."""
  def dense(name, x):
    return x @ w[name]['kernel'] + w[name].get('bias', 0)
  r, z = (sigmoid(dense(f'i{g}', x) + dense(f'h{g}', h)) for g in 'rz')
  n = np.tanh(dense('in', x) + r * dense('hn', h))
  h = (1 - z) * n + z * h
  return h, h


def lstm(w, state, x):
  c, h = state
  i, f, g, o = (x @ w[f'i{k}']['kernel'] + h @ w[f'h{k}']['kernel'] + w[f'h{k}']['bias']
                for k in 'ifgo')
  c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
  h = sigmoid(o) * np.tanh(c)
  return (c, h), h


def algorithm_of(core):
  return bound(IMPALA(), torso=MLP(hidden=(6,)), torso_options=TorsoOptions(core, SIZE))


def start(network, obs, valid, seed=0):
  """Returns random parameters and a random carry, none of them near zero."""
  carry = network.initial_carry(ENVS)
  shapes = jax.eval_shape(network.init, jax.random.key(0), obs, carry, valid)
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), (shapes, carry))


@pytest.mark.parametrize('core, step', [('gru', gru), ('lstm', lstm)])
def test_a_core_continues_from_its_state_and_restarts_after_an_invalid_row(core, step):
  rng = np.random.default_rng(1)
  obs = rng.normal(size=(STEPS, ENVS, FEATURES)).astype(np.float32)
  valid = rng.random((STEPS, ENVS)) < 0.7
  network = algorithm_of(core).network
  params, state = start(network, obs, valid)
  dist, value, last = jax.jit(network.apply)(params, obs, state, valid)
  assert dist.shape == (STEPS, ENVS, 2) and value.shape == (STEPS, ENVS)
  w = params['params']
  for t in range(STEPS):
    x = np.tanh(obs[t] @ w['torso']['Dense_0']['kernel'] + w['torso']['Dense_0']['bias'])
    state, y = step(w['core'], state, x)
    assert_allclose(dist[t], y @ w['policy']['kernel'] + w['policy']['bias'], rtol=1e-4, atol=1e-5)
    assert_allclose(value[t], (y @ w['value']['kernel'] + w['value']['bias'])[:, 0], rtol=1e-4,
                    atol=1e-5)
    state = jax.tree.map(lambda s, t=t: np.where(valid[t][:, None], s, 0), state)
  jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-5), last, state)
  assert not valid.all() and valid.any()


@pytest.mark.parametrize('core', ['gru', 'lstm'])
def test_rollouts_carry_the_state_and_store_it_at_their_first_row(core):
  """From the stored state the network gives the values and log-probabilities of the actor."""
  vector_envs = [envpool_envs.EnvPoolVectorEnv('CartPole-v1', {'max_episode_steps': 9},
                                               env_seeds(1, 0, 0, ENVS), 1)]
  algorithm = algorithm_of(core)
  network = algorithm.network
  rollout_program = RolloutProgram(vector_envs)
  try:
    obs = np.zeros((1, ENVS, 4), np.float32)
    params, _ = start(network, obs, np.ones((1, ENVS), bool))
    state = rollouts.initial_state(algorithm, vector_envs, [jax.random.key(0)])
    program = rollout_program.load(
        rollouts.make_rollout(algorithm, vector_envs, STEPS), (ForActors(params), state), (1,))
    rollout_list = []
    for _ in range(4):
      state, (rollout,) = program(ForActors(params), state)
      rollout_list.append(jax.tree.map(np.asarray, rollout))
  finally:
    rollout_program.close()
  for rollout in rollout_list:
    core_state = jax.tree.map(lambda x: x[0], rollout.carry)
    dist, value, _ = network.apply(params, rollout.obs[:-1], core_state, rollout.valid)
    assert_allclose(rollout.extras['value'], value, rtol=1e-4, atol=1e-4)
    assert_allclose(rollout.extras['log_prob'], network.policy.log_prob(dist, rollout.action),
                    rtol=1e-4, atol=1e-4)
  *_, before_last, last = rollout_list
  state_before = jax.tree.map(lambda x: x[0], before_last.carry)
  state_after = network.apply(params, before_last.obs[:-1], state_before, before_last.valid)[2]
  assert_allclose(jax.tree.leaves(last.carry)[0][0],
                  jax.tree.leaves(state_after)[0], rtol=1e-4, atol=1e-5)
  # From an empty state the values would be others, so the stored state matters.
  second = rollout_list[1]
  value_from_empty_state = network.apply(
      params, second.obs[:-1], network.initial_carry(ENVS), second.valid)[1]
  assert abs(value_from_empty_state - second.extras['value']).max() > 0.01
  assert (~np.concatenate([rollout.valid for rollout in rollout_list])).any()


def recurrent(loss, **fields):
  config = small(loss, num_shards=2, num_grad_shards=2, **fields)
  config['network'] |= {'core': 'gru' if loss == 'ppo' else 'lstm', 'core_size': 16}
  return config


@pytest.mark.parametrize('loss', ['ppo', 'impala'])
def test_before_the_first_step_the_learner_agrees_with_the_actors(loss):
  config = changed(recurrent(loss), num_minibatches=1)
  for report in run(config, updates=3)[1]:
    if loss == 'ppo':
      assert abs(report.metrics['approx_kl'][0]) < 1e-6
    else:
      assert_allclose(report.metrics['rho'][0], 1.0, rtol=1e-5)


def test_the_gradient_reaches_back_through_time():
  network = algorithm_of('gru').network
  obs = np.random.default_rng(0).normal(size=(STEPS, ENVS, FEATURES)).astype(np.float32)
  valid = np.ones((STEPS, ENVS), bool)
  valid[3, 1] = False
  params, core = start(network, obs, valid)
  by_obs = jax.grad(lambda obs: network.apply(params, obs, core, valid)[1][-1].sum())(obs)
  assert (abs(by_obs[0, [0, 2, 3]]).max(axis=-1) > 0).all()
  assert_array_equal(by_obs[:4, 1], 0)  # an episode began after row 3
