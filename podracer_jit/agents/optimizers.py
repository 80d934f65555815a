"""Optimizers (optax), learning rate schedules, and a rate that adapts to the policy's change."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from podracer_jit.options import option
from podracer_jit.schedules import Schedule

# Bounds of the learning rate with kl_target.
SLOWEST = 1e-6
FASTEST = 1e-2


@dataclasses.dataclass(frozen=True)
class Optimizer(abc.ABC):
  """Base class of optimizers with their common options; a subclass defines `scale`."""

  learning_rate: float = option(1e-3, 'step size, at the first step', at_least=0)
  anneal: bool = option(False, 'the rate falls linearly to 0 at total_steps')
  max_grad_norm: float = option(40.0, 'gradients are clipped to this global norm', above=0)
  kl_target: float = option(
      0.0, 'the rate, from 1e-6 to 1e-2, adapts to this KL divergence from the policy that made '
      'the rollout; 0: the rate does not adapt', at_least=0, constant=True)

  @abc.abstractmethod
  def scale(self) -> optax.GradientTransformation:
    """Returns the transformation of clipped gradients to steps, without the learning rate.

    Float options may be traced numbers, unless they are `constant`.
    """

  def transformation(self) -> optax.GradientTransformation:
    """Returns clipping, `scale` and the adaptive factor, without the learning rate.

    An optimizer with schedules has none; that of `schedules.at(optimizer, steps, total_steps)` has
    one.
    """
    steps = [optax.clip_by_global_norm(self.max_grad_norm), self.scale()]
    # The factor multiplies the learning rate later, so its limits are divided by the rate.
    if self.kl_target:
      steps.append(scale_by_kl(self.kl_target, SLOWEST / self.learning_rate,
                               FASTEST / self.learning_rate))
    return optax.chain(*steps)

  def schedule(self, total_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a function (valid steps learned from -> learning rate)."""
    rate = Schedule('linear', (self.learning_rate, 0.0), (1.0,)) if self.anneal else (
        self.learning_rate)
    if not isinstance(rate, Schedule):
      return lambda steps: jnp.float32(rate)
    return lambda steps: rate.at(steps.astype(jnp.float32), total_steps)

  def problems(self) -> Iterator[str]:
    """Yields problems of the combination of options, one line each."""
    rate = self.learning_rate
    changes = isinstance(rate, Schedule)
    if not np.float32(max(rate.values) if isinstance(rate, Schedule) else rate) > 0:
      yield f'learning_rate: must be above 0, got {rate}'
    if self.kl_target and self.anneal:
      yield 'kl_target: the rate either adapts or anneals; set optimizer.anneal = False'
    elif self.anneal and changes:
      yield f'anneal: the learning_rate changes by {rate}; set optimizer.anneal = False'
    if self.kl_target and changes:
      yield (f'kl_target: the rate either adapts or changes by {rate}; must be 0, or '
             'optimizer.learning_rate a number')
    elif self.kl_target and not SLOWEST <= rate <= FASTEST:
      yield (f'learning_rate: with kl_target it is between {SLOWEST:g} and {FASTEST:g}, got '
             f'{rate}')


@dataclasses.dataclass(frozen=True)
class RMSProp(Optimizer):
  """RMSProp as in PyTorch, with epsilon outside the square root."""

  learning_rate: float = option(6e-4, 'step size, at the first step', at_least=0)
  anneal: bool = option(True, 'the rate falls linearly to 0 at total_steps')
  decay: float = option(0.99, 'decay of the mean of squared gradients', at_least=0, at_most=1)
  eps: float = option(0.01, 'added to the root', at_least=0, above=0)

  def scale(self) -> optax.GradientTransformation:
    """Returns the scaling by the inverse root of the mean of squared gradients."""
    return optax.scale_by_rms(self.decay, self.eps, eps_in_sqrt=False)


@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
  """Adam (Kingma and Ba, 1412.6980)."""

  learning_rate: float = option(2.5e-4, 'step size, at the first step', at_least=0)
  anneal: bool = option(True, 'the rate falls linearly to 0 at total_steps')
  max_grad_norm: float = option(0.5, 'gradients are clipped to this global norm', above=0)
  b1: float = option(0.9, 'decay of the mean of gradients', at_least=0, at_most=1, below=1)
  b2: float = option(0.999, 'decay of the mean of their squares', at_least=0, at_most=1, below=1)
  eps: float = option(1e-5, 'added to the root', at_least=0, above=0)

  def scale(self) -> optax.GradientTransformation:
    """Returns Adam's scaling."""
    return optax.scale_by_adam(self.b1, self.b2, self.eps)


@dataclasses.dataclass(frozen=True)
class CentredRMSProp(Optimizer):
  """RMSProp by the gradients' deviation, with epsilon inside the root, as in TensorFlow.

  As there, the mean of squares begins at 1, so first steps are short.
  """

  learning_rate: float = option(6.25e-5, 'step size, at the first step', at_least=0)
  decay: float = option(0.95, 'decay of the means of gradients and of their squares', at_least=0,
                        at_most=1)
  eps: float = option(1.5e-7, 'added under the root', at_least=0, above=0)

  def scale(self) -> optax.GradientTransformation:
    """Returns the scaling by the inverse standard deviation of gradients."""
    return optax.scale_by_stddev(self.decay, self.eps, initial_scale=1.0)


@dataclasses.dataclass(frozen=True)
class RAdam(Adam):
  """Adam whose first steps are as long as the variance of its scaling allows (1908.03265)."""

  eps: float = option(1e-8, 'added to the root', at_least=0, above=0)

  def scale(self) -> optax.GradientTransformation:
    """Returns RAdam's scaling."""
    return optax.scale_by_radam(self.b1, self.b2, self.eps)


OPTIMIZERS = {'rmsprop': RMSProp, 'adam': Adam, 'radam': RAdam,
              'centred_rmsprop': CentredRMSProp}


def by_part(**transformations: optax.GradientTransformation
            ) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation of parameters {name: part}, with one for each part."""
  return optax.partition(transformations, lambda params: {name: name for name in params})


class KLState(NamedTuple):
  """State of `scale_by_kl`."""

  kl_factor: jax.Array  # f32, the factor of steps


def scale_by_kl(target: float, low: float, high: float) -> optax.GradientTransformationExtraArgs:
  """Scales steps by a factor that keeps the policy's change near a target, with rl_games' rule.

  The update takes `kl`, the mean divergence of the policy from the acting policy on the minibatch.
  So it grows over the epochs of an update. rl_games compares with the policy at the minibatch's
  previous visit instead, whose change is smaller: the same target makes smaller steps here. The
  factor is divided by 1.5 if kl > 2 * target, multiplied by 1.5 if kl < target / 2, and clipped
  to [low, high].
  """

  def update(steps, state, params=None, *, kl, **extra_args):
    """Scales the steps; a function of `optax.GradientTransformationExtraArgs`.

    Args:
      steps: the steps to scale.
      state: a `KLState`.
      params: unused.
      kl: [] f32, mean divergence of the policy from the acting policy.
      **extra_args: unused.

    Returns:
      The scaled steps and the next `KLState`.
    """
    del params, extra_args
    chex.assert_rank(kl, 0)
    change = jnp.where(kl > 2 * target, 1 / 1.5, jnp.where(kl < target / 2, 1.5, 1.0))
    factor = jnp.clip(state.kl_factor * change, low, high)
    return jax.tree.map(lambda x: x * factor, steps), KLState(factor)

  return optax.GradientTransformationExtraArgs(lambda params: KLState(jnp.ones(())), update)
