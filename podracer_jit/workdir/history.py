"""The history of a run: where it began, and how its config has changed since.

config.json holds the newest config, and under `history` a list of entries in order. An entry with
`init_from` says that the run began with another run's state; its checkpoint of update 0 has that
state. An entry with `changes` gives fields of the config other values from an update on. Other runs
have no history. Training, `rerun` and `compare` learn about earlier configs from here only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from podracer_jit import options

KEY = 'history'  # in config.json
_SHOWN = 3  # arrays that a line names


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
        text += f'; {meaning}: {_listed(names)}'
    # A stranger's workdir may have names that would control a terminal.
    return text if text.isprintable() else ascii(text)


class Entry(NamedTuple):
  """A change between two updates of a run: the beginning with another run, or other fields."""

  first_update: int  # the first update that it holds for
  # By field with dots: 'was' and 'now', the values; a missing key means a field that was not set.
  changes: Mapping[str, Mapping[str, Any]] = {}
  init_from: Origin | None = None

  def as_json(self) -> dict[str, Any]:
    """Returns the entry as config.json and receipts have it."""
    record: dict[str, Any] = {'first_update': self.first_update}
    if self.changes:
      record['changes'] = {name: options.to_json(change)
                           for name, change in self.changes.items()}
    if self.init_from:
      record['init_from'] = self.init_from._asdict()
    return record

  def words(self) -> str:
    """Returns the entry as a phrase."""
    if self.init_from:
      return f'began with {self.init_from.words()}'
    changed = [f'{ascii(name)[1:-1]}: {_value(change, "was")} before, {_value(change, "now")} since'
               for name, change in sorted(self.changes.items())]
    return f'changed before update {self.first_update}: {"; ".join(changed)}'


def read(record: Mapping[str, Any]) -> list[Entry]:
  """Returns the history in a record of config.json.

  Raises:
    ValueError: it is not a history.
  """
  try:
    return [_entry(item) for item in record.get(KEY, [])]
  except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
    raise ValueError(f'its {KEY} is garbled') from None


def _entry(item: Mapping[str, Any]) -> Entry:
  changes = {str(name): {key: options.from_json(change[key])
                         for key in ('was', 'now') if key in change}
             for name, change in item.get('changes', {}).items()}
  origin = None
  if 'init_from' in item:
    began = item['init_from']
    lists = {name: tuple(map(str, began[name])) for name in ('taken', 'fresh', 'unused')}
    origin = Origin(workdir=str(began['workdir']), update=int(began['update']),
                    state_sha256=str(began['state_sha256']), **lists)
  return Entry(int(item['first_update']), changes, origin)


def origin_of(history: Sequence[Entry]) -> Origin | None:
  """Returns where the run began, None if from its seed."""
  return next((entry.init_from for entry in history if entry.init_from), None)


def change_points(history: Sequence[Entry]) -> list[int]:
  """Returns the first update of each entry that changes the config, in order."""
  return [entry.first_update for entry in history if entry.changes]


def with_changes(history: Sequence[Entry], first_update: int,
                 changes: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
  """Returns the history with fields changed from an update on.

  Changes before the same update become one entry. A change before the first update leaves no entry,
  because no update was made with the earlier config.

  Args:
    history: the history of the run.
    first_update: the next update of the run.
    changes: the changed fields, as in `Entry`.

  Raises:
    ValueError: the history has changes before later updates.
  """
  later = [number for number in change_points(history) if number > first_update]
  if later:
    raise ValueError(f'the config changes before update {later[0]}, and the checkpoint before it '
                     'was lost; first let the run go on to that update, without --extend and '
                     '--change')
  if first_update == 1:
    return list(history)
  # A field that was changed twice before the same update keeps its first old value.
  merged = {name: dict(change) for name, change in changes.items()}
  entries = list(history)
  if entries and entries[-1].changes and entries[-1].first_update == first_update:
    for name, earlier in entries.pop().changes.items():
      change = merged.setdefault(name, dict(earlier))
      change.pop('was', None)
      change |= {key: earlier[key] for key in ('was',) if key in earlier}
  # A field that was changed back is no change.
  merged = {name: change for name, change in merged.items()
            if _value(change, 'was') != _value(change, 'now')}
  return [*entries, Entry(first_update, merged)] if merged else entries


def config_at(config: Mapping[str, Any], history: Sequence[Entry], update: int) -> dict[str, Any]:
  """Returns the config with which an update was made.

  Args:
    config: the newest config, plain values.
    history: the history of the run.
    update: from 1.

  Raises:
    ValueError: the history does not fit the config.
  """
  config = copy.deepcopy(dict(config))
  # Later changes are undone first.
  for entry in reversed(history):
    if entry.first_update > update:
      _set(config, entry.changes, 'was')
  return config


def newest_config(config: Mapping[str, Any], history: Sequence[Entry], update: int
                  ) -> dict[str, Any]:
  """Returns the newest config, the inverse of `config_at`.

  Args:
    config: the config with which an update was made, plain values.
    history: the history of the run.
    update: from 1.
  """
  config = copy.deepcopy(dict(config))
  for entry in history:
    if entry.first_update > update:
      _set(config, entry.changes, 'now')
  return config


def _set(config: dict[str, Any], changes: Mapping[str, Mapping[str, Any]], key: str) -> None:
  """Gives the changed fields of a config their values from before ('was') or since ('now')."""
  for name, change in changes.items():
    *path, last = name.split('.')
    section = config
    for part in path:
      section = section.setdefault(part, {})
      if not isinstance(section, dict):
        raise ValueError(f'its {KEY} is garbled: {options.shorten(name)} is no field')
    if key in change:
      section[last] = change[key]
    else:
      section.pop(last, None)


def differences(a: Sequence[Entry], b: Sequence[Entry]) -> list[str]:
  """Returns a line for each entry that only one of two runs has.

  The path of the run that a run began from does not count; the first state does.
  """
  keys_a = [_identity(entry) for entry in a]
  keys_b = [_identity(entry) for entry in b]
  lines = [f'history: A {entry.words()}' for entry, key in zip(a, keys_a, strict=True)
           if key not in keys_b]
  lines += [f'history: B {entry.words()}' for entry, key in zip(b, keys_b, strict=True)
            if key not in keys_a]
  began = [origin_of(a), origin_of(b)]
  if any(began) and not all(began):
    lines.append(f'history: {"B" if began[0] else "A"} began with its seed')
  return lines


def _identity(entry: Entry) -> tuple[Any, ...]:
  """Returns a value that is equal for entries of the same meaning."""
  origin = entry.init_from and (entry.init_from.taken, entry.init_from.state_sha256)
  return entry.first_update, entry.changes, origin


def _value(change: Mapping[str, Any], key: str) -> str:
  return repr(change[key]) if key in change else 'not set'


def _listed(names: Sequence[str]) -> str:
  more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
  return ', '.join(names[:_SHOWN]) + more
