"""Elements of minibatches: single rows, or the whole rollouts of environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax

from podracer_jit.envs import frames
from podracer_jit.numerics import indexing
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
  """Gathers a minibatch whose elements are the environments of a group; see `Unit.gather`.

  Args:
    rollout: [T, B, ...], of all groups of a device.
    targets: [T, B] each.
    first_env: [] i32, index of the group's first environment in the rollout.
    group_envs: unused.
    elements: [n] i32, environments of the group.

  Returns:
    The rollout and targets, [T, n, ...].
  """
  chex.assert_rank(elements, 1)
  del group_envs
  envs = first_env + elements
  return jax.tree.map(lambda x: indexing.read(x, slice(None), envs), (rollout, targets))


def _gather_rows(rollout: Rollout, targets: Any, first_env: jax.Array, group_envs: int,
                 elements: jax.Array) -> Minibatch:
  """Gathers a minibatch whose elements are the rows of a group; see `Unit.gather`.

  Rows are numbered step by step, and within a step environment by environment.

  Args:
    rollout: [T, B, ...], of all groups of a device.
    targets: [T, B] each.
    first_env: [] i32, index of the group's first environment in the rollout.
    group_envs: environments of a group.
    elements: [n] i32, rows of the group.

  Returns:
    The rollout and targets, [1, n, ...].
  """
  chex.assert_rank(elements, 1)
  step, env = indexing.divide(elements, group_envs)
  env += first_env
  # Observations may be `Frames`.
  obs = frames.pick(rollout.obs, step, env)[None]
  rollout, targets = jax.tree.map(lambda x: indexing.read(x, step, env)[None],
                                  (rollout._replace(obs=None), targets))
  return rollout._replace(obs=obs), targets


ENVIRONMENTS = Unit(lambda unroll_length: 1, lambda unroll_length: unroll_length + 1,
                    _gather_environments)
ROWS = Unit(lambda unroll_length: unroll_length, lambda unroll_length: 1, _gather_rows)
