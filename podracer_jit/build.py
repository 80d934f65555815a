"""From a config to operations, workers and hand-offs. The one place that knows all the parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from podracer_jit import envs, experiment, networks, ops, placement, rollouts
from podracer_jit.handoff import DoubleBuffer, Stamped
from podracer_jit.loops import Port, Worker
from podracer_jit.metrics import Report, Waits
from podracer_jit.objectives import OBJECTIVES
from podracer_jit.schemes import SCHEMES, Scheme
from podracer_jit.types import TrainState


class Parts(NamedTuple):
  """What stays the same over all segments of a run."""

  config: Mapping[str, Any]
  spec: envs.EnvSpec
  scheme: Scheme
  place: placement.Placement
  network: networks.ActorCritic
  optimizer: optax.GradientTransformation
  learn: Callable  # (state, rollout of one device) -> (state, metrics), to be jitted
  learner: Callable  # the same on the whole mesh, jitted once


def make_optimizer(options: Mapping[str, Any]) -> optax.GradientTransformation:
  """Clipping, then the named optimizer, without its learning rate."""
  if options['name'] == 'rmsprop':
    scale = optax.scale_by_rms(options['decay'], options['eps'], eps_in_sqrt=False)
  else:
    scale = optax.scale_by_adam(options['b1'], options['b2'], options['eps'])
  return optax.chain(optax.clip_by_global_norm(options['max_grad_norm']), scale)


def make_learning_rate(options: Mapping[str, Any], total_steps: int) -> Callable:
  """Rate by valid steps learned from: constant, or linear to 0 at total_steps."""
  start = options['learning_rate']
  if not options['anneal']:
    return lambda steps: jnp.float32(start)
  return lambda steps: start * jnp.maximum(0.0, 1.0 - steps.astype(jnp.float32) / total_steps)


def make_parts(config: Mapping[str, Any]) -> Parts:
  """Checks the config and the devices and builds everything but environments.

  Raises:
    ValueError: naming the field, its value and what would be right.
  """
  spec = experiment.check(config)
  place = placement.resolve(config['placement'], config['num_shards'])
  if config['num_grad_shards'] % place.mesh.size:
    raise ValueError(f'num_grad_shards: {config["num_grad_shards"]} groups cannot be split evenly '
                     f'by {place.mesh.size} learner devices (learner_devices, in each process)')
  if SCHEMES[config['scheme']].fused and place.processes > 1:
    raise ValueError(f'scheme: fused is one program on one device, not {place.processes} processes')
  sizes = {k: v for k, v in config['network'].items() if k != 'name'}
  network = networks.make(config['network']['name'], spec.num_actions, **sizes)
  _check_fits(network, config['network'], spec)
  options = {k: v for k, v in config['loss'].items() if k != 'name'}
  objective = OBJECTIVES[config['loss']['name']](network.apply, config['unroll_length'], options)
  optimizer = make_optimizer(config['optimizer'])
  rate = make_learning_rate(config['optimizer'], config['total_steps'])
  sizes = ops.Sizes(config['env']['num_envs'], *(config[name] for name in ops.Sizes._fields[1:]))
  sum_groups = ops.exact_sum
  if not config['exact_reduce']:  # the usual way: what a device has is one group
    sum_groups, sizes = ops.plain_sum, sizes._replace(num_grad_shards=place.mesh.size)
  learn = ops.make_learn(objective, optimizer, rate, sizes, place.mesh.size, sum_groups)
  return Parts(config, spec, SCHEMES[config['scheme']], place, network, optimizer, learn,
               _on_mesh(learn, place.mesh))


def _check_fits(network: networks.ActorCritic, options: Mapping[str, Any],
                spec: envs.EnvSpec) -> None:
  """Refuses layers that leave nothing of an observation; computes nothing."""
  obs = jax.ShapeDtypeStruct((1, *spec.obs_shape), spec.obs_dtype)
  try:
    variables = jax.eval_shape(network.init, jax.eval_shape(lambda: jax.random.key(0)), obs)
  except (TypeError, ValueError, ZeroDivisionError):  # whatever shapes of nothing lead to
    variables = {'nothing': jax.ShapeDtypeStruct((0,), jnp.float32)}
  if not all(x.size for x in jax.tree.leaves(variables)):
    raise ValueError(f'network.name: of {options["name"]} with {dict(options)} nothing is left of '
                     f'observations of {spec.obs_shape}; take smaller layers or larger frames')


def _on_mesh(learn: Callable, mesh: jax.sharding.Mesh) -> Callable:
  """learn over the whole mesh: state replicated and donated, rollouts cut by environment."""

  def learner(state, rollout):
    def whole(state, rollout):
      state, metrics = learn(state, rollout)
      metrics['episodes'] = jax.lax.all_gather(metrics['episodes'], ops.AXIS, axis=1, tiled=True)
      return state, metrics

    state, metrics = jax.shard_map(
        whole, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec(None, ops.AXIS)),
        out_specs=PartitionSpec(), check_vma=False)(state, rollout)
    return state, jax.tree.map(lambda x: x[None], metrics)  # a report of one update

  return jax.jit(learner, donate_argnums=0)


def _keys(seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """For the first parameters, for learning, for acting."""
  return tuple(jax.random.split(jax.random.key(seed), 3))


def initial_state(parts: Parts) -> TrainState:
  """The train state of update 0, on the learner mesh."""
  def make(seed):
    init_key, learn_key, _ = _keys(seed)
    obs = jnp.zeros((1, *parts.spec.obs_shape), parts.spec.obs_dtype)
    params = parts.network.init(init_key, obs)
    return TrainState(params, parts.optimizer.init(params), jnp.int32(0), jnp.int32(0), learn_key)

  return placement.replicate(jax.jit(make)(parts.config['seed']), parts.place.mesh)


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


class Learning(NamedTuple):
  """The state of the worker that learns."""

  train: TrainState
  ended: bool  # nothing more to learn: total_steps reached, or asked to stop
  actor: rollouts.ActorState | None = None  # in `fused`, where one program does it all


class Segment(NamedTuple):
  """The graph of one segment, ready to run."""

  workers: list[Worker]  # the state of the one called 'learner' is a Learning
  waits: Callable[[], Waits]


@contextlib.contextmanager
def segment(parts: Parts, state: TrainState, index: int, updates: int,
            report: Callable[[Report], None],
            stop: Callable[[], bool] = lambda: False) -> Iterator[Segment]:
  """Builds segment `index`: fresh pools, hand-offs primed with `state`, `updates` of them.

  Args:
    parts: of the run.
    state: the train state to begin from; donated.
    index: of the segment, from 0: the streams of its environments depend on it.
    updates: how many it has, unless total_steps are reached or `stop` says so.
    report: called with each Report by a thread of its own.
    stop: asked after every update (of `fused`: after every call).

  Yields:
    The segment. Its pools are closed on the way out, once their programs have finished.
  """
  config, place = parts.config, parts.place
  actors = [place.actors[0]] if parts.scheme.fused else place.actors
  per_actor = config['num_shards'] // (len(actors) * place.processes)
  width = config['env']['num_envs'] // config['num_shards']
  act_key = jax.random.fold_in(_keys(config['seed'])[2], index)
  with contextlib.ExitStack() as stack:
    actors_of_segment = []
    for a, device in enumerate(actors, place.process * len(actors)):
      ids = range(a * per_actor, (a + 1) * per_actor)
      shards = [
          envs.Shard(config['env']['task'], experiment.env_options(config),
                     envs.env_seeds(config['seed'], index, i * width, width), place.env_threads)
          for i in ids]
      pools = rollouts.Pools(shards)
      stack.callback(pools.close)
      keys = [jax.random.fold_in(act_key, i) for i in ids]
      actor_state = jax.device_put(rollouts.initial_state(shards, keys), device)
      actors_of_segment.append(Actor(pools, actor_state, device, ids[0] * width))
    begin = Begin(state, int(state.update), updates,
                  lambda s: (placement.any_process(stop(), place.mesh)
                             or _number(s.steps) >= config['total_steps']))
    wire = _wire_fused if parts.scheme.fused else _wire_split
    yield wire(parts, actors_of_segment, begin, report)


def _number(x: jax.Array) -> int:
  """A count that steers the run: four bytes to the host, and no other transfer in a loop."""
  return int(jax.device_get(x))


def _writer(report: Callable[[Report], None], reports: DoubleBuffer, firings: int) -> Worker:
  def fire(state: None, item: Stamped):
    report(item.value)
    return state, ()
  return Worker('writer', fire, None, [Port(reports)], [], firings)


def _make_rollout(parts: Parts, pools: rollouts.Pools) -> Callable:
  return rollouts.make_rollout(pools.shards, parts.network.apply, parts.config['unroll_length'])


def _wire_fused(parts: Parts, actors: Sequence[Actor], begin: Begin, report: Callable) -> Segment:
  """One worker fires one program that makes `updates_per_call` updates."""
  (actor,) = actors
  total = parts.config['total_steps']
  calls = min(parts.config['placement']['updates_per_call'], begin.updates)
  firings = -(-begin.updates // calls)
  fused = ops.make_fused(_make_rollout(parts, actor.pools), parts.learn, calls)
  state = placement.put_params(begin.state, actor.device)
  program = actor.pools.load(fused, (state, actor.state, calls, total), donate=(0, 1))

  def fire(carry: Learning):
    limit = min(calls, begin.update + begin.updates - _number(carry.train.update))
    state, actor_state, count, metrics = program(carry.train, carry.actor, limit, total)
    count = _number(count)  # waits for the call
    item = Report(metrics, count, (0,) * count)
    return (Learning(state, begin.ended(state), actor_state),
            [Stamped(item, _number(state.update))])

  reports = DoubleBuffer('reports', firings)
  learner = Worker('learner', fire, Learning(state, False, actor.state), [], [Port(reports)],
                   firings, lambda carry: carry.ended)
  return Segment([learner, _writer(report, reports, firings)], lambda: Waits(0.0, 0.0))


def _wire_split(parts: Parts, actors: Sequence[Actor], begin: Begin, report: Callable) -> Segment:
  """Actors and learner as programs of their own, joined by one-slot hand-offs."""
  mesh, lag, n = parts.place.mesh, parts.scheme.lag, begin.updates
  num_envs = parts.config['env']['num_envs']
  params = [DoubleBuffer(f'parameters for actor {i}', n, lag,
                         lambda p, to=actor.device: placement.put_params(p, to))
            for i, actor in enumerate(actors)]
  made = [DoubleBuffer(f'rollouts of actor {i}', n, transfer=lambda r, first=actor.first_env:
                       placement.scatter(r, first, num_envs, mesh))
          for i, actor in enumerate(actors)]
  reports = DoubleBuffer('reports', n)
  for handoff in params:
    handoff.prime(Stamped(begin.state.params, begin.update))
  learner = _learner(parts, begin, made, params, reports)
  workers = [_actor(parts, f'actor {i}', actor, begin, *ends)
             for i, (actor, *ends) in enumerate(zip(actors, params, made, strict=True))]

  def waits() -> Waits:
    of_actors = sum(p.get_wait_s + r.put_wait_s for p, r in zip(params, made, strict=True))
    return Waits(of_actors / len(actors),
                 sum(r.get_wait_s + p.put_wait_s for p, r in zip(params, made, strict=True)))

  return Segment([*workers, learner, _writer(report, reports, n)], waits)


def _actor(parts: Parts, name: str, actor: Actor, begin: Begin, params: DoubleBuffer,
           made: DoubleBuffer) -> Worker:
  like = placement.put_params(begin.state.params, actor.device)
  program = actor.pools.load(_make_rollout(parts, actor.pools), (like, actor.state), donate=(1,))

  def fire(state: rollouts.ActorState, params: Stamped):
    with jax.profiler.TraceAnnotation('rollout'):
      state, made = jax.block_until_ready(program(params.value, state))
    return state, [Stamped(made, params.version)]

  return Worker(name, fire, actor.state, [Port(params)], [Port(made)], begin.updates)


def _learner(parts: Parts, begin: Begin, made: Sequence[DoubleBuffer],
             params: Sequence[DoubleBuffer], reports: DoubleBuffer) -> Worker:
  def fire(carry: Learning, *parts_of_batch: Stamped):
    update = _number(carry.train.update)
    lag = min(update - begin.update, parts.scheme.lag)
    for item in parts_of_batch:
      if update - item.version != lag:
        raise AssertionError(f'update {update} was given a rollout made by version '
                             f'{item.version}: its lag should be {lag}')
    batch = placement.gather([item.value for item in parts_of_batch], parts.place.mesh)
    with jax.profiler.TraceAnnotation('learn'):
      state, metrics = parts.learner(carry.train, batch)
      ended = begin.ended(state)
    fresh = None if ended else Stamped(state.params, update + 1)
    return (Learning(state, ended),
            [*[fresh] * len(params), Stamped(Report(metrics, 1, (lag,)), update + 1)])

  return Worker('learner', fire, Learning(begin.state, False), [Port(h) for h in made],
                [Port(h) for h in (*params, reports)], begin.updates,  # the actors wait, go first
                lambda carry: carry.ended)
