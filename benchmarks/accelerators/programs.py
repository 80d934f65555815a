"""The programs of a config, lowered for devices that are not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export as jax_export
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks.compiled import launches
from podracer_jit.actor.rollouts import sent_by
from podracer_jit.experiment import build, schema
from podracer_jit.experiment.config_dict import plain
from podracer_jit.experiment.flags import load_config
from podracer_jit.experiment.resolve import resolve
from podracer_jit.learner import sharding, updates
from podracer_jit.learner.from_rollouts import concatenate
from podracer_jit.play import export
from podracer_jit.play.evaluation import Player
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
    # Vector environments are alike, so each device has the same program.
    vector_envs = actor.rollout_program.vector_envs
    self._rollout = acting.rollout(vector_envs)
    self._rollout_of_device = acting.rollout(vector_envs[:len(vector_envs) // len(devices)])
    self._parts = (self._learner.algorithm.for_actors, self._rollout_of_device,
                   self._learner.learn, 4)

  @property
  def are_functions(self) -> bool:
    """Whether environments are JAX functions."""
    return self._run.experiment.spec.is_function

  @property
  def has_replay(self) -> bool:
    """Whether the learner draws from a replay."""
    return self._run.experiment.replay is not None

  def rollout(self) -> jax.stages.Lowered:
    """Returns the actor's program."""
    given = self._learner.algorithm.for_actors(self._learner.state_shapes())
    return jax.jit(self._rollout, donate_argnums=1).lower(
        _on(given, self._device), _on(self._actor.state, self._device))

  def learner(self) -> jax.stages.Lowered:
    """Returns the program of an update."""
    return self._learner.program.lower(self._state(), self._batch())

  def fused(self) -> jax.stages.Lowered:
    """Returns the program of several updates, rollouts included.

    On several devices the environments must be JAX functions, in as many shards or more.
    """
    state = self._state()
    acting = self._actor.state
    if self._mesh.size == 1:
      program = sharding.make_fused(*self._parts, sent_by)
      acting = _on(acting, self._device)
      state = _on(state, self._device)
    else:
      envs = acting.envs[:len(acting.envs) // self._mesh.size]
      program = sharding.fused_program(self._learner.source, self._rollout_of_device, 4,
                                       self._mesh)
      acting = jax.tree.map(
          lambda x: jax.ShapeDtypeStruct((self._mesh.size, *x.shape), x.dtype,
                                         sharding=NamedSharding(self._mesh, sharding.BY_DEVICE)),
          acting._replace(envs=envs))
    return jax.jit(program, donate_argnums=(0, 1)).lower(state, acting, 4, state.steps)

  def seeds(self, count: int) -> jax.stages.Lowered:
    """Returns the program of several seeds, on one device."""
    program = sharding.make_fused(*self._parts)
    state, acting = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype,
                                                    sharding=self._device), tree)
        for tree in (self._state(), self._actor.state))
    steps = _on(self._learner.state_shapes().steps, self._device)
    return jax.jit(jax.vmap(program, in_axes=(0, 0, None, None)), donate_argnums=(0, 1)).lower(
        state, acting, 4, steps)

  def gradients(self) -> list[jax.stages.Lowered]:
    """Returns the two programs of workers that compute gradients, and the two of updates."""
    workers = self._learner.gradient_programs(self._mesh, 1)
    whole = NamedSharding(self._mesh, PartitionSpec())
    view = _on(updates.view(self._learner.state_shapes()), whole)
    arguments = view, _on(jax.eval_shape(jax.random.key, 0), whole), self._batch()
    prepared = jax.eval_shape(workers.prepare, *arguments)
    gradient = view, prepared, np.int32(0)
    sums = _on(jax.eval_shape(workers.gradient, *gradient), self._device)
    state = _on(self._learner.state_shapes(), self._device)
    central = self._learner.update_programs
    _, step = jax.eval_shape(central.step, state, sums)
    return [workers.prepare.lower(*arguments), workers.gradient.lower(*gradient),
            central.step.lower(state, sums),
            central.finish.lower(state, _on(prepared.batch_stats, self._device),
                                 [_on(step, self._device)] * self._learner.gradient_steps)]

  def exported(self, rows: int) -> list[jax.stages.Lowered]:
    """Returns the two programs of an exported agent, for so many observations."""
    experiment = self._run.experiment
    algorithm = experiment.algorithm
    params = algorithm.acting(self._run.initial_state())
    player = Player(experiment.spec, experiment.env_options, algorithm, params, jax.devices()[0],
                    1, 0, 0)
    files = export.files(player, experiment, None)
    lowered = []
    for name in export.PROGRAMS.values():
      program = jax_export.deserialize(bytearray(files[name]))
      arguments, _ = jax.tree.unflatten(program.in_tree, [
          # The number of rows is a symbol.
          jax.ShapeDtypeStruct([n if isinstance(n, int) else rows for n in x.shape], x.dtype,
                               sharding=self._device) for x in program.in_avals])
      lowered.append(jax.jit(program.call).lower(*arguments))
    return lowered

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

  Args:
    name: of the config; after a space the task, if it is not the config's own.

  Raises:
    ValueError: there is no such config.
  """
  name, _, task = name.partition(' ')
  config = plain(load_config(name))
  if task:
    config['env']['task'] = task
  config['placement'] |= dict(auto=False, actor_devices=(0,), learner_devices=(0,))
  if config['microbatch_rows'] == schema.OPEN:
    config['microbatch_rows'] = 0  # as on a machine with accelerators
  return config


def launches_of(config: Mapping[str, Any], devices: Sequence[jax.Device]) -> dict[str, float]:
  """Returns the kernels of each program of a training.

  Args:
    config: as nested dicts.
    devices: GPUs that learn; the first one acts, too.

  Returns:
    By name: 'step' of all environments, with the policy; 'update'; for JAX functions 'both', a
    rollout and its update as one program; with a replay 'insert', which adds a rollout to it, and
    'learn', a gradient step on items that are drawn from it.
  """
  with of(config, devices) as programs:
    lowered = dict(step=programs.rollout, update=programs.learner)
    if programs.are_functions:
      lowered |= dict(both=programs.fused)
    if programs.has_replay:
      lowered |= dict(insert=programs.insert, learn=programs.draw)
    kernels = {name: launches(lower().compile().as_text()) for name, lower in lowered.items()}
  kernels['step'] /= config['unroll_length']
  return kernels


def _on(tree: Any, where: jax.sharding.Sharding) -> Any:
  """Returns the shapes of arrays, on devices."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
                      if hasattr(x, 'shape') else x, tree)
