"""Seeds of environments, the same however the environments are split into pools."""

from __future__ import annotations

import numpy as np


def env_seeds(seed: int, segment: int, first_env: int, num_envs: int, life: int = 0
              ) -> list[int]:
  """Returns distinct EnvPool seeds, one for each environment.

  A seed depends on (seed, segment, environment, life) only. With a single seed for a pool EnvPool
  would seed its environment i with `seed + i`, so neighbouring pools would share nearly all
  streams.

  Args:
    seed: seed of the run.
    segment: index of the segment.
    first_env: index of the first environment among all environments of the run.
    num_envs: number of environments.
    life: of their actor, from 0; one that was begun again does not repeat its experience.

  Returns:
    num_envs integers in [0, 2^31).
  """
  entropy = [seed, segment, life] if life else [seed, segment]
  start = int(np.random.SeedSequence(entropy).generate_state(1)[0])
  # An odd stride visits every 31-bit number once, so seeds are distinct.
  return [(start + env * 0x9E3779B1) % 2**31 for env in range(first_env, first_env + num_envs)]
