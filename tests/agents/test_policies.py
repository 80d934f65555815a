"""Policies against SciPy, sampling and quadrature by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from podracer_jit.agents import policies

LOW, HIGH = np.float32([-1.0, -0.4, 0.0]), np.float32([1.0, 0.4, 3.0])
MEAN, LOG_STD = np.float32([[0.3, -2.0, 5.0], [0.0, 0.1, -0.2]]), np.float32([0.0, -1.0, 0.7])
DIST = jnp.concatenate([MEAN, np.broadcast_to(LOG_STD, MEAN.shape)], axis=-1)


CONTINUOUS = [name for name, family in policies.FAMILIES.items()
              if not family.discrete and family.reads == policies.DISTRIBUTION]


@pytest.mark.parametrize('name', CONTINUOUS)
def test_density_and_samples_are_the_normal_ones(name):
  policy = policies.FAMILIES[name].make(LOW, HIGH)
  assert policy.dist_size == 6 and policy.action_shape == (3,)
  action = np.float32([[0.0, -1.9, 7.0], [3.0, 0.1, -0.5]])
  expected = stats.norm(MEAN, np.exp(LOG_STD)).logpdf(action).sum(axis=-1)
  assert_allclose(policy.log_prob(DIST, action), expected, rtol=1e-5)
  drawn = jax.vmap(lambda key: policy.sample(key, DIST))(jax.random.split(jax.random.key(0), 20000))
  assert_allclose(drawn.mean(axis=0), MEAN, atol=0.06)
  assert_allclose(drawn.std(axis=0), np.tile(np.exp(LOG_STD), (2, 1)), rtol=0.03)
  assert_array_equal(policy.mode(DIST), MEAN)


@pytest.mark.parametrize('name', ['gaussian', 'scaled_gaussian'])
def test_entropy_is_the_normal_one(name):
  policy = policies.FAMILIES[name].make(LOW, HIGH)
  expected = stats.norm(MEAN, np.exp(LOG_STD)).entropy().sum(axis=-1)
  assert_allclose(policy.entropy(DIST), expected, rtol=1e-6)


def test_entropy_of_a_squashed_one_is_that_of_its_output():
  """Against the mean of -log p(tanh(u)) over drawn u, the change of variables written out."""
  policy = policies.tanh_gaussian(LOW, HIGH)
  mean, std = np.array([0.4, -1.0]), np.array([0.5, 1.2])
  dist = jnp.float32([*mean, *np.log(std)])
  u = np.random.default_rng(0).normal(mean, std, size=(400_000, 2))
  log_p = stats.norm(mean, std).logpdf(u) - np.log(1 - np.tanh(u) ** 2)
  assert_allclose(policy.entropy(dist), -log_p.sum(axis=-1).mean(), atol=0.01)
  far = policy.entropy(jnp.float32([50.0, 0.0]))
  assert jnp.isfinite(far) and far < -90


def test_tasks_get_actions_within_their_bounds():
  action = np.float32([[0.5, -3.0, 0.2], [9.0, 0.1, -0.5]])
  gaussian, scaled, squashed = (make(LOW, HIGH).to_env(action)
                                for make in (policies.FAMILIES[name].make for name in CONTINUOUS))
  assert_allclose(gaussian, [[0.5, -0.4, 0.2], [1.0, 0.1, 0.0]])
  assert_allclose(scaled, [[0.5, -0.4, 1.8], [1.0, 0.04, 0.75]], rtol=1e-6)
  assert_allclose(squashed, (LOW + HIGH) / 2 + (HIGH - LOW) / 2 * np.tanh(action), rtol=1e-5)


@pytest.mark.quick
def test_a_categorical_mode_is_the_likeliest():
  policy = policies.categorical(4)
  logits = jnp.float32([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]])
  assert_array_equal(policy.mode(logits), [1, 0])
  assert policy.mode(logits).dtype == policy.action_dtype == np.int32
