"""Worker process that steps Gymnasium environments; it does not import JAX.

A worker steps some of the environments of a vector environment. Actions and results are in memory
that it shares with the parent. For each step, the socket between the two carries one byte in each
direction. The end of the socket tells each process that the other process has ended.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

from podracer_jit import parts
from podracer_jit.envs import gymnasium_contract as contract
from podracer_jit.envs import spaces
from podracer_jit.options import shorten, shown

KIND = 'gymnasium'
# Commands of the parent.
STEP = b's'
RENDER = b'r'
# Answers of the worker. All but DONE are followed by a length and as many bytes.
DONE = b'd'
FAILED = b'f'
PICTURE = b'p'
NO_PICTURE = b'n'
LENGTH = struct.Struct('<I')

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Seconds that environments have to close after the parent's end; then the worker ends.
GRACE_S = 3.0
# Modules that register environments, by namespace, where the two have different names.
_MODULES = {'ALE': 'ale_py'}
# Arguments of gymnasium.make that users cannot set.
_OURS = ('id', 'disable_env_checker')

# Folders of code that is not the user's, with a separator at the end.
_PACKAGE = os.path.join(Path(__file__).parents[1], '')
_GYMNASIUM = os.path.join(Path(gymnasium.__file__).parent, '')


class Layout(NamedTuple):
  """Shapes and dtypes of the memory that a vector environment shares with its workers."""

  num_envs: int
  obs_shape: tuple[int, ...]
  obs_dtype: str
  action_shape: tuple[int, ...]
  action_dtype: str


class Arrays(NamedTuple):
  """Views of the shared memory."""

  obs: np.ndarray  # [N, ...]
  action: np.ndarray  # [N, ...]
  reward: np.ndarray  # [N] f32
  terminated: np.ndarray  # [N] bool
  truncated: np.ndarray  # [N] bool


class Setup(NamedTuple):
  """Everything that a worker needs to begin."""

  task: str
  options: dict[str, Any]
  search: parts.Search  # where the parent finds a user's modules
  registered: bytes  # what the parent's registry has about the task, pickled; may be empty
  first_env: int  # index of the worker's first environment
  seeds: list[int]  # of the worker's environments
  layout: Layout
  memory: int  # descriptor of the shared memory


def num_bytes(layout: Layout) -> int:
  """Returns the bytes of the shared memory."""
  return sum(size for _, _, size in _places(layout))


def arrays(memory: mmap.mmap, layout: Layout) -> Arrays:
  """Returns the views of the shared memory."""
  views = []
  start = 0
  for shape, dtype, size in _places(layout):
    view = np.frombuffer(memory, dtype, math.prod(shape), start)
    views.append(view.reshape(shape))
    start += size
  return Arrays(*views)


def _places(layout: Layout) -> list[tuple[tuple[int, ...], np.dtype, int]]:
  """Returns shape, dtype and reserved bytes of each array, in the order of `Arrays`."""
  num_envs = layout.num_envs
  fields = [((num_envs, *layout.obs_shape), layout.obs_dtype),
            ((num_envs, *layout.action_shape), layout.action_dtype),
            ((num_envs,), 'float32'), ((num_envs,), 'bool'), ((num_envs,), 'bool')]
  places = []
  for shape, dtype in fields:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    # Each array begins at a multiple of 64 bytes, and none is empty.
    places.append((shape, np.dtype(dtype), -(-max(size, 1) // 64) * 64))
  return places


def make(task: str, options: Mapping[str, Any]) -> gymnasium.Env:
  """Makes an environment.

  Args:
    task: 'gymnasium:ID', 'gymnasium:module:ID' with the module that registers it, or
      'module:attribute' of a user's subclass of gymnasium.Env or function that returns one.
    options: arguments of `gymnasium.make`, of the class or of the function.

  Raises:
    ValueError: the task or an option is wrong, in one line that names the field.
    Exception: whatever the environment raises.
  """
  limit = options.get('max_episode_steps', 1)
  if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
    raise ValueError('env.max_episode_steps: must be a whole number, at least 1, got '
                     f'{shown(limit)}')
  try:
    env = _construct(task, options)
  except TypeError as error:
    # Videos set render_mode, which not every environment takes.
    if options.get('render_mode') == 'rgb_array':
      return make(task, {name: value for name, value in options.items() if name != 'render_mode'})
    if not _refuses_arguments(error, options):
      raise
    named = ', '.join(f'env.{name}' for name in options) or 'env.task'
    raise ValueError(f'{named}: {task} does not take these options: '
                     f'{shorten(str(error))}') from None
  if not isinstance(env, gymnasium.Env):
    several = ' with one agent' if hasattr(env, 'possible_agents') else ''
    raise ValueError(f'env.task: {task} must make a gymnasium.Env{several}, got '
                     f'{shown(type(env).__name__)}, which is not derived from it')
  for name in ('observation_space', 'action_space'):
    if getattr(env, name, None) is None:
      close(env)
      raise ValueError(f'env.task: {task} has no {name}; its class must have one, such as '
                       'gymnasium.spaces.Box(-1, 1, (3,))')
  return env


def close(env: gymnasium.Env) -> None:
  """Closes an environment; an error of its `close` changes no result."""
  with contextlib.suppress(Exception, SystemExit):
    env.close()


def _construct(task: str, options: Mapping[str, Any]) -> Any:
  """Returns the result of `gymnasium.make`, or of the user's class or function."""
  kind, _, name = task.partition(':')
  if kind == KIND:
    for option in _OURS:
      if option in options:
        raise ValueError(f'env.{option}: not an option of {task}')
    module, _, name = name.rpartition(':')
    if module:
      # The import registers the environment.
      parts.import_module('env.task', task, module)
    try:
      return gymnasium.make(name, disable_env_checker=True, **options)
    except gymnasium.error.UnregisteredEnv as error:
      if parts.run_files():  # a config file may register environments
        return _construct(task, options)
      raise ValueError(f'env.task: {task}: {shorten(str(error)).rstrip(".")}'
                       f'{"" if module else _where_to_find(name, error)}') from None
    except (gymnasium.error.DependencyNotInstalled, gymnasium.error.DeprecatedEnv) as error:
      raise ValueError(f'env.task: {task}: {shorten(str(error)).rstrip(".")}') from None

  constructor = parts.find('env.task', task, {})
  try:
    env = constructor(**options)
    limit = options.get('max_episode_steps')
    return env if limit is None or _has_limit(constructor, env) else TimeLimit(env, limit)
  except gymnasium.error.UnregisteredEnv:
    if not parts.run_files():
      raise
    return _construct(task, options)
  except TypeError as error:
    if not (_refuses_arguments(error, options) and "'max_episode_steps'" in str(error)):
      raise
  # Every environment has this option, even if its code has no time limit.
  options = dict(options)
  limit = options.pop('max_episode_steps')
  return TimeLimit(constructor(**options), limit)


def _has_limit(constructor: Any, env: Any) -> bool:
  """Returns whether `max_episode_steps` was heard, and not just swallowed by a `**kwargs`."""
  try:
    if 'max_episode_steps' in inspect.signature(constructor).parameters:
      return True
  except (TypeError, ValueError):
    pass  # it has no signature
  while isinstance(env, gymnasium.Wrapper):
    if isinstance(env, TimeLimit):
      return True
    env = env.env
  return False


def _where_to_find(name: str, error: Exception) -> str:
  """Returns the form of the task that imports the module of an unknown environment.

  Args:
    name: the id of the environment.
    error: of Gymnasium.
  """
  if isinstance(error, gymnasium.error.VersionNotFound):
    return ''
  module = _MODULES.get(name.rpartition('/')[0], 'MODULE')
  remedy = f'; if another package registers it, name its module: {KIND}:{module}:{name}'
  if module != 'MODULE':
    return f'{remedy} (with the package installed)'
  return f'{remedy}; if the config file of a workdir does: --allow_modules=CONFIG.py'


def _refuses_arguments(error: TypeError, options: Mapping[str, Any]) -> bool:
  """Returns whether a constructor does not take its arguments; else the code in it has failed.

  Args:
    error: of the constructor.
    options: the arguments.
  """
  text = str(error)
  caller = traceback.extract_tb(error.__traceback__)[-1].filename
  return ' argument' in text and (
      caller.startswith((_PACKAGE, _GYMNASIUM)) or any(f"'{name}'" in text for name in options))


class _Environments:
  """The environments of a worker."""

  def __init__(self, setup: Setup):
    self._setup = setup
    memory = mmap.mmap(setup.memory, num_bytes(setup.layout))
    rows = slice(setup.first_env, setup.first_env + len(setup.seeds))
    self._arrays = Arrays(*(view[rows] for view in arrays(memory, setup.layout)))
    self._envs: list[gymnasium.Env] = []
    self._ended = [False] * len(setup.seeds)
    # For error messages: the call in progress, the index of its environment, and the steps of each
    # environment's episode.
    self._doing = ('constructor', 0)
    self._lengths = [0] * len(setup.seeds)

  def begin(self) -> None:
    """Makes and resets all environments."""
    for i in range(len(self._setup.seeds)):
      self._doing = ('constructor', i)
      self._envs.append(make(self._setup.task, self._setup.options))
      self._check_space(self._envs[i].observation_space)
    self._action_space = self._envs[0].action_space
    self._contract = contract.Contract(self._setup.task, self._envs[0].observation_space)
    for i, (env, seed) in enumerate(zip(self._envs, self._setup.seeds, strict=True)):
      self._doing = ('reset', i)
      self._arrays.obs[i] = self._contract.after_reset(env.reset(seed=seed))

  def step(self) -> None:
    """Takes the actions in the shared memory; resets environments whose episode has ended."""
    all_obs = self._arrays.obs
    actions = spaces.task_actions(self._arrays.action, self._action_space)
    # Arrays are written as a whole, since NumPy takes longer for single numbers.
    rewards = []
    ends = []
    cuts = []
    for i, env in enumerate(self._envs):
      if self._ended[i]:
        self._doing = ('reset', i)
        self._lengths[i] = 0
        obs = self._contract.after_reset(env.reset())
        reward = 0.0
        terminated = truncated = False
      else:
        self._doing = ('step', i)
        self._lengths[i] += 1
        obs, reward, terminated, truncated = self._contract.after_step(env.step(actions[i]))
      all_obs[i] = obs
      rewards.append(reward)
      ends.append(terminated)
      # An episode ends in one way: a terminated one has no value to bootstrap from.
      cuts.append(truncated and not terminated)
    self._arrays.reward[:] = rewards
    self._arrays.terminated[:] = ends
    self._arrays.truncated[:] = cuts
    self._ended = [end or cut for end, cut in zip(ends, cuts, strict=True)]

  def render(self) -> np.ndarray:
    """Returns what `render` of the first environment returns, if it is an array of numbers.

    Raises:
      RuntimeError: the environment draws no picture.
    """
    try:
      returned = self._envs[0].render()
      picture = np.asarray(returned)
    except Exception as error:  # noqa: BLE001 - an environment may raise anything
      raise RuntimeError(shorten(f'{type(error).__name__}: {error}')) from None
    if picture.dtype.kind not in 'biuf':
      raise RuntimeError(f'its render() returned {shown(returned)}')
    return picture

  def close(self) -> None:
    """Closes all environments."""
    for env in self._envs:
      close(env)

  def _rules(self) -> list[tuple[str, str]]:
    """Returns texts of errors that a wrong `reset` or `step` causes, with what would be right."""
    if self._doing[0] == 'reset':
      return [("unexpected keyword argument 'seed'",
               'reset must take a seed, as reset(self, *, seed=None, options=None) does'),
              ("unexpected keyword argument 'options'",
               'reset must take options, as reset(self, *, seed=None, options=None) does'),
              ('values to unpack', contract.RESET)]
    return [('values to unpack', contract.STEP)]

  def _check_space(self, space: Any) -> None:
    """Raises WrongValue unless a space's observations have the shape of the shared memory."""
    shape, *_ = spaces.layout(self._setup.task, space)
    if shape != self._setup.layout.obs_shape:
      raise contract.WrongValue(
          f'made the observation_space {shown(space)}, observed as {shape}; all environments of a '
          f'task must be alike, and others are observed as {self._setup.layout.obs_shape}')

  def describe(self, error: BaseException) -> str:
    """Returns the message about an exception of an environment, in one line."""
    doing, i = self._doing
    if doing == 'step':
      doing = f'step {self._lengths[i]} of an episode'
    where = (f'{self._setup.task}: {doing} of environment {self._setup.first_env + i} '
             f'(seed {self._setup.seeds[i]})')
    if isinstance(error, contract.WrongValue):
      return f'{where} {error}'
    text = f'{type(error).__name__}: {shorten(str(error), 400)}'
    # Frames of this package do not help; nor do those of Gymnasium's wrappers in these two cases.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith(_PACKAGE)]
    users = [frame for frame in frames if not frame.filename.startswith(_GYMNASIUM)]
    for cause, rule in self._rules():
      if cause in text and not users:
        return f'{where}: {rule}: {text}'
    if not frames:
      return f'{where} raised {text}'
    frame = frames[-1]
    return f'{where} raised {text} ({frame.filename}, line {frame.lineno}, in {frame.name})'


def main(parent: socket.socket, setup: Setup) -> None:
  """Serves the parent until it closes its end of the socket."""
  # The parent decides when its environments end. Programs that an environment starts inherit
  # ignored signals, but not handlers, so the signals are handled and not ignored.
  for number in _SIGNALS:
    signal.signal(number, lambda *_: None)

  def in_fork() -> None:
    # Else the parent would not see the end of this process as long as a helper of an environment
    # lives, and the helper could not be ended.
    if parent.fileno() >= 0:  # in a fork of a fork it is closed
      os.close(parent.detach())
    for number in _SIGNALS:
      signal.signal(number, signal.SIG_DFL)

  os.register_at_fork(after_in_child=in_fork)
  os.set_inheritable(parent.fileno(), False)
  threading.Thread(target=_end_after_parent, args=(parent,), daemon=True).start()
  warnings.filterwarnings('ignore', module='gymnasium')
  parts.set_search(setup.search)
  _register(setup.registered)

  environments = _Environments(setup)
  try:
    environments.begin()
    parent.sendall(DONE)
    while True:
      command = parent.recv(1)
      if command == STEP:
        environments.step()
        parent.sendall(DONE)
      elif command == RENDER:
        _answer_render(parent, environments)
      else:
        break
  except OSError as error:
    # The parent may have ended meanwhile; then no process reads the message.
    _tell(parent, FAILED, environments.describe(error).encode())
  except BaseException as error:  # noqa: BLE001 - an environment may raise anything
    _tell(parent, FAILED, environments.describe(error).encode())
  environments.close()


def registered(task: str) -> bytes:
  """Returns the entry of this process's registry for a task 'gymnasium:ID', pickled.

  A program or a config file may have made it, which a worker does not run. Returns nothing for
  other tasks, and if the entry cannot be pickled.
  """
  kind, _, name = task.partition(':')
  with contextlib.suppress(Exception):  # it may have any objects as its arguments
    if kind == KIND and name in gymnasium.registry:
      return pickle.dumps(gymnasium.registry[name])
  return b''


def _register(entry: bytes) -> None:
  """Adds the entry of the parent's registry to that of this process, if it lacks it."""
  with contextlib.suppress(Exception):  # its module may be one that only the parent can import
    if entry:
      spec = pickle.loads(entry)
      gymnasium.registry.setdefault(spec.id, spec)


def _answer_render(parent: socket.socket, environments: _Environments) -> None:
  try:
    picture = environments.render()
  except RuntimeError as error:
    _tell(parent, NO_PICTURE, str(error).encode())
  else:
    _tell(parent, PICTURE, pickle.dumps(picture))


def _tell(parent: socket.socket, kind: bytes, content: bytes) -> None:
  with contextlib.suppress(OSError):
    parent.sendall(kind + LENGTH.pack(len(content)) + content)


def _end_after_parent(parent: socket.socket) -> None:
  """Ends this process some seconds after the parent has closed its end of the socket."""
  ended = select.poll()
  # Without an event to wait for, poll still reports that the other end is closed.
  ended.register(parent.fileno(), 0)
  ended.poll()
  threading.Event().wait(GRACE_S)
  os._exit(1)


def seeds_of(seeds: Sequence[int]) -> list[int]:
  """Returns seeds in [0, 2^31), since simulators often take signed integers of 32 bits.

  The negative seeds of evaluations are mixed one to one. A number may also be a seed of training,
  but only by chance: neighbours of it are not.
  """
  return [int(seed) if seed >= 0 else _mixed(int(seed) + 2**31) for seed in seeds]


def _mixed(number: int) -> int:
  """Returns another number of 31 bits for each number of 31 bits."""
  # Each step can be undone: shifts keep the upper bits, and odd factors are coprime to 2^31.
  for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
    number ^= number >> shift
    number = number * factor % 2**31
  return number
