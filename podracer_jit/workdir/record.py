"""config.json: with which configs a run was made, where it began, and by which commands.

The newest config is under `config`. If the config changed on the way, or the run began with another
run's state, `history` says so: its `stages` have the first update and the whole config of each
stage, the newest without its config, its `origin` is the other run, and its `renewals` say where
simulators began anew though no segment ended. Each checkpoint has a copy of the file. A workdir may
come from a stranger: it is data, and nothing that it names is imported.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import platform
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from podracer_jit import options, parts
from podracer_jit.envs import spaces
from podracer_jit.experiment import modules, schema
from podracer_jit.options import hint, shorten
from podracer_jit.runtime import machine
from podracer_jit.workdir import files

NAME = 'config.json'
PACKAGES = ('podracer_jit', 'jax', 'jaxlib', 'flax', 'optax', 'rlax', 'envpool', 'numpy')
HISTORY = 'history'  # in config.json, and in the receipts' header of a stage's first segment
TOTAL = 'total_steps'
_ORIGIN = 'init_from'  # in a header of receipts, and in the history of version 0.6
_SHOWN = 3  # arrays that a line names
# Fields in which two runs of one experiment may differ, and exceptions among these fields.
_FREE = ('placement.', 'log.', 'eval.', 'checkpoint.keep', 'checkpoint.every_')
_BOUND = ('placement.actor_platform',)
# Fields that cannot change in a run, with the reason; a name with a dot at its end stands for a
# section. Changes of other fields may still not fit the checkpoint (`inherit.problem_of_shapes`).
_FIXED = {
    'seed': 'the random numbers of the run depend on it',
    'env.task': 'a run has one task',
    'env.action_mask': 'the network does not see the mask',
    'env.num_envs': 'the batch and the random numbers depend on it',
    'num_shards': 'the random numbers of the environments depend on it',
    'num_grad_shards': 'the state is split by it',
    'network.': 'the checkpoint has the parameters of the network',
    'policy': 'the checkpoint has the parameters of the network',
    'normalise.': 'the checkpoint has the statistics',
    'loss.name': 'a run has one algorithm',
    'loss.separate_optimizers': 'the checkpoint has the state of the optimizer',
    'optimizer.name': 'the checkpoint has the state of the optimizer',
}
_MOST_REFUSALS = 12  # that a message names
ASKED = '--renew_envs'  # a reason of a renewal
# Fields whose change begins a segment: environments, or what is under way, would not fit.
_RENEWING = ('env.', 'scheme', 'unroll_length', 'env_batch', 'checkpoint.replay')
# By field with dots: 'was' and 'now', the values; a missing key means a field that was not set.
Changes = Mapping[str, Mapping[str, Any]]


class Origin(NamedTuple):
  """The run that the first state of a run came from, and the parts that were taken."""

  workdir: str  # of the other run, as an absolute path
  update: int  # of its checkpoint
  taken: tuple[str, ...]  # parts, as in `inherit.PARTS`
  fresh: tuple[str, ...]  # parts, and arrays of taken parts, that did not fit and began anew
  unused: tuple[str, ...]  # arrays of taken parts that have no place in this run
  state_sha256: str  # of this run's first state, without its replay

  def words(self) -> str:
    """Returns a phrase: the parts that were taken, and the run that they came from."""
    text = f'{", ".join(self.taken)} of {self.workdir} after update {self.update}'
    for meaning, names in (('began fresh', self.fresh), ('not used', self.unused)):
      if names:
        more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
        text += f'; {meaning}: {", ".join(names[:_SHOWN])}{more}'
    # A stranger's workdir may have names that would control a terminal.
    return text if text.isprintable() else ascii(text)


class Stage(NamedTuple):
  """The updates of a run that were made with one config."""

  first_update: int
  config: Mapping[str, Any]  # whole, as JSON has it


@dataclasses.dataclass(frozen=True)
class Record:
  """The contents of config.json."""

  stages: Sequence[Stage]  # in order; the first one begins with update 1
  origin: Origin | None = None  # None: the run began with its seed
  versions: Mapping[str, Any] = dataclasses.field(default_factory=lambda: versions())
  layout: int = spaces.LAYOUT  # of observations
  starts: Sequence[Any] = ()  # the commands that have trained the run
  # Reasons why a segment ended early and environments began anew, by the first update after it.
  renewals: Mapping[int, str] = dataclasses.field(default_factory=dict)

  @property
  def config(self) -> Mapping[str, Any]:
    """The newest config, as JSON has it."""
    return self.stages[-1].config

  def at(self, update: int) -> dict[str, Any]:
    """Returns the config with which an update was made, as plain values."""
    stage = next(stage for stage in reversed(self.stages)
                 if stage.first_update <= max(update, 1))
    return options.from_json(stage.config)

  @functools.cached_property
  def changes(self) -> Mapping[int, Changes]:
    """The fields that changed on the way, by the first update of the stage that has them."""
    return {after.first_update: changed_fields(before.config, after.config)
            for before, after in itertools.pairwise(self.stages)}

  def begins_segment(self, first_update: int) -> bool:
    """Returns whether a segment ends before an update because of the run's history."""
    return first_update in self.renewals or renews(self.changes.get(first_update, {}))

  def header(self, first_update: int) -> dict[str, Any]:
    """Returns the field of a header in the receipts that names what changed before an update."""
    noted: dict[str, Any] = {}
    if first_update in self.renewals:
      noted['renewed'] = self.renewals[first_update]
    if first_update == 1 and self.origin:
      noted[_ORIGIN] = self.origin._asdict()
    elif first_update in self.changes:
      noted['changes'] = {name: options.to_json(change)
                          for name, change in self.changes[first_update].items()}
    return {HISTORY: {'first_update': first_update} | noted} if noted else {}

  def words_of(self, first_update: int) -> str:
    """Returns the change before an update as a phrase."""
    changed = [f'{ascii(name)[1:-1]}: {_value(change, "was")} before, {_value(change, "now")} since'
               for name, change in sorted(self.changes[first_update].items())]
    return f'changed before update {first_update}: {"; ".join(changed)}'

  def changed(self, fields: Mapping[str, Any], first_update: int) -> Record:
    """Returns the record of a run that goes on with other fields.

    A change before update 1 leaves no stage, nor does one that changes all fields back.

    Args:
      fields: the whole config, plain values.
      first_update: the next update.

    Raises:
      ValueError: the config changes before a later update.
    """
    later = [stage.first_update for stage in self.stages if stage.first_update > first_update]
    if later:
      raise ValueError(f'the config changes before update {later[0]}, and the checkpoint before it '
                       'was lost; first let the run go on to that update, without --extend and '
                       '--change')
    config = json_of(fields)
    earlier = [stage for stage in self.stages if stage.first_update < first_update]
    if not earlier:
      return dataclasses.replace(self, stages=[Stage(1, config)])
    *before, last = earlier
    whole = completed(last.config, fields)
    if not changed_fields(whole, config):
      return dataclasses.replace(self, stages=[*before, Stage(last.first_update, config)])
    return dataclasses.replace(self, stages=[*before, Stage(last.first_update, whole),
                                             Stage(first_update, config)])

  def taken_back(self, first_update: int) -> Record:
    """Returns the record without a change before this update, the next one, if there is any."""
    *before, newest = self.stages
    has_change = before and newest.first_update == first_update
    return dataclasses.replace(self, stages=before) if has_change else self

  def refreshed(self, fields: Mapping[str, Any]) -> Record:
    """Returns the record of a run that goes on with other free fields alone, as the newest config.

    Args:
      fields: the whole config, plain values.
    """
    *before, newest = self.stages
    return dataclasses.replace(self, stages=[*before, newest._replace(config=json_of(fields))])

  def renewed(self, first_update: int, reason: str) -> Record:
    """Returns the record of a run that goes on with this update.

    Args:
      first_update: the next update.
      reason: why environments begin anew now; '' if they do not.
    """
    # Who has asked for it once need not ask again before the next checkpoint.
    kept = {update: why for update, why in self.renewals.items()
            if update < first_update or (update, why) == (first_update, ASKED)}
    return dataclasses.replace(self, renewals=kept | ({first_update: reason} if reason else {}))

  def started(self, first_update: int) -> Record:
    """Returns the record with a note of this command; equal ones in a row only once.

    The commit is that of the folder of the user's config file, or else of the current folder.
    """
    config_files = parts.search().files
    folder = Path(config_files[-1]).parent if config_files else Path('.')
    start = {'host': platform.node(), 'command': sys.argv, 'commit': _commit_of(folder),
             'hardware': machine.hardware() | {'accelerators': [
                 device.device_kind for device in jax.local_devices() if device.platform != 'cpu']}}
    newest = self.starts[-1] if self.starts else None
    if isinstance(newest, dict) and start.items() <= newest.items():
      return self
    return dataclasses.replace(self, starts=(*self.starts, {'first_update': first_update} | start))

  def differences(self, fields: Mapping[str, Any]) -> Changes:
    """Returns the fields in which a config is another experiment than the newest one."""
    return changed_fields(completed(self.config, fields), json_of(fields))

  def as_json(self) -> dict[str, Any]:
    """Returns the contents of the file; checkpoints have a copy."""
    record = {'config': self.config, 'versions': self.versions, 'layout': self.layout}
    if self.origin or len(self.stages) > 1 or self.renewals:
      *earlier, newest = self.stages
      # Version 0.6, which knows no stages, wants a list here, and refuses the run.
      record[HISTORY] = {
          'stages': [*(stage._asdict() for stage in earlier),
                     {'first_update': newest.first_update}],
          'origin': self.origin and self.origin._asdict(),
          'renewals': [{'first_update': update, 'reason': reason}
                       for update, reason in self.renewals.items()]}
    if self.starts:
      record['starts'] = self.starts
    return json.loads(json.dumps(record))  # tuples become lists, as in the file

  def write(self, workdir: Path) -> None:
    """Writes config.json.

    Raises:
      OSError: it cannot be written.
    """
    files.write(workdir / NAME, json.dumps(self.as_json(), indent=2) + '\n')


def new(fields: Mapping[str, Any], origin: Origin | None = None) -> Record:
  """Returns the record of a run that begins.

  Args:
    fields: the whole config, plain values.
    origin: where its first state came from; None: it begins with its seed.
  """
  return Record([Stage(1, json_of(fields))], origin)


def read(workdir: Path) -> Record:
  """Returns the record of the run in a workdir.

  Raises:
    ValueError: there is no run, or its config.json is garbled.
  """
  path = workdir / NAME
  if not path.is_file():
    problem = f'holds no run (no {NAME})' if workdir.is_dir() else (
        'is no folder' if workdir.exists() else 'does not exist')
    raise ValueError(f'--workdir: {workdir} {problem}')
  try:
    return parse(files.read_json(path))
  except (OSError, ValueError):
    raise ValueError(f'--workdir: {path} is not of a run of podracer_jit') from None


def parse(content: Any) -> Record:
  """Returns the record that config.json, or the copy in a checkpoint, holds.

  Raises:
    ValueError: it is not one.
  """
  try:
    config = content['config']
    history = content.get(HISTORY, [])
    renewals = {}
    if isinstance(history, list):
      stages, origin = _of_version_0_6(config, history)
    else:
      *earlier, newest = history['stages']
      stages = [*(Stage(int(stage['first_update']), stage['config']) for stage in earlier),
                Stage(int(newest['first_update']), config)]
      origin = _origin(history['origin'])
      renewals = {int(each['first_update']): str(each['reason'])
                  for each in history.get('renewals', [])}
    starts = content.get('starts')
    stages = [stage._replace(config=_with_renewal(stage.config)) for stage in stages]
    record = Record(stages, origin, dict(content.get('versions', {})), content.get('layout', 1),
                    tuple(starts) if isinstance(starts, list) else (), renewals)
  except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
    raise ValueError('it is not the record of a run') from None
  firsts = [stage.first_update for stage in stages]
  if firsts != sorted({1, *firsts}) or not all(_has_sections(stage.config) for stage in stages):
    raise ValueError('it is not the record of a run')
  return record


def _origin(item: Mapping[str, Any] | None) -> Origin | None:
  if item is None:
    return None
  lists = {name: tuple(map(str, item[name])) for name in ('taken', 'fresh', 'unused')}
  return Origin(workdir=str(item['workdir']), update=int(item['update']),
                state_sha256=str(item['state_sha256']), **lists)


def _of_version_0_6(config: Any, history: Sequence[Mapping[str, Any]]
                    ) -> tuple[list[Stage], Origin | None]:
  """Returns the stages and the origin of a run of version 0.6, which noted what fields were.

  Args:
    config: the newest config.
    history: its entries have a first update, and either 'init_from' or 'changes'.
  """
  origin = None
  stages = []
  for entry in reversed(history):
    if _ORIGIN in entry:
      origin = _origin(entry[_ORIGIN])
    if not entry.get('changes'):
      int(entry['first_update'])
      continue
    stages.append(Stage(int(entry['first_update']), config))
    config = copy.deepcopy(config)
    for name, change in entry['changes'].items():
      *path, last = name.split('.')
      section = config
      for part in path:
        section = section.setdefault(part, {})
      section.pop(last, None)
      if 'was' in change:
        section[last] = change['was']
  return [Stage(1, config), *reversed(stages)], origin


def _with_renewal(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns a config with the number of updates after which environments begin anew.

  Until version 0.7 it was that of updates between two checkpoints.
  """
  env = config.get('env', {})
  every = config.get('checkpoint', {}).get('every_updates')
  if 'renew_every_updates' in env or every is None:
    return config
  return dict(config, env=dict(env, renew_every_updates=every))


def _has_sections(config: Any) -> bool:
  """Returns whether the sections that a config has are dicts; the placement is among them."""
  sections = ('env', 'replay', *schema.CHOICES, *schema.SECTIONS)
  return isinstance(config, dict) and isinstance(config.get('placement'), dict) and all(
      isinstance(config.get(section, {}), dict) for section in sections)


def versions(*others: str) -> dict[str, str]:
  """Returns the versions of Python and of the packages on which results depend.

  Args:
    *others: further packages; those that are not installed are left out.
  """
  installed = {name: _version_of(name) for name in (*PACKAGES, *others)}
  return {'python': platform.python_version()} | {
      name: version for name, version in installed.items() if version is not None}


@functools.cache
def _version_of(package: str) -> str | None:
  """Returns the version of an installed package, None if it is not; looking takes milliseconds."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _commit_of(folder: Path) -> str | None:
  """Returns the git commit that a folder is at; None if it is in no repository, or without git."""
  command = ['git', '-C', str(folder), 'rev-parse', '--verify', 'HEAD']
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True,
                          stdin=subprocess.DEVNULL)
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip() or None


def json_of(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config of plain values as JSON has it."""
  return json.loads(json.dumps(schema.as_json(fields)))


def completed(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config of a workdir, completed by the defaults of options that it lacks.

  A config that names other modules than `fields` is returned unchanged: a module must not be
  imported only because a workdir names it.

  Args:
    config: the config, as JSON has it.
    fields: the config of the command, plain values.
  """
  try:
    modules.check(config, modules.named(fields).values(), NAME)
    return json.loads(json.dumps(schema.complete(config)))
  except ValueError:
    return dict(config)


def with_free_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config with the fields of another one in which runs of one experiment may differ."""
  result = copy.deepcopy(dict(config))
  for name, value in options.flat(fields).items():
    if _is_free(name):
      section, _, field = name.partition('.')
      result.setdefault(section, {})[field] = value
  return result


def _is_free(name: str) -> bool:
  return name.startswith(_FREE) and name not in _BOUND


def differences(config_a: Mapping[str, Any], config_b: Mapping[str, Any], where: tuple[str, str]
                ) -> list[str]:
  """Returns the fields in which two configs are different experiments, with both values.

  Args:
    config_a: nested dicts.
    config_b: nested dicts.
    where: a phrase after the value of each config, such as 'in A'.
  """
  return [f'{shorten(name)}: {change.get("was")!r} {where[0]}, {change.get("now")!r} {where[1]}'
          for name, change in changed_fields(config_a, config_b).items()]


def changed_fields(config_a: Mapping[str, Any], config_b: Mapping[str, Any]) -> Changes:
  """Returns the fields in which two configs, from JSON or not, are different experiments."""
  a = options.flat(options.from_json(config_a))
  b = options.flat(options.from_json(config_b))
  return {name: {key: values[name] for key, values in (('was', a), ('now', b)) if name in values}
          for name in sorted(a.keys() | b.keys())
          if not _same(a.get(name), b.get(name)) and not _is_free(name)}


def _same(a: Any, b: Any) -> bool:
  """Returns whether values are equal; a list equals a tuple, since older files do not tell."""
  if isinstance(a, list | tuple) and isinstance(b, list | tuple):
    return len(a) == len(b) and all(map(_same, a, b))
  return a == b or a != a and b != b  # not a number


def _value(change: Mapping[str, Any], key: str) -> str:
  return repr(change[key]) if key in change else 'not set'


def differences_of_histories(a: Record, b: Record) -> list[str]:
  """Returns a line for each change that only one of two runs has, and for different first states.

  The run that a run began from does not count; the first state does.
  """
  lines = []
  for name, record, other in (('A', a, b), ('B', b, a)):
    states = [each.origin and each.origin.state_sha256 for each in (record, other)]
    if states[0] != states[1]:
      began = f'with {record.origin.words()}' if record.origin else 'with its seed'
      lines.append(f'history: {name} began {began}')
    lines += [f'history: {name} {record.words_of(first_update)}'
              for first_update, changes in record.changes.items()
              if other.changes.get(first_update) != changes]
    lines += [f'history: environments of {name} began anew before update {first_update}: {reason}'
              for first_update, reason in record.renewals.items()
              if first_update not in other.renewals]
  return lines


def renews(changes: Collection[str]) -> bool:
  """Returns whether a change of these fields begins a segment, with new environments."""
  return any(name.startswith(_RENEWING) for name in changes)


def refusals(changes: Changes, allowed: Collection[str]) -> list[str]:
  """Returns a line for each changed field that is refused; empty if all changes are allowed.

  Args:
    changes: the changed fields.
    allowed: the fields that may change.
  """
  # The fields of another part are others anyway.
  others = {name.removesuffix('name') for name in changes if name.endswith('.name')}
  if 'loss.' in others:
    others.add('replay.')
  names = sorted((name for name in changes
                  if name.endswith('.name') or not name.startswith(tuple(others))),
                 key=lambda name: (not _why_fixed(name), name))
  lines = [line for name in names for line in _refusals(name, changes[name], allowed)]
  more = [f'and {len(lines) - _MOST_REFUSALS} fields more'] if len(lines) > _MOST_REFUSALS else []
  return lines[:_MOST_REFUSALS] + more


def _refusals(name: str, change: Mapping[str, Any], allowed: Collection[str]) -> Iterator[str]:
  shown_name = shorten(name)
  values = f'{shown_name}: {change.get("was")!r} there, {change.get("now")!r} now'
  reason = _why_fixed(name)
  if name == TOTAL and change['now'] < change['was']:
    yield f'{values}: it can only grow; a signal ends a run earlier'
  elif reason:
    yield f'{values}: it cannot change, as {reason}'
  elif name == 'env.renew_every_updates' and name not in allowed:
    yield (f'{values}: it was checkpoint.every_updates until version 0.7; '
           f'--config.{name}={change["was"]} goes on with it')
  elif name not in allowed:
    yield f'{values}: {"--extend" if name == TOTAL else f"--change={shown_name}"} allows it'


def _why_fixed(name: str) -> str:
  """Returns why a field cannot change in a run; '' if it can."""
  return next((reason for field, reason in _FIXED.items()
               if name == field or field.endswith('.') and name.startswith(field)), '')


def problems_of_change(change: Collection[str], known: Collection[str]) -> Iterator[str]:
  """Yields a line for each wrong field that --change names.

  Args:
    change: the fields that it names, with dots.
    known: all fields of the config, with dots.
  """
  for name in change:
    reason = _why_fixed(name)
    if reason:
      yield (f'--change: {name} cannot change, as {reason}; a new run can begin from this one: '
             '--init_from')
    elif name not in known and not name.startswith('env.'):
      yield f'--change: the config has no field {name}{hint(name, known)}'
