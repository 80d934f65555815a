"""Workers of gradients (G) on devices of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from podracer_jit.learner.learner import RolloutLearner
from podracer_jit.learner.sharding import GradientPrograms
from podracer_jit.runtime import placement


class GradientWorker(Protocol):
  """Interface of what computes the gradients of one worker, wherever that is."""

  def receive(self, view: Any) -> Any:
    """Sends `updates.view` of a state to the worker; returns it as the other methods take it."""

  def take_from(self, first_env: int) -> Callable[[Any], Any]:
    """Returns what sends the rollouts of an actor to the worker.

    Args:
      first_env: index of the actor's first environment among those of the worker.
    """

  def begin(self, key: jax.Array, ended: Callable[[], bool]) -> None:
    """Begins a segment.

    Args:
      key: PRNG key of the run.
      ended: whether the segment has ended.
    """

  def prepare(self, view: Any, update: int, rollouts: Sequence[Any]) -> Any:
    """Returns what the gradient steps of an update need.

    Args:
      view: of the state at the beginning of the update.
      update: its number, which seeds its minibatches.
      rollouts: of the worker's actors, in order.
    """

  def gradient(self, view: Any, prepared: Any, step: int) -> tuple[Any, Any]:
    """Takes a gradient step.

    Returns:
      (grads, Aux), and with the last step of an update the `batch_stats` of Prepared; else None.
    """


class LocalGradients:
  """A worker on a device of this process."""

  def __init__(self, programs: GradientPrograms, num_envs: int, steps: int):
    """Creates a worker.

    Args:
      programs: compiled for the worker's mesh.
      num_envs: environments of the worker.
      steps: gradient steps of an update.
    """
    self._programs = programs
    self._num_envs = num_envs
    self._steps = steps
    self._key: jax.Array | None = None

  def receive(self, view: Any) -> Any:
    """See `GradientWorker`."""
    return placement.put_params(view, self._programs.mesh.devices.item())

  def take_from(self, first_env: int) -> Callable[[Any], Any]:
    """See `GradientWorker`."""
    return lambda r: placement.scatter(r, first_env, self._num_envs, self._programs.mesh)

  def begin(self, key: jax.Array, ended: Callable[[], bool]) -> None:
    """See `GradientWorker`."""
    del ended
    self._key = placement.replicate(key, self._programs.mesh)

  def prepare(self, view: Any, update: int, rollouts: Sequence[Any]) -> Any:
    """See `GradientWorker`."""
    batch = placement.gather(rollouts, self._programs.mesh)
    return self._programs.prepare(view, jax.random.fold_in(self._key, update), batch)

  def gradient(self, view: Any, prepared: Any, step: int) -> tuple[Any, Any]:
    """See `GradientWorker`."""
    sums = self._programs.gradient(view, prepared, step)
    return sums, prepared.batch_stats if step == self._steps - 1 else None


def on_devices(learner: RolloutLearner, place: placement.Placement) -> list[GradientWorker]:
  """Returns a gradient worker for each of the learner's devices, with programs of its own."""
  groups = learner.source.groups
  num_envs = groups.count * groups.envs
  meshes = [placement.mesh_of([device]) for device in place.workers]
  return [LocalGradients(learner.gradient_programs(mesh, len(meshes)), num_envs // len(meshes),
                         learner.gradient_steps) for mesh in meshes]
