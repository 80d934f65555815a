"""Rules for the config of a run that goes on: which fields may change, and with which flag."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from podracer_jit.options import shorten

TOTAL = 'total_steps'
# Fields that cannot change, with the reason; a name with a dot at its end stands for a section.
# Changes of other fields may still not fit the checkpoint (`inherit.problem_of_shapes`).
_FIXED = {
    'seed': 'the random numbers of the run depend on it',
    'env.task': 'a run has one task',
    'env.num_envs': 'the batch and the random numbers depend on it',
    'num_shards': 'the random numbers of the environments depend on it',
    'num_grad_shards': 'the state is split by it',
    'network.': 'the checkpoint has the parameters of the network',
    'policy': 'the checkpoint has the parameters of the network',
    'normalise.': 'the checkpoint has the statistics',
    'loss.name': 'a run has one algorithm',
    'optimizer.name': 'the checkpoint has the state of the optimizer',
}


class Allowed(NamedTuple):
  """Changes of the workdir's config that the command line allows."""

  extend: bool = False  # a larger total_steps
  fields: tuple[str, ...] = ()  # with dots

  def __bool__(self) -> bool:
    return self.extend or bool(self.fields)


NOTHING = Allowed()


def refusals(changes: Mapping[str, Mapping[str, Any]], allowed: Allowed) -> list[str]:
  """Returns a line for each changed field that is refused; empty if all changes are allowed.

  Args:
    changes: the changed fields, as in `history.Entry`.
    allowed: the fields that may differ.
  """
  return [line for name, change in sorted(changes.items())
          for line in _refusals(name, change, allowed)]


def _refusals(name: str, change: Mapping[str, Any], allowed: Allowed) -> Iterator[str]:
  shown_name = shorten(name)
  values = f'{shown_name}: {change.get("was")!r} there, {change.get("now")!r} now'
  reason = why_fixed(name)
  if name == TOTAL:
    if change['now'] < change['was']:
      yield f'{values}: it can only grow; a signal ends a run earlier'
    elif not allowed.extend:
      yield f'{values}: --extend allows it'
  elif reason:
    yield f'{values}: it cannot change, as {reason}'
  elif name not in allowed.fields:
    yield f'{values}: --change={shown_name} allows it'


def why_fixed(name: str) -> str:
  """Returns why a field cannot change in a run; '' if it can."""
  return next((reason for field, reason in _FIXED.items()
               if name == field or field.endswith('.') and name.startswith(field)), '')


def problems_of_flags(allowed: Allowed, known: Collection[str]) -> Iterator[str]:
  """Yields a line for each wrong field that --change names.

  Args:
    allowed: the changes that the command line allows.
    known: all fields of the config, with dots.
  """
  for name in allowed.fields:
    reason = why_fixed(name)
    if name == TOTAL:
      yield f'--change: {TOTAL} has a flag of its own, --extend'
    elif reason:
      yield (f'--change: {name} cannot change, as {reason}; a new run can begin from this one: '
             '--init_from')
    elif name not in known and not name.startswith('env.'):
      near = difflib.get_close_matches(name, known, n=1)
      hint = f'; did you mean {near[0]}?' if near else ''
      yield f'--change: the config has no field {name}{hint}'
