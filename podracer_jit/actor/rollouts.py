"""Rollouts: experience collected inside `lax.fori_loop`, without Python and its GIL."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit.actor import faults
from podracer_jit.agents import action_masks
from podracer_jit.envs import frames
from podracer_jit.envs.frames import Observations
from podracer_jit.envs.protocol import EnvSpec, TimeStep, VectorEnv
from podracer_jit.losses.algorithm import Algorithm, ForActors
from podracer_jit.numerics import indexing
from podracer_jit.numerics.islands import island
from podracer_jit.types import Carry, Episodes, Rollout


class EnvState(NamedTuple):
  """State of B environments between two rollouts."""

  obs: jax.Array | None  # [B, ...]; None if asynchronous, as buffers hold the observations
  ended: jax.Array  # [B] bool: obs is the last observation of a finished episode
  episode_return: jax.Array  # [B] f32, unclipped rewards of the episode so far
  episode_length: jax.Array  # [B] i32, valid rows of the episode so far
  key: jax.Array  # PRNG key of the vector environment; folded with `rollouts` and the row
  rollouts: jax.Array  # i32: number of rollouts completed
  discounted_return: jax.Array | None  # [B] f32, of the rewards so far; None if asynchronous
  recurrent_state: Carry  # what `Algorithm.act` gets in the next row
  env_id: jax.Array | None  # [B] i32: index of each environment among all of the run
  exploration: jax.Array | None = None  # [B] f32, as `Algorithm.exploration` returns it
  # The last rows of the previous rollout, for the priorities of a replay; see `priorities`.
  recent: Rollout | None = None
  simulator: Any | None = None  # [B, ...] each: the state of environments that are functions
  # [T, B, ...]: what the environments were sent in the previous rollout, see `note_actions`.
  sent: jax.Array | None = None


class ActorState(NamedTuple):
  """State that a rollout program carries from call to call; it is donated to the program."""

  token: jax.Array  # orders the calls of all vector environments
  envs: tuple[EnvState, ...]  # one for each vector environment


def initial_state(algorithm: Algorithm, vector_envs: Sequence[VectorEnv],
                  keys: Sequence[jax.Array], first_env: int = 0,
                  exploration: np.ndarray | None = None) -> ActorState:
  """Returns the state of vector environments that have just been reset.

  Args:
    algorithm: acts in them.
    vector_envs: the environments.
    keys: one PRNG key for each vector environment.
    first_env: index of the first environment among all environments of the run.
    exploration: of all environments of the run, as `Algorithm.exploration` returns it; None if
      nothing explores.

  Returns:
    The actor's state, with one `EnvState` for each vector environment.
  """
  firsts = itertools.accumulate((env.num_envs for env in vector_envs[:-1]), initial=first_env)
  envs = tuple(
      EnvState(
          obs=_copied(vector_env.first_obs),
          # NumPy compiles no programs.
          ended=np.zeros(vector_env.num_envs, bool),
          episode_return=np.zeros(vector_env.num_envs, np.float32),
          episode_length=np.zeros(vector_env.num_envs, np.int32),
          key=key, rollouts=np.zeros((), np.int32),
          discounted_return=np.zeros(vector_env.num_envs, np.float32),
          recurrent_state=algorithm.initial_carry(vector_env.num_envs),
          env_id=first + np.arange(vector_env.num_envs, dtype=np.int32),
          exploration=None if exploration is None else exploration[
              first:first + vector_env.num_envs],
          simulator=jax.tree.map(jnp.array, vector_env.first_state))
      for vector_env, key, first in zip(vector_envs, keys, firsts, strict=True))
  return ActorState(np.array(vector_envs[0].handle), envs)


def _copied(x: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
  """Returns a copy of an array of environments, which may be donated."""
  return jnp.array(x) if isinstance(x, jax.Array) else np.array(x)


def note_actions(state: ActorState, algorithm: Algorithm) -> ActorState:
  """Returns the first state of an actor whose rollouts note what environments are sent.

  Environments whose state is outside of the program are functions of their seeds and of these
  actions. Actions have the smallest type that holds them.
  """
  parts = algorithm.parts
  choices = max((parts.spec.num_actions, *parts.spec.action_choices))

  def with_actions(env: EnvState) -> EnvState:
    if env.simulator is not None:
      return env
    action = jax.eval_shape(parts.policy.to_env, jax.ShapeDtypeStruct(
        (len(env.ended), *parts.policy.action_shape), parts.policy.action_dtype))
    dtype = np.min_scalar_type(choices - 1) if choices else action.dtype
    return env._replace(sent=np.zeros((parts.unroll_length, *action.shape), dtype))

  return state._replace(envs=tuple(map(with_actions, state.envs)))


def sent_by(state: ActorState) -> list[jax.Array]:
  """Returns what the vector environments were sent in the last rollout, if it was noted."""
  return [env.sent for env in state.envs if isinstance(env, EnvState) and env.sent is not None]


def make_act(algorithm: Algorithm, greedy: bool = False) -> Callable:
  """Returns act(given, key, env) -> (env, actions for the environments, fields of the row).

  `given` is `ForActors`. The row begins with env.obs. `key` is its PRNG key (`row_key`).
  """

  num_envs = algorithm.parts.num_envs

  @island('decision', precision=algorithm.parts.precision)
  def decide(given: ForActors, key: jax.Array, env: EnvState):
    """Returns the next carry, actions for the environments, and fields of the row."""
    now = algorithm.at(given.steps)
    exploration = env.exploration
    if exploration is not None and given.steps is not None:
      exploration = jnp.asarray(now.exploration(num_envs))[env.env_id]
    acted = now.act(given.params, env.obs, env.recurrent_state, ~env.ended,
                    None if greedy else key, exploration)
    row = dict(action=acted.action, extras=acted.extras)
    return acted.carry, algorithm.parts.policy.to_env(acted.action), row

  @jax.named_scope('policy')
  def act(given: ForActors, key: jax.Array, env: EnvState):
    carry, env_action, row = decide(given, key, env)
    return env._replace(recurrent_state=carry), env_action, dict(row, valid=~env.ended)

  return act


def row_key(env: EnvState, t: jax.Array) -> jax.Array:
  """Returns the PRNG key of row `t` [] i32 of a vector environment's next rollout."""
  return jax.random.fold_in(jax.random.fold_in(env.key, env.rollouts), t)


def make_rollout(algorithm: Algorithm, vector_envs: Sequence[VectorEnv], unroll_length: int,
                 discount: float | None = None, greedy: bool = False, first_apart: bool = False
                 ) -> Callable:
  """Returns rollout(given, actor_state) -> (actor_state, Rollouts), to be jitted.

  `given` is `ForActors`. If observations are stacks of frames (`EnvSpec.stack`), a rollout holds
  `frames.Frames`, each frame once.

  The vector environments take turns: recv a; infer a; send a; recv b;
  infer b; send b; ... So one of them steps while the policy works on another. The token that passes
  through all calls keeps them in this order; XLA drops an `optimization_barrier` before it
  schedules. The overlap ends only with a rollout, when each of them receives its last step.
  Environments that are functions do not step meanwhile, so each is received in its own turn.

  Args:
    algorithm: acts in the environments.
    vector_envs: the environments.
    unroll_length: T.
    discount: gamma of `Rollout.discounted_return`, which normalised rewards need; None leaves the
      field empty.
    greedy: takes the most likely actions.
    first_apart: the first turn, which receives nothing yet, is not in the loop. So no turn has a
      conditional, for which a GPU makes the host wait; the program is larger.

  Returns:
    A function that gives the actor's next state and a tuple with one Rollout [T, B, ...] for each
    vector environment.
  """

  act = make_act(algorithm, greedy)
  is_function = [getattr(vector_env, 'is_function', False) for vector_env in vector_envs]
  stack = algorithm.parts.spec.stack

  def empty_buffer(obs: Observations, env: EnvState) -> Rollout:
    returns = None if discount is None else jnp.zeros((unroll_length, *env.ended.shape))
    return empty_rollout(algorithm, obs, len(env.ended), unroll_length)._replace(
        discounted_return=returns, carry=jax.tree.map(lambda x: x[None], env.recurrent_state))

  def rollout(given: ForActors, state: ActorState):
    def turn(t, carry, has_sent):
      token, envs, buffers = carry
      envs = list(envs)
      buffers = list(buffers)
      for i, vector_env in enumerate(vector_envs):
        if not is_function[i] and has_sent is not False:
          before = envs[i].obs
          receive = functools.partial(_receive, vector_env)
          if has_sent is not True:
            receive = functools.partial(lax.cond, has_sent, receive, _nothing_yet)
          token, envs[i], fields = receive(token, envs[i])
          # At t = 0 no step came back; row 0 gets placeholders, which turn 1 overwrites. The
          # buffers stay outside the `cond`, which would copy them.
          buffers[i] = _set_obs(_write(buffers[i], jnp.maximum(t - 1, 0), **fields), t, before,
                            envs[i].obs)

        envs[i], env_action, row = act(given, keys[i][t], envs[i])
        with jax.named_scope('environment'):
          token, simulator = vector_env.send(token, envs[i].simulator, env_action)
        envs[i] = envs[i]._replace(simulator=simulator, sent=_note(envs[i].sent, env_action, t))
        buffers[i] = _write(buffers[i], t, **row)
        if is_function[i]:
          token, envs[i], buffers[i] = _finish_row(vector_env, token, envs[i], buffers[i], t)
      return token, tuple(envs), tuple(buffers)

    # All at once, because a key alone takes as long as a decision of a small network.
    keys = [jax.vmap(functools.partial(row_key, env))(jnp.arange(unroll_length, dtype=jnp.int32))
            for env in state.envs]
    obs_buffers = [frames.begin(env.obs, unroll_length, stack) for env in state.envs]
    buffers = tuple(map(empty_buffer, obs_buffers, state.envs))
    carry = state.token, state.envs, buffers
    if first_apart and not all(is_function):
      carry = turn(jnp.int32(0), carry, has_sent=False)
      carry = lax.fori_loop(1, unroll_length, functools.partial(turn, has_sent=True), carry)
    else:
      carry = lax.fori_loop(0, unroll_length, lambda t, carry: turn(t, carry, t > 0), carry)
    token, envs, buffers = carry

    # Simulators outside of the program still have the results of the last row.
    out = []
    for i, (vector_env, env, buffer) in enumerate(zip(vector_envs, envs, buffers, strict=True)):
      if not is_function[i]:
        token, env, buffer = _finish_row(vector_env, token, env, buffer, unroll_length - 1)
      if discount is not None:
        env, buffer = _discount(discount, env, buffer)
      buffer = with_faults(buffer, env.env_id, vector_env, algorithm.parts.spec)
      out.append((env._replace(rollouts=env.rollouts + 1), buffer))
    envs, buffers = zip(*out, strict=True)
    return ActorState(token, envs), buffers

  return rollout


@jax.named_scope('environment')
def _receive(vector_env: VectorEnv, token, env: EnvState):
  """Receives the step of the row sent last. Returns the token, the state and the row's fields."""
  token, simulator, step = vector_env.recv(token, env.simulator)
  return token, *end_row(env._replace(simulator=simulator), step)


def _finish_row(vector_env: VectorEnv, token, env: EnvState, buffer: Rollout, t):
  """Receives the step of a row, and adds what it gives to the rollout.

  Args:
    vector_env: the environments.
    token: of the last call.
    env: their state.
    buffer: the rollout.
    t: index of the row.

  Returns:
    The next token, state and rollout.
  """
  before = env.obs
  token, env, fields = _receive(vector_env, token, env)
  return token, env, _set_obs(_write(buffer, t, **fields), t + 1, before, env.obs)


def _nothing_yet(token, env: EnvState):
  """Returns placeholders shaped like the results of `_receive`, before anything was sent."""
  false = jnp.zeros_like(env.ended)
  zero = jnp.zeros_like(env.episode_return)
  return token, env, dict(reward=zero, terminated=false, truncated=false,
                          episodes=Episodes(false, env.episode_return, env.episode_length))


def with_faults(rollout: Rollout, env_id: jax.Array, vector_env: VectorEnv, spec: EnvSpec
                ) -> Rollout:
  """Returns a whole rollout with the faults of its environments; see `faults.find`.

  Args:
    rollout: [T, B].
    env_id: [B] i32, the environments.
    vector_env: has them.
    spec: of the task.
  """
  episodes = rollout.episodes
  stuck = None
  if spec.action_mask is not None:
    # The last observation of an episode may have no legal action.
    ended = rollout.terminated | rollout.truncated
    acts = jnp.concatenate([rollout.valid[:1], ~ended])
    stuck = action_masks.without_choice(rollout.obs, spec) & acts[..., None]
  fault = faults.find(rollout.obs, rollout.reward, episodes.episode_return, env_id,
                      getattr(vector_env, 'one_hots', ()), stuck)
  return rollout._replace(episodes=episodes._replace(fault=fault))


def _discount(discount: float, env: EnvState, buffer: Rollout) -> tuple[EnvState, Rollout]:
  """Fills the rollout's discounted returns; the state carries them into the next rollout."""

  @island('discounted_returns')
  def returns(before, reward, over):
    def row(before, row):
      # The reward is 0 in invalid rows.
      reward, over = row
      discounted = discount * before + reward
      return jnp.where(over, 0.0, discounted), discounted

    return lax.scan(row, before, (reward, over))

  last, rows = returns(env.discounted_return, buffer.reward, buffer.terminated | buffer.truncated)
  return env._replace(discounted_return=last), buffer._replace(discounted_return=rows)


def end_row(env: EnvState, step: TimeStep) -> tuple[EnvState, dict[str, Any]]:
  """Advances the episode counters of B environments by one step.

  Invalid rows add nothing to an episode, and their reward is set to 0: some tasks (MetaWorld) give
  a reward for a reset.

  Returns:
    The state after the step, and the fields [B] of the row that the step ends.
  """
  counters = [env.ended, env.episode_return, env.episode_length]
  returned = [step.reward, step.raw_reward, step.terminated, step.truncated, step.game_over]
  chex.assert_rank(counters, 1)
  chex.assert_equal_shape(counters + returned)

  valid = ~env.ended
  episode_return = env.episode_return + jnp.where(valid, step.raw_reward, 0.0)
  length = env.episode_length + valid
  over = valid & (step.game_over | step.truncated)
  env = env._replace(
      obs=faults.without_end(step.obs, step.terminated), ended=step.terminated | step.truncated,
      episode_return=jnp.where(over, 0.0, episode_return),
      episode_length=jnp.where(over, 0, length))
  reward = jnp.where(valid, step.reward, 0.0)
  return env, dict(reward=reward, terminated=step.terminated, truncated=step.truncated,
                   episodes=Episodes(over, episode_return, length))


@jax.named_scope('storing')
def empty_rollout(algorithm: Algorithm, obs: Observations, num_envs: int, steps: int) -> Rollout:
  """Returns a rollout of zeros around the given observations.

  Args:
    algorithm: decides the shapes of actions and extras.
    obs: the observations, of steps + 1 rows.
    num_envs: B.
    steps: T.

  Returns:
    A rollout [T, B, ...] without carry and discounted returns.
  """
  def field(dtype, *shape):
    return jnp.zeros((steps, num_envs, *shape), dtype)
  acted = algorithm.acted_shapes
  return Rollout(
      obs=obs,
      action=field(acted.action.dtype, *acted.action.shape[1:]),
      extras=jax.tree.map(lambda x: field(x.dtype, *x.shape[1:]), acted.extras),
      reward=field(jnp.float32), terminated=field(bool), truncated=field(bool), valid=field(bool),
      episodes=Episodes(field(bool), field(jnp.float32), field(jnp.int32)))


@jax.named_scope('storing')
def _set_obs(buffer: Rollout, t, before: jax.Array, obs: jax.Array) -> Rollout:
  """Sets the observations of a row.

  Args:
    buffer: the rollout.
    t: index of the row.
    before: [B, ...], observations of row t - 1.
    obs: [B, ...], observations of row t.

  Returns:
    The rollout with the row set.
  """
  return buffer._replace(obs=frames.add(buffer.obs, t, before, obs))


@jax.named_scope('storing')
def _note(sent: jax.Array | None, action: jax.Array, t) -> jax.Array | None:
  """Sets row t of the actions that environments were sent, if they are noted."""
  return None if sent is None else indexing.write_row(sent, action.astype(sent.dtype), t)


@jax.named_scope('storing')
def _write(buffer: Rollout, t, **rows) -> Rollout:
  """Sets row t of the named fields."""
  written = {
      name: jax.tree.map(lambda b, x: indexing.write_row(b, x, t),
                         getattr(buffer, name), value)
      for name, value in rows.items()}
  return buffer._replace(**written)
