"""Statistics over tasks and seeds, against rliable 1.2.0 and by hand.

The references are what this prints in an environment with `pip install rliable 'pandas<3'`:

  import numpy as np
  from rliable import library, metrics
  generator = np.random.default_rng(7)
  x = np.round(generator.gamma(2.0, 0.4, size=(5, 6)), 3)
  y = np.round(generator.gamma(2.0, 0.3, size=(4, 6)), 3)
  aggregate = lambda s: np.array([metrics.aggregate_median(s), metrics.aggregate_iqm(s),
                                  metrics.aggregate_mean(s), metrics.aggregate_optimality_gap(s)])
  state = np.random.RandomState
  print(library.get_interval_estimates({'x': x, 'y': y}, aggregate, reps=20000,
                                       random_state=state(0)))
  improvement = lambda a, b: np.array([metrics.probability_of_improvement(a, b)])
  print(library.get_interval_estimates({'x,y': (x, y)}, improvement, reps=5000,
                                       random_state=state(0)))
  thresholds = np.array([0., 0.25, 0.5, 1., 1.5])
  print(library.create_performance_profile({'x': x}, thresholds, reps=5000))
"""

import numpy as np
import pytest

from podracer_jit.report import statistics

_GENERATOR = np.random.default_rng(7)
X = [*np.round(_GENERATOR.gamma(2.0, 0.4, size=(5, 6)), 3).T]  # 6 tasks, 5 seeds
Y = [*np.round(_GENERATOR.gamma(2.0, 0.3, size=(4, 6)), 3).T]
OF_X = {'Median': (0.5908, 0.4572, 0.7047), 'IQM': (0.5920, 0.4717, 0.7066),
        'Mean': (0.6411, 0.5179, 0.7761), 'Optimality gap': (0.4166, 0.3275, 0.5083)}
OF_Y = {'Median': (0.473375, 0.3467, 0.6115), 'IQM': (0.5080, 0.3692, 0.6456),
        'Mean': (0.58725, 0.4710, 0.7075), 'Optimality gap': (0.47275, 0.3766, 0.5638)}
NOISE = 0.02  # of bounds of intervals, which both draw at random


@pytest.mark.quick
@pytest.mark.parametrize('scores, references', [(X, OF_X), (Y, OF_Y)], ids=['x', 'y'])
@pytest.mark.parametrize('name', statistics.AGGREGATES)
def test_aggregates_are_those_of_rliable(scores, references, name):
  estimate = statistics.interval(statistics.AGGREGATES[name], scores)
  value, low, high = references[name]
  assert estimate.value == pytest.approx(value, abs=1e-9)
  assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=NOISE)


def test_the_probability_of_improvement_is_that_of_rliable():
  estimate = statistics.improvement(X, Y)
  assert estimate.value == pytest.approx(0.51666667, abs=1e-8)
  assert (estimate.low, estimate.high) == pytest.approx((0.375, 0.6583), abs=2 * NOISE)
  assert statistics.improvement(X, X).value == pytest.approx(0.5)


def test_performance_profiles_are_those_of_rliable():
  share, low, high = statistics.profile(X, np.array([0.0, 0.25, 0.5, 1.0, 1.5]))
  np.testing.assert_allclose(share, [1, 0.8, 0.6, 0.16666667, 0.03333333], atol=1e-8)
  np.testing.assert_allclose(low, [1, 0.667, 0.433, 0.067, 0], atol=0.04)
  np.testing.assert_allclose(high, [1, 0.933, 0.767, 0.3, 0.1], atol=0.04)


def test_one_seed_has_no_interval():
  estimate = statistics.interval(statistics.mean, [np.array([3.0]), np.array([5.0])])
  assert estimate.value == 4 and not estimate.known


def test_tasks_may_have_different_numbers_of_seeds():
  scores = [np.array([0.0, 0.0, 0.0, 4.0]), np.array([3.0])]
  assert statistics.interval(statistics.mean, scores).value == 2  # (1 + 3) / 2
  # Sorted: 0 0 0 3 4; a quarter of five runs, rounded down, is one at either end.
  assert statistics.interval(statistics.interquartile_mean, scores).value == 1
  assert statistics.improvement([np.array([1.0, 2.0])], [np.array([1.0])]).value == 0.75


def test_a_band_holds_its_mean_and_is_a_line_if_all_seeds_agree():
  curves = np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 4.0]])
  mean, low, high = statistics.band(curves)
  np.testing.assert_allclose(mean, [1, 1, 3])
  np.testing.assert_allclose(low, [0, 1, 2])
  np.testing.assert_allclose(high, [2, 1, 4])
