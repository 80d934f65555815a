"""Options of parts: dataclass fields with a default, a range and one line of meaning.

A part (an algorithm, a network, an optimizer, ...) is a dataclass or a flax module whose fields are
its options. Defaults, flags, help texts and checks all come from these fields.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import math
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from podracer_jit import schedules

# Key of a `Meaning` in a field's metadata.
_KEY = 'podracer_jit.option'
# Fields that flax adds to every module.
_FLAX_FIELDS = ('name', 'parent')
# Types that an option may have.
_KINDS = (bool, int, float, str, tuple)
_MAY_BE_EMPTY = ('slurm', 'allow_modules')  # flags: no options of sbatch, no modules
# Key that marks a list in JSON.
_LIST = '__list__'
# Most levels of arrays and objects in a file of JSON; functions that call themselves stay far from
# Python's limit.
_MOST_NESTED = 100
# Most characters of a value in an error message.
_LONGEST_SHOWN = 60

# Programs count in 32 bits, so counts must stay below 2^31.
INT32_MAX = 2**31 - 1
LARGEST_FLOAT = float(np.finfo(np.float32).max)


class Meaning(NamedTuple):
  """Help text and limits of an option."""

  help: str = ''
  at_least: float | None = None
  at_most: float | None = None
  above: float | None = None  # compared as a 32-bit float
  below: float | None = None  # compared as a 32-bit float
  choices: tuple[str, ...] = ()  # of a string option; () for any string
  not_empty: bool = False  # a tuple must have elements
  max_length: int = 1024  # most elements of a tuple
  element: Any = 0  # has the type of a tuple's elements, where the default is empty
  constant: bool = False  # a float option that cannot change during a run
  earlier: Any = None  # the value in configs of versions without the option; None: the default
  message: str = ''  # error message that replaces the one made from the limits


def shown(value: Any) -> str:
  """Returns a value's repr for error messages; omits the middle of a long one."""
  try:
    text = repr(value)
  except ValueError:
    # By default, Python does not convert integers of more than 4,300 digits.
    text = 'a number of more digits than Python writes'
  return shorten(text, _LONGEST_SHOWN)


def hint(name: str, known: Iterable[str], prefix: str = '', cutoff: float = 0.6) -> str:
  """Returns the end of a line about a wrong name: '; did you mean x?', '' if none is similar.

  Args:
    name: the wrong name.
    known: the right ones.
    prefix: shown before the right one.
    cutoff: see `difflib.get_close_matches`.
  """
  near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
  return f'; did you mean {prefix}{near[0]}?' if near else ''


def shorten(text: str, longest: int = 200) -> str:
  """Returns a text on one line, escaped; omits its middle if it has more than `longest` characters.

  Names and texts that come from a workdir, a checkpoint or an export are shown by this function.
  """
  text = printable(' '.join(text.split()))
  half = longest // 2 - 3
  return text if len(text) <= longest else f'{text[:half]} ... {text[-half:]}'


def nested_too_deeply(value: Any, spare: int = 0) -> bool:
  """Returns whether a value of JSON has more levels than files may have.

  Args:
    value: dicts, lists and tuples count.
    spare: levels that the file has around the value.
  """
  level = [value]
  for _ in range(_MOST_NESTED - spare):
    level = [inner for outer in level if isinstance(outer, dict | list | tuple)
             for inner in (outer.values() if isinstance(outer, dict) else outer)]
    if not level:
      return False
  return True


def printable(text: str) -> str:
  """Returns a text in which characters that could control a terminal are escaped; lines stay."""
  return ''.join(x if x.isprintable() or x == '\n' else x.encode('unicode_escape').decode()
                 for x in text)


def plain_value(value: Any) -> Any:
  """Returns a value of a config with numbers of NumPy and JAX as Python's own.

  Lists, tuples and dicts keep their kind. Other types are returned unchanged.
  """
  if isinstance(value, dict):
    return {key: plain_value(x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return (list if isinstance(value, list) else tuple)(map(plain_value, value))
  if hasattr(value, 'dtype') and getattr(value, 'shape', None) == () and hasattr(value, 'item'):
    return value.item()
  # An enumeration, for example, would be a number once it is read from a file.
  if isinstance(value, str):
    return str.__str__(value)
  for kind in (bool, int, float):
    if isinstance(value, kind):
      return kind(value)
  return value


def to_json(value: Any) -> Any:
  """Returns a value in the form that it has in JSON: tuples are arrays, lists are marked."""
  if isinstance(value, Mapping):
    return {key: to_json(x) for key, x in value.items()}
  if isinstance(value, list):
    return {_LIST: [to_json(x) for x in value]}
  return [to_json(x) for x in value] if isinstance(value, tuple) else value


def flat(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns nested dicts as one dict with dotted names, such as env.task."""
  fields: dict[str, Any] = {}
  for name, value in tree.items():
    full = prefix + name
    fields |= flat(value, f'{full}.') if isinstance(value, Mapping) else {full: value}
  return fields


def from_json(value: Any) -> Any:
  """Returns a value that was read from JSON; see `to_json`."""
  if isinstance(value, Mapping):
    if value.keys() == {_LIST} and isinstance(value[_LIST], list):
      return [from_json(x) for x in value[_LIST]]
    return {key: from_json(x) for key, x in value.items()}
  return tuple(from_json(x) for x in value) if isinstance(value, list | tuple) else value


def problem_of_json(value: Any) -> str:
  """Returns why JSON would give another value back, or an empty string if it gives the same."""
  try:
    stored = to_json(value)
    text = '' if nested_too_deeply(stored, spare=20) else repr(
        from_json(json.loads(json.dumps(stored))))
  except (TypeError, ValueError, RecursionError):
    text = ''
  return '' if text == repr(value) else (
      'must consist of numbers, texts, True, False, None, lists, tuples, and dicts with texts as '
      'keys')


class Count(NamedTuple):
  """Number that a field determines, for error messages."""

  field: str
  number: int
  is_set: bool  # the field differs from its default
  unit: str  # noun for the counted things, in the singular
  where: str = ''  # the fields that determine the number, if it is not the field's own value

  def __str__(self) -> str:
    # The plural of 'device with x' is 'devices with x'.
    noun, preposition, attribute = self.unit.partition(' with ')
    plural = '' if self.number == 1 else 's'
    return f'{self.number} {noun}{plural}{preposition}{attribute}'


def uneven(whole: Count, divisor: Count) -> str:
  """Returns the error message for a number that cannot be split evenly, with values that can.

  The message begins with the field that the user set: the divisor's field if it alone differs from
  its default, else the field of `whole`.

  Args:
    whole: the number to be split.
    divisor: the number of equal parts.
  """
  def described(count: Count) -> str:
    return f'{count} ({count.where})' if count.where else f'{count.field} = {count.number}'

  fitting = f'a divisor of {whole.number}' if whole.number > 1 else '1'
  several = f'a number of {whole.unit}s' if whole.where else f'a {whole.field}'
  if divisor.is_set and not whole.is_set:
    where = f' ({divisor.where})' if divisor.where else ''
    return (f'{divisor.field}: {divisor}{where} cannot share {described(whole)} evenly; take '
            f'{fitting}, or {several} that is a multiple of {divisor.number}')
  return (f'{whole.field}: {whole} cannot be split evenly by {described(divisor)}; take a multiple '
          f'of {divisor.number}, or {fitting} for the {divisor.unit}s')


def option(default: Any, help: str, **limits: Any) -> Any:
  """Returns a dataclass field that is an option.

  Args:
    default: a bool, int, float, str or tuple; its type is the option's type.
    help: meaning of the option, one line.
    **limits: fields of `Meaning`. For a tuple they limit each of its numbers.
  """
  return dataclasses.field(default=default, metadata={_KEY: Meaning(help, **limits)})


def internal(default: Any) -> Any:
  """Returns a dataclass field that is not an option; only code sets it."""
  return dataclasses.field(default=default, metadata={_KEY: None})


def meanings(part: type) -> dict[str, Meaning]:
  """Returns the options of a part by name.

  A field that was not made by `option` is an option without limits if its default is a bool, a
  number, a string or a tuple.

  Args:
    part: a dataclass or a flax module class.

  Raises:
    ValueError: a field has no default, or the class is not a dataclass.
  """
  # An undecorated class still has the `Field` objects as attributes.
  for name, value in vars(part).items():
    if isinstance(value, dataclasses.Field):
      raise ValueError(f'{part.__name__}.{name} is no option yet: the class needs '
                       '@dataclasses.dataclass(frozen=True)')
  by_name = {}
  for field in dataclasses.fields(part):
    meaning = field.metadata.get(_KEY, Meaning())
    if field.name in _FLAX_FIELDS or not field.init or meaning is None:
      continue
    if field.default is dataclasses.MISSING:
      if field.default_factory is dataclasses.MISSING:
        raise ValueError(f'{part.__name__}.{field.name} has no default; every option needs one')
      continue
    if isinstance(field.default, _KINDS):
      by_name[field.name] = meaning
  return by_name


def defaults(part: type) -> dict[str, Any]:
  """Returns the default of each option of a part."""
  by_name = {field.name: field.default for field in dataclasses.fields(part)}
  return {name: by_name[name] for name in meanings(part)}


def earlier(part: type) -> dict[str, Any]:
  """Returns the value of each option of a part in configs of versions that did not have it yet."""
  default = defaults(part)
  return {name: default[name] if meaning.earlier is None else meaning.earlier
          for name, meaning in meanings(part).items()}


def check_names(prefix: str, given: Mapping[str, Any], known: Mapping[str, Any] | list[str],
                owner: str = '') -> Iterator[str]:
  """Yields one error message for each field that is unknown or missing.

  Args:
    prefix: beginning of the fields' names, with its dot, such as 'placement.'.
    given: fields that a config has.
    known: fields that the config should have.
    owner: the part that the fields belong to, for the message; if empty, the message suggests a
      similar name.

  Yields:
    Lines of text.
  """
  # Sorted, so that the same config always gives the same first message.
  for name in sorted(set(given) ^ set(known)):
    if owner:
      has = 'does not have it' if name in given else 'needs it'
      yield f'{prefix}{name}: {owner} {has}; its fields are {", ".join(known)}'
      continue
    yield (f'{prefix}{name}: there is no such field{hint(name, known, prefix)}'
           if name in given else f'{prefix}{name}: is missing')


def check_values(prefix: str, given: Mapping[str, Any], part: type, may_change: bool = False
                 ) -> Iterator[str]:
  """Yields one error message for each option with a wrong type or a value outside its limits.

  Args:
    prefix: beginning of the fields' names, with its dot, such as 'placement.'.
    given: values by name; options without a value are skipped.
    part: a dataclass or a flax module class.
    may_change: texts of schedules are right for float options.

  Yields:
    Lines of text.
  """
  default = defaults(part)
  for name, meaning in meanings(part).items():
    if name not in given:
      continue
    value = given[name]
    is_float = isinstance(default[name], float)
    if may_change and is_float and not meaning.constant and isinstance(value, str):
      problem = _problem_of_schedule(value, meaning)
    else:
      problem = _problem(value, default[name], meaning)
      problem = problem and (meaning.message or problem)
      if schedules.is_schedule(value) and isinstance(default[name], int | float):
        problem += ('; it cannot change during a run' if meaning.constant else
                    '; only fractional numbers of loss and optimizer may change during a run')
    if value is None:
      yield f'{prefix}{name}: has no value yet; set it, for example by --config.{prefix}{name}='
    elif problem:
      yield f'{prefix}{name}: {problem}, got {shown(value)}'


def line_of_flag(error: Exception) -> str:
  """Returns absl's error about a flag on one line, in words for people."""
  text = shorten(str(error), 600).removeprefix('flag ')
  for pattern, words in ((r"invalid literal for int\(\) with base 10: (.*)", 'a whole number'),
                         (r"could not convert string to float: (.*)", 'a number'),
                         (r"\('Non-boolean argument to boolean flag', (.*)\)", 'true or false')):
    text = re.sub(pattern, rf'must be {words}, got \1', text)
  return text


def refuse_empty(values: Any) -> None:
  """Refuses flags that were given without a value, such as one of a variable that is not set.

  Args:
    values: absl's flags.

  Raises:
    ValueError: naming the flag.
  """
  for name in values:
    is_empty = values[name].present and values[name].value in ('', [])
    if is_empty and not name.startswith('config') and name not in _MAY_BE_EMPTY:
      raise ValueError(f'--{name}: has no value')


def literal(text: str) -> Any:
  """Returns the Python literal that a text is, or the text."""
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return text  # the last two: nested too deeply


def make(part: type, given: Mapping[str, Any]) -> Any:
  """Builds a part from its options.

  Args:
    part: a dataclass or a flax module class.
    given: values of all its options. Lists become tuples; values of float options become floats, or
      schedules if they are texts.

  Returns:
    An instance of `part`.
  """
  default = defaults(part)
  return part(**{name: _as(type(default[name]), given[name]) for name in default})


def _as(kind: type, value: Any) -> Any:
  if kind is tuple and isinstance(value, list):
    return tuple(value)
  if kind is float:
    return schedules.parse(value) if isinstance(value, str) else float(value)
  return value


_MUST_BE = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'a text',
            tuple: 'a tuple'}


def must_be(kind: type) -> str:
  """Returns what an option of a type must be, for error messages."""
  return f'must be {_MUST_BE.get(kind, f"of type {kind.__name__}")}'


def _problem(value: Any, default: Any, meaning: Meaning) -> str:
  """Returns the error message for a value, or an empty string if the value is right."""
  # A bool is an int in Python, so bools are checked first.
  if isinstance(default, bool):
    return '' if isinstance(value, bool) else must_be(bool)
  if isinstance(default, str):
    return _problem_of_text(value, meaning)
  if isinstance(default, tuple):
    return _problem_of_tuple(value, default, meaning)
  if isinstance(default, int):
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return _problem_of_int(value, meaning) if whole else must_be(int)
  if isinstance(value, numbers.Real) and not isinstance(value, bool):
    return _problem_of_float(value, meaning)
  return must_be(float)


def _problem_of_schedule(text: str, meaning: Meaning) -> str:
  try:
    numbers = schedules.parse(text).values
  except ValueError as error:
    return str(error)
  problems = ((number, _problem_of_float(number, meaning)) for number in numbers)
  return next((f'its number {number:g} {meaning.message or problem}'
               for number, problem in problems if problem), '')


def _problem_of_text(value: Any, meaning: Meaning) -> str:
  if not isinstance(value, str):
    return must_be(str)
  if meaning.choices and value not in meaning.choices:
    *most, last = meaning.choices
    return f'must be {", ".join(most)} or {last}'
  return ''


def _problem_of_tuple(value: Any, default: tuple, meaning: Meaning) -> str:
  element = default[0] if default else meaning.element
  if isinstance(element, bool) or not isinstance(element, int):
    # The elements have the type of the default's elements.
    if not isinstance(value, tuple | list):
      return 'must be a tuple'
    if len(value) > meaning.max_length:
      return f'must have at most {meaning.max_length} elements'
    problems = (_problem(x, element, meaning) for x in value)
    return next((f'its elements {problem}' for problem in problems if problem), '')
  numbers = value if isinstance(value, tuple | list) else (None,)
  if len(numbers) > meaning.max_length:
    return f'must have at most {meaning.max_length} numbers'
  # A violated lower limit is a part of the type's message; the upper limit has its own below.
  whole = all(isinstance(x, int) and not isinstance(x, bool) for x in numbers)
  if not whole or any(_problem_of_int(x, meaning._replace(at_most=None)) for x in numbers):
    return 'must be positive whole numbers' if meaning.at_least == 1 else 'must be whole numbers'
  too_large = next(filter(None, (_problem_of_int(x, meaning) for x in numbers)), '')
  if too_large:
    return f'each number {too_large}'
  return 'must not be empty' if meaning.not_empty and not len(numbers) else ''


def _problem_of_int(value: int, meaning: Meaning) -> str:
  low = meaning.at_least
  high = meaning.at_most
  if low is not None and value < low:
    return f'must be at least {low}' if low else 'must not be negative'
  if high is not None and value > high:
    return 'must be below 2^31' if high == INT32_MAX else f'must be at most {high:,}'
  # A user's own part may state no limit; the value must still fit 64 bits.
  return '' if -2**63 <= value < 2**63 else 'must be from -2^63 to 2^63 - 1'


def _problem_of_float(value: Any, meaning: Meaning) -> str:
  try:
    value = float(value)
  except OverflowError:
    # An int of more than 1,024 bits is too large for a float.
    value = math.inf if value > 0 else -math.inf
  low = -math.inf if meaning.at_least is None else meaning.at_least
  high = math.inf if meaning.at_most is None else meaning.at_most
  if meaning.at_least is None and meaning.above is not None:
    low = meaning.above
    if not value > low:
      return f'must be above {low}'
  if not (math.isfinite(value) and low <= value <= high):
    if math.isfinite(low) and math.isfinite(high):
      return f'must be between {low:g} and {high:g}'
    bound = (f'at least {low:g}' if math.isfinite(low) else
             f'at most {high:g}' if math.isfinite(high) else '')
    return 'must be ' + ' and '.join(filter(None, (
        '' if math.isfinite(value) else 'finite', bound)))
  # Programs compute in 32 bits, in which 1e39 is infinite and 0.99999999 equals 1.
  if abs(value) > LARGEST_FLOAT:
    side = 'most' if value > 0 else 'least'
    return f'must be at {side} {math.copysign(LARGEST_FLOAT, value):.1e}'
  if meaning.above is not None and not np.float32(value) > meaning.above:
    return f'must be above {meaning.above}'
  if meaning.below is not None and not np.float32(value) < meaning.below:
    return f'must be below {meaning.below}'
  return ''
