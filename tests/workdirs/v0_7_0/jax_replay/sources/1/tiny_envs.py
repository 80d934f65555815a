"""Small environments of the runs whose workdirs are kept."""

from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

LENGTH = 5  # cells of the corridor


class State(NamedTuple):
  """The agent's cell, and the cell of the goal."""

  agent: jax.Array
  goal: jax.Array


class Corridor:
  """JAX functions: an agent walks to a goal at one of the two ends."""

  observation_space = spaces.Box(0.0, float(LENGTH), (2,), np.float32)
  action_space = spaces.Discrete(2)
  max_episode_steps = 12

  def reset(self, key):
    """Draws the goal."""
    goal = (LENGTH - 1) * jax.random.bernoulli(key).astype(jnp.int32)
    state = State(jnp.asarray(LENGTH // 2, jnp.int32), goal)
    return self._observe(state), state

  def step(self, key, state, action):
    """Moves the agent to the left or to the right."""
    del key
    agent = jnp.clip(state.agent + 2 * action - 1, 0, LENGTH - 1).astype(jnp.int32)
    state = state._replace(agent=agent)
    terminated = agent == state.goal
    reward = jnp.where(terminated, 1.0, -0.1)
    return self._observe(state), state, reward, terminated, False, {}

  def _observe(self, state):
    return jnp.stack([state.agent, state.goal]).astype(jnp.float32)


class Walk(gymnasium.Env):
  """A random walk that an action pushes; the base of the environments of Gymnasium."""

  action_space = spaces.Discrete(3)
  num_steps = 7

  def reset(self, *, seed=None, options=None):
    """Begins at a random position."""
    super().reset(seed=seed)
    self.position = self.np_random.uniform(-1, 1, 2).astype(np.float32)
    self.steps = 0
    return self._observe(), {}

  def step(self, action):
    """Pushes the first coordinate by -0.1, 0 or 0.1; the second one is noise."""
    push = np.float32(0.1 * (int(action) - 1))
    noise = np.float32(self.np_random.uniform(-0.1, 0.1))
    self.position = np.clip(self.position + np.array([push, noise], np.float32), -1, 1)
    self.steps += 1
    reward = float(1 - abs(self.position[0]))
    return self._observe(), reward, self.steps >= self.num_steps, False, {}


class Boxes(Walk):
  """Observations are a Dict of Boxes."""

  observation_space = spaces.Dict({'position': spaces.Box(-1, 1, (2,), np.float32),
                                   'steps': spaces.Box(0, 255, (1,), np.uint8)})

  def _observe(self):
    return {'position': self.position, 'steps': np.array([self.steps], np.uint8)}


class Mixed(Walk):
  """Observations are a Dict with a number (Discrete) and an image."""

  observation_space = spaces.Dict({'image': spaces.Box(0, 255, (6, 6, 3), np.uint8),
                                   'steps': spaces.Discrete(8)})

  def _observe(self):
    image = np.zeros((6, 6, 3), np.uint8)
    row, column = np.floor((self.position + 1) * 2.9).astype(int)
    image[row, column] = 255
    return {'image': image, 'steps': np.int64(self.steps)}
