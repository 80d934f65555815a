"""Environments that are JAX functions: their rollout is one program, without a simulator.

A user's environment is a class like `JaxEnv`, given as `env.task = 'module:Class'`; the other
fields of the config's `env` are the arguments of its constructor.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
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

  # Spaces of Gymnasium or gymnax. Observations may be nested dicts and tuples, with a part that
  # says which actions are legal (`env.action_mask`); a Box may be any object with a shape and a
  # dtype. The space of actions is a Discrete, a MultiDiscrete, or a Box with one axis.
  observation_space: Any
  action_space: Any
  # Steps after which an episode is truncated; 0, None or absent: no limit.
  max_episode_steps: int | None

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

  env: Any  # [B, ...] each: the arrays of the environments' own states, see `_Functions`
  key: jax.Array  # [B]: PRNG key of each environment
  action: jax.Array  # [B, ...]: the actions of the next step
  ended: jax.Array  # [B] bool: the episode has ended, so the next step is a reset
  length: jax.Array  # [B] i32: steps of the episode so far


class JaxFamily:
  """Family of environments that are JAX functions; see `protocol.EnvFamily`."""

  render_options: Mapping[str, Any] = {}

  def __init__(self, make: Callable[[str, Mapping[str, Any]], JaxEnv]):
    """Makes a family.

    Args:
      make: (task, options) -> environment. It raises ValueError, in one line that names the field,
        if there is no such task or option.
    """
    self._make = make
    self._all: dict[tuple[str, str], _Functions] = {}

  def _functions(self, task: str, options: Mapping[str, Any]) -> _Functions:
    """Returns the functions of a task: always the same object, which is compiled once."""
    key = task, repr(sorted(options.items()))
    if key not in self._all:
      self._all[key] = _Functions(self._make(task, options))
    return self._all[key]

  def make_spec(self, task: str, options: Mapping[str, Any]) -> EnvSpec:
    """Returns the spec of a task; see `protocol.EnvFamily`."""
    functions = self._functions(task, options)
    env = functions.env
    action = env.action_space
    discrete = hasattr(action, 'n') and not action.shape
    choices = () if discrete else spaces.choices(action)
    continuous = not (discrete or choices)
    if continuous and not (spaces.is_array(action) and len(action.shape) <= 1
                           and np.issubdtype(action.dtype, np.floating)):
      raise ValueError(f'env.task: the actions of {task} are {action}; only one choice (Discrete), '
                       'several from 0 on (MultiDiscrete, integers) and a vector of floats (Box) '
                       'can be learned')
    parts = ()
    if not spaces.is_array(env.observation_space):
      *_, parts = spaces.layout(task, env.observation_space)
    obs = _check_functions(task, functions)
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
    """Returns the spaces of a task; see `protocol.EnvFamily`."""
    env = self._functions(task, options).env
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
    return JaxVectorEnv(self._functions(task, options), seeds)

  def state_shapes(self, task: str, options: Mapping[str, Any], num_envs: int) -> FunctionState:
    """Returns the shapes of `num_envs` environments' state; computes nothing."""
    keys = jax.eval_shape(_keys, jax.ShapeDtypeStruct((num_envs,), np.int32))
    return jax.eval_shape(self._functions(task, options).reset_all, keys)[1]


class JaxVectorEnv:
  """Environments that are JAX functions, as a `protocol.VectorEnv`.

  Each environment has a PRNG key of its own, from its seed. So its episodes do not depend on how
  environments are split into vector environments.
  """

  # No simulator outside of the program needs an order of calls.
  handle = np.zeros((), np.int32)
  is_function = True

  def __init__(self, functions: _Functions, seeds: Sequence[int]):
    """Resets one environment for each seed."""
    self._functions = functions
    self.one_hots = spaces.one_hots(functions.env.observation_space)
    self.num_envs = len(seeds)
    self.batch_size = len(seeds)
    self.first_obs, self.first_state = functions.compiled_reset(_keys(np.array(seeds, np.int32)))

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
    space = self._functions.env.action_space
    if np.any(getattr(space, 'start', 0)):  # policies count from 0
      action = action + jnp.asarray(space.start, action.dtype)
    return token, state._replace(action=spaces.within(action, space))

  def recv(self, token: jax.Array, state: FunctionState
           ) -> tuple[jax.Array, FunctionState, TimeStep]:
    """Steps all environments; see `VectorEnv`."""
    step_all = island('environment')(functools.partial(_step_all, self._functions))
    state, obs, reward, terminated, truncated = step_all(state)
    step = TimeStep(_as_arrays(self._functions.env, obs), reward, terminated, truncated,
                    raw_reward=reward, game_over=terminated,
                    env_id=jnp.arange(self.num_envs, dtype=jnp.int32))
    return token, state, step

  def render(self, state: FunctionState) -> np.ndarray:
    """Returns what `render(state)` of a user's class draws, which should be [H, W, 3] u8.

    Raises:
      RuntimeError: the class has no such function.
    """
    env = self._functions.env
    if not hasattr(env, 'render'):
      raise RuntimeError('it has no function render(state)')
    first = self._functions.state_of(jax.tree.map(lambda x: x[0], state.env))
    return env.render(first)

  @property
  def frame_rate(self) -> float:
    """The attribute `frame_rate` of the class, 10 without one; see `VectorEnv`."""
    return float(getattr(self._functions.env, 'frame_rate', 10))

  def close(self) -> None:
    """Does nothing: the environments consist of a program only."""


class _Structure(NamedTuple):
  """Structure of a tree of arrays."""

  tree: Any  # treedef of JAX
  names: list[tuple[str, ...]]  # of each array: the steps to it
  shapes: list[jax.ShapeDtypeStruct]  # of each array

  def words(self) -> list[str]:
    """Returns each array in words."""
    return [' '.join(filter(None, ('/'.join(name), str(x.dtype), str(x.shape))))
            for name, x in zip(self.names, self.shapes, strict=True)]

  def differs(self, other: _Structure) -> bool:
    """Returns whether another tree has another structure."""
    if (self.names, self.words()) != (other.names, other.words()):
      return True
    try:
      return self.tree != other.tree
    except Exception:  # noqa: BLE001 - a user's classes may compare themselves in any way
      return False


class _Functions:
  """The functions of an environment, with states as dicts of their arrays.

  A state may be of a user's class, which may check its arrays when it is made. So it is made only
  where the arrays are those of one environment: inside of `vmap`. Everywhere else, and in
  checkpoints, a state is nested dicts with the same names. Arrays without elements, of which MJX
  has many, are left out: Orbax cannot save them, and XLA does not shard them over a mesh.
  """

  def __init__(self, env: JaxEnv):
    """Wraps an environment."""
    self.env = env

  def reset(self, key: jax.Array) -> tuple[Any, Any]:
    """Returns the first observation of an episode, and the arrays of its state."""
    obs, state = self.env.reset(key)
    return obs, _arrays_of(state)

  def step(self, key: jax.Array, arrays: Any, action: jax.Array) -> tuple[Any, ...]:
    """Takes a step of an environment; see `JaxEnv.step`.

    Args:
      key: PRNG key of this step.
      arrays: of the state.
      action: as of `JaxEnv.step`.

    Returns:
      The results of `JaxEnv.step` without the last, with the arrays of the state.
    """
    obs, state, reward, terminated, truncated, _ = self.env.step(key, self.state_of(arrays), action)
    return obs, _arrays_of(state), reward, terminated, truncated

  def state_of(self, arrays: Any) -> Any:
    """Returns the environment's own state with these arrays."""
    leaves = []
    for name, shape in zip(self.state.names, self.state.shapes, strict=True):
      leaf = arrays
      if not shape.size:
        leaf = jnp.zeros(shape.shape, shape.dtype)
      else:
        for key in name:
          leaf = leaf[key]
      leaves.append(leaf)
    return self.state.tree.unflatten(leaves)

  @functools.cached_property
  def state(self) -> _Structure:
    """Structure of a state."""
    return _structures('', 'reset', self.env.reset, _key())[1]

  def reset_all(self, keys: jax.Array) -> tuple[jax.Array, FunctionState]:
    """Returns the first observations [B, ...] and the state of environments with `keys` [B]."""
    keys, reset_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    obs, first = jax.vmap(self.reset)(reset_keys)
    action = _action(self.env)
    state = FunctionState(
        env=first, key=keys,
        action=jnp.zeros((len(keys), *action.shape), action.dtype),
        ended=jnp.zeros(len(keys), bool), length=jnp.zeros(len(keys), jnp.int32))
    return _as_arrays(self.env, obs), state

  @functools.cached_property
  def compiled_reset(self) -> Callable:
    """`reset_all`, compiled once for all segments of a run."""
    return jax.jit(self.reset_all)


def _named(state: Any) -> tuple[list[tuple[str, ...]], list[Any], Any]:
  """Returns the names of a state's arrays, the arrays, and the treedef."""
  paths, tree = jax.tree_util.tree_flatten_with_path(state)
  names = [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path, _ in paths]
  if len(set(names)) < len(names):  # two parts of a user's class may have one name
    names = [(str(i),) for i in range(len(names))]
  return names, [leaf for _, leaf in paths], tree


def _arrays_of(state: Any) -> Any:
  """Returns the arrays of a state, by their names; see `_Functions`."""
  arrays: dict[str, Any] = {}
  for name, leaf in zip(*_named(state)[:2], strict=True):
    if not np.size(leaf):
      continue
    if not name:
      return leaf  # the state is an array
    inner = arrays
    for key in name[:-1]:
      inner = inner.setdefault(key, {})
    inner[name[-1]] = leaf
  return arrays


def _structures(task: str, name: str, function: Callable, *args: Any) -> list[_Structure]:
  """Returns the structure of each value of `reset` or `step`; leaves out the last one of `step`.

  Args:
    task: name of the task, for error messages.
    name: 'reset' or 'step'.
    function: the environment's, but the argument `state` is a list of arrays.
    *args: the shapes of its arguments.

  Raises:
    ValueError: the function fails, or returns another number of values.
  """
  expected = _VALUES[name]
  number = 0
  trees = []

  def arrays(*args):
    nonlocal number
    values = function(*args)
    number = len(values) if isinstance(values, tuple | list) else 1
    if number == len(expected):
      trees.extend(map(_named, values[:5]))
    # Not the values: a user's class might refuse shapes in place of arrays.
    return [leaves for _, leaves, _ in trees]

  try:
    shapes = jax.eval_shape(arrays, *args)
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's functions may raise anything
    raise ValueError(f'env.task: {task} cannot be traced: {type(error).__name__}: '
                     f'{shorten(str(error))}') from error
  if number != len(expected):
    in_words = {2: 'two', 6: 'six'}[len(expected)]
    raise ValueError(f'env.task: {name} returns {in_words} values: {", ".join(expected)}; that of '
                     f'{task} returns {number} (see envs/jax_envs.py)')
  return [_Structure(tree, names, list(of_value))
          for (names, _, tree), of_value in zip(trees, shapes, strict=True)]


def _step_all(functions: _Functions, state: FunctionState
              ) -> tuple[FunctionState, Any, jax.Array, jax.Array, jax.Array]:
  """Steps environments, and resets those whose episode has ended.

  Args:
    functions: of the environments.
    state: of B environments.

  Returns:
    The next state, the observations, and the rewards, terminated and truncated, each [B].
  """
  key, step_key = jnp.moveaxis(jax.vmap(jax.random.split)(state.key), 1, 0)
  first_obs, first = _first_if_needed(functions, step_key, state.ended)
  obs, after, reward, terminated, truncated = jax.vmap(functions.step)(
      step_key, state.env, state.action)

  truncated = jnp.asarray(truncated) != 0
  limit = _limit(functions.env)
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
      env=jax.tree.map(choose, after, first), key=key, action=state.action,
      ended=terminated | truncated,
      length=choose(state.length + 1, jnp.zeros_like(state.length)))
  reward = jnp.asarray(reward, jnp.float32)
  reward = choose(reward, jnp.zeros_like(reward))
  obs = jax.tree.map(choose, obs, first_obs)
  return state, obs, reward, terminated, truncated


def _first_if_needed(functions: _Functions, key: jax.Array, ended: jax.Array) -> tuple[Any, Any]:
  """Returns first observations and states of environments, or zeros if no episode has ended.

  On a CPU, steps at which no episode has ended skip the work of a reset. On other platforms the
  host might wait for such a branch, so every step computes it. So does every step of several seeds
  in one program, since `vmap` turns a branch into a choice between both results.

  Args:
    functions: of the environments.
    key: [B] PRNG keys.
    ended: [B] bool.
  """
  reset = jax.jit(jax.vmap(functions.reset))  # traced once for both platforms

  def zeros(key: jax.Array) -> tuple[Any, Any]:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(reset, key))

  return lax.platform_dependent(
      key, ended, cpu=lambda key, ended: lax.cond(jnp.any(ended), reset, zeros, key),
      default=lambda key, ended: reset(key))


def _key() -> jax.ShapeDtypeStruct:
  """Returns the shape of a PRNG key."""
  return jax.eval_shape(jax.random.key, 0)


def _keys(seeds: jax.Array) -> jax.Array:
  """Returns PRNG keys [B] of seeds [B]."""
  return jax.vmap(jax.random.key)(seeds)


def _action(env: JaxEnv) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of one environment's action."""
  space = env.action_space
  integers = hasattr(space, 'n') or spaces.choices(space)
  return jax.ShapeDtypeStruct(space.shape, jnp.int32 if integers else jnp.float32)


def _as_arrays(env: JaxEnv, obs: Any) -> jax.Array:
  """Returns observations of B environments as one array [B, ...]; see `spaces.observe`."""
  space = env.observation_space
  if spaces.is_array(space):
    array = spaces.array_in(obs, space)
    is_image = len(array.shape) == 4 and spaces.has_bits(spaces.innermost(space))
    return array.astype(bool) if is_image else array
  return spaces.observe(obs, space, spaces.leaves_of('', space))


def _limit(env: JaxEnv) -> int:
  """Returns the steps after which an episode is truncated; 0 for no limit.

  Raises:
    TypeError: it is no whole number.
  """
  return operator.index(getattr(env, 'max_episode_steps', None) or 0)


def _bound(action: Any, bound: Any) -> tuple[float, ...]:
  """Returns a Box's lower or upper bound of each number; gymnax has one bound for all numbers."""
  return tuple(map(float, np.broadcast_to(np.asarray(bound), (math.prod(action.shape),))))


# The arguments of an environment's functions, and the values that they return.
_ARGUMENTS = {'reset': ('key',), 'step': ('key', 'state', 'action')}
_VALUES = {'reset': ('obs', 'state'),
           'step': ('obs', 'state', 'reward', 'terminated', 'truncated', 'info')}


def _check_functions(task: str, functions: _Functions) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of an observation.

  Raises:
    ValueError: `reset` or `step` fails, or their results do not fit each other.
  """
  env = functions.env
  _check_arguments(task, env)
  obs, state = _structures(task, 'reset', env.reset, _key())
  functions.state = state

  def step(key, leaves, action):
    return env.step(key, state.tree.unflatten(leaves), action)

  next_obs, next_state, *scalars = _structures(task, 'step', step, _key(), state.shapes,
                                               _action(env))
  if spaces.is_array(env.observation_space) and len(obs.shapes) != 1:
    raise ValueError(f'env.task: the observations of {task} are {shown(obs.words())}, and its '
                     'observation_space describes one array')
  for name, first, later in (('observation', obs, next_obs), ('state', state, next_state)):
    if first.differs(later):
      raise ValueError(f'env.task: reset and step of {task} give different shapes or dtypes of '
                       f'the {name}: {shown(first.words())} and {shown(later.words())}')
  for name, value in zip(_VALUES['step'][2:], scalars, strict=False):
    if value.names != [()] or value.shapes[0].shape:
      got = value.shapes[0].shape if value.names == [()] else shown(value.words())
      raise ValueError(f'env.task: the {name} of {task} must be a scalar, got {got}')

  def first_obs(key):
    obs, _ = functions.reset(key)
    problem = spaces.misfit(obs, env.observation_space)
    if problem:
      raise ValueError(problem)
    return obs

  try:
    all_obs = jax.eval_shape(lambda: jax.vmap(first_obs)(_keys(np.zeros(1, np.int32))))
    all_obs = jax.eval_shape(functools.partial(_as_arrays, env), all_obs)
    if any(map(spaces.has_bits, spaces.without_parts(env.observation_space))):
      # Any other number would become 1.
      problem = spaces.beyond_bits(functions.reset(jax.random.key(0))[0], env.observation_space)
      if problem:
        raise ValueError(problem)
    return jax.ShapeDtypeStruct(all_obs.shape[1:], all_obs.dtype)
  except Exception as error:
    raise ValueError(f'env.task: the observations of {task} do not fit its observation_space: '
                     f'{type(error).__name__}: {shorten(str(error))}') from error


def _check_arguments(task: str, env: JaxEnv) -> None:
  """Checks the arguments of an environment's functions, and its limit.

  Raises:
    ValueError: they are wrong.
  """
  for name, arguments in _ARGUMENTS.items():
    try:
      signature = inspect.signature(getattr(env, name))
    except (TypeError, ValueError):
      continue  # some callables tell no signature
    try:
      signature.bind(*arguments)
    except TypeError:
      raise ValueError(
          f'env.task: {name} of {task} takes {signature}; as JAX functions, an environment has '
          f'{name}({", ".join(arguments)}), and its constructor takes all other parameters (see '
          'envs/jax_envs.py)') from None
  limit = getattr(env, 'max_episode_steps', None)
  try:
    fits = not isinstance(limit, bool) and _limit(env) >= 0
  except TypeError:
    fits = False
  if not fits:
    raise ValueError(f'env.task: max_episode_steps of {task} must be a whole number of steps; 0 or '
                     f'None: no limit; got {shown(limit)}')
