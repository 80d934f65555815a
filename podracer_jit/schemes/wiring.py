"""What the graphs of schemes are made of: parts, actors, and the hand-offs at their two ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from podracer_jit.actor import asynchronous, priorities, rollouts
from podracer_jit.agents import networks
from podracer_jit.envs import envpool_envs
from podracer_jit.learner import sharding
from podracer_jit.loops import Port, Worker
from podracer_jit.run.metrics import Waits
from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import DoubleBuffer, HandOff, Latest, Stamped
from podracer_jit.schemes.table import Scheme
from podracer_jit.types import TrainState


class Parts(NamedTuple):
  """What stays the same over all segments of a run."""

  config: Mapping[str, Any]
  spec: envpool_envs.EnvSpec
  scheme: Scheme
  place: placement.Placement
  network: networks.ActorCritic
  optimizer: optax.GradientTransformation
  learn: Callable  # (state, rollout of one device) -> (state, metrics), to be jitted
  learner: Callable  # the same on the whole mesh, jitted once
  gradients: Sequence[sharding.GradientPrograms]  # of each worker, where G and U are apart
  updates: sharding.UpdatePrograms | None  # likewise
  replay: sharding.ReplayPrograms | None = None  # where acting and learning are free of each other

  @property
  def gradient_steps(self) -> int:
    """Of an update: epochs times minibatches, or as many as it draws batches from a replay."""
    if 'replay' in self.config:
      return self.config['replay']['gradient_steps']
    return self.config['num_epochs'] * self.config['num_minibatches']


class Actor(NamedTuple):
  """One actor of a segment, before it is wired."""

  pools: rollouts.Pools
  state: rollouts.ActorState
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


def make_rollout(parts: Parts, pools: rollouts.Pools) -> Callable:
  """The rollout of these pools, not yet jitted; with a replay it makes Experience."""
  loss, apply = parts.config['loss'], parts.network.apply
  if parts.config['env_batch']:
    return asynchronous.make_rollout(pools.shards[0], apply, parts.network.policy,
                                     parts.config['unroll_length'], parts.spec.stack)
  discount = loss['discount'] if parts.config['normalise']['reward'] else None
  rollout = functools.partial(rollouts.make_rollout, pools.shards, apply, parts.network.policy,
                              parts.config['unroll_length'], parts.spec.stack, discount)
  if 'replay' not in parts.config:
    return rollout()
  return priorities.with_priorities(rollout(functools.partial(apply, method='action_value')),
                                    loss['n_step'], loss['discount'])


def parameters(parts: Parts, actors: Sequence[Actor], begin: Begin, version: int) -> list[HandOff]:
  """Hand-offs of parameters to actors, primed."""
  def make(name, transfer):
    if parts.scheme.lag is None:
      return Latest(name, transfer)
    return DoubleBuffer(name, begin.updates, parts.scheme.lag, transfer)
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
  queues = list({id(h): h for h in made}.values())

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


def delay(parts: Parts, behind: float) -> float:
  """Mean CGD of an update on rollouts so many gradient steps late; of a replay, when they came.

  The j-th gradient of an update is taken j versions after its first. From a replay the age of what
  was drawn adds to it, which the metrics have.
  """
  return behind if 'replay' in parts.config else behind + (parts.gradient_steps - 1) / 2


def actor(parts: Parts, i: int, actor: Actor, begin: Begin, params: HandOff, made: HandOff,
          firings: int) -> Worker:
  """R: a worker that makes rollouts with what it is given."""
  like = placement.put_params(begin.state.params, actor.device)
  # As a learner on this device alone has its batch: to make that anew takes 8 us an array.
  shardings = None, placement.by_env(placement.mesh_of([actor.device]))
  program = actor.pools.load(make_rollout(parts, actor.pools), (like, actor.state), donate=(1,),
                             out_shardings=shardings)

  def fire(state: rollouts.ActorState, params: Stamped):
    with jax.profiler.TraceAnnotation('rollout'):
      state, made = program(params.value, state)
    return state, [Stamped(made, params.version)]

  every = parts.config['replay']['params_every'] if parts.scheme.free else 1
  return Worker(f'actor {i}', fire, actor.state, [Port(params, every)], [Port(made)], firings)
