"""Experience for a replay: rollouts with initial priorities, computed by the actors."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.actor.rollouts import ActorState, EnvState, empty_rollout
from podracer_jit.envs.frames import Frames, Observations
from podracer_jit.losses.algorithm import Algorithm, ForActors
from podracer_jit.losses.items import Items
from podracer_jit.numerics import indexing
from podracer_jit.numerics.islands import island
from podracer_jit.types import Carry, Experience, Rollout


def _inputs(rollout: Rollout) -> Rollout:
  """Returns the part of a rollout that priorities depend on."""
  return rollout._replace(obs=None, action=None, episodes=None, carry=None)


def _kept(items: Items) -> int:
  """Returns the number of rows of the previous rollouts that actors keep.

  An item's rows; and the row before a sequence, which tells an invalid first row from an empty one.
  """
  return items.length + items.is_sequence


def initial_state(state: ActorState, algorithm: Algorithm) -> ActorState:
  """Returns `state` with the rows of an item, all empty, before its first row.

  The empty rows are invalid and end no episode, so no item begins in them.
  """
  def blank(env: EnvState) -> Rollout:
    return _inputs(empty_rollout(algorithm, None, len(env.ended), _kept(algorithm.items())))
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
  items = algorithm.items()
  length = items.length

  @island('initial_priorities', precision=algorithm.parts.precision)
  def first_priorities(steps: jax.Array | None, rows: Rollout) -> jax.Array:
    return algorithm.at(steps).priority(rows)

  def first_rows(steps: int) -> np.ndarray:
    """Returns the first rows [S] of the items that are complete with a rollout of T rows."""
    stride = items.stride(steps)
    return _kept(items) - length + length % stride + np.arange(0, steps, stride)

  def priorities(steps: jax.Array | None, rows: Rollout, first: np.ndarray) -> jax.Array:
    """Returns the priorities [S, B] of the items that begin in the rows `first` [S]."""
    def windows(x):
      """Returns [L + 1, S * B, ...]: entry i holds the i-th rows of the items."""
      window = indexing.read(x, first + np.arange(length + 1)[:, None])
      return window.reshape(length + 1, -1, *x.shape[2:])

    return first_priorities(steps, jax.tree.map(windows, rows)).reshape(len(first), -1)

  def begins(rows: Rollout, first: np.ndarray, env: EnvState) -> jax.Array:
    """Returns whether items begin in the rows `first` [S], [S, B] bool."""
    valid = indexing.read(rows.valid, first)
    if not items.is_sequence:
      return valid
    ends_before = indexing.read(rows.terminated | rows.truncated, first - 1)
    # With a period of several rollouts, most of these begin no item.
    steps = len(rows.reward) - _kept(items)
    rollout = env.rollouts - 1 - length // steps
    return (valid | ends_before) & (rollout % (items.period // steps) == 0)

  def experience(given: ForActors, env: EnvState, env_rollout: Rollout
                 ) -> tuple[EnvState, Experience]:
    """Returns the vector environment's state with its last rows, and its experience."""
    rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), env.recent, _inputs(env_rollout))
    steps = len(env_rollout.reward)

    frame, is_reset_stack = _newest(env_rollout.obs)
    # The rollout counter was already advanced, so 1 means the first rollout.
    began = env.rollouts == 1
    first = first_rows(steps)
    return env._replace(recent=jax.tree.map(lambda x: x[steps:], rows)), Experience(
        obs=frame,
        is_reset_stack=is_reset_stack.at[0].set(began),
        began=jnp.broadcast_to(began, (1, *env.ended.shape)),
        action=env_rollout.action,
        reward=env_rollout.reward,
        terminated=env_rollout.terminated,
        truncated=env_rollout.truncated,
        valid=env_rollout.valid,
        priority=priorities(given.steps, rows, first),
        starts=begins(rows, first, env),
        episodes=env_rollout.episodes,
        carry=env_rollout.carry if items.is_sequence else None)

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
      episodes=None,
      carry=_carry(algorithm, num_envs))


def _carry(algorithm: Algorithm, num_envs: int) -> Carry:
  """Returns the shapes of the carry of Experience; None if its items are no sequences."""
  if not algorithm.items().is_sequence:
    return None
  carry = jax.eval_shape(lambda: algorithm.initial_carry(num_envs))
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), carry)
