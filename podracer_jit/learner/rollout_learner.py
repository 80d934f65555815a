"""The learner from rollouts: each is learned from once it is made, then dropped."""

from __future__ import annotations

import functools

from jax.sharding import Mesh

from podracer_jit.learner import rollout_updates, sharding
from podracer_jit.learner.learner import Learner, Parts
from podracer_jit.losses.objective import Objective


class RolloutLearner(Learner):
  """Learns by epochs of minibatches of each round of rollouts."""

  def __init__(self, parts: Parts, objective: Objective, sizes: rollout_updates.Sizes,
               exact_reduce: bool):
    """Makes a learner; compiles nothing.

    Args:
      parts: what every learner is made of.
      objective: the algorithm with its network.
      sizes: of the experiment.
      exact_reduce: whether gradients are added in one fixed order; else what a device has is one
        group, and XLA's all-reduce adds them.
    """
    super().__init__(parts)
    self.objective = objective
    self.sizes = sizes
    self._gradient_programs: dict[tuple[Mesh, int], sharding.GradientPrograms] = {}
    self.gradient_steps = sizes.num_epochs * sizes.num_minibatches
    if not exact_reduce:
      sizes = sizes._replace(num_grad_shards=parts.mesh.size)
    self.learn = rollout_updates.make_learn(
        objective, parts.optimizer, parts.learning_rate, sizes, parts.mesh.size, exact_reduce)

  def mean_cgd(self, behind: float) -> float:
    """See `Learner.mean_cgd`: the j-th gradient is taken j versions after the first."""
    return behind + (self.gradient_steps - 1) / 2

  def gradient_programs(self, meshes: list[Mesh]) -> list[sharding.GradientPrograms]:
    """Returns the programs of workers that make gradients and leave updates to others.

    Args:
      meshes: of each worker; the environments are shared out evenly between them, but workers on
        one and the same device have a program together.
    """
    return [self._gradient_programs_of(mesh, len(meshes)) for mesh in meshes]

  def _gradient_programs_of(self, mesh: Mesh, workers: int) -> sharding.GradientPrograms:
    """The programs of one of so many workers, made once for all segments of a run."""
    key = mesh, workers
    if key not in self._gradient_programs:
      share = self.sizes._replace(num_envs=self.sizes.num_envs // workers,
                                  num_grad_shards=self.sizes.num_grad_shards // workers)
      self._gradient_programs[key] = sharding.gradient_programs(self.objective, share, mesh)
    return self._gradient_programs[key]

  @functools.cached_property
  def update_programs(self) -> sharding.UpdatePrograms:
    """The programs of whoever applies the gradients."""
    return sharding.update_programs(self.parts.optimizer, self.parts.learning_rate)
