"""Acting and gradients in a process of a cluster: all of it follows from a config and a number."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer_jit import parts
from podracer_jit.cluster.process import fetch
from podracer_jit.errors import EnvironmentFailed, environment_failure
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import resolve
from podracer_jit.learner import sharding
from podracer_jit.runtime import host, placement

# The folder of the user's modules in the code that is sent to processes.
BESIDE = 'beside'


class Role(NamedTuple):
  """The part of a process in a run."""

  actor: int = 0  # number of the process's actor
  actors: int = 1  # actors of the run
  workers: int = 1  # gradient workers of the run
  pools: int = 1  # vector environments that share the cores of the process
  config_files: tuple[str, ...] = ()  # names of config files, which may register environments


class Service:
  """R and G of a process. A segment begins with the first call for it."""

  def __init__(self, fields: Mapping[str, Any], role: Role, life: int):
    """Builds all but environments and programs.

    Args:
      fields: the config as plain values, with the placement of the whole run.
      role: the part of this process in the run.
      life: the number of processes before this one that had its part and died. Each life has
        random numbers of its own.
    """
    warnings.filterwarnings('ignore', module='gymnasium')  # about bounds that we do not use
    parts.look_beside(Path(BESIDE) / 'config.py')
    for name in role.config_files:
      parts.look_beside(Path(BESIDE) / name)
    self._role = role
    self._life = life
    whole = resolve(fields)
    options = whole.placement
    own_options = dataclasses.replace(options, actor_devices=(0,), learner_devices=(0,),
                                      actors_per_device=1, cluster='none')
    host.prepare_host(own_options)
    device = jax.local_devices(backend=None if options.actor_gpus else 'cpu')[0]
    threads = options.env_threads or max(1, int(options.actor_cpus) // role.pools)
    place = placement.Placement((device,), placement.mesh_of([device]), (device,), threads)
    self._run = build.make_run(dataclasses.replace(whole, placement=own_options),
                               place=place)
    self._device = device
    self._segment: int | None = None
    self._envs = contextlib.ExitStack()
    self._program: Any = None
    self._state: Any = None
    self._prepared: tuple[int, Any] | None = None
    self._gradients: sharding.GradientPrograms | None = None

  def rollout(self, segment: int, params: Any) -> tuple[int, Any]:
    """Makes a rollout.

    Args:
      segment: the index of the segment. The first call for a segment starts its environments.
      params: the parameters of the network, arrays.

    Returns:
      The bytes of the experience, and the experience as NumPy arrays.
    """
    with _one_line_failures():
      params = jax.device_put(params, self._device)
      if segment != self._segment:
        self._begin(segment, params)
      self._state, experience = self._program(params, self._state)
      return _as_numpy(experience)

  def _begin(self, segment: int, params: Any) -> None:
    """Starts the environments of a segment, and compiles their program."""
    self._program = self._state = None
    self._envs.close()
    run = self._run
    ids = build.shards_of(run.experiment, self._role.actor, self._role.actors)
    actor = build.make_actor(run, segment, ids, self._device, self._envs, life=self._life)
    rollout = run.acting.rollout(actor.rollout_program.vector_envs)
    self._program = actor.rollout_program.load(rollout, (params, actor.state), donate=(1,),
                                               kept=run.kept_programs)
    self._state = actor.state
    self._segment = segment

  def gradient(self, params: Any, update: int, step: int, key: np.ndarray,
               references: Sequence[Any]) -> tuple[int, Any]:
    """Takes a gradient step of an update.

    Args:
      params: the parameters of the network, arrays.
      update: the number of the update.
      step: the number of the gradient step in the update, from 0.
      key: data of the run's PRNG key.
      references: references to the parameters at the beginning of the update, and to the experience
        of each of the worker's actors.

    Returns:
      The bytes of the answer, and the answer of `GradientWorker.gradient`; None in its place if
      experience was lost with its machine.
    """
    programs = self._gradients = self._gradients or self._run.learner.worker_programs(
        self._run.place.mesh, self._role.workers)
    if self._prepared is None or self._prepared[0] != update or step == 0:
      values = fetch(references)
      if values is None:
        return 0, None
      first, *rollouts = values
      batch = placement.gather([placement.scatter(
          [each for rollout in rollouts for each in rollout], 0,
          self._run.experiment.env.num_envs // self._role.workers, programs.mesh)], programs.mesh)
      run_key = jax.random.fold_in(jax.random.wrap_key_data(key), update)
      self._prepared = update, programs.prepare(
          *placement.everywhere((first, run_key), programs.mesh), batch)
    prepared = self._prepared[1]
    groups = programs.gradient(placement.everywhere(params, programs.mesh), prepared, step)
    last = step == self._run.learner.gradient_steps - 1
    return _as_numpy((groups, prepared.batch_stats if last else None))


def _as_numpy(tree: Any) -> tuple[int, Any]:
  """Returns the bytes of a tree's arrays, and the tree with NumPy arrays."""
  tree = jax.tree.map(np.asarray, jax.block_until_ready(tree))
  return sum(x.nbytes for x in jax.tree.leaves(tree)), tree


@contextlib.contextmanager
def _one_line_failures():
  """Shortens the errors of environments to the line that says what went wrong."""
  try:
    yield
  except Exception as error:
    words = environment_failure(error)
    if words:
      raise EnvironmentFailed(words) from None
    raise
