"""Running moments compared with NumPy on all rows at once, and their use in an update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.agents import running_moments
from podracer_jit.numerics.groups import Groups
from tests.runs import changed, run, small
from tests.workers import wrap


def test_merged_moments_are_those_of_all_valid_rows():
  rng = np.random.default_rng(0)
  numbers = rng.normal(5.0, [0.1, 30.0], size=(4, 7, 3, 2)).astype(np.float32)
  valid = rng.random((4, 7, 3)) < 0.7
  moments = running_moments.initial((2,))
  assert_array_equal(running_moments.deviation(moments), [1, 1])
  for rollout, mask in zip(numbers, valid, strict=True):
    x = jnp.where(mask[..., None], rollout, 1e9)
    moments = running_moments.merge(moments, running_moments.measure(x, mask, Groups(1, 3)))
  valid_rows = numbers[valid].astype(np.float64)
  assert moments.count == len(valid_rows)
  assert_allclose(moments.mean, valid_rows.mean(axis=0), rtol=1e-5)
  assert_allclose(running_moments.deviation(moments), valid_rows.std(axis=0), rtol=1e-4)
  out = running_moments.standardise(moments, jnp.float32([[5.0, 5.0], [1e6, -1e6]]))
  assert_allclose(out[0], (5 - valid_rows.mean(axis=0)) / valid_rows.std(axis=0), atol=1e-3)
  assert_array_equal(out[1], [10, -10])


def test_merging_a_batch_without_valid_rows_changes_nothing():
  moments = running_moments.measure(jnp.ones((2, 3)), jnp.ones((2, 3), bool), Groups(1, 3))
  moments_of_no_row = running_moments.measure(
      jnp.full((2, 3), 7.0), jnp.zeros((2, 3), bool), Groups(1, 3))
  merged = running_moments.merge(moments, moments_of_no_row)
  jax.tree.map(assert_array_equal, merged, moments)


def merge_all_rows(a, b):
  """Merges moments whose rows all weigh the same."""
  count = a.count + b.count
  delta = b.mean - a.mean
  share = b.count / jnp.maximum(count, 1.0)
  return running_moments.Moments(count, a.mean + delta * share,
                                 a.m2 + b.m2 + jnp.square(delta) * a.count * share)


def test_up_to_the_count_that_float32_has_exactly_all_rows_weigh_the_same():
  rng = np.random.default_rng(1)
  for count in (0.0, 1.0, 64.0, 12345.0, 2.0**23 + 1, 2.0**24):
    for rows in (0.0, 1.0, 40.0, 4096.0):
      a, b = (running_moments.Moments(
          jnp.float32(n), jnp.float32(rng.normal(size=5)),
          jnp.float32(n * rng.random(5))) for n in (count, rows))
      jax.tree.map(assert_array_equal, jax.jit(running_moments.merge)(a, b),
                   jax.jit(merge_all_rows)(a, b))


@pytest.mark.parametrize('rows', [16, 64, 2048])
@pytest.mark.parametrize('count', [2.0**25, 2.0**29, 2.0**34])
def test_moments_of_very_many_rows_still_follow_the_new_ones(rows, count):
  moments = running_moments.Moments(jnp.float32(count), jnp.float32([0.0]), jnp.float32([count]))
  most = max(2.0**24, 2.0**18 * rows)
  updates = int(5 * most / rows)

  def add(i, moments):
    # Squares vary from update to update, as those of real rows do.
    noise = 1.0 + 0.5 * jnp.sin(i.astype(jnp.float32) ** 2)
    return running_moments.merge(moments, running_moments.Moments(
        jnp.float32(rows), jnp.float32([3.0]), jnp.float32([4.0 * rows]) * noise))
  moments = jax.jit(lambda x: jax.lax.fori_loop(0, updates, add, x))(moments)
  assert moments.count >= min(count, most) and moments.count <= most + 2 * rows
  assert_allclose(moments.mean, 3.0, rtol=0.05)
  assert_allclose(running_moments.deviation(moments), 2.0, rtol=0.05)


def test_an_update_without_valid_rows_does_not_make_the_old_ones_weigh_less():
  many = running_moments.Moments(jnp.float32(2.0**30), jnp.ones(2), jnp.ones(2))
  empty = running_moments.initial((2,))
  jax.tree.map(assert_array_equal, running_moments.merge(many, empty), many)


def config(**fields):
  result = small('ppo', 'InvertedPendulum-v4', num_epochs=2, **fields)
  result['normalise'] = {'obs': True, 'reward': True, 'value': True}
  return result


def test_actors_and_learner_normalise_by_the_moments_of_the_updates_before():
  """Then the policy's ratio is 1 before the learner's first gradient step."""
  reports = run(changed(config(), num_minibatches=1, num_epochs=1))[1]
  metrics = [jax.device_get(report.metrics) for report in reports]
  assert all(abs(m['approx_kl'][0]) < 1e-6 for m in metrics)


def test_the_train_state_has_the_moments_of_all_observations_and_returns():
  rollouts = []

  def watch(call, carry, *batch):
    rollouts.extend(jax.device_get(rollout) for item in batch for rollout in item.value.parts[0])

  state = run(config(), tamper=wrap('learner', before=watch))[2]
  moments = jax.device_get(state.params['moments'])
  obs = np.concatenate([r.obs[:-1][r.valid] for r in rollouts])
  returns = np.concatenate([r.discounted_return[r.valid] for r in rollouts])
  # The counts are exact: gradient steps do not change the moments.
  for name in ('obs', 'returns', 'values'):
    assert moments[name].count == len(obs) == int(state.steps), name
  assert_allclose(moments['obs'].mean, obs.mean(axis=0), rtol=1e-4, atol=1e-5)
  assert_allclose(running_moments.deviation(moments['obs']), obs.std(axis=0), rtol=1e-3)
  assert_allclose(running_moments.deviation(moments['returns']), returns.std(), rtol=1e-3)
  assert moments['values'].mean > 0.1 and 0 < running_moments.deviation(moments['values']) < 10
  # A reward of 1 a step: the discounted return counts from the episode's beginning.
  assert returns.min() == pytest.approx(1.0) and returns.max() > 5
