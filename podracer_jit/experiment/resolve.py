"""Turns a config into an Experiment: looks up parts, converts values, and makes all checks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from podracer_jit import options, parts
from podracer_jit.agents import action_masks
from podracer_jit.agents.networks import TorsoOptions, fit_to_task, in_bfloat16
from podracer_jit.agents.policies import (
  ACTION,
  ACTION_VALUES,
  DISTRIBUTION,
  FAMILIES,
  Policy,
  PolicyFamily,
)
from podracer_jit.envs.families import family_of, may_start_jax
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.experiment import checks, placing, schema
from podracer_jit.experiment.config_dict import plain, refuse_object
from podracer_jit.experiment.schema import (
  CheckpointOptions,
  EnvOptions,
  EvalOptions,
  Experiment,
  TrainingOptions,
)
from podracer_jit.losses.algorithm import Algorithm
from podracer_jit.numerics.precision import BFLOAT16, NumericsOptions
from podracer_jit.replay.options import ReplayOptions
from podracer_jit.runtime import host
from podracer_jit.runtime.placement import PlacementOptions
from podracer_jit.schemes.scheme import Scheme
from podracer_jit.schemes.table import SCHEMES

# Options that sections may lack which a user's config has set as a whole: `config.env = dict(...)`.
_NEW_SINCE_0_8 = {'env': (EnvOptions, ('renew_every_updates', 'action_mask')),
                  'checkpoint': (CheckpointOptions, ('every_seconds',)),
                  'eval': (EvalOptions, ('epsilon', 'video_every')),
                  'placement': (PlacementOptions, ('auto', 'adapt', 'learner_delay_s', 'pin_envs')),
                  'numerics': (NumericsOptions, ('precision', 'deterministic')),
                  'replay': (ReplayOptions, ('copies', 'evict_every'))}


def resolve(config: Mapping[str, Any]) -> Experiment:
  """Checks a whole config and turns it into an Experiment; starts nothing.

  Args:
    config: a ConfigDict, or its plain values.

  Raises:
    ValueError: the config is wrong; the message names a field, its value and a right value.
  """
  fields = {'numerics': {}} | plain(config)
  for section, (options_class, names) in _NEW_SINCE_0_8.items():
    if isinstance(fields.get(section), Mapping):
      default = options.defaults(options_class)
      fields[section] = {name: default[name] for name in names} | fields[section]
  for problem in _problems_of_fields(fields):
    raise ValueError(problem)
  parts_of = _make_parts(fields)
  env = parts_of['env'][0]
  algorithm = parts_of['loss'][0]
  network, torso_options = (*parts_of['network'], TorsoOptions())[:2]
  task_options = {name: value for name, value in fields['env'].items()
                  if name not in options.meanings(EnvOptions)}
  with _own_errors('env.task', env.task):
    if may_start_jax(env.task):
      machine = host.machine()[0]
      place = parts_of['placement'][0]
      if place.auto and not place.is_remote and not place.xla_threads:
        place = dataclasses.replace(place, xla_threads=placing.xla_threads(machine))
      # Several seeds use a device for each core, however many one run can use.
      devices = max(
          placing.most_devices(fields['num_shards'], fields['num_grad_shards'], machine),
          min(machine.allowed, placing.xla_threads(machine)))
      host.prepare_host_for_any(place, parts_of['numerics'][0].deterministic, devices)
    spec = family_of(env.task).make_spec(env.task, task_options)
  is_default = env.action_mask == options.defaults(EnvOptions)['action_mask']
  spec = action_masks.find(spec, env.action_mask, is_optional=is_default)
  policy_name, policy = _make_policy(fields, algorithm, spec)
  network = fit_to_task(network, action_masks.seen(spec))
  if parts_of['numerics'][0].precision == BFLOAT16:
    network = in_bfloat16(network)
  experiment = Experiment(
      **{name: fields[name] for name in options.meanings(TrainingOptions)},
      scheme_name=fields['scheme'], scheme=_find_scheme(fields['scheme']),
      env=env, env_options=task_options, spec=spec,
      loss_name=fields['loss']['name'], loss=algorithm,
      network_name=fields['network']['name'], network=network,
      torso_options=torso_options, policy_name=policy_name, policy=policy,
      optimizer=parts_of['optimizer'][0], replay=parts_of.get('replay', [None])[0], fields=fields,
      **{section: parts_of[section][0] for section in schema.SECTIONS})
  machine, processes = host.machine()
  if experiment.microbatch_rows == schema.OPEN:
    rows = placing.microbatch_rows(spec, machine)
    experiment = dataclasses.replace(experiment.with_microbatch_rows(rows), chooses_microbatch=True)
  experiment = dataclasses.replace(
      experiment, placement=placing.placed(experiment, machine, processes))
  with _own_errors('loss.name', f'items of {experiment.loss_name}'):
    experiment.items  # noqa: B018 - made here, and kept
  for problem in checks.problems(experiment, processes):
    raise ValueError(problem)
  return experiment


def placement_of(config: Mapping[str, Any]) -> PlacementOptions:
  """Returns the placement of a config, which a process needs before JAX starts.

  Raises:
    ValueError: a field is wrong; the message names it, its value and a right value.
  """
  fields = plain(config).get('placement', {})
  if not isinstance(fields, Mapping):
    known = ', '.join(sorted(options.defaults(PlacementOptions)))
    raise ValueError(f'placement: must have the fields {known}, got {options.shown(fields)}')
  for problem in (*options.check_names('placement.', fields, options.defaults(PlacementOptions)),
                  *options.check_values('placement.', fields, PlacementOptions)):
    raise ValueError(problem)
  return options.make(PlacementOptions, options.defaults(PlacementOptions) | dict(fields))


def changed(experiment: Experiment, **changes: Any) -> Experiment:
  """Returns the experiment of a changed config.

  Args:
    experiment: the experiment to change.
    **changes: fields of the config; for a section, a mapping of the fields to change.

  Raises:
    ValueError: see `resolve`.
  """
  fields = dict(experiment.fields)
  for name, value in changes.items():
    fields[name] = {**fields[name], **value} if isinstance(value, Mapping) else value
  return resolve(fields)


def _problems_of_fields(fields: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each wrong name or value, section by section."""
  for field, name in schema.names(fields).items():
    refuse_object(field, name)
  _find_scheme(fields.get('scheme'))
  whole = schema.defaults(fields)
  yield from options.check_names('', fields, whole)
  for section, classes in schema.classes_by_section(fields).items():
    given = fields[section]
    known = sorted(name for name in whole[section] if name != 'name')
    if not isinstance(given, Mapping):
      yield f'{section}: must have the fields {", ".join(known)}, got {options.shown(given)}'
    # The name of a part is no option; the task's own options are checked with the task.
    given = {name: value for name, value in given.items()
             if name != 'name' and (section != 'env' or name in known)}
    owner = fields[section]['name'] if section in schema.CHOICES else ''
    yield from options.check_names(f'{section}.', given, known, owner)
    for cls in classes:
      yield from options.check_values(f'{section}.', given, cls,
                                      may_change=section in schema.SCHEDULED)
  yield from options.check_values('', fields, TrainingOptions)
  for name, value in fields['env'].items():
    # An evaluation gets the task's own options from config.json.
    problem = options.problem_of_json(value) or options.problem_of_json({name: 0})
    if problem:
      yield f'env.{name}: {problem}, got {options.shown(value)}'


@contextlib.contextmanager
def _own_errors(field: str, name: str) -> Iterator[None]:
  """Turns any exception of a user's own part into a ValueError of one line."""
  try:
    yield
  except ValueError:
    raise
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a part is a program: it may raise anything
    raise ValueError(f'{field}: {name} fails: {type(error).__name__}: '
                     f'{options.shorten(str(error))}') from error


def _make_parts(fields: Mapping[str, Any]) -> dict[str, list[Any]]:
  """Returns the objects that the options of each section make.

  Raises:
    ValueError: a part fails, or has `problems` with its options.
  """
  parts_of = {}
  for section, classes in schema.classes_by_section(fields).items():
    with _own_errors(f'{section}.name', fields[section].get('name', section)):
      parts_of[section] = [options.make(cls, fields[section]) for cls in classes]
  for section, part in [(section, part) for section, of in parts_of.items() for part in of]:
    with _own_errors(f'{section}.name', type(part).__name__):
      problems = list(getattr(part, 'problems', tuple)())
    for problem in problems:
      raise ValueError(f'{section}.{problem}')
  return parts_of


def _find_scheme(name: Any) -> Scheme:
  scheme = parts.find('scheme', name, SCHEMES)
  if not isinstance(scheme, Scheme):
    raise ValueError(f'scheme: {name} must be a Scheme')
  return scheme


def _make_policy(fields: Mapping[str, Any], algorithm: Algorithm, spec: EnvSpec
                 ) -> tuple[str, Policy]:
  """Returns the policy of the config that fits algorithm and task, after its name."""
  several = bool(spec.action_choices)
  discrete = bool(spec.num_actions) or several
  kind = (discrete, several, algorithm.policy_reads)
  name = fields['policy']
  if ':' in str(name):
    family = _find_family(name, kind, spec)
  else:
    name, family = _shipped_family(fields, kind, spec)
  if not np.isfinite([*spec.action_low, *spec.action_high]).all():
    raise ValueError(f'env.task: the actions of {spec.task} have no bounds')
  bounds = (np.array(bound, np.float32) for bound in (spec.action_low, spec.action_high))
  arguments = (spec.action_choices or spec.num_actions,) if discrete else bounds
  with _own_errors('policy', name):
    policy = family.make(*arguments)
  if not isinstance(policy, Policy):
    raise ValueError(f'policy: {name} must make a Policy, got {options.shown(policy)}')
  needed = ('sample', 'mode', 'log_prob') if family.reads == DISTRIBUTION else ('mode', 'explore')
  missing = [field for field in needed if getattr(policy, field) is None]
  if missing and family.reads in (DISTRIBUTION, ACTION_VALUES, ACTION):
    raise ValueError(f'policy: {name} has no {", ".join(missing)}, which a policy that reads '
                     f'{family.reads} needs')
  mask = spec.action_mask
  if mask is None:
    return name, policy
  if policy.dist_size != mask.size:
    raise ValueError(f'policy: {name} reads {policy.dist_size} numbers, and not one for each of '
                     f'the {mask.size} choices that env.action_mask = {mask.name} masks')
  return name, action_masks.among_legal(policy, spec)


def _find_family(name: str, kind: tuple[bool, bool, str], spec: EnvSpec) -> PolicyFamily:
  """Returns a user's own family of policies.

  Args:
    name: 'module:attribute'.
    kind: as `_kind` returns it, of the task and the algorithm.
    spec: of the task.

  Raises:
    ValueError: it is none, or of another kind; the message is one line.
  """
  family = parts.find('policy', name, {})
  if not isinstance(family, PolicyFamily):
    raise ValueError(f'policy: {name} must be a PolicyFamily of agents.policies, got '
                     f'{options.shown(family)}')
  if _kind(family) != kind:
    wanted = PolicyFamily(None, *kind[::2], kind[1])
    raise ValueError(f'policy: {name} is for {_actions_of(family)} and reads {family.reads}; '
                     f'{spec.task} has {_actions_of(wanted)}, and the algorithm gives '
                     f'{wanted.reads}')
  return family


def _shipped_family(fields: Mapping[str, Any], kind: tuple[bool, bool, str], spec: EnvSpec
                    ) -> tuple[str, PolicyFamily]:
  """Returns the shipped family of policies that the config names, after its name.

  Args:
    fields: plain values of the config.
    kind: as `_kind` returns it, of the task and the algorithm.
    spec: of the task.

  Raises:
    ValueError: none fits; the message is one line.
  """
  fitting = {name: family for name, family in FAMILIES.items() if _kind(family) == kind}
  able = [_actions_of(family) for family in FAMILIES.values() if family.reads == kind[-1]]
  if not able:
    raise ValueError(f'loss.name: no shipped policy reads {options.shown(kind[-1])}, the '
                     f'policy_reads of {fields["loss"]["name"]}; policy must name one of your own')
  if not fitting:
    raise ValueError(f'loss.name: {fields["loss"]["name"]} wants {able[0]}; those of {spec.task} '
                     f'are {_actions_of(PolicyFamily(None, *kind[::2], kind[1]))}')
  name = fields['policy']
  if name == schema.POLICY:
    return next(iter(fitting.items()))
  if str(name) not in fitting:
    known = ', '.join((schema.POLICY, *fitting))
    raise ValueError(f'policy: must be one of {known} for the actions of {spec.task}, got '
                     f'{options.shown(name)}')
  return name, fitting[name]


def _kind(family: PolicyFamily) -> tuple[bool, bool, str]:
  """Returns the properties in which a policy must agree with the algorithm and the task."""
  return family.discrete, family.several, family.reads


def _actions_of(family: PolicyFamily) -> str:
  """Returns the kind of actions of a policy, for error messages."""
  if not family.discrete:
    return 'continuous actions'
  return 'vectors of choices' if family.several else 'discrete actions'
