"""Checks that involve more than one part. They use the declarations of parts, never their names.

All other checks are beside their fields (`options.option`, `problems` of a part).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from podracer_jit.agents import action_masks, networks, policies
from podracer_jit.envs import spaces
from podracer_jit.envs.families import family_of
from podracer_jit.experiment.schema import CHOICES, EnvOptions, Experiment
from podracer_jit.learner.updates import num_microbatches
from podracer_jit.losses.algorithm import Algorithm, problem_of_epsilon
from podracer_jit.losses.items import Items
from podracer_jit.options import INT32_MAX, Count, defaults, shown, uneven
from podracer_jit.schedules import Schedule
from podracer_jit.schemes.table import SCHEMES

MAX_ACTORS = 4096  # of a process, each with a thread


def problems(experiment: Experiment, processes: int) -> Iterator[str]:
  """Yields a line for each problem of an experiment; it begins with the field.

  Args:
    experiment: to check.
    processes: of the run, each with the devices of its placement.
  """
  yield from _items(experiment)
  yield from _too_large(experiment)
  yield from _network(experiment)
  yield from _algorithm(experiment)
  yield from _placement(experiment)
  yield from _cluster(experiment)
  yield from _indivisible(experiment, processes)
  yield from _asynchronous(experiment)
  yield from _auxiliary(experiment)
  needs_replay = experiment.scheme.replay
  if needs_replay not in (None, experiment.loss.learns_from_replay):
    yield (f'scheme: {experiment.scheme_name} is for losses '
           f'{"with" if needs_replay else "without"} a replay, loss.name is '
           f'{experiment.loss_name}')
  if experiment.loss.learns_from_replay:
    yield from _replay(experiment)


def _items(experiment: Experiment) -> Iterator[str]:
  """Yields problems of the items of an own algorithm."""
  items = experiment.items
  who = f'loss.name: items of {experiment.loss_name} must return'
  if not isinstance(items, Items):
    yield (f'{who} Items, such as items.rows() or items.environments(self.parts.unroll_length); '
           f'got {shown(items)}')
    return
  numbers = items.length, items.period, items.network_rows
  if not all(type(number) is int and number > 0 for number in numbers):
    yield (f'{who} Items with a length, a period and network_rows of at least 1, got '
           f'{shown(numbers)}')
  elif experiment.loss.learns_from_replay:
    if type(experiment.loss).items is Algorithm.items:
      yield (f'loss.name: {experiment.loss_name} learns from a replay but has no method items: '
             'that of Algorithm returns whole rollouts; return items.transitions(n_step, '
             'self.discount)')
    elif items.is_sequence and items.period % experiment.unroll_length:
      yield (f'unroll_length: sequences of {experiment.loss_name} begin every {items.period} rows, '
             'and the state before them is known where rollouts begin; must be a divisor of '
             f'{items.period}, got {experiment.unroll_length}')
    elif items.period != 1 and not items.is_sequence:
      yield (f'{who} Items that begin in each row of a replay, so their period must be 1, got '
             f'{items.period}')
  elif items.length > experiment.unroll_length:
    yield (f'unroll_length: {experiment.loss_name} learns from items of {items.length} rows of a '
           f'rollout; must be at least {items.length}, got {experiment.unroll_length}')


def _auxiliary(experiment: Experiment) -> Iterator[str]:
  """Yields problems of an algorithm's auxiliary phase."""
  phase = experiment.algorithm.auxiliary()
  if phase is None:
    return
  name = experiment.loss_name
  if experiment.loss.learns_from_replay:
    yield f'loss.name: {name} learns from a replay, so it cannot have an auxiliary phase'
  if experiment.scheme.graph.separate_updates:
    yield (f'scheme: {name} has an auxiliary phase, which needs gradients and updates in one '
           f'place; {experiment.scheme_name} has them apart')
  rows = phase.every * experiment.env.num_envs // experiment.num_grad_shards
  items = rows * phase.algorithm.items().count(experiment.unroll_length)
  if items % phase.num_minibatches:
    yield (f'loss.name: the auxiliary phase of {name} has {phase.num_minibatches} minibatches, '
           f'which must divide the {items} items of a gradient group in {phase.every} updates')


def _too_large(experiment: Experiment) -> Iterator[str]:
  """Yields numbers that programs cannot count in 32 bits, and a number of threads too large."""
  num_envs = experiment.env.num_envs
  steps = experiment.unroll_length
  rows = num_envs * (steps + 1)
  if rows > INT32_MAX:
    yield (f'unroll_length: the {steps} rows of env.num_envs = {num_envs} environments, and the '
           f'observations after them, are {rows:,} in all; must be below 2^31')
  # Half of the rows may be invalid, if each episode ends with its first step.
  updates = 2 * experiment.total_steps // experiment.batch_rows
  if updates > INT32_MAX:
    yield (f'total_steps: {experiment.total_steps:,} steps of {experiment.batch_rows} rows an '
           f'update may take {updates:,} updates, which must be below 2^31; take more environments '
           '(env.num_envs) or a longer unroll_length')
  place = experiment.placement
  if place.num_actors > MAX_ACTORS:
    yield (f'placement.actors_per_device: {place.actors_per_device} actors on each of '
           f'{len(place.actor_devices)} devices are {place.num_actors}; must be at most '
           f'{MAX_ACTORS} in a process')
  if not experiment.loss.learns_from_replay:
    gradients = experiment.num_epochs * experiment.num_minibatches
    if gradients > INT32_MAX:
      yield (f'num_minibatches: {experiment.num_minibatches} in each of num_epochs = '
             f'{experiment.num_epochs} are {gradients:,}; must be below 2^31')
    return
  replay = experiment.replay
  drawn = replay.gradient_steps * replay.batch_size
  if drawn > INT32_MAX:
    yield (f'replay.gradient_steps: {replay.gradient_steps} with replay.batch_size = '
           f'{replay.batch_size} draw {drawn:,} {experiment.items.unit}s; must be below 2^31')
  # A replay has rows beyond its capacity that cannot be drawn, because their end or frames of their
  # stacks are missing.
  items = experiment.items
  margin = steps + items.length + experiment.spec.stack + 1 + experiment.spare_rollouts * steps
  rows = replay.capacity * items.period + num_envs * margin * replay.copies
  if rows > INT32_MAX:
    each = f' of {items.period} new rows' if items.period > 1 else ''
    copies = f' in replay.copies = {replay.copies}' if replay.copies > 1 else ''
    yield (f'replay.capacity: {replay.capacity} {items.unit}s{each}, and {margin} rows of '
           f'env.num_envs = {num_envs}{copies} that cannot be drawn, are {rows:,}; must be below '
           '2^31')


def _network(experiment: Experiment) -> Iterator[str]:
  """Yields problems of the network with the algorithm and the task's observations."""
  name = experiment.network_name
  spec = action_masks.seen(experiment.spec)
  algorithm = experiment.loss
  torso = experiment.torso_options
  role = networks.role_of(type(experiment.network))
  if role != algorithm.network_role:
    yield f'network.name: {experiment.loss_name} wants {algorithm.network_role}, {name} is {role}'
    return
  for field, only in (('core', 'none'), ('separate_critic', False)):
    if field not in algorithm.takes and getattr(torso, field) != only:
      yield f'network.{field}: {experiment.loss_name} has no use for it; must be {only}'
  needs_parts = getattr(experiment.network, 'needs_parts', False)
  needs_images = getattr(experiment.network, 'needs_images', False)
  if needs_parts and not any(part.is_image for part in spec.parts):
    yield (f'network.name: {name} wants observations of several parts with an image among them; '
           f'{spec.task} gives {spec.obs_shape}')
  if needs_images and len(spec.obs_shape) != 3:
    any_shape = [network for network, part in CHOICES['network'].shipped.items()
                 if networks.role_of(part) == role
                 and not getattr(part, 'needs_images', False)
                 and not getattr(part, 'needs_parts', False)]
    yield (f'network.name: {name} wants images, {spec.task} gives {spec.obs_shape}; '
           f'{" or ".join(any_shape)} takes any shape')
  if needs_parts and experiment.normalise.obs:
    yield f'normalise.obs: {name} scales the images among its parts itself; must be False'


def _algorithm(experiment: Experiment) -> Iterator[str]:
  """Yields problems of the algorithm with optimizer, network and normalised quantities."""
  name = experiment.loss_name
  algorithm = experiment.loss
  if algorithm.policy_reads != policies.DISTRIBUTION and type(algorithm).act is Algorithm.act:
    yield (f'loss.name: {name} has policy_reads = {shown(algorithm.policy_reads)} but no method '
           'act: that of Algorithm draws from a distribution; write one (docs/own_parts.md)')
  problem = problem_of_epsilon(algorithm, experiment.eval.greedy, experiment.eval.epsilon)
  if problem:
    yield f'eval.epsilon: {problem}'
  if experiment.optimizer.kl_target and not algorithm.measures_kl:
    yield f'optimizer.kl_target: {name} does not measure the KL divergence; must be 0'
  if algorithm.learns_from_replay:
    own = type(algorithm)
    for method in ('targets', 'statistics'):
      if getattr(own, method) is not getattr(Algorithm, method):
        yield (f'loss.name: {name} learns from a replay, which never calls {method}; compute it in '
               'loss')
  else:
    if experiment.torso_options.recurrent and experiment.items.length < experiment.unroll_length:
      yield (f'network.core: {name} learns from single rows, and a recurrent network from rows in '
             f'order; must be none, got {experiment.torso_options.core}')
  for field, moment, what in (('obs', 'obs', 'observations'), ('reward', 'returns', 'rewards'),
                              ('value', 'values', 'values')):
    # Rewards of a replay were added with other deviations than those of today.
    measured = moment in algorithm.normalises and (
        moment == 'obs' or not algorithm.learns_from_replay)
    if getattr(experiment.normalise, field) and not measured:
      yield f'normalise.{field}: {name} cannot learn normalised {what}; must be False'
  if experiment.normalise.obs and algorithm.learns_from_replay and experiment.spec.stack > 1:
    yield (f'normalise.obs: {name} adds each frame of {experiment.spec.task} to its replay once, '
           'and not the stacks that it would normalise; must be False')
  discount = algorithm.discount
  if isinstance(discount, Schedule) and (algorithm.learns_from_replay
                                         or experiment.normalise.reward):
    where = 'a replay' if algorithm.learns_from_replay else 'normalise.reward'
    yield f'loss.discount: returns of {where} have one discount; must be a number, got {discount}'


def _placement(experiment: Experiment) -> Iterator[str]:
  """Yields problems of the scheme with the devices."""
  place = experiment.placement
  scheme = experiment.scheme
  name = experiment.scheme_name
  learners = place.learner_devices
  if len(set(learners)) < len(learners) and not scheme.each:
    # Without learner devices in the config they are the actor devices.
    field = 'learner_devices' if place.differs('learner_devices') else 'actor_devices'
    yield f'placement.{field}: names a device twice, got {shown(learners)}'
  fields = ('actor_devices', 'learner_devices', 'actors_per_device')
  where = ', '.join(f'{field} = {shown(getattr(place, field))}' for field in fields)
  # The message begins with the field that the user set, if only one differs from its default.
  changed = [f'placement.{field}: scheme = ' for field in fields if place.differs(field)]
  start = changed[0] if len(changed) == 1 else 'scheme: '
  same = place.actor_devices == learners
  if scheme.graph.one_program and experiment.spec.is_function:
    if not (same and place.actors_per_device == 1):
      yield (f'{start}{name} acts where it learns, so the actor devices are the learner devices, '
             f'with an actor each; placement has {where}')
  elif scheme.alone and not (same and place.num_actors == 1):
    yield f'{start}{name} is on one device, with one actor; placement has {where}'
  if scheme.colocated and not (same and place.actors_per_device == 1):
    yield (f'{start}{name} makes rollouts where it makes gradients, so the actor devices are the '
           f'learner devices, with an actor each; placement has {where}')
  if scheme.each and place.num_actors % len(learners):
    yield uneven(place.actor_count(), place.learner_count(len(learners))._replace(unit='worker'))
  if place.learner_delay_s and (scheme.graph.one_program or scheme.each):
    able = [other_name for other_name, other in SCHEMES.items()
            if not (other.graph.one_program or other.each)]
    yield (f'placement.learner_delay_s: {name} has no learner that waits by itself; must be 0; '
           f'{", ".join(able)} take it')
  if place.pin_envs and not hasattr(family_of(experiment.env.task), 'on_cores'):
    yield (f'placement.pin_envs: only the threads of EnvPool can stay on cores, and '
           f'{experiment.env.task} has none; must be False')
  if scheme.graph.separate_updates and not experiment.exact_reduce:
    yield f'exact_reduce: {name} always adds in a fixed order; must be True'


def _cluster(experiment: Experiment) -> Iterator[str]:
  """Yields problems of the scheme with actors on a cluster."""
  place = experiment.placement
  scheme = experiment.scheme
  if not place.is_remote:
    return
  if scheme.deterministic or scheme.graph.one_program:
    able = [name for name, other in SCHEMES.items()
            if not (other.deterministic or other.graph.one_program)]
    yield (f'placement.cluster: actors of {experiment.scheme_name} wait for the learner, so it '
           f'must be none (machines: --distributed); {", ".join(able)} take '
           f'{place.cluster}')
  if place.pin_envs:
    yield ('placement.pin_envs: on a cluster, Ray decides which cores a process has; must be False')
  if place.actor_platform != 'auto':
    yield (f'placement.actor_platform: on a cluster, placement.actor_gpus says where actors are; '
           f'must be auto, got {place.actor_platform}')


def _indivisible(experiment: Experiment, processes: int) -> Iterator[str]:
  """Yields the numbers that cannot be split evenly; see `problems`."""
  learners = len(experiment.placement.learner_devices)
  envs = experiment.env_count()
  shards = Count('num_shards', experiment.num_shards, experiment.differs('num_shards'), 'shard')
  gradient_groups = experiment.group_count()
  learner_count = experiment.placement.learner_count(learners)
  # Gradient groups share the environments, or what is drawn from a replay that learners share.
  of_envs = learner_count if experiment.loss.learns_from_replay else gradient_groups
  for whole, divisor in ((envs, shards), (envs, of_envs), (gradient_groups, learner_count),
                         (shards, experiment.placement.actor_count(processes))):
    if whole.number % divisor.number:
      yield uneven(whole, divisor)
  if experiment.loss.learns_from_replay:
    return
  elements = experiment.group_items
  if elements % experiment.num_minibatches:
    yield (f'num_minibatches: the {elements} minibatch elements of a gradient group cannot be '
           f'split evenly into {experiment.num_minibatches} minibatches; take a divisor of '
           f'{elements}')


def _small_minibatches(experiment: Experiment) -> Iterator[str]:
  """Yields a line if the algorithm treats minibatches of so few rows in a way of its own."""
  algorithm = experiment.algorithm
  if algorithm.learns_from_replay:
    return
  elements = experiment.group_items
  # Where each worker has an update of its own, a minibatch is of its groups only.
  updates = len(experiment.placement.learner_devices) if experiment.scheme.each else 1
  epoch_rows = (experiment.num_grad_shards // updates * elements
                * experiment.items.length)

  def note(num_minibatches: int) -> str:
    return algorithm.note_about_minibatches(epoch_rows // num_minibatches)

  count = experiment.num_minibatches
  if not note(count):
    return
  fewer = next((number for number in range(count - 1, 0, -1)
                if elements % number == 0 and not note(number)), None)
  field = 'num_minibatches' if fewer else 'unroll_length'
  remedy = f'at most {fewer}' if fewer else 'longer, or env.num_envs larger'
  yield (f'{field}: a minibatch (num_minibatches = {count}) has {epoch_rows // count} of the '
         f'{epoch_rows} rows of an epoch: {note(count)}; for normalised ones it must be {remedy}')


def notes(experiment: Experiment) -> Iterator[str]:
  """Yields a line for each choice that was made by a rule and may not be what the user wants."""
  yield from _masks(experiment)
  yield from _images(experiment)
  yield from _renewal(experiment)
  yield from _short_segments(experiment)
  yield from _empty_replay(experiment)
  yield from _small_minibatches(experiment)
  yield from _small_microbatches(experiment)
  if experiment.eval.video_every and not experiment.eval.every_updates:
    yield ('eval.video_every: evaluations are filmed, and there are none; set eval.every_updates, '
           'such as 100')


def _empty_replay(experiment: Experiment) -> Iterator[str]:
  """Yields a line if a replay never has what it needs, so that nothing is learned."""
  options = experiment.replay
  if options is None:
    return
  most = experiment.total_steps // experiment.items.period
  if most * options.copies < options.min_size:
    yield (f'replay.min_size: total_steps = {experiment.total_steps:,} add at most '
           f'{most * options.copies:,} items, and learning begins with {options.min_size:,}; '
           'nothing will be learned')
  steps = experiment.segment_steps
  if 0 < steps <= experiment.items.length and not experiment.keeps_envs:
    yield (f'env.renew_every_updates: environments begin anew every {steps} steps, and an item of '
           f'the replay has {experiment.items.length + 1}; nothing will be learned')


def _masks(experiment: Experiment) -> Iterator[str]:
  """Yields a line if a part of observations is the mask of actions because of its name."""
  mask = experiment.spec.action_mask
  if mask is not None and mask.name == defaults(EnvOptions)['action_mask']:
    yield (f'env.action_mask: {mask.name} of the observations of {experiment.spec.task} says which '
           f'of the {mask.size} choices are legal; no other is taken, and the network does not see '
           "it; '' makes it an observation like any other")


def _images(experiment: Experiment) -> Iterator[str]:
  """Yields a line for each image whose axes could be read in two ways."""
  spec = action_masks.seen(experiment.spec)
  shapes = [part.shape for part in spec.parts if part.channels_last]
  if spec.channels_last:
    shapes.append(spec.obs_shape)
  if not hasattr(experiment.network, 'parts' if spec.parts else 'channels_last'):
    return
  for shape in shapes:
    if spaces.is_ambiguous(shape):
      yield (f'env.task: images {shape} of {spec.task} are read as (height, width, channels), with '
             f'{shape[-1]} channels last; if the channels are first, a wrapper must move them to '
             'the end: numpy.moveaxis(obs, 0, -1)')


def _renewal(experiment: Experiment) -> Iterator[str]:
  """Yields a line if a config sets what decided until version 0.7 when environments begin anew."""
  renewal = experiment.env.renew_every_updates
  every = experiment.checkpoint.every_updates
  if every and renewal == defaults(EnvOptions)['renew_every_updates']:
    yield (f'checkpoint.every_updates: {every:,}, which is only how often the run is saved; when '
           f'environments begin anew is decided by env.renew_every_updates = {renewal:,} (until '
           f'version 0.7 it was decided by checkpoint.every_updates)')


def _short_segments(experiment: Experiment) -> Iterator[str]:
  """Yields a line if some episodes may be longer than a segment, so that they never end.

  A limit of less than two segments gives no line: most tasks end before their limit, and training
  says so if no episode ends at all. Neither does the largest limit, which EnvPool's tasks without
  one have.
  """
  limit = experiment.spec.max_episode_steps % INT32_MAX
  steps = experiment.segment_steps
  is_cut = not experiment.keeps_envs and experiment.total_steps > steps * experiment.env.num_envs
  if steps and is_cut and limit >= 2 * steps:
    yield (f'env.renew_every_updates: environments begin anew after {steps:,} steps of each; '
           f'episodes of {experiment.spec.task} may take {limit:,} steps, and a longer one than '
           f'{steps:,} never ends; with {math.ceil(limit / experiment.unroll_length):,} or more, '
           'or 0, all of them can end')


def _small_microbatches(experiment: Experiment) -> Iterator[str]:
  """Yields a line if a group's share of a minibatch has no divisor near `microbatch_rows`."""
  most_rows = experiment.microbatch_rows
  groups = experiment.num_grad_shards
  rows = experiment.items.network_rows
  if experiment.loss.learns_from_replay:
    elements = experiment.replay.batch_size // groups
    share = 'replay.batch_size / num_grad_shards'
  else:
    elements = experiment.group_items // experiment.num_minibatches
    steps = '' if experiment.items.length == experiment.unroll_length else ' * unroll_length'
    share = f'env.num_envs{steps} / num_grad_shards / num_minibatches'

  def size(elements: int) -> int:
    return elements // num_microbatches(elements, rows, most_rows)

  most = most_rows // rows
  if most_rows and 2 * size(elements) <= min(most, elements):
    better = next(number for number in range(elements + 1, elements + most + 1)
                  if 2 * size(number) > most)
    yield (f'microbatch_rows: {most_rows} rows allow {most} elements in a pass of the network, but '
           f'the {elements} elements of a group ({share}) are split evenly, so they take '
           f'{elements // size(elements)} passes of {size(elements)}, which is slow; {better} '
           f'elements would take {better // size(better)}, and microbatch_rows = '
           f'{elements * rows} one')


def _asynchronous(experiment: Experiment) -> Iterator[str]:
  """Yields the fields that exclude asynchronous actors, which do not wait for all environments."""
  size = experiment.env_batch
  shard = experiment.env.num_envs // experiment.num_shards
  if not size:
    return
  if experiment.spec.is_function or experiment.spec.calls_python:
    yield (f'env_batch: all environments of {experiment.env.task} step together; must be 0, got '
           f'{size}')
  if shard % size or size >= shard:
    yield (f'env_batch: must be 0, or a divisor of the {shard} environments of a shard below '
           f'{shard}, got {size}')
  if experiment.loss.learns_from_replay:
    yield (f'env_batch: {experiment.loss_name} draws from a replay, which needs the rows of all '
           'environments in order; must be 0')
  if experiment.scheme.graph.one_program:
    yield (f'env_batch: {experiment.scheme_name} waits for all environments; must be 0, got '
           f'{size}')
  if experiment.torso_options.recurrent:
    yield (f'env_batch: a recurrent network (network.core = {experiment.torso_options.core}) '
           f'needs all environments at once; must be 0, got {size}')
  elif type(experiment.loss).initial_carry is not Algorithm.initial_carry:
    yield (f'env_batch: {experiment.loss_name} has a carry, which needs all environments at once; '
           f'must be 0, got {size}')
  if type(experiment.loss).exploration is not Algorithm.exploration:
    yield (f'env_batch: {experiment.loss_name} explores by environment, which needs all '
           f'environments at once; must be 0, got {size}')
  if experiment.normalise.reward:
    yield ('env_batch: normalise.reward needs the returns of all environments in order; must be '
           f'0, got {size}')


def _replay(experiment: Experiment) -> Iterator[str]:
  """Yields problems of the replay with the scheme, and fields that need rollouts."""
  options = experiment.replay
  scheme = experiment.scheme
  name = experiment.loss_name
  for field, value, only in (
      ('num_epochs', experiment.num_epochs, 1),
      ('num_minibatches', experiment.num_minibatches, 1)):
    if value != only:
      yield f'{field}: {name} draws from a replay; must be {only}, got {value}'
  if experiment.spec.stack > 1 and options.eviction != 'fifo':
    yield (f'replay.eviction: the frames of {experiment.spec.task} are stored once, in a ring; '
           'must be fifo')
  items = experiment.items
  if items.is_sequence and options.eviction != 'fifo':
    yield (f'replay.eviction: the sequences of {name} overlap, so their rows are stored once, in a '
           f'ring; must be fifo, got {options.eviction}')
  # A rollout of all environments must fit.
  least = experiment.batch_rows // items.stride(experiment.unroll_length) * options.copies
  if options.capacity < least:
    what = 'env.num_envs' if items.is_sequence else 'env.num_envs * unroll_length'
    what += ' * replay.copies' if options.copies > 1 else ''
    yield f'replay.capacity: must be at least {what} = {least}, got {options.capacity}'
  actors = experiment.placement.num_actors
  # The groups have equal shares, so that their gradients have the shapes of one program.
  if options.batch_size % experiment.num_grad_shards:
    is_set = options.batch_size != defaults(type(options))['batch_size']
    yield uneven(Count('replay.batch_size', options.batch_size, is_set, items.unit),
                 experiment.group_count())
  if not scheme.graph.free_rates:
    for field, only in (('params_every', 1), ('samples_per_insert', 0)):
      if getattr(options, field) != only:
        yield (f'replay.{field}: only with free rates of acting and learning; with '
               f'{experiment.scheme_name} it must be {only}, got {getattr(options, field)}')
    return
  drawn = options.gradient_steps * options.batch_size
  ratio = options.samples_per_insert * options.copies / items.period
  added = experiment.batch_rows // actors
  # With a smaller tolerance actors and learner could wait for each other for ever.
  if ratio and 2 * options.tolerance < drawn + ratio * added:
    yield (f'replay.tolerance: must be at least {math.ceil((drawn + ratio * added) / 2)}, half of '
           f'what a call draws ({drawn}) and a rollout allows ({ratio:g} x {added}), got '
           f'{options.tolerance}')
