"""The config: every field with its default, and the checks that no bad one gets past."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections
import numpy as np

from podracer_jit import envs
from podracer_jit.networks import CORES, IMAGE_TORSOS, TORSOS
from podracer_jit.objectives import OBJECTIVES
from podracer_jit.policies import CONTINUOUS, Policy, categorical
from podracer_jit.schemes import SCHEMES

CORE = dict(core='none', core_size=128)  # none, gru or lstm, between torso and heads
RESNET = dict(channels=(16, 32, 32), blocks=2, hidden=256)
NETWORKS = {
    'impala_resnet': RESNET | CORE,
    'fixup_resnet': RESNET | CORE,
    'nature_cnn': dict(channels=(32, 64, 64), kernels=(8, 4, 3), strides=(4, 2, 1), hidden=512,
                       centre=False) | CORE,
    'mlp': dict(hidden=(64, 64), separate_critic=False) | CORE,
}
LOSSES = {
    'impala': dict(discount=0.99, vtrace_lambda=1.0, clip_rho=1.0, clip_pg_rho=1.0,
                   baseline_coef=0.5, entropy_coef=0.01),
    'ppo': dict(discount=0.99, gae_lambda=0.95, clip=0.1, clip_value=False, value_coef=0.5,
                entropy_coef=0.01, normalise_advantage=True, vtrace=False),
}
OPTIMIZERS = {
    # RMSProp as PyTorch's: epsilon outside the square root.
    'rmsprop': dict(learning_rate=6e-4, anneal=True, decay=0.99, eps=0.01, max_grad_norm=40.0,
                    kl_target=0.0),
    # kl_target: of PPO, 0 or the divergence that the rate adapts to, between 1e-6 and 1e-2; not
    # with anneal.
    'adam': dict(learning_rate=2.5e-4, anneal=True, b1=0.9, b2=0.999, eps=1e-5,
                 max_grad_norm=0.5, kl_target=0.0),
}
# Of what stands in LOSSES and OPTIMIZERS; the rest may be any finite number.
RANGES = {
    **dict.fromkeys(('discount', 'vtrace_lambda', 'gae_lambda', 'b1', 'b2', 'decay'), (0, 1)),
    **dict.fromkeys(('clip', 'clip_rho', 'clip_pg_rho', 'eps', 'baseline_coef', 'value_coef',
                     'kl_target'), (0, math.inf))}


def config(loss: str, network: str, optimizer: str, **fields: Any) -> ml_collections.ConfigDict:
  """A whole config: the named loss, network and optimizer with all they have, and `fields`.

  A config file goes on to set what makes its experiment; each field can be overridden by a flag.
  """
  whole = dict(
      scheme='cleanba',
      total_steps=50_000_000,  # valid agent steps
      seed=1,
      unroll_length=20,
      num_minibatches=1,
      num_epochs=1,
      num_shards=1,  # pools that the environments are split into, each with its own streams
      num_grad_shards=1,  # groups that a gradient is summed over; the most learner devices
      exact_reduce=True,  # False: a plain all-reduce of one group a device, other bits on each mesh
      microbatch_rows=0,  # network rows to a pass of the gradient; 0: a group's minibatch at once
      env=dict(task='', num_envs=128),  # and any option of EnvPool's, under its own name
      network=dict(name=network, **NETWORKS[network]),
      policy='auto',  # auto: categorical or gaussian, as the task's actions are; or CONTINUOUS
      # By running mean and deviation; value: of PPO, what the network says in deviations.
      normalise=dict(obs=False, reward=False, value=False),
      loss=dict(name=loss, **LOSSES[loss]),
      optimizer=dict(name=optimizer, **OPTIMIZERS[optimizer]),
      placement=dict(
          actor_devices=(0,), learner_devices=(0,), actors_per_device=1,
          env_threads=0,  # EnvPool threads of a pool; 0: the visible cores, shared by the pools
          actor_platform='auto',  # auto, gpu or cpu
          updates_per_call=16,  # of `fused`: updates between two looks from outside
          xla_threads=16),  # of XLA's CPU thread pool; changes bits, so part of the experiment
      checkpoint=dict(every_updates=1000, keep=3),  # a segment's length; how many to keep
      log=dict(every_seconds=10.0, window=100, tensorboard=True))
  whole.update(fields)
  return ml_collections.ConfigDict(whole)


def batch_rows(config: Mapping[str, Any]) -> int:
  """Rows of one update, invalid ones too."""
  return config['env']['num_envs'] * config['unroll_length']


def env_options(config: Mapping[str, Any]) -> dict[str, Any]:
  """EnvPool's own options among the fields of `env`."""
  return {k: v for k, v in config['env'].items() if k not in ('task', 'num_envs')}


def check(config: Mapping[str, Any]) -> envs.EnvSpec:
  """Refuses a config that cannot run; starts nothing.

  Raises:
    ValueError: one line that names the field, its value and what would be right.
  """
  for problem in _problems(config):
    raise ValueError(problem)
  spec = envs.make_spec(config['env']['task'], env_options(config))
  known = ('auto', 'categorical') if spec.num_actions else ('auto', *CONTINUOUS)
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


def make_policy(config: Mapping[str, Any], spec: envs.EnvSpec) -> Policy:
  """The policy that the config asks for, for the actions of the task."""
  if spec.num_actions:
    return categorical(spec.num_actions)
  kind = 'gaussian' if config['policy'] == 'auto' else config['policy']
  return CONTINUOUS[kind](np.array(spec.action_low, np.float32),
                          np.array(spec.action_high, np.float32))


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
  for part in ('loss', 'optimizer'):
    for name, value in config[part].items():
      low, high = RANGES.get(name, (-math.inf, math.inf))
      if isinstance(value, float) and not (math.isfinite(value) and low <= value <= high):
        yield f'{part}.{name}: must be between {low} and {high}, got {value}'
  if config['optimizer']['kl_target'] and config['loss']['name'] != 'ppo':
    yield f'optimizer.kl_target: only ppo measures it, not {config["loss"]["name"]}; must be 0'
  if config['normalise']['value'] and config['loss']['name'] != 'ppo':
    yield f'normalise.value: only ppo knows it, not {config["loss"]["name"]}'
  rate = config['optimizer']['learning_rate']
  if config['optimizer']['kl_target'] and config['optimizer']['anneal']:
    yield 'optimizer.kl_target: the rate either adapts or anneals; set optimizer.anneal = False'
  if config['optimizer']['kl_target'] and not 1e-6 <= rate <= 1e-2:
    yield f'optimizer.learning_rate: with kl_target it is between 1e-6 and 1e-2, got {rate}'
  for field in ('seed', 'microbatch_rows', 'placement.env_threads'):
    if _get(config, field) < 0:
      yield f'{field}: must not be negative, got {_get(config, field)}'
  for field in ('total_steps', 'seed'):
    if config[field] >= 2**31:
      yield f'{field}: must be below 2^31, got {config[field]}'
  yield from _misplaced(config)
  yield from _indivisible(config)


def _unknown(config: Mapping[str, Any]) -> Iterator[str]:
  for field, known in (('scheme', SCHEMES), ('network.name', TORSOS), ('loss.name', OBJECTIVES),
                       ('optimizer.name', OPTIMIZERS)):
    value = _get(config, field)
    if value not in known:
      yield f'{field}: there is no {value!r}; known are {", ".join(known)}'
  for part, tables in (('network', NETWORKS), ('loss', LOSSES), ('optimizer', OPTIMIZERS)):
    name, given = config[part]['name'], set(config[part]) - {'name'}
    for odd in sorted(given ^ set(tables[name])):
      yield f'{part}.{odd}: {name} {"needs it" if odd not in given else "does not have it"}; ' \
            f'its fields are {", ".join(tables[name])}'
  net = config['network']
  if net['core'] not in ('none', *CORES):
    yield f'network.core: must be none, {", ".join(CORES)}, got {net["core"]!r}'
  if net['core'] != 'none' and net.get('separate_critic'):
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
  for field in ('actor_devices', 'learner_devices'):
    value = placement[field]
    if not value or any(not isinstance(i, int) or i < 0 for i in value):
      yield f'placement.{field}: must be a tuple of device indices, such as (0, 1), got {value!r}'
    elif field == 'learner_devices' and len(set(value)) < len(value) and not scheme.each:
      yield f'placement.{field}: names a device twice, got {value}'
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
