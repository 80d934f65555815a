"""What minibatches are made of: rows, or whole environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer_jit.envs import frames
from podracer_jit.types import Rollout

Minibatch = tuple[Rollout, Any]  # with its targets


class Unit(NamedTuple):
  """The smallest thing that a minibatch is made of; its elements are counted group by group."""

  elements: Callable[[int], int]  # unroll length -> elements of one environment's rollout
  network_rows: Callable[[int], int]  # unroll length -> rows of the network for one element
  # (rollout, targets, first environment of the group, its size, elements [n]) -> minibatch
  gather: Callable[[Rollout, Any, jax.Array, int, jax.Array], Minibatch]


def _gather_environments(rollout: Rollout, targets: Any, first_env: jax.Array, group_envs: int,
                         elements: jax.Array) -> Minibatch:
  """Elements are environments: [T, n, ...] of each."""
  del group_envs
  return jax.tree.map(lambda x: jnp.take(x, first_env + elements, axis=1), (rollout, targets))


def _gather_rows(rollout: Rollout, targets: Any, first_env: jax.Array, group_envs: int,
                 elements: jax.Array) -> Minibatch:
  """Elements are rows, counted environment by environment within a step: [1, n, ...] of them."""
  step, env = elements // group_envs, first_env + elements % group_envs
  obs = frames.pick(rollout.obs, step, env)[None]
  rollout, targets = jax.tree.map(lambda x: x[step, env][None],
                                  (rollout._replace(obs=()), targets))
  return rollout._replace(obs=obs), targets


ENVIRONMENTS = Unit(lambda unroll_length: 1, lambda unroll_length: unroll_length + 1,
                    _gather_environments)
ROWS = Unit(lambda unroll_length: unroll_length, lambda unroll_length: 1, _gather_rows)
