"""Running moments against NumPy on everything at once, and what they do in an update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.agents import running_moments
from podracer_jit.numerics.groups import Groups
from tests.runs import changed, run, small
from tests.workers import wrap


def test_moments_are_those_of_all_valid_rows():
  rng = np.random.default_rng(0)
  numbers = rng.normal(5.0, [0.1, 30.0], size=(4, 7, 3, 2)).astype(np.float32)
  valid = rng.random((4, 7, 3)) < 0.7
  moments = running_moments.initial((2,))
  assert_array_equal(running_moments.deviation(moments), [1, 1])
  for rollout, mask in zip(numbers, valid, strict=True):
    x = jnp.where(mask[..., None], rollout, 1e9)
    moments = running_moments.merge(moments, running_moments.measure(x, mask, Groups(1, 3)))
  seen = numbers[valid].astype(np.float64)
  assert moments.count == len(seen)
  assert_allclose(moments.mean, seen.mean(axis=0), rtol=1e-5)
  assert_allclose(running_moments.deviation(moments), seen.std(axis=0), rtol=1e-4)
  out = running_moments.standardise(moments, jnp.float32([[5.0, 5.0], [1e6, -1e6]]))
  assert_allclose(out[0], (5 - seen.mean(axis=0)) / seen.std(axis=0), atol=1e-3)
  assert_array_equal(out[1], [10, -10])


def test_nothing_valid_changes_nothing():
  moments = running_moments.measure(jnp.ones((2, 3)), jnp.ones((2, 3), bool), Groups(1, 3))
  nothing = running_moments.measure(jnp.full((2, 3), 7.0), jnp.zeros((2, 3), bool), Groups(1, 3))
  again = running_moments.merge(moments, nothing)
  jax.tree.map(assert_array_equal, again, moments)


def config(**fields):
  whole = small('ppo', 'InvertedPendulum-v4', num_epochs=2, **fields)
  whole['normalise'] = {'obs': True, 'reward': True, 'value': True}
  return whole


def test_actors_and_learner_normalise_by_the_moments_of_the_updates_before():
  """Before the learner's first step the policy's ratio is 1: both see the same numbers."""
  whole = changed(config(), num_minibatches=1, num_epochs=1)
  reports = run(whole)[1]
  metrics = [jax.device_get(report.metrics) for report in reports]
  assert all(abs(m['approx_kl'][0]) < 1e-6 for m in metrics)


def test_the_state_holds_the_moments_of_what_was_seen():
  seen = []

  def watch(call, carry, *batch):
    seen.extend(jax.device_get(vector_env) for item in batch for vector_env in item.value.parts[0])

  state = run(config(), tamper=wrap('learner', before=watch))[2]
  moments = jax.device_get(state.params['moments'])
  obs = np.concatenate([r.obs[:-1][r.valid] for r in seen])
  returns = np.concatenate([r.discounted_return[r.valid] for r in seen])
  # Exactly: whatever else is in the parameters descends a gradient, they do not.
  for name in ('obs', 'returns', 'values'):
    assert moments[name].count == len(obs) == int(state.steps), name
  assert_allclose(moments['obs'].mean, obs.mean(axis=0), rtol=1e-4, atol=1e-5)
  assert_allclose(running_moments.deviation(moments['obs']), obs.std(axis=0), rtol=1e-3)
  assert_allclose(running_moments.deviation(moments['returns']), returns.std(), rtol=1e-3)
  assert moments['values'].mean > 0.1 and 0 < running_moments.deviation(moments['values']) < 10
  # A reward of 1 a step: the discounted return counts from the episode's beginning.
  assert returns.min() == pytest.approx(1.0) and returns.max() > 5


def late_and_squashed():
  return changed(config(), scheme='cleanba', policy='tanh_gaussian', loss__vtrace=True,
                 optimizer__kl_target=0.01, optimizer__anneal=False)


def impala():
  whole = small('impala', 'InvertedPendulum-v4', policy='scaled_gaussian')
  return changed(whole, normalise={'obs': True, 'reward': True, 'value': False})


@pytest.mark.parametrize('make', [config, late_and_squashed, impala])
@pytest.mark.same_bits('two actors and learners, with running moments',
                       'IMPALA, PPO: MLP (`sync`, `cleanba`, `fused`)')
def test_moments_are_exact_on_any_placement(make):
  whole = changed(make(), num_shards=2, num_grad_shards=2)
  expected, _, state = run(whole)
  factor = optax.tree.get(state.opt_state, 'kl_factor', 1.0)
  assert (factor != 1) == (make is late_and_squashed)
  place = dict(placement__actor_devices=(0, 1), placement__learner_devices=(2, 1))
  assert run(changed(whole, **place))[0] == expected
  if whole['scheme'] == 'sync':
    assert run(changed(whole, scheme='fused', placement__updates_per_call=4))[0] == expected
