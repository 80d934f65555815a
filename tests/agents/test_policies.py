"""Policies against SciPy, sampling and quadrature by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from podracer_jit.agents import policies

LOW = np.float32([-1.0, -0.4, 0.0])
HIGH = np.float32([1.0, 0.4, 3.0])
MEAN = np.float32([[0.3, -2.0, 5.0], [0.0, 0.1, -0.2]])
LOG_STD = np.float32([0.0, -1.0, 0.7])
DIST = jnp.concatenate([MEAN, np.broadcast_to(LOG_STD, MEAN.shape)], axis=-1)


CONTINUOUS = [name for name, family in policies.FAMILIES.items()
              if not family.discrete and family.reads == policies.DISTRIBUTION]


@pytest.mark.parametrize('name', CONTINUOUS)
def test_density_and_samples_are_those_of_a_normal_distribution(name):
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
def test_entropy_is_that_of_a_normal_distribution(name):
  policy = policies.FAMILIES[name].make(LOW, HIGH)
  expected = stats.norm(MEAN, np.exp(LOG_STD)).entropy().sum(axis=-1)
  assert_allclose(policy.entropy(DIST), expected, rtol=1e-6)


@pytest.mark.parametrize('name', CONTINUOUS)
def test_divergences_are_integrals_of_densities(name):
  policy = policies.FAMILIES[name].make(LOW[:1], HIGH[:1])
  p, q = np.float32([0.3, -0.4]), np.float32([-0.2, 0.5])
  x = np.linspace(-8, 8, 20_001, dtype=np.float32)
  log_p, log_q = (np.float64(policy.log_prob(np.broadcast_to(dist, (len(x), 2)), x[:, None]))
                  for dist in (p, q))
  assert_allclose(policy.kl(p, q), np.trapezoid(np.exp(log_p) * (log_p - log_q), x), rtol=1e-4)
  assert_allclose(policy.kl(p, p), 0.0, atol=1e-6)


@pytest.mark.parametrize('policy, actions', [
    (policies.categorical(4), np.arange(4, dtype=np.int32)),
    (policies.product_of_categoricals((2, 3)),
     np.int32([[i, j] for i in range(2) for j in range(3)]))])
def test_divergences_are_sums_over_all_actions(policy, actions):
  p, q = np.random.default_rng(0).normal(size=(2, policy.dist_size)).astype(np.float32)
  log_p, log_q = (np.float64(policy.log_prob(np.broadcast_to(
      dist, (len(actions), policy.dist_size)), actions)) for dist in (p, q))
  assert_allclose(policy.kl(p, q), np.sum(np.exp(log_p) * (log_p - log_q)), rtol=1e-5)


@pytest.mark.parametrize('make', [policies.scaled_gaussian, policies.tanh_gaussian,
                                  policies.deterministic])
def test_bounds_whose_distance_is_no_float_are_refused(make):
  largest = np.finfo(np.float32).max
  with pytest.raises(ValueError, match='too far apart to scale to'):
    make(np.array([-largest]), np.array([largest]))


def test_entropy_of_tanh_gaussian_is_that_of_the_squashed_action():
  """Compares with the mean of -log p(tanh(u)) over drawn u; log p has the change of variables."""
  policy = policies.tanh_gaussian(LOW, HIGH)
  mean = np.array([0.4, -1.0])
  std = np.array([0.5, 1.2])
  dist = jnp.float32([*mean, *np.log(std)])
  u = np.random.default_rng(0).normal(mean, std, size=(400_000, 2))
  log_p = stats.norm(mean, std).logpdf(u) - np.log(1 - np.tanh(u) ** 2)
  assert_allclose(policy.entropy(dist), -log_p.sum(axis=-1).mean(), atol=0.01)
  far = policy.entropy(jnp.float32([50.0, 0.0]))
  assert jnp.isfinite(far) and far < -90


def test_actions_for_the_task_are_within_its_bounds():
  action = np.float32([[0.5, -3.0, 0.2], [9.0, 0.1, -0.5]])
  gaussian, scaled, squashed = (make(LOW, HIGH).to_env(action)
                                for make in (policies.FAMILIES[name].make for name in CONTINUOUS))
  assert_allclose(gaussian, [[0.5, -0.4, 0.2], [1.0, 0.1, 0.0]])
  assert_allclose(scaled, [[0.5, -0.4, 1.8], [1.0, 0.04, 0.75]], rtol=1e-6)
  assert_allclose(squashed, (LOW + HIGH) / 2 + (HIGH - LOW) / 2 * np.tanh(action), rtol=1e-5)


@pytest.mark.parametrize('name', [name for name, family in policies.FAMILIES.items()
                                  if not family.discrete])
def test_no_action_for_the_task_exceeds_a_bound_by_rounding(name):
  low, high = np.sort(np.random.default_rng(0).normal(size=(2, 5000)).astype(np.float32), axis=0)
  policy = policies.FAMILIES[name].make(low, high)
  ends = np.float32([[-1], [1]]) * (1 if policy.log_prob is None else 9)
  lowest, highest = np.asarray(policy.to_env(jnp.broadcast_to(ends, (2, 5000))))
  if name != 'gaussian':
    assert ((high + low) / 2 + (high - low) / 2 > high).any()
  assert_array_equal(np.maximum(lowest, low), lowest)
  assert_array_equal(np.minimum(highest, high), highest)
  assert_allclose(lowest, np.clip(-9, low, high) if name == 'gaussian' else low, atol=1e-6)


@pytest.mark.quick
def test_the_mode_of_a_categorical_is_its_likeliest_action():
  policy = policies.categorical(4)
  logits = jnp.float32([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]])
  assert_array_equal(policy.mode(logits), [1, 0])
  assert policy.mode(logits).dtype == policy.action_dtype == np.int32


CHOICES = (2, 4, 1, 3)
LOGITS = np.random.default_rng(5).normal(size=(3, 2, sum(CHOICES))).astype(np.float32)


def probabilities():
  """Returns the probabilities of each element, [3, 2, choices], in float64."""
  parts = np.split(np.exp(LOGITS.astype(np.float64)), np.cumsum(CHOICES)[:-1], axis=-1)
  return [part / part.sum(axis=-1, keepdims=True) for part in parts]


def test_a_product_of_categoricals_has_the_probabilities_of_independent_choices():
  """Compares with a table of the probabilities of all 24 actions."""
  policy = policies.product_of_categoricals(CHOICES)
  assert (policy.dist_size, policy.action_shape, policy.action_dtype) == (10, (4,), np.int32)
  chances = probabilities()
  total = 0.0
  entropy = 0.0
  for action in np.ndindex(CHOICES):
    chance = np.prod([p[..., a] for p, a in zip(chances, action, strict=True)], axis=0)
    actions = np.broadcast_to(np.int32(action), (3, 2, 4))
    assert_allclose(policy.log_prob(LOGITS, actions), np.log(chance), rtol=1e-5, atol=1e-6)
    total += chance
    entropy -= chance * np.log(chance)
  assert_allclose(total, 1, rtol=1e-9)
  assert_allclose(policy.entropy(LOGITS), entropy, rtol=1e-5)


def test_a_product_samples_with_its_probabilities_and_its_mode_is_the_likeliest():
  policy = policies.product_of_categoricals(CHOICES)
  chances = probabilities()
  drawn = jax.vmap(lambda key: policy.sample(key, LOGITS))(
      jax.random.split(jax.random.key(0), 20000))
  assert drawn.shape == (20000, 3, 2, 4) and drawn.dtype == np.int32
  for i, chance in enumerate(chances):
    for choice in range(CHOICES[i]):
      assert_allclose((drawn[..., i] == choice).mean(axis=0), chance[..., choice], atol=0.02)
  # The elements are drawn independently.
  joint_frequency = ((drawn[..., 0] == 0) & (drawn[..., 1] == 0)).mean(axis=0)
  assert_allclose(joint_frequency, chances[0][..., 0] * chances[1][..., 0], atol=0.02)
  mode = policy.mode(LOGITS)
  assert mode.dtype == np.int32
  assert_array_equal(mode, np.stack([p.argmax(axis=-1) for p in chances], axis=-1))


@pytest.mark.quick
def test_a_product_of_one_categorical_equals_that_categorical():
  product = policies.product_of_categoricals((5,))
  categorical = policies.categorical(5)
  logits = LOGITS[..., :5]
  action = np.full((3, 2), 3, np.int32)
  assert_allclose(product.log_prob(logits, action[..., None]), categorical.log_prob(logits, action))
  assert_allclose(product.entropy(logits), categorical.entropy(logits))
