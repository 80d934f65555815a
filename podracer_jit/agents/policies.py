"""Policies: distributions over actions, as actors and losses use them.

`dist_params` [..., K] holds the parameters of the distribution. The network's policy head gives
them. Logits and values of illegal actions have been replaced before a policy gets them
(`action_masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np


class Policy(NamedTuple):
  """Family of distributions over actions.

  An action is [...] i32 if it is one choice, [..., A] i32 if it is A choices, and [..., A] f32 if
  it is continuous.
  """

  dist_size: int  # K
  action_shape: tuple[int, ...]  # of one action: () or (A,)
  action_dtype: np.dtype  # int32 or float32
  sample: Callable[[jax.Array, jax.Array], jax.Array]  # (key, dist_params) -> action
  mode: Callable[[jax.Array], jax.Array]  # dist_params -> the most likely action
  # (dist_params, action) -> [...], nats
  log_prob: Callable[[jax.Array, jax.Array], jax.Array] | None
  entropy: Callable[[jax.Array], jax.Array] | None  # dist_params -> [...], nats
  to_env: Callable[[jax.Array], jax.Array]  # action -> the action sent to the task
  # (key, dist_params, exploration [...]) -> action; replaces `sample` in policies whose amount of
  # exploration is an input
  explore: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None
  # (dist_params of P, those of Q) -> KL(P || Q) [...], nats
  kl: Callable[[jax.Array, jax.Array], jax.Array] | None = None


def categorical(num_actions: int) -> Policy:
  """Returns the categorical policy over `num_actions` actions; dist_params holds logits."""

  def log_prob(logits, action):
    chex.assert_type(action, int)
    chex.assert_equal_shape_prefix([logits, action], action.ndim)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]

  def entropy(logits):
    chex.assert_type(logits, float)
    log_pi = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_pi) * log_pi, axis=-1)

  def kl(logits, other_logits):
    chex.assert_equal_shape([logits, other_logits])
    log_p = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(other_logits)), axis=-1)

  return Policy(
      num_actions, (), np.dtype(np.int32),
      lambda key, logits: jax.random.categorical(key, logits).astype(jnp.int32),
      lambda logits: jnp.argmax(logits, axis=-1).astype(jnp.int32),
      log_prob, entropy, lambda action: action, kl=kl)


def product_of_categoricals(choices: Sequence[int]) -> Policy:
  """Returns the policy over vectors of choices, which are independent given the observation.

  dist_params [..., sum(choices)] holds the logits of all elements' choices, element after element.

  Args:
    choices: number of choices of each element of an action.
  """
  choices = tuple(choices)
  ends = tuple(int(end) for end in np.cumsum(choices))
  elements = [categorical(number) for number in choices]

  def split(logits):
    chex.assert_axis_dimension(logits, -1, ends[-1])
    return jnp.split(logits, ends[:-1], axis=-1)

  def sample(key, logits):
    keys = jax.random.split(key, len(choices))
    return jnp.stack([element.sample(key, part) for element, key, part in
                      zip(elements, keys, split(logits), strict=True)], axis=-1)

  def mode(logits):
    return jnp.stack([element.mode(part) for element, part in
                      zip(elements, split(logits), strict=True)], axis=-1)

  def log_prob(logits, action):
    chex.assert_type(action, int)
    chex.assert_shape(action, (*logits.shape[:-1], len(choices)))
    return sum(element.log_prob(part, action[..., i])
               for i, (element, part) in enumerate(zip(elements, split(logits), strict=True)))

  def entropy(logits):
    return sum(element.entropy(part)
               for element, part in zip(elements, split(logits), strict=True))

  def kl(logits, other_logits):
    return sum(element.kl(*parts) for element, *parts in
               zip(elements, split(logits), split(other_logits), strict=True))

  return Policy(ends[-1], (len(choices),), np.dtype(np.int32), sample, mode, log_prob, entropy,
                lambda action: action, kl=kl)


def _normal_log_prob(dist_params: jax.Array, action: jax.Array) -> jax.Array:
  """Returns the log density [...] of a diagonal Gaussian at action [..., A]."""
  chex.assert_shape(dist_params, (..., 2 * action.shape[-1]))
  mean, log_std = jnp.split(dist_params, 2, axis=-1)
  z = (action - mean) * jnp.exp(-log_std)
  return -jnp.sum(0.5 * jnp.square(z) + log_std + 0.5 * np.log(2 * np.pi), axis=-1)


def _normal_sample(key: jax.Array, dist_params: jax.Array) -> jax.Array:
  """Draws actions [..., A] from diagonal Gaussians."""
  mean, log_std = jnp.split(dist_params, 2, axis=-1)
  return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)


def log_tanh_slope(u: jax.Array) -> jax.Array:
  """Returns log(1 - tanh(u)^2), in a form that is finite for large |u|."""
  return 2 * (np.log(2) - u - jax.nn.softplus(-2 * u))


def _normal_entropy(dist_params: jax.Array) -> jax.Array:
  """Returns the entropy [...] of diagonal Gaussians, in nats."""
  log_std = jnp.split(dist_params, 2, axis=-1)[1]
  return jnp.sum(log_std + 0.5 * np.log(2 * np.pi * np.e), axis=-1)


def _normal_kl(dist_params: jax.Array, other: jax.Array) -> jax.Array:
  """Returns the KL divergence [...] of diagonal Gaussians from others, in nats."""
  chex.assert_equal_shape([dist_params, other])
  mean, log_std = jnp.split(dist_params, 2, axis=-1)
  other_mean, other_log_std = jnp.split(other, 2, axis=-1)
  z = (mean - other_mean) * jnp.exp(-other_log_std)
  change = other_log_std - log_std
  return jnp.sum(change + 0.5 * (jnp.exp(-2 * change) + jnp.square(z) - 1), axis=-1)


def _scaling(low: np.ndarray, high: np.ndarray) -> Callable[[jax.Array], jax.Array]:
  """Returns a function that scales numbers [..., A] from -1 to 1 to the bounds of a task.

  Raises:
    ValueError: float32 cannot hold the distance between two bounds.
  """
  with np.errstate(over='ignore'):
    middle = (high + low) / 2
    half = (high - low) / 2
  if not (np.isfinite(middle).all() and np.isfinite(half).all()):
    raise ValueError(f'the actions are between {low.min():g} and {high.max():g}, which is too far '
                     'apart to scale to')
  # Rounding may exceed a bound by one unit in the last place.
  return lambda numbers: jnp.clip(middle + half * numbers, low, high)


def gaussian(low: np.ndarray, high: np.ndarray) -> Policy:
  """Returns a diagonal Gaussian policy whose actions are clipped to the task's bounds.

  dist_params [..., 2 A] holds the means, followed by the log standard deviations.

  Args:
    low: [A], lower bounds of the task's actions.
    high: [A], upper bounds of the task's actions.
  """
  size = len(low)
  return Policy(2 * size, (size,), np.dtype(np.float32), _normal_sample,
                lambda dist_params: jnp.split(dist_params, 2, axis=-1)[0], _normal_log_prob,
                _normal_entropy,
                lambda action: jnp.clip(action, low, high), kl=_normal_kl)


def scaled_gaussian(low: np.ndarray, high: np.ndarray) -> Policy:
  """Returns a diagonal Gaussian policy whose actions are clipped and scaled to the task's bounds.

  Actions are clipped to [-1, 1], then scaled. dist_params has the layout of `gaussian`.

  Args:
    low: [A], finite lower bounds of the task's actions.
    high: [A], finite upper bounds of the task's actions.
  """
  to_bounds = _scaling(low, high)
  return gaussian(low, high)._replace(
      to_env=lambda action: to_bounds(jnp.clip(action, -1.0, 1.0)))


def tanh_gaussian(low: np.ndarray, high: np.ndarray) -> Policy:
  """Returns a diagonal Gaussian policy whose actions are squashed by tanh to the task's bounds.

  dist_params has the layout of `gaussian`. The stored action u is the draw before tanh, and
  log_prob is the Gaussian's log density of u; importance ratios are the same before and after tanh.
  The entropy belongs to tanh(u): the Gaussian's entropy plus E[log(1 - tanh(u)^2)], by
  Gauss-Hermite quadrature with 16 nodes.

  Args:
    low: [A], finite lower bounds of the task's actions.
    high: [A], finite upper bounds of the task's actions.
  """
  to_bounds = _scaling(low, high)
  nodes, weights = np.polynomial.hermite_e.hermegauss(16)
  nodes = nodes.astype(np.float32)
  weights = (weights / weights.sum()).astype(np.float32)

  def entropy(dist_params):
    chex.assert_is_divisible(dist_params.shape[-1], 2)
    mean, log_std = jnp.split(dist_params, 2, axis=-1)
    u = mean[..., None] + jnp.exp(log_std)[..., None] * nodes
    return _normal_entropy(dist_params) + jnp.sum(log_tanh_slope(u) * weights, axis=(-2, -1))

  return gaussian(low, high)._replace(
      entropy=entropy, to_env=lambda action: to_bounds(jnp.tanh(action)))


def epsilon_greedy(num_actions: int) -> Policy:
  """Returns a greedy policy over `num_actions` action values.

  dist_params holds the action values. `explore` takes a uniformly random action with probability
  epsilon.
  """

  def best(values):
    return jnp.argmax(values, axis=-1).astype(jnp.int32)

  def explore(key, values, epsilon):
    chex.assert_shape(values, (*epsilon.shape, num_actions))
    explore_key, action_key = jax.random.split(key)
    explores = jax.random.uniform(explore_key, epsilon.shape) < epsilon
    action = jax.random.randint(action_key, values.shape[:-1], 0, num_actions, jnp.int32)
    return jnp.where(explores, action, best(values))

  return Policy(num_actions, (), np.dtype(np.int32), lambda key, values: best(values), best,
                None, None, lambda action: action, explore)


def deterministic(low: np.ndarray, high: np.ndarray) -> Policy:
  """Returns a deterministic policy; dist_params [..., A] is the action, in [-1, 1].

  Actions are scaled to the task's bounds. `explore` adds Gaussian noise to the action before it is
  scaled, and clips the sum to [-1, 1]; its input is the noise's standard deviation (1803.00933,
  appendix D).

  Args:
    low: [A], finite lower bounds of the task's actions.
    high: [A], finite upper bounds of the task's actions.
  """
  def explore(key, dist_params, deviation):
    chex.assert_shape(dist_params, (*deviation.shape, len(low)))
    noise = deviation[..., None] * jax.random.normal(key, dist_params.shape)
    return jnp.clip(dist_params + noise, -1.0, 1.0)

  return Policy(len(low), (len(low),), np.dtype(np.float32), lambda key, dist_params: dist_params,
                lambda dist_params: dist_params, None, None, _scaling(low, high), explore)


# Kinds of `dist_params`. A policy fits networks whose output has its kind, and algorithms that use
# such networks.
DISTRIBUTION = 'a distribution'
ACTION_VALUES = 'action values'
ACTION = 'an action'


class PolicyFamily(NamedTuple):
  """Constructor of policies, independent of the task."""

  # (number of actions) if an action is one choice, (number of choices of each element) if it is
  # several, else (lower bounds [A], upper bounds [A]) -> the policy
  make: Callable[..., Policy]
  discrete: bool  # actions are choices
  reads: str  # kind of `dist_params`: DISTRIBUTION, ACTION_VALUES or ACTION
  several: bool = False  # an action is a vector of choices


# 'auto' selects the first family that fits the algorithm and the task.
FAMILIES = {
    'categorical': PolicyFamily(categorical, discrete=True, reads=DISTRIBUTION),
    'product_of_categoricals': PolicyFamily(product_of_categoricals, discrete=True,
                                            reads=DISTRIBUTION, several=True),
    'gaussian': PolicyFamily(gaussian, discrete=False, reads=DISTRIBUTION),
    'scaled_gaussian': PolicyFamily(scaled_gaussian, discrete=False, reads=DISTRIBUTION),
    'tanh_gaussian': PolicyFamily(tanh_gaussian, discrete=False, reads=DISTRIBUTION),
    'epsilon_greedy': PolicyFamily(epsilon_greedy, discrete=True, reads=ACTION_VALUES),
    'deterministic': PolicyFamily(deterministic, discrete=False, reads=ACTION),
}
