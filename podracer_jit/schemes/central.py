"""Workers that make gradients, and one place that has the optimizer and applies them."""

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
  """What a worker's gradient step tells the centre; its version is that of the parameters."""

  worker: int
  groups: Any  # sums of gradients and terms, [n, ...] each
  collected: int  # the version of the parameters that made the rollouts
  seen: Mapping[str, Any] | None  # of Prepared, with an update's last step


class Central(NamedTuple):
  """The state of the centre."""

  train: TrainState
  version: int  # gradient steps made, as far as versions count them
  steps: Mapping[int, list]  # by worker: what each gradient step of its update gave
  done: int = 0  # updates of this segment
  ended: bool = False


def wire(plan: Plan, actors: Sequence[Actor], begin: Begin, reports: HandOff):
  """Returns the workers and their waits: actors, gradient workers, and the centre that updates.

  The centre answers each gradient with the parameters after it, so a worker never has two under
  way; and actors after the last gradient of a rollout.
  """
  place, steps, updates = plan.place, plan.learner.gradient_steps, begin.updates
  meshes = [place.mesh]
  if plan.scheme.each:
    meshes = [placement.mesh_of([device]) for device in place.workers]
  gradients = plan.learner.gradient_programs(meshes)
  count = len(gradients)
  centre = placement.mesh_of([place.workers[0]])
  version = begin.update * steps
  per_worker, num_envs = len(actors) // count, plan.num_envs // count
  params = wiring.parameters(plan, actors, begin, version)
  made = [wiring.rollouts_of(i, actor.first_env % num_envs, updates, num_envs,
                             gradients[i // per_worker].mesh)
          for i, actor in enumerate(actors)]
  answers = [DoubleBuffer(f'parameters for worker {i}', updates * steps, 0,
                          lambda p, to=part.mesh: placement.replicate(p, to))
             for i, part in enumerate(gradients)]
  for handoff in answers:
    handoff.prime(Stamped(begin.state.params, version))

  def to_centre(share: Share) -> Share:
    there = jax.device_put((share.groups, share.seen), centre.devices.flat[0])
    return share._replace(groups=there[0], seen=there[1])
  shares = Arrival('gradients', count, to_centre)
  workers = [wiring.actor(plan, i, actor, begin, *ends, updates)
             for i, (actor, *ends) in enumerate(zip(actors, params, made, strict=True))]
  workers += [
      _gradient_worker(plan, gradients, i, begin, made[i * per_worker:(i + 1) * per_worker], answer,
                       shares)
      for i, answer in enumerate(answers)]
  state = Central(placement.replicate(begin.state, centre), version, {i: [] for i in range(count)})
  ports = [Port(h) for h in (*params, *answers, reports)]
  learner = Worker('learner', _centre(plan, begin, count, len(actors)), state, [Port(shares)],
                   ports, (updates + count) * steps, lambda carry: carry.ended)
  return [*workers, learner], wiring.waits(params, made, count)


def _gradient_worker(plan: Plan, gradients: Sequence[GradientPrograms], i: int, begin: Begin,
                     made: Sequence[HandOff], answer: HandOff, shares: HandOff) -> Worker:
  mesh, prepare, gradient = gradients[i]
  count, steps = len(gradients), plan.learner.gradient_steps
  key = placement.replicate(begin.state.key, mesh)

  def fire(carry, *inputs: Stamped):
    k, prepared = carry
    *items, params = inputs
    update = begin.update + k // steps * count + i  # its number among all, if all are as fast
    if k % steps == 0:
      wiring.check_lag(plan.scheme, update, begin.update, items, steps)
      batch = placement.gather([item.value for item in items], mesh)
      prepared = prepare(params.value, jax.random.fold_in(key, update), batch)
    with jax.profiler.TraceAnnotation('gradient'):
      groups = gradient(params.value, prepared, k % steps)
    collected = sum(item.version for item in items) / len(items)
    seen = prepared.seen if k % steps == steps - 1 else None
    return (k + 1, prepared), [Stamped(Share(i, groups, collected, seen), params.version)]

  return Worker(f'worker {i}', fire, (0, None), [*[Port(h, steps) for h in made], Port(answer)],
                [Port(shares)], begin.updates * steps)


def _centre(plan: Plan, begin: Begin, workers: int, actors: int) -> Callable:
  """U: applies a share and answers its worker; with the last of an update, ends that."""
  scheme, programs = plan.scheme, plan.learner.update_programs

  def fire(carry: Central, item: Stamped):
    share = item.value
    train, made = programs.step(carry.train, share.groups)
    delays = item.version - share.collected, carry.version - item.version  # CGD, GUD
    steps = [*carry.steps[share.worker], (made, delays)]
    carry = carry._replace(train=train, version=carry.version + 1)
    ended, fresh_for, report = False, [], None
    if share.seen is not None:
      made, delays = zip(*steps, strict=True)
      train, metrics = programs.finish(train, share.seen, list(made))
      cgd, gud = np.mean(delays, axis=0)
      report = Stamped(Report(metrics, 1, (cgd,), (gud,)), carry.version)
      done = carry.done + 1
      ended = begin.ended(train) or done == begin.updates
      carry, steps = carry._replace(train=train, done=done, ended=ended), []
      own = scheme.each and scheme.lag is not None
      fresh_for = [i for i in range(actors) if not own or i * workers // actors == share.worker]
    carry = carry._replace(steps={**carry.steps, share.worker: steps})
    fresh = None if ended else Stamped(carry.train.params, carry.version)
    return carry, [*(fresh if i in fresh_for else None for i in range(actors)),
                   *(fresh if i == share.worker else None for i in range(workers)), report]

  return fire


GRAPH = Graph(wire, separate_updates=True, replay=False)
