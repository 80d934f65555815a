"""Graphs of actors and a learner in separate programs, possibly on separate devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from podracer_jit.loops import Endpoint, Worker
from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import Channel, FifoQueue, Versioned
from podracer_jit.schemes import wiring
from podracer_jit.schemes.reports import Report
from podracer_jit.schemes.scheme import Graph
from podracer_jit.schemes.wiring import Actor, Plan, SegmentStart
from podracer_jit.types import TrainState


class State(NamedTuple):
  """State of the learner."""

  train: TrainState
  update: int  # a copy of `train.update` on the host, which needs no transfer


def wire_in_order(plan: Plan, actors: Sequence[Actor], start: SegmentStart, reports: Channel):
  """Wires the graph in which an update takes one rollout of each actor, in order.

  Args:
    plan: the plan of the run.
    actors: the actors of the segment.
    start: where the graph begins.
    reports: channel of the learner's reports.

  Returns:
    The workers, and a function that returns their waiting times.
  """
  queues = [
      wiring.rollouts_of(i, start.updates, lambda r, first_env=actor.first_env: placement.scatter(
          r, first_env, plan.num_envs, plan.place.mesh))
      for i, actor in enumerate(actors)]
  return _wire(plan, actors, start, reports, queues, lambda values: values)


def wire_as_they_come(plan: Plan, actors: Sequence[Actor], start: SegmentStart, reports: Channel):
  """Wires the graph in which an update takes rollouts as they arrive, from any actors.

  Args:
    plan: the plan of the run.
    actors: the actors of the segment.
    start: where the graph begins.
    reports: channel of the learner's reports.

  Returns:
    The workers, and a function that returns their waiting times.
  """
  # All actors put their rollouts into one queue.
  queues: list[Channel] = [FifoQueue('rollouts', len(actors))] * len(actors)

  def scatter(values: Sequence[Any]) -> list[Any]:
    # The place in the batch follows the order of arrival, not the actor.
    return [placement.scatter(x, i * plan.num_envs // len(values), plan.num_envs, plan.place.mesh)
            for i, x in enumerate(values)]

  return _wire(plan, actors, start, reports, queues, scatter)


def _wire(plan: Plan, actors: Sequence[Actor], start: SegmentStart, reports: Channel,
          queues: Sequence[Channel], scatter: Callable):
  """Wires a graph of actors and a learner.

  Args:
    plan: the plan of the run.
    actors: the actors of the segment.
    start: where the graph begins.
    reports: channel of the learner's reports.
    queues: channel of each actor's rollouts, one for all actors or one for each.
    scatter: sends the values taken from `queues` to the devices of the learner.

  Returns:
    The workers, and a function that returns their waiting times.
  """
  params = wiring.parameters(plan, actors, start, start.update)
  # Of each actor. If actors share a queue, one of them may make the rollouts of all.
  most_rollouts = start.updates * queues.count(queues[0])
  start = start._replace(before=None)  # the channels have it
  first = start.state
  learn = plan.learner.program
  is_central = plan.scheme.graph.separate_updates
  if is_central:
    first = plan.learner.central.enter(first)
    learn = plan.learner.central.learn

  def fire(carry: State, *items: Versioned):
    update = carry.update
    wiring.check_lag(plan.scheme, update, start.first, items)

    values = scatter([item.value for item in items])
    with jax.profiler.StepTraceAnnotation('learn', step_num=update + 1):
      batch = placement.gather(values, plan.place.mesh)
      state, metrics = learn(carry.train, batch)

    behind = sum(update - item.version for item in items) / len(items)
    cgd = plan.learner.mean_cgd(behind * plan.learner.gradient_steps)
    new_params = Versioned(plan.learner.algorithm.for_actors(state), update + 1)
    report = Versioned(Report(metrics, 1, (cgd,), (0.0,)), update + 1)
    return State(state, update + 1), [*[new_params] * len(params), report]

  workers, states = zip(
      *(wiring.actor(plan, i, actor, tuple(map(Endpoint, ends)), most_rollouts)
        for i, (actor, *ends) in enumerate(zip(actors, params, queues, strict=True))), strict=True)

  def until(carry: State) -> bool:
    position = wiring.Position(carry.train, carry.update)
    return start.after(wiring.with_actors(plan, start, position, states,
                                          lambda: params[0].recent(carry.update - 1)))

  def begin() -> None:
    """Compiles the learner's program while the actors make the first rollouts."""
    shapes = actors[0].experience_shapes()
    if shapes is not None and not is_central:
      batch = placement.batch_shapes(shapes[0], plan.num_envs, plan.place.mesh)
      plan.learner.program.lower(start.state, batch).compile()

  learner = Worker('learner', fire, State(first, start.update),
                   [Endpoint(channel) for channel in queues],
                   [Endpoint(channel) for channel in (*params, reports)], start.updates, until,
                   begin)
  return [*workers, learner], wiring.waits(params, queues)


IN_ORDER = Graph(wire_in_order, wiring.load, several_processes=True)
APART = Graph(wire_in_order, wiring.load, separate_updates=True, several_processes=True,
              replay=False)
AS_THEY_COME = Graph(wire_as_they_come, wiring.load, replay=False)
