"""Objectives: an algorithm with its network, as pure functions for the learner."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from podracer_jit.agents.networks import Model
from podracer_jit.losses.algorithm import RolloutAlgorithm
from podracer_jit.losses.minibatches import Minibatch, Unit
from podracer_jit.types import Metrics, Params, Rollout


class Objective(NamedTuple):
  """Objective of a learner: an algorithm bound to a network and an unroll length."""

  algorithm: RolloutAlgorithm
  model: Model
  unroll_length: int  # T

  @property
  def unit(self) -> Unit:
    """Kind of elements in its minibatches."""
    return self.algorithm.minibatch_unit(self.model.recurrent)

  @property
  def elements_per_env(self) -> int:
    """Number of minibatch elements in one environment's rollout."""
    return self.unit.elements(self.unroll_length)

  @property
  def rows_per_element(self) -> int:
    """Number of network input rows for one element."""
    return self.unit.network_rows(self.unroll_length)

  def target_inputs(self, rollout: Rollout) -> Rollout:
    """Returns the part of a rollout that `targets` reads; see `RolloutAlgorithm`."""
    return self.algorithm.target_inputs(rollout, self.model.recurrent)

  def targets(self, params: Params, rollout: Rollout) -> Any:
    """Returns targets [T, N] of one group; see `RolloutAlgorithm`."""
    return self.algorithm.targets(self.model, params, rollout)

  def batch_statistics(self, valid: jax.Array, targets: Any) -> Any:
    """Returns statistics of a whole minibatch; see `RolloutAlgorithm`."""
    return self.algorithm.batch_statistics(valid, targets)

  def loss(self, params: Params, minibatch: Minibatch, statistics: Any
           ) -> tuple[jax.Array, Metrics]:
    """Returns the loss and sums of loss terms; see `RolloutAlgorithm`."""
    return self.algorithm.loss(self.model, params, minibatch, statistics)
