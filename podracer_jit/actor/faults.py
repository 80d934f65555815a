"""Values of environments that nothing can be learned from: NaN, infinity, none of their space.

An observation whose mask (`agents.action_masks`) allows no action is among them, unless it is the
last one of an episode.

A rollout notes the first one of each environment, in `types.Episodes.fault`. The note goes with
the episodes to the thread that writes metrics. So a run ends in the update in which the value came,
with every scheme and every kind of environment.
"""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.envs.frames import Observations
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.numerics import indexing
from podracer_jit.types import Episodes

_NONE, _OBSERVATION, _REWARD, _MASK = range(4)
_VALUES = ('outside of its space', 'nan', 'inf', '-inf')


def without_end(obs: jax.Array, terminated: jax.Array) -> jax.Array:
  """Returns observations in which the last ones of terminated episodes are finite.

  Nothing is learned from such an observation. But losses and targets mask it by products, and 0
  times NaN is NaN. So zeros replace its numbers that are not finite; all others keep their bits.

  Args:
    obs: [B, ...], the observations after a step.
    terminated: [B] bool.
  """
  chex.assert_equal_shape_prefix([obs, terminated], 1)
  if not jnp.issubdtype(obs.dtype, jnp.floating):
    return obs
  terminated = terminated.reshape(terminated.shape + (1,) * (obs.ndim - 1))
  return jnp.where(terminated & ~jnp.isfinite(obs), jnp.zeros((), obs.dtype), obs)


def find(obs: Observations, reward: jax.Array, episode_return: jax.Array, env_id: jax.Array,
         one_hots: Sequence[slice] = (), stuck: jax.Array | None = None) -> jax.Array:
  """Returns the first fault in each environment's rows of a rollout.

  Args:
    obs: [T + 1, B, ...], or frames.
    reward: [T, B] f32.
    episode_return: [T, B] f32; a sum that overflows is a fault of the reward.
    env_id: [B] i32, the environments.
    one_hots: places of one-hots in flat observations; a number outside of its space has made zeros.
    stuck: [T + 1, B, elements of an action] bool, the mask allows no choice of an element; None: no
      mask.

  Returns:
    [1, B, 5] i32: what has the fault, the kind of its value, row, element, environment. The row is
    that of the step which returned the value; -1 for the observation before the first step.
  """
  chex.assert_equal_shape([reward, episode_return])
  num_envs = reward.shape[1]
  envs = jnp.arange(num_envs)
  # Entry t + 1 has the results of step t, and entry 0 the observation before the first step.
  returned = jnp.where(jnp.isfinite(reward), episode_return, reward)
  returned = jnp.pad(returned, ((1, 0), (0, 0)))
  wrong_reward = ~jnp.isfinite(returned)
  wrong_obs = _wrong(obs, one_hots)
  wrong = wrong_reward
  for elements in (wrong_obs, stuck):
    if elements is not None:
      wrong |= jnp.any(elements, axis=-1)
  entry = jnp.argmax(wrong, axis=0)

  what = jnp.full(num_envs, _REWARD, jnp.int32)
  value = indexing.read(returned, entry, envs)
  element = jnp.zeros(num_envs, jnp.int32)
  if wrong_obs is not None:
    elements = indexing.read(wrong_obs, entry, envs)
    in_obs = jnp.any(elements, axis=-1)
    element = jnp.argmax(elements, axis=-1)
    what = jnp.where(in_obs, _OBSERVATION, what)
    number = indexing.read(_flat(obs), entry, envs, element)
    value = jnp.where(in_obs, number.astype(jnp.float32), value)
  if stuck is not None:
    elements = indexing.read(stuck, entry, envs)
    in_mask = jnp.any(elements, axis=-1) & (what != _OBSERVATION)
    element = jnp.where(in_mask, jnp.argmax(elements, axis=-1), element)
    what = jnp.where(in_mask, _MASK, what)
  what = jnp.where(jnp.any(wrong, axis=0), what, _NONE)
  kind = jnp.select([jnp.isnan(value), jnp.isposinf(value), jnp.isneginf(value)], [1, 2, 3], 0)
  return jnp.stack([what, kind, entry - 1, element, env_id], axis=-1).astype(jnp.int32)[None]


def _flat(obs: jax.Array) -> jax.Array:
  """Returns observations [T + 1, B, ...] as [T + 1, B, D]."""
  return obs.reshape(*obs.shape[:2], -1)


def _wrong(obs: Observations, one_hots: Sequence[slice]) -> jax.Array | None:
  """Returns the wrong elements of observations, [T + 1, B, D] bool; None if none can be wrong.

  The first element of a one-hot stands for all of it.
  """
  if not isinstance(obs, jax.Array):
    return None  # frames, which are bytes
  flat = _flat(obs)
  wrong = None
  if jnp.issubdtype(obs.dtype, jnp.floating):
    wrong = ~jnp.isfinite(flat)
  for place in one_hots:
    if wrong is None:
      wrong = jnp.zeros(flat.shape, bool)
    wrong = wrong.at[..., place.start].set(~jnp.any(flat[..., place] != 0, axis=-1))
  return wrong


def envs(episodes: Episodes) -> np.ndarray:
  """Returns the index of each column's environment among all of the run, [B].

  Args:
    episodes: of one update, NumPy arrays, in which `find` has looked for faults.
  """
  return episodes.fault[0, :, 4]


def describe(episodes: Episodes, spec: EnvSpec) -> tuple[int, str] | None:
  """Returns the environment of the first fault, and a sentence about the fault; None without any.

  Args:
    episodes: of one update, NumPy arrays.
    spec: of the task.
  """
  if episodes.fault is None or not np.any(episodes.fault[..., 0]):
    return None
  columns = np.flatnonzero(episodes.fault[0, :, 0])
  column = min(columns, key=lambda column: episodes.fault[0, column, 2])
  what, kind, row, element, env_id = (int(x) for x in episodes.fault[0, column])
  # Rows of a reset do not count as steps.
  step = int(episodes.length[row, column]) if row >= 0 else 0
  call = f'step {step} of an episode' if step else 'a reset'
  if what == _MASK:
    choice = f'choice of element {element} of an action' if spec.action_choices else 'action'
    return env_id, (f'the mask {spec.action_mask.name} (env.action_mask) that {call} returned '
                    f'allows no {choice}')
  where = f'the observation{_place(element, spec)}' if what == _OBSERVATION else 'the reward'
  return env_id, f'{where} that {call} returned is {_VALUES[kind]}'


def _place(element: int, spec: EnvSpec) -> str:
  """Returns the place of an element in an observation, such as ' [3]' or ' speed [0, 1]'."""
  for part in spec.parts:
    if part.start <= element < part.start + part.size:
      index = np.unravel_index(element - part.start, part.shape)
      return f' {part.name}' + _index(index)
  return _index(np.unravel_index(element, spec.obs_shape))


def _index(index: Sequence[int]) -> str:
  return f' [{", ".join(map(str, map(int, index)))}]' if len(index) else ''
