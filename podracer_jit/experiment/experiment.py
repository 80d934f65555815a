"""The config as one frozen, typed object, so that other code needs no string keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from podracer_jit import options
from podracer_jit.agents.networks import TorsoOptions
from podracer_jit.agents.optimizers import Optimizer
from podracer_jit.agents.policies import Policy
from podracer_jit.agents.running_moments import NormaliseOptions
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.experiment.settings import (
  CheckpointOptions,
  EnvOptions,
  EvalOptions,
  LogOptions,
  TrainingOptions,
)
from podracer_jit.losses.algorithm import Algorithm
from podracer_jit.replay.options import ReplayOptions
from podracer_jit.runtime.placement import PlacementOptions
from podracer_jit.schemes.scheme import Scheme


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(TrainingOptions):
  """The contents of a config: the computation, and in `placement` the devices."""

  scheme_name: str
  scheme: Scheme
  env: EnvOptions
  env_options: Mapping[str, Any]  # the task's own
  spec: EnvSpec
  loss_name: str
  algorithm: Algorithm
  network_name: str
  network: nn.Module  # the config's network: a torso, or a policy with its critic
  torso_options: TorsoOptions
  policy_name: str  # the family's, never 'auto'
  policy: Policy
  normalise: NormaliseOptions
  optimizer: Optimizer
  replay: ReplayOptions | None  # of an algorithm that learns from one
  placement: PlacementOptions
  checkpoint: CheckpointOptions
  eval: EvalOptions
  log: LogOptions
  fields: Mapping[str, Any]  # the config as plain values, for files and messages

  def differs(self, name: str) -> bool:
    """Returns whether a field of the top level has another value than by default."""
    return getattr(self, name) != options.defaults(TrainingOptions)[name]

  @property
  def batch_rows(self) -> int:
    """Rows of one update, invalid rows included."""
    return self.env.num_envs * self.unroll_length

  @property
  def keeps_envs(self) -> bool:
    """True if environments go on from one segment to the next, and checkpoints hold their state.

    This needs environments whose state is arrays, and a scheme in which all rollouts are counted.
    """
    return self.spec.is_function and self.deterministic

  @property
  def segment_steps(self) -> int:
    """Steps of each environment in a segment, invalid ones included."""
    return self.checkpoint.every_updates * self.unroll_length

  @property
  def deterministic(self) -> bool:
    """True if the same experiment always gives the same bits."""
    return not self.non_deterministic_setting

  @property
  def non_deterministic_setting(self) -> str:
    """The setting that makes the run non-deterministic, for error messages; '' without one."""
    if self.env_batch:
      return f'env_batch = {self.env_batch}'
    if not self.spec.repeats:
      return f'env.task = {self.env.task}'
    return '' if self.scheme.deterministic else self.scheme_name
