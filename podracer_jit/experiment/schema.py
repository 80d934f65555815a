"""Sections of a config, the parts and options in them, and the typed Experiment."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import flax.linen as nn

from podracer_jit import losses, options, parts
from podracer_jit.agents import networks, q_networks
from podracer_jit.agents.networks import TorsoOptions
from podracer_jit.agents.optimizers import OPTIMIZERS, Optimizer
from podracer_jit.agents.policies import FAMILIES, Policy
from podracer_jit.agents.running_moments import NormaliseOptions
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.losses.algorithm import Algorithm, Parts
from podracer_jit.losses.items import Items
from podracer_jit.numerics import counters
from podracer_jit.numerics.precision import NumericsOptions
from podracer_jit.options import INT32_MAX, option
from podracer_jit.replay.options import ReplayOptions
from podracer_jit.runtime.placement import PlacementOptions
from podracer_jit.schemes.scheme import Scheme
from podracer_jit.schemes.table import SCHEMES

MAX_ENVS = 1_000_000
OPEN = -1  # in `microbatch_rows`: chosen when the run begins


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
  """The top level of the config, without scheme and policy."""

  total_steps: int = option(50_000_000, 'valid agent steps after which training is finished',
                            at_least=1, at_most=counters.LARGEST)
  seed: int = option(1, 'seed of all random numbers', at_least=0, at_most=INT32_MAX)
  unroll_length: int = option(20, 'steps of an environment in a rollout', at_least=1,
                             at_most=INT32_MAX)
  num_minibatches: int = option(1, 'minibatches of an epoch', at_least=1, at_most=INT32_MAX)
  num_epochs: int = option(1, 'passes over a round of rollouts', at_least=1, at_most=10_000)
  num_shards: int = option(
      1, 'vector environments that the environments are split into, each with its own random '
      'numbers', at_least=1, at_most=4096)
  env_batch: int = option(
      0, '0: actors wait for all environments; n: for the first n that are ready, so runs cannot '
      'be repeated', at_least=0, at_most=MAX_ENVS)
  num_grad_shards: int = option(
      1, 'groups that a gradient is summed over; also the most learner devices', at_least=1,
      at_most=MAX_ENVS)
  exact_reduce: bool = option(
      True, "True: gradients are added in one fixed order; False: by XLA's all-reduce, with other "
      'bits on each mesh')
  microbatch_rows: int = option(
      0, "most rows in a pass of the network for a gradient; 0: a group's whole minibatch; -1: "
      'with GPUs or TPUs as 0, else what fits the cache of a CPU, chosen when the run begins',
      at_least=OPEN, at_most=INT32_MAX)


@dataclasses.dataclass(frozen=True)
class EnvOptions:
  """The section `env`; beside these fields it has any options of the task's own."""

  task: str = option('', "an EnvPool task, 'gymnasium:ID', 'gymnax:TASK', 'playground:TASK', or "
                     "'module:attribute' of your own environments")
  num_envs: int = option(128, 'environments of all actors together', at_least=1,
                        at_most=MAX_ENVS)
  renew_every_updates: int = option(
      1000, 'updates of a segment: then simulators begin anew, with new seeds, and actors and '
      'learner take turns once; 0: never', at_least=0, at_most=INT32_MAX)
  action_mask: str = option(
      'action_mask', 'the part of observations that says which actions are legal, int8 or bool; no '
      "other action is taken, and the network does not see it; '': none")


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
  """The section `checkpoint`."""

  every_seconds: float = option(
      60.0, 'seconds between two checkpoints; more if a save takes long, as saves take at most 5% '
      'of the time; 0: none', at_least=0, at_most=1e9)
  every_updates: int = option(
      0, 'n: also a checkpoint after each n updates, however long it takes; 0: none', at_least=0,
      at_most=INT32_MAX)
  keep: int = option(
      3, 'segments (env.renew_every_updates) whose newest checkpoint stays, beside the two newest '
      'checkpoints', at_least=1, at_most=1_000_000)
  replay: bool = option(
      True, 'True: checkpoints have the replay, or the rollouts of an auxiliary phase; False: a '
      'run that goes on begins without them and with new episodes')


@dataclasses.dataclass(frozen=True)
class EvalOptions:
  """The section `eval`: evaluations while a run trains."""

  every_updates: int = option(
      0, '0: none; n: each n-th update is evaluated, which has a checkpoint, and the last one',
      at_least=0, at_most=INT32_MAX)
  num_episodes: int = option(20, 'whole episodes of an evaluation', at_least=1, at_most=1_000_000)
  num_envs: int = option(8, 'environments of an evaluation', at_least=1, at_most=MAX_ENVS)
  greedy: bool = option(False, 'take the most likely action instead of drawing one')
  epsilon: float = option(
      0.0, 'probability of a random action in place of the greedy one, with a policy that reads '
      'action values', at_least=0, at_most=1)
  max_steps: int = option(108_000, 'most steps of an episode; a longer episode ends the evaluation',
                         at_least=1, at_most=INT32_MAX)
  video_every: int = option(
      0, '0: none; n: of the first evaluation, each n-th one after it, and the last one, a further '
      'episode becomes a video in the folder videos of the workdir', at_least=0,
      at_most=INT32_MAX)


@dataclasses.dataclass(frozen=True)
class LogOptions:
  """The section `log`."""

  every_seconds: float = option(10.0, 'seconds between two progress lines, without a terminal',
                                above=0, at_most=1e6)
  every_updates: int = option(
      1, 'n: metrics.jsonl has a line of each n-th update, and of the last one; its returns and '
      'lengths are over all episodes since the line before; receipts.jsonl has all updates',
      at_least=1, at_most=INT32_MAX)
  window: int = option(100, 'episodes over which returns and lengths are averaged', at_least=1,
                      at_most=1_000_000)
  tensorboard: bool = option(True, 'write events for TensorBoard')
  tracker: str = option(
      'none', 'wandb or trackio: show the run there, too; each needs the extra of its name',
      choices=('none', 'wandb', 'trackio'))


class Choice(NamedTuple):
  """A section of the config whose `name` chooses a part; the other fields are its options."""

  shipped: Mapping[str, type]
  base: type
  requirement: str  # for a user's own part, in error messages: 'a flax module'


CHOICES = {
    'loss': Choice(losses.ALGORITHMS, Algorithm, 'a class derived from Algorithm'),
    'network': Choice(networks.TORSOS | q_networks.POLICY_AND_CRITIC, nn.Module, 'a flax module'),
    'optimizer': Choice(OPTIMIZERS, Optimizer, 'a class derived from Optimizer'),
}
# Sections whose float options may change during a run; see `schedules`.
SCHEDULED = ('loss', 'optimizer')
# Sections whose fields are always the same.
SECTIONS = {
    'normalise': NormaliseOptions,
    'numerics': NumericsOptions,
    'placement': PlacementOptions,
    'checkpoint': CheckpointOptions,
    'eval': EvalOptions,
    'log': LogOptions,
}
SCHEME = 'cleanba'  # by default
POLICY = 'auto'


def find_part(section: str, name: str) -> type:
  """Returns the part that `name` chooses in a section of CHOICES.

  Raises:
    ValueError: no part has this name, or it is of another kind; the message is one line.
  """
  choice = CHOICES[section]
  field = f'{section}.name'
  part = parts.find(field, name, choice.shipped)
  if not (isinstance(part, type) and issubclass(part, choice.base)):
    raise ValueError(f'{field}: {name} must be {choice.requirement}')
  if inspect.isabstract(part):
    raise ValueError(f'{field}: {name} lacks {", ".join(sorted(part.__abstractmethods__))}')
  if section == 'loss':
    _check_methods(name, part)
  try:
    options.meanings(part)
  except ValueError as error:
    raise ValueError(f'{field}: {error}') from None
  return part


# Methods and attributes of algorithms of version 0.6 that later versions do not call.
_OF_VERSION_0_6 = {
    'minibatch_unit': 'the method items', 'batch_statistics': 'the method statistics',
    'target_inputs': 'targets_read_all_obs', 'network_kind': 'the method make_network',
    'normalises_values': 'normalises'}


def _check_methods(name: str, algorithm: type[Algorithm]) -> None:
  """Checks that methods of an algorithm take what `Algorithm` says.

  Raises:
    ValueError: one does not, or the algorithm is written for version 0.6; the message is one line.
  """
  for old, new in _OF_VERSION_0_6.items():
    if hasattr(algorithm, old):
      raise ValueError(parts.of_earlier_version('loss.name', name, f'has {old}, now {new}'))
  for method, wanted in inspect.getmembers(Algorithm, inspect.isfunction):
    own = inspect.getattr_static(algorithm, method)
    if method.startswith('_') or own is wanted or not inspect.isfunction(own):
      continue
    taken, given = (list(inspect.signature(function).parameters)[1:] for function in (own, wanted))
    if taken and taken[0] in ('model', 'network', 'spec'):
      raise ValueError(parts.of_earlier_version(
          'loss.name', name, f'has {method}({taken[0]}, ...), now ({", ".join(given)})'))
    try:
      inspect.signature(own).bind(algorithm, *given)
    except TypeError:
      raise ValueError(f'loss.name: {method} of {name} takes ({", ".join(taken)}); must take '
                       f'({", ".join(given)})') from None


def _option_classes(section: str, name: str) -> tuple[type, ...]:
  """Returns the classes whose options are the fields of a section of CHOICES that chooses `name`.

  Raises:
    ValueError: as `find_part`.
  """
  part = find_part(section, name)
  is_torso = section == 'network' and networks.role_of(part) == networks.TORSO
  return (part, TorsoOptions) if is_torso else (part,)


def classes_by_section(fields: Mapping[str, Any]) -> dict[str, tuple[type, ...]]:
  """Returns the classes whose options are the fields of each section of a config.

  Raises:
    ValueError: a section of CHOICES names no part.
  """
  classes: dict[str, tuple[type, ...]] = {'env': (EnvOptions,)}
  for section in CHOICES:
    if not isinstance(fields.get(section), Mapping) or 'name' not in fields[section]:
      raise ValueError(f'{section}.name: is missing')
    classes[section] = _option_classes(section, fields[section]['name'])
  classes |= {section: (cls,) for section, cls in SECTIONS.items()}
  if classes['loss'][0].learns_from_replay:
    classes['replay'] = (ReplayOptions,)
  return classes


def defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a whole config of plain values: the parts that `fields` chooses, and all defaults.

  Raises:
    ValueError: as `classes_by_section`.
  """
  whole = {'scheme': SCHEME, **options.defaults(TrainingOptions), 'policy': POLICY}
  for section, classes in classes_by_section(fields).items():
    chosen = {'name': fields[section]['name']} if section in CHOICES else {}
    whole[section] = chosen | _defaults(classes)
  return whole


def _defaults(classes: tuple[type, ...]) -> dict[str, Any]:
  return {name: value for cls in classes for name, value in options.defaults(cls).items()}


def complete(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config of plain values, completed by the values of options that it lacks.

  Configs of old workdirs lack options that were added later. The default of such an option, or its
  `earlier` value, keeps the earlier behaviour.

  Raises:
    ValueError: as `classes_by_section`.
  """
  whole = defaults(fields)
  for section, classes in classes_by_section(fields).items():
    for cls in classes:
      whole[section] |= options.earlier(cls)
  return whole | {name: whole[name] | value if isinstance(whole.get(name), dict) else value
                  for name, value in fields.items()}


def choose(fields: MutableMapping[str, Any], section: str, name: str) -> None:
  """Puts another part into a section of a config, with the part's defaults.

  The section `replay` is added for an algorithm that learns from a replay, and removed for others.

  Raises:
    ValueError: there is no such part.
  """
  if fields[section]['name'] != name:
    changed = {'name': name} | _defaults(_option_classes(section, name))
    # Deleted first, since a section of the same name would keep the types of its fields.
    del fields[section]
    fields[section] = changed
  learns_from_replay = find_part('loss', fields['loss']['name']).learns_from_replay
  if 'replay' in fields and not learns_from_replay:
    del fields['replay']
  elif 'replay' not in fields and learns_from_replay:
    fields['replay'] = options.defaults(ReplayOptions)


def describe(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
  """Yields (field, value, help text) of each option that a config of plain values has."""
  yield 'scheme', fields['scheme'], f'who waits for whom: {", ".join(SCHEMES)}'
  yield from _described('', fields, (TrainingOptions,))
  yield ('policy', fields['policy'],
         f'auto: the first that fits the algorithm and the actions; or {", ".join(FAMILIES)}')
  for section, classes in classes_by_section(fields).items():
    if section in CHOICES:
      yield (f'{section}.name', fields[section]['name'],
             f'{", ".join(CHOICES[section].shipped)}, or module:Class of your own')
    yield from _described(f'{section}.', fields.get(section, {}), classes)
    if section == 'env':
      for name in sorted(set(fields['env']) - set(options.meanings(EnvOptions))):
        yield f'env.{name}', fields['env'][name], "an option of the task's own"


def _described(prefix: str, fields: Mapping[str, Any], classes: tuple[type, ...]
               ) -> Iterator[tuple[str, Any, str]]:
  for cls in classes:
    for name, meaning in options.meanings(cls).items():
      if name in fields:
        yield prefix + name, fields[name], meaning.help


def as_json(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config of plain values as config.json has it.

  Only the task's own options tell lists and tuples apart; see `options.to_json`.
  """
  return dict(fields) | {'env': options.to_json(fields.get('env', {}))}


def names(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the names of parts in a config of plain values, by field; None where it has none."""
  named = {'scheme': fields.get('scheme'), 'policy': fields.get('policy')}
  for section, field in (('env', 'task'), *((section, 'name') for section in CHOICES)):
    values = fields.get(section)
    named[f'{section}.{field}'] = values.get(field) if isinstance(values, Mapping) else None
  return named


# The placement of commands that only look at a run: evaluations and repeated updates.
ONE_DEVICE = dict(actor_devices=(0,), learner_devices=(0,), actors_per_device=1,
                  actor_platform='auto', env_threads=0, updates_per_call=0, xla_threads=0,
                  cluster='none', pin_envs=False)


def on_one_device(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config of plain values with one actor on one device, which is enough to play."""
  changed = dict(fields) | {'num_shards': 1, 'placement': fields['placement'] | ONE_DEVICE}
  if 'replay' in fields:
    # A ratio would need a tolerance that depends on the number of actors.
    changed['replay'] = fields['replay'] | {'samples_per_insert': 0.0}
  return changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(TrainingOptions):
  """The contents of a config: the computation, and in `placement` the devices."""

  scheme_name: str
  scheme: Scheme
  env: EnvOptions
  env_options: Mapping[str, Any]  # the task's own
  spec: EnvSpec
  loss_name: str
  loss: Algorithm  # its options alone, see `algorithm`
  network_name: str
  network: nn.Module  # the config's network: a torso, or a policy with its critic
  torso_options: TorsoOptions
  policy_name: str  # the family's, never 'auto'
  policy: Policy
  normalise: NormaliseOptions
  numerics: NumericsOptions
  optimizer: Optimizer
  replay: ReplayOptions | None  # of an algorithm that learns from one
  placement: PlacementOptions
  checkpoint: CheckpointOptions
  eval: EvalOptions
  log: LogOptions
  fields: Mapping[str, Any]  # the config as plain values, for files and messages
  chooses_microbatch: bool = False  # the config leaves `microbatch_rows` open

  def differs(self, name: str) -> bool:
    """Returns whether a field of the top level has another value than by default."""
    return getattr(self, name) != options.defaults(TrainingOptions)[name]

  def with_microbatch_rows(self, rows: int) -> Experiment:
    """Returns the experiment with another `microbatch_rows`."""
    return dataclasses.replace(self, microbatch_rows=rows,
                               fields={**self.fields, 'microbatch_rows': rows})

  def group_count(self) -> options.Count:
    """Returns the number of gradient groups, for error messages."""
    return options.Count('num_grad_shards', self.num_grad_shards, self.differs('num_grad_shards'),
                         'gradient group')

  def env_count(self) -> options.Count:
    """Returns the number of environments, for error messages."""
    is_set = self.env.num_envs != options.defaults(EnvOptions)['num_envs']
    return options.Count('env.num_envs', self.env.num_envs, is_set, 'environment')

  @property
  def replay_blocks(self) -> int:
    """Blocks of environments whose rows a replay stores together.

    Each learner device has an equal number of them, and so has each actor with a rate of its own.
    """
    blocks = math.gcd(self.env.num_envs, self.num_grad_shards)
    return math.lcm(blocks, self.num_shards) if self.scheme.graph.free_rates else blocks

  @property
  def spare_rollouts(self) -> int:
    """Rollouts of all environments for which a replay has room beyond its capacity.

    They are those between two evictions of `replay.evict_every`, up to an eighth of the capacity.
    """
    replay = self.replay
    items = self.batch_rows // self.items.stride(self.unroll_length) * replay.copies
    return min(-(-replay.evict_every // replay.gradient_steps), -(-replay.capacity // (8 * items)))

  @functools.cached_property
  def algorithm(self) -> Algorithm:
    """The algorithm, bound to all that the config and the task have chosen for it."""
    return self.loss.bind(Parts(
        self.spec, self.policy, self.network, self.torso_options, self.normalise.moments,
        self.optimizer, self.total_steps, self.env.num_envs, self.unroll_length,
        -(-self.replay.min_size // self.replay.copies) if self.replay else 0,
        self.numerics.precision))

  @functools.cached_property
  def items(self) -> Items:
    """The elements of minibatches, or of a replay."""
    return self.algorithm.items()

  def logs(self, update: int, steps: int) -> bool:
    """Returns whether metrics.jsonl has a line of an update, after which `steps` are done."""
    return update % self.log.every_updates == 0 or steps >= self.total_steps

  @property
  def group_items(self) -> int:
    """Items of a gradient group in an epoch, if the algorithm learns from rollouts."""
    group_envs = self.env.num_envs // self.num_grad_shards
    return group_envs * self.items.count(self.unroll_length)

  @property
  def batch_rows(self) -> int:
    """Rows of one update, invalid rows included."""
    return self.env.num_envs * self.unroll_length

  @property
  def keeps_envs(self) -> bool:
    """True if environments go on from one segment to the next.

    This needs environments whose state is arrays, and a scheme in which all rollouts are counted.
    """
    return self.spec.is_function and self.deterministic

  @property
  def resumes_exactly(self) -> bool:
    """True if a run that goes on after a stop makes the bits of one that was never stopped."""
    has_replay = self.replay is not None or self.algorithm.auxiliary() is not None
    return self.deterministic and (not has_replay or self.checkpoint.replay)

  @property
  def segment_steps(self) -> int:
    """Steps of each environment in a segment, invalid ones included."""
    return self.env.renew_every_updates * self.unroll_length

  @property
  def deterministic(self) -> bool:
    """True if the same experiment always gives the same bits."""
    return not self.non_deterministic_setting

  @property
  def non_deterministic_setting(self) -> str:
    """The setting that makes the run non-deterministic, for error messages; '' without one."""
    if self.env_batch:
      return f'env_batch = {self.env_batch}'
    if not self.spec.repeats:
      return f'env.task = {self.env.task}'
    return '' if self.scheme.deterministic else self.scheme_name
