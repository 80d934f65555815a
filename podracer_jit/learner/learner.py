"""Learners: the train state of an algorithm, and the compiled programs that change it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer_jit.learner import sharding
from podracer_jit.learner.central import Central
from podracer_jit.learner.from_replay import FromReplay
from podracer_jit.learner.from_rollouts import FromRollouts
from podracer_jit.numerics import threefry
from podracer_jit.numerics.tracing import zeros
from podracer_jit.replay import buffer
from podracer_jit.replay.rate_limiter import RateLimiter
from podracer_jit.runtime import placement
from podracer_jit.types import Experience, Metrics, Rollout, TrainState


class Keys(NamedTuple):
  """PRNG keys of a run's three independent streams."""

  init: jax.Array  # initial parameters
  learn: jax.Array  # minibatch order, draws from a replay, losses
  act: jax.Array  # actions and exploration; see `keys_for_acting`


def keys_of(seed: int) -> Keys:
  """Returns the keys of a seed, which may be traced."""
  return Keys(*jax.random.split(jax.random.key(seed), 3))


def keys_for_acting(seed: int, salts: Sequence[int], ids: Sequence[int]) -> list[jax.Array]:
  """Returns the PRNG keys of vector environments, without a program that must be compiled.

  They are those of Threefry, whichever generator JAX uses.

  Args:
    seed: of the run.
    salts: what `Keys.act` is folded with, in order.
    ids: of the vector environments, with each of which the result is folded.
  """
  key = np.array([0, seed], np.uint32)
  # A split is a fold with the index.
  for salt in (Keys._fields.index('act'), *salts):
    (key,) = threefry.fold_in(key, [salt])
  return [jax.random.wrap_key_data(key, impl='threefry2x32')
          for key in threefry.fold_in(key, ids)]


class Learner:
  """Map from a train state and a round of experience to the next train state.

  `learn` is the function of one device of the mesh, for use inside a larger program. `program` is
  the compiled function of the whole mesh.
  """

  def __init__(self, source: FromRollouts | FromReplay, mesh: Mesh):
    """Builds a learner; compiles nothing.

    Args:
      source: functions of an update, seen from one device of the mesh.
      mesh: the mesh of the learner.
    """
    self.source = source
    self.algorithm = source.algorithm
    self.mesh = mesh
    self.gradient_steps = source.gradient_steps  # in an update
    # (state, experience of this device's environments) -> (state, metrics)
    self.learn: Callable[[TrainState, Any], tuple[TrainState, Metrics]] = source.learn

  @functools.cached_property
  def program(self) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """Jitted `learn` on the whole mesh; it donates the state."""
    return sharding.whole_update(self.source, self.mesh)

  def initial_state(self, seed: int) -> TrainState:
    """Returns the train state before the first update, on the mesh and without a replay.

    `allocate` adds the replay.
    """
    # Jitted, so that the seed is data: all seeds share one program in the cache.
    return placement.replicate(self._compiled_first_state(seed), self.mesh)

  @functools.cached_property
  def _compiled_first_state(self) -> Callable[[int], TrainState]:
    def first_state(seed):
      keys = keys_of(seed)
      return self.algorithm.first_state(keys.init, keys.learn)
    return jax.jit(first_state)

  def state_shapes(self) -> TrainState:
    """Returns the shapes of `initial_state`; allocates nothing."""
    return self.algorithm.state_shapes

  def allocate(self, state: TrainState) -> TrainState:
    """Returns the state with an empty replay, if the learner needs one and it has none."""
    if jax.tree.leaves(state.replay) or self.replay_shapes() is None:
      return state
    # With out_shardings each device allocates only what it has of a replay.
    shardings = jax.tree.map(lambda x: x.sharding, self.replay_shapes())
    return state._replace(replay=jax.jit(self._empty, out_shardings=shardings)())

  def replay_shapes(self) -> Any | None:
    """Returns the shapes and shardings of the replay, for restoring it; None without a replay."""
    def sharded(spec: PartitionSpec, tree: Any) -> Any:
      sharding = NamedSharding(self.mesh, spec)
      return jax.tree.map(
          lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    shapes = jax.eval_shape(self._empty)
    return None if shapes is None else jax.tree.map(sharded, self.source.replay_specs, shapes)

  def _empty(self) -> Any | None:
    """Returns an empty replay, or None."""

  def mean_cgd(self, behind: float) -> float:
    """Returns the mean collection-to-gradient delay (CGD) of an update, in gradient steps.

    CGD is defined in NAPPO (2007.02622, section 3). The j-th gradient of an update (from 0) is
    taken j versions after the first.

    Args:
      behind: gradient steps between the parameters that made the rollouts and the parameters of the
        update's first gradient.
    """
    return behind + (self.gradient_steps - 1) / 2


class RolloutLearner(Learner):
  """Learner from rollouts, whose gradients and updates may be separate programs."""

  source: FromRollouts

  def __init__(self, source: FromRollouts, mesh: Mesh, like: Rollout | None = None):
    """Builds a learner; compiles nothing.

    Args:
      source: functions of an update, seen from one device of the mesh.
      mesh: the mesh of the learner.
      like: shapes of one group's rollout, [T, B, ...]; needed for an auxiliary phase.
    """
    super().__init__(source, mesh)
    self._like = like
    self._gradient_programs: dict[tuple[Mesh, int], sharding.GradientPrograms] = {}

  def gradient_programs(self, mesh: Mesh, workers: int) -> sharding.GradientPrograms:
    """Returns the programs of a worker that computes gradients but no updates.

    They are kept for all segments of a run, and for all workers on the mesh.

    Args:
      mesh: of the worker.
      workers: number of the run's workers, which have equal numbers of environments.
    """
    key = mesh, workers
    if key not in self._gradient_programs:
      groups = self.source.groups
      share = groups._replace(count=groups.count // workers, mesh_size=mesh.size, exact=True)
      self._gradient_programs[key] = sharding.gradient_programs(self.source.seen_from(share), mesh)
    return self._gradient_programs[key]

  @functools.cached_property
  def _kept(self) -> Any:
    return self.source.kept(self._like) if self.source.auxiliary else None

  def _empty(self) -> Any | None:
    """Returns rollouts without valid rows, if an auxiliary phase learns from several; or None."""
    return zeros(self._kept)

  @functools.cached_property
  def update_programs(self) -> sharding.UpdatePrograms:
    """Programs of the device that applies the gradients of others."""
    return sharding.update_programs(self.algorithm)

  @functools.cached_property
  def central(self) -> Central:
    """Updates on one device of the mesh, from gradients of all."""
    workers = self.gradient_programs(self.mesh, 1)
    return Central(self.algorithm, self.gradient_steps, workers, self.update_programs)


class ReplayLearner(Learner):
  """Learner from a replay, which is a part of its train state."""

  source: FromReplay

  def __init__(self, source: FromReplay, mesh: Mesh, like: Experience):
    """Builds a learner; compiles nothing.

    Args:
      source: functions of an update, seen from one device of the mesh.
      mesh: the mesh of the learner.
      like: arrays or shapes of one block's experience, [T, B, ...].
    """
    super().__init__(source, mesh)
    self._like = like

  def _empty(self) -> buffer.State:
    return self.source.store.init(self._like)

  def mean_cgd(self, behind: float) -> float:
    """Returns `behind`; the age of the sampled items adds to it and is in the metrics."""
    return behind

  @functools.cached_property
  def programs(self) -> sharding.ReplayPrograms:
    """Separate programs for adding and for learning, if rollouts arrive at a rate of their own."""
    return sharding.replay_programs(self.source, self.mesh)

  def rate_limiter(self, rows: int, actors: int) -> RateLimiter:
    """Returns the rate limiter that ties acting and learning together.

    Args:
      rows: valid and invalid rows that one round of all actors makes.
      actors: number of actors.
    """
    options = self.source.options
    ratio = options.samples_per_insert * options.copies / self.algorithm.items().period
    # Without a ratio actors never wait for gradient steps: as many rollouts may wait to be added
    # as the replay would keep.
    waiting = actors
    if not ratio:
      store = self.source.store
      waiting = max(actors, -(-store.capacity // store.round) * actors)
    return RateLimiter(ratio, options.tolerance, options.gradient_steps * options.batch_size,
                       rows // actors, waiting)
