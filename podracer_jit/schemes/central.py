"""Graph of workers that compute gradients, and a central worker that applies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer_jit.learner.sharding import GradientPrograms
from podracer_jit.loops import Port, Worker
from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import Arrival, DoubleBuffer, HandOff, Stamped
from podracer_jit.schemes import wiring
from podracer_jit.schemes.reports import Report
from podracer_jit.schemes.scheme import Graph
from podracer_jit.schemes.wiring import Actor, Begin, Plan
from podracer_jit.types import TrainState


class Share(NamedTuple):
  """Message of a gradient step to the centre; its version is that of the parameters it used."""

  worker: int
  groups: Any  # (grads, terms) by partial sum, [n, ...] each
  collected: float  # mean version of the parameters that made the rollouts
  seen: Mapping[str, Any] | None  # `seen` of Prepared, in an update's last step only


class Central(NamedTuple):
  """State of the centre."""

  train: TrainState
  version: int  # gradient steps made, without unfinished updates of earlier segments
  steps: Mapping[int, list]  # by worker: (results, delays) of each gradient step of its update
  done: int = 0  # updates done in this segment
  ended: bool = False


def wire(plan: Plan, actors: Sequence[Actor], begin: Begin, reports: HandOff):
  """Wires the graph of actors, gradient workers, and the centre that makes the updates.

  The centre answers each gradient with the next parameters, so a worker has at most one gradient
  under way. It sends parameters to actors after the last gradient of a rollout.

  Args:
    plan: of the run.
    actors: of the segment.
    begin: the segment's first state.
    reports: hand-off of the learner's reports.

  Returns:
    The workers, and a function that returns their waiting times.
  """
  place = plan.place
  steps = plan.learner.gradient_steps
  updates = begin.updates

  # If U takes the sum of all gradients, the workers are one program on the mesh of all devices.
  meshes = [place.mesh]
  if plan.scheme.each:
    meshes = [placement.mesh_of([device]) for device in place.workers]
  gradients = plan.learner.gradient_programs(meshes)
  count = len(gradients)
  centre = placement.mesh_of([place.workers[0]])
  version = begin.update * steps
  actors_per_worker = len(actors) // count
  envs_per_worker = plan.num_envs // count

  params = wiring.parameters(plan, actors, begin, version)
  rollouts = [wiring.rollouts_of(i, actor.first_env % envs_per_worker, updates, envs_per_worker,
                                 gradients[i // actors_per_worker].mesh)
              for i, actor in enumerate(actors)]
  answers = [DoubleBuffer(f'parameters for worker {i}', updates * steps, 0,
                          lambda p, to=part.mesh: placement.replicate(p, to))
             for i, part in enumerate(gradients)]
  for handoff in answers:
    handoff.prime(Stamped(begin.state.params, version))

  def to_centre(share: Share) -> Share:
    groups, seen = jax.device_put((share.groups, share.seen), centre.devices.flat[0])
    return share._replace(groups=groups, seen=seen)

  shares = Arrival('gradients', count, to_centre)

  workers = [wiring.actor(plan, i, actor, begin, *ends, updates)
             for i, (actor, *ends) in enumerate(zip(actors, params, rollouts, strict=True))]
  for i, answer in enumerate(answers):
    own_rollouts = rollouts[i * actors_per_worker:(i + 1) * actors_per_worker]
    workers.append(_gradient_worker(plan, gradients, i, begin, own_rollouts, answer, shares))
  state = Central(placement.replicate(begin.state, centre), version, {i: [] for i in range(count)})
  ports = [Port(h) for h in (*params, *answers, reports)]
  # At the segment's end each worker may have begun an update that it does not end, so the centre
  # may fire more often than the segment's updates need.
  learner = Worker('learner', _centre(plan, begin, count, len(actors)), state, [Port(shares)],
                   ports, (updates + count) * steps, lambda carry: carry.ended)
  return [*workers, learner], wiring.waits(params, rollouts, count)


def _gradient_worker(plan: Plan, gradients: Sequence[GradientPrograms], i: int, begin: Begin,
                     rollouts: Sequence[HandOff], answer: HandOff, shares: HandOff) -> Worker:
  """Returns G: gradient worker i, which with the hand-offs that it reads and writes."""
  mesh, prepare, gradient = gradients[i]
  count = len(gradients)
  steps = plan.learner.gradient_steps
  key = placement.replicate(begin.state.key, mesh)

  def fire(carry, *inputs: Stamped):
    k, prepared = carry
    *items, params = inputs
    # The update's number if all workers are equally fast; it seeds the worker's minibatches.
    update = begin.update + k // steps * count + i
    if k % steps == 0:
      wiring.check_lag(plan.scheme, update, begin.update, items, steps)
      batch = placement.gather([item.value for item in items], mesh)
      prepared = prepare(params.value, jax.random.fold_in(key, update), batch)

    with jax.profiler.TraceAnnotation('gradient'):
      groups = gradient(params.value, prepared, k % steps)

    collected = sum(item.version for item in items) / len(items)
    seen = prepared.seen if k % steps == steps - 1 else None
    return (k + 1, prepared), [Stamped(Share(i, groups, collected, seen), params.version)]

  return Worker(f'worker {i}', fire, (0, None), [*[Port(h, steps) for h in rollouts], Port(answer)],
                [Port(shares)], begin.updates * steps)


def _centre(plan: Plan, begin: Begin, workers: int, actors: int) -> Callable:
  """Returns the operation of the centre (U).

  It applies a gradient and answers its worker. With the last gradient of an update it ends the
  update, sends parameters to actors and reports.
  """
  scheme = plan.scheme
  programs = plan.learner.update_programs

  def fire(carry: Central, item: Stamped):
    share = item.value
    train, results = programs.step(carry.train, share.groups)
    delays = (item.version - share.collected, carry.version - item.version)  # CGD, GUD
    steps = [*carry.steps[share.worker], (results, delays)]
    carry = carry._replace(train=train, version=carry.version + 1)

    ended = False
    receivers = []
    report = None
    if share.seen is not None:
      results, delays = zip(*steps, strict=True)
      train, metrics = programs.finish(train, share.seen, list(results))
      cgd, gud = np.mean(delays, axis=0)
      report = Stamped(Report(metrics, 1, (cgd,), (gud,)), carry.version)
      done = carry.done + 1
      ended = begin.ended(train) or done == begin.updates
      carry = carry._replace(train=train, done=done, ended=ended)
      steps = []
      # In `dppo_async` an actor has lag 0 to its own worker, so only that worker's updates send it
      # parameters. In other schemes every update sends them to all actors.
      only_own = scheme.each and scheme.lag is not None
      receivers = [
          i for i in range(actors) if not only_own or i * workers // actors == share.worker]
    carry = carry._replace(steps={**carry.steps, share.worker: steps})

    # After the segment's end nothing waits for parameters.
    fresh = None if ended else Stamped(carry.train.params, carry.version)
    return carry, [*(fresh if i in receivers else None for i in range(actors)),
                   *(fresh if i == share.worker else None for i in range(workers)), report]

  return fire


GRAPH = Graph(wire, separate_updates=True, replay=False)
