"""What the graphs of schemes are made of: a plan, actors, and the hand-offs at their two ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from podracer_jit.actor.acting import Acting
from podracer_jit.actor.pools import Pools
from podracer_jit.actor.rollouts import ActorState
from podracer_jit.learner.learner import Learner
from podracer_jit.loops import Port, Worker
from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import DoubleBuffer, HandOff, Latest, Stamped
from podracer_jit.schemes.reports import Waits
from podracer_jit.schemes.scheme import Scheme
from podracer_jit.types import TrainState


class Plan(NamedTuple):
  """What stays the same over all segments of a run."""

  scheme: Scheme
  place: placement.Placement
  learner: Learner
  acting: Acting
  num_envs: int  # of all actors, in all processes
  total_steps: int
  updates_per_call: int  # at most, of a graph that is one program


class Actor(NamedTuple):
  """One actor of a segment, before it is wired."""

  pools: Pools
  state: ActorState
  device: jax.Device
  first_env: int


class Begin(NamedTuple):
  """What a segment begins with."""

  state: TrainState
  update: int
  updates: int
  ended: Callable[[TrainState], bool]


class Segment(NamedTuple):
  """The graph of one segment, ready to run."""

  workers: list[Worker]  # the state of the one called 'learner' has the TrainState, `train`
  waits: Callable[[], Waits]


def number(x: jax.Array) -> int:
  """A count that steers the run: four bytes to the host, and no other transfer in a loop."""
  return int(jax.device_get(x))


def parameters(plan: Plan, actors: Sequence[Actor], begin: Begin, version: int) -> list[HandOff]:
  """Hand-offs of parameters to actors, primed."""
  def make(name, transfer):
    if plan.scheme.lag is None:
      return Latest(name, transfer)
    return DoubleBuffer(name, begin.updates, plan.scheme.lag, transfer)
  params = [make(f'parameters for actor {i}',
                 lambda p, to=actor.device: placement.put_params(p, to))
            for i, actor in enumerate(actors)]
  for handoff in params:
    handoff.prime(Stamped(begin.state.params, version))
  return params


def rollouts_of(i: int, first_env: int, firings: int, num_envs: int,
                mesh: jax.sharding.Mesh) -> DoubleBuffer:
  """Hand-off of an actor's rollouts, whose place in the learner's num_envs is `first_env`."""
  return DoubleBuffer(f'rollouts of actor {i}', firings,
                      transfer=lambda r: placement.scatter(r, first_env, num_envs, mesh))


def waits(params: Sequence[HandOff], made: Sequence[HandOff],
          learners: int = 1) -> Callable[[], Waits]:
  """Sums over an actor's two hand-offs, and over those of one of the learners."""
  queues = list(dict.fromkeys(made))

  def waits() -> Waits:
    of_actors = sum(p.get_wait_s for p in params) + sum(r.put_wait_s for r in queues)
    of_learners = sum(r.get_wait_s for r in queues) + sum(p.put_wait_s for p in params)
    return Waits(of_actors / len(params), of_learners / learners)

  return waits


def check_lag(scheme: Scheme, update: int, first: int, items: Sequence[Stamped],
              unit: int = 1) -> None:
  """Asserts the scheme's lag of rollouts; versions count `unit` for each update."""
  if not scheme.repeats:
    return
  lag = min(update - first, scheme.lag)
  for item in items:
    if update * unit - item.version != lag * unit:
      raise AssertionError(f'update {update} was given a rollout made by version '
                           f'{item.version / unit:g}: its lag should be {lag}')


def actor(plan: Plan, i: int, actor: Actor, begin: Begin, params: HandOff, made: HandOff,
          firings: int, rollouts_per_params: int = 1) -> Worker:
  """Returns R: a worker that makes rollouts with the parameters that it is given.

  Args:
    plan: of the run.
    i: the actor's number.
    actor: its environments and state.
    begin: what the segment begins with.
    params: where its parameters come from.
    made: where its rollouts go.
    firings: rollouts at most.
    rollouts_per_params: rollouts that it makes with the same parameters.
  """
  like = placement.put_params(begin.state.params, actor.device)
  # As a learner on this device alone has its batch: to make that anew takes 8 us an array.
  shardings = None, placement.by_env(placement.mesh_of([actor.device]))
  program = actor.pools.load(plan.acting.rollout(actor.pools.shards), (like, actor.state),
                             donate=(1,), out_shardings=shardings)

  def fire(state: ActorState, params: Stamped):
    with jax.profiler.TraceAnnotation('rollout'):
      state, made = program(params.value, state)
    return state, [Stamped(made, params.version)]

  return Worker(f'actor {i}', fire, actor.state, [Port(params, rollouts_per_params)],
                [Port(made)], firings)
