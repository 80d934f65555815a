"""The example RND compared with plain NumPy, its moments, and its task."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from examples.rnd import RND, DeepSea
from podracer_jit import testing
from podracer_jit.agents import running_moments
from podracer_jit.agents.running_moments import Moments
from podracer_jit.experiment import build, trial
from podracer_jit.experiment.resolve import resolve
from podracer_jit.losses import PPO
from podracer_jit.losses.algorithm import Batch
from podracer_jit.numerics import counters
from podracer_jit.types import Rollout
from tests import reference
from tests.runs import changed, fresh, run, small
from tests.tiers import essential

NAME = 'examples.rnd:RND'
T, N = 7, 3
DISCOUNT, LAMBDA = 0.9, 0.8


def config_of(name=NAME, **fields):
  """Returns a small config with an embedding of five numbers."""
  return changed(small(name), network__hidden=(8,), loss__embedding=5, **fields)


def _case():
  """Returns an algorithm, a state with moments, and a rollout in which episodes end."""
  algorithm = resolve(config_of(
      loss__discount=0.95, loss__gae_lambda=LAMBDA, loss__intrinsic_discount=DISCOUNT,
      loss__extrinsic_coef=1.7, loss__intrinsic_coef=0.6, loss__value_coef=0.4,
      loss__predictor_share=0.5)).algorithm.at(counters.zero(1000))
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  rng = np.random.default_rng(1)
  moments = {'obs': Moments(*map(np.float32, (10, rng.normal(size=4), 10 * rng.random(4)))),
             'intrinsic_return': Moments(*map(np.float32, (10, 0.3, 2.5)))}
  state = state._replace(params=state.params | {'moments': moments})
  ends = [reference.random_ends(rng, T, carried=env == 1) for env in range(N)]
  terminated, truncated, valid = (np.stack(x, axis=1) for x in zip(*ends, strict=True))
  assert terminated[:-1].any() and truncated[:-1].any() and not valid.all()
  extras = {'log_prob': np.float32(-rng.random((T, N))),
            'value': np.float32(rng.normal(size=(T, N)))}
  return algorithm, state, Rollout(
      obs=np.float32(3 * rng.normal(size=(T + 1, N, 4))),
      action=rng.integers(2, size=(T, N)).astype(np.int32), extras=extras,
      reward=np.float32(rng.normal(size=(T, N)) * valid), terminated=terminated,
      truncated=truncated, valid=valid, episodes=None)


def _dense(layer, x):
  return x @ np.float64(layer['kernel']) + np.float64(layer['bias'])


def _bonus(state, obs):
  """Returns the mean squared errors of the predictor, in 64 bits (sections 2.2 and 2.4)."""
  moments = state.params['moments']['obs']
  std = np.sqrt(np.float64(moments.m2) / moments.count)
  x = ((obs - np.float64(moments.mean)) / std).clip(-5, 5)
  assert 0 < np.mean(np.abs(x) == 5) < 0.9
  predictor = state.params['predictor']['params']
  random = state.target.params['params']
  expected = _dense(random['Dense_0'], np.tanh(_dense(random['torso']['Dense_0'], x)))
  y = np.tanh(_dense(predictor['torso']['Dense_0'], x))
  for layer in ('Dense_0', 'Dense_1'):
    y = np.maximum(_dense(predictor[layer], y), 0)
  return np.mean((_dense(predictor['Dense_2'], y) - expected) ** 2, axis=-1)


def test_the_bonus_standardises_images_of_bytes_by_their_moments():
  algorithm = resolve(changed(small(NAME, 'Pong-v5', 'nature_cnn'), loss__embedding=5)).algorithm
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  rng = np.random.default_rng(2)
  obs = rng.integers(256, size=(2, 6, *algorithm.parts.spec.obs_shape)).astype(np.uint8)
  rows = np.float64(obs) / 255
  moments = Moments(np.float32(12), *np.float32((rows.mean((0, 1)), 12 * rows.var((0, 1)))))
  state = state._replace(params=state.params | {
      'moments': state.params['moments'] | {'obs': moments}})
  x = ((rows - moments.mean) / np.sqrt(moments.m2 / 12)).clip(-5, 5).reshape(12, *obs.shape[2:])
  assert np.mean(np.abs(x) == 5) < 0.01
  error = (algorithm.predictor.apply(state.params['predictor'], np.float32(x))
           - algorithm.random.apply(state.target.params, np.float32(x)))
  assert_allclose(algorithm.bonus(state.params, state, obs).ravel(),
                  np.mean(np.square(error), axis=-1), rtol=1e-4)


def _intrinsic_value(state, obs):
  params = state.params['params']
  features = np.tanh(_dense(params['torso']['Dense_0'], np.float64(obs)))
  return _dense(params['heads_intrinsic_value']['Dense_0'], features)[..., 0]


def test_the_targets_are_those_of_the_paper():
  algorithm, state, rollout = _case()
  targets = jax.jit(algorithm.targets)(state, rollout)
  bonus = _bonus(state, rollout.obs[1:])
  value = _intrinsic_value(state, rollout.obs)
  moments = state.params['moments']['intrinsic_return']
  std = np.sqrt(moments.m2 / moments.count)

  # Episodes do not matter.
  returns, advantage = np.zeros((2, T, N))
  total, trace = value[-1] * std, 0.0
  for t in reversed(range(T)):
    returns[t] = total = bonus[t] + DISCOUNT * total
    delta = bonus[t] / std + DISCOUNT * value[t + 1] - value[t]
    advantage[t] = trace = delta + DISCOUNT * LAMBDA * trace
  # Compiled, as the bits of islands are promised for programs.
  of_rewards = jax.jit(functools.partial(PPO.targets, algorithm))(state, rollout)
  assert_allclose(targets['intrinsic_return'], returns, rtol=1e-4)
  assert_allclose(targets['intrinsic_target'], advantage + value[:-1], rtol=1e-4)
  assert_allclose(targets['advantage'], 1.7 * of_rewards['advantage'] + 0.6 * advantage, rtol=1e-4,
                  atol=1e-5)
  assert_array_equal(targets['value_target'], of_rewards['value_target'])


def _batch(algorithm, state, rollout):
  """Returns a minibatch of one row of each environment, one of them invalid."""
  targets = jax.jit(algorithm.targets)(state, rollout)
  rows = jax.tree.map(lambda x: x[2:3], rollout._replace(obs=rollout.obs[:-1]))
  valid = rows.valid.copy()
  valid[0, 1] = False
  return Batch(rows._replace(valid=valid), jax.tree.map(lambda x: x[2:3], targets), None,
               jnp.float32(2), (jnp.float32(0.1), jnp.float32(1.3)))


def _total(params, algorithm, state, batch, learned):
  """Returns the loss of a minibatch in 64 bits."""
  rows, targets = batch.items, jax.tree.map(np.float64, batch.targets)
  network = params['params']
  features = np.tanh(_dense(network['torso']['Dense_0'], np.float64(rows.obs[0])))
  mean, std = map(float, batch.statistics)
  of_ppo, _ = reference.ppo_objective(
      _dense(network['policy'], features), _dense(network['value'], features)[:, 0],
      rows.action[0], np.float64(rows.extras['log_prob'][0]), np.float64(rows.extras['value'][0]),
      (targets['advantage'][0] - mean) / std, targets['value_target'][0], rows.valid[0],
      algorithm.clip, algorithm.clip_value, algorithm.value_coef, algorithm.entropy_coef)
  moved = state._replace(params=params)
  error = _intrinsic_value(moved, rows.obs) - targets['intrinsic_target']
  # All rows count here, also those after the end of an episode.
  more = 0.4 * np.sum(error ** 2) / 2 + np.sum(_bonus(moved, rows.obs)[learned]) / 0.5
  return (of_ppo + more) / 2


@pytest.mark.parametrize('part', ['params', 'predictor'])
def test_the_gradient_has_the_slopes_of_the_losses(part):
  algorithm, state, rollout = _case()
  batch = _batch(algorithm, state, rollout)
  key = jax.random.key(3)
  learned = np.array(jax.random.bernoulli(key, 0.5, (1, N)))
  grads, _ = jax.jit(algorithm.gradient)(state, batch, key)
  rng = np.random.default_rng(4)
  direction = jax.tree.map(lambda p: rng.normal(size=p.shape), state.params[part])

  def loss(step):
    moved = jax.tree.map(lambda p, d: np.float64(p) + step * d, state.params[part], direction)
    return _total(state.params | {part: moved}, algorithm, state, batch, learned)

  slope = sum(jax.tree.leaves(jax.tree.map(
      lambda g, d: np.vdot(np.float64(g), d), grads[part], direction)))
  assert abs(slope) > 1e-3
  assert_allclose(slope, (loss(1e-6) - loss(-1e-6)) / 2e-6, rtol=2e-3)


def test_the_losses_are_those_of_the_paper():
  algorithm, state, rollout = _case()
  batch = _batch(algorithm, state, rollout)
  rows, row_targets, valid = batch.items, batch.targets, batch.items.valid
  key = jax.random.key(3)
  loss, aux = jax.jit(algorithm.loss)(state.params, state, batch, key)
  of_ppo, _ = PPO.loss(algorithm, state.params, state, batch, key)
  bonus = _bonus(state, rows.obs)
  error = _intrinsic_value(state, rows.obs) - row_targets['intrinsic_target']
  learned = np.array(jax.random.bernoulli(key, 0.5, (1, N)))
  assert 0 < learned.sum() < N
  # All rows count here, also those after the end of an episode.
  more = 0.4 * np.sum(error ** 2) / 2 + np.sum(bonus[learned]) / 0.5
  assert_allclose(loss, of_ppo + more / 2, rtol=1e-4)
  assert_allclose(aux.terms['bonus'], bonus[valid].sum(), rtol=1e-4)
  assert_allclose(aux.terms['intrinsic_value_loss'], (error[valid] ** 2).sum() / 2, rtol=1e-4)


def test_only_the_predictor_learns_from_the_bonus():
  algorithm, state, rollout = _case()
  random = state.target.params
  grads = jax.grad(lambda p: jnp.sum(algorithm.bonus(p, state, rollout.obs)))(state.params)
  assert all(np.any(g) for g in jax.tree.leaves(grads['predictor']))
  assert not any(np.any(g) for g in jax.tree.leaves(grads['params']))
  other = algorithm.first_state(jax.random.key(2), jax.random.key(1)).target.params
  kernels = [p['params']['Dense_0']['kernel'] for p in (random, other)]
  assert not np.any(kernels[0] == kernels[1])
  assert 'predictor' not in algorithm.acting(state)


def test_moments_are_of_all_valid_rows_since_the_beginning():
  _, reports, state = run(config_of(total_steps=6 * 64))
  moments = state.params['moments']
  rows = sum(int(np.squeeze(report.metrics['valid'])) for report in reports)
  assert moments['obs'].count == moments['intrinsic_return'].count == rows
  assert moments['intrinsic_return'].mean > 0 and np.all(moments['obs'].m2 > 0)


@dataclasses.dataclass(frozen=True)
class KeepsOther(RND):
  def init(self, key):
    params = super().init(key)
    return params | {'moments': params['moments'] | {'other': running_moments.initial(())}}


@dataclasses.dataclass(frozen=True)
class KeepsReturns(RND):
  def init(self, key):
    params = super().init(key)
    return params | {'moments': params['moments'] | {'returns': running_moments.initial(())}}


def test_moments_that_nothing_measures_are_one_line():
  with pytest.raises(ValueError) as error:
    trial.check(fresh(config_of(f'{__name__}:KeepsOther')))
  assert ("targets of tests.losses.test_rnd:KeepsOther: must return a dict with 'other', as "
          "params['moments'] of init has it") in str(error.value)
  with pytest.raises(ValueError, match=r"must return params\['moments'\] with nothing"):
    fresh(config_of(f'{__name__}:KeepsReturns'))


@pytest.mark.parametrize('fields', essential(
    [{}, {'normalise__obs': True, 'normalise__reward': True}], {}))
def test_it_holds_what_an_algorithm_must_hold(fields):
  assert testing.check(RND(embedding=8), changed(small('ppo'), **fields))


def test_a_run_is_the_same_in_one_program_and_on_two_devices():
  config = config_of(num_grad_shards=2, num_shards=2)
  of_sync = run(config)[0]
  assert len({params for _, params in of_sync}) == len(of_sync)
  assert run(changed(config, scheme='fused', placement__actor_devices=(0,),
                     placement__learner_devices=(0,)))[0] == of_sync
  assert run(changed(config, placement__actor_devices=(0, 1),
                     placement__learner_devices=(0, 1)))[0] == of_sync


def test_the_treasure_is_at_the_end_of_all_steps_to_the_right():
  env = DeepSea(size=4)
  for wrong in (None, 0, 3):
    obs, state = env.reset(None)
    assert obs[0, 0] == 1 and obs.sum() == 1
    total = 0.0
    for t in range(4):
      right = env.right[state.row, state.column]
      obs, state, reward, ended, _, _ = env.step(None, state, 1 - right if t == wrong else right)
      total += float(reward)
      assert ended == (t == 3) and obs.sum() == (t < 3)
    assert_allclose(total, 0.99 if wrong is None else -0.0075, rtol=1e-5)


def test_a_network_that_takes_observations_apart_is_refused():
  """`image_and_vector` turns standardised observations back into whole numbers."""
  config = small('examples.rnd:RND', 'MiniGrid-Empty-5x5-v0', 'image_and_vector')
  with pytest.raises(ValueError, match='network.name: ImageAndVector takes observations apart'):
    build.check_network(resolve(config))
