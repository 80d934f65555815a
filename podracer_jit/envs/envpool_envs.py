"""EnvPool behind two types: what a task is, and a shard of its environments.

The only module that imports envpool. What its callers may rely on: float64 never leaves here, seeds
never overlap, nothing that would kill the process reaches EnvPool, and a pool outlives its program.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import mlir

with warnings.catch_warnings():
  warnings.simplefilter('ignore')  # EnvPool's imports warn about spaces we do not use
  import envpool

from podracer_jit.envs.protocol import EnvSpec, TimeStep
from podracer_jit.options import LARGEST_FLOAT, shown

# Set by us: the experiment says how many to wait for, seeds are explicit, threads are placement.
_OURS = ('num_envs', 'batch_size', 'num_threads', 'seed', 'env_seed', 'base_path', 'task',
         'gym_reset_return_info', 'max_num_players', 'thread_affinity_offset')

# A reset makes up to noop_max steps, a step frame_skip frames; programs have an operation for each
# frame of a stack.
_AT_MOST = {'noop_max': 100_000, 'frame_skip': 1000, 'stack_num': 128, 'frame_stack': 128}
_TIMES = ('step', 'time', 'duration', 'frequency')  # in names of options that make nothing larger
_LARGEST_SIZE = 10_000  # of an option that may be a length, unless its default is larger
_LARGEST_OBS = 2**26  # bytes of an observation


def _quiet_spec(task: str, options: Mapping[str, Any]):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return envpool.make_spec(task, **options)


def make_spec(task: str, options: Mapping[str, Any]) -> EnvSpec:
  """The spec of `task` with EnvPool's own `options`, checked before EnvPool could act on them.

  Raises:
    ValueError: an unknown task, option or value, or a kind of task that cannot be trained yet.
  """
  if task not in envpool.list_all_envs():
    near = difflib.get_close_matches(task, envpool.list_all_envs(), n=3, cutoff=0.4)
    raise ValueError(f'env.task: EnvPool has no task {shown(task)}'
                     + (f'; did you mean {" or ".join(near)}?' if near else ''))
  usual = _quiet_spec(task, {})
  default = usual.config._asdict()
  for name, value in options.items():
    if name in _OURS or name not in default:
      known = ', '.join(sorted(set(default) - set(_OURS)))
      raise ValueError(f'env.{name}: not an option of {task}; its options are {known}')
    kind = type(default[name])
    if type(value) is not kind and not (kind is float and type(value) is int):
      raise ValueError(f'env.{name}: must be of type {kind.__name__}, got {shown(value)}')
    for problem in _problems_of_number(name, value, default[name]):
      raise ValueError(f'env.{name}: {problem}, got {shown(value)}')
    if name == 'noop_max' and value < 1:
      raise ValueError(f'env.noop_max: must be at least 1 (1 is no no-ops), got {value}')
    smallest = 1 if name in ('frame_skip', 'stack_num', 'max_episode_steps', 'img_height',
                             'img_width') else None
    if smallest is not None and value < smallest:
      raise ValueError(f'env.{name}: must be at least {smallest}, got {value}')
  for name, value in options.items():
    try:
      alone = _quiet_spec(task, {name: value})
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
      why = ''.join(str(error).strip().splitlines()[:1])[:80]
      raise ValueError(f'env.{name}: EnvPool refuses {shown(value)} for {task} ({why})') from None
    for problem in _problems_of_obs(alone, usual):
      raise ValueError(f'env.{name}: with {shown(value)} {problem}')
  spec = _quiet_spec(task, options)
  for problem in _problems_of_obs(spec, usual):  # of the options together
    raise ValueError(f'env.{max(options, key=lambda name: _obs_bytes(_alone(task, name, options)))}'
                     f': with the other options of {task} {problem}')
  obs, action = spec.observation_space, spec.action_space
  if spec.config._asdict().get('max_num_players', 1) != 1:
    raise ValueError(f'env.task: {task} has several players; single-player tasks only for now')
  discrete = type(action).__name__ == 'Discrete'
  floats = type(action).__name__ == 'Box' and np.issubdtype(action.dtype, np.floating)
  if not discrete and not (floats and len(action.shape) == 1):
    raise ValueError(f'env.task: the actions of {task} are {action}; only one choice (Discrete) '
                     'and a vector of floats (Box) can be learned for now')
  shape, dtype = _flat_obs(task, obs)
  return EnvSpec(
      task=task,
      obs_shape=shape,
      obs_dtype=dtype,
      num_actions=int(action.n) if discrete else 0,
      action_low=() if discrete else tuple(map(float, action.low)),
      action_high=() if discrete else tuple(map(float, action.high)),
      frame_skip=int(spec.config._asdict().get('frame_skip', 1)),
      max_episode_steps=int(spec.config.max_episode_steps),
      stack=_stack(spec))


def _problems_of_number(name: str, value: Any, default: Any) -> Iterator[str]:
  """Yields what is wrong with an option that is a number, of any task."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return
  if isinstance(default, float):
    if not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:  # nan is not, either
      yield 'must be a finite number'
    return
  most = _AT_MOST.get(name, max(_LARGEST_SIZE, 100 * default))
  if name not in _AT_MOST and any(word in name for word in _TIMES):
    most = 2**31 - 1
  if value > most:
    yield f'must be at most {min(most, 2**31 - 1):,}'
  if value < -2**31:
    yield 'must be at least -2^31'


def _problems_of_obs(spec: Any, usual: Any) -> Iterator[str]:
  """Yields why observations cannot be had; asks for no space, which would allocate two of them."""
  # The usual shapes have -1 for the number of players.
  if _not_positive(spec) > _not_positive(usual):
    shapes = [tuple(part.shape) for part in _obs_parts(spec)]
    yield f'observations have the shape {shown(shapes[0] if len(shapes) == 1 else shapes)}'
  elif _obs_bytes(spec) > _LARGEST_OBS:
    yield (f'an observation has {_obs_bytes(spec):,} bytes; it must have at most '
           f'{_LARGEST_OBS:,}')


def _obs_parts(spec: Any) -> list[Any]:
  return [part for name, part in spec.state_array_spec.items() if name.startswith('obs')]


def _not_positive(spec: Any) -> int:
  return sum(size < 1 for part in _obs_parts(spec) for size in part.shape)


def _obs_bytes(spec: Any) -> int:
  return sum(abs(math.prod(part.shape)) * np.dtype(part.dtype).itemsize
             for part in _obs_parts(spec))


def _alone(task: str, name: str, options: Mapping[str, Any]) -> Any:
  return _quiet_spec(task, {name: options[name]})


def families() -> dict[str, list[str]]:
  """Returns the names of all tasks by family, such as `atari` or `mujoco.dmc`; both are sorted."""
  found: dict[str, list[str]] = {}
  for task in sorted(envpool.list_all_envs()):
    module = envpool.registration.registry.specs[task][0]
    found.setdefault(module.removeprefix('envpool.'), []).append(task)
  return dict(sorted(found.items()))


def _stack(spec: Any) -> int:
  """How many frames an observation has, of tasks whose stacks go on, or are filled with one frame.

  Those of Atari do. ViZDoom's, at an episode's end, do neither.
  """
  return int(spec.config.stack_num) if type(spec).__name__ == 'AtariEnvSpec' else 1


def _flat_obs(task: str, space: Any) -> tuple[tuple[int, ...], np.dtype]:
  """Shape and dtype of an observation as `_observe` makes it."""
  kind = type(space).__name__
  if kind == 'Box':
    return tuple(space.shape), _narrowed(space.dtype)
  if kind == 'Dict' and {type(part).__name__ for part in space.values()} <= {'Box', 'Discrete'}:
    return (sum(math.prod(part.shape) for part in space.values()),), np.dtype(np.float32)
  raise ValueError(f'env.task: the observations of {task} are {kind}; only arrays (Box), and flat '
                   'dicts of them and of numbers, can be learned from for now')


def _observe(obs: Any) -> Any:
  """[B, ...]; of a dict one row of f32 each, its parts in the order of their names."""
  obs = _narrow(obs)
  if not isinstance(obs, Mapping):
    return obs
  size = len(next(iter(obs.values())))
  xnp = np if isinstance(next(iter(obs.values())), np.ndarray) else jnp
  return xnp.concatenate([obs[name].reshape(size, -1).astype(np.float32) for name in sorted(obs)],
                         axis=1)


def make_shard(task: str, options: Mapping[str, Any], seeds: Sequence[int], num_threads: int = 0,
               batch_size: int = 0) -> Shard:
  """Starts the environments of one EnvPool; see `Shard` and `protocol.Family`."""
  return Shard(task, options, seeds, num_threads, batch_size)


def make_pool(task: str, options: Mapping[str, Any], seeds: Sequence[int], num_threads: int = 0,
              batch_size: int = 0) -> Any:
  """Starts an EnvPool, which is stepped from Python by the gymnasium API.

  Args:
    task: name of the task.
    options: of EnvPool's own.
    seeds: one for each environment.
    num_threads: of the pool; 0 lets EnvPool choose.
    batch_size: environments that a step waits for; 0 for all.

  Returns:
    EnvPool's object.
  """
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return envpool.make(
        task, env_type='gymnasium', num_envs=len(seeds), batch_size=batch_size or len(seeds),
        seed=list(seeds), num_threads=num_threads, **options)


class Shard:
  """One EnvPool and its jittable `send` and `recv`.

  Synchronous: each call is for all environments, in their order. Asynchronous: for the first B that
  are ready, and those are to be sent actions; an environment is first received with its first
  observation, there is no `first_obs`.

  The handle the two thread is an ordering token only: each call finds its pool by an attribute, so
  several shards of one program may share one token, which fixes the order of all their calls. It is
  also what keeps them: a call whose handle leads to nothing may be dropped.
  The pool must outlive every program that contains it: close it after the last output is ready.
  """

  def __init__(self, task: str, options: Mapping[str, Any], seeds: Sequence[int],
               num_threads: int = 0, batch_size: int = 0):
    """Starts the environments and resets them; num_threads 0 lets EnvPool choose.

    With a batch_size the shard is asynchronous; it is below the number of environments.
    """
    self.task, self.num_envs = task, len(seeds)
    self.batch_size = batch_size or self.num_envs
    self._pool = make_pool(task, options, seeds, num_threads, self.batch_size)
    # MuJoCo and DM Control are float64 throughout; with x64 off their recv aborts the process.
    spaces = (self._pool.observation_space, self._pool.action_space)
    leaves = [leaf for s in spaces for leaf in getattr(s, 'values', lambda s=s: [s])()]
    self._x64 = np.dtype(np.float64) in [leaf.dtype for leaf in leaves]
    with jax.enable_x64(self._x64):
      self._handle, self._recv, self._send, _ = self._pool.xla()
    # EnvPool's discrete actions are int32, whatever its spaces say.
    discrete = hasattr(self._pool.action_space, 'n')
    self._action_dtype = np.int32 if discrete else self._pool.action_space.dtype
    # A pool that was never reset would spend its first step on it.
    if batch_size:
      self._pool.async_reset()
    else:
      obs, _ = self._pool.reset()
      self.first_obs = _observe(obs)

  @property
  def handle(self) -> np.ndarray:
    """A token to thread through `send` and `recv`."""
    return np.array(self._handle)

  def send(self, handle: jax.Array, action: jax.Array, env_id: jax.Array | None = None
           ) -> jax.Array:
    """Hands B actions to EnvPool's threads and does not wait; traceable.

    env_id: [B] i32, whose actions these are, of an asynchronous shard.
    """
    with jax.enable_x64(self._x64):  # nothing but the call: x64 changes what other code means
      return _call(self._send, handle, action.astype(self._action_dtype), env_id)

  def recv(self, handle: jax.Array) -> tuple[jax.Array, TimeStep]:
    """Waits for B environments; traceable."""
    with jax.enable_x64(self._x64):
      handle, (obs, reward, terminated, truncated, info) = _call(self._recv, handle)
      obs, reward, raw = _narrow((obs, reward, info.get('reward', reward)))
    obs = _observe(obs)
    game_over = info['terminated'].astype(bool) if 'lives' in info else terminated
    return handle, TimeStep(obs, reward, terminated, truncated, raw, game_over, info['env_id'])

  @property
  def pool_config(self) -> dict[str, Any]:
    """All of EnvPool's options for this pool, as it understood them."""
    return self._pool.spec.config._asdict()

  def render(self) -> np.ndarray:
    """The first environment as EnvPool draws it, [H, W, 3] u8; wants render_mode='rgb_array'.

    Raises:
      RuntimeError: EnvPool cannot draw this task.
    """
    return self._pool.render()[0]

  def close(self) -> None:
    """Ends the pool's threads; nothing that contains it may run any more."""
    self._pool.close()
    self._pool = self._recv = self._send = None


def _made(*args: jax.Array, call: core.ClosedJaxpr) -> list[jax.Array]:
  return core.jaxpr_as_fun(call)(*args)


# A call of EnvPool's as JAX is to see it: without effects, since programs that have some are called
# by Python, not by C++, which takes 0.3 ms. That each call is made, once and in its turn, is what
# the handle does; and to XLA it is still one with side effects.
_call_p = core.Primitive('envpool')
_call_p.multiple_results = True
_call_p.def_impl(_made)
_call_p.def_abstract_eval(lambda *args, call: call.out_avals)
mlir.register_lowering(_call_p, mlir.lower_fun(_made))


def _call(function: Callable, *args: jax.Array | None) -> Any:
  """function(*args), which EnvPool made, in the program that is being traced."""
  call, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  made = _call_p.bind(*jax.tree.leaves(args), call=call)
  return jax.tree.unflatten(jax.tree.structure(shapes), made)


def _narrow(tree):
  """float64 -> float32, at once where it arises."""
  return jax.tree.map(lambda x: x.astype(_narrowed(x.dtype)), tree)


def _narrowed(dtype: Any) -> np.dtype:
  return np.dtype(np.float32) if dtype == np.float64 else np.dtype(dtype)

