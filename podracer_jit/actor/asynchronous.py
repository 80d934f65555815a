"""R that does not wait for the slowest: each row is of the first environments that are ready.

Every environment fills a sequence of its own, T rows and the observation after them. The sequence
that is complete first is the next column of the rollout, whoever made it. So columns depend on
timing, a fast environment may have two in a rollout and a slow one none, and no run repeats.

What is not complete goes on in the next call: the first rows of a column may have been made with
parameters of the calls before, older than the version that the rollout carries. What acted is in
the rows, as behaviour_log_prob and behaviour_value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.actor.rollouts import ActorState, EnvState, count, make_act, zeros
from podracer_jit.agents.networks import Apply
from podracer_jit.agents.policies import Policy
from podracer_jit.envs import frames
from podracer_jit.envs.protocol import Shard, TimeStep
from podracer_jit.types import Params, Rollout


class Sequences(NamedTuple):
  """A shard of N environments between two rollouts, the sequences in S slots of a buffer."""

  env: EnvState  # of all N; its observations are in the buffer
  buffer: Rollout  # [T, S, ...]
  slots: jax.Array  # [S] i32: those being filled, of each environment; the complete ones; the free
  row: jax.Array  # [N] i32: which row waits for its reward; -1: for the first observation of all
  complete: jax.Array  # i32: how many wait for the next rollout, the oldest first


def initial_state(shard: Shard, key: jax.Array, obs: jax.ShapeDtypeStruct, policy: Policy,
                  unroll_length: int) -> ActorState:
  """The state of a fresh asynchronous shard.

  Args:
    shard: with the environments.
    key: of the shard.
    obs: one observation, as a shape.
    policy: that will act.
    unroll_length: T.
  """
  num_envs = shard.num_envs
  # Those being filled, those of a rollout, and what the last step can complete beyond it.
  size = 2 * num_envs + shard.batch_size - 1
  env = EnvState(
      # What comes first is an observation with no step before it, as after an episode's end.
      obs=(), ended=jnp.ones(num_envs, bool),
      episode_return=jnp.zeros(num_envs, jnp.float32),
      episode_length=jnp.zeros(num_envs, jnp.int32),
      key=key, rollouts=jnp.zeros((), jnp.int32), discounted_return=(), core=())
  rows = jnp.zeros((unroll_length + 1, size, *obs.shape), obs.dtype)
  state = Sequences(env, zeros(rows, size, policy, unroll_length),
                    jnp.arange(size, dtype=jnp.int32), jnp.full(num_envs, -1, jnp.int32),
                    jnp.zeros((), jnp.int32))
  return ActorState(jnp.array(shard.handle), (state,))


def make_rollout(shard: Shard, apply: Apply, policy: Policy, unroll_length: int, stack: int = 1
                 ) -> Callable:
  """Returns rollout(params, actor_state) -> (actor_state, (Rollout,)), to be jitted.

  A rollout has as many columns as the shard has environments; observations that are stacks of so
  many frames (`EnvSpec.stack`) leave as `frames.Frames`. The network remembers nothing.
  """
  act = make_act(apply, policy)

  def turn(params: Params, carry):
    t, token, state = carry
    with jax.named_scope('environment'):
      token, step = shard.recv(token)
    state, ready = _arrive(state, step, unroll_length)
    _, sent, row = act(params, t, ready)
    with jax.named_scope('environment'):
      token = shard.send(token, sent, step.env_id)
    slot = state.slots[step.env_id]
    return t + 1, token, state._replace(
        buffer=_write(state.buffer, state.row[step.env_id], slot, obs=ready.obs, **row))

  def rollout(params: Params, actor_state: ActorState):
    token, (state,) = actor_state
    _, token, state = lax.while_loop(
        lambda carry: carry[-1].complete < shard.num_envs, functools.partial(turn, params),
        (jnp.int32(0), token, state))
    state, made = _take(state, shard.num_envs)
    return ActorState(token, (state,)), (made._replace(obs=frames.of(made.obs, stack)),)

  return rollout


def _arrive(state: Sequences, step: TimeStep, unroll_length: int) -> tuple[Sequences, EnvState]:
  """Ends the rows that came back and begins the next; those environments, as they are now."""
  who, env = step.env_id, state.env
  books = ('ended', 'episode_return', 'episode_length')
  ready, back = count(env._replace(**{name: getattr(env, name)[who] for name in books}), step)
  env = env._replace(**{
      name: getattr(env, name).at[who].set(getattr(ready, name), unique_indices=True)
      for name in books})
  row, slot, num_envs = state.row[who], state.slots[who], len(state.row)
  # Row -1, of no sequence, is the last one of what is being filled: written anew before its end.
  buffer = _write(state.buffer, row % unroll_length, slot, **back)
  buffer = _write(buffer, row + 1, slot, obs=step.obs)
  # A complete sequence changes places with a free slot.
  full = row + 1 == unroll_length
  place = num_envs + state.complete + jnp.cumsum(full, dtype=jnp.int32) - 1
  slots = state.slots.at[who].set(jnp.where(full, state.slots[place], slot), unique_indices=True)
  slots = slots.at[jnp.where(full, place, len(slots))].set(slot, mode='drop')
  return Sequences(env, buffer, slots,
                   state.row.at[who].set(jnp.where(full, 0, row + 1), unique_indices=True),
                   state.complete + jnp.sum(full, dtype=jnp.int32)), ready


@jax.named_scope('storing')
def _take(state: Sequences, columns: int) -> tuple[Sequences, Rollout]:
  """The oldest complete sequences as a rollout; their slots are free again."""
  open_, rest = state.slots[:columns], state.slots[columns:]  # as many as there are environments
  made = jax.tree.map(lambda x: x[:, rest[:columns]], state.buffer)
  return state._replace(
      env=state.env._replace(rollouts=state.env.rollouts + 1),
      slots=jnp.concatenate([open_, jnp.roll(rest, -columns)]),
      complete=state.complete - columns), made


@jax.named_scope('storing')
def _write(buffer: Rollout, row: jax.Array, slot: jax.Array, **fields) -> Rollout:
  """Sets row[i] of slot[i] of the named fields [n, ...]."""
  return buffer._replace(**{
      name: jax.tree.map(lambda b, x: b.at[row, slot].set(x, unique_indices=True),
                         getattr(buffer, name), value)
      for name, value in fields.items()})
