"""Graph of actors that fill a replay and a learner that draws from it, each at its own rate.

This is Ape-X (1803.00933).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.learner import from_rollouts
from podracer_jit.loops import Endpoint, Worker
from podracer_jit.numerics import counters
from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import Channel, DrainQueue, Versioned
from podracer_jit.schemes import wiring
from podracer_jit.schemes.reports import Report
from podracer_jit.schemes.scheme import Graph
from podracer_jit.schemes.wiring import Actor, Plan, SegmentStart
from podracer_jit.types import Episodes, TrainState


class State(NamedTuple):
  """State of the learner."""

  train: TrainState
  update: int  # a copy of `train.update` on the host
  gradient_steps: int  # likewise
  late: float = 0.0  # mean age of the last rollouts when they arrived, in gradient steps


def wire(plan: Plan, actors: Sequence[Actor], start: SegmentStart, reports: Channel):
  """Wires the graph; the plan's learner must be a learner from a replay.

  Args:
    plan: the plan of the run.
    actors: the actors of the segment.
    start: where the graph begins.
    reports: channel of the learner's reports.

  Returns:
    The workers, and a function that returns their waiting times.
  """
  mesh = plan.place.mesh
  learner = plan.learner
  block_envs = learner.source.blocks.envs
  first = counters.fetch_int(start.state.target.gradient_steps)
  params = wiring.parameters(plan, actors, start, first)

  # Copies, because rollouts of a cluster are views of its memory, and many may wait in the queue.
  @jax.jit
  def side_by_side(rollouts):
    return jax.tree.map(jnp.copy, from_rollouts.concatenate(rollouts))

  rate = learner.rate_limiter(plan.num_envs * learner.algorithm.parts.unroll_length, len(actors))
  inbox = DrainQueue('rollouts', rate.capacity, rate.wants, lambda item: (
      item[0], placement.everywhere(side_by_side(item[1]), mesh)))
  nothing = placement.everywhere((jnp.int32(0), jnp.zeros(2, jnp.uint32)), mesh)

  def fire(carry: State, arrived: Versioned):
    state = carry.train
    # Valid rows, and the fingerprint, of all experience that this firing adds.
    added = nothing
    ages = [carry.gradient_steps - item.version for item in arrived.value]
    late = sum(ages) / len(ages) if ages else carry.late

    with jax.profiler.TraceAnnotation('add'):
      for first_env, new in (item.value for item in arrived.value):
        state, counts = learner.programs.insert(state, new, np.int32(first_env // block_envs))
        added = _sum(added, counts)
      if arrived.value:
        rate.count(counters.fetch_int(added[0]), 0)

    with jax.profiler.StepTraceAnnotation('learn', step_num=carry.update + 1):
      count = learner.gradient_steps if rate.may_draw() else 0
      state, metrics = learner.programs.learn(state, np.int32(count), *added)
    # One transfer for all that the host needs to know.
    with jax.profiler.TraceAnnotation('make: gradient steps'):
      sampled, version, episodes = jax.device_get((
          metrics['sampled'][0], state.target.gradient_steps,
          [item.value[1].episodes for item in arrived.value]))
    rate.count(0, int(sampled))
    version = int(version)
    metrics['episodes'] = _end_to_end(episodes)
    new_params = Versioned(learner.algorithm.for_actors(state), version)
    report = Versioned(Report(metrics, 1, (learner.mean_cgd(late),), (0.0,)), version)
    return State(state, carry.update + 1, version, late), [*[new_params] * len(params), report]

  # A block must get the experience of its own environments, whenever it arrives.
  def tagged(worker: Worker, first_env: int) -> Worker:
    """Returns an actor whose rollouts carry the index of its first environment."""
    def fire(state, params):
      state, (rollout,) = worker.fire(state, params)
      return state, [rollout._replace(value=(first_env, rollout.value))]
    return worker._replace(fire=fire)

  # The learner ends the run; actors go on until then.
  draws = Worker('learner', fire, State(start.state, start.update, first), [Endpoint(inbox)],
                 [Endpoint(channel) for channel in (*params, reports)], start.updates,
                 lambda carry: start.after(wiring.Position(carry.train, carry.update)))
  every = learner.source.options.params_every
  acts = [wiring.actor(plan, i, actor, (Endpoint(p, every), Endpoint(inbox)), 2**62)[0]
          for i, (actor, p) in enumerate(zip(actors, params, strict=True))]
  acts = [tagged(worker, actor.first_env) for worker, actor in zip(acts, actors, strict=True)]
  return [*acts, draws], wiring.waits(params, [inbox] * len(actors))


@jax.jit
def _sum(a: Any, b: Any) -> Any:
  return jax.tree.map(jnp.add, a, b)


def _end_to_end(episodes: Sequence[Episodes]) -> Episodes:
  """Joins the episodes of environments and adds a leading update axis; empty if there are none."""
  if not episodes:
    return Episodes(*(np.zeros((1, 0, 0), dtype) for dtype in (bool, np.float32, np.int32)))
  return jax.tree.map(lambda *x: np.concatenate(x, axis=1)[None], *episodes)


GRAPH = Graph(wire, wiring.load, free_rates=True, replay=True)
