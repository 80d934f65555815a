"""The state of environments that go on, in the form that checkpoints hold.

This form does not depend on the placement: its first axis counts the vector environments of all
actors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chex
import jax
import numpy as np
from jax.experimental import multihost_utils

from podracer_jit.actor.rollouts import ActorState, EnvState


def gather(actors: Sequence[ActorState]) -> Any:
  """Copies the states of all vector environments to the host; all processes must call it.

  Args:
    actors: states of this process's actors, in order.

  Returns:
    An EnvState of NumPy arrays [num_shards, ...], equal in all processes. PRNG keys are their data.
  """
  envs = jax.device_get([_saved(env) for actor in actors for env in actor.envs])
  stacked = jax.tree.map(lambda *x: np.stack(x), *envs)
  if jax.process_count() > 1:
    # [processes, vector environments of each, ...]; processes are in the order of environments.
    stacked = multihost_utils.process_allgather(stacked)
    stacked = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), stacked)
  return stacked


def pick(kept: Any, index: int, like: EnvState) -> EnvState:
  """Returns the state of one vector environment.

  Args:
    kept: the result of `gather`.
    index: index of the vector environment among all of the run.
    like: a state of the same shapes, to tell which leaves are PRNG keys.
  """
  def leaf(like: jax.Array, x: np.ndarray) -> jax.Array:
    x = jax.numpy.asarray(x[index])
    if _is_key(like):
      x = jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    chex.assert_equal_shape([like, x])
    return x

  # Exploration is that of the config, which may have changed.
  return jax.tree.map(leaf, _without_place(like), kept)._replace(
      env_id=like.env_id, sent=like.sent, exploration=like.exploration)


def shapes(env: EnvState, num_shards: int) -> Any:
  """Returns the shapes of the result of `gather`.

  Args:
    env: the state of any vector environment, or its shapes.
    num_shards: vector environments of all actors.
  """
  def leaf(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_shards, *x.shape), x.dtype)

  return jax.tree.map(leaf, jax.eval_shape(_saved, env))


def _saved(env: EnvState) -> EnvState:
  """Returns the part of a state that is saved."""
  return jax.tree.map(_key_data, _without_place(env))


def _without_place(env: EnvState) -> EnvState:
  """Returns a state without the numbers of its environments and what they were sent last."""
  return env._replace(env_id=None, sent=None)


def _is_key(x: jax.Array) -> bool:
  return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_data(x: jax.Array) -> jax.Array:
  return jax.random.key_data(x) if _is_key(x) else x
