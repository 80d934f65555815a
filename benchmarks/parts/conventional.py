"""A conventional actor, with Python between any two steps, as a baseline for the jitted rollout.

The actor works like Cleanba's actor threads: each step is one call of a jitted policy and one
`env.step` of EnvPool's gymnasium API. Rows are collected in lists and stacked at the end. The actor
uses the keys, seeds, rows and episode statistics of the jitted actor, so both make the same
rollouts for the same learner. Training never uses this actor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.envs import envpool_envs, frames
from podracer_jit.loops import Worker
from podracer_jit.losses.algorithm import Algorithm
from podracer_jit.runtime.channels import Versioned
from podracer_jit.types import Episodes, Params, Rollout


class PoolArgs(NamedTuple):
  """The arguments of a pool, in the order of `envpool_envs.EnvPoolVectorEnv`."""

  task: str
  options: Mapping[str, Any]
  seeds: Sequence[int]
  num_threads: int


class Returned(NamedTuple):
  """A row of the environments' outputs, with statistics of episodes; NumPy arrays."""

  reward: np.ndarray
  terminated: np.ndarray
  truncated: np.ndarray
  valid: np.ndarray
  episodes: Episodes


def make_policy(algorithm: Algorithm) -> Callable:
  """Returns a jitted policy(params, obs, key, rollouts, t) -> (fields, actions for EnvPool)."""

  @jax.jit
  def policy(params: Params, obs: jax.Array, key: jax.Array, rollouts, t):
    """Draws the actions of one step.

    Args:
      params: the result of `Algorithm.acting`.
      obs: [B, ...].
      key: PRNG key of the vector environment.
      rollouts: [] i32, rollouts made before this one.
      t: [] i32, step of the rollout.

    Returns:
      A row of a rollout's fields on the actor's device, [B, ...] each, and the actions for EnvPool
      [B, ...].
    """
    key = jax.random.fold_in(jax.random.fold_in(key, rollouts), t)
    # There is no carry, so it does not matter which rows are valid.
    acted = algorithm.act(params, obs, None, jnp.ones(len(obs), bool), key, None)
    fields = dict(action=acted.action, extras=acted.extras)
    return fields, algorithm.parts.policy.to_env(acted.action)

  return policy


class Pool:
  """An EnvPool stepped from Python; starts like an `EnvPoolVectorEnv` with the same arguments."""

  def __init__(self, args: PoolArgs, key: jax.Array, device: jax.Device, stack: int,
               on_host: bool):
    """Starts and resets the environments.

    Args:
      args: the arguments of the pool.
      key: PRNG key of the vector environment.
      device: runs the policy and holds the rollouts.
      stack: `stack` of the task's EnvSpec.
      on_host: True: NumPy stacks the observations, which is faster if the device is the CPU. False:
        the device stacks the observations that were sent to it for the policy.
    """
    size = len(args.seeds)
    self._pool = envpool_envs.make_pool(*args)
    self._obs = _narrow(self._pool.reset()[0])
    self._ended = np.zeros(size, bool)
    self._episode_return = np.zeros(size, np.float32)
    self._episode_length = np.zeros(size, np.int32)
    self._key = key
    self._device = device
    self._on_host = on_host
    self._stack = stack
    self._rollouts = 0

  def rollout(self, policy: Callable, params: Params, unroll_length: int) -> Rollout:
    """Makes the next `unroll_length` steps; the rollout is on the device."""
    obs = [self._frame()]
    acted = []
    returned = []
    for t in range(unroll_length):
      row, action = policy(params, obs[-1], self._key, self._rollouts, t)
      acted.append(row)
      returned.append(self._step(np.asarray(action)))
      obs.append(self._frame())
    self._rollouts += 1
    stack_rows = self._stack_on_host if self._on_host else _stack_on_device
    return Rollout(obs=_frames_once(stack_rows(obs), self._stack), **stack_rows(acted),
                   **self._stack_on_host(returned)._asdict())

  def _frame(self) -> Any:
    return self._obs if self._on_host else jax.device_put(self._obs, self._device)

  def _stack_on_host(self, rows: Sequence[Any]) -> Any:
    """Stacks rows along a new leading axis with NumPy, and sends the result to the device."""
    return jax.device_put(jax.tree.map(lambda *x: np.stack(x), *rows), self._device)

  def _step(self, action: np.ndarray) -> Returned:
    """Steps all environments; returns a row of their outputs."""
    if action.dtype == np.float32:  # MuJoCo and DM Control take float64
      action = action.astype(self._pool.action_space.dtype)
    obs, reward, terminated, truncated, info = self._pool.step(action)
    # EnvPool resets an environment in the step after its episode ended, and ignores the action.
    valid = ~self._ended
    raw = _narrow(info.get('reward', reward))
    game_over = info['terminated'].astype(bool) if 'lives' in info else terminated
    episode_return = self._episode_return + np.where(valid, raw, np.float32(0))
    length = self._episode_length + valid.astype(np.int32)
    over = valid & (game_over | truncated)
    self._obs = _narrow(obs)
    self._ended = terminated | truncated
    self._episode_return = np.where(over, np.float32(0), episode_return)
    self._episode_length = np.where(over, np.int32(0), length)
    # The reward of a reset is not the agent's.
    return Returned(np.where(valid, _narrow(reward), np.float32(0)), terminated, truncated, valid,
                    Episodes(over, episode_return, length))

  def close(self) -> None:
    """Ends the pool's threads."""
    self._pool.close()


@jax.jit
def _stack_on_device(rows: Sequence[Any]) -> Any:
  """Stacks rows along a new leading axis on the device."""
  return jax.tree.map(lambda *x: jnp.stack(x), *rows)


_frames_once = jax.jit(frames.from_stacks, static_argnums=1)


def _narrow(x: np.ndarray) -> np.ndarray:
  """Casts float64 to float32, as the package does."""
  return x.astype(np.float32) if x.dtype == np.float64 else x


def replace_actor(worker: Worker, pools: Sequence[PoolArgs], device: jax.Device, policy: Callable,
                  unroll_length: int, stack: int, on_host: bool | None = None
                  ) -> tuple[Worker, Callable[[], None]]:
  """Replaces the rollout of an actor by a rollout that Python steps.

  Several pools are stepped one after another. Within an actor nothing overlaps, as in Cleanba,
  which has several actor threads instead.

  Args:
    worker: an actor of a segment.
    pools: arguments of its pools.
    device: the device of the actor.
    policy: the function that `make_policy` returned.
    unroll_length: steps of a rollout.
    stack: `stack` of the task's EnvSpec.
    on_host: see Pool; by default the faster way.

  Returns:
    The worker with the new rollout, and a function that closes its pools.
  """
  on_host = device.platform == 'cpu' if on_host is None else on_host
  stepped = [Pool(args, env.key, device, stack, on_host)
             for args, env in zip(pools, worker.state.envs, strict=True)]

  def fire(state, params: Versioned):
    rollouts = tuple(pool.rollout(policy, params.value.params, unroll_length) for pool in stepped)
    return state, [Versioned(jax.block_until_ready(rollouts), params.version)]

  def close() -> None:
    for pool in stepped:
      pool.close()

  return worker._replace(fire=fire, state=None), close
