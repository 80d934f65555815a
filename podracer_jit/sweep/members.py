"""The runs of a sweep: the product of configs, tasks, seeds and values of fields."""

from __future__ import annotations

import collections
import hashlib
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podracer_jit import task_sets
from podracer_jit.options import from_json, literal, to_json

TASK = 'env.task'
SEED = 'seed'
MOST = 100_000  # seeds, or trials of a search
_SECTION = '--config.'
_MOST_LETTERS = 200  # of a name, to which file names add a few; file systems allow 255
_OPENING, _CLOSING = '([{', ')]}'
_QUOTES = '\'"'


class Member(NamedTuple):
  """A run of a sweep; its name is that of its workdir."""

  name: str
  config: str  # as for --config
  fields: Mapping[str, Any]  # the values that distinguish it, by the fields' names with dots
  flags: Sequence[str] = ()  # further flags of `train`, which all members have
  num_seeds: int | None = None  # seeds from fields['seed'] on are trained in one program

  @property
  def seeds(self) -> range:
    """The seeds that it trains."""
    seed = self.fields[SEED]
    return range(seed, seed + (self.num_seeds or 1))

  def arguments(self) -> list[str]:
    """Returns the arguments of `podracer_jit` that describe the run, without its workdir."""
    fields = [f'{_SECTION}{name}={value}' for name, value in self.fields.items()]
    together = [f'--num_seeds={self.num_seeds}'] if self.num_seeds else []
    return [f'--config={self.config}', *self.flags, *fields, *together]

  def command(self, out: Path) -> list[str]:
    """Returns the command that trains it, also alone, to the same receipts."""
    return ['podracer_jit', *self.arguments(), f'--workdir={out / self.name}']

  def workdirs(self, out: Path) -> list[Path]:
    """Returns the workdirs of its runs, one for each seed."""
    folder = out / self.name
    return [folder / f'seed{seed}' for seed in self.seeds] if self.num_seeds else [folder]

  def as_json(self) -> dict[str, Any]:
    """Returns it for sweep.json."""
    return self._asdict() | {'fields': to_json(dict(self.fields)), 'flags': list(self.flags)}

  @classmethod
  def of_json(cls, item: Mapping[str, Any]) -> Member:
    """Returns the member that `as_json` describes.

    Raises:
      KeyError, TypeError, ValueError: it describes none.
    """
    fields = from_json(item['fields'])
    num_seeds = item['num_seeds']
    if not isinstance(fields.get(SEED), int) or not isinstance(num_seeds, int | None):
      raise ValueError('a member without a seed')
    return cls(str(item['name']), str(item['config']), fields, tuple(map(str, item['flags'])),
               num_seeds)


def seeds_of(text: str) -> list[int]:
  """Returns the seeds of --seeds, such as 1:3 (1, 2 and 3) or 1,5.

  Raises:
    ValueError: they are no seeds, or there are none, or too many.
  """
  seeds: list[int] = []
  for piece in text.split(','):
    match = re.fullmatch(r'\s*(\d+)\s*(?::\s*(\d+)\s*)?', piece)
    if not match or match[2] and int(match[2]) < int(match[1]):
      raise ValueError(f'--seeds: must be numbers and ranges such as 1:3 or 1,5, got {text!r}')
    first, last = int(match[1]), int(match[2] or match[1])
    if len(seeds) + last - first >= MOST:
      raise ValueError(f'--seeds: must be at most {MOST:,} seeds, got {text!r}')
    seeds += range(first, last + 1)
  repeated = [seed for seed, count in collections.Counter(seeds).items() if count > 1]
  if repeated:
    raise ValueError(f'--seeds: names {min(repeated)} twice, in {text!r}')
  return seeds


def tasks_of(names: Sequence[str]) -> list[str]:
  """Returns the tasks of --tasks, with the tasks of a set such as @atari5 in its place.

  Raises:
    ValueError: there is no such set, or a task comes twice.
  """
  tasks: list[str] = []
  for name in names:
    if name.startswith('@') and name not in task_sets.TASKS:
      raise ValueError(f'--tasks: there is no set {name}; there are '
                       f'{", ".join(task_sets.TASKS)}')
    if not name:
      raise ValueError('--tasks: a name is empty')
    tasks += task_sets.TASKS.get(name, (name,))
  repeated = sorted({task for task in tasks if tasks.count(task) > 1})
  if repeated:
    raise ValueError(f'--tasks: names {repeated[0]} twice')
  return tasks


def values_of(flag: str) -> tuple[str, list[Any]]:
  """Returns the field of a flag --grid, and its values.

  Args:
    flag: FIELD=VALUE,VALUE,...; a value is a Python literal or else a text, such as relu.

  Raises:
    ValueError: it is not of this form, or has a value twice.
  """
  name, equals, text = flag.partition('=')
  name = name.strip().removeprefix(_SECTION).removeprefix('config.')
  if not equals or not re.fullmatch(r'[A-Za-z_][\w.]*', name):
    raise ValueError(f'--grid: must be FIELD=VALUE,VALUE such as '
                     f'optimizer.learning_rate=1e-3,3e-4, got {flag!r}')
  if name == SEED:
    raise ValueError(f'--grid: {SEED} has a flag of its own, --seeds=1:3')
  values = [literal(piece) for piece in split(text, '--grid', flag)]
  for i, value in enumerate(values):
    if value in values[:i]:
      are_numbers = all(type(each) is int for each in values)
      hint = f'; one tuple is written {name}=({text.strip()})' if are_numbers else ''
      raise ValueError(f'--grid: names {value!r} twice, in {flag!r}{hint}')
  return name, values


def split(text: str, flag: str, whole: str) -> list[str]:
  """Splits a text at its commas, but for those in brackets and quotes.

  Args:
    text: what to split.
    flag: the flag, for the message.
    whole: its value, for the message.

  Raises:
    ValueError: a bracket or a quote is not closed, or a piece is empty.
  """
  pieces = ['']
  depth = 0
  quote = ''
  for letter in text:
    if quote:
      quote = '' if letter == quote else quote
    elif letter in _QUOTES and (depth or not pieces[-1].strip()):  # inside a word it is no quote
      quote = letter
    else:
      depth += (letter in _OPENING) - (letter in _CLOSING)
    if letter == ',' and not depth and not quote:
      pieces.append('')
    else:
      pieces[-1] += letter
    if depth < 0:
      break
  if quote:
    raise ValueError(f'{flag}: a quote is not closed, in {whole!r}')
  if depth:
    raise ValueError(f'{flag}: a bracket is not closed, in {whole!r}')
  if not all(piece.strip() for piece in pieces):
    raise ValueError(f'{flag}: a value is missing, in {whole!r}')
  return [piece.strip() for piece in pieces]


def product(configs: Sequence[str], tasks: Sequence[str], seeds: Sequence[int],
            grid: Sequence[tuple[str, Sequence[Any]]], flags: Sequence[str]) -> list[Member]:
  """Returns the members of a sweep, the seeds of a task next to each other.

  Args:
    configs: one or more, as for --config.
    tasks: values of env.task; none: the configs' own.
    seeds: of each.
    grid: fields and their values, which multiply.
    flags: further flags of all members.

  Raises:
    ValueError: a config or a field is given twice, or two members have one name.
  """
  for config in configs:
    if configs.count(config) > 1:
      raise ValueError(f'--config: names {config} twice')
  names = [*([TASK] if tasks else []), *(name for name, _ in grid)]
  set_by_flags = {flag.partition('=')[0].removeprefix(_SECTION) for flag in flags}
  for i, name in enumerate(names):
    if name in names[:i]:
      raise ValueError(f'--grid: {name} is given twice')
    if name in set_by_flags:
      raise ValueError(f'{_SECTION}{name}: is given to all members, and --grid or --tasks names '
                       'its values')
  if SEED in set_by_flags:
    raise ValueError(f'{_SECTION}{SEED}: --seeds=1:3 names the seeds of a sweep')
  choices = [*([tasks] if tasks else []), *(values for _, values in grid)]
  members = []
  for config, values in itertools.product(configs, itertools.product(*choices)):
    fields = dict(zip(names, values, strict=True))
    members += [member_of(config, fields | {SEED: seed}, flags) for seed in seeds]
  check_names(members)
  return members


def check_names(members: Sequence[Member]) -> None:
  """Checks that members have different names.

  Raises:
    ValueError: two different ones have one name.
  """
  by_name: dict[str, Member] = {}
  for member in members:
    other = by_name.setdefault(member.name, member)
    if other != member:
      raise ValueError(f'two members would have one name, {member.name}: '
                       f'{shlex.join(other.arguments())} and {shlex.join(member.arguments())}; of '
                       'configs and values it has only letters, digits and . _ = + -, so change '
                       'one, or make another sweep of it')


def member_of(config: str, fields: Mapping[str, Any], flags: Sequence[str] = (),
              num_seeds: int | None = None) -> Member:
  """Returns a member, with a name that says what distinguishes it.

  A name does not depend on the other members, so that a sweep may grow.

  Args:
    config: as for --config.
    fields: with SEED.
    flags: see `Member`.
    num_seeds: see `Member`.
  """
  path, _, argument = config.partition(':')
  pieces = [Path(path).stem + (f'_{argument}' if argument else '')]
  for name, value in fields.items():
    if name == TASK:
      pieces.append(str(value))
    elif name != SEED:
      # Of network.name, the section says more.
      label = name.removesuffix('.name').rpartition('.')[2]
      text = re.sub(r'[\s()\[\]{}]+', '', str(value))
      pieces.append(f'{label}={text}')
  seed = fields[SEED]
  pieces.append(f'seeds={seed}:{seed + num_seeds - 1}' if num_seeds else f'seed={seed}')
  name = ','.join(re.sub(r'[^A-Za-z0-9._=+-]+', '_', piece).strip('_') for piece in pieces)
  if len(name) > _MOST_LETTERS:
    name = f'{name[:_MOST_LETTERS - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}'
  return Member(name, config, dict(fields), tuple(flags), num_seeds)


def together(members: Sequence[Member]) -> Member:
  """Returns the member that trains seeds, which follow each other, in one program."""
  first = members[0]
  return member_of(first.config, first.fields, first.flags, len(members))


def same_but_seeds(members: Sequence[Member]) -> list[list[Member]]:
  """Returns the members in lists, of which only the seeds differ and follow each other."""
  lists: list[list[Member]] = []
  for member in members:
    before = lists[-1][-1] if lists else None
    if before and member == member_of(
        before.config, {**before.fields, SEED: before.fields[SEED] + 1}, before.flags):
      lists[-1].append(member)
    else:
      lists.append([member])
  return lists
