"""Optimizers by name (optax), their learning rates, and a rate that follows the policy's change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def make(options: Mapping[str, Any]) -> optax.GradientTransformation:
  """Clipping, then the named optimizer, without its learning rate."""
  if options['name'] == 'rmsprop':
    scale = optax.scale_by_rms(options['decay'], options['eps'], eps_in_sqrt=False)
  elif options['name'] == 'centred_rmsprop':
    scale = optax.scale_by_stddev(options['decay'], options['eps'])
  else:
    scale = optax.scale_by_adam(options['b1'], options['b2'], options['eps'])
  steps = [optax.clip_by_global_norm(options['max_grad_norm']), scale]
  if options['kl_target']:
    rate = options['learning_rate']
    steps.append(scale_by_kl(options['kl_target'], 1e-6 / rate, 1e-2 / rate))
  return optax.chain(*steps)


def make_learning_rate(options: Mapping[str, Any], total_steps: int) -> Callable:
  """Rate by valid steps learned from: constant, or linear to 0 at total_steps."""
  start = options['learning_rate']
  if not options['anneal']:
    return lambda steps: jnp.float32(start)
  return lambda steps: start * jnp.maximum(0.0, 1.0 - steps.astype(jnp.float32) / total_steps)


class KLState(NamedTuple):
  """Of `scale_by_kl`."""

  kl_factor: jax.Array  # f32


def scale_by_kl(target: float, low: float, high: float) -> optax.GradientTransformationExtraArgs:
  """Steps a factor shorter where the policy moves too far, longer where it hardly does (rl_games).

  The factor, from `low` to `high`, is divided by 1.5 where `kl`, the divergence of the policy from
  the acting one over the minibatch, is above 2 * target, and multiplied by it below target / 2.
  """

  def update(steps, state, params=None, *, kl, **others):
    del params, others
    change = jnp.where(kl > 2 * target, 1 / 1.5, jnp.where(kl < target / 2, 1.5, 1.0))
    factor = jnp.clip(state.kl_factor * change, low, high)
    return jax.tree.map(lambda x: x * factor, steps), KLState(factor)

  return optax.GradientTransformationExtraArgs(lambda params: KLState(jnp.ones(())), update)
