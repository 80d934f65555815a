"""EnvPool's environment family: specs of tasks, and vector environments.

Only this module imports envpool. It converts all float64 arrays to float32, and refuses options
with which EnvPool would kill the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import functools
import importlib.metadata
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import chex
import jax
import numpy as np
from jax.extend import core
from jax.interpreters import mlir

from podracer_jit.late import loaded_late

# EnvPool would load the simulators of all families, and matplotlib, which takes half a second.
with warnings.catch_warnings(), loaded_late(
    lambda spec: spec.name.startswith('envpool.') and spec.submodule_search_locations is not None):
  # EnvPool's imports warn about spaces that are not used here.
  warnings.simplefilter('ignore')
  import envpool

from podracer_jit.envs import spaces
from podracer_jit.envs.protocol import EnvSpec, TimeStep
from podracer_jit.options import LARGEST_FLOAT, hint, shown
from podracer_jit.runtime import tried

# Options that users cannot set: other fields of the config, or this package, set them.
_OURS = ('num_envs', 'batch_size', 'num_threads', 'seed', 'env_seed', 'base_path', 'task',
         'gym_reset_return_info', 'max_num_players', 'thread_affinity_offset')

# A reset takes up to noop_max steps, and a step takes frame_skip frames, so large values take for
# ever. A program has operations for each frame of a stack.
_AT_MOST = {'noop_max': 100_000, 'frame_skip': 1000, 'stack_num': 128, 'frame_stack': 128}
# Words in the names of options that are times; these change no size.
_TIMES = ('step', 'time', 'duration', 'frequency')
# Bound of an option that may be a size; the bound is 100 times the default if that is larger.
_LARGEST_SIZE = 10_000
_LARGEST_OBS = 2**26  # bytes of one observation

# Families and tasks whose episodes end by their own rules alone, whatever `max_episode_steps` is;
# EnvPool would call those that end after so many steps truncated.
_OWN_ENDS = ('highway', 'jumanji', 'pgx', 'toy_text')
_WITH_A_LIMIT = ('Sokoban', 'FrozenLake', 'NChain', 'Taxi')  # other tasks of these families

# Microseconds of a step of a family, on a core of an EPYC (Zen 5), and of all other families.
_STEP_US = {'atari': 130.0, 'mujoco.gym': 25.0, 'mujoco.dmc': 45.0, 'mujoco.metaworld': 100.0,
            'vizdoom': 300.0, 'procgen': 30.0, 'box2d': 10.0, 'classic_control': 0.3,
            'toy_text': 0.3, 'minigrid': 2.0}
_OTHER_STEP_US = 20.0

render_options = {'render_mode': 'rgb_array'}


# EnvPool's specs by task and options. It takes 0.1 s to make one of an Atari task, as it makes a
# game.
_specs: dict[str, Any] = {}


def _quiet_spec(task: str, options: Mapping[str, Any]) -> Any:
  """Returns EnvPool's spec of a task without its warnings."""
  key = f'{task} {sorted(options.items())!r}'
  if key not in _specs:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      _specs[key] = envpool.make_spec(task, **options)
  return _specs[key]


def _spaces_in(source: Any) -> spaces.Spaces:
  """Returns the spaces of EnvPool's spec or pool.

  EnvPool makes them anew each time, and Gymnasium warns that their bounds have more precision.
  """
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return spaces.Spaces(source.observation_space, source.action_space)


def make_spec(task: str, options: Mapping[str, Any]) -> EnvSpec:
  """Returns the spec of `task` with EnvPool's `options`, which are checked first.

  Raises:
    ValueError: the task, an option or a value is unknown, the task's kind is not supported, or this
      EnvPool cannot be called from this jax.
  """
  problem = tried.misfit(importlib.metadata.version('envpool'), jax.__version__)
  if problem:
    raise ValueError(f'env.task: {problem}')
  if task not in envpool.list_all_envs():
    near = difflib.get_close_matches(task, envpool.list_all_envs(), n=3, cutoff=0.4)
    raise ValueError(f'env.task: EnvPool has no task {shown(task)}'
                     + (f'; did you mean {" or ".join(near)}?' if near else ''))

  default = _default_options(task)
  for name, value in options.items():
    if name in _OURS or name not in default:
      names = sorted(set(default) - set(_OURS))
      near = hint(name, names, 'env.') or f'; its options are {", ".join(names)}'
      raise ValueError(f'env.{name}: not an option of {task}{near}')
    kind = type(default[name])
    if type(value) is not kind and not (kind is float and type(value) is int):
      raise ValueError(f'env.{name}: must be of type {kind.__name__}, got {shown(value)}')
    for problem in _problems_of_number(name, value, default[name]):
      raise ValueError(f'env.{name}: {problem}, got {shown(value)}')
    if name == 'max_episode_steps' and _has_own_ends(task):
      raise ValueError(f'env.max_episode_steps: EnvPool ignores it for {task}, whose episodes end '
                       'by its own rules')
    if name == 'noop_max' and value < 1:
      raise ValueError(f'env.noop_max: must be at least 1 (1 is no no-ops), got {value}')
    smallest = 1 if name in ('frame_skip', 'stack_num', 'max_episode_steps', 'img_height',
                             'img_width') else None
    if smallest is not None and value < smallest:
      raise ValueError(f'env.{name}: must be at least {smallest}, got {value}')

  spec = _spec_of_options(task, options)
  if spec.config._asdict().get('max_num_players', 1) != 1:
    raise ValueError(f'env.task: {task} has several players; single-player tasks only for now')
  observation, action = _spaces_in(spec)
  discrete = type(action).__name__ == 'Discrete'
  choices = () if discrete else spaces.choices(action)
  if not (discrete or choices):
    _check_continuous(task, action, default)
  continuous = not (discrete or choices)

  shape, dtype, parts = spaces.layout(task, observation)
  return EnvSpec(
      task=task,
      obs_shape=shape,
      obs_dtype=dtype,
      num_actions=int(action.n) if discrete else 0,
      action_low=tuple(map(float, np.ravel(action.low))) if continuous else (),
      action_high=tuple(map(float, np.ravel(action.high))) if continuous else (),
      frame_skip=int(spec.config._asdict().get('frame_skip', 1)),
      max_episode_steps=int(spec.config.max_episode_steps),
      stack=_stack(spec),
      channels_last='stack_num' not in default and spaces.is_channels_last(shape),
      parts=parts,
      action_choices=choices,
      step_us=_STEP_US.get(_family_of(task), _OTHER_STEP_US))


def spaces_of(task: str, options: Mapping[str, Any]) -> spaces.Spaces:
  """Returns the spaces of a task; see `protocol.EnvFamily`. `make_spec` has checked the options."""
  return _spaces_in(_quiet_spec(task, options))


def _default_options(task: str) -> dict[str, Any]:
  """Returns the default values of a task's options; makes no game, which a spec would.

  Raises:
    ValueError: as `_usual_spec`.
  """
  with _making(task):
    module, spec_class, options = envpool.registration.registry.specs[task]
    # The config of a spec is a tuple with names.
    return getattr(importlib.import_module(module), spec_class).gen_config(**options)._asdict()


def _spec_of_options(task: str, options: Mapping[str, Any]) -> Any:
  """Returns EnvPool's spec of a task with options whose names and types were checked.

  Raises:
    ValueError: as `_usual_spec`; or EnvPool refuses an option, which the message names; or
      observations are too large.
  """
  try:
    spec = _quiet_spec(task, options)
  except Exception:  # noqa: BLE001 - the specs below tell why
    spec = None
  if spec is not None and not _not_positive(spec) and _obs_bytes(spec) <= _LARGEST_OBS:
    return spec

  # Each option alone, so that the error can name the option that EnvPool refuses.
  usual = _usual_spec(task)
  for name, value in options.items():
    try:
      alone = _quiet_spec(task, {name: value})
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
      why = ''.join(str(error).strip().splitlines()[:1])[:80]
      raise ValueError(f'env.{name}: EnvPool refuses {shown(value)} for {task} ({why})') from None
    for problem in _problems_of_obs(alone, usual):
      raise ValueError(f'env.{name}: with {shown(value)} {problem}')

  # The options together; the error names the option with the largest observation.
  spec = _quiet_spec(task, options)
  for problem in _problems_of_obs(spec, usual):
    raise ValueError(f'env.{max(options, key=lambda name: _obs_bytes(_alone(task, name, options)))}'
                     f': with the other options of {task} {problem}')
  return spec


def _usual_spec(task: str) -> Any:
  """Returns EnvPool's spec of a task with default options.

  Raises:
    ValueError: the task's library or one of its files is missing; the message says what to do.
  """
  with _making(task):
    return _quiet_spec(task, {})


@contextlib.contextmanager
def _making(task: str) -> Iterator[None]:
  """Turns what EnvPool raises in the block into ValueErrors, which say what to do."""
  try:
    yield
  except ImportError as error:
    # EnvPool's message names the packages to install.
    raise ValueError(f'env.task: {task} cannot be made here: {" ".join(str(error).split())}'
                     ) from None
  except Exception as error:  # noqa: BLE001 - EnvPool raises whatever a family's library does
    why = ' '.join(str(error).split())[:150]
    hint = ('it needs a game of your own (cfg_path, wad_path), which is not supported'
            if task.startswith('VizdoomCustom') else 'EnvPool fails')
    raise ValueError(f'env.task: {task} cannot be made here: {hint} ({why})') from None


def _check_continuous(task: str, action: Any, default: Mapping[str, Any]) -> None:
  """Raises ValueError unless `action` is the space of bounded arrays of floats."""
  if type(action).__name__ != 'Box' or not np.issubdtype(action.dtype, np.floating) \
      or not action.shape:
    raise ValueError(f'env.task: the actions of {task} are {action}; only one choice (Discrete), '
                     'choices from 0 on (MultiDiscrete, integers) and floats (Box) can be learned')
  # ViZDoom's bounds are the smallest and the largest float64.
  if 'use_combined_action' in default and np.max(np.abs(action.high)) > LARGEST_FLOAT:
    raise ValueError(f'env.task: the actions of {task} have no bounds; set '
                     'env.use_combined_action = True for one choice among its buttons')


def _problems_of_number(name: str, value: Any, default: Any) -> Iterator[str]:
  """Yields problems of a numeric option, by bounds that hold for any task."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return
  if isinstance(default, float):
    # The comparison is false for nan, too.
    if not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:
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
  """Yields problems of a spec's observations; `usual` is the spec with default options.

  Only array specs are read, since a space would allocate two arrays of an observation's size.
  """
  # Default shapes may have -1 for the number of players, so only additional sizes below 1 count.
  if _not_positive(spec) > _not_positive(usual):
    shapes = [tuple(part.shape) for part in _obs_parts(spec)]
    yield f'observations have the shape {shown(shapes[0] if len(shapes) == 1 else shapes)}'
  elif _obs_bytes(spec) > _LARGEST_OBS:
    yield (f'an observation has {_obs_bytes(spec):,} bytes; it must have at most '
           f'{_LARGEST_OBS:,}')


def _obs_parts(spec: Any) -> list[Any]:
  """Returns the array specs of an observation's parts."""
  return [part for name, part in spec.state_array_spec.items() if name.startswith('obs')]


def _not_positive(spec: Any) -> int:
  """Returns the number of axes with a size below 1."""
  return sum(size < 1 for part in _obs_parts(spec) for size in part.shape)


def _obs_bytes(spec: Any) -> int:
  """Returns the bytes of one observation."""
  return sum(abs(math.prod(part.shape)) * np.dtype(part.dtype).itemsize
             for part in _obs_parts(spec))


def _alone(task: str, name: str, options: Mapping[str, Any]) -> Any:
  """Returns the spec of a task with one of the options."""
  return _quiet_spec(task, {name: options[name]})


def families() -> dict[str, list[str]]:
  """Returns the sorted names of all tasks by family, for example `atari` or `mujoco.dmc`."""
  tasks: dict[str, list[str]] = {}
  for task in sorted(envpool.list_all_envs()):
    tasks.setdefault(_family_of(task), []).append(task)
  return dict(sorted(tasks.items()))


def _family_of(task: str) -> str:
  """Returns the name of the family of a task."""
  return envpool.registration.registry.specs[task][0].removeprefix('envpool.')


def _has_own_ends(task: str) -> bool:
  """Returns whether `max_episode_steps` has no effect on the ends of a task's episodes."""
  return _family_of(task) in _OWN_ENDS and not task.rpartition('/')[2].startswith(_WITH_A_LIMIT)


def _stack(spec: Any) -> int:
  """Returns the frames in an observation if `frames.Frames` can hold its stacks, else 1.

  Atari's stacks continue the previous stack or repeat one frame. ViZDoom's last stack of an episode
  does neither.
  """
  return int(spec.config.stack_num) if type(spec).__name__ == 'AtariEnvSpec' else 1


def make_vector_env(task: str, options: Mapping[str, Any], seeds: Sequence[int],
                    num_threads: int = 0, batch_size: int = 0) -> EnvPoolVectorEnv:
  """Starts the environments of one EnvPool; see `protocol.EnvFamily`.

  Args:
    task: name of the task.
    options: EnvPool's options.
    seeds: one for each environment, all different.
    num_threads: threads of the pool; 0 lets EnvPool choose.
    batch_size: environments that a step waits for; 0 for all of them, in lockstep.

  Returns:
    The vector environment, already reset.
  """
  return EnvPoolVectorEnv(task, options, seeds, num_threads, batch_size)


def on_cores(first_core: int) -> dict[str, Any]:
  """Returns the option of pools that keeps each thread on a core; see `protocol.EnvFamily`."""
  return {'thread_affinity_offset': first_core}


def make_pool(task: str, options: Mapping[str, Any], seeds: Sequence[int], num_threads: int = 0,
              batch_size: int = 0) -> Any:
  """Starts an EnvPool with the gymnasium API, which Python steps.

  Args:
    task: name of the task.
    options: EnvPool's options.
    seeds: one for each environment.
    num_threads: threads of the pool; 0 lets EnvPool choose.
    batch_size: environments that a step waits for; 0 for all.

  Returns:
    EnvPool's object.

  Raises:
    ValueError: if the task is a game of ViZDoom, which cannot write into the working directory.
  """
  if envpool.registration.registry.specs[task][0] == 'envpool.vizdoom':
    _make_folder_of_games(task)
    _end_blas_threads()
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return envpool.make(
        task, env_type='gymnasium', num_envs=len(seeds), batch_size=batch_size or len(seeds),
        seed=list(seeds), num_threads=num_threads, **options)


# A process of its own, with this program and a task's name, draws the task.
_DRAWS = """
import sys, warnings
warnings.simplefilter('ignore')
import envpool
pool = envpool.make(sys.argv[1], env_type='gymnasium', num_envs=1, num_threads=1,
                    render_mode='rgb_array')
pool.reset()
pool.render()
"""


@functools.cache
def _problem_of_rendering(task: str) -> str:
  """Returns why drawing a task would end this process, as MuJoCo does without OpenGL; else ''.

  Errors that are raised are none of these.
  """
  with tempfile.TemporaryDirectory() as folder:  # MuJoCo writes a log to the current one
    done = subprocess.run([sys.executable, '-c', _DRAWS, task], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, check=False, cwd=folder)
  if not done.returncode or 'Traceback' in done.stderr:
    return ''
  lines = [*filter(None, map(str.strip, f'{done.stdout}\n{done.stderr}'.splitlines()))]
  return ': '.join(['the simulator ends the process that draws', *lines[-1:]])


def _make_folder_of_games(task: str) -> None:
  """Makes the folder that each ViZDoom game looks for in the working directory.

  A game makes the folder if it is missing. If two games try at once, one of them fails and exits,
  and EnvPool then ends this process with a segmentation fault.

  Raises:
    ValueError: if the folder cannot be made.
  """
  try:
    os.makedirs('_vizdoom', exist_ok=True)
  except OSError as error:
    raise ValueError(
        f'env.task: {task} keeps a folder _vizdoom in the directory in which it is started, and '
        f'that cannot be made: {error}. Start in another directory.') from error


def _end_blas_threads() -> None:
  """Ends the threads of OpenBLAS, which NumPy and SciPy use; OpenBLAS restarts them on demand.

  Each ViZDoom game is a process, and EnvPool forks several at a time. Before a fork OpenBLAS joins
  its threads. Two forks at once may join a thread twice, and then the pool's start hangs for ever.
  """
  with open('/proc/self/maps') as maps:
    libraries = {line.split()[-1] for line in maps if 'openblas' in line}
  for library in libraries:
    shutdown = getattr(ctypes.CDLL(library), 'blas_thread_shutdown_', None)
    if shutdown is not None:
      shutdown()


class EnvPoolVectorEnv:
  """EnvPool with traceable `send` and `recv`.

  If it is synchronous, each call is for all environments, in their order. If it is asynchronous,
  `recv` returns the first B environments that are ready, and `send` takes actions for these; there
  is no `first_obs`, and the first `recv` of an environment returns its first observation.

  The handle that `send` and `recv` take and return is only a token. Each call finds its pool by
  `address`, a number in the program, so several vector environments in a program may share one
  token, which orders all their calls. The token also keeps the calls: XLA may drop a call whose
  handle is unused. EnvPool keeps the environments' state itself, so the state of `VectorEnv` is
  None.

  The pool must outlive every program that contains it: close it after the last output is ready.
  """

  first_state = None

  def __init__(self, task: str, options: Mapping[str, Any], seeds: Sequence[int],
               num_threads: int = 0, batch_size: int = 0):
    """Starts the environments and resets them.

    Args:
      task: name of the task.
      options: EnvPool's options.
      seeds: one for each environment, all different.
      num_threads: threads of the pool; 0 lets EnvPool choose.
      batch_size: 0 for synchronous steps of all environments; otherwise the number of environments
        in an asynchronous step, less than all.
    """
    self.task = task
    self.num_envs = len(seeds)
    self.batch_size = batch_size or self.num_envs
    self._pool = make_pool(task, options, seeds, num_threads, self.batch_size)

    # MuJoCo and DM Control use float64; with x64 off their recv aborts the process.
    self._obs_space, self._action_space = _spaces_in(self._pool)
    self._leaves = spaces.leaves_of(task, self._obs_space)
    self.one_hots = spaces.one_hots(self._obs_space)
    arrays = [*self._pool.spec.state_array_spec.values(),
              *self._pool.spec.action_array_spec.values()]
    self._x64 = np.dtype(np.float64) in [np.dtype(array.dtype) for array in arrays]
    with jax.enable_x64(self._x64):
      self._handle, self._recv, self._send, _ = self._pool.xla()
    self.address = int(self._handle.view(np.uint64)[0])
    self._names = _register_calls(self._pool, task)

    discrete = type(self._action_space).__name__ == 'Discrete'
    # The space has another dtype: discrete actions are int32 for most tasks, float64 for ViZDoom.
    self._action_dtype = np.dtype(self._pool.spec.action_array_spec['action'].dtype)
    # Actions of policies are vectors; actions of the task may have more axes.
    self._action_shape = () if discrete else self._action_space.shape

    # Without this reset, the first step would be one.
    if batch_size:
      self._pool.async_reset()
    else:
      obs, _ = self._pool.reset()
      self.first_obs = spaces.observe(obs, self._obs_space, self._leaves)

  @property
  def handle(self) -> np.ndarray:
    """Token for the first call of `send` or `recv`."""
    return np.array(self._handle)

  def send(self, token: jax.Array, state: None, action: jax.Array,
           env_id: jax.Array | None = None) -> tuple[jax.Array, None]:
    """Hands actions [B, ...] to EnvPool's threads and does not wait.

    Args:
      token: the token of the last call.
      state: None, as EnvPool keeps the state.
      action: [B, ...].
      env_id: [B] i32, the environments that take the actions; None if all do.

    Returns:
      The next token, and the next state.
    """
    chex.assert_axis_dimension(action, 0, self.batch_size)
    if len(self._action_shape) > 1:
      action = action.reshape(-1, *self._action_shape)
    # Little is inside of the block, since x64 changes the dtypes of other code.
    with jax.enable_x64(self._x64):
      action = spaces.within(action.astype(self._action_dtype), self._action_space)
      return _call(self._send, self._names['send'], self.address, token, action, env_id), state

  def recv(self, token: jax.Array, state: None
           ) -> tuple[jax.Array, None, TimeStep]:
    """Waits for B environments and returns their results; see `VectorEnv`."""
    with jax.enable_x64(self._x64):
      token, (obs, reward, terminated, truncated, info) = _call(
          self._recv, self._names['recv'], self.address, token)
      obs, reward, raw = _narrow((obs, reward, info.get('reward', reward)))
    obs = spaces.observe(obs, self._obs_space, self._leaves)
    game_over = info['terminated'].astype(bool) if 'lives' in info else terminated
    step = TimeStep(obs, reward, terminated, truncated, raw, game_over, info['env_id'])
    return token, state, step

  def render(self, state: None) -> np.ndarray:
    """Returns EnvPool's image of the first environment, [H, W, 3] u8.

    The pool needs `render_options`.

    Raises:
      RuntimeError: EnvPool cannot draw this task.
    """
    del state
    problem = _problem_of_rendering(self.task)
    if problem:
      raise RuntimeError(problem)
    return self._pool.render()[0]

  @property
  def frame_rate(self) -> float:
    """Steps a second at the task's own speed; 10 if it has no clock."""
    options = self._pool.spec.config
    if hasattr(options, 'full_action_space'):  # Atari, at the console's 60 Hz
      return 60 / options.frame_skip
    return 50 if self.task.startswith('CartPole') else 10

  def close(self) -> None:
    """Ends the pool's threads. No program that contains the pool may run afterwards."""
    self._pool.close()
    self._pool = None
    self.address = None  # a program with the address would end the process
    self._recv = None
    self._send = None


def _evaluate(*args: jax.Array, call: core.ClosedJaxpr) -> list[jax.Array]:
  """Returns the results of EnvPool's call."""
  return core.jaxpr_as_fun(call)(*args)


# This primitive hides the effects of EnvPool's calls from JAX. JAX calls programs with effects from
# Python instead of C++, which takes 0.3 ms more. The handle ensures that each call is made once and
# in order, and XLA still sees a custom call with side effects.
_call_p = core.Primitive('envpool')
_call_p.multiple_results = True
_call_p.def_impl(_evaluate)
_call_p.def_abstract_eval(lambda *args, call: call.out_avals)
mlir.register_lowering(_call_p, mlir.lower_fun(_evaluate))


def _call(function: Callable, name: str, address: int, *args: jax.Array | None) -> Any:
  """Binds function(*args), a function of EnvPool, into the program that is being traced.

  Args:
    function: `send` or `recv` of a pool.
    name: that XLA knows the function by.
    address: of the pool.
    *args: of the function.
  """
  # EnvPool's function becomes a static parameter of the primitive, which is bound in its place.
  call, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  equations = [
      equation.replace(params=equation.params | dict(
          target_name=name, attributes=(('handle', address),)))
      if equation.primitive.name == 'ffi_call' else equation for equation in call.jaxpr.eqns]
  call = call.replace(jaxpr=call.jaxpr.replace(eqns=equations))
  results = _call_p.bind(*jax.tree.leaves(args), call=call)
  return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _register_calls(pool: Any, task: str) -> dict[str, str]:
  """Registers `send` and `recv` of a pool's class with XLA, under names that stay the same.

  EnvPool registers them under a new name for each pool, which would be part of the program.

  Args:
    pool: EnvPool's object.
    task: of the pool.

  Returns:
    The names of `send` and `recv`.
  """
  family = envpool.registration.registry.specs[task][0]
  names = {}
  for call, (_, _, capsules) in pool._xla():  # noqa: SLF001 - for the functions without a pool
    name = f'{family}_{type(pool).__name__}_{envpool.__version__}_{call}'.replace('.', '_')
    if name not in _registered:
      for platform, capsule in zip(('cpu', 'gpu'), capsules, strict=True):
        if capsule is not None:
          jax.ffi.register_ffi_target(name, capsule, platform=platform, api_version=1)
      _registered.add(name)
    names[call] = name
  return names


_registered: set[str] = set()  # names of calls that XLA knows


def _narrow(tree):
  """Converts float64 arrays of a tree to float32."""
  return jax.tree.map(lambda x: x.astype(spaces.narrowed(x.dtype)), tree)
