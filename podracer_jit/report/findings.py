"""Looks for what is unusual in a run: values that explode, a policy that is certain, and more."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from podracer_jit import metrics
from podracer_jit.report.reading import Run

FEW_EPISODES = 10
_EXPLODES = 1e3  # times the median of the first tenth
_CERTAIN = 0.01  # nats of entropy
_LARGE_KL = 0.05  # nats, without a target
_FAR_ABOVE = 3  # times the target of the KL divergence
_MUCH_CLIPPED = 0.4  # share of rows
_MOST_TIME = 0.5  # share of an update
# Metrics that should not explode, if a run has them.
_BOUNDED = ('loss', 'value_loss', 'baseline_loss', 'critic_loss', 'policy_loss', 'actor_loss',
            'abs_td_error', 'q', 'alpha', 'grad_norm', 'param_norm')


def findings(run: Run) -> list[str]:
  """Returns a line for each thing in a run that is worth a look; empty if there is none."""
  if not run.steps:
    return []
  return [*_not_finite(run), *_explosions(run), *_policy(run), *_critic(run), *_pipeline(run)]


def _part(run: Run, name: str, share: float) -> np.ndarray:
  """Returns the finite values of the last share of the updates, or of the first if it is < 0.

  Updates that draw nothing from a replay, such as the first ones, have no values of a learner.
  """
  values = np.where(run.column('sampled') == 0, np.nan, run.column(name))
  count = max(1, int(abs(share) * len(values)))
  values = values[-count:] if share > 0 else values[:count]
  return values[np.isfinite(values)]


def _not_finite(run: Run) -> Iterator[str]:
  for name in run.metrics:
    values = run.column(name)
    if name == 'episode_return' and np.isnan(values).any() and not np.isinf(values).any():
      continue  # absent until an episode has ended
    known = np.flatnonzero(np.isfinite(values))
    if len(known) and known[-1] < len(values) - 1 and name in metrics.TERMS | {'grad_norm': 0}:
      yield (f'{name} is not a finite number from about update '
             f'{int(run.column("update")[known[-1] + 1]):,} on')
    elif not len(known) and len(values):
      yield f'{name} is never a finite number'


def _explosions(run: Run) -> Iterator[str]:
  for name in _BOUNDED:
    if name not in run.metrics:
      continue
    first = _part(run, name, -0.1)
    last = _part(run, name, 0.1)
    if len(first) and len(last):
      before = float(np.median(np.abs(first)))
      now = float(np.median(np.abs(last)))
      if now > 1 and before > 0 and now > _EXPLODES * before:
        yield f'{name} explodes: from {before:.3g} at the start to {now:.3g} at the end'


def _policy(run: Run) -> Iterator[str]:
  episodes = run.column('episodes')[-1]
  if np.isfinite(episodes) and episodes < FEW_EPISODES:
    yield (f'{int(episodes)} episodes have ended: returns are means of so few, '
           'or episodes are longer than a segment')
  entropy = _part(run, 'entropy', 0.1)
  if len(entropy) and np.abs(entropy).max() < _CERTAIN:
    yield f'entropy is at 0 ({entropy.mean():.2g} nats): the policy does not explore any more'
  divergence = _part(run, 'approx_kl', 0.5)
  if len(divergence):
    target = run.config.get('optimizer.kl_target')
    mean = float(divergence.mean())
    if isinstance(target, float | int) and target > 0:
      if mean > _FAR_ABOVE * target:
        yield (f'approx_kl is far above its target: {mean:.3g}, and optimizer.kl_target is '
               f'{target:g}')
    elif mean > _LARGE_KL:
      yield f'approx_kl is large, {mean:.3g} in the second half: steps are too large'
  clipped = _part(run, 'clip_fraction', 0.5)
  if len(clipped) and clipped.mean() > _MUCH_CLIPPED:
    yield f'clip_fraction is {clipped.mean():.2f} in the second half: steps are too large'


def _critic(run: Run) -> Iterator[str]:
  explained = _part(run, 'explained_variance', 0.25)
  if len(explained) and explained.mean() < 0:
    yield (f'explained_variance is {explained.mean():.2f} at the end: the critic predicts no '
           'better than a constant')
  norms = _part(run, 'grad_norm', 0.1)
  if len(norms) and (norms == 0).all():
    yield 'grad_norm is exactly 0: nothing is learned'


def _pipeline(run: Run) -> Iterator[str]:
  shares = wait_shares(run)
  if shares['learner'] > _MOST_TIME:
    yield f'the learner waits {shares["learner"]:.0%} of the time: the actors are the bottleneck'


def wait_shares(run: Run) -> dict[str, float]:
  """Returns the share of the time of training in which each side waits; 0 if it is not known."""
  elapsed = run.column('elapsed_s')
  updates = run.column('update')
  totals = {}
  for side in ('actor', 'learner'):
    # Lines of a long run are a sample. A wait is that of the line's own update.
    waits = run.column(f'{side}_wait_s')
    known = np.isfinite(waits)
    totals[side] = waits[known].mean() * updates[-1] if known.any() else 0.0
  totals['eval'] = run.eval_wait_s
  has_time = len(elapsed) and elapsed[-1] > 0
  return {side: float(total / elapsed[-1]) if has_time else 0.0 for side, total in totals.items()}
