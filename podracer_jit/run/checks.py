"""The checks that no bad config gets past; nothing is started for them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from podracer_jit.agents.networks import CORES, IMAGE_TORSOS
from podracer_jit.agents.policies import CONTINUOUS
from podracer_jit.envs import envpool_envs
from podracer_jit.run import experiment
from podracer_jit.run.experiment import (
  LOSSES,
  NETWORKS,
  OPTIMIZERS,
  REPLAY,
  batch_rows,
  env_options,
  has_replay,
)
from podracer_jit.runtime.placement import bad_devices
from podracer_jit.schemes.table import SCHEMES

# Of what stands in LOSSES and OPTIMIZERS; the rest may be any finite number.
RANGES = {
    **dict.fromkeys(('discount', 'vtrace_lambda', 'gae_lambda', 'b1', 'b2', 'decay'), (0, 1)),
    **dict.fromkeys(('clip', 'clip_rho', 'clip_pg_rho', 'eps', 'baseline_coef', 'value_coef',
                     'kl_target', 'noise', 'dqda_clip', 'epsilon_alpha', 'samples_per_insert'),
                    (0, math.inf)),
    # Powers of small errors beyond these would be no numbers any more.
    **dict.fromkeys(('priority_exponent', 'importance_exponent'), (0, 2)),
    'epsilon': (0, 1), 'eviction_exponent': (-2, 0)}


def check(config: Mapping[str, Any]) -> envpool_envs.EnvSpec:
  """Refuses a config that cannot run; starts nothing.

  Raises:
    ValueError: one line that names the field, its value and what would be right.
  """
  for problem in _problems(config):
    raise ValueError(problem)
  spec = envpool_envs.make_spec(config['env']['task'], env_options(config))
  loss = config['loss']['name']
  if (loss == 'dqn' and not spec.num_actions) or (loss == 'dpg' and spec.num_actions):
    raise ValueError(f'loss.name: {loss} wants {"continuous" if spec.num_actions else "discrete"} '
                     f'actions, which those of {spec.task} are not')
  if spec.stack > 1 and has_replay(config) and config['replay']['eviction'] != 'fifo':
    raise ValueError(f'replay.eviction: the frames of {spec.task} are stored once, in a ring; '
                     'must be fifo')
  known = ('auto', 'categorical') if spec.num_actions else ('auto', *CONTINUOUS)
  known = known[:1] if has_replay(config) else known
  if config['policy'] not in known:
    raise ValueError(f'policy: must be one of {", ".join(known)} for the actions of {spec.task}, '
                     f'got {config["policy"]!r}')
  if spec.action_low and not np.isfinite([*spec.action_low, *spec.action_high]).all():
    raise ValueError(f'env.task: the actions of {spec.task} have no bounds')
  name = config['network']['name']
  if name in IMAGE_TORSOS and len(spec.obs_shape) != 3:
    raise ValueError(f'network.name: {name} wants images (C, H, W), {spec.task} gives '
                     f'{spec.obs_shape}; mlp takes any shape')
  if name in IMAGE_TORSOS and config['normalise']['obs']:
    raise ValueError(f'normalise.obs: {name} scales images itself; must be False')
  return spec


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
  yield from _unknown(config)
  for field in ('total_steps', 'unroll_length', 'num_minibatches', 'num_epochs', 'num_shards',
                'num_grad_shards', 'env.num_envs', 'placement.actors_per_device',
                'placement.updates_per_call', 'placement.xla_threads', 'checkpoint.every_updates',
                'checkpoint.keep', 'log.window'):
    value = _get(config, field)
    if value < 1:
      yield f'{field}: must be at least 1, got {value}'
  for field in ('optimizer.learning_rate', 'optimizer.max_grad_norm', 'log.every_seconds'):
    if not _get(config, field) > 0:
      yield f'{field}: must be above 0, got {_get(config, field)}'
  for part in ('loss', 'optimizer', *(['replay'] if has_replay(config) else ())):
    for name, value in config[part].items():
      low, high = RANGES.get(name, (-math.inf, math.inf))
      if isinstance(value, float) and not (math.isfinite(value) and low <= value <= high):
        yield f'{part}.{name}: must be between {low} and {high}, got {value}'
  for name in ('b1', 'b2', 'eps'):  # in 32 bits, in which 0 would be divided by 0
    value = np.float32(config['optimizer'].get(name, 0.5))
    if not (value > 0 if name == 'eps' else value < 1):
      yield (f'optimizer.{name}: must be {"above 0" if name == "eps" else "below 1"}, got '
             f'{config["optimizer"][name]}')
  if config['optimizer']['kl_target'] and config['loss']['name'] != 'ppo':
    yield f'optimizer.kl_target: only ppo measures it, not {config["loss"]["name"]}; must be 0'
  if config['normalise']['value'] and config['loss']['name'] != 'ppo':
    yield f'normalise.value: only ppo knows it, not {config["loss"]["name"]}'
  rate = config['optimizer']['learning_rate']
  if config['optimizer']['kl_target'] and config['optimizer']['anneal']:
    yield 'optimizer.kl_target: the rate either adapts or anneals; set optimizer.anneal = False'
  if config['optimizer']['kl_target'] and not 1e-6 <= rate <= 1e-2:
    yield f'optimizer.learning_rate: with kl_target it is between 1e-6 and 1e-2, got {rate}'
  for field in ('seed', 'microbatch_rows', 'placement.env_threads', 'env_batch'):
    if _get(config, field) < 0:
      yield f'{field}: must not be negative, got {_get(config, field)}'
  for field in ('total_steps', 'seed'):
    if config[field] >= 2**31:
      yield f'{field}: must be below 2^31, got {config[field]}'
  yield from _misplaced(config)
  yield from _indivisible(config)
  yield from _asynchronous(config)
  yield from _replay(config)


def _asynchronous(config: Mapping[str, Any]) -> Iterator[str]:
  size, shard = config['env_batch'], config['env']['num_envs'] // config['num_shards']
  if not size:
    return
  if shard % size or size >= shard:
    yield (f'env_batch: must be 0 or a part of the {shard} environments of a shard that divides '
           f'them, got {size}')
  if has_replay(config):
    yield f'env_batch: {config["loss"]["name"]} draws from a replay, of rows in time; must be 0'
  if SCHEMES[config['scheme']].fused:
    yield f'env_batch: {config["scheme"]} waits for all environments; must be 0, got {size}'
  if config['network'].get('core', 'none') != 'none':
    yield (f'env_batch: a recurrent network (network.core = {config["network"]["core"]}) wants all '
           f'environments at once; must be 0, got {size}')
  if config['normalise']['reward']:
    yield ('env_batch: normalise.reward wants the returns of all environments in order; must be 0, '
           f'got {size}')


def _replay(config: Mapping[str, Any]) -> Iterator[str]:
  loss, scheme = config['loss']['name'], SCHEMES[config['scheme']]
  if scheme.replay not in (None, has_replay(config)):
    yield (f'scheme: {config["scheme"]} is for losses {"with" if scheme.replay else "without"} a '
           f'replay, loss.name is {loss}')
  if not has_replay(config):
    return
  options = config['replay']
  for field in ('loss.n_step', 'loss.target_every', 'replay.capacity', 'replay.min_size',
                'replay.batch_size', 'replay.gradient_steps', 'replay.params_every'):
    if _get(config, field) < 1:
      yield f'{field}: must be at least 1, got {_get(config, field)}'
  for field, only in (('num_epochs', 1), ('num_minibatches', 1), ('normalise.obs', False),
                      ('normalise.reward', False), ('normalise.value', False)):
    if _get(config, field) != only:
      yield f'{field}: {loss} draws from a replay; must be {only}, got {_get(config, field)}'
  for field, only in (('core', 'none'), ('separate_critic', False)):
    if config['network'].get(field, only) != only:
      yield f'network.{field}: {loss} has no use for it; must be {only}'
  if options['eviction'] not in ('fifo', 'prioritised'):
    yield f'replay.eviction: must be fifo or prioritised, got {options["eviction"]!r}'
  if options['tolerance'] < 0:
    yield f'replay.tolerance: must not be negative, got {options["tolerance"]}'
  for field, least, what in (
      ('capacity', options['min_size'], 'replay.min_size'),
      ('capacity', batch_rows(config), 'env.num_envs * unroll_length')):
    if options[field] < least:
      yield f'replay.{field}: must be at least {what} = {least}, got {options[field]}'
  groups = config['num_grad_shards']
  for field in ('batch_size', 'capacity'):
    if options[field] % groups:
      yield f'replay.{field}: {options[field]} cannot be split evenly by num_grad_shards = {groups}'
  place = config['placement']
  actors = len(place['actor_devices']) * place['actors_per_device']
  ratio, drawn = options['samples_per_insert'], options['gradient_steps'] * options['batch_size']
  added = batch_rows(config) // max(actors, 1)
  if scheme.free and ratio and 2 * options['tolerance'] < drawn + ratio * added:
    yield (f'replay.tolerance: must be at least {math.ceil((drawn + ratio * added) / 2)}, half of '
           f'what a call draws ({drawn}) and a rollout allows ({ratio:g} x {added}), got '
           f'{options["tolerance"]}')
  for field, only in (('params_every', 1), ('samples_per_insert', 0)):
    if not scheme.free and options[field] != only:
      yield (f'replay.{field}: of apex alone; with {config["scheme"]} it must be {only}, got '
             f'{options[field]}')
  layers = 'critic_hidden' if loss == 'dpg' else 'hidden'
  if config['network'][layers] in ((), []):
    yield f'network.{layers}: {loss} needs at least one layer'
  if scheme.free and groups % actors:
    yield (f'num_grad_shards: {groups} groups, each with a replay, cannot be shared evenly by '
           f'{actors} actors')


def _unknown(config: Mapping[str, Any]) -> Iterator[str]:
  for field, known in (('scheme', SCHEMES), ('network.name', NETWORKS), ('loss.name', LOSSES),
                       ('optimizer.name', OPTIMIZERS)):
    value = _get(config, field)
    if value not in known:
      yield f'{field}: there is no {value!r}; known are {", ".join(known)}'
  whole = experiment.config(*(config[part]['name'] for part in ('loss', 'network', 'optimizer')))
  yield from _differing('', config, whole)
  for part in ('placement', 'normalise', 'checkpoint', 'log'):
    yield from _differing(f'{part}.', config[part], whole[part])
  for part, tables in (('network', NETWORKS), ('loss', LOSSES), ('optimizer', OPTIMIZERS)):
    name, given = config[part]['name'], set(config[part]) - {'name'}
    for odd in sorted(given ^ set(tables[name])):
      yield f'{part}.{odd}: {name} {"needs it" if odd not in given else "does not have it"}; ' \
            f'its fields are {", ".join(tables[name])}'
  net, loss = config['network'], config['loss']['name']
  if (net['name'] == 'deterministic') != (loss == 'dpg'):
    yield f'network.name: deterministic is for dpg, and dpg for nothing else; got {net["name"]} ' \
          f'with {loss}'
  if has_replay(config) and set(config.get('replay', {})) != set(REPLAY):
    yield f'replay: {loss} needs {", ".join(REPLAY)}; got {", ".join(config.get("replay", {}))}'
  if net.get('core', 'none') not in ('none', *CORES):
    yield f'network.core: must be none, {", ".join(CORES)}, got {net["core"]!r}'
  if net.get('core', 'none') != 'none' and net.get('separate_critic'):
    yield f'network.separate_critic: the critic would not remember; not with core = {net["core"]}'
  for field in net:
    value = net[field]
    sizes = value if isinstance(value, (tuple, list)) else (value,)
    if not isinstance(value, (str, bool)) and not all(isinstance(n, int) and n > 0 for n in sizes):
      yield f'network.{field}: must be positive whole numbers, got {value!r}'
  if net['name'] == 'nature_cnn' and len({len(net[k]) for k in ('channels', 'kernels', 'strides')}
                                         ) > 1:
    yield 'network.channels: channels, kernels and strides must be of equal length, got ' \
          f'{net["channels"]}, {net["kernels"]}, {net["strides"]}'


def _differing(prefix: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
  for name in sorted(set(given) ^ set(known)):
    near = difflib.get_close_matches(name, known, n=1) if name in given else ()
    yield (f'{prefix}{name}: {"there is no such field" if name in given else "is missing"}'
           + ''.join(f'; did you mean {prefix}{field}?' for field in near))


def _indivisible(config: Mapping[str, Any]) -> Iterator[str]:
  envs_, groups, minibatches = (
      config['env']['num_envs'], config['num_grad_shards'], config['num_minibatches'])
  learners = len(config['placement']['learner_devices'])
  for field, whole, name, divisor, unit in (
      ('env.num_envs', envs_, 'num_shards', config['num_shards'], 'environments'),
      ('env.num_envs', envs_, 'num_grad_shards', groups, 'environments'),
      ('num_grad_shards', groups, 'placement.learner_devices', learners, 'groups')):
    if divisor and whole % divisor:
      yield f'{field}: {whole} {unit} cannot be split evenly by {name} = {divisor}'
  rows = config['loss']['name'] == 'ppo' and config['network']['core'] == 'none'
  items = envs_ // groups * (config['unroll_length'] if rows else 1)
  if items % minibatches:
    yield (f'num_minibatches: the {items} items of a gradient group cannot be split into '
           f'{minibatches} minibatches')


def _misplaced(config: Mapping[str, Any]) -> Iterator[str]:
  placement, scheme = config['placement'], SCHEMES[config['scheme']]
  yield from bad_devices(placement)
  learners = placement['learner_devices']
  if len(set(learners)) < len(learners) and not scheme.each:
    yield f'placement.learner_devices: names a device twice, got {learners}'
  if placement['actor_platform'] not in ('auto', 'gpu', 'cpu'):
    yield ('placement.actor_platform: must be auto, gpu or cpu, '
           f'got {placement["actor_platform"]!r}')
  where = ', '.join(f'{k} = {placement[k]}'
                    for k in ('actor_devices', 'learner_devices', 'actors_per_device'))
  same = tuple(placement['actor_devices']) == tuple(placement['learner_devices'])
  one = len(placement['actor_devices']) == placement['actors_per_device'] == 1
  if scheme.alone and not (same and one):
    yield f'scheme: {config["scheme"]} is on one device, with one actor; placement has {where}'
  if scheme.colocated and not (same and placement['actors_per_device'] == 1):
    yield (f'scheme: the workers of {config["scheme"]} make rollouts and gradients, so the actor '
           f'devices are the learner devices, with an actor each; placement has {where}')
  actors = len(placement['actor_devices']) * placement['actors_per_device']
  if scheme.each and actors % len(placement['learner_devices']):
    yield (f'placement.learner_devices: {actors} actors cannot be shared evenly by '
           f'{len(placement["learner_devices"])} workers')
  if scheme.central and not config['exact_reduce']:
    yield f'exact_reduce: {config["scheme"]} always adds in a fixed order; must be True'


def _get(config: Mapping[str, Any], field: str) -> Any:
  for part in field.split('.'):
    config = config[part]
  return config
