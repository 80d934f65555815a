"""Rollouts made ready for a replay where they are made: with initial priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer_jit.actor.rollouts import ActorState, EnvState
from podracer_jit.agents.policies import Policy
from podracer_jit.envs.frames import Frames, Observations
from podracer_jit.numerics.islands import island
from podracer_jit.replay.buffer import n_step_return
from podracer_jit.types import Experience, Params, Rollout


class Rows(NamedTuple):
  """What initial priorities are made of, [rows, B] each."""

  reward: jax.Array
  terminated: jax.Array
  truncated: jax.Array
  valid: jax.Array
  action_value: jax.Array
  value: jax.Array


def initial_state(state: ActorState, n_step: int) -> ActorState:
  """The state of an actor that has seen nothing: no row of before can begin a transition."""
  def blank(env: EnvState) -> Rows:
    def no():  # each time others: states are donated
      return jnp.zeros((n_step, *env.ended.shape), bool)
    def none():
      return jnp.zeros((n_step, *env.ended.shape))
    return Rows(none(), no(), no(), no(), none(), none())
  return state._replace(envs=tuple(env._replace(recent=blank(env)) for env in state.envs))


def with_priorities(rollout: Callable, n_step: int, discount: float) -> Callable:
  """Returns the same as `rollout` that gives Experience, one a shard.

  A priority is the n-step TD error by the values that the network gave while it acted, so nothing
  is computed twice (1803.00933, appendix F); those of a rollout's last n rows come with the next.
  """

  @island('initial_priorities')
  def priorities(rows: Rows) -> jax.Array:
    """|n-step TD error| of all rows but the last n_step."""
    steps = len(rows.reward) - n_step

    def ahead(x, most):  # [most, T, B], by how many rows later
      return jnp.stack([x[i:i + steps] for i in range(most)])

    reward, to_next, taken = n_step_return(
        *(ahead(x, n_step) for x in (rows.reward, rows.terminated, rows.truncated)), discount)
    next_value = jnp.take_along_axis(ahead(rows.value, n_step + 1), taken[None], axis=0)[0]
    return jnp.abs(reward + to_next * next_value - rows.action_value[:steps])

  def experience(env: EnvState, made: Rollout) -> tuple[EnvState, Experience]:
    new = Rows(made.reward, made.terminated, made.truncated, made.valid, made.action_value,
               made.behaviour_value)
    rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), env.recent, new)
    steps = len(made.reward)
    frame, fresh = _newest(made.obs)
    began = env.rollouts == 1
    return env._replace(recent=jax.tree.map(lambda x: x[steps:], rows)), Experience(
        frame, fresh.at[0].set(began), jnp.broadcast_to(began, (1, *env.ended.shape)), made.action,
        made.reward, made.terminated, made.truncated, made.valid, priorities(rows),
        rows.valid[:steps], made.episodes)

  def rollout_with_priorities(params: Params, state: ActorState):
    state, rollouts = rollout(params, state)
    envs, made = zip(*map(experience, state.envs, rollouts), strict=True)
    return state._replace(envs=envs), made

  return rollout_with_priorities


def _newest(obs: Observations) -> tuple[jax.Array, jax.Array]:
  """The newest frames, [T + 1, B, ...], and where a stack holds nothing but that."""
  if not isinstance(obs, Frames):
    return obs, jnp.zeros(obs.shape[:2], bool)
  return obs.frame[obs.stack - 1:], jnp.concatenate([jnp.zeros_like(obs.fresh[:1]), obs.fresh])


def shapes(num_envs: int, obs_shape: tuple[int, ...], obs_dtype: Any, stack: int, policy: Policy
           ) -> Experience:
  """Experience of one row, [1, num_envs, ...], as shapes."""
  def of(dtype, *shape):
    return jax.ShapeDtypeStruct((1, num_envs, *shape), dtype)
  frame = obs_shape if stack == 1 else (obs_shape[0] // stack, *obs_shape[1:])
  return Experience(
      of(obs_dtype, *frame), of(bool), of(bool), of(policy.action_dtype, *policy.action_shape),
      of(jnp.float32), of(bool), of(bool), of(bool), of(jnp.float32), of(bool), ())
