"""The checks that need more than one part; they ask what parts declare, never their names.

All other checks stand beside the fields that they are of (`options.option`, `problems` of a part).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from podracer_jit import options as options_lib
from podracer_jit.agents import kinds
from podracer_jit.options import INT32_MAX
from podracer_jit.run.experiment import Experiment
from podracer_jit.run.settings import EnvOptions

MAX_ACTORS = 4096  # of a process, each with a thread


class Count(NamedTuple):
  """A field that says how many there are of something."""

  field: str
  number: int
  is_set: bool  # it has another value than by default
  unit: str  # of one

  def __str__(self) -> str:
    return f'{self.number} {self.unit}{"" if self.number == 1 else "s"}'


def uneven(whole: Count, divisor: Count) -> str:
  """Returns the line that says that `whole` cannot be split evenly, and what would be right.

  It names the field that somebody has set: the divisor's, if only that one is not the default.
  """
  if divisor.is_set and not whole.is_set:
    return (f'{divisor.field}: {divisor} cannot share {whole.field} = {whole.number} evenly; take '
            f'a number that divides {whole.number}, or a {whole.field} that is a multiple of '
            f'{divisor.number}')
  return (f'{whole.field}: {whole} cannot be split evenly by {divisor.field} = {divisor.number}; '
          f'take a multiple of {divisor.number}, or a number for {divisor.field} that divides '
          f'{whole.number}')


def problems(experiment: Experiment) -> Iterator[str]:
  """Yields what is wrong with an experiment, in a line each, that names the field."""
  yield from _too_large(experiment)
  yield from _network(experiment)
  yield from _algorithm(experiment)
  yield from _placement(experiment)
  yield from _indivisible(experiment)
  yield from _asynchronous(experiment)
  for wanted in (experiment.scheme.replay, experiment.scheme.graph.replay):
    if wanted not in (None, experiment.algorithm.learns_from_replay):
      yield (f'scheme: {experiment.scheme_name} is for losses {"with" if wanted else "without"} a '
             f'replay, loss.name is {experiment.loss_name}')
  if experiment.algorithm.learns_from_replay:
    yield from _replay(experiment)


def _too_large(experiment: Experiment) -> Iterator[str]:
  """Products that programs count in 32 bits, and threads."""
  num_envs, steps = experiment.env.num_envs, experiment.unroll_length
  rows = num_envs * (steps + 1)
  if rows > INT32_MAX:
    yield (f'unroll_length: the {steps} rows of env.num_envs = {num_envs} environments, and the '
           f'observations after them, are {rows:,} in all; must be below 2^31')
  if experiment.total_steps + rows > INT32_MAX:
    yield (f'total_steps: with the {experiment.batch_rows} rows of the last update it must be '
           f'below 2^31, got {experiment.total_steps}')
  place = experiment.placement
  if place.num_actors > MAX_ACTORS:
    yield (f'placement.actors_per_device: {place.actors_per_device} actors on each of '
           f'{len(place.actor_devices)} devices are {place.num_actors}; must be at most '
           f'{MAX_ACTORS} in a process')
  if not experiment.algorithm.learns_from_replay:
    gradients = experiment.num_epochs * experiment.num_minibatches
    if gradients > INT32_MAX:
      yield (f'num_minibatches: {experiment.num_minibatches} in each of num_epochs = '
             f'{experiment.num_epochs} are {gradients:,}; must be below 2^31')
    return
  replay = experiment.replay
  drawn = replay.gradient_steps * replay.batch_size
  if drawn > INT32_MAX:
    yield (f'replay.gradient_steps: {replay.gradient_steps} with replay.batch_size = '
           f'{replay.batch_size} draw {drawn:,} transitions; must be below 2^31')
  # Beyond its capacity a replay has rows whose end, or whose frames, are not there.
  margin = steps + experiment.algorithm.n_step + experiment.spec.stack + 1
  places = replay.capacity + num_envs * margin
  if places > INT32_MAX:
    yield (f'replay.capacity: {replay.capacity} transitions, and {margin} rows of env.num_envs = '
           f'{num_envs} that cannot be drawn, are {places:,}; must be below 2^31')


def _network(experiment: Experiment) -> Iterator[str]:
  """The network, the algorithm and the task's observations."""
  name, spec = experiment.network_name, experiment.spec
  kind, torso = experiment.algorithm.network_kind, experiment.torso_options
  made_from = kinds.provides(type(experiment.network))
  if made_from != kind.made_from:
    yield f'network.name: {experiment.loss_name} wants {kind.made_from}, {name} is {made_from}'
    return
  if not kind.takes_torso_options:
    for field, only in (('core', 'none'), ('separate_critic', False)):
      if getattr(torso, field) != only:
        yield f'network.{field}: {experiment.loss_name} has no use for it; must be {only}'
  if getattr(experiment.network, 'needs_images', False):
    if len(spec.obs_shape) != 3:
      others = [other for other, part in kinds.NETWORKS.items()
                if kinds.provides(part) == made_from and not getattr(part, 'needs_images', False)]
      yield (f'network.name: {name} wants images (C, H, W), {spec.task} gives {spec.obs_shape}; '
             f'{", ".join(others)} takes any shape')
    if experiment.normalise.obs:
      yield f'normalise.obs: {name} scales images itself; must be False'


def _algorithm(experiment: Experiment) -> Iterator[str]:
  """The algorithm, the optimizer and what is normalised."""
  name = experiment.loss_name
  if experiment.optimizer.kl_target and not experiment.algorithm.measures_kl:
    yield f'optimizer.kl_target: {name} does not measure how far the policy moves; must be 0'
  if experiment.normalise.value and not experiment.algorithm.normalises_values:
    yield f'normalise.value: {name} does not learn values in deviations; must be False'


def _placement(experiment: Experiment) -> Iterator[str]:
  """The scheme and where it runs."""
  place, scheme, name = experiment.placement, experiment.scheme, experiment.scheme_name
  learners = place.learner_devices
  if len(set(learners)) < len(learners) and not scheme.each:
    yield f'placement.learner_devices: names a device twice, got {learners}'
  where = ', '.join(f'{field} = {getattr(place, field)}'
                    for field in ('actor_devices', 'learner_devices', 'actors_per_device'))
  same = place.actor_devices == learners
  if scheme.alone and not (same and place.num_actors == 1):
    yield f'scheme: {name} is on one device, with one actor; placement has {where}'
  if scheme.colocated and not (same and place.actors_per_device == 1):
    yield (f'scheme: the workers of {name} make rollouts and gradients, so the actor devices are '
           f'the learner devices, with an actor each; placement has {where}')
  if scheme.each and place.num_actors % len(learners):
    yield (f'placement.learner_devices: {place.num_actors} actors cannot be shared evenly by '
           f'{len(learners)} workers')
  if scheme.graph.separate_updates and not experiment.exact_reduce:
    yield f'exact_reduce: {name} always adds in a fixed order; must be True'


def _indivisible(experiment: Experiment) -> Iterator[str]:
  """What must be shared out evenly."""
  num_envs, groups = experiment.env.num_envs, experiment.num_grad_shards
  learners = len(experiment.placement.learner_devices)
  envs_set = num_envs != options_lib.defaults(EnvOptions)['num_envs']
  envs = Count('env.num_envs', num_envs, envs_set, 'environment')
  shards = Count('num_shards', experiment.num_shards, experiment.differs('num_shards'), 'shard')
  gradient_groups = Count('num_grad_shards', groups, experiment.differs('num_grad_shards'),
                          'group')
  devices = Count('placement.learner_devices', learners,
                  experiment.placement.differs('learner_devices'), 'learner device')
  for whole, divisor in ((envs, shards), (envs, gradient_groups), (gradient_groups, devices)):
    if whole.number % divisor.number:
      yield uneven(whole, divisor)
  if experiment.algorithm.learns_from_replay:
    return
  unit = experiment.algorithm.minibatch_unit(experiment.torso_options.recurrent)
  elements = num_envs // groups * unit.elements(experiment.unroll_length)
  if elements % experiment.num_minibatches:
    yield (f'num_minibatches: the {elements} items of a gradient group cannot be split into '
           f'{experiment.num_minibatches} minibatches')


def _asynchronous(experiment: Experiment) -> Iterator[str]:
  """What cannot be together with actors that do not wait for all environments."""
  size, shard = experiment.env_batch, experiment.env.num_envs // experiment.num_shards
  if not size:
    return
  if shard % size or size >= shard:
    yield (f'env_batch: must be 0 or a part of the {shard} environments of a shard that divides '
           f'them, got {size}')
  if experiment.algorithm.learns_from_replay:
    yield f'env_batch: {experiment.loss_name} draws from a replay, of rows in time; must be 0'
  if experiment.scheme.graph.one_program:
    yield (f'env_batch: {experiment.scheme_name} waits for all environments; must be 0, got '
           f'{size}')
  if experiment.torso_options.recurrent:
    yield (f'env_batch: a recurrent network (network.core = {experiment.torso_options.core}) '
           f'wants all environments at once; must be 0, got {size}')
  if experiment.normalise.reward:
    yield ('env_batch: normalise.reward wants the returns of all environments in order; must be '
           f'0, got {size}')


def _replay(experiment: Experiment) -> Iterator[str]:
  """The replay, the scheme and the fields that only learning from rollouts has a use for."""
  options, scheme, name = experiment.replay, experiment.scheme, experiment.loss_name
  normalise = experiment.normalise
  for field, value, only in (
      ('num_epochs', experiment.num_epochs, 1),
      ('num_minibatches', experiment.num_minibatches, 1),
      ('normalise.obs', normalise.obs, False), ('normalise.reward', normalise.reward, False),
      ('normalise.value', normalise.value, False)):
    if value != only:
      yield f'{field}: {name} draws from a replay; must be {only}, got {value}'
  if experiment.spec.stack > 1 and options.eviction != 'fifo':
    yield (f'replay.eviction: the frames of {experiment.spec.task} are stored once, in a ring; '
           'must be fifo')
  if options.capacity < experiment.batch_rows:
    yield (f'replay.capacity: must be at least env.num_envs * unroll_length = '
           f'{experiment.batch_rows}, got {options.capacity}')
  groups, actors = experiment.num_grad_shards, experiment.placement.num_actors
  for field in ('batch_size', 'capacity'):
    if getattr(options, field) % groups:
      yield (f'replay.{field}: {getattr(options, field)} cannot be split evenly by '
             f'num_grad_shards = {groups}')
  if not scheme.graph.free_rates:
    for field, only in (('params_every', 1), ('samples_per_insert', 0)):
      if getattr(options, field) != only:
        yield (f'replay.{field}: only with free rates of acting and learning; with '
               f'{experiment.scheme_name} it must be {only}, got {getattr(options, field)}')
    return
  drawn = options.gradient_steps * options.batch_size
  ratio, added = options.samples_per_insert, experiment.batch_rows // actors
  if ratio and 2 * options.tolerance < drawn + ratio * added:
    yield (f'replay.tolerance: must be at least {math.ceil((drawn + ratio * added) / 2)}, half of '
           f'what a call draws ({drawn}) and a rollout allows ({ratio:g} x {added}), got '
           f'{options.tolerance}')
  if groups % actors:
    yield (f'num_grad_shards: {groups} groups, each with a replay, cannot be shared evenly by '
           f'{actors} actors')
