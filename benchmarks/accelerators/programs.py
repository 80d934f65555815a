"""The programs of a config, lowered for devices that are not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks.compiled import launches
from podracer_jit.actor.rollouts import sent_by
from podracer_jit.experiment import build, schema
from podracer_jit.experiment.config_dict import plain
from podracer_jit.experiment.flags import load_config
from podracer_jit.experiment.resolve import resolve
from podracer_jit.learner import sharding
from podracer_jit.learner.from_rollouts import concatenate
from podracer_jit.runtime import placement


class Programs:
  """The programs of a run, for one device that acts and a mesh that learns."""

  def __init__(self, run: build.Run, actor: Any, devices: Sequence[jax.Device]):
    """Makes the learner of a mesh.

    Args:
      run: a run on a CPU.
      actor: its only actor.
      devices: of the mesh; the first one acts, too.
    """
    self._run = run
    self._actor = actor
    self._device = SingleDeviceSharding(devices[0])
    self._mesh = Mesh(np.array(devices), ('learner',))
    self._learner = build.make_learner(run.experiment, self._mesh)
    acting = build.make_acting(run.experiment, devices[0].platform)
    self._rollout = acting.rollout(actor.rollout_program.vector_envs)

  def rollout(self) -> jax.stages.Lowered:
    """Returns the actor's program."""
    given = self._learner.algorithm.for_actors(self._learner.state_shapes())
    return jax.jit(self._rollout, donate_argnums=1).lower(
        _on(given, self._device), _on(self._actor.state, self._device))

  def learner(self) -> jax.stages.Lowered:
    """Returns the program of an update."""
    return self._learner.program.lower(self._state(), self._batch())

  def fused(self) -> jax.stages.Lowered:
    """Returns the program of several updates, rollouts included, on a mesh of one device."""
    program = sharding.make_fused(
        self._learner.algorithm.for_actors, self._rollout, self._learner.learn, 4, sent_by)
    state = _on(self._state(), self._device)
    return jax.jit(program, donate_argnums=(0, 1)).lower(
        state, _on(self._actor.state, self._device), 4, state.steps)

  def insert(self) -> jax.stages.Lowered:
    """Returns the program that adds experience to a replay."""
    return self._learner.programs.insert.lower(self._state(), self._batch(), np.int32(0))

  def draw(self) -> jax.stages.Lowered:
    """Returns the program that learns from a replay."""
    whole = NamedSharding(self._mesh, PartitionSpec())
    counts = _on((jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((2,), np.uint32)), whole)
    return self._learner.programs.learn.lower(self._state(), np.int32(1), *counts)

  def _state(self) -> Any:
    state = _on(self._learner.state_shapes(), NamedSharding(self._mesh, PartitionSpec()))
    return state._replace(replay=self._learner.replay_shapes())

  def _batch(self) -> Any:
    given = self._learner.algorithm.for_actors(self._learner.state_shapes())
    shapes = jax.eval_shape(lambda *args: concatenate(self._rollout(*args)[1]), given,
                            self._actor.state)
    return placement.batch_shapes(shapes, self._run.experiment.env.num_envs, self._mesh)


@contextlib.contextmanager
def of(config: Mapping[str, Any], devices: Sequence[jax.Device]) -> Iterator[Programs]:
  """Yields the programs of a config, given as nested dicts."""
  run = build.make_run(resolve(config))
  actor = build.make_actor(run, 0, range(run.experiment.num_shards), jax.devices()[0])
  try:
    yield Programs(run, actor, devices)
  finally:
    for vector_env in actor.rollout_program.vector_envs:
      vector_env.close()


def shipped(name: str) -> dict[str, Any]:
  """Returns a shipped config as nested dicts, on one device.

  Raises:
    ValueError: there is no such config.
  """
  config = plain(load_config(name))
  config['placement'] |= dict(auto=False, actor_devices=(0,), learner_devices=(0,))
  if config['microbatch_rows'] == schema.OPEN:
    config['microbatch_rows'] = 0  # as on a machine with accelerators
  return config


def launches_of(config: Mapping[str, Any], devices: Sequence[jax.Device]) -> tuple[float, float]:
  """Returns the kernels of a step of all environments, and of an update.

  Args:
    config: as nested dicts.
    devices: GPUs that learn; the first one acts, too.
  """
  with of(config, devices) as programs:
    rollout, update = (launches(lowered.compile().as_text())
                       for lowered in (programs.rollout(), programs.learner()))
  return rollout / config['unroll_length'], update


def _on(tree: Any, where: jax.sharding.Sharding) -> Any:
  """Returns the shapes of arrays, on devices."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
                      if hasattr(x, 'shape') else x, tree)
