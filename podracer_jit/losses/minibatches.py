"""Elements of minibatches: single rows, or the whole rollouts of environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from podracer_jit.envs import frames
from podracer_jit.types import Rollout

Minibatch = tuple[Rollout, Any]  # (rollout, targets)


class Unit(NamedTuple):
  """Kind of element that minibatches consist of. Elements are numbered within each group."""

  elements: Callable[[int], int]  # unroll length -> number of elements of one environment
  network_rows: Callable[[int], int]  # unroll length -> network input rows of one element
  # (rollout, targets, first environment of the group, environments of the group, elements [n])
  #   -> minibatch
  gather: Callable[[Rollout, Any, jax.Array, int, jax.Array], Minibatch]


def _gather_environments(rollout: Rollout, targets: Any, first_env: jax.Array, group_envs: int,
                         elements: jax.Array) -> Minibatch:
  """Returns [T, n, ...] of the rollout and its targets; an element is an environment."""
  chex.assert_rank(elements, 1)
  del group_envs
  return jax.tree.map(lambda x: jnp.take(x, first_env + elements, axis=1), (rollout, targets))


def _gather_rows(rollout: Rollout, targets: Any, first_env: jax.Array, group_envs: int,
                 elements: jax.Array) -> Minibatch:
  """Returns [1, n, ...] of the rollout and its targets; an element is a row.

  Rows are numbered step by step, and within a step environment by environment.
  """
  chex.assert_rank(elements, 1)
  step = elements // group_envs
  env = first_env + elements % group_envs
  # Observations may be `Frames`, which plain indexing cannot read.
  obs = frames.pick(rollout.obs, step, env)[None]
  rollout, targets = jax.tree.map(lambda x: x[step, env][None],
                                  (rollout._replace(obs=()), targets))
  return rollout._replace(obs=obs), targets


ENVIRONMENTS = Unit(lambda unroll_length: 1, lambda unroll_length: unroll_length + 1,
                    _gather_environments)
ROWS = Unit(lambda unroll_length: unroll_length, lambda unroll_length: 1, _gather_rows)
