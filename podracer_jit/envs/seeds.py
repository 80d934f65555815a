"""Seeds of environments."""

from __future__ import annotations

import numpy as np


def env_seeds(seed: int, segment: int, first_env: int, num_envs: int) -> list[int]:
  """One EnvPool seed an environment: distinct, a function of (seed, segment, environment) alone.

  Explicit, because EnvPool seeds environment i of a pool with `seed + i`: neighbouring pools would
  share nearly all their streams.
  """
  start = int(np.random.SeedSequence([seed, segment]).generate_state(1)[0])
  # An odd stride visits every 31-bit number once.
  return [(start + env * 0x9E3779B1) % 2**31 for env in range(first_env, first_env + num_envs)]
