"""An algorithm with its network: the pure functions that gradients are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from podracer_jit.agents.networks import Model
from podracer_jit.losses.algorithm import RolloutAlgorithm
from podracer_jit.losses.minibatches import Minibatch, Unit
from podracer_jit.types import Metrics, Params, Rollout


class Objective(NamedTuple):
  """What a learner optimises."""

  algorithm: RolloutAlgorithm
  model: Model
  unroll_length: int

  @property
  def unit(self) -> Unit:
    """What its minibatches are made of."""
    return self.algorithm.minibatch_unit(self.model.recurrent)

  @property
  def elements_per_env(self) -> int:
    """Elements of minibatches that one environment's rollout holds."""
    return self.unit.elements(self.unroll_length)

  @property
  def rows_per_element(self) -> int:
    """Rows of the network for one element."""
    return self.unit.network_rows(self.unroll_length)

  def target_inputs(self, rollout: Rollout) -> Rollout:
    """See `RolloutAlgorithm.target_inputs`."""
    return self.algorithm.target_inputs(rollout, self.model.recurrent)

  def targets(self, params: Params, rollout: Rollout) -> Any:
    """See `RolloutAlgorithm.targets`."""
    return self.algorithm.targets(self.model, params, rollout)

  def batch_statistics(self, valid: jax.Array, targets: Any) -> Any:
    """See `RolloutAlgorithm.batch_statistics`."""
    return self.algorithm.batch_statistics(valid, targets)

  def loss(self, params: Params, minibatch: Minibatch, statistics: Any
           ) -> tuple[jax.Array, Metrics]:
    """See `RolloutAlgorithm.loss`."""
    return self.algorithm.loss(self.model, params, minibatch, statistics)
