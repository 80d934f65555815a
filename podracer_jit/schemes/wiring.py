"""Building blocks of graphs: the plan, actors, and the channels between actors and learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from podracer_jit.actor.acting import Acting
from podracer_jit.actor.rollout_program import KeptPrograms, RolloutProgram
from podracer_jit.actor.rollouts import ActorState
from podracer_jit.learner.learner import Learner
from podracer_jit.loops import Endpoint, Worker
from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import Channel, DoubleBuffer, LatestValue, Versioned
from podracer_jit.schemes.gradients import GradientWorker
from podracer_jit.schemes.reports import Waits
from podracer_jit.schemes.scheme import Scheme
from podracer_jit.types import TrainState


class Plan(NamedTuple):
  """Components of a run that all its segments share."""

  scheme: Scheme
  place: placement.Placement
  learner: Learner
  acting: Acting
  num_envs: int  # of all actors, in all processes
  num_shards: int  # vector environments of all actors
  total_steps: int  # valid agent steps after which the run ends
  updates_per_call: int  # most updates in one call, for a graph of one program
  keeps_envs: bool  # environments go on in the next segment, see `ActorHistory`
  gradient_workers: Callable[[], list[GradientWorker]]  # of a scheme with separate updates
  kept_programs: KeptPrograms  # that step environments, for the next segments


class Actor(Protocol):
  """Interface of what makes rollouts (R) in a segment, wherever that is."""

  first_env: int  # index of its first environment among all
  state: Any  # before the first rollout

  def receive(self, params: Any) -> Any:
    """Sends parameters to the actor; returns them as its rollout takes them."""

  def begin(self, plan: Plan, start: SegmentStart, ended: Callable[[], bool]) -> Callable:
    """Begins the segment.

    Args:
      plan: of the run.
      start: the segment's first state.
      ended: whether the segment has ended; a rollout that waits then raises `Closed`.

    Returns:
      rollout(state, params: Versioned) -> (state, Versioned experience).
    """


class LocalActor(NamedTuple):
  """Actor on a device of this process."""

  rollout_program: RolloutProgram
  state: ActorState
  device: jax.Device
  first_env: int  # index of its first environment among all

  def receive(self, params: Any) -> Any:
    """See `Actor`."""
    return placement.put_params(params, self.device)

  def begin(self, plan: Plan, start: SegmentStart, ended: Callable[[], bool]) -> Callable:
    """See `Actor`; compiles the program."""
    del ended
    like = placement.put_params(plan.learner.algorithm.for_actors(start.state), self.device)
    # Rollouts get the sharding that a learner on this device uses, so `gather` need not rewrap
    # them, which takes 8 us an array.
    shardings = None, placement.by_env(placement.mesh_of([self.device]))
    # A state that may be needed again must not be donated.
    program = self.rollout_program.load(
        plan.acting.rollout(self.rollout_program.vector_envs), (like, self.state),
        donate=() if plan.keeps_envs else (1,), out_shardings=shardings,
        kept=plan.kept_programs)

    def rollout(state: ActorState, params: Versioned) -> tuple[ActorState, Versioned]:
      state, rollouts = program(params.value, state)
      return state, Versioned(rollouts, params.version)

    return rollout


class ActorHistory(NamedTuple):
  """State of an actor's worker whose environments go on in the next segment.

  An actor may be some rollouts ahead of the last update of a segment. Those rollouts are not
  learned from, so the next segment begins from the state before them.
  """

  states: tuple[ActorState, ...]  # after the last few rollouts, the newest last
  rollouts: int  # made in this segment

  def after(self, rollouts: int) -> ActorState:
    """Returns the state after this number of rollouts of the segment."""
    return self.states[-1 - (self.rollouts - rollouts)]


def actors_after(plan: Plan, states: Mapping[str, Any], updates: int) -> list[ActorState]:
  """Returns the states of actors, in order, if each update took one rollout of each actor.

  Args:
    plan: the plan of the run.
    states: the workers' last states, by name.
    updates: made in the segment.
  """
  actors = len(plan.place.actors)
  return [states[f'actor {i}'].after(updates) for i in range(actors)]


class SegmentStart(NamedTuple):
  """Start of a segment."""

  state: TrainState
  update: int  # updates done before
  updates: int  # most updates of the segment
  ended: Callable[[TrainState], bool]  # whether the segment ends after this state


class Segment(NamedTuple):
  """Graph of one segment, ready to run."""

  workers: list[Worker]  # the state of the worker 'learner' has the TrainState as `train`
  waits: Callable[[], Waits]  # returns the waiting times so far


def number(x: jax.Array) -> int:
  """Returns a scalar count on the device as an int; blocks until it is computed."""
  return int(jax.device_get(x))


def parameters(plan: Plan, actors: Sequence[Actor], start: SegmentStart, version: int
               ) -> list[Channel]:
  """Creates the channels of parameters to actors, and primes them.

  Args:
    plan: the plan of the run.
    actors: the actors of the segment.
    start: the segment's first state.
    version: version of the first parameters.

  Returns:
    One channel for each actor.
  """
  def make(name, transfer):
    if plan.scheme.lag is None:
      return LatestValue(name, transfer)
    return DoubleBuffer(name, start.updates, plan.scheme.lag, transfer)

  params = [make(f'parameters for actor {i}', actor.receive) for i, actor in enumerate(actors)]
  first = Versioned(plan.learner.algorithm.for_actors(start.state), version)
  for channel in params:
    channel.prime(first)
  return params


def rollouts_of(i: int, firings: int, transfer: Callable[[Any], Any]) -> DoubleBuffer:
  """Creates the channel of an actor's rollouts to a learner.

  Args:
    i: the actor's number.
    firings: rollouts that the learner takes.
    transfer: sends rollouts to the learner.

  Returns:
    A channel without a lag.
  """
  return DoubleBuffer(f'rollouts of actor {i}', firings, transfer=transfer)


def waits(params: Sequence[Channel], rollouts: Sequence[Channel],
          learners: int = 1) -> Callable[[], Waits]:
  """Builds the function that returns waiting times.

  Args:
    params: channel of parameters to each actor.
    rollouts: channel of each actor's rollouts; actors may share a channel.
    learners: number of learners that share these channels.

  Returns:
    A function that returns mean seconds waited by an actor, and by a learner.
  """
  # Actors may share a queue, which counts once.
  queues = list(dict.fromkeys(rollouts))

  def waits() -> Waits:
    of_actors = sum(p.get_wait_s for p in params) + sum(r.put_wait_s for r in queues)
    of_learners = sum(r.get_wait_s for r in queues) + sum(p.put_wait_s for p in params)
    return Waits(of_actors / len(params), of_learners / learners)

  return waits


def check_lag(scheme: Scheme, update: int, first: int, items: Sequence[Versioned],
              unit: int = 1) -> None:
  """Checks that rollouts have exactly the lag of a deterministic scheme.

  Args:
    scheme: the scheme of the run.
    update: the update that takes the rollouts.
    first: the segment's first update.
    items: the rollouts, with the versions of their parameters.
    unit: versions in an update.

  Raises:
    AssertionError: a rollout has another lag.
  """
  if not scheme.deterministic:
    return
  lag = min(update - first, scheme.lag)
  for item in items:
    if update * unit - item.version != lag * unit:
      raise AssertionError(f'update {update} was given a rollout made by version '
                           f'{item.version / unit:g}: its lag should be {lag}')


def actor(plan: Plan, i: int, actor: Actor, start: SegmentStart, params: Channel,
          rollouts: Channel, firings: int, rollouts_per_params: int = 1) -> Worker:
  """Returns a worker that makes rollouts with the parameters that it receives.

  Args:
    plan: the plan of the run.
    i: the actor's number.
    actor: makes the rollouts.
    start: the segment's first state.
    params: channel of parameters to the actor.
    rollouts: channel of the actor's rollouts.
    firings: most rollouts.
    rollouts_per_params: rollouts made with the same parameters.

  Returns:
    The worker, ready to fire.
  """
  rollout = actor.begin(plan, start, lambda: params.ended or rollouts.ended)

  def fire(state: Any, params: Versioned):
    with jax.profiler.TraceAnnotation('rollout'):
      state, experience = rollout(state, params)
    return state, [experience]

  def fire_and_keep(history: ActorHistory, params: Versioned):
    state, outputs = fire(history.states[-1], params)
    # After the segment's last update an actor may have made lag + 1 rollouts more.
    states = (*history.states, state)[-plan.scheme.lag - 2:]
    return ActorHistory(states, history.rollouts + 1), outputs

  ends = [Endpoint(params, rollouts_per_params)], [Endpoint(rollouts)]
  if plan.keeps_envs:
    return Worker(f'actor {i}', fire_and_keep, ActorHistory((actor.state,), 0), *ends, firings)
  return Worker(f'actor {i}', fire, actor.state, *ends, firings)
