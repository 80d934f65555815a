"""Experience for a replay: rollouts with initial priorities, computed by the actors."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from podracer_jit.actor.rollouts import ActorState, EnvState, zeros
from podracer_jit.envs.frames import Frames, Observations
from podracer_jit.losses.algorithm import Algorithm, ForActors
from podracer_jit.numerics.islands import island
from podracer_jit.types import Experience, Rollout


def _inputs(rollout: Rollout) -> Rollout:
  """Returns the part of a rollout that priorities depend on."""
  return rollout._replace(obs=None, action=None, episodes=None, carry=None)


def initial_state(state: ActorState, algorithm: Algorithm) -> ActorState:
  """Returns `state` with the rows of an item, all empty, before its first row.

  The empty rows are invalid, so no item begins in them.
  """
  def blank(env: EnvState) -> Rollout:
    return _inputs(zeros(algorithm, None, len(env.ended), algorithm.items().length))
  return state._replace(envs=tuple(env._replace(recent=blank(env)) for env in state.envs))


def forget(env: EnvState) -> EnvState:
  """Returns the state of environments that go on, with a replay that begins empty.

  The rows before are not in that replay, so no item can begin in them any more. All arrays may have
  further axes before their own.
  """
  return env._replace(recent=jax.tree.map(jnp.zeros_like, env.recent))


def with_priorities(rollout: Callable, algorithm: Algorithm) -> Callable:
  """Wraps `rollout` so that it gives one Experience for each vector environment.

  The items that begin in the last rows of a rollout are complete only in the next rollout, which
  carries their priorities.
  """
  length = algorithm.items().length

  @island('initial_priorities', precision=algorithm.parts.precision)
  def first_priorities(steps: jax.Array | None, rows: Rollout) -> jax.Array:
    return algorithm.at(steps).priority(rows)

  def priorities(steps: jax.Array | None, rows: Rollout) -> jax.Array:
    """Returns the priorities [T, B] of the items that begin in all rows but the last L."""
    starts = len(rows.reward) - length

    def windows(x):
      """Returns [L + 1, T * B, ...]: entry i holds the rows shifted by i."""
      shifted = jnp.stack([x[i:i + starts] for i in range(length + 1)])
      return shifted.reshape(length + 1, -1, *x.shape[2:])

    return first_priorities(steps, jax.tree.map(windows, rows)).reshape(starts, -1)

  def experience(given: ForActors, env: EnvState, env_rollout: Rollout
                 ) -> tuple[EnvState, Experience]:
    """Returns the vector environment's state with its last rows, and its experience."""
    rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), env.recent, _inputs(env_rollout))
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
        priority=priorities(given.steps, rows),
        starts=rows.valid[:steps],
        episodes=env_rollout.episodes)

  def rollout_with_priorities(given: ForActors, state: ActorState):
    state, rollouts = rollout(given, state)
    envs, experiences = zip(*(experience(given, *each) for each in
                              zip(state.envs, rollouts, strict=True)), strict=True)
    return state._replace(envs=envs), experiences

  return rollout_with_priorities


def _newest(obs: Observations) -> tuple[jax.Array, jax.Array]:
  """Returns the newest frames [T + 1, B, ...] and whether a stack repeats its newest frame."""
  if not isinstance(obs, Frames):
    return obs, jnp.zeros(obs.shape[:2], bool)
  row_0 = jnp.zeros_like(obs.is_reset_stack[:1])
  return obs.frame[obs.stack - 1:], jnp.concatenate([row_0, obs.is_reset_stack])


def shapes(algorithm: Algorithm, num_envs: int) -> Experience:
  """Returns the shapes and dtypes of Experience of one row.

  Args:
    algorithm: that acts.
    num_envs: B.

  Returns:
    An Experience of `jax.ShapeDtypeStruct`s, each [1, num_envs, ...], without episodes.
  """
  def row(dtype, *shape):
    return jax.ShapeDtypeStruct((1, num_envs, *shape), dtype)
  spec = algorithm.parts.spec
  policy = algorithm.parts.policy
  shape = spec.obs_shape
  frame = shape if spec.stack == 1 else (shape[0] // spec.stack, *shape[1:])
  return Experience(
      obs=row(spec.obs_dtype, *frame),
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
