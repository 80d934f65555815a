"""Running means and deviations of observations, returns and values, the same bits on any mesh.

They live among the network's variables, in the collection `moments`: so they travel with the
parameters, to actors, checkpoints and evaluation, and the actors of an update all use the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.envs import frames
from podracer_jit.numerics.deterministic import pairwise_sum
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.options import option
from podracer_jit.types import Params, Rollout

CLIP = 10.0  # deviations: what is farther out is taken for this far


@dataclasses.dataclass(frozen=True)
class NormaliseOptions:
  """What is normalised by its running mean and deviation."""

  obs: bool = option(False, 'observations')
  reward: bool = option(False, 'rewards, by the deviation of discounted returns')
  value: bool = option(False, 'value targets: the critic predicts values in standard deviations')

  @property
  def moments(self) -> tuple[str, ...]:
    """The names of the moments that the network keeps."""
    wanted = {'obs': self.obs, 'returns': self.reward, 'values': self.value}
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


class Moments(NamedTuple):
  """Of everything seen so far."""

  count: jax.Array  # f32
  mean: jax.Array  # [...]
  m2: jax.Array  # [...], the sum of squared distances from the mean


def initial(shape: tuple[int, ...]) -> Moments:
  """Of nothing; the deviation counts as 1."""
  return Moments(jnp.zeros(()), jnp.zeros(shape), jnp.zeros(shape))


def deviation(moments: Moments) -> jax.Array:
  """The standard deviation, [...]."""
  variance = moments.m2 / jnp.maximum(moments.count, 1.0)
  return jnp.where(moments.count > 0, jnp.sqrt(variance + 1e-8), 1.0)


def standardise(moments: Moments, x: jax.Array) -> jax.Array:
  """[..., *shape] in deviations from the mean, clipped."""
  return jnp.clip((x - moments.mean) / deviation(moments), -CLIP, CLIP)


def restore(moments: Moments, x: jax.Array) -> jax.Array:
  """What `standardise` made x [..., *shape] of, but for its clipping."""
  return moments.mean + deviation(moments) * x


def merge(a: Moments, b: Moments) -> Moments:
  """Moments of the union of two samples (Chan, Golub and LeVeque 1979, equation 2.1)."""
  count, apart = a.count + b.count, b.mean - a.mean
  share = b.count / jnp.maximum(count, 1.0)
  return Moments(count, a.mean + apart * share,
                 a.m2 + b.m2 + jnp.square(apart) * a.count * share)


def measure(x: jax.Array, valid: jax.Array, groups: Groups) -> Moments:
  """Returns the moments of the valid rows of all devices.

  Args:
    x: [T, B, *shape], of the environments of this device.
    valid: [T, B] bool.
    groups: of the environments.
  """
  rows = groups.split((x, valid))
  count, total = groups.total(groups.map(_sum_of_group, *rows))
  mean = _mean(total, count)
  m2 = groups.total(groups.map(lambda *group: _squares_of_group(*group, mean), *rows))
  return Moments(count, mean, m2)


def _sum_of_rows(x: jax.Array) -> jax.Array:
  """[T, B, ...] -> [...]."""
  return pairwise_sum(x.reshape(-1, *x.shape[2:]))


def _where(valid: jax.Array, x: jax.Array) -> jax.Array:
  """x [T, B, ...] in valid rows [T, B], else 0."""
  return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0.0)


@island('sum_of_rows')
def _sum_of_group(x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The number of valid rows and their sum."""
  return _sum_of_rows(valid.astype(jnp.float32)), _sum_of_rows(_where(valid, x.astype(jnp.float32)))


@island('mean_of_rows')
def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
  return total / jnp.maximum(count, 1.0)


@island('squares_of_rows')
def _squares_of_group(x: jax.Array, valid: jax.Array, mean: jax.Array) -> jax.Array:
  """The sum of squared distances of valid rows from the mean."""
  return _sum_of_rows(_where(valid, jnp.square(x.astype(jnp.float32) - mean)))


def observe(params: Params, rollout: Rollout, targets: Any, groups: Groups) -> dict[str, Moments]:
  """The moments of an update's observations and value targets, where `params` has such."""
  rows = {'obs': lambda: frames.stacks(rollout.obs)[:-1], 'values': lambda: targets['value_target']}
  return {name: measure(rows[name](), rollout.valid, groups)
          for name in of(params) if name in rows}


def scale_rewards(params: Params, rollout: Rollout,
                  groups: Groups) -> tuple[Rollout, dict[str, Moments]]:
  """Divides rewards by the deviation of the discounted returns, this rollout's included.

  Returns:
    The rollout with scaled rewards, and the moments of its returns; where `params` has no moments
    of returns, the rollout as it is and none.
  """
  if 'returns' not in of(params):
    return rollout, {}
  new = measure(rollout.discounted_return, rollout.valid, groups)
  scaled = groups.map(lambda reward: _scaled_rewards(reward, of(params)['returns'], new),
                      groups.split(rollout.reward))
  return rollout._replace(reward=groups.join(scaled)), {'returns': new}


@island('scaled_rewards')
def _scaled_rewards(reward: jax.Array, before: Moments, new: Moments) -> jax.Array:
  return jnp.clip(reward / deviation(merge(before, new)), -CLIP, CLIP)


def of(params: Params) -> Mapping[str, Moments]:
  """The moments among a network's variables; empty where nothing is normalised."""
  return params.get('moments', {}) if isinstance(params, Mapping) else {}


def frozen(params: Params) -> Params:
  """params with moments that no gradient reaches."""
  return {**params, 'moments': lax.stop_gradient(of(params))} if of(params) else params


def weights(params: Params) -> Params:
  """params without the moments."""
  return {k: v for k, v in params.items() if k != 'moments'} if of(params) else params


def add(params: Params, moments: Mapping[str, Moments]) -> Params:
  """params with these merged into their moments."""
  if not moments:
    return params
  merged = {name: _merge(old, moments[name]) for name, old in of(params).items()}
  return {**params, 'moments': merged}


_merge = island('merged_moments')(merge)
