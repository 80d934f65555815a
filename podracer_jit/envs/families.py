"""The environment family that a task belongs to."""

from __future__ import annotations

from podracer_jit import parts
from podracer_jit.envs.protocol import Family


def family_of(task: str) -> Family:
  """EnvPool's family, or a user's own where the task is `module:attribute`.

  Raises:
    ValueError: there is no such family, in one line.
  """
  if ':' not in task:
    from podracer_jit.envs import envpool_envs  # only here: it takes a second to import
    return envpool_envs
  family = parts.find('env.task', task, {})
  missing = [name for name in ('make_spec', 'make_shard') if not hasattr(family, name)]
  if missing:
    raise ValueError(f'env.task: {task} is no environment family, it has no {missing[0]}; see '
                     'envs/protocol.py')
  return family
