"""Environments that are JAX functions: their rollout is one program, without a simulator.

A user's environment is a class like `JaxEnv`, given as `env.task = 'module:Class'`; the other
fields of the config's `env` are the arguments of its constructor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit.envs import spaces
from podracer_jit.envs.protocol import EnvSpec, TimeStep
from podracer_jit.numerics.islands import island
from podracer_jit.options import shorten, shown


class JaxEnv(Protocol):
  """One environment. `reset` and `step` are traceable, and pure: they depend on arguments only.

  The interface is gymnax's (https://github.com/RobertTLange/gymnax), except that `step` never
  resets; the vector environment does.
  """

  # Spaces of Gymnasium or gymnax. Observations may be nested dicts and tuples; a Box may be any
  # object with a shape and a dtype. The space of actions is a Discrete, a MultiDiscrete, or a Box
  # with one axis.
  observation_space: Any
  action_space: Any
  max_episode_steps: int  # steps after which an episode is truncated; 0 or absent: no limit

  # For videos, the class may also have `render(state)` -> [H, W, 3] u8, and `frame_rate`, steps a
  # second.

  def reset(self, key: jax.Array) -> tuple[jax.Array, Any]:
    """Begins an episode. Returns its first observation, and a state: a pytree of arrays."""

  def step(self, key: jax.Array, state: Any, action: jax.Array
           ) -> tuple[jax.Array, Any, jax.Array, jax.Array, jax.Array, Any]:
    """Takes an action.

    Args:
      key: PRNG key of this step.
      state: the state that `reset` or the last step returned.
      action: [] i32, [A] i32 for several choices, or [A] f32.

    Returns:
      Observation, state, reward [], terminated [], truncated [], and a last value, which is
      ignored.
    """


class FunctionState(NamedTuple):
  """State of B environments that are functions, between two steps."""

  env: Any  # [B, ...] each: the environments' own states, with None for arrays without elements
  key: jax.Array  # [B]: PRNG key of each environment
  action: jax.Array  # [B, ...]: the actions of the next step
  ended: jax.Array  # [B] bool: the episode has ended, so the next step is a reset
  length: jax.Array  # [B] i32: steps of the episode so far


class JaxFamily:
  """Family of environments that are JAX functions; see `protocol.Family`."""

  render_options: Mapping[str, Any] = {}

  def __init__(self, make: Callable[[str, Mapping[str, Any]], JaxEnv]):
    """Makes a family.

    Args:
      make: (task, options) -> environment. It raises ValueError, in one line that names the field,
        if there is no such task or option.
    """
    self._make = make
    self._envs: dict[tuple[str, str], JaxEnv] = {}

  def _env(self, task: str, options: Mapping[str, Any]) -> JaxEnv:
    """Returns the environment of a task: always the same object, which is compiled once."""
    key = task, repr(sorted(options.items()))
    if key not in self._envs:
      self._envs[key] = self._make(task, options)
    return self._envs[key]

  def make_spec(self, task: str, options: Mapping[str, Any]) -> EnvSpec:
    """Returns the spec of a task; see `protocol.Family`."""
    env = self._env(task, options)
    action = env.action_space
    discrete = hasattr(action, 'n') and not action.shape
    choices = () if discrete else spaces.choices(action)
    continuous = not (discrete or choices)
    if continuous and len(action.shape) > 1:
      raise ValueError(f'env.task: the actions of {task} are {action}; only one choice (Discrete), '
                       'several (MultiDiscrete) and a vector of floats (Box) can be learned')
    parts = ()
    if not spaces.is_array(env.observation_space):
      *_, parts = spaces.layout(task, env.observation_space)
    obs = _check_functions(task, env)
    return EnvSpec(
        task=task,
        obs_shape=obs.shape,
        obs_dtype=np.dtype(obs.dtype),
        num_actions=int(action.n) if discrete else 0,
        action_low=_bound(action, action.low) if continuous else (),
        action_high=_bound(action, action.high) if continuous else (),
        frame_skip=1,
        max_episode_steps=_limit(env),
        is_function=True,
        channels_last=spaces.is_channels_last(obs.shape),
        parts=parts,
        action_choices=choices)

  def spaces_of(self, task: str, options: Mapping[str, Any]) -> spaces.Spaces:
    """Returns the spaces of a task; see `protocol.Family`."""
    env = self._env(task, options)
    return spaces.Spaces(env.observation_space, env.action_space)

  def make_vector_env(self, task: str, options: Mapping[str, Any], seeds: Sequence[int],
                      num_threads: int = 0, batch_size: int = 0) -> JaxVectorEnv:
    """Resets environments.

    Args:
      task: `env.task` of the config.
      options: the task's own options.
      seeds: one for each environment.
      num_threads: ignored, since XLA's threads do all work.
      batch_size: must be 0, since all environments step together.

    Returns:
      The vector environment.
    """
    del num_threads
    if batch_size:
      raise ValueError(f'env_batch: all environments of {task} step together; must be 0')
    return JaxVectorEnv(self._env(task, options), seeds)

  def state_shapes(self, task: str, options: Mapping[str, Any], num_envs: int) -> FunctionState:
    """Returns the shapes of `num_envs` environments' state; computes nothing."""
    keys = jax.eval_shape(_keys, jax.ShapeDtypeStruct((num_envs,), np.int32))
    return jax.eval_shape(functools.partial(_reset_all, self._env(task, options)), keys)[1]


class JaxVectorEnv:
  """Environments that are JAX functions, as a `protocol.VectorEnv`.

  Each environment has a PRNG key of its own, from its seed. So its episodes do not depend on how
  environments are split into vector environments.
  """

  # No simulator outside of the program needs an order of calls.
  handle = np.zeros((), np.int32)
  is_function = True

  def __init__(self, env: JaxEnv, seeds: Sequence[int]):
    """Resets one environment for each seed."""
    self._env = env
    self.one_hots = spaces.one_hots(env.observation_space)
    self.num_envs = len(seeds)
    self.batch_size = len(seeds)
    self.first_obs, self.first_state = _compiled_reset(env)(_keys(np.array(seeds, np.int32)))

  def send(self, token: jax.Array, state: FunctionState, action: jax.Array,
           env_id: jax.Array | None = None) -> tuple[jax.Array, FunctionState]:
    """Stores the actions [B, ...] for `recv`, which takes the step.

    Args:
      token: the token of the last call.
      state: of all environments.
      action: [B, ...].
      env_id: unused, as all environments take an action.

    Returns:
      The next token, and the next state.
    """
    del env_id
    chex.assert_axis_dimension(action, 0, self.num_envs)
    action = action.astype(state.action.dtype).reshape(state.action.shape)
    return token, state._replace(action=spaces.within(action, self._env.action_space))

  def recv(self, token: jax.Array, state: FunctionState
           ) -> tuple[jax.Array, FunctionState, TimeStep]:
    """Steps all environments; see `VectorEnv`."""
    step_all = island('environment')(functools.partial(_step_all, self._env))
    state, obs, reward, terminated, truncated = step_all(state)
    step = TimeStep(_as_arrays(self._env, obs), reward, terminated, truncated, raw_reward=reward,
                    game_over=terminated,
                    env_id=jnp.arange(self.num_envs, dtype=jnp.int32))
    return token, state, step

  def render(self, state: FunctionState) -> np.ndarray:
    """Returns what `render(state)` of a user's class draws, which should be [H, W, 3] u8.

    Raises:
      RuntimeError: the class has no such function.
    """
    if not hasattr(self._env, 'render'):
      raise RuntimeError('it has no function render(state)')
    shapes = jax.eval_shape(self._env.reset, state.key[0])[1]
    first = _with_empty(jax.tree.map(lambda x: x[0], state.env), shapes)
    return self._env.render(first)

  @property
  def frame_rate(self) -> float:
    """The attribute `frame_rate` of the class, 10 without one; see `VectorEnv`."""
    return float(getattr(self._env, 'frame_rate', 10))

  def close(self) -> None:
    """Does nothing: the environments consist of a program only."""


def _step_all(env: JaxEnv, state: FunctionState
              ) -> tuple[FunctionState, Any, jax.Array, jax.Array, jax.Array]:
  """Steps environments, and resets those whose episode has ended.

  Args:
    env: the environment's functions.
    state: of B environments.

  Returns:
    The next state, the observations, and the rewards, terminated and truncated, each [B].
  """
  key, step_key = jnp.moveaxis(jax.vmap(jax.random.split)(state.key), 1, 0)
  first_obs, first = _first_if_needed(env, step_key, state.ended)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first)
  obs, after, reward, terminated, truncated, *_ = jax.vmap(env.step)(
      step_key, _with_empty(state.env, shapes), state.action)

  truncated = jnp.asarray(truncated) != 0
  limit = _limit(env)
  if limit:
    truncated = truncated | (state.length + 1 >= limit)
  continues = ~state.ended
  terminated = continues & (jnp.asarray(terminated) != 0)
  # An episode ends in one way: a terminated one has no value to bootstrap from.
  truncated = continues & truncated & ~terminated

  def choose(if_continues: jax.Array, if_reset: jax.Array) -> jax.Array:
    # `continues` [B] has fewer axes than most values.
    return jax.vmap(jnp.where)(continues, if_continues, if_reset)

  state = FunctionState(
      env=_without_empty(jax.tree.map(choose, after, first)), key=key, action=state.action,
      ended=terminated | truncated,
      length=choose(state.length + 1, jnp.zeros_like(state.length)))
  reward = jnp.asarray(reward, jnp.float32)
  reward = choose(reward, jnp.zeros_like(reward))
  obs = jax.tree.map(choose, obs, first_obs)
  return state, obs, reward, terminated, truncated


def _first_if_needed(env: JaxEnv, key: jax.Array, ended: jax.Array) -> tuple[Any, Any]:
  """Returns first observations and states of environments, or zeros if no episode has ended.

  On a CPU, steps at which no episode has ended skip the work of a reset. On other platforms the
  host might wait for such a branch, so every step computes it. So does every step of several seeds
  in one program, since `vmap` turns a branch into a choice between both results.

  Args:
    env: the environment's functions.
    key: [B] PRNG keys.
    ended: [B] bool.
  """
  reset = jax.jit(jax.vmap(env.reset))  # traced once for both platforms

  def zeros(key: jax.Array) -> tuple[Any, Any]:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(reset, key))

  return lax.platform_dependent(
      key, ended, cpu=lambda key, ended: lax.cond(jnp.any(ended), reset, zeros, key),
      default=lambda key, ended: reset(key))


def _without_empty(state: Any) -> Any:
  """Returns a state with None in place of arrays without elements.

  MJX has many of these. Orbax cannot save them, and XLA does not shard them over a mesh.
  """
  return jax.tree.map(lambda x: x if x.size else None, state)


def _with_empty(state: Any, shapes: Any) -> Any:
  """Returns a state with arrays of these shapes in place of None; undoes `_without_empty`."""
  return jax.tree.map(lambda s, x: jnp.zeros(s.shape, s.dtype) if x is None else x, shapes, state)


def _keys(seeds: jax.Array) -> jax.Array:
  """Returns PRNG keys [B] of seeds [B]."""
  return jax.vmap(jax.random.key)(seeds)


@functools.cache
def _compiled_reset(env: JaxEnv) -> Callable:
  """Returns `_reset_all` of these functions, compiled once for all segments of a run."""
  return jax.jit(functools.partial(_reset_all, env))


def _reset_all(env: JaxEnv, keys: jax.Array) -> tuple[jax.Array, FunctionState]:
  """Returns the first observations [B, ...] and the state of environments with `keys` [B]."""
  keys, reset_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
  obs, first = jax.vmap(env.reset)(reset_keys)
  action = _action(env)
  state = FunctionState(
      env=_without_empty(first), key=keys,
      action=jnp.zeros((len(keys), *action.shape), action.dtype),
      ended=jnp.zeros(len(keys), bool), length=jnp.zeros(len(keys), jnp.int32))
  return _as_arrays(env, obs), state


def _action(env: JaxEnv) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of one environment's action."""
  space = env.action_space
  integers = hasattr(space, 'n') or spaces.choices(space)
  return jax.ShapeDtypeStruct(space.shape, jnp.int32 if integers else jnp.float32)


def _as_arrays(env: JaxEnv, obs: Any) -> jax.Array:
  """Returns observations of B environments as one array [B, ...]; see `spaces.observe`."""
  space = env.observation_space
  if spaces.is_array(space):
    return obs
  return spaces.observe(obs, space, spaces.leaves_of('', space))


def _limit(env: JaxEnv) -> int:
  """Returns the steps after which an episode is truncated; 0 for no limit."""
  return int(getattr(env, 'max_episode_steps', 0))


def _bound(action: Any, bound: Any) -> tuple[float, ...]:
  """Returns a Box's lower or upper bound of each number; gymnax has one bound for all numbers."""
  return tuple(map(float, np.broadcast_to(np.asarray(bound), (math.prod(action.shape),))))


def _check_functions(task: str, env: JaxEnv) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of an observation.

  Raises:
    ValueError: `reset` or `step` fails, or their results do not fit each other.
  """
  key = jax.eval_shape(jax.random.key, 0)
  try:
    obs, state = jax.eval_shape(env.reset, key)
    next_obs, next_state, reward, terminated, truncated, *_ = jax.eval_shape(
        env.step, key, state, _action(env))
  except Exception as error:  # noqa: BLE001 - a user's functions may raise anything
    raise ValueError(f'env.task: {task} cannot be traced: {type(error).__name__}: '
                     f'{shorten(str(error))}') from error
  if spaces.is_array(env.observation_space) and not isinstance(obs, jax.ShapeDtypeStruct):
    raise ValueError(f'env.task: the observations of {task} are {shown(type(obs).__name__)}, and '
                     'its observation_space describes one array')
  for name, first, later in (('observation', obs, next_obs), ('state', state, next_state)):
    if jax.tree.map(_described, first) != jax.tree.map(_described, later):
      raise ValueError(f'env.task: reset and step of {task} give different shapes or dtypes of '
                       f'the {name}: {shown(jax.tree.leaves(jax.tree.map(_described, first)))} '
                       f'and {shown(jax.tree.leaves(jax.tree.map(_described, later)))}')
  for name, value in (('reward', reward), ('terminated', terminated), ('truncated', truncated)):
    if value.shape:
      raise ValueError(f'env.task: the {name} of {task} must be a scalar, got {value.shape}')
  try:
    all_obs = jax.eval_shape(lambda: jax.vmap(env.reset)(_keys(np.zeros(1, np.int32)))[0])
    all_obs = jax.eval_shape(functools.partial(_as_arrays, env), all_obs)
  except Exception as error:
    raise ValueError(f'env.task: the observations of {task} do not fit its observation_space: '
                     f'{type(error).__name__}: {shorten(str(error))}') from error
  return jax.ShapeDtypeStruct(all_obs.shape[1:], all_obs.dtype)


def _described(x: jax.ShapeDtypeStruct) -> str:
  return f'{x.dtype} {x.shape}'
