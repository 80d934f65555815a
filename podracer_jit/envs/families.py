"""Lookup of the environment family of a task."""

from __future__ import annotations

from podracer_jit import parts
from podracer_jit.envs.protocol import Family


def family_of(task: str) -> Family:
  """Returns EnvPool's family, or a user's family if the task is `module:attribute`.

  Raises:
    ValueError: the family does not exist or lacks a function; the message is one line.
  """
  if ':' not in task:
    # Imported here because the import takes a second.
    from podracer_jit.envs import envpool_envs
    return envpool_envs
  family = parts.find('env.task', task, {})
  missing = [name for name in ('make_spec', 'make_vector_env') if not hasattr(family, name)]
  if missing:
    raise ValueError(f'env.task: {task} is no environment family, it has no {missing[0]}; see '
                     'envs/protocol.py')
  return family
