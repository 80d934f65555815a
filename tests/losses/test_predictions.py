"""The explained variance, from sums over parts, against NumPy on all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from podracer_jit.losses.algorithm import Aux, Predictions
from tests.runs import changed, run, small


def expected(value, target):
  return 1 - np.var(target - value) / np.var(target)


@pytest.mark.quick
def test_sums_of_parts_give_the_explained_variance_of_all_valid_rows():
  rng = np.random.default_rng(0)
  value, noise = rng.normal(3.0, 2.0, (2, 4, 30)).astype(np.float32)
  target = value + 0.5 * noise + 1  # a constant error explains as much
  valid = rng.random(value.shape) < 0.7
  value = np.where(valid, value, np.nan)  # what is not valid does not count
  parts = [Predictions.of(*map(jnp.asarray, x)) for x in zip(value, target, valid, strict=True)]
  sums = jax.tree.map(lambda *x: sum(x), *parts)
  aux = Aux({'q': jnp.float32(8.0)}, jnp.float32(valid.sum()), predictions=sums)
  metrics = aux.metrics()
  assert metrics.keys() == {'q', 'explained_variance'}
  assert_allclose(metrics['explained_variance'], expected(value[valid], target[valid]), rtol=1e-5)
  assert Aux({'q': jnp.float32(8.0)}, jnp.float32(2)).metrics() == {'q': 4.0}


@pytest.mark.parametrize('value, target, share', [
    ((1, 2, 3), (1, 2, 3), 1.0), ((2, 2, 2), (1, 2, 3), 0.0), ((3, 2, 1), (1, 2, 3), -3.0),
    ((1, 2, 3), (5, 5, 5), 0.0), ((0, 0, 0), (0, 0, 0), 0.0), ((9, 1, 5), (1e4, 1e4, 1e4), 0.0)])
def test_cases_worked_out_by_hand(value, target, share):
  value, target = (jnp.array(x, jnp.float32) for x in (value, target))
  sums = Predictions.of(value, target, jnp.ones(3, bool))
  assert_allclose(sums.explained_variance(jnp.float32(3)), share, atol=1e-5)


def test_without_a_valid_row_it_is_0():
  sums = Predictions.of(jnp.ones(2), jnp.arange(2.0), jnp.zeros(2, bool))
  assert sums.explained_variance(jnp.float32(1)) == 0


@pytest.mark.parametrize('loss', ['ppo', 'impala'])
def test_runs_have_it_for_any_number_of_parts(loss):
  """A run in two groups and microbatches of one sequence sums up the same rows."""
  def shares(**fields):
    _, reports, _ = run(changed(small(loss), **fields), updates=2)
    return np.concatenate([np.asarray(report.metrics['explained_variance'])[:report.count]
                           for report in reports])

  whole = shares()
  assert whole.shape == (2,) and np.all(np.isfinite(whole)) and np.all(whole <= 1)
  parts = shares(num_grad_shards=2, microbatch_rows=9) if loss == 'impala' else shares(
      microbatch_rows=8)
  # The first update is made of equal rollouts and parameters.
  assert_allclose(parts[0], whole[0], rtol=1e-3, atol=1e-4)
