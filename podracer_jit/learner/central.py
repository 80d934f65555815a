"""Updates (U) on one device of a learner, from gradients (G) of all of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from podracer_jit.learner import sharding, updates
from podracer_jit.learner.sharding import GradientPrograms, UpdatePrograms
from podracer_jit.losses.algorithm import Algorithm, Aux
from podracer_jit.numerics.tracing import zeros
from podracer_jit.runtime import placement
from podracer_jit.types import Metrics, Rollout, TrainState


class Central:
  """Updates of a learner whose optimizer is on one device, the centre: the first of the mesh.

  All devices compute gradients, whose sum the centre applies; then it sends the parameters back to
  all devices. A step waits for all gradients, and the next gradients wait for the step. So one
  thread starts all programs, and their order is the same in all processes, as collectives need.

  In the states of this class, `opt_state` is on the centre only, and None in processes that do not
  have it. All else is on the whole mesh.
  """

  def __init__(self, algorithm: Algorithm, gradient_steps: int, workers: GradientPrograms,
               central: UpdatePrograms):
    """Takes the programs; compiles nothing.

    Args:
      algorithm: bound to a task.
      gradient_steps: gradient steps of an update.
      workers: gradients on the mesh of the learner.
      central: steps of the optimizer on the centre.
    """
    self._algorithm = algorithm
    self._gradient_steps = gradient_steps
    self._workers = workers
    self._central = central
    self._mesh = workers.mesh
    self._centre = self._mesh.devices.flat[0]
    self._is_here = self._centre.process_index == jax.process_index()
    self._sharding = NamedSharding(self._mesh, sharding.EVERYWHERE)
    self._update_key = jax.jit(updates.update_key)
    self._copies_of_first = sharding.copies_of_first(self._mesh)
    self._new_optimizer = jax.jit(
        lambda state: algorithm.at(state.steps).optimizer.init(state.params),
        out_shardings=self._sharding)
    self._metrics_like: Metrics | None = None

  def enter(self, state: TrainState) -> TrainState:
    """Returns a state of the whole mesh as `learn` takes it; frees its other `opt_state`."""
    own = placement.replica(state.opt_state, self._centre) if self._is_here else None
    for x in jax.tree.leaves(state.opt_state):
      for shard in x.addressable_shards:
        if shard.device != self._centre:
          shard.data.delete()
    return state._replace(opt_state=own)

  def whole(self, state: TrainState) -> TrainState:
    """Returns a state that has `opt_state` in all processes, which all call this."""
    if jax.process_count() == 1:
      return state
    like = self._new_optimizer(_to_send(state))
    return state._replace(opt_state=self._from_centre(state.opt_state, like))

  def learn(self, state: TrainState, rollout: Rollout) -> tuple[TrainState, Metrics]:
    """Makes an update; all processes call it.

    Args:
      state: before the update; its `opt_state` is donated.
      rollout: [T, B, ...] on the mesh, sharded by environment.

    Returns:
      The next state, and metrics with a leading axis [1] of updates.
    """
    self._in_order(state.params)
    key = self._update_key(TrainState(None, None, state.update, None, state.key))
    prepared = self._workers.prepare(updates.view(state), key, rollout)
    own = None
    if self._is_here:
      # A copy, because steps donate their state, and the one before is needed to send the next.
      own = placement.put_params(_to_send(state), self._centre)
      own = own._replace(opt_state=state.opt_state)

    steps = []
    for step in range(self._gradient_steps):
      if steps:
        state, _ = self._send(own, state)
      with jax.profiler.TraceAnnotation('gradient'):
        sums = self._workers.gradient(updates.view(state), prepared, step)
      with jax.profiler.TraceAnnotation('update'):
        own, result = self._step(own, sums)
      steps.append(result)

    metrics = None
    if own is not None:
      stats = placement.replica(prepared.batch_stats, self._centre)
      own, metrics = self._central.finish(own, stats, steps)
    return self._send(own, state, metrics, self._like_metrics(prepared.batch_stats, steps))

  def _step(self, own: TrainState | None, sums: tuple[Any, Aux]) -> tuple[TrainState | None, Any]:
    """Takes a step of the optimizer on the centre.

    Args:
      own: the state on the centre; None in processes that do not have it.
      sums: (grads, Aux) on the mesh.

    Returns:
      The next `own`, and the Aux and the gradient's norm, of which processes without the centre
      have the shapes.
    """
    self._in_order(sums)
    if own is not None:
      return self._central.step(own, placement.replica(sums, self._centre))
    return None, (sums[1], jax.ShapeDtypeStruct((), jnp.float32))

  def _in_order(self, results: Any) -> None:
    """Waits for the results of a collective before the next one, if there are several processes.

    A device begins a program once its arguments are there. Those of the next collective may be
    there on some devices before this one has begun on others. Those devices would wait in it, with
    the threads that the others need.

    Args:
      results: of the collective, on this process's devices.
    """
    if jax.process_count() > 1:
      jax.block_until_ready(results)

  def _send(self, own: TrainState | None, state: TrainState, metrics: Metrics | None = None,
            like: Metrics | None = None) -> tuple[TrainState, Metrics | None]:
    """Sends the state of the centre to all devices, and metrics to all processes.

    Args:
      own: the state on the centre; None in processes that do not have it.
      state: the state before.
      metrics: on the centre, at the end of an update.
      like: arrays of their shapes on the mesh, if there are several processes.

    Returns:
      The next state, and the metrics.
    """
    values = None if own is None else _to_send(own)
    if jax.process_count() == 1:
      sent = placement.everywhere(values, self._mesh)
    else:
      sent, metrics = self._from_centre(
          None if own is None else (values, metrics), (_to_send(state), like))
    return sent._replace(opt_state=None if own is None else own.opt_state, key=state.key), metrics

  def _from_centre(self, values: Any, like: Any) -> Any:
    """Returns arrays of the centre on the mesh; a collective.

    Args:
      values: on the centre; None in processes that do not have it.
      like: a tree of the same shapes on the mesh, whose values do not count.
    """
    if values is not None:
      # Other devices of this process would begin the collective before, and keep threads that the
      # centre's programs need.
      jax.block_until_ready(values)
      like = placement.with_replica(like, values, self._centre)
    return self._copies_of_first(like)

  def _like_metrics(self, stats: Metrics, steps: Sequence[Any]) -> Metrics | None:
    """Returns arrays of the shapes of an update's metrics on the mesh; None with one process.

    Args:
      stats: of the update's rollout, see `Prepared`.
      steps: what `_step` returned.
    """
    if self._metrics_like is None and jax.process_count() > 1:
      state = self._algorithm.state_shapes._replace(key=None)
      _, shapes = jax.eval_shape(self._central.finish, state, stats, list(steps))
      self._metrics_like = jax.jit(lambda: zeros(shapes), out_shardings=self._sharding)()
    return self._metrics_like


def _to_send(state: TrainState) -> TrainState:
  """Returns the part of a state that all devices have, but for the key, which never changes."""
  return state._replace(opt_state=None, key=None)
