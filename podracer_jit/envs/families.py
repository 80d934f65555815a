"""Lookup of the environment family of a task."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from podracer_jit import parts
from podracer_jit.envs.jax_envs import JaxEnv, JaxFamily
from podracer_jit.envs.protocol import EnvFamily
from podracer_jit.options import shorten, shown

# Kinds of tasks that need an extra: the word before the colon of `env.task`, and the module that
# has their FAMILY.
EXTRAS = {'gymnax': 'podracer_jit.envs.gymnax_envs',
          'playground': 'podracer_jit.envs.playground_envs'}

# Tasks of Gymnasium, as 'gymnasium:ID'.
GYMNASIUM = 'gymnasium'

# Families of users' environments, by task, so that compiled functions are used again.
_user_families: dict[str, JaxFamily] = {}


def own_module(task: str) -> str:
  """Returns the user's module that a task names, or '' if it names none."""
  kind, colon, name = task.partition(':')
  if not colon or kind in EXTRAS:
    return ''
  # 'gymnasium:module:ID' names the module that registers an environment.
  return name.rpartition(':')[0] if kind == GYMNASIUM else kind


def libraries_of(task: str) -> list[str]:
  """Returns the names of the modules that a task names, beside EnvPool, without submodules."""
  kind, *modules = task.split(':')[:-1] or ['']
  names = [kind, *modules] if kind else []
  # A user's own environment may be one of Gymnasium.
  names += [GYMNASIUM] if names and kind not in EXTRAS and GYMNASIUM in sys.modules else []
  return list(dict.fromkeys(name.partition('.')[0] for name in names))


def may_start_jax(task: str) -> bool:
  """Returns whether the family of a task may start JAX; EnvPool's tasks never do."""
  return ':' in task


def family_of(task: str) -> EnvFamily:
  """Returns the family of a task.

  Args:
    task: a task of EnvPool, 'gymnax:TASK', 'playground:TASK', 'gymnasium:ID', or
      'module:attribute' of a user's own: a subclass of gymnasium.Env or a function that returns
      one, a class like `jax_envs.JaxEnv`, or a `protocol.EnvFamily`.

  Raises:
    ValueError: there is no such family, or it lacks a function; the message is one line.
  """
  kind, colon, _ = task.partition(':')
  if not colon:
    # Imported here because the import takes a second.
    from podracer_jit.envs import envpool_envs
    return envpool_envs
  if kind in EXTRAS:
    return _extra(kind, task)

  if kind == GYMNASIUM:
    return _gymnasium_family()

  part = parts.find('env.task', task, {})
  if all(hasattr(part, name) for name in ('make_spec', 'make_vector_env')):
    return part
  # A module that has a subclass of gymnasium.Env has imported gymnasium.
  gymnasium = sys.modules.get('gymnasium')
  is_gymnasium = gymnasium and isinstance(part, type) and issubclass(part, gymnasium.Env)
  if is_gymnasium or callable(part) and not isinstance(part, type):
    return _gymnasium_family()
  required = ('reset', 'step', 'observation_space', 'action_space')
  if hasattr(part, 'reset') and hasattr(part, 'step'):
    if not isinstance(part, type):
      raise ValueError(f'env.task: {task} is an environment already, of the class '
                       f'{shown(type(part).__name__)}; must be a class, or a function that returns '
                       'a new gymnasium.Env at each call')
    if _is_stepped_by_python(part):
      several = ' with one agent' if hasattr(part, 'possible_agents') else ''
      raise ValueError(f'env.task: {task} is no subclass of gymnasium.Env, although its step takes '
                       f'an action only; derive it from gymnasium.Env{several} (of the package '
                       'gymnasium, not gym), or name a function that wraps it in one')
    if task not in _user_families or _user_families[task].env_class is not part:
      _user_families[task] = _UserFamily(part)
    return _user_families[task]
  raise ValueError(f'env.task: {task} is no environment: neither a class with '
                   f'{", ".join(required)} (see envs/jax_envs.py), nor a subclass of gymnasium.Env '
                   'or a function that returns one (see envs/gymnasium_envs.py), nor a family with '
                   'make_spec and make_vector_env (see envs/protocol.py)')


def _is_stepped_by_python(environment: type) -> bool:
  """Returns whether a class has the `step(action)` of Gymnasium, gym, dm_env or PettingZoo."""
  try:
    step, reset = map(inspect.signature, (environment.step, environment.reset))
  except (TypeError, ValueError):
    return False

  def takes(*arguments: str) -> bool:
    try:
      step.bind('self', *arguments)
    except TypeError:
      return False
    return True

  # Wrappers of gym pass any arguments on, but a key of JAX has no default.
  seed = reset.parameters.get('seed')
  has_default_seed = seed is not None and seed.default is not inspect.Parameter.empty
  return takes('action') and (has_default_seed or not takes('key', 'state', 'action'))


def tasks() -> dict[str, list[str]]:
  """Returns the tasks of this installation by family, in the form that `env.task` takes.

  The families are EnvPool's, such as `atari` or `mujoco.dmc`, and the other kinds whose libraries
  are installed.
  """
  from podracer_jit.envs import envpool_envs
  by_family = dict(envpool_envs.families())
  for kind in EXTRAS:
    try:
      module = importlib.import_module(EXTRAS[kind])
    except Exception:  # noqa: BLE001 - a library of another release may raise anything
      continue
    by_family[kind] = [f'{kind}:{name}' for name in module.tasks()]
  by_family[GYMNASIUM] = [f'{GYMNASIUM}:{name}' for name in _gymnasium_family().tasks()]
  return by_family


def _gymnasium_family() -> EnvFamily:
  # Imported here because other tasks do not need it.
  from podracer_jit.envs import gymnasium_envs
  return gymnasium_envs


def _extra(kind: str, task: str) -> EnvFamily:
  """Returns the family of a kind of tasks whose library is optional."""
  try:
    return importlib.import_module(EXTRAS[kind]).FAMILY
  except Exception as error:  # noqa: BLE001 - a library of another release may raise anything
    raise ValueError(f'env.task: {shown(task)} needs {kind}, which cannot be imported '
                     f'({shorten(str(error))}): {sys.executable} -m pip install {kind}') from None


class _UserFamily(JaxFamily):
  """Family of a user's class of JAX functions."""

  def __init__(self, env_class: type):
    super().__init__(self._construct)
    self.env_class = env_class

  def _construct(self, task: str, options: Mapping[str, Any]) -> JaxEnv:
    """Returns the environment whose constructor gets the options as arguments."""
    try:
      inspect.signature(self.env_class).bind(**options)
    except TypeError as error:
      named = ', '.join(f'env.{name}' for name in options) or 'env.task'
      raise ValueError(f'{named}: {task} does not take these options: '
                       f'{shorten(str(error))}') from None
    except ValueError:
      pass  # it has no signature
    try:
      env = self.env_class(**options)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a constructor may raise anything
      file = getattr(sys.modules.get(self.env_class.__module__), '__file__', None)
      raise ValueError(f'env.task: {task} fails{parts.line_of(error, [file])}: '
                       f'{type(error).__name__}: {shorten(str(error))}') from error
    for name in ('observation_space', 'action_space'):
      if not hasattr(env, name):
        raise ValueError(f'env.task: {task} has no {name}; see envs/jax_envs.py')
      if callable(getattr(env, name)):
        raise ValueError(f'env.task: {name} of {task} is a function; it must be a space, such as '
                         'gymnasium.spaces.Box(-1, 1, (3,))')
    return env
