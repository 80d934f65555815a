"""The categorical policy: what losses and actors need of it. Logits [..., A]."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
  """log pi(action), [...]."""
  return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


def entropy(logits: jax.Array) -> jax.Array:
  """Entropy in nats, [...]."""
  log_pi = jax.nn.log_softmax(logits)
  return -jnp.sum(jnp.exp(log_pi) * log_pi, axis=-1)
