"""Graph of workers that compute gradients, and a central worker that applies each as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer_jit.learner import updates as update_lib
from podracer_jit.loops import Endpoint, Worker
from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import Channel, DoubleBuffer, FifoQueue, Versioned
from podracer_jit.schemes import wiring
from podracer_jit.schemes.gradients import GradientWorker
from podracer_jit.schemes.reports import Report
from podracer_jit.schemes.scheme import Graph
from podracer_jit.schemes.wiring import Actor, Plan, SegmentStart
from podracer_jit.types import TrainState


class GradientMessage(NamedTuple):
  """Message of a gradient step to the centre; carries the version of the parameters it used."""

  worker: int
  sums: Any  # (grads, Aux)
  collected: float  # mean version of the parameters that made the rollouts
  batch_stats: Mapping[str, Any] | None  # `batch_stats` of Prepared, in an update's last step only


class ParameterServerState(NamedTuple):
  """State of the centre."""

  train: TrainState
  version: int  # gradient steps made, without unfinished updates of earlier segments
  steps: Mapping[int, list]  # by worker: (results, delays) of each gradient step of its update
  updates: int = 0  # updates done by this graph
  ends_update: bool = False  # whether the last gradient was the last one of an update


def wire(plan: Plan, actors: Sequence[Actor], start: SegmentStart, reports: Channel):
  """Wires the graph of actors, gradient workers, and the centre that makes the updates.

  The centre answers each gradient with the next parameters, so a worker has at most one gradient
  under way. It sends parameters to actors after the last gradient of a rollout.

  Args:
    plan: the plan of the run.
    actors: the actors of the segment.
    start: where the graph begins.
    reports: channel of the learner's reports.

  Returns:
    The workers, and a function that returns their waiting times.
  """
  place = plan.place
  steps = plan.learner.gradient_steps
  updates = start.updates

  gradients = plan.gradient_workers()
  count = len(gradients)
  centre = placement.mesh_of([place.workers[0]])
  # The version of parameters counts gradient steps.
  version = start.update * steps
  actors_per_worker = len(actors) // count
  envs_per_worker = plan.num_envs // count

  params = wiring.parameters(plan, actors, start, version)
  rollouts = [wiring.rollouts_of(i, updates, gradients[i // actors_per_worker].take_from(
      actor.first_env % envs_per_worker)) for i, actor in enumerate(actors)]
  answers = [DoubleBuffer(f'parameters for worker {i}', updates * steps, 0, worker.receive)
             for i, worker in enumerate(gradients)]
  first = Versioned(update_lib.view(start.state), version)
  for channel in answers:
    channel.prime(first)

  def to_centre(message: GradientMessage) -> GradientMessage:
    sums, batch_stats = placement.put((message.sums, message.batch_stats),
                                      centre.devices.item())
    return message._replace(sums=sums, batch_stats=batch_stats)

  messages = FifoQueue('gradients', count, to_centre)

  workers = [wiring.actor(plan, i, actor, tuple(map(Endpoint, ends)), updates)[0]
             for i, (actor, *ends) in enumerate(zip(actors, params, rollouts, strict=True))]
  for i, answer in enumerate(answers):
    gradients[i].begin(start.state.key, lambda answer=answer: messages.ended or answer.ended)
    own_rollouts = rollouts[i * actors_per_worker:(i + 1) * actors_per_worker]
    reads = [*[Endpoint(channel, steps) for channel in own_rollouts], Endpoint(answer)]
    # The state is the number of gradient steps made, and the prepared batch.
    workers.append(Worker(f'worker {i}', _gradient(plan, gradients, i, start), (0, None), reads,
                          [Endpoint(messages)], updates * steps))
  state = ParameterServerState(placement.replicate(start.state, centre), version,
                               {i: [] for i in range(count)})

  def until(carry: ParameterServerState) -> bool:
    if not carry.ends_update:
      return False
    is_over = start.after(wiring.Position(carry.train, start.update + carry.updates))
    return is_over or carry.updates == updates

  writes = [Endpoint(channel) for channel in (*params, *answers, reports)]
  # At the segment's end each worker may have begun an update that it does not end, so the centre
  # may fire more often than the segment's updates need.
  learner = Worker('learner', _centre(plan, start, count, len(actors)), state, [Endpoint(messages)],
                   writes, (updates + count) * steps, until)
  return [*workers, learner], wiring.waits(params, rollouts, count)


def _gradient(plan: Plan, gradients: Sequence[GradientWorker], i: int, start: SegmentStart
              ) -> Callable:
  """Returns the operation of a worker that computes gradients (G).

  Args:
    plan: the plan of the run.
    gradients: all gradient workers.
    i: index of this worker.
    start: where the graph begins.

  Returns:
    The `fire` of the worker: (state, rollouts and parameters) -> (state, message).
  """
  worker = gradients[i]
  count = len(gradients)
  steps = plan.learner.gradient_steps

  def fire(carry, *inputs: Versioned):
    k, prepared = carry
    *items, view = inputs
    # The update's number if all workers are equally fast; it seeds the worker's minibatches.
    update = start.update + k // steps * count + i
    if k % steps == 0:
      prepared = worker.prepare(view.value, update, [item.value for item in items])

    with jax.profiler.TraceAnnotation('gradient'):
      sums, batch_stats = worker.gradient(view.value, prepared, k % steps)

    collected = sum(item.version for item in items) / len(items)
    message = GradientMessage(i, sums, collected, batch_stats)
    # The last step of an update frees the batch, while the worker waits for the next rollouts.
    return (k + 1, None if batch_stats is not None else prepared), [
        Versioned(message, view.version)]

  return fire


def _centre(plan: Plan, start: SegmentStart, workers: int, actors: int) -> Callable:
  """Returns the operation of the centre (U).

  It applies a gradient and answers its worker. With the last gradient of an update it ends the
  update, sends parameters to actors and reports.

  Args:
    plan: the plan of the run.
    start: where the graph begins.
    workers: number of gradient workers.
    actors: number of actors.

  Returns:
    The `fire` of the worker: (ParameterServerState, message) -> (state, outputs).
  """
  scheme = plan.scheme
  programs = plan.learner.update_programs

  def fire(carry: ParameterServerState, item: Versioned):
    message = item.value
    with jax.profiler.StepTraceAnnotation('update', step_num=start.update + carry.updates + 1):
      train, results = programs.step(carry.train, message.sums)
    delays = (item.version - message.collected, carry.version - item.version)  # CGD, GUD
    steps = [*carry.steps[message.worker], (results, delays)]
    ends_update = message.batch_stats is not None
    carry = carry._replace(train=train, version=carry.version + 1, ends_update=ends_update)

    receivers = []
    report = None
    if ends_update:
      results, delays = zip(*steps, strict=True)
      train, metrics = programs.finish(train, message.batch_stats, list(results))
      cgd, gud = np.mean(delays, axis=0)
      report = Versioned(Report(metrics, 1, (cgd,), (gud,)), carry.version)
      carry = carry._replace(train=train, updates=carry.updates + 1)
      steps = []
      # In `dppo_async` an actor has lag 0 to its own worker, so only that worker's updates send it
      # parameters. In `rapid_async` every update sends them to all actors.
      receivers = [i for i in range(actors)
                   if scheme.lag is None or i * workers // actors == message.worker]
    carry = carry._replace(steps={**carry.steps, message.worker: steps})

    # After the last update nothing waits for parameters.
    if ends_update and carry.updates == start.updates:
      return carry, [None] * (actors + workers) + [report]
    for_actors = Versioned(plan.learner.algorithm.for_actors(carry.train), carry.version)
    for_worker = Versioned(update_lib.view(carry.train), carry.version)
    return carry, [*(for_actors if i in receivers else None for i in range(actors)),
                   *(for_worker if i == message.worker else None for i in range(workers)), report]

  return fire


GRAPH = Graph(wire, wiring.load, separate_updates=True, each=True, replay=False)
