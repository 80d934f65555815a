"""Interface of algorithms: options, requirements and losses.

An algorithm is one frozen dataclass in one file. Its fields are its options (`options.option`), its
class attributes declare its requirements, and its methods are pure functions. No other code refers
to an algorithm by name, so a user's algorithm, given as `module:Class`, equals a shipped one.

T is the unroll length, N a number of environments or transitions.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit.agents import kinds
from podracer_jit.agents.networks import Model
from podracer_jit.envs import frames
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.losses.minibatches import ENVIRONMENTS, Unit
from podracer_jit.options import INT32_MAX, option
from podracer_jit.types import Metrics, Params, Rollout, Transition

MAX_N_STEP = 256  # a program has operations for each step


@dataclasses.dataclass(frozen=True)
class Algorithm(abc.ABC):
  """Base class of algorithms that learn from rollouts or from a replay."""

  network_kind: ClassVar[kinds.Kind] = kinds.ACTOR_CRITIC
  learns_from_replay: ClassVar[bool]
  measures_kl: ClassVar[bool] = False  # its loss terms include 'approx_kl'
  normalises_values: ClassVar[bool] = False  # it supports the option normalise.value

  discount: float = option(0.99, 'discount of future rewards', at_least=0, at_most=1)

  def problems(self) -> Iterator[str]:
    """Yields problems of the combination of options, one line each."""
    yield from ()

  def heads(self, spec: EnvSpec) -> Mapping[str, nn.Module]:
    """Returns auxiliary heads of the network by name; by default none.

    A head is a flax module (features [N, F], action [N, ...]) -> [N, ...]. Its parameters are
    trained with the network's, and `unroll_with_heads` gives its outputs to the loss. Acting does
    not compute it.

    Args:
      spec: of the task.
    """
    del spec
    return {}


@dataclasses.dataclass(frozen=True)
class RolloutAlgorithm(Algorithm):
  """Base class of algorithms that learn from a rollout in one update and then drop it.

  A minibatch is (rollout, targets) of some environments [T, N, ...] or of some rows [1, N, ...];
  `minibatch_unit` decides which. Each method is compiled as an island (`numerics.islands`): by
  itself, with shapes that do not depend on how many groups share a device. So a method needs no
  care about rounding.
  """

  learns_from_replay: ClassVar[bool] = False
  shuffles: ClassVar[bool] = False  # each epoch shuffles the elements of its minibatches

  def minibatch_unit(self, recurrent: bool) -> Unit:
    """Returns the elements of minibatches: `minibatches.ENVIRONMENTS` or `minibatches.ROWS`."""
    del recurrent
    return ENVIRONMENTS

  def note_about_minibatches(self, rows: int) -> str:
    """Returns what it does otherwise with minibatches of so few rows in all groups; '' if nothing.

    Args:
      rows: of a minibatch, invalid ones included.
    """
    del rows
    return ''

  def target_inputs(self, rollout: Rollout, recurrent: bool) -> Rollout:
    """Returns the part of a rollout that `targets` reads: by default the last observations only.

    Fewer stacks of frames must then be rebuilt.
    """
    del recurrent
    return rollout._replace(obs=frames.last(rollout.obs))

  def targets(self, model: Model, params: Params, rollout: Rollout) -> Any:
    """Returns targets [T, N] of one group, computed once in an update; by default none.

    Args:
      model: the network.
      params: the parameters at the beginning of the update.
      rollout: the group's rollout, as `target_inputs` returns it.
    """
    del model, params, rollout
    return None

  def batch_statistics(self, valid: jax.Array, targets: Any) -> Any:
    """Returns statistics of a whole minibatch, for example its number of valid rows.

    By default it returns no statistics, None.

    Args:
      valid: [groups, T, N] bool, the minibatch's rows in all groups.
      targets: [groups, T, N] each, the results of `targets` for the same rows.
    """
    del valid, targets
    return None

  @abc.abstractmethod
  def loss(self, model: Model, params: Params, minibatch: tuple[Rollout, Any], statistics: Any
           ) -> tuple[jax.Array, Metrics]:
    """Returns the loss of a part of a minibatch, and sums of terms over its valid rows.

    Args:
      model: the network.
      params: the parameters to differentiate.
      minibatch: (rollout, targets), a part of one group's share of the minibatch.
      statistics: the result of `batch_statistics`.

    Returns:
      The scalar loss, scaled so that the minibatch's loss is the sum over all parts and groups; and
      scalar sums to report, of which 'valid' is the number of valid rows.
    """


@dataclasses.dataclass(frozen=True)
class ReplayAlgorithm(Algorithm):
  """Base class of algorithms that learn from a replay's transitions, with a target network."""

  learns_from_replay: ClassVar[bool] = True
  network_kind: ClassVar[kinds.Kind] = kinds.DUELING

  n_step: int = option(3, 'steps of a return before it is bootstrapped', at_least=1,
                       at_most=MAX_N_STEP)
  target_every: int = option(2500, 'gradient steps between copies to the target network',
                             at_least=1, at_most=INT32_MAX)

  @abc.abstractmethod
  def exploration(self, num_envs: int) -> np.ndarray:
    """Returns each environment's amount of exploration [num_envs] f32, for `Policy.explore`."""

  @abc.abstractmethod
  def loss(self, network: nn.Module, params: Params, target_params: Params, batch: Transition,
           weight: jax.Array) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
    """Returns the loss of a batch, its loss terms and its TD errors; see `weighted_loss`.

    Args:
      network: the flax module.
      params: the parameters to differentiate.
      target_params: parameters of the target network.
      batch: transitions [N, ...].
      weight: [N] f32, importance weights.

    Returns:
      The scalar loss, and (sums of loss terms over the transitions, |TD error| [N]). The loss term
      'valid' is the number of transitions.
    """


def unroll(model: Model, params: Params, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
  """Applies the network to all rows of a rollout.

  A recurrent network starts from the state that the rollout carries.

  Returns:
    dist_params [T + 1, N, K] and value [T + 1, N].

  Raises:
    ValueError: the rollout is a minibatch of rows.
  """
  obs = _whole_obs('unroll', rollout)
  # The rollout's state has a leading axis [1], so that all its arrays can be cut by environment.
  state = jax.tree.map(lambda x: x[0], rollout.recurrent_state)
  # The network takes T + 1 masks. The last one affects only the recurrent state after the last
  # row, which is dropped.
  valid = jnp.concatenate([rollout.valid, rollout.valid[-1:]])
  return model.apply(params, obs, state, valid)[:2]


def _whole_obs(function: str, rollout: Rollout) -> jax.Array:
  """Returns the observations [T + 1, N, ...] of a rollout of whole environments.

  A minibatch of rows has one observation for each row, and none after it. A loss that treats it as
  a rollout would drop its only row.

  Args:
    function: the name of the function that needs them, for the message.
    rollout: [T, N, ...].

  Raises:
    ValueError: the rollout is a minibatch of rows.
  """
  chex.assert_rank(rollout.valid, 2)
  obs = frames.stacks(rollout.obs)
  if len(obs) != len(rollout.valid) + 1:
    raise ValueError(
        f'{function} needs minibatches of environments, with T + 1 observations of T rows; it got '
        f'{len(obs)} of {len(rollout.valid)}, as minibatches of rows have. Let minibatch_unit '
        'return minibatches.ENVIRONMENTS, which is its default; or keep the rows, and call '
        'model.apply(params, rollout.obs, None, rollout.valid) in place of ' + function)
  return obs


def unroll_with_heads(model: Model, params: Params, rollout: Rollout
                      ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
  """Applies the network, with its auxiliary heads, to all rows of a rollout.

  Returns:
    dist_params [T + 1, N, K] and value [T + 1, N] as `unroll` does, and the outputs of the heads on
    each row's observation and action by name, [T, N, ...].

  Raises:
    ValueError: the rollout is a minibatch of rows.
  """
  obs = _whole_obs('unroll_with_heads', rollout)
  state = jax.tree.map(lambda x: x[0], rollout.recurrent_state)
  # As in `unroll`, the last row has no mask of its own, and it has no action; its heads are cut.
  valid, action = (jnp.concatenate([x, x[-1:]]) for x in (rollout.valid, rollout.action))
  dist_params, value, _, heads = model.apply(params, obs, state, valid, action)
  return dist_params, value, jax.tree.map(lambda x: x[:-1], heads)


def weighted_loss(error: jax.Array, weight: jax.Array, loss_terms: Metrics
                  ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
  """Returns half the sum of squared TD errors, weighted by importance.

  Args:
    error: [N] f32, TD errors; the gradient flows through them.
    weight: [N] f32, importance weights.
    loss_terms: [N] each, further terms to report.

  Returns:
    The results of `ReplayAlgorithm.loss`.
  """
  chex.assert_rank(error, 1)
  chex.assert_equal_shape([error, weight, *loss_terms.values()])
  # |TD error| becomes the transition's priority, which must not be differentiated.
  abs_td_error = jnp.abs(lax.stop_gradient(error))
  losses = 0.5 * weight * jnp.square(error)
  loss_terms = loss_terms | dict(loss=losses, abs_td_error=abs_td_error, importance_weight=weight,
                                 valid=jnp.ones_like(abs_td_error))
  return jnp.sum(losses), (jax.tree.map(jnp.sum, loss_terms), abs_td_error)
