"""The config as users write and change it: an ml_collections.ConfigDict."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping
from typing import Any

import ml_collections

from podracer_jit import options, parts, schedules
from podracer_jit.experiment import schema


def config(loss: str, network: str, optimizer: str, **fields: Any) -> Fields:
  """Returns a whole config: the named parts with all their options, and `fields`.

  A config file then sets the fields of its experiment. A flag can override each field. Only the
  section `env` takes new fields: the options of the task.

  >>> pj.config('ppo', 'mlp', 'adam', scheme='sync').loss.gae_lambda
  0.95

  Args:
    loss: a name in `losses.ALGORITHMS`, or 'module:Class' of your own.
    network: a name in `agents.networks.TORSOS` or `agents.q_networks.POLICY_AND_CRITIC`, or
      'module:Class' of your own.
    optimizer: a name in `agents.optimizers.OPTIMIZERS`, or 'module:Class' of your own.
    **fields: other fields of the config, such as scheme='sync'.

  Raises:
    ValueError: there is no such part.
  """
  chosen = dict(loss=loss, network=network, optimizer=optimizer)
  whole = schema.defaults({section: {'name': name} for section, name in chosen.items()})
  whole.update(fields)
  return as_fields(whole)


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


class WrongType(TypeError):
  """Raised if a field gets a value of another type."""


class Fields(ml_collections.ConfigDict):
  """The fields of a config, or of one of its sections; new fields are refused while it is locked.

  Numbers of NumPy and JAX become Python's own. A number may become a schedule, which is a text, and
  a schedule a number; `resolve` checks whether it may.
  """

  section = ''  # with its dot, for messages

  def __setitem__(self, key: str, value: Any):
    """Sets a field.

    Raises:
      KeyError: the config is locked and has no such field; the message is one line.
      ValueError: the value is a class or a function; a config names it by a text.
      WrongType: the field has values of another type; the message is one line.
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
    changes = key in known and (
        schedules.is_schedule(own)
        or schedules.is_schedule(value) and self.get_type(key) in (bool, int, float))
    try:
      with self.ignore_type() if changes else contextlib.nullcontext():
        super().__setitem__(key, value)
    except TypeError:
      if key not in known:
        raise
      raise WrongType(f'{self.section}{key}: {options.must_be(self.get_type(key))}, got '
                      f'{options.shown(value)}') from None

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
  if isinstance(config, ml_collections.ConfigDict):
    items = config.items(preserve_field_references=True)
  else:
    items = config.items()
  fields = Fields()
  for name, value in items:
    is_section = isinstance(value, Mapping | ml_collections.ConfigDict)
    kind = EnvFields if name == 'env' else as_fields
    fields[name] = kind(value) if is_section else value
  return fields.lock()


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
      value = None if lacks_required(value) else value.get()
    is_section = isinstance(value, ml_collections.ConfigDict)
    values[name] = plain(value) if is_section else options.plain_value(value)
  return values


def lacks_required(value: Any) -> bool:
  """Returns whether a value is a required placeholder without a value."""
  try:
    if isinstance(value, ml_collections.FieldReference):
      value.get()
  except ml_collections.config_dict.RequiredValueError:
    return True
  return False
