"""Groups runs that differ only in their seed and task, and compares groups at equal steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from podracer_jit import task_sets
from podracer_jit.options import shorten, shown
from podracer_jit.report import reading, statistics
from podracer_jit.report.reading import DELAY, FREE, SEED, TASK, Run

RETURN = 'episode_return'
AXES = {'steps': 'agent steps', 'frames': 'frames', 'wall': 'hours'}  # with their labels
POINTS = 60  # of a mean curve
_TOO_SHORT = 0.5  # of the steps of the longest run of a group on a task; shorter runs are left out
_NAMED = 3  # fields that the name of a group shows


class Group(NamedTuple):
  """Runs of one config but for seed, task, and where and how often things happen."""

  name: str
  runs: Sequence[Run]

  def of_task(self, task: str) -> list[Run]:
    """Returns the runs on a task."""
    return [run for run in self.runs if run.task == task]


class Curve(NamedTuple):
  """The learning curves of a group on a task."""

  seeds: Sequence[tuple[np.ndarray, np.ndarray]]  # x and return of each run
  x: np.ndarray  # [points]; up to the end of the shortest run that is compared
  mean: np.ndarray  # [points]
  low: np.ndarray  # of the bootstrap interval; NaN with a single seed
  high: np.ndarray


class Scale(NamedTuple):
  """How returns of a task become scores, and at how many steps runs are compared."""

  task: str
  steps: int  # that all compared runs have made
  zero: float  # the return that is a score of 0
  one: float  # the return that is a score of 1
  is_human: bool  # the returns of random play and of a human; else the lowest and highest of all

  def normalised(self, returns: np.ndarray) -> np.ndarray:
    """Returns the scores of returns; 0 if all returns of the task are equal."""
    span = self.one - self.zero
    return (returns - self.zero) / span if span else np.zeros_like(returns)

  def words(self) -> str:
    """Returns how the task's returns are normalised."""
    if self.is_human:
      return f'human-normalised: random play {self.zero:g} is 0, a human {self.one:g} is 1'
    return f"the runs' own range: their lowest return {self.zero:.4g} is 0, the highest " \
           f'{self.one:.4g} is 1'


class Comparison(NamedTuple):
  """All groups, and their scores at equal steps."""

  groups: Sequence[Group]
  scales: Mapping[str, Scale]  # by task
  returns: Mapping[str, Mapping[str, np.ndarray]]  # by group and task, of the compared runs
  compared: frozenset[str]  # names of these runs
  left_out: Sequence[str]  # lines about runs that are not compared, and why

  def scores(self, group: str, tasks: Sequence[str]) -> list[np.ndarray]:
    """Returns the normalised scores of a group on tasks."""
    return [self.scales[task].normalised(self.returns[group][task]) for task in tasks]

  def common_tasks(self, groups: Sequence[str] | None = None) -> list[str]:
    """Returns the tasks on which all groups, or these, have a run that is compared."""
    names = [group.name for group in self.groups] if groups is None else groups
    return [task for task in self.scales if all(task in self.returns[name] for name in names)]


def points(run: Run, axis: str, name: str = RETURN) -> tuple[np.ndarray, np.ndarray]:
  """Returns the values of a metric that are finite, and where they are on an axis.

  Args:
    run: the run.
    axis: a key of `AXES`.
    name: the metric.
  """
  x = run.wall / 3600 if axis == 'wall' else run.column(axis)
  y = run.column(name)
  good = np.isfinite(x) & np.isfinite(y)
  return x[good], y[good]


def tasks_of(runs: Sequence[Run]) -> list[str]:
  """Returns the tasks of runs, in order."""
  return sorted({run.task for run in runs}, key=lambda task: (task.lower(), task))


def grouped(runs: Sequence[Run]) -> list[Group]:
  """Returns the groups of runs, in the order of their first runs."""
  by_config: dict[str, list[Run]] = {}
  for run in runs:
    by_config.setdefault(repr(sorted(_own(run).items())), []).append(run)
  groups = [*by_config.values()]
  return [Group(name, of_group) for name, of_group in zip(_names(groups), groups, strict=True)]


def _own(run: Run) -> dict[str, Any]:
  """Returns the fields that runs of one group share, with their values as text."""
  return {name: shown(value) for name, value in run.config.items()
          if name not in (SEED, TASK) and (name == DELAY or not name.startswith(FREE))}


def differing(groups: Sequence[Sequence[Run]]) -> dict[str, list[str]]:
  """Returns the fields in which groups differ, each with the value of each group."""
  configs = [_own(runs[0]) for runs in groups]
  names = sorted(set().union(*configs))
  values = {name: [config.get(name, 'not set') for config in configs] for name in names}
  return {name: of_groups for name, of_groups in values.items() if len(set(of_groups)) > 1}


def _names(groups: Sequence[Sequence[Run]]) -> list[str]:
  """Returns a short name for each group: its algorithm, and fields that tell it from the others."""
  names = [runs[0].algorithm or 'run' for runs in groups]
  for name in set(names):
    same = [i for i, other in enumerate(names) if other == name]
    fields = differing([groups[i] for i in same])
    # First the fields that tell most groups apart, and of these the names of parts, as other fields
    # are those of a part.
    order = sorted(fields, key=lambda field: (-len(set(fields[field])),
                                              not field.endswith('.name')))
    chosen: list[str] = []
    for field in order:
      if len(set(zip(*(fields[x] for x in chosen), strict=True))) == len(same):
        break
      chosen.append(field)
    for k, i in enumerate(same):
      parts = [f'{_label(field)} {fields[field][k]}' for field in chosen[:_NAMED]]
      names[i] = shorten(', '.join([name, *parts]), 80)
  return reading.distinct(names)


def _label(field: str) -> str:
  """Returns the last word of a field's name; of a part's name, its section says more."""
  return field.removesuffix('.name').rpartition('.')[2]


def compare(runs: Sequence[Run]) -> Comparison:
  """Compares runs at equal steps: on each task, at the last step that all compared runs have.

  A run that ended before half the steps of the longest run of its group and task is left out, lest
  all others are compared where it broke off. So is a run whose return is not finite in the end.
  """
  groups = grouped([run for run in runs if run.algorithm])  # others have not begun
  copies = {name: names[0] for names, *_ in identical(runs) for name in names[1:]}
  compared: dict[tuple[str, str], list[Run]] = {}
  left_out: list[str] = []
  for group in groups:
    for task in tasks_of(group.runs):
      of_task = group.of_task(task)
      longest = max(run.steps for run in of_task)
      for run in of_task:
        reason = _why_left_out(run, longest)
        if run.name in copies and copies[run.name] in {other.name for other in of_task}:
          reason = f'it is identical to {copies[run.name]}, and would count twice'
        if reason:
          left_out.append(f'{run.name}: {reason}')
        else:
          compared.setdefault((group.name, task), []).append(run)
  scales = {}
  for task in tasks_of(runs):
    chosen = [run for (_, of), some in compared.items() if of == task for run in some]
    if chosen:
      scales[task] = _scale(task, chosen)
  returns: dict[str, dict[str, np.ndarray]] = {group.name: {} for group in groups}
  for (name, task), some in compared.items():
    returns[name][task] = np.array([value_at(run, scales[task].steps) for run in some])
  names = frozenset(run.name for some in compared.values() for run in some)
  return Comparison(groups, scales, returns, names, left_out)


def _why_left_out(run: Run, longest: int) -> str:
  if not run.steps:
    return 'it has not begun' if not run.error else f'it has failed: {run.error}'
  if not len(points(run, 'steps')[0]):
    return 'no episode of training has ended'
  returns = run.column(RETURN)
  if not np.isfinite(returns[-1]) and np.isfinite(returns).any() and (
      not np.isnan(returns[-1]) or run.column('episodes')[-1] > 0):
    return 'its return is not finite'
  if run.steps < _TOO_SHORT * longest:
    return f'it ended after {run.steps:,} of the {longest:,} steps of its group'
  return ''


def _scale(task: str, runs: Sequence[Run]) -> Scale:
  steps = min(run.steps for run in runs)
  bounds = task_sets.human_scores().get(task)
  if bounds:
    return Scale(task, steps, bounds.random, bounds.human, True)
  curves = [points(run, 'steps') for run in runs]
  curves = [y[x <= steps] if (x <= steps).any() else y[:1] for x, y in curves]
  return Scale(task, steps, float(min(map(np.min, curves))), float(max(map(np.max, curves))), False)


def value_at(run: Run, steps: int) -> float:
  """Returns the training return of a run at a number of steps, interpolated between updates."""
  return float(np.interp(steps, *points(run, 'steps')))


def curve(runs: Sequence[Run], axis: str, compared: frozenset[str], name: str = RETURN
          ) -> Curve | None:
  """Returns the curves of a group's runs on a task; None if they have no values.

  Args:
    runs: the runs.
    axis: a key of `AXES`.
    compared: names of the runs that the mean is over.
    name: the metric.
  """
  seeds = [(run, *points(run, axis, name)) for run in runs]
  seeds = [seed for seed in seeds if len(seed[1])]
  if not seeds:
    return None
  chosen = [seed for seed in seeds if seed[0].name in compared] or seeds
  begin = max(x[0] for _, x, _ in chosen)
  end = min(x[-1] for _, x, _ in chosen)
  grid = np.linspace(min(begin, end), end, POINTS if end > begin else 1)
  values = np.stack([np.interp(grid, x, y) for _, x, y in chosen])
  mean, low, high = statistics.band(values)
  if len(chosen) == 1:
    low, high = np.full_like(mean, np.nan), np.full_like(mean, np.nan)
  return Curve([(x, y) for _, x, y in seeds], grid, mean, low, high)


def aggregate_curves(comparison: Comparison, group: Group, axis: str) -> dict[str, Curve]:
  """Returns statistics of a group's normalised scores over all common tasks, along an axis.

  Args:
    comparison: the comparison that the group is of.
    group: the group.
    axis: a key of `AXES`.

  Returns:
    The curve of each of `statistics.AGGREGATES`; empty if a run has no values on this axis.
  """
  tasks = comparison.common_tasks()
  of_tasks = [[points(run, axis) for run in group.of_task(task) if run.name in comparison.compared]
              for task in tasks]
  if not of_tasks or not all(len(x) for runs in of_tasks for x, _ in runs):
    return {}
  end = min(x[-1] for runs in of_tasks for x, _ in runs)
  grid = np.linspace(0, end, POINTS // 2 + 1)[1:]
  values = [comparison.scales[task].normalised(np.stack([np.interp(grid, *run) for run in runs]))
            for task, runs in zip(tasks, of_tasks, strict=True)]  # of each task, [seeds, points]
  curves = {}
  for name, statistic in statistics.AGGREGATES.items():
    estimates = [statistics.interval(statistic, [of_task[:, i] for of_task in values],
                                     draws=statistics.DRAWS // 8) for i in range(len(grid))]
    mean, low, high = (np.array(column) for column in zip(*estimates, strict=True))
    curves[name] = Curve([], grid, mean, low, high)
  return curves


def identical(runs: Sequence[Run]) -> list[tuple[list[str], int, bool]]:
  """Returns sets of runs whose receipts are equal as far as both go.

  Returns:
    For each set: the names of its runs, the longest first, the updates that all of them have, and
    whether they have equally many.
  """
  # All receipts are read only of runs with the same first one.
  by_first: dict[tuple[str, str], list[Run]] = {}
  for run in runs:
    for receipt in run.receipts.by_update.values():
      by_first.setdefault((receipt['batch'], receipt['params']), []).append(run)
  results = []
  for candidates in by_first.values():
    sets: list[list[tuple[Run, dict[int, tuple[str, str]]]]] = []
    for run in candidates if len(candidates) > 1 else ():
      receipts = reading.fingerprints(run)
      if not receipts:
        continue
      fitting = next((some for some in sets if _equal(receipts, some[0][1])), None)
      if fitting is None:
        sets.append([(run, receipts)])
      else:
        fitting.append((run, receipts))
    for some in sets:
      some.sort(key=lambda pair: -len(pair[1]))
      lengths = {len(receipts) for _, receipts in some}
      if len(some) > 1:
        results.append(([run.name for run, _ in some], min(lengths), len(lengths) == 1))
  return results


def _equal(a: Mapping[int, Any], b: Mapping[int, Any]) -> bool:
  return all(a[update] == b[update] for update in a.keys() & b.keys())


def best(comparison: Comparison) -> Iterator[Run]:
  """Yields the runs from the best score at equal steps to the worst."""
  def score(pair: tuple[Run, float]) -> float:
    return -pair[1]
  pairs = [(run, float(comparison.scales[run.task].normalised(
      np.array(value_at(run, comparison.scales[run.task].steps)))))
      for run in itertools.chain.from_iterable(group.runs for group in comparison.groups)
      if run.name in comparison.compared]
  yield from (run for run, _ in sorted(pairs, key=score))
