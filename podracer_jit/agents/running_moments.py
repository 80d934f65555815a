"""Running means and deviations of observations, returns and values, bitwise equal on any mesh.

They are variables of the network, in the collection `moments`. So they go with the parameters to
actors, checkpoints and evaluation, and all actors of an update use the same statistics. No gradient
reaches them.

Each element of an observation has its own mean and deviation: of an image each pixel of each
channel, and so of each frame of a stack.

Normalisation uses the statistics of the previous update; the learner adds the valid rows of an
update at its end. Rewards are divided by a deviation that includes the current rollout, since no
actor looks at them.

A replay has observations as they came, and losses normalise what they draw. Each valid row counts
once, as it is added: rows that were drawn would count by their priorities, and as often as there
are gradient steps. The statistics change before the gradient steps, so the first step has some, and
a target network gets those of the network.

An algorithm's `init` may add moments of its own to the collection: `obs`, if only the algorithm
reads them, and any other name for its targets of this name (`examples/rnd.py`: intrinsic returns).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit.envs import frames
from podracer_jit.numerics.deterministic import pairwise_sum
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.options import option
from podracer_jit.types import Params, Rollout

# The most that old rows weigh: the larger of this number of rows, up to which float32 counts all,
# and this multiple of the new rows, of which a smaller share would be lost in rounding.
_EXACT = 2.0**24
_MOST_TIMES_NEW = 2.0**18
CLIP = 10.0  # bound of normalised numbers, in standard deviations


@dataclasses.dataclass(frozen=True)
class NormaliseOptions:
  """Options of normalisation by running means and deviations."""

  obs: bool = option(False, 'observations')
  reward: bool = option(False, 'rewards, by the deviation of discounted returns')
  value: bool = option(False, 'value targets: the critic predicts values in standard deviations')

  @property
  def moments(self) -> tuple[str, ...]:
    """Names of the moments that the network keeps."""
    is_kept = {'obs': self.obs, 'returns': self.reward, 'values': self.value}
    return tuple(name for name in is_kept if is_kept[name])


class Moments(NamedTuple):
  """Count, mean and squared deviations of the numbers added so far; see `merge`."""

  count: jax.Array  # f32, number of rows, as far as they still weigh
  mean: jax.Array  # [*shape] f32
  m2: jax.Array  # [*shape] f32, the sum of squared distances from the mean


def initial(shape: tuple[int, ...]) -> Moments:
  """Returns the moments of an empty sample; their deviation is 1."""
  return Moments(jnp.zeros(()), jnp.zeros(shape), jnp.zeros(shape))


def deviation(moments: Moments) -> jax.Array:
  """Returns the standard deviation [*shape]; 1 for an empty sample."""
  chex.assert_rank(moments.count, 0)
  chex.assert_equal_shape([moments.mean, moments.m2])
  variance = moments.m2 / jnp.maximum(moments.count, 1.0)
  return jnp.where(moments.count > 0, jnp.sqrt(variance + 1e-8), 1.0)


def has_pixels(x: jax.Array, leading: int) -> bool:
  """Returns whether x are images of bytes: with three axes after so many leading ones."""
  return x.dtype == np.uint8 and x.ndim - leading == 3


def as_numbers(x: jax.Array) -> jax.Array:
  """Returns x [N, ...] as f32; images of bytes become 0 to 1, as torsos for images take them.

  So the numbers are small before there are any moments.
  """
  numbers = x.astype(jnp.float32)
  return numbers / 255.0 if has_pixels(x, 1) else numbers


def standardise(moments: Moments, x: jax.Array) -> jax.Array:
  """Returns x [..., *shape] in standard deviations from the mean, clipped to [-CLIP, CLIP]."""
  chex.assert_shape(x, (..., *moments.mean.shape))
  return jnp.clip((x - moments.mean) / deviation(moments), -CLIP, CLIP)


def restore(moments: Moments, x: jax.Array) -> jax.Array:
  """Returns the inverse of `standardise`, without its clipping, for x [..., *shape]."""
  chex.assert_shape(x, (..., *moments.mean.shape))
  return moments.mean + deviation(moments) * x


def merge(a: Moments, b: Moments) -> Moments:
  """Returns moments of the union of two samples (Chan, Golub and LeVeque 1979, equation 2.1).

  If `a` has very many rows, they weigh less from then on: float32 could not add a few rows to them.

  Args:
    a: moments of the rows so far.
    b: moments of the new rows.
  """
  chex.assert_equal_shape([a.mean, a.m2, b.mean, b.m2])
  most = jnp.maximum(_EXACT, _MOST_TIMES_NEW * b.count)
  old = jnp.where(b.count > 0, jnp.minimum(a.count, most), a.count)
  # The factor is exactly 1 while all rows weigh the same.
  old_m2 = a.m2 * (old / jnp.maximum(a.count, 1.0))
  count = old + b.count
  delta = b.mean - a.mean
  share = b.count / jnp.maximum(count, 1.0)
  return Moments(count, a.mean + delta * share,
                 old_m2 + b.m2 + jnp.square(delta) * old * share)


def measure(x: jax.Array, valid: jax.Array, groups: Groups) -> Moments:
  """Returns the moments of the valid rows of all devices.

  Args:
    x: [T, B, *shape], numbers of this device's environments; the moments of images of bytes are
      those of `as_numbers`.
    valid: [T, B] bool.
    groups: the groups of environments, and how to sum over them.
  """
  chex.assert_rank(valid, 2)
  chex.assert_type(valid, bool)
  chex.assert_equal_shape_prefix([x, valid], 2)
  rows = groups.split((x, valid))
  count, total = groups.total(groups.map(_sum_of_group, *rows))
  mean = _mean(total, count)
  m2 = groups.total(groups.map(lambda *group: _squares_of_group(*group, mean), *rows))
  moments = Moments(count, mean, m2)
  # Up to here they are those of the bytes, whose sums are exact as long as they are below 2^24.
  return _of_pixels(moments) if has_pixels(x, 2) else moments


def _sum_of_rows(x: jax.Array) -> jax.Array:
  """Returns the sum [...] of x [T, B, ...] over rows and environments, in a fixed order."""
  return pairwise_sum(x.reshape(-1, *x.shape[2:]))


def _where(valid: jax.Array, x: jax.Array) -> jax.Array:
  """Returns x [T, B, ...] with zeros in invalid rows; valid is [T, B]."""
  return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0.0)


def _by_plane(function: Callable, x: jax.Array, *others: jax.Array) -> jax.Array:
  """Returns function(x as f32, *others), whose results have the shape [*shape].

  Images are taken plane after plane, along the first of their axes: all of them in float32 would
  need four times the memory of their bytes. Each element is computed as if they were taken at once.

  Args:
    function: of numbers [T, B, ...] and arrays [...].
    x: [T, B, *shape].
    *others: arrays [*shape].
  """
  if not has_pixels(x, 2):
    return function(x.astype(jnp.float32), *others)

  def of_plane(i):
    plane = lax.dynamic_index_in_dim(x, i, axis=2, keepdims=False)
    return function(plane.astype(jnp.float32), *(other[i] for other in others))

  return lax.map(of_plane, jnp.arange(x.shape[2]))


@island('sum_of_rows')
def _sum_of_group(x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the number of valid rows and their sum."""
  return (_sum_of_rows(valid.astype(jnp.float32)),
          _by_plane(lambda x: _sum_of_rows(_where(valid, x)), x))


@island('mean_of_rows')
def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
  """Returns the mean, or 0 for an empty sample."""
  return total / jnp.maximum(count, 1.0)


@island('squares_of_rows')
def _squares_of_group(x: jax.Array, valid: jax.Array, mean: jax.Array) -> jax.Array:
  """Returns the sum of squared distances of valid rows from the mean."""
  return _by_plane(lambda x, mean: _sum_of_rows(_where(valid, jnp.square(x - mean))), x, mean)


@island('moments_of_pixels')
def _of_pixels(moments: Moments) -> Moments:
  """Returns moments of bytes as those of numbers from 0 to 1."""
  return Moments(moments.count, moments.mean / 255.0, moments.m2 / 255.0**2)


def observe(params: Params, rollout: Rollout, targets: Any, groups: Groups) -> dict[str, Moments]:
  """Returns the moments of an update's observations, value targets and other targets.

  Args:
    params: the network's variables; their collection `moments` says which moments are kept.
    rollout: [T, B, ...], the rollout of this device's environments.
    targets: the algorithm's targets [T, B, ...], with 'value_target' [T, B] if moments of values
      are kept. Moments of any other name are those of the targets of this name.
    groups: the groups of environments.

  Returns:
    Moments by name: all that `params` keeps, but for 'returns'.
  """
  # Functions, since rebuilding the stacks of observations is expensive and often not needed.
  rows = {'obs': lambda: frames.stacks(rollout.obs)[:-1], 'values': lambda: targets['value_target']}
  rows |= {name: lambda name=name: targets[name] for name in of_targets(params)}
  return {name: measure(rows[name](), rollout.valid, groups)
          for name in moments_of(params) if name in rows}


def of_targets(params: Params) -> list[str]:
  """Returns the names of moments that an algorithm keeps of its targets of the same names."""
  return [name for name in moments_of(params) if name not in ('obs', 'returns', 'values')]


def scale_rewards(params: Params, rollout: Rollout,
                  groups: Groups) -> tuple[Rollout, dict[str, Moments]]:
  """Divides rewards by the deviation of the discounted returns, this rollout's included.

  Returns:
    The rollout with scaled rewards, and {'returns': moments of its returns}. If `params` keeps no
    moments of returns, the unchanged rollout and an empty dict.
  """
  if 'returns' not in moments_of(params):
    return rollout, {}
  before = moments_of(params)['returns']
  moments = measure(rollout.discounted_return, rollout.valid, groups)
  scaled = groups.map(lambda reward: _scaled_rewards(reward, before, moments),
                      groups.split(rollout.reward))
  return rollout._replace(reward=groups.join(scaled)), {'returns': moments}


@island('scaled_rewards')
def _scaled_rewards(reward: jax.Array, before: Moments, moments: Moments) -> jax.Array:
  """Returns rewards [T, B] in deviations of all returns so far, clipped."""
  return jnp.clip(reward / deviation(merge(before, moments)), -CLIP, CLIP)


def moments_of(params: Params) -> Mapping[str, Moments]:
  """Returns the moments in a network's variables; empty if nothing is normalised."""
  return params.get('moments', {}) if isinstance(params, Mapping) else {}


def frozen(params: Params) -> Params:
  """Returns params with a stop_gradient on the moments."""
  moments = moments_of(params)
  return {**params, 'moments': lax.stop_gradient(moments)} if moments else params


def with_moments_of(params: Params, other: Params) -> Params:
  """Returns params with the moments of other params."""
  moments = moments_of(other)
  return {**params, 'moments': moments} if moments else params


def weights(params: Params) -> Params:
  """Returns params without the moments."""
  return {k: v for k, v in params.items() if k != 'moments'} if moments_of(params) else params


def add(params: Params, moments: Mapping[str, Moments]) -> Params:
  """Returns params with `moments` merged into theirs."""
  if not moments:
    return params
  merged = {name: _merge(before, moments[name]) for name, before in moments_of(params).items()}
  return {**params, 'moments': merged}


_merge = island('merged_moments')(merge)
