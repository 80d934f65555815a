"""Asynchronous rollouts: each step is taken by the first environments that are ready.

Every environment fills a sequence of its own: T rows and the observation after them. The sequence
that is complete first becomes the next column of the rollout, whichever environment it comes from.
So the columns depend on timing: a fast environment may have two columns in a rollout and a slow
one none, and no run can be reproduced.

An incomplete sequence is continued in the next call. The first rows of a column may therefore come
from parameters of earlier calls, older than the version that the rollout carries. The rows hold the
log-probability and the value of the policy that acted (`Rollout.extras`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.actor.rollouts import (
    ActorState,
    EnvState,
    empty_rollout,
    end_row,
    make_act,
    row_key,
    with_faults,
)
from podracer_jit.envs import frames
from podracer_jit.envs.protocol import TimeStep, VectorEnv
from podracer_jit.losses.algorithm import Algorithm, ForActors
from podracer_jit.types import Rollout


class Sequences(NamedTuple):
  """State of N environments between two rollouts; the buffer has S slots."""

  env: EnvState  # of all N; the observations are in the buffer
  buffer: Rollout  # [T, S, ...], one sequence in each slot
  # [S] i32, a permutation of the slots: first the slot that each environment fills, then the slots
  # with complete sequences (the oldest first), then the free slots.
  slots: jax.Array
  # [N] i32: the row of the sequence that waits for its reward; -1 before the first observation.
  row: jax.Array
  env_id: jax.Array  # [S] i32: the environment whose sequence a slot has, as in `EnvState`
  complete: jax.Array  # i32: number of complete sequences that wait for the next rollout


def initial_state(algorithm: Algorithm, vector_env: VectorEnv, key: jax.Array,
                  first_env: int = 0) -> ActorState:
  """Returns the state of an asynchronous vector environment that has just been started.

  Args:
    algorithm: acts in the environments.
    vector_env: the environments.
    key: PRNG key of the vector environment.
    first_env: index of the first environment among all environments of the run.

  Returns:
    The actor's state, with one `Sequences`.
  """
  num_envs = vector_env.num_envs
  # N slots being filled, N of a rollout, and at most batch_size - 1 that the last step completes
  # beyond the rollout.
  size = 2 * num_envs + vector_env.batch_size - 1
  env = EnvState(
      # No step precedes the first observation, so it is treated like one after an episode's end.
      obs=None, ended=jnp.ones(num_envs, bool),
      episode_return=jnp.zeros(num_envs, jnp.float32),
      episode_length=jnp.zeros(num_envs, jnp.int32),
      key=key, rollouts=jnp.zeros((), jnp.int32), discounted_return=None, recurrent_state=None,
      env_id=first_env + jnp.arange(num_envs, dtype=jnp.int32),
      simulator=jax.tree.map(jnp.array, vector_env.first_state))
  unroll_length = algorithm.parts.unroll_length
  spec = algorithm.parts.spec
  rows = jnp.zeros((unroll_length + 1, size, *spec.obs_shape), spec.obs_dtype)
  state = Sequences(
      env=env,
      buffer=empty_rollout(algorithm, rows, size, unroll_length),
      slots=jnp.arange(size, dtype=jnp.int32),
      row=jnp.full(num_envs, -1, jnp.int32),
      env_id=jnp.zeros(size, jnp.int32),
      complete=jnp.zeros((), jnp.int32))
  return ActorState(jnp.array(vector_env.handle), (state,))


def make_rollout(algorithm: Algorithm, vector_env: VectorEnv) -> Callable:
  """Returns rollout(given, actor_state) -> (actor_state, (Rollout,)), to be jitted.

  Args:
    algorithm: acts in the environments; it must have no carry.
    vector_env: N environments, of which each step takes the first `batch_size` that are ready.

  Returns:
    A function whose Rollout is [T, N, ...]: the N oldest complete sequences. Stacks of frames leave
    as `frames.Frames`.
  """
  act = make_act(algorithm)
  unroll_length = algorithm.parts.unroll_length

  def turn(given: ForActors, carry):
    t, token, state = carry
    with jax.named_scope('environment'):
      token, simulator, step = vector_env.recv(token, state.env.simulator)
    state, ready = _arrive(state, step, unroll_length)

    _, env_action, row = act(given, row_key(ready, t), ready)
    with jax.named_scope('environment'):
      token, simulator = vector_env.send(token, simulator, env_action, step.env_id)

    slot = state.slots[step.env_id]
    return t + 1, token, state._replace(
        env=state.env._replace(simulator=simulator),
        buffer=_write(state.buffer, state.row[step.env_id], slot, obs=ready.obs, **row))

  def rollout(given: ForActors, actor_state: ActorState):
    token, (state,) = actor_state
    _, token, state = lax.while_loop(
        lambda carry: carry[-1].complete < vector_env.num_envs, functools.partial(turn, given),
        (jnp.int32(0), token, state))
    state, sequences, env_id = _take(state, vector_env.num_envs)
    obs = frames.from_stacks(sequences.obs, algorithm.parts.spec.stack)
    sequences = with_faults(sequences._replace(obs=obs), env_id, vector_env, algorithm.parts.spec)
    return ActorState(token, (state,)), (sequences,)

  return rollout


def _arrive(state: Sequences, step: TimeStep, unroll_length: int) -> tuple[Sequences, EnvState]:
  """Ends the rows whose step came back, and begins the next rows of these environments.

  Returns:
    The new state of all environments, and the state of the environments that came back.
  """
  # The environments that came back, at most once each.
  who = step.env_id
  env = state.env

  counters = ('ended', 'episode_return', 'episode_length')
  before = env._replace(**{name: getattr(env, name)[who] for name in counters})
  ready, fields = end_row(before, step)
  env = env._replace(**{
      name: getattr(env, name).at[who].set(getattr(ready, name), unique_indices=True)
      for name in counters})

  row = state.row[who]
  slot = state.slots[who]
  num_envs = len(state.row)
  # Row -1 belongs to no sequence. It wraps to the last row of the new sequence, which is written
  # again before that sequence is complete.
  buffer = _write(state.buffer, row % unroll_length, slot, **fields)
  buffer = _write(buffer, row + 1, slot, obs=ready.obs)

  # The slot of a complete sequence changes places with a free slot.
  full = row + 1 == unroll_length
  place = num_envs + state.complete + jnp.cumsum(full, dtype=jnp.int32) - 1
  slots = state.slots.at[who].set(jnp.where(full, state.slots[place], slot), unique_indices=True)
  slots = slots.at[jnp.where(full, place, len(slots))].set(slot, mode='drop')

  new_state = Sequences(
      env=env,
      buffer=buffer,
      slots=slots,
      env_id=state.env_id.at[slot].set(env.env_id[who], unique_indices=True),
      row=state.row.at[who].set(jnp.where(full, 0, row + 1), unique_indices=True),
      complete=state.complete + jnp.sum(full, dtype=jnp.int32))
  return new_state, ready


@jax.named_scope('storing')
def _take(state: Sequences, columns: int) -> tuple[Sequences, Rollout, jax.Array]:
  """Returns the oldest complete sequences as a rollout with its environments; frees their slots."""
  # A rollout has a column for each environment.
  filling = state.slots[:columns]
  not_filling = state.slots[columns:]  # with complete sequences, then free
  taken = not_filling[:columns]
  sequences = jax.tree.map(lambda x: x[:, taken], state.buffer)
  return state._replace(
      env=state.env._replace(rollouts=state.env.rollouts + 1),
      # The roll moves the slots just read behind the free slots.
      slots=jnp.concatenate([filling, jnp.roll(not_filling, -columns)]),
      complete=state.complete - columns), sequences, state.env_id[taken]


@jax.named_scope('storing')
def _write(buffer: Rollout, row: jax.Array, slot: jax.Array, **fields) -> Rollout:
  """Sets rows of slots of the named fields.

  Args:
    buffer: [T, S, ...].
    row: [n] i32, the row to set in each slot.
    slot: [n] i32, the slots, all different.
    **fields: values [n, ...] by field.
  """
  return buffer._replace(**{
      name: jax.tree.map(lambda b, x: b.at[row, slot].set(x, unique_indices=True),
                         getattr(buffer, name), value)
      for name, value in fields.items()})
