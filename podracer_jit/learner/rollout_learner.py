"""The learner from rollouts: it learns from each rollout in one update and then drops it."""

from __future__ import annotations

import functools

from jax.sharding import Mesh

from podracer_jit.learner import rollout_updates, sharding
from podracer_jit.learner.learner import Learner, Parts
from podracer_jit.losses.objective import Objective


class RolloutLearner(Learner):
  """Learner that takes epochs of minibatches from each round of rollouts."""

  def __init__(self, parts: Parts, objective: Objective, sizes: rollout_updates.Sizes,
               exact_reduce: bool):
    """Builds a learner; compiles nothing.

    Args:
      parts: components that every learner needs.
      objective: the algorithm with its network.
      sizes: numbers that the arithmetic of an update depends on.
      exact_reduce: True: gradients are added in one fixed order. False: each device has a single
        group, and XLA's all-reduce adds the gradients.
    """
    super().__init__(parts)
    self.objective = objective
    self.sizes = sizes
    self._gradient_programs: dict[tuple[Mesh, int], sharding.GradientPrograms] = {}
    self.gradient_steps = sizes.num_epochs * sizes.num_minibatches
    # XLA's all-reduce adds one gradient of each device, so each device is one group.
    if not exact_reduce:
      sizes = sizes._replace(num_grad_shards=parts.mesh.size)
    self.learn = rollout_updates.make_learn(
        objective, parts.optimizer, parts.learning_rate, sizes, parts.mesh.size, exact_reduce)

  def mean_cgd(self, behind: float) -> float:
    """Returns the mean CGD of an update, in gradient steps.

    The j-th gradient of an update (from 0) is taken j versions after the first.

    Args:
      behind: see `Learner.mean_cgd`.
    """
    return behind + (self.gradient_steps - 1) / 2

  def gradient_programs(self, meshes: list[Mesh]) -> list[sharding.GradientPrograms]:
    """Returns the programs of workers that compute gradients but no updates.

    Args:
      meshes: one for each worker. The workers have equal numbers of environments. Workers on the
        same mesh share one program.
    """
    return [self.worker_programs(mesh, len(meshes)) for mesh in meshes]

  def worker_programs(self, mesh: Mesh, workers: int) -> sharding.GradientPrograms:
    """Returns the programs of one of `workers` workers; caches them for all segments of a run.

    Args:
      mesh: of the worker.
      workers: of the run.
    """
    key = mesh, workers
    if key not in self._gradient_programs:
      share = self.sizes._replace(num_envs=self.sizes.num_envs // workers,
                                  num_grad_shards=self.sizes.num_grad_shards // workers)
      self._gradient_programs[key] = sharding.gradient_programs(self.objective, share, mesh)
    return self._gradient_programs[key]

  @functools.cached_property
  def update_programs(self) -> sharding.UpdatePrograms:
    """Programs of the central worker that applies the gradients."""
    return sharding.update_programs(self.parts.optimizer, self.parts.learning_rate)
