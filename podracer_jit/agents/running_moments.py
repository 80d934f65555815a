"""Running means and deviations of observations, returns and values, the same bits on any mesh.

They live among the network's variables, in the collection `moments`: so they travel with the
parameters, to actors, checkpoints and evaluation, and the actors of an update all use the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.envs import frames
from podracer_jit.numerics.deterministic import rounded
from podracer_jit.options import option
from podracer_jit.types import Params, Rollout

# Adds [T, B, ...] over all rows of all environments of all devices, in one fixed order.
Total = Callable[[jax.Array], jax.Array]
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
  variance = moments.m2 * (1.0 / jnp.maximum(moments.count, 1.0))
  return jnp.where(moments.count > 0, jnp.sqrt(rounded(variance) + 1e-8), 1.0)


def standardise(moments: Moments, x: jax.Array) -> jax.Array:
  """[..., *shape] in deviations from the mean, clipped."""
  return jnp.clip((x - moments.mean) * (1.0 / deviation(moments)), -CLIP, CLIP)


def restore(moments: Moments, x: jax.Array) -> jax.Array:
  """What `standardise` made x [..., *shape] of, but for its clipping."""
  return moments.mean + rounded(deviation(moments) * x)


def measure(x: jax.Array, valid: jax.Array, total: Total) -> Moments:
  """Of the valid ones of x [T, B, *shape]."""
  mask = valid.reshape(valid.shape + (1,) * (x.ndim - 2))
  x, count = x.astype(jnp.float32), total(valid.astype(jnp.float32))
  # Not divided by: in some programs XLA makes that a product with the reciprocal.
  mean = rounded(total(jnp.where(mask, x, 0.0)) * (1.0 / jnp.maximum(count, 1.0)))
  return Moments(count, mean, total(jnp.where(mask, rounded(jnp.square(x - mean)), 0.0)))


def merge(a: Moments, b: Moments) -> Moments:
  """Of all that both are of (Chan, Golub and LeVeque 1979, equation 2.1)."""
  count, apart = a.count + b.count, b.mean - a.mean
  share = b.count / jnp.maximum(count, 1.0)
  between = rounded(jnp.square(apart) * (a.count * share))
  return Moments(count, a.mean + rounded(apart * share), a.m2 + b.m2 + between)


def observe(params: Params, rollout: Rollout, targets: Any, total: Total) -> dict[str, Moments]:
  """The moments of an update's observations and value targets, where `params` has such."""
  seen = {'obs': lambda: frames.stacks(rollout.obs)[:-1], 'values': lambda: targets['value_target']}
  return {name: measure(seen[name](), rollout.valid, total)
          for name in of(params) if name in seen}


def scale_rewards(params: Params, rollout: Rollout,
                  total: Total) -> tuple[Rollout, dict[str, Moments]]:
  """Rewards in deviations of the discounted return, this rollout's too; and the latter's moments.

  As they are, with no moments, where `params` has none of returns.
  """
  if 'returns' not in of(params):
    return rollout, {}
  here = measure(rollout.discounted_return, rollout.valid, total)
  scaled = rollout.reward * (1.0 / deviation(merge(of(params)['returns'], here)))
  return rollout._replace(reward=jnp.clip(scaled, -CLIP, CLIP)), {'returns': here}


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
  merged = {name: merge(old, moments[name]) for name, old in of(params).items()}
  return {**params, 'moments': merged}
