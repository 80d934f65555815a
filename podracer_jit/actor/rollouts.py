"""R: experience, made inside `lax.fori_loop` with no Python and no GIL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.agents.networks import Apply
from podracer_jit.agents.policies import Policy
from podracer_jit.envs import frames
from podracer_jit.envs.frames import Observations
from podracer_jit.envs.protocol import Shard, TimeStep
from podracer_jit.numerics.islands import island
from podracer_jit.types import Episodes, Params, Rollout


class EnvState(NamedTuple):
  """A shard between two rollouts."""

  obs: jax.Array  # [B, ...]
  ended: jax.Array  # [B] bool: obs is the last observation of a finished episode
  episode_return: jax.Array  # [B] f32, unclipped, of the episode so far
  episode_length: jax.Array  # [B] i32
  key: jax.Array  # of the shard; folded with `rollouts` and the row
  rollouts: jax.Array  # i32: how many were made
  discounted_return: jax.Array  # [B] f32, of the rewards so far
  core: Any  # [B, H] each: the recurrent state; () where there is none
  exploration: Any = ()  # [B] f32: how much each explores, of policies that do so by an amount
  recent: Any = ()  # of experience for a replay: the last rows of the rollout before


class ActorState(NamedTuple):
  """What a rollout program goes on from; donated to it."""

  token: jax.Array  # EnvPool's handle: orders the calls of all shards
  envs: tuple[EnvState, ...]  # one a shard


def initial_state(shards: Sequence[Shard], keys: Sequence[jax.Array],
                  initial_core: Callable[[int], Any] = lambda num_envs: (),
                  exploration: Sequence[Any] | None = None) -> ActorState:
  """The state of freshly reset shards, each with its own key; for a recurrent network its core.

  exploration: for each shard [B], of policies that `explore`.
  """
  exploration = exploration or [()] * len(shards)
  envs = tuple(
      EnvState(
          obs=jnp.array(shard.first_obs),
          ended=jnp.zeros(shard.num_envs, bool),
          episode_return=jnp.zeros(shard.num_envs, jnp.float32),
          episode_length=jnp.zeros(shard.num_envs, jnp.int32),
          key=key, rollouts=jnp.zeros((), jnp.int32),
          discounted_return=jnp.zeros(shard.num_envs, jnp.float32),
          core=initial_core(shard.num_envs), exploration=explores)
      for shard, key, explores in zip(shards, keys, exploration, strict=True))
  return ActorState(jnp.array(shards[0].handle), envs)


def make_act(apply: Apply, policy: Policy, action_value: Callable | None = None) -> Callable:
  """Returns act(params, t, env) -> (env, what the task is given, fields of the row).

  The row is the one that begins with env.obs. t: i32, the row's number within the rollout: with
  env.key and env.rollouts it gives the row its own random numbers.
  """

  @island('decision')
  def decide(params, obs, core, ended, exploration, key, rollouts, t):
    """Returns the next recurrent state, what the task is given, and fields of the row."""
    dist, value, core = apply(params, obs[None], core, ~ended[None])
    key = jax.random.fold_in(jax.random.fold_in(key, rollouts), t)
    row = {}
    if policy.explore is None:
      action = policy.sample(key, dist[0])
    else:
      action = policy.explore(key, dist[0], exploration)
      row['action_value'] = action_value(params, obs, dist[0], action)
    if policy.log_prob is not None:
      row['behaviour_log_prob'] = policy.log_prob(dist[0], action)
    return core, policy.to_env(action), dict(row, action=action, behaviour_value=value[0])

  @jax.named_scope('policy')
  def act(params: Params, t, env: EnvState):
    core, sent, row = decide(params, env.obs, env.core, env.ended, env.exploration, env.key,
                             env.rollouts, t)
    return env._replace(core=core), sent, dict(row, valid=~env.ended)

  return act


def make_rollout(shards: Sequence[Shard], apply: Apply, policy: Policy, unroll_length: int,
                 stack: int = 1, discount: float | None = None,
                 action_value: Callable | None = None):
  """Returns rollout(params, actor_state) -> (actor_state, one Rollout a shard), to be jitted.

  Of observations that are stacks of so many frames (`EnvSpec.stack`: no others can be put together
  again) each frame is kept once, in `frames.Frames`. With a `discount` rollouts have a
  discounted_return, for the normalisation of rewards; with action_value(params, obs [B, ...], dist,
  action) -> [B] they have one, for replays.

  Shards take turns - recv a; infer a; send a; recv b; infer b; send b; ... - so that EnvPool steps
  one while the policy works on another. One token through all calls is what keeps them in that
  order (XLA drops `optimization_barrier` before it schedules). Only the last row drains the turns.
  """

  act = make_act(apply, policy, action_value)

  def rollout(params: Params, state: ActorState):
    def turn(t, carry):
      token, envs, buffers = carry
      envs, buffers = list(envs), list(buffers)
      for i, shard in enumerate(shards):
        before = envs[i].obs
        token, envs[i], back = lax.cond(
            t > 0, functools.partial(_receive, shard), _nothing_yet, token, envs[i])
        # At t = 0 this is row 0 for the time being. The buffers stay out of the branches, which
        # would copy them.
        buffers[i] = _add(_write(buffers[i], jnp.maximum(t - 1, 0), **back), t, before,
                          envs[i].obs)
        envs[i], sent, row = act(params, t, envs[i])
        with jax.named_scope('environment'):
          token = shard.send(token, sent)
        buffers[i] = _write(buffers[i], t, **row)
      return token, tuple(envs), tuple(buffers)

    rows = [frames.begin(env.obs, unroll_length, stack) for env in state.envs]
    buffers = tuple(zeros(obs, len(env.ended), policy, unroll_length)._replace(
        discounted_return=() if discount is None else jnp.zeros((unroll_length, *env.ended.shape)),
        core=jax.tree.map(lambda x: x[None], env.core))
        for obs, env in zip(rows, state.envs, strict=True))
    token, envs, buffers = lax.fori_loop(0, unroll_length, turn, (state.token, state.envs, buffers))
    out = []
    for shard, env, buffer in zip(shards, envs, buffers, strict=True):
      before = env.obs
      token, env, back = _receive(shard, token, env)
      buffer = _add(_write(buffer, unroll_length - 1, **back), unroll_length, before, env.obs)
      if discount is not None:
        env, buffer = _discount(discount, env, buffer)
      out.append((env._replace(rollouts=env.rollouts + 1), buffer))
    envs, buffers = zip(*out, strict=True)
    return ActorState(token, envs), buffers

  return rollout


@jax.named_scope('environment')
def _receive(shard: Shard, token, env: EnvState):
  """Takes what came back for the last row sent: (token, state, fields of that row)."""
  token, step = shard.recv(token)
  return token, *count(env, step)


def _nothing_yet(token, env: EnvState):
  """What `_receive` returns, before anything was sent."""
  no, none = jnp.zeros_like(env.ended), jnp.zeros_like(env.episode_return)
  return token, env, dict(reward=none, terminated=no, truncated=no,
                          episodes=Episodes(no, env.episode_return, env.episode_length))


def _discount(discount: float, env: EnvState, buffer: Rollout) -> tuple[EnvState, Rollout]:
  """Adds the discounted returns so far."""

  @island('discounted_returns')
  def returns(before, reward, over):
    def row(before, row):
      reward, over = row  # the reward is 0 in invalid rows
      now = discount * before + reward
      return jnp.where(over, 0.0, now), now

    return lax.scan(row, before, (reward, over))

  last, rows = returns(env.discounted_return, buffer.reward, buffer.terminated | buffer.truncated)
  return env._replace(discounted_return=last), buffer._replace(discounted_return=rows)


def count(env: EnvState, step: TimeStep) -> tuple[EnvState, dict[str, Any]]:
  """Advances environments by a step; invalid rows add nothing to an episode.

  Returns:
    The state after it, and what came back, as fields of the row that the step ends.
  """
  valid = ~env.ended
  episode_return = env.episode_return + jnp.where(valid, step.raw_reward, 0.0)
  length = env.episode_length + valid
  over = valid & (step.game_over | step.truncated)
  env = env._replace(
      obs=step.obs, ended=step.terminated | step.truncated,
      episode_return=jnp.where(over, 0.0, episode_return),
      episode_length=jnp.where(over, 0, length))
  return env, dict(reward=step.reward, terminated=step.terminated, truncated=step.truncated,
                   episodes=Episodes(over, episode_return, length))


@jax.named_scope('storing')
def zeros(obs: Observations, num_envs: int, policy: Policy, steps: int) -> Rollout:
  """A rollout of nothing, [steps, num_envs, ...], with these observations, of steps + 1 rows."""
  def none(dtype, *shape):
    return jnp.zeros((steps, num_envs, *shape), dtype)
  return Rollout(
      obs=obs,
      action=none(policy.action_dtype, *policy.action_shape),
      behaviour_log_prob=() if policy.log_prob is None else none(jnp.float32),
      behaviour_value=none(jnp.float32),
      reward=none(jnp.float32), terminated=none(bool), truncated=none(bool), valid=none(bool),
      episodes=Episodes(none(bool), none(jnp.float32), none(jnp.int32)),
      action_value=() if policy.explore is None else none(jnp.float32))


@jax.named_scope('storing')
def _add(buffer: Rollout, t, before: jax.Array, obs: jax.Array) -> Rollout:
  """Sets the observations of row t."""
  return buffer._replace(obs=frames.add(buffer.obs, t, before, obs))


@jax.named_scope('storing')
def _write(buffer: Rollout, t, **rows) -> Rollout:
  """Sets row t of the named fields."""
  written = {
      name: jax.tree.map(lambda b, x: lax.dynamic_update_index_in_dim(b, x, t, 0),
                         getattr(buffer, name), value)
      for name, value in rows.items()}
  return buffer._replace(**written)
