"""Gymnasium's environments, and a user's own subclasses of gymnasium.Env.

`env.task = 'gymnasium:CartPole-v1'` names a registered environment, and 'module:attribute' a class
or a function that returns an environment. Options are their arguments.

Python steps these environments, in worker processes. The compiled rollout calls back to Python to
hand actions to the workers and to wait for their results, so it is slower than EnvPool.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import numbers
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import mlir

from podracer_jit import parts
from podracer_jit.envs import gymnasium_worker as worker
from podracer_jit.envs import spaces
from podracer_jit.envs.protocol import (
    EnvSpec,
    TimeStep,
)
from podracer_jit.errors import EnvironmentFailed
from podracer_jit.options import shorten

render_options = {'render_mode': 'rgb_array'}

# The program of a worker. It gets the parent's sys.path before it imports anything of the package.
# Microseconds that a step takes, roughly.
_STEP_US = 50.0
_PROGRAM = """
import pickle, socket, sys
parent = socket.socket(fileno=int(sys.argv[1]))
setup = parent.makefile('rb')
sys.path[:] = pickle.load(setup)
from podracer_jit.envs import gymnasium_worker
gymnasium_worker.main(parent, pickle.load(setup))
"""


def tasks() -> list[str]:
  """Returns the ids of Gymnasium's registry; omits ids that only wrap other libraries."""
  return sorted(name for name, spec in gymnasium.registry.items()
                if spec.namespace is None and not name.startswith('GymV'))


def make_spec(task: str, options: Mapping[str, Any]) -> EnvSpec:
  """Returns the spec of a task; makes one environment and closes it.

  Raises:
    ValueError: the task or an option is wrong, or spaces of this kind cannot be learned from.
  """
  _check_is_elsewhere(task)
  try:
    env = worker.make(task, options)
  except ValueError as error:
    # Messages of this package name a field; messages of an environment do not.
    if str(error).startswith('env.'):
      raise
    raise ValueError(_fails(task, error)) from error
  except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment may raise anything
    raise ValueError(_fails(task, error)) from error
  try:
    facts = _Facts(_spec(task, env), spaces.Spaces(env.observation_space, env.action_space),
                   _frame_rate(env))
  finally:
    worker.close(env)
  _facts[_key(task, options)] = facts
  return facts.spec


def _check_is_elsewhere(task: str) -> None:
  """Checks that workers can import an environment, before anything starts.

  Raises:
    ValueError: it is a part of the main program, or was registered by a module that workers do not
      know; the message says how to name it.
  """
  module, _, name = task.partition(':')
  new_task = f'mine:{name}'
  if module == worker.KIND:
    entry = name in gymnasium.registry and gymnasium.registry[name].entry_point
    module = entry.partition(':')[0] if isinstance(entry, str) else getattr(entry, '__module__', '')
    new_task = f'{worker.KIND}:mine:{name}'
  if module == parts.MAIN:
    raise ValueError(f'env.task: {task} is in the main program ({parts.MAIN}), which the worker '
                     'processes that step it cannot import; move it into a file of its own, '
                     f'mine.py, and name it {new_task}')
  is_registered = task.startswith(f'{worker.KIND}:') and name in gymnasium.registry
  if is_registered and not (worker.registered(task) or parts.search().files):
    raise ValueError(f'env.task: {task} was registered with a function that worker processes '
                     'cannot import; name the module that registers it, too: '
                     f'{worker.KIND}:{module}:{name}')


def spaces_of(task: str, options: Mapping[str, Any]) -> spaces.Spaces:
  """Returns the spaces of a task; see `protocol.EnvFamily`."""
  key = _key(task, options)
  if key not in _facts:
    make_spec(task, options)
  return _facts[key].spaces


class _Facts(NamedTuple):
  """Facts about a task with its options, from an environment that was closed again."""

  spec: EnvSpec
  spaces: spaces.Spaces
  frame_rate: float


# By task and options, so that a segment makes no environments in this process.
_facts: dict[tuple[str, str], _Facts] = {}


def _key(task: str, options: Mapping[str, Any]) -> tuple[str, str]:
  # Pictures do not change the spec.
  options = {name: value for name, value in options.items() if name != 'render_mode'}
  return task, repr(sorted(options.items()))


def _fails(task: str, error: Exception) -> str:
  return f'env.task: {task} fails: {type(error).__name__}: {shorten(str(error))}'


def _spec(task: str, env: gymnasium.Env) -> EnvSpec:
  obs = env.observation_space
  action = env.action_space
  discrete = isinstance(action, gymnasium.spaces.Discrete)
  choices = () if discrete else spaces.choices(action)
  floats = (isinstance(action, gymnasium.spaces.Box) and len(action.shape) == 1
            and np.issubdtype(action.dtype, np.floating))
  if not (discrete or choices or floats):
    raise ValueError(f'env.task: the actions of {task} are {action}; only one choice (Discrete), '
                     'several (MultiDiscrete, integers from 0 on) and a vector of floats (Box) '
                     'can be learned')
  shape, dtype, obs_parts = spaces.layout(task, obs)
  return EnvSpec(
      task=task,
      obs_shape=shape,
      obs_dtype=dtype,
      num_actions=int(action.n) if discrete else 0,
      action_low=tuple(map(float, action.low)) if floats else (),
      action_high=tuple(map(float, action.high)) if floats else (),
      frame_skip=1,
      max_episode_steps=_limit(env),
      calls_python=True,
      step_us=_STEP_US,
      # An environment that a class or a function makes has no registered spec.
      repeats=not (env.spec and env.spec.nondeterministic),
      channels_last=spaces.is_channels_last(shape),
      parts=obs_parts,
      action_choices=choices)


def _frame_rate(env: gymnasium.Env) -> float:
  """Returns the steps a second of videos; 10 if the environment does not tell a number."""
  rate = (env.metadata or {}).get('render_fps')
  return float(rate) if isinstance(rate, numbers.Real) and 0 < rate < math.inf else 10.0


def _limit(env: gymnasium.Env) -> int:
  """Returns the steps after which a TimeLimit truncates an episode; 0 without one."""
  while isinstance(env, gymnasium.Wrapper):
    if isinstance(env, gymnasium.wrappers.TimeLimit):
      return int(env._max_episode_steps)  # noqa: SLF001 - it has no other name
    env = env.env
  return 0


def make_vector_env(task: str, options: Mapping[str, Any], seeds: Sequence[int],
                    num_threads: int = 0, batch_size: int = 0) -> GymnasiumVectorEnv:
  """Starts environments; see `protocol.EnvFamily`.

  Args:
    task: `env.task` of the config.
    options: arguments of the environment.
    seeds: one for each environment.
    num_threads: worker processes, at most one for each environment; 0: one for each core.
    batch_size: must be 0, since all environments step together.

  Returns:
    The vector environment.
  """
  if batch_size:
    raise ValueError(f'env_batch: all environments of {task} step together; must be 0')
  key = _key(task, options)
  if key not in _facts:
    make_spec(task, options)
  return GymnasiumVectorEnv(_facts[key].spec, options, seeds, num_threads, _facts[key].frame_rate)


class GymnasiumVectorEnv:
  """Gymnasium environments with traceable `send` and `recv`; see `protocol.VectorEnv`.

  A program that contains it holds a number instead of a reference to the workers. So programs that
  JAX caches do not keep processes alive.
  """

  first_state = None
  handle = np.zeros((), np.int32)

  def __init__(self, spec: EnvSpec, options: Mapping[str, Any], seeds: Sequence[int],
               num_processes: int = 0, frame_rate: float = 10.0):
    """Starts worker processes, which make and reset the environments.

    Args:
      spec: the spec of the task.
      options: arguments of the environment.
      seeds: one for each environment.
      num_processes: worker processes, at most one for each environment; 0: one for each core.
      frame_rate: steps a second, for videos.
    """
    self._frame_rate = frame_rate
    self.num_envs = len(seeds)
    self.batch_size = len(seeds)
    self._workers = _Workers(spec, options, seeds,
                             num_processes or len(os.sched_getaffinity(0)))

  @functools.cached_property
  def first_obs(self) -> np.ndarray:
    """First observations [num_envs, ...]; waits for the workers to start.

    Raises:
      EnvironmentFailed: a constructor or reset has failed.
    """
    self._workers.wait()
    return np.array(self._workers.arrays.obs)

  def send(self, token: jax.Array, state: None, action: jax.Array,
           env_id: jax.Array | None = None) -> tuple[jax.Array, None]:
    """Hands actions [B, ...] to the workers and does not wait.

    Args:
      token: the token of the last call.
      state: None, as the workers keep the state.
      action: [B, ...].
      env_id: unused, as all environments take an action.

    Returns:
      The next token, and the next state.
    """
    del env_id
    chex.assert_axis_dimension(action, 0, self.num_envs)
    # The workers take no actions before they have started.
    assert self.first_obs is not None
    like = self._workers.arrays.action
    token, = _call_p.bind(token, action.astype(like.dtype).reshape(like.shape),
                          operation='send', number=self._workers.number, results=_shapes(token))
    return token, state

  def recv(self, token: jax.Array, state: None
           ) -> tuple[jax.Array, None, TimeStep]:
    """Waits for the workers and returns the results; see `VectorEnv`."""
    arrays = self._workers.arrays
    token, obs, reward, terminated, truncated = _call_p.bind(
        token, operation='recv', number=self._workers.number,
        results=_shapes(token, arrays.obs, arrays.reward, arrays.terminated, arrays.truncated))
    step = TimeStep(obs, reward, terminated, truncated, raw_reward=reward, game_over=terminated,
                    env_id=jnp.arange(self.num_envs, dtype=jnp.int32))
    return token, state, step

  def render(self, state: None) -> np.ndarray:
    """Returns the picture of the first environment, [H, W, 3] u8.

    Raises:
      RuntimeError: the environment draws no picture.
    """
    del state
    return self._workers.render()

  @property
  def frame_rate(self) -> float:
    """Steps a second, from the environment's `render_fps`; 10 without it."""
    return self._frame_rate

  def close(self) -> None:
    """Ends the workers. A program that contains them would raise an error afterwards."""
    self._workers.close()


class _Workers:
  """The worker processes of a vector environment.

  All calls come from one program, in the order of its token, so they need no lock.
  """

  def __init__(self, spec: EnvSpec, options: Mapping[str, Any], seeds: Sequence[int],
               num_processes: int):
    """Starts processes.

    Args:
      spec: the spec of the task.
      options: arguments of the environment.
      seeds: one for each environment.
      num_processes: worker processes, at most one for each environment.
    """
    self.task = spec.task
    self.options = dict(options)
    self.number = next(_numbers)
    self._failure: str | None = None
    self._sockets: list[socket.socket] = []
    self._processes: list[subprocess.Popen] = []
    self.close = weakref.finalize(self, _end, self._sockets, self._processes)

    layout = worker.Layout(
        len(seeds), spec.obs_shape, spec.obs_dtype.name,
        () if spec.num_actions else (len(spec.action_choices or spec.action_low),),
        'float32' if spec.action_low else 'int32')
    with _shared_memory(worker.num_bytes(layout)) as memory:
      self.arrays = worker.arrays(mmap.mmap(memory, worker.num_bytes(layout)), layout)
      try:
        for envs in np.array_split(np.arange(len(seeds)), min(num_processes, len(seeds))):
          self._start(worker.Setup(
              self.task, self.options, parts.search(), worker.registered(self.task), int(envs[0]),
              worker.seeds_of([seeds[i] for i in envs]), layout, memory))
      except BaseException:
        self.close()
        raise
    _by_number[self.number] = self

  def _start(self, setup: worker.Setup) -> None:
    """Starts one process."""
    parent, child = socket.socketpair()
    self._sockets.append(parent)
    with child:
      # A session of its own, so that the signals of a terminal do not reach it.
      self._processes.append(subprocess.Popen(
          # -P: the current folder must not come before the modules that the program imports.
          [sys.executable, '-P', '-c', _PROGRAM, str(child.fileno())],
          pass_fds=(child.fileno(), setup.memory), stdin=subprocess.DEVNULL,
          start_new_session=True))
    with contextlib.suppress(OSError):  # `wait` says why a process has ended
      parent.sendall(pickle.dumps(sys.path) + pickle.dumps(setup))

  def step(self, action: np.ndarray) -> None:
    """Hands over actions and does not wait."""
    self._check()
    self.arrays.action[...] = action
    for connection in self._sockets:
      with contextlib.suppress(OSError):
        connection.sendall(worker.STEP)

  def wait(self) -> None:
    """Waits until all workers have finished their last command.

    Raises:
      EnvironmentFailed: an environment has raised an exception, or a process has ended.
    """
    self._check()
    for i in range(len(self._sockets)):
      self._answer(i)

  def render(self) -> np.ndarray:
    """Returns the picture of the first environment.

    Raises:
      RuntimeError: the environment draws no picture.
    """
    self._check()
    with contextlib.suppress(OSError):
      self._sockets[0].sendall(worker.RENDER)
    kind, content = self._answer(0)
    if kind == worker.PICTURE:
      return pickle.loads(content)
    raise RuntimeError(content.decode())

  def _check(self) -> None:
    if self._failure:
      raise EnvironmentFailed(self._failure)
    if not self.close.alive:
      raise EnvironmentFailed(f'{self.task}: the environments were closed')

  def _answer(self, i: int) -> tuple[bytes, bytes]:
    """Waits for the answer of a worker: its kind and its content.

    Raises:
      EnvironmentFailed: an environment has raised an exception, or the process has ended.
    """
    kind = self._read(i, 1)
    if kind == worker.DONE:
      return kind, b''
    length = self._read(i, worker.LENGTH.size) if kind else b''
    content = self._read(i, *worker.LENGTH.unpack(length)) if length else None
    if content is not None and kind != worker.FAILED:
      return kind, content
    self._failure = self._death(i) if content is None else content.decode()
    raise EnvironmentFailed(self._failure)

  def _read(self, i: int, size: int) -> bytes:
    """Returns bytes from a worker; empty if the process has ended before it sent them all."""
    content = b''
    while len(content) < size:
      try:
        more = self._sockets[i].recv(size - len(content))
      except OSError:
        return b''
      if not more:
        return b''
      content += more
    return content

  def _death(self, i: int) -> str:
    """Returns the message about a process that has ended."""
    process = self._processes[i]
    try:
      code = process.wait(timeout=worker.GRACE_S + 2)
    except subprocess.TimeoutExpired:
      return f'{self.task}: worker process {process.pid} of the environments does not answer'
    cause = f'with exit code {code}' if code >= 0 else f'by {signal.Signals(-code).name}'
    if code == -signal.SIGKILL:
      cause += ' (if nobody killed it, memory may have run out)'
    return f'{self.task}: worker process {process.pid} of the environments was ended {cause}'


_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, _Workers] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def _shared_memory(size: int):
  """Yields a descriptor of shared memory, which has no name and so ends with its last user."""
  if hasattr(os, 'memfd_create'):
    file = os.fdopen(os.memfd_create('podracer_jit'), 'r+b')
  else:
    file = tempfile.TemporaryFile()
  with file:
    file.truncate(size)
    yield file.fileno()


def _end(sockets: Sequence[socket.socket], processes: Sequence[subprocess.Popen]) -> None:
  """Closes the sockets, which asks the processes to end.

  Processes that take too long are killed, and so is what environments have started and left.
  """
  for connection in sockets:
    connection.close()
  deadline = time.monotonic() + worker.GRACE_S + 2
  for process in processes:
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(timeout=max(0.0, deadline - time.monotonic()))
    with contextlib.suppress(OSError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _shapes(*arrays: Any) -> tuple[jax.core.ShapedArray, ...]:
  """Returns the shapes and dtypes of arrays, as a parameter of the primitive."""
  return tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in arrays)


def _call_back(operation: str, number: int, token: np.ndarray, *action: np.ndarray
               ) -> tuple[np.ndarray, ...]:
  """Carries out a call of the program, with NumPy arrays; must not call JAX.

  Args:
    operation: 'send' or 'recv'.
    number: the number of the workers.
    token: of the calls.
    *action: [B, ...], the actions to send.

  Returns:
    The token, and for 'recv' the results of the step.

  Raises:
    EnvironmentFailed: an environment has failed, or the workers were closed.
  """
  workers = _by_number.get(number)
  if workers is None:
    raise EnvironmentFailed('the environments were closed')
  token = np.asarray(token)
  if operation == 'send':
    workers.step(*action)
    return (token,)
  workers.wait()
  arrays = workers.arrays
  # XLA copies the results before the program goes on, so these can be views.
  return token, arrays.obs, arrays.reward, arrays.terminated, arrays.truncated


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, operation: str, number: int,
           results: tuple[jax.core.ShapedArray, ...]) -> Sequence[Any]:
  """Lowers a call to a custom call of XLA, which calls Python.

  Args:
    ctx: of the lowering.
    *operands: the token, and the actions to send.
    operation: 'send' or 'recv'.
    number: the number of the workers.
    results: shapes of the results.
  """
  del results
  values, _, _ = mlir.emit_python_callback(
      ctx, functools.partial(_call_back, operation, number), None, operands, ctx.avals_in,
      ctx.avals_out, has_side_effect=True)
  return values


def _evaluate(*args: jax.Array, operation: str, number: int,
              results: tuple[jax.core.ShapedArray, ...]) -> list[jax.Array]:
  """Carries out a call outside of a program; see `_call_back`.

  Args:
    *args: the token, and the actions to send.
    operation: 'send' or 'recv'.
    number: the number of the workers.
    results: shapes of the results.
  """
  del results
  return [jnp.array(x) for x in _call_back(operation, number, *map(np.asarray, args))]


# `jax.io_callback` would move its arguments to a device inside the callback, which can wait for
# ever for a thread of XLA (https://github.com/jax-ml/jax/issues/24255). This primitive also hides
# its effects from JAX, which would call programs with effects from Python instead of C++. The token
# ensures that each call is made once and in order.
_call_p = core.Primitive('gymnasium')
_call_p.multiple_results = True
_call_p.def_impl(_evaluate)
_call_p.def_abstract_eval(lambda *args, results, **params: results)
mlir.register_lowering(_call_p, _lower)
