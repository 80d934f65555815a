"""Experience for a replay: rollouts with initial priorities, computed by the actors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from podracer_jit.actor.rollouts import ActorState, EnvState
from podracer_jit.agents.policies import Policy
from podracer_jit.envs.frames import Frames, Observations
from podracer_jit.numerics.islands import island
from podracer_jit.replay.buffer import n_step_return
from podracer_jit.types import Experience, Params, Rollout


class Rows(NamedTuple):
  """Inputs of initial priorities, each [rows, B]."""

  reward: jax.Array  # f32
  terminated: jax.Array  # bool
  truncated: jax.Array  # bool
  valid: jax.Array  # bool
  action_value: jax.Array  # f32, Q(obs, action) by the acting network
  value: jax.Array  # f32, V(obs) by the acting network


def initial_state(state: ActorState, n_step: int) -> ActorState:
  """Returns `state` with n_step empty rows before its first row.

  The empty rows are invalid, so no transition begins in them.
  """
  def blank(env: EnvState) -> Rows:
    # Each field gets a buffer of its own, since states are donated.
    def zeros(dtype=jnp.float32):
      return jnp.zeros((n_step, *env.ended.shape), dtype)
    return Rows(reward=zeros(), terminated=zeros(bool), truncated=zeros(bool), valid=zeros(bool),
                action_value=zeros(), value=zeros())
  return state._replace(envs=tuple(env._replace(recent=blank(env)) for env in state.envs))


def forget(env: EnvState) -> EnvState:
  """Returns the state of environments that go on, with a replay that begins empty.

  The rows before are not in that replay, so no transition can begin in them any more. All arrays
  may have further axes before their own.
  """
  return env._replace(recent=jax.tree.map(jnp.zeros_like, env.recent))


def with_priorities(rollout: Callable, n_step: int, discount: float) -> Callable:
  """Wraps `rollout` so that it gives one Experience for each vector environment.

  A priority is the n-step TD error by the values that the network gave while it acted, so nothing
  is computed twice (1803.00933, appendix F). The transitions that begin in a rollout's last n rows
  are complete only in the next rollout, which carries their priorities.
  """

  @island('initial_priorities')
  def priorities(rows: Rows) -> jax.Array:
    """Returns |n-step TD error| [T, B] of all rows but the last n_step."""
    chex.assert_rank(list(rows), 2)
    chex.assert_equal_shape(list(rows))
    steps = len(rows.reward) - n_step

    def ahead(x, most):
      """Returns [most, T, B]: entry i holds the rows shifted by i."""
      return jnp.stack([x[i:i + steps] for i in range(most)])

    reward, discount_after, steps_taken = n_step_return(
        *(ahead(x, n_step) for x in (rows.reward, rows.terminated, rows.truncated)), discount)
    next_value = jnp.take_along_axis(ahead(rows.value, n_step + 1), steps_taken[None], axis=0)[0]
    return jnp.abs(reward + discount_after * next_value - rows.action_value[:steps])

  def experience(env: EnvState, env_rollout: Rollout) -> tuple[EnvState, Experience]:
    """Returns the vector environment's state with its last n rows, and its experience."""
    new = Rows(env_rollout.reward, env_rollout.terminated, env_rollout.truncated,
               env_rollout.valid, env_rollout.action_value, env_rollout.behaviour_value)
    rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), env.recent, new)
    steps = len(env_rollout.reward)

    frame, is_reset_stack = _newest(env_rollout.obs)
    # The rollout counter was already advanced, so 1 means the first rollout.
    began = env.rollouts == 1
    return env._replace(recent=jax.tree.map(lambda x: x[steps:], rows)), Experience(
        obs=frame,
        is_reset_stack=is_reset_stack.at[0].set(began),
        began=jnp.broadcast_to(began, (1, *env.ended.shape)),
        action=env_rollout.action,
        reward=env_rollout.reward,
        terminated=env_rollout.terminated,
        truncated=env_rollout.truncated,
        valid=env_rollout.valid,
        priority=priorities(rows),
        starts=rows.valid[:steps],
        episodes=env_rollout.episodes)

  def rollout_with_priorities(params: Params, state: ActorState):
    state, rollouts = rollout(params, state)
    envs, experiences = zip(*map(experience, state.envs, rollouts), strict=True)
    return state._replace(envs=envs), experiences

  return rollout_with_priorities


def _newest(obs: Observations) -> tuple[jax.Array, jax.Array]:
  """Returns the newest frames [T + 1, B, ...] and whether a stack repeats its newest frame."""
  if not isinstance(obs, Frames):
    return obs, jnp.zeros(obs.shape[:2], bool)
  row_0 = jnp.zeros_like(obs.is_reset_stack[:1])
  return obs.frame[obs.stack - 1:], jnp.concatenate([row_0, obs.is_reset_stack])


def shapes(num_envs: int, obs_shape: tuple[int, ...], obs_dtype: Any, stack: int, policy: Policy
           ) -> Experience:
  """Returns the shapes and dtypes of Experience of one row.

  Args:
    num_envs: B.
    obs_shape: shape of one observation, with all frames of a stack.
    obs_dtype: dtype of observations.
    stack: frames in an observation.
    policy: the policy that acts; its actions have this shape and dtype.

  Returns:
    An Experience of `jax.ShapeDtypeStruct`s, each [1, num_envs, ...], without episodes.
  """
  def row(dtype, *shape):
    return jax.ShapeDtypeStruct((1, num_envs, *shape), dtype)
  frame = obs_shape if stack == 1 else (obs_shape[0] // stack, *obs_shape[1:])
  return Experience(
      obs=row(obs_dtype, *frame),
      is_reset_stack=row(bool),
      began=row(bool),
      action=row(policy.action_dtype, *policy.action_shape),
      reward=row(jnp.float32),
      terminated=row(bool),
      truncated=row(bool),
      valid=row(bool),
      priority=row(jnp.float32),
      starts=row(bool),
      episodes=None)
