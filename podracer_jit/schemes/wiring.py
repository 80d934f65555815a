"""Building blocks of graphs: the plan, actors, and the channels between actors and learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from podracer_jit.actor.acting import Acting
from podracer_jit.actor.rollout_program import KeptPrograms, RolloutProgram
from podracer_jit.actor.rollouts import ActorState, sent_by
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
  keeps_actors: bool  # a `Position` has the states of actors
  gradient_workers: Callable[[], list[GradientWorker]]  # of a scheme with `each`
  kept_programs: KeptPrograms  # that step environments, for the next segments


class Actor(Protocol):
  """Interface of what makes rollouts (R) in a segment, wherever that is."""

  first_env: int  # index of its first environment among all
  state: Any  # before the first rollout

  def receive(self, params: Any) -> Any:
    """Sends parameters to the actor; returns them as its rollout takes them."""

  def load(self, plan: Plan) -> Any:
    """Compiles the program of a rollout; does nothing if it is compiled, or elsewhere."""

  def begin(self, plan: Plan, ended: Callable[[], bool]) -> Callable:
    """Begins the segment.

    Args:
      plan: of the run.
      ended: whether the segment has ended; a rollout that waits then raises `Closed`.

    Returns:
      rollout(state, params: Versioned) -> (state, Versioned experience).
    """

  def experience_shapes(self) -> Any | None:
    """Returns the shapes of a rollout's experience after `begin`; None if they are unknown."""


class LocalActor(NamedTuple):
  """Actor on a device of this process."""

  rollout_program: RolloutProgram
  state: ActorState
  device: jax.Device
  first_env: int  # index of its first environment among all

  def receive(self, params: Any) -> Any:
    """See `Actor`."""
    return placement.put_params(params, self.device)

  def load(self, plan: Plan) -> Callable:
    """See `Actor`; returns program(params, state) -> (state, experience)."""
    on_device = jax.sharding.SingleDeviceSharding(self.device)
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device),
        jax.eval_shape(plan.learner.algorithm.for_actors, plan.learner.state_shapes()))
    # Rollouts get the sharding that a learner on this device uses, so `gather` need not rewrap
    # them, which takes 8 us an array.
    shardings = None, placement.by_env(placement.mesh_of([self.device]))
    # A state that may be saved must not be donated.
    return self.rollout_program.load(
        plan.acting.rollout(self.rollout_program.vector_envs), (params, self.state),
        donate=() if plan.keeps_actors else (1,), out_shardings=shardings,
        kept=plan.kept_programs)

  def begin(self, plan: Plan, ended: Callable[[], bool]) -> Callable:
    """See `Actor`."""
    del ended
    program = self.load(plan)

    def rollout(state: ActorState, params: Versioned) -> tuple[ActorState, Versioned]:
      state, rollouts = program(params.value, state)
      return state, Versioned(rollouts, params.version)

    return rollout

  def experience_shapes(self) -> Any | None:
    """See `Actor`."""
    shapes = self.rollout_program.result_shapes
    return None if shapes is None else shapes[1]


class ActorStates:
  """States of an actor after its last few rollouts; it adds them, and the learner takes them.

  An actor may be some rollouts ahead of the last update, so the newest state is not the one that
  belongs to it.
  """

  def __init__(self, state: ActorState):
    self._after = {0: state}  # by rollouts of this graph
    self._rollouts = 0

  def add(self, state: ActorState) -> None:
    """Adds the state after one more rollout."""
    self._rollouts += 1
    self._after[self._rollouts] = state

  def after(self, rollouts: int) -> ActorState:
    """Returns the state after a number of rollouts, and forgets all before it."""
    for earlier in [number for number in list(self._after) if number < rollouts]:
      del self._after[earlier]
    return self._after[rollouts]


class Position(NamedTuple):
  """Where a run is after an update. It is valid until the next update begins."""

  state: TrainState  # with separate updates as in `learner.central`
  update: int  # updates done
  steps: int | None = None  # valid steps learned from; added where a graph runs
  # If the scheme is deterministic: the states of this process's actors after the last rollouts that
  # were learned from; `EnvState.sent` of each vector environment that has it, for each rollout
  # since the position before; and, with a lag, what actors got before the last update.
  actors: Callable[[], Sequence[ActorState]] = tuple
  sent: Sequence[Sequence[jax.Array]] = ()
  before: Callable[[], Any] = lambda: None


class SegmentStart(NamedTuple):
  """Where a graph begins: at the beginning of a segment, or within it."""

  # Returns the train state, which a thread may still compute; the same one in each call.
  state_later: Callable[[], TrainState]
  update: int  # updates done
  first: int  # updates done when the segment began: its pipeline was empty then
  updates: int  # most updates of this graph
  before: Any  # what actors got before the last update, within a segment of a scheme with a lag
  # The next update after this one at which something is due.
  next_pause: Callable[[int], int]
  # Called after each call of updates, by the thread that learns, which waits; whether the graph
  # ends here.
  after: Callable[[Position], bool]

  @property
  def state(self) -> TrainState:
    """The train state; waits for it."""
    return self.state_later()


class Segment(NamedTuple):
  """Graph of one segment, or of a part of it, ready to run."""

  workers: list[Worker]  # the state of the worker 'learner' has the TrainState as `train`
  waits: Callable[[], Waits]  # returns the waiting times so far
  # (run, position, updates) -> the graph that goes on with the same environments on the devices of
  # a run, after the last update of this graph.
  go_on: Callable[..., Segment]


def parameters(plan: Plan, actors: Sequence[Actor], start: SegmentStart, version: int
               ) -> list[Channel]:
  """Creates the channels of parameters to actors, and primes them.

  Args:
    plan: the plan of the run.
    actors: the actors of the segment.
    start: where the graph begins.
    version: version of the first parameters.

  Returns:
    One channel for each actor.
  """
  def make(name, transfer):
    if plan.scheme.lag is None:
      return LatestValue(name, transfer)
    return DoubleBuffer(name, start.updates, plan.scheme.lag, transfer)

  params = [make(f'parameters for actor {i}', actor.receive) for i, actor in enumerate(actors)]
  first = [Versioned(plan.learner.algorithm.for_actors(start.state), version)]
  if start.before is not None:
    first.insert(0, Versioned(start.before, version - 1))
  for channel in params:
    channel.prime(*first)
  return params


def with_actors(plan: Plan, start: SegmentStart, position: Position,
                actors: Sequence[ActorStates], before: Callable[[], Any]) -> Position:
  """Returns a position with the states of actors, if the plan keeps them.

  Args:
    plan: the plan of the run.
    start: where the graph began.
    position: after an update that took one rollout of each actor.
    actors: the states of all actors.
    before: returns what actors got before the update.
  """
  if not plan.keeps_actors:
    return position
  states = [each.after(position.update - start.update) for each in actors]
  sent = [array for actor in states for array in sent_by(actor)]
  return position._replace(actors=lambda: states, sent=[sent] if sent else [], before=before)


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


def check_lag(scheme: Scheme, update: int, first: int, items: Sequence[Versioned]) -> None:
  """Checks that rollouts have exactly the lag of a deterministic scheme.

  Args:
    scheme: the scheme of the run.
    update: the update that takes the rollouts.
    first: updates done when the segment began.
    items: the rollouts, with the versions of their parameters, which are numbers of updates.

  Raises:
    AssertionError: a rollout has another lag.
  """
  if not scheme.deterministic:
    return
  lag = min(update - first, scheme.lag)
  for item in items:
    if update - item.version != lag:
      raise AssertionError(f'update {update} was given a rollout made by version {item.version}: '
                           f'its lag should be {lag}')


def load(plan: Plan, actor: Actor, updates: int) -> None:
  """Compiles an actor's program for a graph in which actors have programs of their own.

  Args:
    plan: the plan of the run.
    actor: of the segment.
    updates: most updates of the graph, on which the program does not depend.
  """
  del updates
  actor.load(plan)


def actor(plan: Plan, i: int, actor: Actor, ends: tuple[Endpoint, Endpoint], firings: int
          ) -> tuple[Worker, ActorStates]:
  """Returns a worker that makes rollouts with the parameters that it receives.

  Args:
    plan: the plan of the run.
    i: the actor's number.
    actor: makes the rollouts.
    ends: of the channel of parameters to the actor, and of that of its rollouts.
    firings: most rollouts.

  Returns:
    The worker, ready to fire, and its states, which have none but the first unless
    `plan.keeps_actors`.
  """
  params, rollouts = ends
  rollout = actor.begin(plan, lambda: params.channel.ended or rollouts.channel.ended)
  states = ActorStates(actor.state)

  def fire(state: Any, params: Versioned):
    with jax.profiler.TraceAnnotation('rollout'):
      state, experience = rollout(state, params)
    if plan.keeps_actors:
      states.add(state)
    return state, [experience]

  return Worker(f'actor {i}', fire, actor.state, [params], [rollouts], firings), states
