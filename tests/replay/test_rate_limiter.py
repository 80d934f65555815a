"""The rate limiter between acting and learning, by hand and for random orders of events."""

import random

import pytest

from podracer_jit.replay.rate_limiter import RateLimiter


def test_the_learner_waits_for_the_first_rollouts():
  for ratio in (0.0, 2.0):
    rate = RateLimiter(ratio, 100, 10, 20, 3)
    assert rate.wants() == (1, 3)
    rate.count(added=20, drawn=0)
    assert rate.wants() == (1, 3)
    rate.count(added=20, drawn=10)
    assert rate.wants()[0] == 0


def test_without_a_ratio_neither_side_waits():
  rate = RateLimiter(0.0, 0, 10, 20, 3)
  for drawn in (10, 10**6):
    rate.count(0, drawn)
    assert rate.wants() == (0, 3) and rate.may_draw()


@pytest.mark.quick
def test_by_hand():
  """Draws 2 elements for each added one, 10 at a time, with rollouts of 5 and a tolerance of 15."""
  rate = RateLimiter(2.0, 15, 10, 5, 4)
  rate.count(0, 10)  # the first batch does not count
  rate.count(0, 10)  # now the learner is 10 ahead
  assert rate.wants() == (1, 2) and not rate.may_draw()  # 20 ahead would be too many
  rate.count(5, 0)  # 0 ahead
  assert rate.wants() == (0, 1) and rate.may_draw()
  rate.count(5, 0)  # the learner is 10 behind
  assert rate.wants() == (0, 0) and rate.may_draw()  # 20 behind would be too many
  rate.count(0, 10)
  assert rate.wants() == (0, 1)


def test_any_order_of_events_stays_within_the_tolerance_and_never_blocks():
  for seed in range(200):
    rng = random.Random(seed)
    ratio = rng.uniform(0.1, 9)
    batch = rng.randint(1, 99)
    most = rng.randint(1, 99)  # elements of a rollout
    tolerance = (batch + ratio * most) / 2 + rng.choice([0, 0, 50])
    rate = RateLimiter(ratio, tolerance, batch, most, 3)
    ahead = 0.0
    rate.count(9 * most, 0)
    assert rate.may_draw()  # the first draw is allowed with any tolerance
    rate.count(0, batch)
    for _ in range(100):
      least, room = rate.wants()
      assert room >= least and (room or rate.may_draw())  # one side can always go on
      added = sum(rng.randint(0, most) for _ in range(rng.randint(least, room)))
      rate.count(added, 0)
      drawn = batch if rate.may_draw() else 0
      rate.count(0, drawn)
      ahead += drawn - ratio * added
      assert abs(ahead) <= tolerance + 1e-6
