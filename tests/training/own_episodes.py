"""Environments of Gymnasium whose episodes cannot be made again."""

import os

import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

BREAKS = 'OWN_EPISODES_BREAK'  # names a file: while it exists, `Breaks` fails in its third step


class Unseeded(CartPoleEnv):
  """Draws from a generator that `reset` does not seed."""

  _generator = np.random.default_rng()

  def step(self, action):
    obs, *rest = super().step(action)
    return obs + self._generator.uniform(-0.1, 0.1, 4).astype(np.float32), *rest


class Breaks(CartPoleEnv):
  """Fails in the third step of an episode, if a file says so."""

  def reset(self, **kwargs):
    self._step = 0
    return super().reset(**kwargs)

  def step(self, action):
    self._step += 1
    if self._step == 3 and os.path.exists(os.environ[BREAKS]):
      raise RuntimeError('the hinge is broken')
    return super().step(action)
