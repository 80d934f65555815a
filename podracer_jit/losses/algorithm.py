"""What an algorithm declares, and all that the machinery asks of it.

An algorithm is one frozen dataclass in one file. Its fields are its options (`options.option`), its
class attributes say what it needs, and its methods are pure functions. Nothing else in the package
knows an algorithm by name: a user's own, given as `module:Class`, is as good as a shipped one.

T is the unroll length, N a number of environments or transitions.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit.agents import kinds
from podracer_jit.agents.networks import Model
from podracer_jit.envs import frames
from podracer_jit.losses.minibatches import ENVIRONMENTS, Unit
from podracer_jit.options import INT32_MAX, option
from podracer_jit.types import Metrics, Params, Rollout, Transition

MAX_N_STEP = 256  # programs have an operation for each step


@dataclasses.dataclass(frozen=True)
class Algorithm(abc.ABC):
  """What algorithms of both kinds declare."""

  network_kind: ClassVar[kinds.Kind] = kinds.ACTOR_CRITIC
  learns_from_replay: ClassVar[bool]
  measures_kl: ClassVar[bool] = False  # its loss terms have approx_kl
  normalises_values: ClassVar[bool] = False  # it supports normalise.value

  discount: float = option(0.99, 'discount of future rewards', at_least=0, at_most=1)

  def problems(self) -> Iterator[str]:
    """Yields what is wrong with the options together, in a line each."""
    yield from ()


@dataclasses.dataclass(frozen=True)
class RolloutAlgorithm(Algorithm):
  """An algorithm that learns from each rollout once it is made, and then drops it.

  A minibatch is (rollout, targets) of some environments or rows, as `minibatch_unit` says: arrays
  [T, N, ...], or [1, N, ...] of rows. Each method is an island (`numerics.islands`): it is compiled
  by itself, in shapes that do not depend on how many groups share a device, so no method has to
  think of rounding.
  """

  learns_from_replay: ClassVar[bool] = False
  shuffles: ClassVar[bool] = False  # an epoch draws its minibatches at random

  def minibatch_unit(self, recurrent: bool) -> Unit:
    """Returns what minibatches are made of: `minibatches.ENVIRONMENTS` or `minibatches.ROWS`."""
    del recurrent
    return ENVIRONMENTS

  def target_inputs(self, rollout: Rollout, recurrent: bool) -> Rollout:
    """Returns what `targets` needs of a rollout: by default the last observations only.

    Fewer frames are then put together for it.
    """
    del recurrent
    return rollout._replace(obs=frames.last(rollout.obs))

  def targets(self, model: Model, params: Params, rollout: Rollout) -> Any:
    """Returns targets [T, N] of a group, once an update; by default none.

    Args:
      model: the network.
      params: those that the update begins with.
      rollout: of one group, with the observations that `target_inputs` leaves.
    """
    del model, params, rollout
    return ()

  def batch_statistics(self, valid: jax.Array, targets: Any) -> Any:
    """Returns what all rows of a minibatch share, such as their number; by default nothing.

    Args:
      valid: [groups, T, N] bool, of the minibatches of all groups.
      targets: of `targets`, likewise.
    """
    del valid, targets
    return ()

  @abc.abstractmethod
  def loss(self, model: Model, params: Params, minibatch: tuple[Rollout, Any], statistics: Any
           ) -> tuple[jax.Array, Metrics]:
    """Returns the loss to descend, and sums of terms over valid rows.

    Args:
      model: the network.
      params: the parameters to differentiate.
      minibatch: a piece of one group's.
      statistics: of `batch_statistics`.

    Returns:
      The scalar loss, summed so that the losses of pieces and groups add up; and scalar sums to
      show, of which 'valid' counts the valid rows.
    """


@dataclasses.dataclass(frozen=True)
class ReplayAlgorithm(Algorithm):
  """An algorithm that learns from transitions drawn from a replay, with a target network."""

  learns_from_replay: ClassVar[bool] = True
  network_kind: ClassVar[kinds.Kind] = kinds.DUELING

  n_step: int = option(3, 'steps of a return before it is bootstrapped', at_least=1,
                       at_most=MAX_N_STEP)
  target_every: int = option(2500, 'gradient steps between copies to the target network',
                             at_least=1, at_most=INT32_MAX)

  @abc.abstractmethod
  def exploration(self, num_envs: int) -> np.ndarray:
    """Returns how much each environment explores, [num_envs] f32, as the policy takes it."""

  @abc.abstractmethod
  def loss(self, network: nn.Module, params: Params, target_params: Params, batch: Transition,
           weight: jax.Array) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
    """Returns the loss to descend, its terms and the TD errors; see `weighted_loss`.

    Args:
      network: the flax module.
      params: the parameters to differentiate.
      target_params: those of the target network.
      batch: transitions [N, ...].
      weight: [N], importance weights.

    Returns:
      The scalar loss, and (sums of terms over the transitions, |TD error| [N]). 'valid' counts
      the transitions.
    """


def unroll(model: Model, params: Params, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
  """The network on all rows of a rollout: dist [T + 1, N, K] and value [T + 1, N].

  A recurrent network goes on from the state that the rollout carries.
  """
  state = jax.tree.map(lambda x: x[0], rollout.core)
  # The recurrent state after the last row is never asked for.
  valid = jnp.concatenate([rollout.valid, rollout.valid[-1:]])
  return model.apply(params, frames.stacks(rollout.obs), state, valid)[:2]


def weighted_loss(error: jax.Array, weight: jax.Array, terms: Metrics
                  ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
  """Half the squared TD errors by importance, as `ReplayAlgorithm.loss` returns them.

  Args:
    error: [N], TD errors; the gradient goes through them.
    weight: [N].
    terms: [N] each, more to show.
  """
  size = jnp.abs(lax.stop_gradient(error))
  each = 0.5 * weight * jnp.square(error)
  terms = terms | dict(loss=each, abs_td_error=size, importance_weight=weight,
                       valid=jnp.ones_like(size))
  return jnp.sum(each), (jax.tree.map(jnp.sum, terms), size)
