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

  obs: Any  # [T + 1, B, ...] in the environment's dtype; or frames.Frames of them
  action: jax.Array  # [T, B] i32, or [T, B, A] f32 as the policy drew it
  behaviour_log_prob: Any  # [T, B] f32: log mu(action | obs); () of policies without
  behaviour_value: jax.Array  # [T, B] f32: the acting network's estimate of V(obs)
  reward: jax.Array  # [T, B] f32, as the task gives it
  terminated: jax.Array  # [T, B] bool: no state follows (or, by option, a life was lost)
  truncated: jax.Array  # [T, B] bool: cut by the time limit; obs[t + 1] is the true last frame
  valid: jax.Array  # [T, B] bool
  episodes: Episodes
  discounted_return: Any = ()  # [T, B] f32, where rewards are normalised: of all rows so far
  core: Any = ()  # [1, B, H] f32 each, of recurrent networks: the state before row 0
  action_value: Any = ()  # [T, B] f32, for replays: the acting network's estimate of Q(obs, action)


class Experience(NamedTuple):
  """A rollout on its way into a replay; rows as of Rollout, one more of frames.

  Row t has the priority of the transition that began n rows before, which is complete only now.
  """

  obs: jax.Array  # [T + 1, B, ...], of a stack of frames the newest alone
  fresh: jax.Array  # [T + 1, B] bool: the stack held nothing but this frame
  began: jax.Array  # [1, B] bool: row 0 is the first of all, before it is nothing
  action: jax.Array  # [T, B, ...]
  reward: jax.Array  # [T, B] f32
  terminated: jax.Array  # [T, B] bool
  truncated: jax.Array  # [T, B] bool
  valid: jax.Array  # [T, B] bool
  priority: jax.Array  # [T, B] f32: |n-step TD error| by the acting network
  starts: jax.Array  # [T, B] bool: there is such a transition, and its first row was valid
  episodes: Any  # Episodes


class Transition(NamedTuple):
  """From one observation to the one n steps later, or to the end of the episode if that is sooner.

  All arrays have the leading axes of what was asked for.
  """

  obs: jax.Array  # [...]
  action: jax.Array
  reward: jax.Array  # f32: the discounted sum of rewards on the way
  discount: jax.Array  # f32: gamma^steps; 0 where the episode terminated
  next_obs: jax.Array  # [...]: where it was truncated, its true last observation
  added: jax.Array  # i32, of its first row


class TrainState(NamedTuple):
  """Everything a run goes on from; replicated on the learner mesh, donated to each update."""

  params: Params
  opt_state: Any
  update: jax.Array  # i32: learner updates done
  steps: jax.Array  # i32: valid agent steps learned from
  key: jax.Array  # PRNG key, never changed: what is drawn from it is folded with `update`
  target: Any = ()  # Target, of losses that have one
  replay: Any = ()  # of losses that have one, a replay: not replicated, each device has its groups


class Target(NamedTuple):
  """A slow copy of the parameters, and what it is timed by."""

  params: Params
  gradient_steps: jax.Array  # i32: made in all


def discounts(rollout: Rollout, discount: float) -> jax.Array:
  """discount_t [T, B]: zero after a termination; a truncation goes on from its last frame."""
  return discount * (1.0 - rollout.terminated.astype(jnp.float32))
