"""The config that users write: an ml_collections.ConfigDict with the options of all parts."""

from __future__ import annotations

import difflib
import inspect
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import ml_collections

from podracer_jit import losses, options, parts
from podracer_jit.agents import kinds
from podracer_jit.agents.networks import TorsoOptions
from podracer_jit.agents.optimizers import OPTIMIZERS, Optimizer
from podracer_jit.agents.policies import FAMILIES
from podracer_jit.agents.running_moments import NormaliseOptions
from podracer_jit.envs.families import own_module
from podracer_jit.experiment.settings import (
  CheckpointOptions,
  EnvOptions,
  EvalOptions,
  LogOptions,
  TrainingOptions,
)
from podracer_jit.losses.algorithm import ReplayAlgorithm, RolloutAlgorithm
from podracer_jit.parts import user_path
from podracer_jit.replay.options import ReplayOptions
from podracer_jit.runtime.placement import PlacementOptions
from podracer_jit.schemes.table import SCHEMES


class Choice(NamedTuple):
  """A section of the config whose `name` chooses a part; the other fields are its options."""

  shipped: Mapping[str, type]
  base: type | tuple[type, ...]
  requirement: str  # for a user's own part, in error messages: 'a flax module'


CHOICES = {
    'loss': Choice(losses.ALGORITHMS, (RolloutAlgorithm, ReplayAlgorithm),
                   'a class derived from RolloutAlgorithm or ReplayAlgorithm'),
    'network': Choice(kinds.NETWORKS, nn.Module, 'a flax module'),
    'optimizer': Choice(OPTIMIZERS, Optimizer, 'a class derived from Optimizer'),
}
# Sections whose fields are always the same.
SECTIONS = {
    'normalise': NormaliseOptions,
    'placement': PlacementOptions,
    'checkpoint': CheckpointOptions,
    'eval': EvalOptions,
    'log': LogOptions,
}
SCHEME = 'cleanba'  # by default
POLICY = 'auto'
ALLOW_MODULES = (  # the help of a flag
    'Modules, or .py files, of your own parts that may be imported if the config in the workdir '
    'names them; by comma. Importing a module runs it.')


class Fields(ml_collections.ConfigDict):
  """The fields of a config, or of one of its sections; new fields are refused while it is locked.

  Numbers of NumPy and JAX become Python's own.
  """

  section = ''  # with its dot, for messages

  def __setitem__(self, key: str, value: Any):
    """Sets a field.

    Raises:
      KeyError: the config is locked and has no such field; the message is one line.
      ValueError: the value is a class or a function; a config names it by a text.
    """
    value = options.plain_value(value)
    known = list(self.keys())
    if self.is_locked and key not in known:
      near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
      hint = f'did you mean {near[0]}? ' if near else ''
      raise KeyError(f'{key}: the config has no such field; {hint}There are {", ".join(known)}')
    own = self._fields.get(key)
    if isinstance(own, str):
      refuse_object(f'{self.section}{key}', value)
    if isinstance(value, Mapping) and not isinstance(value, ml_collections.ConfigDict):
      value = type(own)(value) if isinstance(own, Fields) else Fields(value)
    super().__setitem__(key, value)

  def __setattr__(self, name: str, value: Any):
    try:
      super().__setattr__(name, value)
    except AttributeError as error:
      # Its only argument is the KeyError, whose text would be in quotation marks.
      raise AttributeError(*error.args[0].args if error.args else ()) from None

  def lock(self) -> Fields:
    """Refuses new fields from now on; returns itself."""
    return self._set_locked(True)

  def unlock(self) -> Fields:
    """Allows new fields; returns itself."""
    return self._set_locked(False)

  def _set_locked(self, is_locked: bool) -> Fields:
    # The methods of ml_collections also ask for the values, which placeholders may lack.
    object.__setattr__(self, '_locked', is_locked)
    for value in self._fields.values():
      if isinstance(value, ml_collections.ConfigDict):
        value.lock() if is_locked else value.unlock()
    return self


class EnvFields(Fields):
  """The section `env`, to which the task's own options can always be added."""

  section = 'env.'

  def lock(self) -> EnvFields:
    """Does nothing."""
    return self


def refuse_object(field: str, value: Any) -> None:
  """Refuses a class or a function in a field that names it by a text.

  Raises:
    ValueError: the value is one; the message says how it is named.
  """
  if not (callable(value) and hasattr(value, '__qualname__')):
    return
  module = getattr(value, '__module__', None)
  name = value.__qualname__
  if '.' in name:
    raise ValueError(f"{field}: must be a text such as 'mine:Mine', which names a class or a "
                     f'function at the top level of mine.py; {name} is inside of another')
  if module == parts.MAIN:
    raise ValueError(f"{field}: must be a text such as 'mine:{name}'; {name} is in the main "
                     f'program, so move it into a file of its own, mine.py')
  raise ValueError(f"{field}: must be the text '{module}:{name}', not the object itself")


def as_fields(config: Mapping[str, Any] | ml_collections.ConfigDict) -> Fields:
  """Returns a config as `Fields`, locked; references between its fields stay."""
  if isinstance(config, ml_collections.FrozenConfigDict):
    config = ml_collections.ConfigDict(config)
  is_dict = isinstance(config, ml_collections.ConfigDict)
  items = config.items(preserve_field_references=True) if is_dict else config.items()
  fields = Fields()
  for name, value in items:
    is_section = isinstance(value, Mapping | ml_collections.ConfigDict)
    kind = EnvFields if name == 'env' else as_fields
    fields[name] = kind(value) if is_section else value
  return fields.lock()


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
  try:
    options.meanings(part)
  except ValueError as error:
    raise ValueError(f'{field}: {error}') from None
  return part


def option_classes(section: str, part: type) -> tuple[type, ...]:
  """Returns the classes whose options are the fields of a section that has chosen this part."""
  is_torso = section == 'network' and kinds.provides(part) == kinds.TORSO
  return (part, TorsoOptions) if is_torso else (part,)


def section_defaults(section: str, name: str) -> dict[str, Any]:
  """Returns the section of a config that has chosen `name`, with its defaults.

  Raises:
    ValueError: as `find_part`.
  """
  fields = {'name': name}
  for cls in option_classes(section, find_part(section, name)):
    fields |= options.defaults(cls)
  return fields


def config(loss: str, network: str, optimizer: str, **fields: Any) -> Fields:
  """Returns a whole config: the named parts with all their options, and `fields`.

  A config file then sets the fields of its experiment. A flag can override each field. Only the
  section `env` takes new fields: the options of the task.

  Args:
    loss: a name in `losses.ALGORITHMS`, or 'module:Class' of your own.
    network: a name in `agents.kinds.NETWORKS`, or 'module:Class' of your own.
    optimizer: a name in `agents.optimizers.OPTIMIZERS`, or 'module:Class' of your own.
    **fields: other fields of the config, such as scheme='sync'.

  Raises:
    ValueError: there is no such part.
  """
  whole = dict(scheme=SCHEME, **options.defaults(TrainingOptions),
               env=options.defaults(EnvOptions), policy=POLICY)
  for section, name in (('loss', loss), ('network', network), ('optimizer', optimizer)):
    whole[section] = section_defaults(section, name)
  for section, cls in SECTIONS.items():
    whole[section] = options.defaults(cls)
  whole |= replay_section(whole)
  whole.update(fields)
  return as_fields(whole)


def plain(fields: Mapping[str, Any] | ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the values of a config in Python's own types; see `options.plain_value`.

  An empty placeholder becomes None, which `resolve` refuses.
  """
  if isinstance(fields, ml_collections.FrozenConfigDict):
    fields = ml_collections.ConfigDict(fields)  # has the lists that are tuples in a frozen one
  if not isinstance(fields, ml_collections.ConfigDict):
    return {name: plain(value) if isinstance(value, Mapping | ml_collections.ConfigDict)
            else options.plain_value(value) for name, value in fields.items()}
  values = {}
  for name, value in fields.items(preserve_field_references=True):
    if isinstance(value, ml_collections.FieldReference):
      try:
        value = value.get()
      except ml_collections.config_dict.RequiredValueError:
        value = None
    is_section = isinstance(value, ml_collections.ConfigDict)
    values[name] = plain(value) if is_section else options.plain_value(value)
  return values


def as_json(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config of plain values as config.json has it.

  Only the task's own options tell lists and tuples apart; see `options.to_json`.
  """
  return dict(fields) | {'env': options.to_json(fields.get('env', {}))}


def replay_section(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the section `replay` with its defaults; empty if the algorithm has no replay."""
  algorithm = find_part('loss', fields['loss']['name'])
  return {'replay': options.defaults(ReplayOptions)} if algorithm.learns_from_replay else {}


def choose(fields: ml_collections.ConfigDict | dict[str, Any], section: str, name: str) -> None:
  """Puts another part into a section of a config, with the part's defaults.

  The section `replay` is added for an algorithm that learns from a replay, and removed for others.

  Raises:
    ValueError: there is no such part.
  """
  if fields[section]['name'] != name:
    changed = section_defaults(section, name)
    # Deleted first, since a section of the same name would keep the types of its fields.
    del fields[section]
    fields[section] = changed
  replay = replay_section(fields)
  if 'replay' in fields and not replay:
    del fields['replay']
  elif 'replay' not in fields and replay:
    fields['replay'] = replay['replay']


def names(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the names of parts in a config of plain values, by field; None where it has none."""
  named = {'scheme': fields.get('scheme'), 'policy': fields.get('policy')}
  for section, field in (('env', 'task'), *((section, 'name') for section in CHOICES)):
    values = fields.get(section)
    named[f'{section}.{field}'] = values.get(field) if isinstance(values, Mapping) else None
  return named


def modules(fields: Mapping[str, Any]) -> dict[str, str]:
  """Returns the modules of a user's own parts that a config of plain values names, by field."""
  named = names(fields)
  user_modules = {field: str(name).partition(':')[0]
                  for field, name in named.items() if ':' in str(name)}
  if 'env.task' in user_modules:
    user_modules['env.task'] = own_module(str(named['env.task']))
  return {field: module for field, module in user_modules.items()
          if module or field != 'env.task'}


def sources(fields: Mapping[str, Any]) -> dict[str, bytes]:
  """Returns the source files of all modules that a config of plain values names, by their paths.

  They are those that this process has imported; see `parts.sources_of`.
  """
  files: dict[str, bytes] = {}
  for name in sorted(set(modules(fields).values())):
    files = dict(parts.sources_of(name)) | files
  return files


def check_modules(fields: Mapping[str, Any], allowed: Collection[str], where: str,
                  copies: Callable[[str], str] = lambda name: '') -> None:
  """Refuses a config from a workdir that names modules which nobody has allowed.

  Args:
    fields: plain values of the config; nothing is imported.
    allowed: names of modules that may be imported.
    where: the file that the config was read from, for the message.
    copies: returns the path of the workdir's copy of a module, '' if it has none.

  Raises:
    ValueError: a module is not allowed; the message names the files that would be run.
  """
  refused = {field: name for field, name in modules(fields).items() if name not in allowed}
  of_program = [field for field, name in refused.items() if name == parts.MAIN]
  if of_program:
    raise ValueError(f'--workdir: {where} names {", ".join(of_program)} of the program that '
                     f'trained it ({parts.MAIN}), which others cannot import; a program that has '
                     f"the same can load it with allow_modules=['{parts.MAIN}']")
  if refused:
    listed = ', '.join(f'{field} = {options.shorten(name)}:..., which runs '
                       f'{options.shorten(parts.file_of(name), 600)}'
                       for field, name in refused.items())
    # Quoted, since people copy the flag into a shell, and names may be a stranger's.
    names = shlex.quote(','.join(map(options.shorten, dict.fromkeys(refused.values()))))
    kept = ','.join(filter(None, map(copies, dict.fromkeys(refused.values()))))
    or_kept = (', or the copies that are kept with it: '
               f'--allow_modules={shlex.quote(kept)}' if kept else '')
    raise ValueError(f'--workdir: {where} names modules of its own ({listed}); if you trust them: '
                     f'--allow_modules={names}{or_kept}')


def allowed_modules(entries: Iterable[str | Path]) -> frozenset[str]:
  """Returns the names of the modules that --allow_modules lists.

  Args:
    entries: names of modules, or paths of .py files; modules are then also looked for beside these
      files.

  Raises:
    ValueError: a file does not exist.
  """
  names = set()
  for entry in entries:
    if not str(entry).endswith('.py'):
      names.add(str(entry))
      continue
    path = user_path(entry)
    if not path.is_file():
      raise ValueError(f'--allow_modules: there is no file {entry}')
    name = path.stem
    # A file of a package has the package's name before its own.
    for folder in path.resolve().parents:
      names.add(name.removesuffix('.__init__'))
      if not (folder / '__init__.py').is_file():
        break
      name = f'{folder.name}.{name}'
    parts.look_beside(folder / f'{name}.py')
    parts.look_beside(path)
  return frozenset(names)


def complete(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config of plain values, completed by the defaults of options that it lacks.

  Configs of old workdirs lack options that were added later. The default of such an option keeps
  the earlier behaviour.
  """
  whole = options.defaults(TrainingOptions) | {'scheme': SCHEME, 'policy': POLICY} | dict(fields)
  for section in CHOICES:
    if section in whole:
      whole[section] = section_defaults(section, whole[section].get('name')) | whole[section]
  for section, cls in SECTIONS.items():
    whole[section] = options.defaults(cls) | whole.get(section, {})
  whole['env'] = options.defaults(EnvOptions) | whole.get('env', {})
  if 'replay' in whole:
    whole['replay'] = options.defaults(ReplayOptions) | whole['replay']
  return whole


# The placement of commands that only look at a run: evaluations and repeated updates.
ONE_DEVICE = dict(actor_devices=(0,), learner_devices=(0,), actors_per_device=1,
                  actor_platform='auto', env_threads=0, cluster='none')


def on_one_device(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config of plain values with one actor on one device, which is enough to play."""
  changed = dict(fields) | {'num_shards': 1, 'placement': fields['placement'] | ONE_DEVICE}
  if 'replay' in fields:
    # A ratio would need a tolerance that depends on the number of actors.
    changed['replay'] = fields['replay'] | {'samples_per_insert': 0.0}
  return changed


def describe(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
  """Yields (field, value, help text) of each option that a config of plain values has."""
  yield 'scheme', fields['scheme'], f'who waits for whom: {", ".join(SCHEMES)}'
  yield from _described('', fields, (TrainingOptions,))
  yield ('policy', fields['policy'],
         f'auto: the first that fits the algorithm and the actions; or {", ".join(FAMILIES)}')
  yield from _described('env.', fields['env'], (EnvOptions,))
  for name in sorted(set(fields['env']) - set(options.meanings(EnvOptions))):
    yield f'env.{name}', fields['env'][name], "an option of the task's own"
  for section, choice in CHOICES.items():
    name = fields[section]['name']
    yield (f'{section}.name', name,
           f'{", ".join(choice.shipped)}, or module:Class of your own')
    classes = option_classes(section, find_part(section, name))
    yield from _described(f'{section}.', fields[section], classes)
  for section, cls in SECTIONS.items():
    yield from _described(f'{section}.', fields[section], (cls,))
  if 'replay' in fields:
    yield from _described('replay.', fields['replay'], (ReplayOptions,))


def _described(prefix: str, fields: Mapping[str, Any], classes: tuple[type, ...]
               ) -> Iterator[tuple[str, Any, str]]:
  for cls in classes:
    for name, meaning in options.meanings(cls).items():
      if name in fields:
        yield prefix + name, fields[name], meaning.help


def arguments(text: str, *known: str) -> frozenset[str]:
  """Returns the arguments after the colon of --config=configs/x.py:a,b.

  Args:
    text: the argument of `get_config`.
    *known: the arguments that the config takes.

  Raises:
    ValueError: the config does not take one of the arguments.
  """
  names = frozenset(filter(None, text.split(',')))
  for name in sorted(names - set(known)):
    raise ValueError(f'there is no argument {name!r}; known are {", ".join(known)}')
  return names
