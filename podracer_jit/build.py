"""From a config to operations, and from those to segments with environments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from podracer_jit import (
    envs,
    experiment,
    graphs,
    networks,
    ops,
    optimizers,
    placement,
    programs,
    rollouts,
    wiring,
)
from podracer_jit.exact import exact_sum, plain_sum
from podracer_jit.metrics import Report
from podracer_jit.objectives import OBJECTIVES
from podracer_jit.schemes import SCHEMES
from podracer_jit.types import Params, TrainState


def make_parts(config: Mapping[str, Any]) -> wiring.Parts:
  """Checks the config and the devices and builds everything but environments.

  Raises:
    ValueError: naming the field, its value and what would be right.
  """
  spec, scheme = experiment.check(config), SCHEMES[config['scheme']]
  place = placement.resolve(config['placement'], config['num_shards'])
  if config['num_grad_shards'] % place.mesh.size:
    raise ValueError(f'num_grad_shards: {config["num_grad_shards"]} groups cannot be split evenly '
                     f'by {place.mesh.size} learner devices (learner_devices, in each process)')
  if place.processes > 1 and (scheme.alone or scheme.central or not scheme.repeats):
    raise ValueError(f'scheme: {config["scheme"]} is for one process, not {place.processes}; '
                     'sync, cleanba and ddppo take several')
  if (scheme.alone or scheme.colocated) and place.actors != place.workers:
    raise ValueError(f'scheme: {config["scheme"]} acts where it learns; with actor_platform = '
                     f'{config["placement"]["actor_platform"]} actors are on {place.actors}, '
                     f'learners on {place.workers}')
  network = _make_network(config, spec)
  options = {k: v for k, v in config['loss'].items() if k != 'name'}
  objective = OBJECTIVES[config['loss']['name']](
      network.apply, network.policy, config['unroll_length'], options, bool(network.core))
  optimizer = optimizers.make(config['optimizer'])
  rate = optimizers.make_learning_rate(config['optimizer'], config['total_steps'])
  sizes = ops.Sizes(config['env']['num_envs'], *(config[name] for name in ops.Sizes._fields[1:]))
  shared = sizes  # by the workers that make gradients
  if scheme.each:
    count = len(place.workers)
    shared = sizes._replace(num_envs=sizes.num_envs // count,
                            num_grad_shards=sizes.num_grad_shards // count)
  meshes = [placement.mesh_of([d]) for d in place.workers] if scheme.each else [place.mesh]
  by_mesh = {mesh: programs.gradient_programs(objective, shared, mesh) for mesh in meshes}
  sum_groups = exact_sum
  if not config['exact_reduce']:  # the usual way: what a device has is one group
    sum_groups, sizes = plain_sum, sizes._replace(num_grad_shards=place.mesh.size)
  learn = ops.make_learn(objective, optimizer, rate, sizes, place.mesh.size, sum_groups)
  return wiring.Parts(
      config, spec, scheme, place, network, optimizer, learn,
      programs.fused_learner(learn, place.mesh), [by_mesh[mesh] for mesh in meshes],
      programs.update_programs(optimizer, rate))


def _make_network(config: Mapping[str, Any], spec: envs.EnvSpec) -> networks.ActorCritic:
  sizes = {k: v for k, v in config['network'].items() if k != 'name'}
  policy, normalised = experiment.make_policy(config, spec), config['normalise']
  moments = [name for name, field in (('obs', 'obs'), ('returns', 'reward'), ('values', 'value'))
             if normalised[field]]
  network = networks.make(config['network']['name'], policy, moments=moments, **sizes)
  _check_fits(network, config['network'], spec)
  return network


def _init(network: networks.ActorCritic, key: jax.Array, spec: envs.EnvSpec) -> Params:
  obs = jnp.zeros((1, 1, *spec.obs_shape), spec.obs_dtype)
  return network.init(key, obs, network.initial_core(1), jnp.ones((1, 1), bool))


def _check_fits(network: networks.ActorCritic, options: Mapping[str, Any],
                spec: envs.EnvSpec) -> None:
  """Refuses layers that leave nothing of an observation; computes nothing."""
  try:
    variables = jax.eval_shape(lambda: _init(network, jax.random.key(0), spec))
  except (TypeError, ValueError, ZeroDivisionError):  # whatever shapes of nothing lead to
    variables = {'nothing': jax.ShapeDtypeStruct((0,), jnp.float32)}
  if not all(x.size for x in jax.tree.leaves(variables)):
    raise ValueError(f'network.name: of {options["name"]} with {dict(options)} nothing is left of '
                     f'observations of {spec.obs_shape}; take smaller layers or larger frames')


def _keys(seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """For the first parameters, for learning, for acting."""
  return tuple(jax.random.split(jax.random.key(seed), 3))


def initial_state(parts: wiring.Parts) -> TrainState:
  """The train state of update 0, on the learner mesh."""
  def make(seed):
    init_key, learn_key, _ = _keys(seed)
    params = _init(parts.network, init_key, parts.spec)
    return TrainState(params, parts.optimizer.init(params), jnp.int32(0), jnp.int32(0), learn_key)

  return placement.replicate(jax.jit(make)(parts.config['seed']), parts.place.mesh)


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
          envs.Shard(config['env']['task'], experiment.env_options(config),
                     envs.env_seeds(config['seed'], index, i * width, width), place.env_threads)
          for i in ids]
      pools = rollouts.Pools(shards)
      stack.callback(pools.close)
      keys = [jax.random.fold_in(act_key, i) for i in ids]
      actor_state = jax.device_put(
          rollouts.initial_state(shards, keys, parts.network.initial_core), device)
      actors_of_segment.append(wiring.Actor(pools, actor_state, device, ids[0] * width))
    begin = wiring.Begin(state, int(state.update), updates,
                  lambda s: (placement.any_process(stop(), place.mesh)
                             or wiring.number(s.steps) >= config['total_steps']))
    yield graphs.wire(parts, actors_of_segment, begin, report)
