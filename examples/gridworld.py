"""An environment of one's own in one file: a gridworld of JAX functions, seen by a small CNN.

podracer_jit --config=examples/gridworld.py --workdir=runs/gridworld
podracer_jit evaluate --workdir=runs/gridworld --allow_modules=examples/gridworld.py

The environment is part of the compiled program, so on a GPU nothing leaves the GPU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from podracer_jit import experiment

MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)], np.int32)  # up, down, left, right


class State(NamedTuple):
  """Positions [2] i32 in the grid: row, column."""

  agent: jax.Array
  goal: jax.Array


class Gridworld:
  """An agent walks to a goal; both are drawn anew for each episode."""

  def __init__(self, size: int = 6):
    """`--config.env.size=8` makes the grid 8 x 8."""
    self.size = size
    self.observation_space = spaces.Box(0, 255, (2, size, size), np.uint8)
    self.action_space = spaces.Discrete(len(MOVES))
    self.max_episode_steps = 4 * size

  def reset(self, key):
    """Draws two different cells."""
    cells = jax.random.choice(key, self.size**2, (2,), replace=False)
    agent, goal = jnp.stack([cells // self.size, cells % self.size], axis=1)
    state = State(agent, goal)
    return self._observe(state), state

  def step(self, key, state, action):
    """Moves the agent, which stays where it is at a wall. The goal gives 1 and ends the episode."""
    del key
    agent = jnp.clip(state.agent + jnp.asarray(MOVES)[action], 0, self.size - 1)
    state = state._replace(agent=agent)
    terminated = jnp.all(agent == state.goal)
    reward = jnp.where(terminated, 1.0, -0.01)
    return self._observe(state), state, reward, terminated, False, {}

  def render(self, state):
    """Returns a picture for videos: the agent is red, the goal green."""
    picture = np.full((self.size, self.size, 3), 30, np.uint8)
    picture[tuple(np.asarray(state.goal))] = (0, 200, 0)
    picture[tuple(np.asarray(state.agent))] = (220, 40, 40)
    return picture.repeat(16, axis=0).repeat(16, axis=1)

  def _observe(self, state):
    """Returns a plane with the agent and one with the goal, [2, size, size] u8."""
    planes = jnp.zeros((2, self.size, self.size), jnp.uint8)
    return planes.at[0, *state.agent].set(255).at[1, *state.goal].set(255)


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('ppo', 'nature_cnn', 'adam', scheme='fused')
  config.env.task = 'gridworld:Gridworld'
  config.env.num_envs = 64
  config.network.channels = (16, 16)
  config.network.kernels = (3, 3)
  config.network.strides = (1, 1)
  config.network.hidden = 64
  config.unroll_length = 16
  config.num_epochs = config.num_minibatches = 4
  config.total_steps = 5_000 if 'smoke' in experiment.arguments(arg, 'smoke') else 400_000
  return config
