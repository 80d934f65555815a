"""PQN compared with plain NumPy, with numbers by hand, and with what it must hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit import losses, testing
from podracer_jit.experiment.resolve import resolve
from podracer_jit.losses.algorithm import Batch
from podracer_jit.numerics import counters
from podracer_jit.types import Rollout
from tests import reference
from tests.agents.test_recurrent import gru
from tests.runs import changed, prepared, run, small

STEPS = 13
RECURRENT = dict(network__core='gru', network__core_size=16)


def expected_returns(value, reward, ends, discount, trace_lambda):
  """Returns the lambda returns, by the definition: a mean of returns of all lengths.

  Args:
    value: [T], of the observation after each row.
    reward: [T].
    ends: terminated, truncated and valid, [T] each.
    discount: gamma.
    trace_lambda: lambda.
  """
  terminated, truncated, _ = ends
  returns = np.zeros(len(reward))
  for first in range(len(reward)):
    total, weight, factor, mean = 0.0, 1.0, 1.0, 0.0
    for t in range(first, len(reward)):
      total += factor * reward[t]
      factor *= discount * (not terminated[t])
      last = terminated[t] or truncated[t] or t == len(reward) - 1
      mean += weight * (1.0 if last else 1 - trace_lambda) * (total + factor * value[t])
      weight *= trace_lambda
      if last:
        break
    returns[first] = mean
  return returns


@pytest.mark.parametrize('trace_lambda', [0.0, 0.65, 1.0])
@pytest.mark.parametrize('seed', range(6))
def test_lambda_returns_are_means_of_returns_of_all_lengths(seed, trace_lambda):
  rng = np.random.default_rng(seed)
  ends = reference.random_ends(rng, STEPS, carried=seed % 2 == 1, ends_last=seed % 4 > 1)
  terminated, truncated, valid = ends
  value, reward = rng.normal(size=(2, STEPS))
  got = jax.jit(losses.lambda_returns)(
      np.float32(value), np.float32(reward), np.float32(0.9 * ~terminated),
      terminated | truncated, trace_lambda)
  expected = expected_returns(value, reward, ends, 0.9, trace_lambda)
  assert_allclose(np.array(got)[valid], expected[valid], rtol=1e-5, atol=1e-5)


def test_lambda_returns_by_hand():
  """gamma = lambda = 1/2; the second row truncates its episode.

  G_2 = 4 + 1/2 6 = 7; G_1 = 2 + 1/2 8 = 6, whatever comes later;
  G_0 = 1 + 1/2 (1/2 2 + 1/2 6) = 3
  """
  got = losses.lambda_returns(jnp.float32([2, 8, 6]), jnp.float32([1, 2, 4]),
                              jnp.float32([0.5, 0.5, 0.5]), jnp.array([False, True, False]), 0.5)
  assert_array_equal(got, [3, 6, 7])


def _algorithm(**fields):
  return resolve(changed(small('pqn'), **fields)).algorithm


def test_the_loss_regresses_valid_rows_to_their_targets():
  algorithm = _algorithm()
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  rng = np.random.default_rng(0)
  obs = rng.normal(size=(1, 5, 4)).astype(np.float32)
  action = np.int32([[0, 1, 1, 0, 1]])
  valid = np.array([[True, True, False, True, False]])
  target = rng.normal(size=(1, 5)).astype(np.float32)
  q = np.array(algorithm.network.apply(state.params, obs)[0])
  error = (target - np.take_along_axis(q, action[..., None], -1)[..., 0])[valid]

  batch = Batch(_rows(obs, action, valid), target, None, jnp.float32(3), None)
  loss, aux = algorithm.loss(state.params, state, batch, jax.random.key(2))
  assert_allclose(loss, 0.5 * np.sum(error ** 2) / 3, rtol=1e-5)
  assert_allclose(aux.terms['abs_td_error'], np.abs(error).sum(), rtol=1e-5)
  assert aux.valid == 3


def test_the_gradient_has_the_slopes_of_the_loss():
  """Compares with finite differences of the loss by NumPy, in 64 bits."""
  algorithm = _algorithm(network__hidden=(8,))
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  rng = np.random.default_rng(0)
  obs = rng.normal(size=(1, 9, 4)).astype(np.float32)
  action = rng.integers(0, 2, (1, 9), np.int32)
  valid = rng.random((1, 9)) < 0.7
  target = rng.normal(size=(1, 9)).astype(np.float32)

  def loss(params):
    hidden, head = params['torso']['Dense_0'], params['q']
    x = np.tanh(obs @ hidden['kernel'] + hidden['bias'])
    q = np.take_along_axis(x @ head['kernel'] + head['bias'], action[..., None], -1)[..., 0]
    return 0.5 * np.sum(np.where(valid, target - q, 0) ** 2) / 12

  # The whole minibatch has 12 valid rows.
  batch = Batch(_rows(obs, action, valid), target, None, jnp.float32(12), None)
  grads, _ = jax.jit(algorithm.gradient)(state, batch, jax.random.key(2))
  for _ in range(5):
    direction = jax.tree.map(lambda p: rng.normal(size=p.shape), state.params['params'])
    either = [loss(jax.tree.map(lambda p, d, step=step: np.float64(p) + step * d,
                                state.params['params'], direction)) for step in (1e-6, -1e-6)]
    slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, grads['params'], direction)))
    assert abs(slope) > 1e-2
    assert_allclose(slope, (either[0] - either[1]) / 2e-6, rtol=1e-3)


def _recurrent_case():
  """Returns a recurrent algorithm, a state, whole environments, and their action values by NumPy.

  The last are a function of weights that gives those of T + 1 rows of each environment.
  """
  algorithm = _algorithm(network__hidden=(6,), network__core='gru', network__core_size=5)
  rng = np.random.default_rng(3)
  shapes = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  params = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), shapes.params)
  steps, envs = 8, 3  # `small` has rollouts of 8 steps
  ends = [reference.random_ends(rng, steps, carried=i == 1, ends_last=i == 2)
          for i in range(envs)]
  terminated, truncated, valid = (np.stack(x, axis=1) for x in zip(*ends, strict=True))
  rollout = Rollout(
      obs=rng.normal(size=(steps + 1, envs, 4)).astype(np.float32),
      action=rng.integers(0, 2, (steps, envs), np.int32), extras=None,
      reward=rng.normal(size=(steps, envs)).astype(np.float32), terminated=terminated,
      truncated=truncated, valid=valid, episodes=None,
      carry=rng.normal(size=(1, envs, 5)).astype(np.float32))

  def q(w, n):
    state = np.float64(rollout.carry[0, n])
    rows = []
    for t in range(steps + 1):
      layer = w['torso']['Dense_0']
      x = np.tanh(rollout.obs[t, n] @ layer['kernel'] + layer['bias'])
      state, y = gru(w['core'], state, x)
      rows.append(y @ w['q']['kernel'] + w['q']['bias'])
      if t < steps and not valid[t, n]:
        state = np.zeros(5)
    return np.array(rows)

  return algorithm, shapes._replace(params=params), rollout, q


def test_a_recurrent_network_regresses_whole_environments_to_their_returns():
  algorithm, state, rollout, q = _recurrent_case()
  weights = jax.tree.map(np.float64, state.params['params'])
  got = np.asarray(algorithm.targets(state, rollout))
  expected = np.zeros_like(got)
  for n in range(3):
    ends = [x[:, n] for x in (rollout.terminated, rollout.truncated, rollout.valid)]
    expected[:, n] = expected_returns(q(weights, n).max(axis=-1)[1:], rollout.reward[:, n], ends,
                                      algorithm.discount, algorithm.trace_lambda)
  valid = rollout.valid
  assert_allclose(got[valid], expected[valid], rtol=1e-4, atol=1e-4)

  def loss(w):
    taken = np.stack([np.take_along_axis(q(w, n)[:-1], rollout.action[:, n, None], -1)[:, 0]
                      for n in range(3)], axis=1)
    return 0.5 * np.sum(np.where(valid, got - taken, 0) ** 2) / 30

  batch = Batch(rollout, got, None, jnp.float32(30), None)  # 30 valid rows in the whole minibatch
  total, aux = algorithm.loss(state.params, state, batch, jax.random.key(2))
  assert_allclose(total, loss(weights), rtol=1e-4)
  assert aux.valid == valid.sum()
  grads, _ = jax.jit(algorithm.gradient)(state, batch, jax.random.key(2))
  rng = np.random.default_rng(4)
  for _ in range(3):
    direction = jax.tree.map(lambda p: rng.normal(size=p.shape), weights)
    either = [loss(jax.tree.map(lambda p, d, step=step: p + step * d, weights, direction))
              for step in (1e-6, -1e-6)]
    slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, grads['params'], direction)))
    assert_allclose(slope, (either[0] - either[1]) / 2e-6, rtol=1e-3)


def _rows(obs, action, valid):
  """Returns rows of a rollout, with the fields that the loss reads."""
  zeros = np.zeros(valid.shape, np.float32)
  return Rollout(obs=obs, action=action, extras=None, reward=zeros,
                          terminated=~valid, truncated=~valid, valid=valid, episodes=None)


def test_epsilon_falls_and_evaluations_are_greedy():
  algorithm = _algorithm(loss__epsilon='linear:1:0.1:0.5', total_steps=1000)
  for steps, epsilon in ((0, 1.0), (250, 0.55), (500, 0.1), (900, 0.1)):
    done = counters.zero(1000) + steps
    assert_allclose(algorithm.at(done).exploration(3), [epsilon] * 3, rtol=1e-5)

  always = _algorithm(loss__epsilon=1.0)
  params = always.init(jax.random.key(0))
  obs = np.repeat(np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32), 2000, axis=0)
  valid = np.ones(len(obs), bool)
  key = jax.random.key(1)
  drawn = always.act(params, obs, None, valid, key, always.exploration(len(obs))).action
  greedy = always.act(params, obs, None, valid, None, None).action
  assert 900 < np.sum(drawn == 0) < 1100 and len(np.unique(greedy)) == 1


@pytest.mark.parametrize('fields', [{}, RECURRENT, dict(normalise__obs=True,
                                                        normalise__reward=True)])
def test_it_holds_what_an_algorithm_must_hold(fields):
  assert testing.check(losses.PQN, changed(small('pqn'), **fields))


def test_layer_norm_makes_layers_independent_of_the_scale_of_their_input():
  torso = prepared(changed(small('pqn'), network__layer_norm=True,
                           network__activation='relu')).experiment.algorithm.parts.torso
  obs = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
  params = torso.init(jax.random.key(0), obs)
  assert_allclose(torso.apply(params, obs), torso.apply(params, 1000 * obs), rtol=1e-3, atol=1e-3)
  plain = dataclasses.replace(torso, layer_norm=False)
  params = plain.init(jax.random.key(0), obs)
  assert_allclose(plain.apply(params, 1000 * obs), 1000 * plain.apply(params, obs), rtol=1e-3)


@pytest.mark.parametrize('fields', [{}, RECURRENT])
def test_a_run_is_the_same_in_one_program_and_on_two_devices(fields):
  config = changed(small('pqn', num_grad_shards=2, num_shards=2), **fields)
  of_sync = run(config)[0]
  assert len({params for _, params in of_sync}) == len(of_sync)
  assert run(changed(config, scheme='fused', placement__actor_devices=(0,),
                     placement__learner_devices=(0,)))[0] == of_sync
  assert run(changed(config, placement__actor_devices=(0, 1),
                     placement__learner_devices=(0, 1)))[0] == of_sync
