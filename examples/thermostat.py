"""A Gymnasium environment of one's own in one file: a heater keeps a room at 20 degrees.

podracer_jit --config=examples/thermostat.py --workdir=runs/thermostat
podracer_jit evaluate --workdir=runs/thermostat --allow_modules=examples/thermostat.py

Python steps the environment in worker processes, which import this file. So the top of the file
imports only gymnasium and NumPy, and `get_config` imports the training package.
"""

import gymnasium
import numpy as np
from gymnasium import spaces

TARGET = 20.0  # degrees


class Thermostat(gymnasium.Env):
  """Each minute the heater is switched off, to half or to full power; an episode has 100 minutes.

  The reward is minus the distance from the target, a tenth for each degree.
  """

  observation_space = spaces.Dict(
      temperatures=spaces.Box(-10, 10, (2,), np.float32),  # room and outside, / 10, from target
      power=spaces.Discrete(3))  # in the last minute
  action_space = spaces.Discrete(3)
  metadata = {'render_modes': ['rgb_array'], 'render_fps': 20}

  def __init__(self, warmth: float = 3.0, render_mode: str | None = None):
    """`--config.env.warmth=2` takes a weaker heater: degrees a minute at full power."""
    self.warmth = warmth
    self.render_mode = render_mode

  def reset(self, seed=None, options=None):
    """Draws the temperatures of the room and of the weather."""
    super().reset(seed=seed)
    self.room, self.outside = self.np_random.uniform((10, -10), (25, 10))
    self.power = 0
    self.minute = 0
    return self._observe(), {}

  def step(self, action):
    """Heats for a minute, in which a tenth of the difference to the weather is lost."""
    self.power = int(action)
    self.room += self.warmth * self.power / 2 + (self.outside - self.room) / 10
    self.minute += 1
    reward = -abs(self.room - TARGET) / 10
    return self._observe(), reward, False, self.minute == 100, {}

  def render(self):
    """Draws a thermometer: red up to the room's temperature, a green line at the target."""
    picture = np.full((80, 32, 3), 30, np.uint8)
    picture[80 - int(np.clip(2 * self.room, 0, 80)):, 12:20] = (220, 40, 40)
    picture[80 - int(2 * TARGET)] = (0, 200, 0)
    return picture

  def _observe(self):
    temperatures = (np.array([self.room, self.outside]) - TARGET) / 10
    return {'temperatures': temperatures.astype(np.float32), 'power': self.power}


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  from podracer_jit import experiment
  config = experiment.config('ppo', 'mlp', 'adam', scheme='sync')
  config.env.task = 'thermostat:Thermostat'
  config.env.num_envs = 32
  config.unroll_length = 32
  config.num_epochs = config.num_minibatches = 4
  config.loss.discount = 0.9  # an action matters for some ten minutes
  config.optimizer.learning_rate = 1e-3
  config.total_steps = 5_000 if 'smoke' in experiment.arguments(arg, 'smoke') else 300_000
  return config
