"""Statistics over tasks and seeds, as Agarwal et al. 2021 recommend them (2108.13264).

Scores are a list of arrays, one for each task, with the normalised score of each of its seeds. The
numbers of seeds may differ; each run then has the same weight where runs are pooled. All intervals
are percentile intervals of a bootstrap. It is stratified: seeds are drawn again within each task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Scores = Sequence[np.ndarray]  # of each task: the scores of its seeds, [seeds]
# (scores of each task, each [draws, seeds]) -> the statistic [draws]
Statistic = Callable[[Sequence[np.ndarray]], np.ndarray]
CONFIDENCE = 0.95
DRAWS = 2000  # of the bootstrap
SEED = 0  # of its draws, so that a report can be repeated
GAMMA = 1.0  # the score from which on there is no optimality gap


class Interval(NamedTuple):
  """An estimate and its interval; the bounds are NaN if there are too few runs for one."""

  value: float
  low: float
  high: float

  @property
  def known(self) -> bool:
    """Whether there is an interval."""
    return bool(np.isfinite(self.low) and np.isfinite(self.high))


def _pooled(scores: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate(scores, axis=-1)


def _means(scores: Sequence[np.ndarray]) -> np.ndarray:
  """Returns the mean score of each task, [draws, tasks]."""
  return np.stack([of_task.mean(axis=-1) for of_task in scores], axis=-1)


def median(scores: Sequence[np.ndarray]) -> np.ndarray:
  """Median over tasks of the mean score of each task."""
  return np.median(_means(scores), axis=-1)


def interquartile_mean(scores: Sequence[np.ndarray]) -> np.ndarray:
  """Mean of the middle half of all runs; a quarter, rounded down, is cut at either end."""
  ordered = np.sort(_pooled(scores), axis=-1)
  cut = ordered.shape[-1] // 4
  return ordered[..., cut:ordered.shape[-1] - cut].mean(axis=-1)


def mean(scores: Sequence[np.ndarray]) -> np.ndarray:
  """Mean over tasks of the mean score of each task."""
  return _means(scores).mean(axis=-1)


def optimality_gap(scores: Sequence[np.ndarray]) -> np.ndarray:
  """Mean amount by which runs fall short of a score of `GAMMA`."""
  return GAMMA - np.minimum(_pooled(scores), GAMMA).mean(axis=-1)


AGGREGATES: Mapping[str, Statistic] = {
    'Median': median, 'IQM': interquartile_mean, 'Mean': mean, 'Optimality gap': optimality_gap}


def resampled(scores: Scores, draws: int = DRAWS) -> list[np.ndarray]:
  """Returns bootstrap samples of the seeds of each task, each [draws, seeds]."""
  generator = np.random.default_rng(SEED)
  return [of_task[generator.integers(len(of_task), size=(draws, len(of_task)))]
          for of_task in scores]


def interval(statistic: Statistic, scores: Scores, draws: int = DRAWS) -> Interval:
  """Returns a statistic of the scores with its stratified bootstrap interval.

  There is no interval if no task has two seeds, as all samples would be equal.
  """
  scores = [np.asarray(of_task, float) for of_task in scores]
  value = float(statistic([of_task[None] for of_task in scores])[0])
  if max(map(len, scores)) < 2:
    return Interval(value, np.nan, np.nan)
  return Interval(value, *_bounds(statistic(resampled(scores, draws))))


def _bounds(samples: np.ndarray) -> tuple[float, float]:
  tail = (1 - CONFIDENCE) / 2 * 100
  low, high = np.percentile(samples, [tail, 100 - tail], axis=0)
  return float(low), float(high)


def mean_interval(values: np.ndarray) -> Interval:
  """Returns the mean of the seeds of one task with its bootstrap interval."""
  return interval(mean, [values])


def band(curves: np.ndarray, draws: int = DRAWS // 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the mean of curves with pointwise bootstrap intervals.

  Args:
    curves: one for each seed, [seeds, points].
    draws: samples of the bootstrap.

  Returns:
    Mean, lower and upper bound, each [points]; with one seed, the bounds are the curve.
  """
  generator = np.random.default_rng(SEED)
  rows = generator.integers(len(curves), size=(draws, len(curves)))
  samples = np.stack([curves[row].mean(axis=0) for row in rows])
  tail = (1 - CONFIDENCE) / 2 * 100
  low, high = np.percentile(samples, [tail, 100 - tail], axis=0)
  return curves.mean(axis=0), low, high


def profile(scores: Scores, thresholds: np.ndarray, draws: int = DRAWS // 4
            ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns a performance profile: the share of runs whose score is above each threshold.

  Args:
    scores: the scores of each task.
    thresholds: [points].
    draws: samples of the bootstrap.

  Returns:
    Share, lower and upper bound, each [points].
  """
  def shares(samples: Sequence[np.ndarray]) -> np.ndarray:
    ordered = np.sort(_pooled(samples), axis=-1)
    below = np.stack([np.searchsorted(row, thresholds, side='right') for row in ordered])
    return 1 - below / ordered.shape[-1]
  scores = [np.asarray(of_task, float) for of_task in scores]
  samples = shares(resampled(scores, draws))
  tail = (1 - CONFIDENCE) / 2 * 100
  low, high = np.percentile(samples, [tail, 100 - tail], axis=0)
  return shares([of_task[None] for of_task in scores])[0], low, high


def improvement(scores_x: Scores, scores_y: Scores, draws: int = DRAWS // 2) -> Interval:
  """Returns the probability that a run of x has a higher score than one of y on a task.

  It is the mean over tasks of the Mann-Whitney statistic; equal scores count as half.

  Args:
    scores_x: the scores of x, of each task.
    scores_y: the scores of y, of the same tasks.
    draws: samples of the bootstrap.
  """
  def probability(x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> np.ndarray:
    of_tasks = []
    for a, b in zip(x, y, strict=True):
      difference = a[:, :, None] - b[:, None, :]
      of_tasks.append(((difference > 0) + 0.5 * (difference == 0)).mean(axis=(1, 2)))
    return np.mean(of_tasks, axis=0)
  x, y = ([np.asarray(of_task, float) for of_task in scores] for scores in (scores_x, scores_y))
  value = float(probability([a[None] for a in x], [b[None] for b in y])[0])
  if max(map(len, [*x, *y])) < 2:
    return Interval(value, np.nan, np.nan)
  # One generator for both sides, which are drawn independently of each other.
  both = resampled([*x, *y], draws)
  return Interval(value, *_bounds(probability(both[:len(x)], both[len(x):])))
