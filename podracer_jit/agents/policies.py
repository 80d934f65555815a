"""Policies: distributions over actions, as actors and losses need them.

A network's policy head gives `dist`, the numbers [..., K] that say which distribution it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Policy(NamedTuple):
  """A family of distributions. Actions are [...] i32, or [..., A] f32 where they are continuous."""

  dist_size: int  # K
  action_shape: tuple[int, ...]  # of one action
  action_dtype: np.dtype
  sample: Callable[[jax.Array, jax.Array], jax.Array]  # (key, dist) -> action
  mode: Callable[[jax.Array], jax.Array]  # dist -> the likeliest action
  log_prob: Callable[[jax.Array, jax.Array], jax.Array] | None  # (dist, action) -> [...], nats
  entropy: Callable[[jax.Array], jax.Array] | None  # dist -> [...], nats
  to_env: Callable[[jax.Array], jax.Array]  # action -> what the task is given
  # (key, dist, exploration [...]) -> action, of policies that explore by an amount given them
  explore: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None


def categorical(num_actions: int) -> Policy:
  """One of `num_actions`; dist: logits."""

  def log_prob(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]

  def entropy(logits):
    log_pi = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_pi) * log_pi, axis=-1)

  return Policy(
      num_actions, (), np.dtype(np.int32),
      lambda key, logits: jax.random.categorical(key, logits).astype(jnp.int32),
      lambda logits: jnp.argmax(logits, axis=-1).astype(jnp.int32),
      log_prob, entropy, lambda action: action)


def _normal_log_prob(dist: jax.Array, action: jax.Array) -> jax.Array:
  mean, log_std = jnp.split(dist, 2, axis=-1)
  z = (action - mean) * jnp.exp(-log_std)
  return -jnp.sum(0.5 * jnp.square(z) + log_std + 0.5 * np.log(2 * np.pi), axis=-1)


def _normal_sample(key: jax.Array, dist: jax.Array) -> jax.Array:
  mean, log_std = jnp.split(dist, 2, axis=-1)
  return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)


def _normal_entropy(dist: jax.Array) -> jax.Array:
  log_std = jnp.split(dist, 2, axis=-1)[1]
  return jnp.sum(log_std + 0.5 * np.log(2 * np.pi * np.e), axis=-1)


def gaussian(low: np.ndarray, high: np.ndarray) -> Policy:
  """A diagonal Gaussian; dist: means, then log standard deviations. Tasks see it clipped.

  Args:
    low: [A], the least that the task takes.
    high: [A], the most.
  """
  size = len(low)
  return Policy(2 * size, (size,), np.dtype(np.float32), _normal_sample,
                lambda dist: jnp.split(dist, 2, axis=-1)[0], _normal_log_prob, _normal_entropy,
                lambda action: jnp.clip(action, low, high))


def scaled_gaussian(low: np.ndarray, high: np.ndarray) -> Policy:
  """The same clipped to [-1, 1], which is then stretched to the task's bounds; they are finite."""
  middle, half = (high + low) / 2, (high - low) / 2
  return gaussian(low, high)._replace(
      to_env=lambda action: middle + half * jnp.clip(action, -1.0, 1.0))


def tanh_gaussian(low: np.ndarray, high: np.ndarray) -> Policy:
  """A Gaussian squashed by tanh to the task's bounds; dist as of `gaussian`.

  An action is what is squashed and log_prob its density, which has the ratios of the squashed
  one's. The entropy is that of tanh's output: the Gaussian's and E[log(1 - tanh(u)^2)], by
  Gauss-Hermite quadrature of 16 nodes.

  Args:
    low: [A], the least that the task takes; finite.
    high: [A], the most; finite.
  """
  middle, half = (high + low) / 2, (high - low) / 2
  nodes, weights = np.polynomial.hermite_e.hermegauss(16)
  nodes, weights = nodes.astype(np.float32), (weights / weights.sum()).astype(np.float32)

  def entropy(dist):
    mean, log_std = jnp.split(dist, 2, axis=-1)
    u = mean[..., None] + jnp.exp(log_std)[..., None] * nodes
    log_slope = 2 * (np.log(2) - u - jax.nn.softplus(-2 * u))  # log(1 - tanh(u)^2), never -inf
    return _normal_entropy(dist) + jnp.sum(log_slope * weights, axis=(-2, -1))

  return gaussian(low, high)._replace(
      entropy=entropy, to_env=lambda action: middle + half * jnp.tanh(action))


def epsilon_greedy(num_actions: int) -> Policy:
  """The best of `num_actions`; dist: their values. Explores at random, epsilon of the time."""

  def best(values):
    return jnp.argmax(values, axis=-1).astype(jnp.int32)

  def explore(key, values, epsilon):
    coin, dice = jax.random.split(key)
    other = jax.random.randint(dice, values.shape[:-1], 0, num_actions, jnp.int32)
    return jnp.where(jax.random.uniform(coin, epsilon.shape) < epsilon, other, best(values))

  return Policy(num_actions, (), np.dtype(np.int32), lambda key, values: best(values), best,
                None, None, lambda action: action, explore)


def deterministic(low: np.ndarray, high: np.ndarray) -> Policy:
  """The action that dist is, in [-1, 1], stretched to the task's bounds, which are finite.

  Explores by Gaussian noise of the deviation given, in those units (1803.00933, appendix D).
  """
  middle, half = (high + low) / 2, (high - low) / 2

  def explore(key, dist, deviation):
    noise = deviation[..., None] * jax.random.normal(key, dist.shape)
    return jnp.clip(dist + noise, -1.0, 1.0)

  return Policy(len(low), (len(low),), np.dtype(np.float32), lambda key, dist: dist,
                lambda dist: dist, None, None, lambda action: middle + half * action,
                explore)


# What the network gives a policy, and so which networks and algorithms it goes with.
DISTRIBUTION, ACTION_VALUES, ACTION = 'a distribution', 'action values', 'an action'


class Family(NamedTuple):
  """A kind of policy before a task is known."""

  # discrete: (number of actions); continuous: (lowest [A], highest [A])
  make: Callable[..., Policy]
  discrete: bool
  reads: str  # DISTRIBUTION, ACTION_VALUES or ACTION


# The first that fits an algorithm and a task is what 'auto' means.
FAMILIES = {
    'categorical': Family(categorical, discrete=True, reads=DISTRIBUTION),
    'gaussian': Family(gaussian, discrete=False, reads=DISTRIBUTION),
    'scaled_gaussian': Family(scaled_gaussian, discrete=False, reads=DISTRIBUTION),
    'tanh_gaussian': Family(tanh_gaussian, discrete=False, reads=DISTRIBUTION),
    'epsilon_greedy': Family(epsilon_greedy, discrete=True, reads=ACTION_VALUES),
    'deterministic': Family(deterministic, discrete=False, reads=ACTION),
}
