"""Environments of gymnax, as `env.task = 'gymnax:CartPole-v1'`; needs the extra `gymnax`.

Options are the fields of the environment's parameters, such as `env.max_steps_in_episode`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import gymnax
import jax

from podracer_jit.envs.jax_envs import JaxFamily
from podracer_jit.options import hint, shown


class GymnaxEnv:
  """An environment of gymnax with fixed parameters, as a `jax_envs.JaxEnv`."""

  def __init__(self, env: Any, params: Any):
    """Wraps an environment of `gymnax.make` and its parameters."""
    self._env = env
    self._params = params
    self.observation_space = env.observation_space(params)
    self.action_space = env.action_space(params)
    # Of some environments it is a float.
    self.max_episode_steps = int(getattr(params, 'max_steps_in_episode', 0))

  def reset(self, key: jax.Array) -> tuple[jax.Array, Any]:
    """Begins an episode; see `JaxEnv`."""
    return self._env.reset_env(key, self._params)

  def step(self, key: jax.Array, state: Any, action: jax.Array
           ) -> tuple[jax.Array, Any, jax.Array, jax.Array, jax.Array, Any]:
    """Takes an action, without a reset; see `JaxEnv`."""
    obs, state, reward, terminated, info = self._env.step_env(key, state, action, self._params)
    return obs, state, reward, terminated, self._env.is_truncated(state, self._params), info


def tasks() -> list[str]:
  """Returns the names of gymnax's environments."""
  return sorted(gymnax.registered_envs)


def make(task: str, options: Mapping[str, Any]) -> GymnaxEnv:
  """Returns an environment of gymnax.

  Args:
    task: 'gymnax:' and the name of the environment.
    options: fields of the environment's parameters.

  Raises:
    ValueError: there is no such task or option; the message is one line.
  """
  name = task.partition(':')[2]
  if name not in gymnax.registered_envs:
    near = difflib.get_close_matches(name, gymnax.registered_envs, n=3, cutoff=0.4)
    raise ValueError(f'env.task: gymnax has no task {shown(name)}'
                     + (f'; did you mean {" or ".join(f"gymnax:{n}" for n in near)}?'
                        if near else ''))
  env, params = gymnax.make(name)
  defaults = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
  values = {}
  for option, value in options.items():
    if option not in defaults:
      near = hint(option, defaults, 'env.') or f'; its options are {", ".join(defaults)}'
      raise ValueError(f'env.{option}: not an option of {task}{near}')
    kind = type(defaults[option])
    if type(value) is not kind and not (kind is float and type(value) is int):
      raise ValueError(f'env.{option}: must be of type {kind.__name__}, got {shown(value)}')
    values[option] = kind(value)
  return GymnaxEnv(env, params.replace(**values))


FAMILY = JaxFamily(make)
