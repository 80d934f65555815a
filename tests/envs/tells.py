"""An environment in a file of its own, as the processes that step it import this file."""

import contextlib
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Tells(gymnasium.Env):
  """Observes a hash of its actions; files in `folder` make it wait, fail, or tell its steps."""

  observation_space = spaces.Box(-1, 1, (3,), np.float32)
  action_space = spaces.MultiDiscrete([3, 300])

  def __init__(self, folder=''):
    self._folder = folder
    self._steps = 0

  def reset(self, seed=None, options=None):
    super().reset(seed=seed)
    self._row = self.np_random.uniform(-1, 1, 3).astype(np.float32)
    self._left = self.np_random.integers(3, 9)
    return self._row, {}

  def step(self, action):
    self._steps += 1
    if self._folder:
      self._obey(f'{self._folder}/{self._steps}')
    self._row = np.sin(7 * self._row + action @ [1, 0.01]).astype(np.float32)
    self._left -= 1
    return self._row, float(action[0]), self._left == 0, False, {}

  def _obey(self, path):
    with contextlib.suppress(FileNotFoundError), open(f'{path}.fails') as file:
      raise ValueError(file.read())
    with contextlib.suppress(FileNotFoundError), open(f'{path}.waits'):
      open(f'{path}.reached', 'w').close()
      while True:
        with contextlib.suppress(FileNotFoundError), open(f'{path}.goes_on'):
          return
        time.sleep(0.01)
