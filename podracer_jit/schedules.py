"""Schedules: numbers that change during a run, and their notation.

  linear:0.1:0                from 0.1 to 0 over all of total_steps
  linear:1:0.05:0.1           over the first tenth of total_steps, then 0.05
  cosine:1:0.05:100000steps   over 100,000 steps, then 0.05
  piecewise:0.1:0.5=0.05      0.1, and 0.05 from half of total_steps on
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

# Workers of environments import options, and so this module, without JAX.
if TYPE_CHECKING:
  import jax

KINDS = ('linear', 'cosine', 'piecewise')
EXAMPLE = 'linear:0.1:0'
_PIECEWISE = 'piecewise:0.1:0.5=0.05:0.8=0.01'
_STEPS = 'steps'
_MOST_STEPS = 2**53  # a float has all whole numbers up to it


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A number that changes during a run; `str` gives its notation.

  A linear or cosine schedule goes from its first value to its second one over its length, and then
  stays. A piecewise one has its first value, and each further value from a length on.
  """

  kind: str
  values: tuple[float, ...]
  lengths: tuple[float, ...]  # shares of total_steps, or steps
  in_steps: bool = False

  def at(self, steps: jax.Array, total_steps: int) -> jax.Array:
    """Returns the value [] f32 after `steps` [] f32 of a run of `total_steps`."""
    import jax.numpy as jnp
    import optax

    unit = 1 if self.in_steps else total_steps
    # Floats, as total_steps may need 64 bits; at least one step, so that none is zero in 32 bits.
    lengths = [max(length * unit, 1.0) for length in self.lengths]
    first, *_, last = self.values
    if self.kind == 'piecewise':
      parts = [optax.constant_schedule(value) for value in self.values]
      value = optax.join_schedules(parts, lengths)(steps)
    elif self.kind == 'cosine':
      # optax's own limit is a multiple of the first value, which may be zero.
      decay = optax.cosine_decay_schedule(1.0, 1)(steps / lengths[0])
      value = last + (first - last) * decay
    else:
      # optax limits the share before it subtracts it from 1, which XLA rounds in another way.
      remaining = jnp.maximum(0.0, 1.0 - steps / lengths[0])
      if last == 0:
        return first * remaining
      value = last + (first - last) * remaining
    # Rounding must not leave the limits of an option.
    return jnp.clip(jnp.asarray(value, jnp.float32), min(self.values), max(self.values))

  def __str__(self) -> str:
    lengths = [f'{length:.0f}{_STEPS}' if self.in_steps else _text(length)
               for length in self.lengths]
    values = [_text(value) for value in self.values]
    if self.kind == 'piecewise':
      changes = [f'{length}={value}' for length, value in zip(lengths, values[1:], strict=True)]
      return ':'.join([self.kind, values[0], *changes])
    return ':'.join([self.kind, *values, *(lengths if lengths != ['1'] else [])])


def is_schedule(value: Any) -> bool:
  """Returns whether a value of a config is a text that begins like a schedule."""
  return isinstance(value, str) and ':' in value and value.partition(':')[0] in KINDS


def parse(text: str) -> Schedule:
  """Returns the schedule of a text.

  Raises:
    ValueError: the text is none; the message says what is wrong, and what would be right, without
      the text.
  """
  kind, *parts = text.split(':')
  if kind not in KINDS or not parts:
    raise ValueError(f'must be a number, or a schedule ({", ".join(KINDS)}) such as {EXAMPLE}')
  lengths: Sequence[str]
  values: Sequence[str]
  if kind == 'piecewise':
    first, *changes = parts
    if not changes or not all('=' in change for change in changes):
      raise ValueError('piecewise needs a number, and then where each other number begins, such as '
                       f'{_PIECEWISE}')
    lengths, values = zip(*(change.split('=', 1) for change in changes), strict=True)
    values = [first, *values]
  else:
    values, lengths = parts[:2], parts[2:] or ['1']
    if len(values) < 2 or len(lengths) > 1:
      raise ValueError(f'{kind} needs the first and the last number, and at most one length, such '
                       f'as {kind}:1:0.05 or {kind}:1:0.05:0.1')
  in_steps = lengths[0].endswith(_STEPS)
  if any(length.endswith(_STEPS) != in_steps for length in lengths):
    raise ValueError('piecewise takes shares of total_steps or steps, not both, such as '
                     f'{_PIECEWISE}')
  schedule = Schedule(kind, tuple(map(_value, values)),
                      tuple(_length(length, in_steps) for length in lengths), in_steps)
  if list(schedule.lengths) != sorted(set(schedule.lengths)):
    raise ValueError(f'the changes of piecewise must be in order, such as {_PIECEWISE}')
  return schedule


def scheduled(part: Any) -> dict[str, Schedule]:
  """Returns the schedules among the fields of a dataclass, by name."""
  values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
  return {name: value for name, value in values.items() if isinstance(value, Schedule)}


def at(part: Any, steps: jax.Array, total_steps: int) -> Any:
  """Returns a dataclass with the values of its schedules; itself if it has none.

  Args:
    part: an instance of a dataclass, such as an algorithm or an optimizer.
    steps: [] f32, steps done.
    total_steps: of the run.
  """
  values = {name: schedule.at(steps, total_steps) for name, schedule in scheduled(part).items()}
  return dataclasses.replace(part, **values) if values else part


def _text(number: float) -> str:
  return repr(number).removesuffix('.0')


def _number(text: str) -> float:
  """Returns the number of a text; NaN if it is none, or is infinite."""
  try:
    number = float(text)
  except ValueError:
    return math.nan
  return number if math.isfinite(number) else math.nan


def _value(text: str) -> float:
  number = _number(text)
  if math.isnan(number):
    raise ValueError(f'{text[:20]!r} must be a number, as in {EXAMPLE}')
  return number


def _length(text: str, in_steps: bool) -> float:
  number = _number(text.removesuffix(_STEPS))
  if in_steps:
    if not (1 <= number <= _MOST_STEPS and number.is_integer()):
      raise ValueError(f'{text[:20]!r} must be a whole number of steps, such as 100000steps')
  elif not 0 < number <= 1:
    raise ValueError(f'{text[:20]!r} must be a share of total_steps, above 0 and at most 1, or '
                     'steps, such as 100000steps')
  return number
