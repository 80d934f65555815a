"""JAX functions: which of two shapes is in a noisy picture? A CNN learns it, an MLP does not."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

SIZE = 12
NOISE = 0.15  # share of bright pixels
QUESTIONS = 8  # pictures of an episode
PLUS = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]], np.uint8)
CROSS = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 1]], np.uint8)


class State(NamedTuple):
  """The answer to the picture that was shown last, and the pictures shown so far."""

  answer: jax.Array
  shown: jax.Array


class Shapes:
  """A picture has a plus or a cross of five pixels anywhere; 1/8 for each right answer, else -1/8.

  The best return is 1; random play has 0.
  """

  observation_space = spaces.Box(0, 255, (SIZE, SIZE, 1), np.uint8)
  action_space = spaces.Discrete(2)
  max_episode_steps = None

  def reset(self, key):
    """Shows the first picture."""
    return self._show(key, 0)

  def step(self, key, state, action):
    """Judges the answer, and shows the next picture."""
    reward = jnp.where(action == state.answer, 1.0, -1.0) / QUESTIONS
    obs, state = self._show(key, state.shown)
    return obs, state, reward, state.shown > QUESTIONS, False, {}

  def _show(self, key, shown):
    keys = jax.random.split(key, 3)
    noise = jax.random.bernoulli(keys[0], NOISE, (SIZE, SIZE)).astype(jnp.uint8)
    row, column = jax.random.randint(keys[1], (2,), 0, SIZE - 2)
    answer = jax.random.randint(keys[2], (), 0, 2)
    shape = jnp.where(answer == 0, PLUS, CROSS)
    picture = jax.lax.dynamic_update_slice(noise, shape, (row, column))
    return 255 * picture[..., None], State(answer, jnp.asarray(shown, jnp.int32) + 1)
