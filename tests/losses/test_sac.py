"""SAC compared with plain NumPy, and with what it must hold."""

import functools

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit import losses, testing
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import resolve
from podracer_jit.losses.sac import draw
from podracer_jit.numerics import counters
from tests.losses import off_policy
from tests.losses.off_policy import N, mlp
from tests.runs import changed, run, small

config_of = functools.partial(off_policy.config_of, 'sac')


def test_densities_are_those_of_the_squashed_gaussian():
  rng = np.random.default_rng(0)
  mean, log_std = rng.normal(size=(2, 1000, 3))
  action, log_prob = jax.jit(draw)(jax.random.key(0),
                                   np.float32(np.concatenate([mean, log_std], axis=-1)))
  u = np.arctanh(np.float64(action).clip(-1 + 1e-7, 1 - 1e-7))
  expected = (-0.5 * ((u - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
              - np.log(1 - np.tanh(u) ** 2))
  inner = np.all(np.abs(action) < 0.999, axis=-1)
  assert inner.sum() > 300
  assert_allclose(np.array(log_prob)[inner], expected.sum(-1)[inner], rtol=1e-3, atol=1e-3)


def _case():
  """Returns an algorithm, a state whose targets differ, a batch, and the key of its loss."""
  algorithm = resolve(config_of(loss__alpha=0.3)).algorithm
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  state = state.with_target(jax.tree.map(lambda p: 1.1 * p + 0.01, state.target.params))
  return algorithm, state, off_policy.batch(), jax.random.key(2)


def _policy(params, obs, key):
  """Returns actions and densities in 64 bits, with the noise that the key gives."""
  mean, log_std = np.split(mlp(jax.tree.map(np.float64, params), obs), 2, axis=-1)
  log_std = 3.5 * np.tanh(log_std) - 1.5
  noise = np.float64(jax.random.normal(key, mean.shape))
  action = np.tanh(mean + np.exp(log_std) * noise)
  density = -0.5 * noise ** 2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - action ** 2)
  return action, density.sum(axis=-1)


def _losses(params, state, batch, key):
  """Returns the losses, [N] each, and the TD errors, in 64 bits.

  Args:
    params: to differentiate; each loss has the other parts of `state`.
    state: its targets count; the temperature is 0.3.
    batch: the transitions.
    key: of the noise.
  """
  x = batch.items
  key, next_key = jax.random.split(key)
  action, log_prob = _policy(state.params['actor'], x.next_obs, next_key)
  value = off_policy.q(state.target.params, x.next_obs, action).min(0) - 0.3 * log_prob
  error = off_policy.q(params['critic'], x.obs, x.action) - (x.reward + x.discount * value)
  action, log_prob = _policy(params['actor'], x.obs, key)
  q = off_policy.q(state.params['critic'], x.obs, action).min(0)
  fixed = _policy(state.params['actor'], x.obs, key)[1]
  return dict(critic_loss=0.5 * np.square(error).sum(0), actor_loss=0.3 * log_prob - q,
              alpha_loss=-np.exp(np.float64(params['log_alpha'])) * (fixed - 1.0)), error


def test_the_losses_are_those_of_the_paper():
  algorithm, state, batch, key = _case()
  loss, aux = jax.jit(algorithm.loss)(state.params, state, batch, key)
  expected, error = _losses(state.params, state, batch, key)
  for name, value in expected.items():
    assert_allclose(aux.terms[name], value.sum(), rtol=1e-4, err_msg=name)
  assert_allclose(loss, (batch.weight * sum(expected.values())).sum() / N, rtol=1e-4)
  assert_allclose(aux.priority, np.abs(error).max(0), rtol=1e-4)


@pytest.mark.parametrize('part', ['actor', 'critic', 'log_alpha'])
def test_the_gradient_has_the_slopes_of_the_losses(part):
  algorithm, state, batch, key = _case()
  grads, _ = jax.jit(algorithm.gradient)(state, batch, key)
  rng = np.random.default_rng(4)
  for _ in range(5):
    direction = jax.tree.map(lambda p: rng.normal(size=p.shape), state.params[part])

    def loss(step, direction=direction):
      moved = jax.tree.map(lambda p, d: np.float64(p) + step * d, state.params[part], direction)
      expected, _ = _losses({**state.params, part: moved}, state, batch, key)
      return (batch.weight * sum(expected.values())).sum() / N

    slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, grads[part], direction)))
    assert abs(slope) > 1e-3
    assert_allclose(slope, (loss(1e-6) - loss(-1e-6)) / 2e-6, rtol=2e-3)


def test_each_part_has_the_gradient_of_its_own_loss():
  algorithm, state, batch, key = _case()

  def of(part, name):
    def loss(value):
      aux = algorithm.loss({**state.params, part: value}, state,
                           batch._replace(weight=np.ones(N, np.float32)), key)[1]
      return aux.terms[name]
    return jax.jit(jax.grad(loss))(state.params[part])

  flat = batch._replace(weight=np.ones(N, np.float32))
  grads, _ = jax.jit(algorithm.gradient)(state, flat, key)
  for part, name in (('actor', 'actor_loss'), ('critic', 'critic_loss'),
                     ('log_alpha', 'alpha_loss')):
    jax.tree.map(lambda a, b: assert_allclose(N * a, b, rtol=1e-4, atol=1e-5), grads[part],
                 of(part, name))


def test_targets_follow_slowly_and_each_part_has_its_rate():
  algorithm, state, batch, key = _case()
  algorithm = resolve(config_of(loss__alpha_rate=0.0, loss__tau=0.25)).algorithm.at(
      counters.zero(1000))
  grads, aux = algorithm.gradient(state, batch, key)
  after = algorithm.update(state, grads, aux)
  assert after.params['log_alpha'] == state.params['log_alpha']
  jax.tree.map(lambda new, online, old: assert_allclose(new, 0.25 * online + 0.75 * old, rtol=1e-5),
               after.target.params, after.params['critic'], state.target.params)
  assert not np.array_equal(*(jax.tree.leaves(s.params['actor'])[0] for s in (state, after)))


def test_first_actions_are_uniform_and_evaluations_take_the_mean():
  algorithm = resolve(config_of()).algorithm
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  obs = np.zeros((4000, 3), np.float32)
  valid = np.ones(4000, bool)

  def act(steps, key, exploration):
    params = algorithm.acting(state._replace(steps=state.steps + steps))
    return np.array(algorithm.act(params, obs, None, valid, key, exploration).action)[:, 0]

  first = act(63, jax.random.key(3), algorithm.exploration(4000))
  assert_allclose(np.quantile(first, [0.1, 0.5, 0.9]), [-0.8, 0, 0.8], atol=0.06)
  later = act(64, jax.random.key(3), algorithm.exploration(4000))
  assert_array_equal(later, act(0, jax.random.key(3), None))  # as in an evaluation
  assert not np.array_equal(first, later)
  assert len(np.unique(act(0, None, None))) == 1


@pytest.mark.parametrize('loss', ['sac', 'td3'])
def test_actions_are_uniform_as_long_as_the_replay_waits(loss):
  # Copies count as items, so three of each step are 64 items after 22 steps.
  once, thrice = (resolve(changed(off_policy.config_of(loss), replay__copies=copies)).algorithm
                  for copies in (1, 3))
  given = np.full((1000, 1), 0.5, np.float32)

  def is_random(algorithm, steps):
    actions = algorithm.uniform_at_first({'steps': counters.zero(1000) + steps},
                                         jax.random.key(0), given)
    return not np.array_equal(actions, given)

  assert [is_random(once, steps) for steps in (63, 64)] == [True, False]
  assert [is_random(thrice, steps) for steps in (21, 22)] == [True, False]


@pytest.mark.parametrize('loss', ['sac', 'td3'])
def test_images_are_refused(loss):
  config = changed(small(loss, 'CarRacing-v3', 'nature_cnn'), num_minibatches=1)
  with pytest.raises(ValueError, match='network.name: NatureCNN is for images, and critics read '):
    build.check_network(resolve(config))


def test_discrete_actions_are_refused():
  with pytest.raises(ValueError, match='loss.name: sac wants continuous actions; those of Cart'):
    resolve(changed(config_of(), env__task='CartPole-v1'))


def test_it_holds_what_an_algorithm_must_hold():
  assert testing.check(losses.SAC, config_of())


def test_a_run_is_the_same_in_one_program_and_on_two_devices():
  config = config_of(num_grad_shards=2, num_shards=2)
  of_sync = run(config)[0]
  assert len({params for _, params in of_sync}) > 3
  assert run(changed(config, scheme='fused', placement__actor_devices=(0,),
                     placement__learner_devices=(0,)))[0] == of_sync
  assert run(changed(config, placement__actor_devices=(0, 1),
                     placement__learner_devices=(0, 1)))[0] == of_sync
