"""The shapes that modules agree on, stated once.

T is the unroll length, B a number of environments. Everything is time-major.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = Any  # the network's variables, a pytree
Metrics = dict[str, jax.Array]


class Episodes(NamedTuple):
  """Episodes that ended, by row. Lives lost are not episodes."""

  ended: jax.Array  # [T, B] bool: the episode ended with this row
  episode_return: jax.Array  # [T, B] f32: sum of unclipped rewards so far
  length: jax.Array  # [T, B] i32: valid rows so far


class Rollout(NamedTuple):
  """Row t: obs[t] was seen, action[t] taken, the rest came back with obs[t + 1].

  A row is invalid where obs[t] is the last observation of a finished episode: EnvPool spends that
  step on the reset and ignores the action. The frame itself is real: a truncation bootstraps from
  it.
  """

  obs: jax.Array  # [T + 1, B, ...] in the environment's dtype
  action: jax.Array  # [T, B] i32, or [T, B, A] f32 as the policy drew it
  behaviour_log_prob: jax.Array  # [T, B] f32: log mu(action | obs)
  behaviour_value: jax.Array  # [T, B] f32: the acting network's estimate of V(obs)
  reward: jax.Array  # [T, B] f32, as the task gives it
  terminated: jax.Array  # [T, B] bool: no state follows (or, by option, a life was lost)
  truncated: jax.Array  # [T, B] bool: cut by the time limit; obs[t + 1] is the true last frame
  valid: jax.Array  # [T, B] bool
  episodes: Episodes
  discounted_return: Any = ()  # [T, B] f32, where rewards are normalised: of all rows so far
  core: Any = ()  # [1, B, H] f32 each, of recurrent networks: the state before row 0


class TrainState(NamedTuple):
  """Everything a run goes on from; replicated on the learner mesh, donated to each update."""

  params: Params
  opt_state: Any
  update: jax.Array  # i32: learner updates done
  steps: jax.Array  # i32: valid agent steps learned from
  key: jax.Array  # PRNG key, never changed: what is drawn from it is folded with `update`


def discounts(rollout: Rollout, discount: float) -> jax.Array:
  """discount_t [T, B]: zero after a termination; a truncation goes on from its last frame."""
  return discount * (1.0 - rollout.terminated.astype(jnp.float32))
