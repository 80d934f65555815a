"""Graph of one program that alternates rollouts and updates, without Python between (Anakin)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from podracer_jit.actor.rollouts import ActorState
from podracer_jit.learner import rollout_updates
from podracer_jit.loops import Endpoint, Worker
from podracer_jit.runtime.channels import Channel, Versioned
from podracer_jit.schemes.reports import Report, Waits
from podracer_jit.schemes.scheme import Graph
from podracer_jit.schemes.wiring import Actor, Plan, SegmentStart, number
from podracer_jit.types import TrainState


class State(NamedTuple):
  """State of the only worker."""

  train: TrainState
  update: int
  actor: ActorState


def wire(plan: Plan, actors: Sequence[Actor], start: SegmentStart, reports: Channel):
  """Wires the graph of one worker, whose program makes several updates in a call.

  Args:
    plan: of the run.
    actors: of the segment.
    begin: the segment's first state.
    reports: channel of the learner's reports.

  Returns:
    The workers, and a function that returns their waiting times.
  """
  (actor,) = actors
  total = plan.total_steps
  calls = min(plan.updates_per_call, start.updates)
  rollout = plan.acting.rollout(actor.rollout_program.vector_envs)
  fused = rollout_updates.make_fused(rollout, plan.learner.learn, calls)
  # The program donates the state itself, so it gets no copy.
  state = jax.tree.map(lambda x: x.addressable_data(0), start.state)
  program = actor.rollout_program.load(fused, (state, actor.state, calls, total), donate=(0, 1))

  def fire(carry: State):
    limit = min(calls, start.update + start.updates - carry.update)
    state, actor_state, count, metrics = program(carry.train, carry.actor, limit, total)
    # Blocks until the call has ended.
    count = number(count)
    report = Report(metrics, count, (plan.learner.mean_cgd(0),) * count, (0.0,) * count)
    update = carry.update + count
    return State(state, update, actor_state), [Versioned(report, update)]

  learner = Worker('learner', fire, State(state, start.update, actor.state), [],
                   [Endpoint(reports)], -(-start.updates // calls),
                   lambda carry: start.ended(carry.train))
  return [learner], lambda: Waits(0.0, 0.0)


GRAPH = Graph(wire, one_program=True)
