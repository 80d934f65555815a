"""The learner from a replay; the replay is a part of its train state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from podracer_jit.learner import replay_updates, rollout_updates, sharding
from podracer_jit.learner.learner import Learner, Parts
from podracer_jit.losses.algorithm import ReplayAlgorithm
from podracer_jit.numerics.deterministic import AXIS
from podracer_jit.replay import buffer
from podracer_jit.replay.options import ReplayOptions
from podracer_jit.replay.rate_limiter import RateLimiter
from podracer_jit.types import Experience, Params, Target, TrainState


class ReplayLearner(Learner):
  """Learner that adds experience to a replay and takes gradient steps on batches drawn from it."""

  def __init__(self, parts: Parts, algorithm: ReplayAlgorithm, options: ReplayOptions,
               memory: buffer.Replay, like: Experience, sizes: replay_updates.Sizes,
               exact_reduce: bool):
    """Builds a learner; compiles nothing.

    Args:
      parts: components that every learner needs.
      algorithm: defines the loss of transitions.
      options: the options of the replay.
      memory: functions of the replay of each group of environments.
      like: arrays or shapes of one group's experience, [T, B, ...].
      sizes: numbers that the arithmetic of an update depends on.
      exact_reduce: True: gradients are added in one fixed order; False: by XLA's all-reduce.
    """
    super().__init__(parts)
    self.options = options
    self.sizes = sizes
    self.gradient_steps = options.gradient_steps
    self.memory = memory
    self._like = like
    mesh_size = parts.mesh.size

    update = rollout_updates.make_update(parts.optimizer, parts.learning_rate)
    self._insert = replay_updates.make_insert(memory, sizes, mesh_size)
    self._steps = replay_updates.make_steps(
        functools.partial(algorithm.loss, parts.network), memory, update, sizes, mesh_size,
        exact_reduce)
    self._finish = replay_updates.make_finish(sizes, parts.learning_rate, mesh_size)
    self.learn = replay_updates.make_learn(self._insert, self._steps, self._finish, sizes,
                                           mesh_size)

  def _initial_target(self, params: Params) -> Target:
    return Target(params, jnp.int32(0))

  def allocate(self, state: TrainState) -> TrainState:
    """Returns the state with an empty replay if it has none."""
    if jax.tree.leaves(state.replay):
      return state
    # With out_shardings each device allocates its own groups only.
    return state._replace(replay=jax.jit(self._empty, out_shardings=self._sharding)())

  def replay_shapes(self) -> Any:
    """Returns the shapes and shardings of the replay."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self._sharding),
        jax.eval_shape(self._empty))

  def _empty(self) -> buffer.State:
    return self.memory.init(self.sizes.num_grad_shards, self._like)

  @property
  def _sharding(self) -> NamedSharding:
    """Sharding of the replay: each group is on the device that owns it."""
    return NamedSharding(self.parts.mesh, PartitionSpec(AXIS))

  def mean_cgd(self, behind: float) -> float:
    """Returns `behind`; the age of the sampled transitions adds to it and is in the metrics.

    Args:
      behind: see `Learner.mean_cgd`.
    """
    return behind

  @functools.cached_property
  def programs(self) -> sharding.ReplayPrograms:
    """Separate programs for adding and for learning, if rollouts arrive at a rate of their own."""
    return sharding.replay_programs(self._insert, self._steps, self._finish, self.sizes,
                                    self.parts.mesh)

  def rate_limiter(self, rows: int, actors: int) -> RateLimiter:
    """Returns the rate limiter that ties acting and learning together.

    Args:
      rows: valid and invalid rows that one round of all actors makes.
      actors: number of actors.
    """
    options = self.options
    return RateLimiter(options.samples_per_insert, options.tolerance,
                       options.gradient_steps * options.batch_size, rows // actors, actors)
