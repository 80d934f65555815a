"""The graphs of all schemes: which workers a segment has, and which hand-offs join them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.actor import rollouts
from podracer_jit.learner import rollout_updates
from podracer_jit.loops import Port, Worker
from podracer_jit.replay.rate_limiter import Rate
from podracer_jit.run import experiment
from podracer_jit.run.metrics import Report, Waits
from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import Arrival, DoubleBuffer, HandOff, Inbox, Stamped
from podracer_jit.schemes import wiring
from podracer_jit.schemes.wiring import Actor, Begin, Parts, Segment, number
from podracer_jit.types import Episodes, TrainState


class Learning(NamedTuple):
  """The state of the worker that learns."""

  train: TrainState
  update: int = 0  # of `train`, where it steers: asking the device would take a while
  actor: rollouts.ActorState | None = None  # in `fused`, where one program does it all
  late: float = 0.0  # gradient steps that a replay's newest rollouts were behind when they came


def wire(parts: Parts, actors: Sequence[Actor], begin: Begin,
         report: Callable[[Report], None]) -> Segment:
  """The segment's graph, hand-offs primed; its last worker calls `report`."""
  reports = Arrival('reports', 1)  # computed, as the waits of their updates are then known

  def fire(state: None, item: Stamped):
    report(item.value)
    return state, ()

  scheme = parts.scheme
  make = (_fused if scheme.fused else _central if scheme.central else
          _free if scheme.free else _split)
  workers, waits = make(parts, actors, begin, reports)
  return Segment([*workers, Worker('writer', fire, None, [Port(reports)], [], 2**62)], waits)


def _fused(parts: Parts, actors: Sequence[Actor], begin: Begin, reports: HandOff):
  """One worker fires one program that makes `updates_per_call` updates."""
  (actor,) = actors
  total = parts.config['total_steps']
  calls = min(parts.config['placement']['updates_per_call'], begin.updates)
  fused = rollout_updates.make_fused(wiring.make_rollout(parts, actor.pools), parts.learn, calls)
  state = jax.tree.map(lambda x: x.addressable_data(0), begin.state)  # to be donated, not a copy
  program = actor.pools.load(fused, (state, actor.state, calls, total), donate=(0, 1))

  def fire(carry: Learning):
    limit = min(calls, begin.update + begin.updates - carry.update)
    state, actor_state, count, metrics = program(carry.train, carry.actor, limit, total)
    count = number(count)  # waits for the call
    item = Report(metrics, count, (wiring.delay(parts, 0),) * count, (0.0,) * count)
    update = carry.update + count
    return Learning(state, update, actor_state), [Stamped(item, update)]

  learner = Worker('learner', fire, Learning(state, begin.update, actor.state), [],
                   [Port(reports)], -(-begin.updates // calls),
                   lambda carry: begin.ended(carry.train))
  return [learner], lambda: Waits(0.0, 0.0)


def _split(parts: Parts, actors: Sequence[Actor], begin: Begin, reports: HandOff):
  """Actors and learner as programs of their own."""
  place, arrival, n = parts.place, parts.scheme.arrival, begin.updates
  num_envs, steps = parts.config['env']['num_envs'], parts.gradient_steps
  params = wiring.parameters(parts, actors, begin, begin.update)
  if arrival:
    made: list[HandOff] = [Arrival('rollouts', len(actors))] * len(actors)
  else:
    made = [wiring.rollouts_of(i, actor.first_env, n, num_envs, place.mesh)
            for i, actor in enumerate(actors)]

  def fire(carry: Learning, *items: Stamped):
    update = carry.update
    wiring.check_lag(parts.scheme, update, begin.update, items)
    values = [item.value for item in items]
    if arrival:  # whoever made them, they stand in the batch as they came
      values = [placement.scatter(x, i * num_envs // len(items), num_envs, place.mesh)
                for i, x in enumerate(values)]
    with jax.profiler.TraceAnnotation('learn'):
      state, metrics = parts.learner(carry.train, placement.gather(values, place.mesh))
    behind = sum(update - item.version for item in items) / len(items)
    item = Report(metrics, 1, (wiring.delay(parts, behind * steps),), (0.0,))
    fresh = Stamped(state.params, update + 1)
    return Learning(state, update + 1), [*[fresh] * len(params), Stamped(item, update + 1)]

  learner = Worker('learner', fire, Learning(begin.state, begin.update),
                   [Port(h) for h in made],
                   [Port(h) for h in (*params, reports)],
                   n, lambda carry: begin.ended(carry.train))
  workers = [wiring.actor(parts, i, actor, begin, *ends, n * (len(actors) if arrival else 1))
             for i, (actor, *ends) in enumerate(zip(actors, params, made, strict=True))]
  return [*workers, learner], wiring.waits(params, made)


def _free(parts: Parts, actors: Sequence[Actor], begin: Begin, reports: HandOff):
  """Actors that fill a replay, and a learner that draws from it, each as fast as it can."""
  config, mesh, options = parts.config, parts.place.mesh, parts.config['replay']
  envs = config['env']['num_envs'] // config['num_grad_shards']  # of a group
  begun = number(begin.state.target.gradient_steps)
  params = wiring.parameters(parts, actors, begin, begun)
  side_by_side = jax.jit(rollout_updates.concatenate)
  rate = Rate(options['samples_per_insert'], options['tolerance'],
              options['gradient_steps'] * options['batch_size'],
              experiment.batch_rows(config) // len(actors), len(actors))
  made = Inbox('rollouts', len(actors), rate.wants, lambda item: (
      item[0], placement.everywhere(side_by_side(item[1]), mesh)))
  nothing = placement.everywhere((jnp.int32(0), jnp.zeros(2, jnp.uint32)), mesh)

  def fire(carry: Learning, arrived: Stamped):
    state, seen = carry.train, nothing
    before = number(state.target.gradient_steps)
    late = [before - item.version for item in arrived.value]
    late = sum(late) / len(late) if late else carry.late
    with jax.profiler.TraceAnnotation('add'):
      for first_env, new in (item.value for item in arrived.value):
        state, counts = parts.replay.insert(state, new, np.int32(first_env // envs))
        seen = jax.tree.map(jnp.add, seen, counts)
      rate.count(number(seen[0]), 0)
    with jax.profiler.TraceAnnotation('learn'):
      count = options['gradient_steps'] if rate.may_draw() else 0
      state, metrics = parts.replay.learn(state, np.int32(count), *seen)
    rate.count(0, number(metrics['sampled'][0]))
    version = number(state.target.gradient_steps)
    episodes = [new.episodes for _, new in (item.value for item in arrived.value)]
    metrics['episodes'] = _end_to_end(jax.device_get(episodes))
    fresh = Stamped(state.params, version)
    item = Report(metrics, 1, (wiring.delay(parts, late),), (0.0,))
    return Learning(state, late=late), [*[fresh] * len(params), Stamped(item, version)]

  def tagged(worker: Worker, first_env: int) -> Worker:
    def fire(state, params):
      state, (made,) = worker.fire(state, params)
      return state, [made._replace(value=(first_env, made.value))]
    return worker._replace(fire=fire)

  learner = Worker('learner', fire, Learning(begin.state), [Port(made)],
                   [Port(h) for h in (*params, reports)], begin.updates,
                   lambda carry: begin.ended(carry.train))
  workers = [tagged(wiring.actor(parts, i, actor, begin, p, made, 2**62), actor.first_env)
             for i, (actor, p) in enumerate(zip(actors, params, strict=True))]
  return [*workers, learner], wiring.waits(params, [made] * len(actors))


def _end_to_end(episodes: Sequence[Episodes]) -> Episodes:
  """As of a report of one update, [1, T, B]; of none, empty."""
  if not episodes:
    return Episodes(*(np.zeros((1, 0, 0), dtype) for dtype in (bool, np.float32, np.int32)))
  return jax.tree.map(lambda *x: np.concatenate(x, axis=1)[None], *episodes)


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


def _central(parts: Parts, actors: Sequence[Actor], begin: Begin, reports: HandOff):
  """Actors, workers that make gradients, and one centre that applies them.

  The centre answers each gradient with the parameters after it, so a worker never has two under
  way; and actors after the last gradient of a rollout.
  """
  count, n, steps = len(parts.gradients), begin.updates, parts.gradient_steps
  centre = placement.mesh_of([parts.place.workers[0]])
  version = begin.update * steps
  per_worker, num_envs = len(actors) // count, parts.config['env']['num_envs'] // count
  params = wiring.parameters(parts, actors, begin, version)
  made = [wiring.rollouts_of(i, actor.first_env % num_envs, n, num_envs,
                             parts.gradients[i // per_worker].mesh)
          for i, actor in enumerate(actors)]
  answers = [DoubleBuffer(f'parameters for worker {i}', n * steps, 0,
                          lambda p, to=part.mesh: placement.replicate(p, to))
             for i, part in enumerate(parts.gradients)]
  for handoff in answers:
    handoff.prime(Stamped(begin.state.params, version))

  def to_centre(share: Share) -> Share:
    there = jax.device_put((share.groups, share.seen), centre.devices.flat[0])
    return share._replace(groups=there[0], seen=there[1])
  shares = Arrival('gradients', count, to_centre)
  workers = [wiring.actor(parts, i, actor, begin, *ends, n)
             for i, (actor, *ends) in enumerate(zip(actors, params, made, strict=True))]
  workers += [
      _gradient_worker(parts, i, begin, made[i * per_worker:(i + 1) * per_worker], answer, shares)
      for i, answer in enumerate(answers)]
  state = Central(placement.replicate(begin.state, centre), version, {i: [] for i in range(count)})
  ports = [Port(h) for h in (*params, *answers, reports)]
  learner = Worker('learner', _centre(parts, begin, count, len(actors)), state, [Port(shares)],
                   ports, (n + count) * steps, lambda carry: carry.ended)
  return [*workers, learner], wiring.waits(params, made, count)


def _gradient_worker(parts: Parts, i: int, begin: Begin, made: Sequence[HandOff], answer: HandOff,
                     shares: HandOff) -> Worker:
  mesh, prepare, gradient = parts.gradients[i]
  count, steps = len(parts.gradients), parts.gradient_steps
  key = placement.replicate(begin.state.key, mesh)

  def fire(carry, *inputs: Stamped):
    k, prepared = carry
    *items, params = inputs
    update = begin.update + k // steps * count + i  # its number among all, if all are as fast
    if k % steps == 0:
      wiring.check_lag(parts.scheme, update, begin.update, items, steps)
      batch = placement.gather([item.value for item in items], mesh)
      prepared = prepare(params.value, jax.random.fold_in(key, update), batch)
    with jax.profiler.TraceAnnotation('gradient'):
      groups = gradient(params.value, prepared, k % steps)
    collected = sum(item.version for item in items) / len(items)
    seen = prepared.seen if k % steps == steps - 1 else None
    return (k + 1, prepared), [Stamped(Share(i, groups, collected, seen), params.version)]

  return Worker(f'worker {i}', fire, (0, None), [*[Port(h, steps) for h in made], Port(answer)],
                [Port(shares)], begin.updates * steps)


def _centre(parts: Parts, begin: Begin, workers: int, actors: int) -> Callable:
  """U: applies a share and answers its worker; with the last of an update, ends that."""
  scheme = parts.scheme

  def fire(carry: Central, item: Stamped):
    share = item.value
    train, made = parts.updates.step(carry.train, share.groups)
    delays = item.version - share.collected, carry.version - item.version  # CGD, GUD
    steps = [*carry.steps[share.worker], (made, delays)]
    carry = carry._replace(train=train, version=carry.version + 1)
    ended, fresh_for, report = False, [], None
    if share.seen is not None:
      made, delays = zip(*steps, strict=True)
      train, metrics = parts.updates.finish(train, share.seen, list(made))
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
