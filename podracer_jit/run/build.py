"""From a config to operations, and from those to segments with environments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from podracer_jit.actor import asynchronous, priorities, rollouts
from podracer_jit.agents import networks, optimizers, q_networks
from podracer_jit.envs import envpool_envs
from podracer_jit.learner import replay_updates, rollout_updates, sharding
from podracer_jit.losses.objectives import OBJECTIVES
from podracer_jit.numerics.deterministic import AXIS, exact_sum, plain_sum
from podracer_jit.replay import buffer
from podracer_jit.run import checks, experiment
from podracer_jit.run.metrics import Report
from podracer_jit.runtime import placement
from podracer_jit.schemes import graphs, table, wiring
from podracer_jit.schemes.table import SCHEMES
from podracer_jit.types import Params, Target, TrainState


def make_parts(config: Mapping[str, Any]) -> wiring.Parts:
  """Checks the config and the devices and builds everything but environments.

  Raises:
    ValueError: naming the field, its value and what would be right.
  """
  spec, scheme = checks.check(config), SCHEMES[config['scheme']]
  place = placement.resolve(config['placement'], config['num_shards'])
  if config['num_grad_shards'] % place.mesh.size:
    raise ValueError(f'num_grad_shards: {config["num_grad_shards"]} groups cannot be split evenly '
                     f'by {place.mesh.size} learner devices (learner_devices, in each process)')
  actors = len(place.actors) * place.processes
  if config['env_batch'] and config['num_shards'] != actors:
    raise ValueError('num_shards: must be the number of actors where they are asynchronous '
                     f'(env_batch = {config["env_batch"]}), {actors}; got {config["num_shards"]}')
  if place.processes > 1 and (scheme.alone or scheme.central or not scheme.repeats):
    raise ValueError(f'scheme: {config["scheme"]} is for one process, not {place.processes}; '
                     'sync, cleanba and ddppo take several')
  if (scheme.alone or scheme.colocated) and place.actors != place.workers:
    raise ValueError(f'scheme: {config["scheme"]} acts where it learns; with actor_platform = '
                     f'{config["placement"]["actor_platform"]} actors are on {place.actors}, '
                     f'learners on {place.workers}')
  network = _make_network(config, spec)
  optimizer = optimizers.make(config['optimizer'])
  rate = optimizers.make_learning_rate(config['optimizer'], config['total_steps'])
  if 'replay' in config:
    return _with_replay(config, spec, scheme, place, network, optimizer, rate)
  options = {k: v for k, v in config['loss'].items() if k != 'name'}
  objective = OBJECTIVES[config['loss']['name']](
      network.apply, network.policy, config['unroll_length'], options, bool(network.core))
  sizes = rollout_updates.Sizes(
      config['env']['num_envs'], *(config[name] for name in rollout_updates.Sizes._fields[1:]))
  shared = sizes  # by the workers that make gradients
  if scheme.each:
    count = len(place.workers)
    shared = sizes._replace(num_envs=sizes.num_envs // count,
                            num_grad_shards=sizes.num_grad_shards // count)
  meshes = [placement.mesh_of([d]) for d in place.workers] if scheme.each else [place.mesh]
  by_mesh = {mesh: sharding.gradient_programs(objective, shared, mesh) for mesh in meshes}
  sum_groups = exact_sum
  if not config['exact_reduce']:  # the usual way: what a device has is one group
    sum_groups, sizes = plain_sum, sizes._replace(num_grad_shards=place.mesh.size)
  learn = rollout_updates.make_learn(objective, optimizer, rate, sizes, place.mesh.size, sum_groups)
  return wiring.Parts(
      config, spec, scheme, place, network, optimizer, learn,
      sharding.fused_learner(learn, place.mesh), [by_mesh[mesh] for mesh in meshes],
      sharding.update_programs(optimizer, rate))


def _with_replay(config: Mapping[str, Any], spec: envpool_envs.EnvSpec, scheme: table.Scheme,
                 place: placement.Placement, network: Any, optimizer: Any, rate: Callable
                 ) -> wiring.Parts:
  """The rest of `make_parts` for losses that draw from a replay."""
  options, loss, mesh = config['replay'], config['loss'], place.mesh
  sizes = replay_updates.Sizes(config['env']['num_envs'], config['num_grad_shards'], *(
      options[name] for name in ('batch_size', 'gradient_steps', 'min_size')),
      loss['target_every'], options['importance_exponent'], config['microbatch_rows'])
  memory = make_memory(config, spec)
  insert = replay_updates.make_insert(memory, sizes, mesh.size)
  steps = replay_updates.make_steps(
      replay_updates.LOSSES[loss['name']](network, loss), memory,
      rollout_updates.make_update(optimizer, rate),
      sizes, mesh.size, exact_sum if config['exact_reduce'] else plain_sum)
  finish = replay_updates.make_finish(sizes, rate, mesh.size)
  learn = replay_updates.make_learn(insert, steps, finish, sizes, mesh.size)
  return wiring.Parts(
      config, spec, scheme, place, network, optimizer, learn, sharding.fused_learner(learn, mesh),
      (), None, sharding.replay_programs(insert, steps, finish, sizes, mesh))


def make_memory(config: Mapping[str, Any], spec: envpool_envs.EnvSpec) -> buffer.Replay:
  """The replay of each group of environments."""
  groups, options = config['num_grad_shards'], config['replay']
  return buffer.Replay(
      options['capacity'] // groups, config['env']['num_envs'] // groups, config['unroll_length'],
      spec.stack, config['loss']['n_step'], config['loss']['discount'], options['eviction'],
      options['priority_exponent'], options['eviction_exponent'])


def _make_network(config: Mapping[str, Any], spec: envpool_envs.EnvSpec) -> networks.ActorCritic:
  sizes = {k: v for k, v in config['network'].items() if k != 'name'}
  policy, normalised = experiment.make_policy(config, spec), config['normalise']
  if 'replay' in config:
    network = (q_networks.Deterministic(policy, **sizes) if config['loss']['name'] == 'dpg' else
               q_networks.make_dueling(config['network']['name'], policy, **sizes))
    _check_fits(network, config['network'], spec)
    return network
  moments = [name for name, field in (('obs', 'obs'), ('returns', 'reward'), ('values', 'value'))
             if normalised[field]]
  network = networks.make(config['network']['name'], policy, moments=moments, **sizes)
  _check_fits(network, config['network'], spec)
  return network


def _init(network: networks.ActorCritic, key: jax.Array, spec: envpool_envs.EnvSpec) -> Params:
  obs = jnp.zeros((1, 1, *spec.obs_shape), spec.obs_dtype)
  return network.init(key, obs, network.initial_core(1), jnp.ones((1, 1), bool))


def _check_fits(network: networks.ActorCritic, options: Mapping[str, Any],
                spec: envpool_envs.EnvSpec) -> None:
  """Refuses layers that leave nothing of an observation; computes nothing."""
  try:
    variables = jax.eval_shape(lambda: _init(network, jax.random.key(0), spec))
  except (IndexError, TypeError, ValueError, ZeroDivisionError):  # by shapes of nothing
    variables = {'nothing': jax.ShapeDtypeStruct((0,), jnp.float32)}
  if not all(x.size for x in jax.tree.leaves(variables)):
    raise ValueError(f'network.name: of {options["name"]} with {dict(options)} nothing is left of '
                     f'observations of {spec.obs_shape}; take smaller layers or larger frames')


def _keys(seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """For the first parameters, for learning, for acting."""
  return tuple(jax.random.split(jax.random.key(seed), 3))


def initial_state(parts: wiring.Parts, replay: bool = True) -> TrainState:
  """The train state of update 0, on the learner mesh; without the replay where it is not wanted."""
  def make(seed):
    init_key, learn_key, _ = _keys(seed)
    params = _init(parts.network, init_key, parts.spec)
    target = Target(params, jnp.int32(0)) if 'replay' in parts.config else ()
    return TrainState(params, parts.optimizer.init(params), jnp.int32(0), jnp.int32(0), learn_key,
                      target)

  state = placement.replicate(jax.jit(make)(parts.config['seed']), parts.place.mesh)
  return state._replace(replay=empty_replay(parts)) if replay and state.target else state


def empty_replay(parts: wiring.Parts, shapes: bool = False) -> buffer.State:
  """A replay's state at update 0, its groups on the devices that they belong to; or its shapes."""
  config, spec, policy = parts.config, parts.spec, parts.network.policy
  like = priorities.shapes(config['env']['num_envs'] // config['num_grad_shards'], spec.obs_shape,
                           spec.obs_dtype, spec.stack, policy)
  memory = make_memory(config, spec)
  sharding = NamedSharding(parts.place.mesh, PartitionSpec(AXIS))
  def make():
    return memory.init(config['num_grad_shards'], like)
  if shapes:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
                        jax.eval_shape(make))
  return jax.jit(make, out_shardings=sharding)()


def actor_state(parts: wiring.Parts, shards: Sequence[envpool_envs.Shard],
                keys: Sequence[jax.Array], first_env: int) -> rollouts.ActorState:
  """The state of an actor of these shards, whose environments begin with `first_env`."""
  config, spec = parts.config, parts.spec
  if config['env_batch']:
    like = jax.ShapeDtypeStruct(spec.obs_shape, spec.obs_dtype)
    return asynchronous.initial_state(shards[0], keys[0], like, parts.network.policy,
                                      config['unroll_length'])
  explore = experiment.exploration(config)
  if explore is not None:
    width = shards[0].num_envs
    firsts = range(first_env, first_env + width * len(shards), width)
    explore = [jnp.array(explore[first:first + width]) for first in firsts]
  state = rollouts.initial_state(shards, keys, parts.network.initial_core, explore)
  if 'replay' in config:
    state = priorities.initial_state(state, config['loss']['n_step'])
  return state


@contextlib.contextmanager
def segment(parts: wiring.Parts, state: TrainState, index: int, updates: int,
            report: Callable[[Report], None],
            stop: Callable[[], bool] = lambda: False) -> Iterator[wiring.Segment]:
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
          envpool_envs.Shard(config['env']['task'], experiment.env_options(config),
                     envpool_envs.env_seeds(config['seed'], index, i * width, width),
                     place.env_threads, config['env_batch'])
          for i in ids]
      pools = rollouts.Pools(shards)
      stack.callback(pools.close)
      keys = [jax.random.fold_in(act_key, i) for i in ids]
      acting = jax.device_put(actor_state(parts, shards, keys, ids[0] * width), device)
      actors_of_segment.append(wiring.Actor(pools, acting, device, ids[0] * width))
    begin = wiring.Begin(state, int(state.update), updates,
                  lambda s: (placement.any_process(stop(), place.mesh)
                             or wiring.number(s.steps) >= config['total_steps']))
    yield graphs.wire(parts, actors_of_segment, begin, report)
