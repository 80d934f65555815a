"""Searches values of fields with Optuna, which chooses them, ranks them and gives up early.

Its storage is OUT/optuna.log, so a search that was stopped goes on.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podracer_jit.options import from_json, shorten, to_json
from podracer_jit.sweep.folder import Folder
from podracer_jit.sweep.members import MOST, Member
from podracer_jit.workdir import files, journal

EVALUATIONS = 'evaluations.jsonl'
_STORAGE = 'optuna.log'
_SAMPLERS = ('tpe', 'random')
_RANGES = {'log': 'both finite and above 0', 'uniform': 'both finite', 'int': 'both whole'}
_PRUNERS = ('asha',)
_DIGITS = 3  # of values in a range, so that names and commands stay short
# Attributes of a trial: its values, the names of its members, whether it repeats a failed one, and
# whether it is to be pruned.
_FIELDS = 'fields'
_MEMBERS = 'members'
_AGAIN = 'again'
_GIVEN_UP = 'given_up'


class Range(NamedTuple):
  """Numbers between two ends."""

  kind: str  # 'log', 'uniform' or 'int'
  low: float
  high: float

  def value(self, number: float) -> float | int:
    """Returns a number of the range as a field gets it."""
    if self.kind == 'int':
      return int(number)
    return min(max(float(f'{number:.{_DIGITS}g}'), self.low), self.high)


class Settings(NamedTuple):
  """How a search goes."""

  sampler: str
  trials: int
  pruner: str | None
  seed: int
  retry: bool = False  # trials that have failed run again


class Outcome(NamedTuple):
  """A trial that has finished."""

  value: float  # mean return of the newest evaluation, over its members
  fields: Mapping[str, Any]
  is_own: bool  # it has the config's own values


def settings_of(search: str, prune: str | None, seed: int, retry: bool = False) -> Settings:
  """Returns the settings that flags ask for.

  Args:
    search: --search, such as tpe:32.
    prune: --prune.
    seed: of the sampler.
    retry: --retry.

  Raises:
    ValueError: a flag is wrong, or Optuna is not installed.
  """
  match = re.fullmatch(r'(\w+):([1-9]\d*)', search)
  if not match or match[1] not in _SAMPLERS:
    raise ValueError(f'--search: must be {" or ".join(f"{name}:N" for name in _SAMPLERS)} with a '
                     f'number of trials, such as tpe:32, got {search!r}')
  if len(match[2]) > len(str(MOST)) or int(match[2]) > MOST:
    raise ValueError(f'--search: must be at most {MOST:,} trials, got {search!r}')
  if prune not in (None, *_PRUNERS):
    raise ValueError(f'--prune: must be {" or ".join(_PRUNERS)}, got {prune!r}')
  try:
    import optuna  # noqa: F401 - asked for here, before anything begins
  except ImportError:
    raise ValueError(f'--search: Optuna is not installed: {sys.executable} -m pip install optuna'
                     ) from None
  return Settings(match[1], int(match[2]), prune, seed, retry)


def range_of(value: Any) -> Range | None:
  """Returns the range that a value of --grid stands for, such as log(1e-4,1e-2); None if none.

  Raises:
    ValueError: it has wrong ends, or is of an unknown kind.
  """
  match = re.fullmatch(r'(\w+)\((.*)\)', value) if isinstance(value, str) else None
  if not match:
    return None
  kind, ends = match.groups()
  if kind not in _RANGES:
    if _numbers(ends, float) is None:
      return None
    raise ValueError(f'--grid: {value} is no range; ranges are '
                     f'{", ".join(f"{name}(LOW,HIGH)" for name in _RANGES)}')
  low, high = _numbers(ends, int if kind == 'int' else float) or (0, 0)
  if not low < high or kind != 'int' and not math.isfinite(high - low) or (
      kind == 'log' and low <= 0):
    raise ValueError(f'--grid: {value} must have two numbers, the lower one first, '
                     f'{_RANGES[kind]}')
  return Range(kind, low, high)


def _numbers(text: str, kind: type) -> tuple[float, float] | None:
  """Returns the two numbers of a text; None if it has others."""
  try:
    low, high = map(kind, text.split(','))
  except ValueError:
    return None
  return low, high


def ranges_of(grid: Sequence[tuple[str, Sequence[Any]]]) -> dict[str, Range | Sequence[Any]]:
  """Returns the range of each field of a grid, or its values.

  Raises:
    ValueError: a range is wrong, or is one value of several.
  """
  ranges: dict[str, Range | Sequence[Any]] = {}
  for name, values in grid:
    of_values = [range_of(value) for value in values]
    if any(of_values) and len(values) > 1:
      raise ValueError(f'--grid: {name} must have one range, or a list of values without ranges')
    ranges[name] = of_values[0] or values
  return ranges


def examples(ranges: Mapping[str, Range | Sequence[Any]]) -> list[dict[str, Any]]:
  """Returns fields that together have each value, and both ends of each range."""
  values = {name: [each.value(each.low), each.value(each.high)] if isinstance(each, Range)
            else list(each) for name, each in ranges.items()}
  first = {name: each[0] for name, each in values.items()}
  return [first, *(first | {name: value} for name, each in values.items() for value in each[1:])]


def _mend(path: Path) -> None:
  """Removes what a killed sweep or a full disk left of Optuna's file: its lock, half a line.

  The sweep has a lock of its own, so nobody else has Optuna's.
  """
  files.remove(path.with_name(f'{path.name}.lock'))
  if path.is_file():
    content = path.read_bytes()
    whole = content.rfind(b'\n') + 1
    if whole < len(content):
      files.truncate(path, whole)


class Search:
  """The plan of a search; see `training.Plan`. It maximises the mean return of evaluations."""

  def __init__(self, folder: Folder, settings: Settings,
               ranges: Mapping[str, Range | Sequence[Any]],
               members_of: Callable[[Mapping[str, Any]], Sequence[Member]],
               own: Mapping[str, Any]):
    """Opens the storage, and goes on with trials that were stopped.

    Args:
      folder: of the sweep; receives the members.
      settings: how the search goes.
      ranges: of each field.
      members_of: returns the members of a trial, by its fields.
      own: the config's own values of the fields; they are the first trial if they are in the
        ranges.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    self._optuna = optuna
    self._folder = folder
    self._trials_wanted = settings.trials
    self._ranges = ranges
    self._distributions = {name: self._distribution(each) for name, each in ranges.items()}
    self._members_of = members_of
    self._own = {name: own[name] for name in ranges if name in own}
    self._study = self._opened(folder.path / _STORAGE)
    self._study.pruner = (optuna.pruners.SuccessiveHalvingPruner(min_resource=1)
                          if settings.pruner else optuna.pruners.NopPruner())
    before = self._study.trials
    self._check_unchanged(before)
    # With one seed, a search that goes on would draw the same numbers again.
    seed = settings.seed + len(before)
    self._study.sampler = (optuna.samplers.TPESampler(seed=seed, constant_liar=True)
                           if settings.sampler == 'tpe' else optuna.samplers.RandomSampler(seed))
    if not before and self._own_is_inside():
      self._study.enqueue_trial(self._parameters(self._own))
    if settings.retry:
      self._enqueue_failed(before)
    self._waiting: list[Member] = []
    self._trials: dict[int, optuna.Trial] = {}  # under way, by number
    self._left: dict[int, list[Member]] = {}  # members that have not ended, by trial
    self._reported: dict[int, int] = {}  # evaluations that Optuna knows, by trial
    self._given_up: set[int] = set()
    for trial in before:
      if trial.state is optuna.trial.TrialState.RUNNING and _FIELDS in trial.user_attrs:
        self._begin(optuna.trial.Trial(self._study, trial._trial_id),
                    from_json(trial.user_attrs[_FIELDS]))
        self._reported[trial.number] = len(trial.intermediate_values)
        if trial.user_attrs.get(_GIVEN_UP):
          self._given_up.add(trial.number)

  def next(self) -> Member | None:
    """See `training.Plan`, as for the other methods."""
    while not self._waiting and self._asked() < self._trials_wanted:
      trial = self._study.ask(self._distributions)
      fields = self._fields(trial.params)
      equal = None if _AGAIN in trial.user_attrs else next(
          (each for each in reversed(self._study.get_trials(deepcopy=False))
           if each.user_attrs.get(_FIELDS) == to_json(fields)), None)
      trial.set_user_attr(_FIELDS, to_json(fields))
      states = self._optuna.trial.TrialState
      if equal is None:
        self._begin(trial, fields)
      elif equal.state is states.COMPLETE:
        self._study.tell(trial, equal.value)
      else:
        pruned = equal.state is states.PRUNED
        self._study.tell(trial, state=states.PRUNED if pruned else states.FAIL)
    return self._waiting.pop(0) if self._waiting else None

  def is_done(self) -> bool:
    """See `training.Plan`."""
    return not self._waiting and self._asked() >= self._trials_wanted

  def ended(self, member: Member, is_finished: bool) -> None:
    """See `training.Plan`."""
    number = next(number for number, left in self._left.items() if member in left)
    self._left[number].remove(member)
    states = self._optuna.trial.TrialState
    if is_finished:
      self._tell_value(number)
    elif number in self._given_up:
      self._study.tell(self._trials[number], state=states.PRUNED)
    elif member.name in self._folder.errors:
      # The other members that run go on to their ends, which no longer count.
      skipped = [each for each in self._waiting if each in self._left[number]]
      for each in skipped:
        self._waiting.remove(each)
        self._left[number].remove(each)
      self._study.tell(self._trials[number], state=states.FAIL, skip_if_finished=True)

  def given_up(self, running: Sequence[Member]) -> Sequence[Member]:
    """See `training.Plan`."""
    members = []
    for number, trial in self._trials.items():
      names = trial.user_attrs[_MEMBERS]
      if len(names) > 1 or names[0] not in [member.name for member in running]:
        continue
      values = self._evaluations(names[0])
      for i in range(self._reported.get(number, 0), len(values)):
        trial.report(values[i], i + 1)
        self._reported[number] = i + 1
        if number not in self._given_up and trial.should_prune():
          self._given_up.add(number)
          trial.set_user_attr(_GIVEN_UP, True)  # Optuna decides once about each evaluation
      if number in self._given_up:
        members += self._left[number]
    return members

  def best(self) -> tuple[Outcome | None, Outcome | None]:
    """Returns the best trial, and the one with the config's own values; None without one."""
    states = (self._optuna.trial.TrialState.COMPLETE,)
    own = to_json(self._rounded(self._own))
    done = [Outcome(trial.value, from_json(trial.user_attrs[_FIELDS]),
                    trial.user_attrs[_FIELDS] == own)
            for trial in self._study.get_trials(deepcopy=False, states=states)]
    return (max(done, key=lambda outcome: outcome.value, default=None),
            next((outcome for outcome in done if outcome.is_own), None))

  def is_waiting(self, member: Member) -> bool:
    """Returns whether a member of a trial under way has yet to begin."""
    return member in self._waiting

  def _opened(self, path: Path) -> Any:
    """Returns the study in a file, which need not exist.

    Raises:
      ValueError: the file is garbled.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    # Optuna's lock is a link to the path, which must be found from the link's folder, too.
    path = path.absolute()
    _mend(path)
    try:
      return self._optuna.create_study(
          storage=JournalStorage(JournalFileBackend(str(path))), study_name='sweep',
          direction='maximize', load_if_exists=True)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      raise ValueError(f'--out: {path} is garbled ({shorten(str(error))}); move it away, and the '
                       'search begins anew with the members that have finished') from None

  def _check_unchanged(self, before: Sequence[Any]) -> None:
    """Checks that the earlier trials were drawn from the ranges of this command, and as many runs.

    Raises:
      ValueError: they were not.
    """
    first = next((trial for trial in before if _FIELDS in trial.user_attrs), None)
    for name in {**first.distributions, **self._distributions} if first else ():
      was, now = first.distributions.get(name), self._distributions.get(name)
      if was != now:
        raise ValueError(f'--grid: {name} was {_words(was)} when the search began, and is '
                         f'{_words(now)} now; choose another --out')
    were = first.user_attrs.get(_MEMBERS) if first else None
    now = were and [member.name for member in self._members_of(first.user_attrs[_FIELDS])]
    if now != were:  # means over other tasks or seeds cannot be compared
      raise ValueError(f'--seeds, --tasks: a trial was {shorten(", ".join(were))} when the search '
                       f'began, and would be {shorten(", ".join(now))} now; choose another --out')

  def _enqueue_failed(self, before: Sequence[Any]) -> None:
    """Lets Optuna begin trials with the values of those that have failed."""
    states = self._optuna.trial.TrialState
    fields = [trial.user_attrs.get(_FIELDS) for trial in before]
    known = [each for each, trial in zip(fields, before, strict=True)
             if trial.state is not states.FAIL]
    for i, trial in enumerate(before):
      if fields[i] is not None and fields[i] not in known + fields[:i]:
        self._study.enqueue_trial(trial.params, user_attrs={_AGAIN: True, _FIELDS: fields[i]})

  def _asked(self) -> int:
    """Returns the number of trials that have begun; those that will run again do not count."""
    waiting = self._optuna.trial.TrialState.WAITING
    trials = self._study.get_trials(deepcopy=False)
    return (sum(trial.state is not waiting for trial in trials)
            - sum(_AGAIN in trial.user_attrs for trial in trials))

  def _begin(self, trial: Any, fields: Mapping[str, Any]) -> None:
    """Lets the members of a trial wait, unless they have finished."""
    members = list(self._members_of(fields))
    trial.set_user_attr(_MEMBERS, [member.name for member in members])
    self._trials[trial.number] = trial
    self._folder.add(members, {})
    self._folder.write()
    self._left[trial.number] = [each for each in members if not self._folder.is_finished(each)]
    self._waiting += self._left[trial.number]
    self._tell_value(trial.number)

  def _tell_value(self, number: int) -> None:
    """Tells Optuna the mean return of a trial, once all its members have finished."""
    if self._left[number]:
      return
    trial = self._trials[number]
    values = [self._evaluations(each)[-1:] for each in trial.user_attrs[_MEMBERS]]
    if all(values):
      self._study.tell(trial, sum(value for value, in values) / len(values), skip_if_finished=True)
    else:
      self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL, skip_if_finished=True)

  def _distribution(self, values: Range | Sequence[Any]) -> Any:
    """Returns what Optuna calls a range."""
    distributions = self._optuna.distributions
    if not isinstance(values, Range):
      # JSON, in which Optuna stores choices, has no tuples.
      return distributions.CategoricalDistribution(sorted(map(repr, values)))
    if values.kind == 'int':
      return distributions.IntDistribution(values.low, values.high)
    return distributions.FloatDistribution(values.low, values.high, log=values.kind == 'log')

  def _fields(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a trial's parameters stand for."""
    return {name: each.value(parameters[name]) if isinstance(each, Range)
            else next(value for value in each if repr(value) == parameters[name])
            for name, each in self._ranges.items()}

  def _parameters(self, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a trial that has some fields; see `_fields`."""
    return {name: fields[name] if isinstance(each, Range)
            else next(repr(value) for value in each if value == fields[name])
            for name, each in self._ranges.items()}

  def _rounded(self, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each.value(fields[name]) if isinstance(each, Range) else fields[name]
            for name, each in self._ranges.items() if name in fields}

  def _own_is_inside(self) -> bool:
    """Returns whether the config's own values are in the ranges."""
    for name, each in self._ranges.items():
      value = self._own.get(name)
      if isinstance(each, Range):
        if not isinstance(value, int | float) or not each.low <= value <= each.high:
          return False
      elif value not in each:
        return False
    return True

  def _evaluations(self, name: str) -> list[float]:
    """Returns the mean returns of a member's evaluations so far."""
    path = self._folder.path / name / EVALUATIONS
    try:
      return [record['mean'] for record in journal.read_lines(path, {'mean': float})]
    except OSError:
      return []


def _words(distribution: Any) -> str:
  """Returns a distribution of Optuna as --grid has it."""
  if distribution is None:
    return 'not searched'
  if hasattr(distribution, 'choices'):
    return ','.join(map(str, distribution.choices))
  kind = 'log' if distribution.log else (
      'int' if isinstance(distribution.low, int) else 'uniform')
  return f'{kind}({distribution.low},{distribution.high})'
