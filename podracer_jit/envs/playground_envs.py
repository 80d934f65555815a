"""Tasks of MuJoCo Playground, as `env.task = 'playground:CartpoleBalance'`; needs the extra.

Options are the fields of the task's configuration in Playground, such as `env.episode_length`.
Nested fields have dots: `env.noise_config.level`.

The physics are MJX's JAX implementation, not MuJoCo Warp, which is Playground's default: Warp keeps
the contacts of all environments in one array, so an environment has no state of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import lax

from podracer_jit.envs.jax_envs import JaxFamily
from podracer_jit.options import hint, shorten, shown


def _can_draw_without_display() -> bool:
  """Returns whether this machine has EGL, which draws without a display."""
  try:
    for library in ('libEGL.so.1', 'libGL.so.1'):
      ctypes.CDLL(library)
  except OSError:
    return False
  return True


@contextlib.contextmanager
def _with_renderer(name: str) -> Iterator[None]:
  """Sets MUJOCO_GL for the block only."""
  before = os.environ.get('MUJOCO_GL')
  os.environ['MUJOCO_GL'] = name
  try:
    yield
  finally:
    del os.environ['MUJOCO_GL']
    if before is not None:
      os.environ['MUJOCO_GL'] = before


# MuJoCo reads MUJOCO_GL once, when it is imported, and would open a window by default.
_RENDERER = os.environ.get('MUJOCO_GL') or ('egl' if _can_draw_without_display() else '')
with _with_renderer(_RENDERER):
  import mujoco
  from mujoco_playground import dm_control_suite, locomotion, manipulation, registry
  from mujoco_playground._src import mjx_env

# Size of a picture, in pixels.
_WIDTH = 320
_HEIGHT = 240


class PlaygroundEnv:
  """A task of Playground, as a `jax_envs.JaxEnv`."""

  def __init__(self, env: mjx_env.MjxEnv, episode_length: int, action_repeat: int):
    """Wraps an environment.

    Args:
      env: the result of `registry.load`.
      episode_length: steps of `env` after which an episode is truncated.
      action_repeat: steps of `env` that take the same action, as one step here.
    """
    self._env = env
    self._action_repeat = action_repeat
    # Traced once: tracing takes seconds, and each program contains these more than once.
    self._reset = jax.jit(env.reset)
    self._step = jax.jit(env.step)
    self._camera: _Camera | None = None
    key = jax.eval_shape(jax.random.key, 0)
    self.observation_space = _space(jax.eval_shape(self.reset, key)[0])
    # Tasks scale actions themselves, and Playground's own policies have these bounds.
    self.action_space = spaces.Box(-1.0, 1.0, (env.action_size,), np.float32)
    self.max_episode_steps = -(-episode_length // action_repeat)
    self.frame_rate = 1 / (env.dt * action_repeat)

  def reset(self, key: jax.Array) -> tuple[Any, mjx_env.State]:
    """Begins an episode; see `JaxEnv`."""
    state = self._reset(jax.random.key_data(key))
    return state.obs, state

  def step(self, key: jax.Array, state: mjx_env.State, action: jax.Array
           ) -> tuple[Any, mjx_env.State, jax.Array, jax.Array, jax.Array, Any]:
    """Takes an action as often as the task repeats it; see `JaxEnv`.

    The state has a key of its own. Time limits are `max_episode_steps`.
    """
    del key

    def once(state: mjx_env.State, _: None) -> tuple[mjx_env.State, tuple[jax.Array, jax.Array]]:
      state = self._step(state, action)
      return state, (state.reward, state.done)

    state, (reward, done) = lax.scan(once, state, length=self._action_repeat)
    return state.obs, state, jnp.sum(reward), jnp.any(done != 0), jnp.bool_(False), {}

  def render(self, state: mjx_env.State) -> np.ndarray:
    """Returns a picture [H, W, 3] u8, from the model's first camera if it has one.

    Raises:
      RuntimeError: this machine cannot draw.
    """
    if self._camera is None:
      self._camera = _Camera(self._env.mj_model)
    return self._camera.picture(state.data)


class _Camera:
  """Draws states of a model."""

  def __init__(self, model: mujoco.MjModel):
    """Prepares to draw.

    Raises:
      RuntimeError: this machine cannot draw.
    """
    self._model = model
    self._data = mujoco.MjData(model)
    height = min(_HEIGHT, model.vis.global_.offheight)
    width = min(_WIDTH, model.vis.global_.offwidth)
    try:
      self._renderer = mujoco.Renderer(model, height, width)
    except Exception as error:  # noqa: BLE001 - depends on how the machine cannot draw
      raise RuntimeError(f'MuJoCo cannot draw here, with MUJOCO_GL='
                         f'{_RENDERER}: {shorten(str(error))}') from error
    # When Python ends, the renderer's own destructor comes too late for OpenGL.
    weakref.finalize(self, self._renderer.close)

  def picture(self, data: Any) -> np.ndarray:
    """Returns a picture [H, W, 3] u8 of one environment's `mjx.Data`."""
    for name in ('qpos', 'qvel', 'mocap_pos', 'mocap_quat', 'xfrc_applied'):
      getattr(self._data, name)[:] = getattr(data, name)
    mujoco.mj_forward(self._model, self._data)
    self._renderer.update_scene(self._data, camera=0 if self._model.ncam else -1)
    return self._renderer.render().copy()


def tasks() -> list[str]:
  """Returns the names of Playground's tasks, including tasks registered after its import."""
  return sorted(dm_control_suite.ALL_ENVS + locomotion.ALL_ENVS + manipulation.ALL_ENVS)


def make(task: str, options: Mapping[str, Any]) -> PlaygroundEnv:
  """Returns an environment of Playground.

  Args:
    task: 'playground:' and the name of the task.
    options: fields of the task's configuration, nested or with dots.

  Raises:
    ValueError: there is no such task or option, or this machine cannot make the task; the message
      is one line.
  """
  name = task.partition(':')[2]
  if name not in tasks():
    near = difflib.get_close_matches(name, tasks(), n=3, cutoff=0.4)
    raise ValueError(f'env.task: MuJoCo Playground has no task {shown(name)}'
                     + (f'; did you mean {" or ".join(f"playground:{n}" for n in near)}?'
                        if near else ''))
  config = registry.get_default_config(name)
  defaults = _flat(config.to_dict())
  options = _checked(task, _flat(options), defaults)
  # Loading a robot would clone its models from GitHub.
  if name not in dm_control_suite.ALL_ENVS and not mjx_env.MENAGERIE_PATH.exists():
    raise ValueError(f"env.task: {task} needs the robots of MuJoCo Menagerie; Playground "
                     "downloads them once, by python -c 'from mujoco_playground import registry; "
                     f'registry.load("{name}")\'')
  if 'impl' in defaults:
    options['impl'] = 'jax'
  try:
    config.update_from_flattened_dict(options)
    env = registry.load(name, config)
    return PlaygroundEnv(env, config.episode_length, config.action_repeat)
  except Exception as error:  # noqa: BLE001 - a task raises whatever its options lead to
    raise ValueError(f'env.task: {task} cannot be made with these options: '
                     f'{type(error).__name__}: {shorten(str(error))}') from error


def _checked(task: str, options: Mapping[str, Any], defaults: Mapping[str, Any]
             ) -> dict[str, Any]:
  """Returns options with the types of the task's default values.

  Args:
    task: name of the task, for error messages.
    options: values by names with dots.
    defaults: all options of the task, with their default values.

  Raises:
    ValueError: there is no such option, or its value does not fit.
  """
  checked = {}
  for option, value in options.items():
    if option not in defaults:
      near = hint(option, defaults, 'env.', 0.5) or f'; its options are {", ".join(defaults)}'
      raise ValueError(f'env.{option}: not an option of {task}{near}')
    kind = type(defaults[option])
    if isinstance(value, list | tuple) and kind in (list, tuple):
      value = kind(value)  # JSON files have lists only.
    fits = type(value) is kind or kind is float and type(value) is int or defaults[option] is None
    if not fits:
      raise ValueError(f'env.{option}: must be of type {kind.__name__}, got {shown(value)}')
    checked[option] = value
  for option in ('episode_length', 'action_repeat'):
    if checked.get(option, 1) < 1:
      raise ValueError(f'env.{option}: must be at least 1, got {checked[option]}')
  if checked.get('impl', 'jax') != 'jax':
    raise ValueError(f"env.impl: must be 'jax', got {shown(checked['impl'])}: MuJoCo Warp keeps "
                     'the contacts of all environments in one array')
  return checked


def _flat(fields: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns nested fields by their names with dots."""
  flat = {}
  for name, value in fields.items():
    if isinstance(value, Mapping):
      flat |= _flat(value, f'{prefix}{name}.')
    else:
      flat[prefix + name] = value
  return flat


def _space(obs: Any) -> spaces.Space:
  """Returns the space of observations: a Box, or a Dict of Boxes if a task has several parts."""
  if isinstance(obs, Mapping):
    return spaces.Dict({name: _space(part) for name, part in obs.items()})
  return spaces.Box(-np.inf, np.inf, obs.shape, obs.dtype)


FAMILY = JaxFamily(make)
