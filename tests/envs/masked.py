"""Environments with action masks: an illegal action has a penalty and ends the episode."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

LIMIT = 6  # steps of an episode without an illegal action


def observation_space(choices, form, dtype, name, looks):
  """Returns the space of hints and masks.

  Args:
    choices: of each element of an action.
    form: of the mask: 'flat', 'rows' of equal elements, or a 'tuple' of masks.
    dtype: of the mask.
    name: of the mask.
    looks: 'vector', 'image' or 'several', the hint with a part before and a part after the mask.
  """
  def mask(*shape):
    return spaces.Box(0, 1, shape, dtype)

  size = sum(choices)
  masks = {'flat': lambda: mask(size), 'rows': lambda: mask(len(choices), choices[0]),
           'tuple': lambda: spaces.Tuple([mask(n) for n in choices])}
  hint = {'image': spaces.Box(0, 255, (size, 8, 8), np.uint8)}.get(
      looks, spaces.Box(0, 1, (size,), np.float32))
  others = dict(a=spaces.Discrete(3), z=spaces.Box(-1, 1, (2,), np.float32))
  return spaces.Dict({'hint': hint, name: masks[form](), **(others if looks == 'several' else {})})


def action_space(choices):
  return spaces.Discrete(choices[0]) if len(choices) == 1 else spaces.MultiDiscrete(choices)


class Doors:
  """Each step hints at one of the legal doors, for which the reward is 1; JAX functions."""

  def __init__(self, choices=(5,), form='flat', dtype='bool', name='action_mask', looks='vector',
               ends='terminated', stuck_at=-1, penalty=100.0):
    """Makes an environment.

    Args:
      choices: of each element of an action.
      form: see `observation_space`, also for the next three.
      dtype: of the mask.
      name: of the mask.
      looks: of the hint.
      ends: 'terminated' or 'truncated', how episodes end; nothing is legal in the last observation.
      stuck_at: the step that returns a mask of which the last element allows nothing; 0: a reset.
      penalty: of an illegal action; as large as this, no return without one is negative.
    """
    self.observation_space = observation_space(choices, form, dtype, name, looks)
    self.action_space = action_space(choices)
    self._choices = choices
    self._form = form
    self._dtype = dtype
    self._name = name
    self._looks = looks
    self._ends = ends
    self._stuck_at = stuck_at
    self._penalty = penalty

  def _state(self, key):
    legal = []
    right = []
    for n, one in zip(self._choices, jax.random.split(key, len(self._choices)), strict=True):
      where, others = jax.random.split(one)
      right.append(jax.nn.one_hot(jax.random.randint(where, (), 0, n), n, dtype=bool))
      legal.append(right[-1] | jax.random.bernoulli(others, 0.4, (n,)))
    return jnp.concatenate(legal), jnp.concatenate(right)

  def _observe(self, legal, right, t, over):
    last = jnp.arange(len(legal)) >= len(legal) - self._choices[-1]
    legal = legal & ~over & ~((t == self._stuck_at) & last)
    ends = np.cumsum(self._choices)
    masks = {'flat': lambda: legal, 'rows': lambda: legal.reshape(len(self._choices), -1),
             'tuple': lambda: tuple(jnp.split(legal, ends[:-1]))}[self._form]()
    hint = right.astype(np.float32)
    if self._looks == 'image':
      hint = jnp.broadcast_to(255 * right[:, None, None], (len(right), 8, 8)).astype(np.uint8)
    obs = {'hint': hint, self._name: jax.tree.map(lambda x: x.astype(self._dtype), masks)}
    if self._looks == 'several':
      obs |= dict(a=t % 3, z=jnp.full(2, 0.5))
    return obs

  def reset(self, key):
    legal, right = self._state(key)
    t = jnp.int32(0)
    return self._observe(legal, right, t, False), (legal, right, t)

  def step(self, key, state, action):
    legal, right, t = state
    place = np.cumsum((0, *self._choices[:-1])) + jnp.atleast_1d(action)
    fits = legal[place].all()
    t += 1
    over = ~fits | (t == LIMIT)
    reward = jnp.where(fits, right[place].mean(), -self._penalty)
    legal, right = self._state(key)
    truncated = over & (self._ends == 'truncated')
    return (self._observe(legal, right, t, over), (legal, right, t), reward, over & ~truncated,
            truncated, {})


gymnasium.register('PythonDoors-v0', f'{__name__}:PythonDoors')


class PythonDoors(gymnasium.Env):
  """As `Doors`, stepped by Python."""

  def __init__(self, choices=(5,), form='flat', dtype='int8', stuck_at=-1):
    """Makes an environment; see `Doors`."""
    self.observation_space = observation_space(choices, form, dtype, 'action_mask', 'vector')
    self.action_space = action_space(choices)
    self._choices = choices
    self._form = form
    self._dtype = dtype
    self._stuck_at = stuck_at

  def _draw(self):
    rng = self.np_random
    self._right = [np.arange(n) == rng.integers(n) for n in self._choices]
    self._legal = [right | (rng.random(len(right)) < 0.4) for right in self._right]

  def _observe(self, over):
    masks = [(legal * (not over)).astype(self._dtype) for legal in self._legal]
    if self._t == self._stuck_at:
      masks[-1] *= 0
    mask = {'flat': lambda: np.concatenate(masks), 'rows': lambda: np.stack(masks),
            'tuple': lambda: tuple(masks)}[self._form]()
    return {'hint': np.concatenate(self._right).astype(np.float32), 'action_mask': mask}

  def reset(self, *, seed=None, options=None):
    """Begins an episode."""
    super().reset(seed=seed)
    self._t = 0
    self._draw()
    return self._observe(False), {}

  def step(self, action):
    """Takes an action."""
    assert self.action_space.contains(action)
    chosen = list(zip(np.atleast_1d(action), self._legal, self._right, strict=True))
    fits = all(legal[a] for a, legal, _ in chosen)
    reward = float(np.mean([right[a] for a, _, right in chosen])) if fits else -100.0
    self._t += 1
    over = not fits or self._t == LIMIT
    self._draw()
    return self._observe(over), reward, over, False, {}
