"""Graph of one program that alternates rollouts and updates, without Python between them.

If the environments are JAX functions, too, the program spans the learner's mesh, and each device
steps its own environments: Podracer's Anakin (2104.06272, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from podracer_jit.actor.rollouts import ActorState, sent_by
from podracer_jit.learner import sharding
from podracer_jit.loops import Endpoint, Worker
from podracer_jit.numerics import counters
from podracer_jit.runtime.channels import Channel, Versioned
from podracer_jit.schemes.reports import Report, Waits
from podracer_jit.schemes.scheme import Graph
from podracer_jit.schemes.wiring import Actor, Plan, Position, SegmentStart
from podracer_jit.types import TrainState


class State(NamedTuple):
  """State of the only worker."""

  train: TrainState
  update: int
  actor: ActorState  # on a mesh with a leading axis of devices
  sent: Sequence[Sequence[jax.Array]]  # see `Position`, of the updates of the last call


def wire(plan: Plan, actors: Sequence[Actor], start: SegmentStart, reports: Channel):
  """Wires the graph of one worker, whose program makes several updates in a call.

  Args:
    plan: the plan of the run.
    actors: the actors of the segment.
    start: where the graph begins.
    reports: channel of the learner's reports.

  Returns:
    The workers, and a function that returns their waiting times.
  """
  (actor,) = actors
  mesh = plan.place.mesh
  learner = plan.learner
  updates_per_call = min(plan.updates_per_call, start.updates)
  total = _total(plan)
  if mesh.size > 1:
    # The vector environments of each device are alike, so their program is the same.
    rollout = plan.acting.rollout(
        actor.rollout_program.vector_envs[:plan.num_shards // mesh.size])
    fused = sharding.fused_program(learner.source, rollout, updates_per_call, mesh)
    state = start.state
    actor_state = split(actor.state, mesh)
    program = actor.rollout_program.load(
        fused, (state, actor_state, updates_per_call, total), donate=(0, 1),
        kept=plan.kept_programs, key=updates_per_call)
  else:
    program = _load(plan, actor, updates_per_call)
    state = jax.tree.map(lambda x: x.addressable_data(0), start.state)
    actor_state = actor.state

  def fire(carry: State):
    limit = min(updates_per_call, start.update + start.updates - carry.update,
                start.next_pause(carry.update) - carry.update)
    with jax.profiler.StepTraceAnnotation('updates', step_num=carry.update + 1):
      state, actor_state, count, metrics = program(carry.train, carry.actor, limit, total)
      # Blocks until the call has ended.
      count = counters.fetch_int(count)
    sent = list(map(np.asarray, metrics.pop(sharding.SENT, ())))
    sent = [[array[i] for array in sent] for i in range(count if sent else 0)]
    report = Report(metrics, count, (learner.mean_cgd(0),) * count, (0.0,) * count)
    update = carry.update + count
    return State(state, update, actor_state, sent), [Versioned(report, update)]

  def until(carry: State) -> bool:
    at_end = carry.update == start.update + start.updates
    return start.after(Position(
        carry.train, carry.update, None,
        lambda: [carry.actor if mesh.size == 1 else join(carry.actor, mesh.size)],
        carry.sent)) or at_end

  worker = Worker('learner', fire, State(state, start.update, actor_state, ()), [],
                  [Endpoint(reports)], start.updates, until)
  return [worker], lambda: Waits(0.0, 0.0)


def load(plan: Plan, actor: Actor, updates: int) -> None:
  """Compiles the program of a graph on one device; does nothing for a mesh.

  Args:
    plan: the plan of the run.
    actor: the only one of the segment.
    updates: most updates of the graph.
  """
  if plan.place.mesh.size == 1:
    _load(plan, actor, min(plan.updates_per_call, updates))


def _load(plan: Plan, actor: Actor, updates_per_call: int) -> Callable:
  """Returns the program of one device, which makes at most `updates_per_call` updates in a call."""
  learner = plan.learner
  rollout = plan.acting.rollout(actor.rollout_program.vector_envs)
  fused = sharding.make_fused(learner.algorithm.for_actors, rollout, learner.learn,
                              updates_per_call, sent_by)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
                        learner.state_shapes()._replace(replay=learner.replay_shapes()))
  return actor.rollout_program.load(fused, (shapes, actor.state, updates_per_call, _total(plan)),
                                    donate=(0, 1), kept=plan.kept_programs, key=updates_per_call)


def _total(plan: Plan) -> Any:
  """Returns the steps of the run as the program takes them."""
  return counters.of(plan.total_steps, plan.learner.state_shapes().steps)


def split(state: ActorState, mesh: Mesh) -> ActorState:
  """Shares out an actor's vector environments to the devices of a mesh, in order.

  Args:
    state: the state of all vector environments.
    mesh: D devices; D divides the number of vector environments.

  Returns:
    A state with num_shards / D vector environments, whose arrays have a leading axis [D].
  """
  envs = [state.envs[i::len(state.envs) // mesh.size]
          for i in range(len(state.envs) // mesh.size)]
  stacked = ActorState(
      jnp.stack([state.token] * mesh.size),
      tuple(jax.tree.map(lambda *x: jnp.stack(x), *of_devices) for of_devices in envs))
  return jax.device_put(stacked, NamedSharding(mesh, sharding.BY_DEVICE))


def join(state: ActorState, devices: int) -> ActorState:
  """Returns the state of all vector environments: the inverse of `split`."""
  envs = [jax.tree.map(lambda x, d=d: x[d], env) for d in range(devices) for env in state.envs]
  return ActorState(state.token[0], tuple(envs))


GRAPH = Graph(wire, load, one_program=True)
