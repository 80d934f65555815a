"""Reads workdirs, and folders of workdirs, into plain data; imports no JAX.

A workdir may be unfinished, failed or damaged, and may come from a stranger. All that can be read
of it is taken, and what is wrong is noted in words.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podracer_jit.options import flat, from_json, shorten
from podracer_jit.workdir import files, journal, lock

CONFIG = 'config.json'  # as `workdir.record`, which imports JAX, names it
SWEEP = 'sweep.json'
EVALUATIONS = 'evaluations.jsonl'  # of training
COMMANDS = 'evaluate.jsonl'  # of `podracer_jit evaluate`
VIDEOS = ('video.mp4', 'video.gif')
# Fields in which runs of one group may differ: where and how often things happen, not what.
# `microbatch_rows`, which the platform and the task decide, changes only how gradients are rounded.
FREE = ('placement.', 'log.', 'eval.', 'checkpoint.', 'microbatch_rows')
DELAY = 'placement.learner_delay_s'  # of these, the one that is set to see what it changes
SEED = 'seed'
TASK = 'env.task'
TOTAL = 'total_steps'
_MOST_LINES = 1000  # of metrics.jsonl that are read, at equal distances
_DEPTH = 4  # folders below one that is given
_LINE = {'update': int, 'steps': int}
_EVAL_WAIT = re.compile(rb'"eval_wait_s": ([0-9.e+-]*[0-9])')


class Run(NamedTuple):
  """A run, as far as its workdir tells of it."""

  name: str  # the path as the report shows it
  path: Path
  config: Mapping[str, Any]  # fields with dots
  metrics: Mapping[str, np.ndarray]  # of updates, in order; NaN where a line lacks the number
  evaluations: Sequence[Mapping[str, Any]]  # while it trained, in order
  commands: Sequence[Mapping[str, Any]]  # evaluations by `podracer_jit evaluate`, in order
  receipts: journal.Receipts  # the first receipt, and the headers before it
  versions: Mapping[str, Any]
  starts: Sequence[Mapping[str, Any]]  # the commands that have trained it
  stages: int  # configs that it was made with, one after the other
  running: bool
  error: str  # that the sweep noted; '' if none
  notes: Sequence[str]  # what is wrong with its files
  pruned: bool = False  # a search has given it up
  eval_wait_s: float = 0.0  # that training has waited for evaluations, in all

  @property
  def task(self) -> str:
    """Name of the task."""
    return str(self.config.get(TASK, 'unknown task'))

  @property
  def seed(self) -> Any:
    """The seed of the config."""
    return self.config.get(SEED)

  @property
  def algorithm(self) -> str:
    """Name of the algorithm."""
    return str(self.config.get('loss.name', ''))

  @property
  def steps(self) -> int:
    """Agent steps so far."""
    steps = self.metrics.get('steps')
    return int(steps[-1]) if steps is not None and len(steps) else 0

  @property
  def total(self) -> int | None:
    """Agent steps that the config asks for."""
    total = self.config.get(TOTAL)
    return total if isinstance(total, int) else None

  def column(self, name: str) -> np.ndarray:
    """Returns a metric of all updates; NaN where it is absent."""
    column = self.metrics.get(name)
    if column is not None:
      return column
    return np.full(len(self.metrics.get('steps', ())), np.nan)

  @property
  def state(self) -> str:
    """A word for what has become of the run."""
    if self.running:
      return 'running'
    if self.steps and self.total is not None and self.steps >= self.total:
      return 'finished'  # whatever a sweep noted of it before
    if self.error:
      return 'failed'
    if self.pruned:
      return 'pruned'
    return 'stopped' if self.steps else 'not begun'

  @property
  def shares_a_program(self) -> bool:
    """Whether the runs beside it in its folder were trained by the same program."""
    headers = self.receipts.headers
    return bool(headers) and 'num_seeds' in headers[-1]

  @property
  def wall(self) -> np.ndarray:
    """Seconds of the commands that trained it; of old runs, of training alone."""
    wall = self.column('wall_s')
    return np.where(np.isfinite(wall), wall, self.column('elapsed_s'))


def read(paths: Sequence[Path]) -> list[Run]:
  """Returns all runs in workdirs, sweeps and folders that contain such.

  Raises:
    ValueError: a path is no folder, or has no run in it.
  """
  errors: dict[Path, str] = {}
  pruned: set[Path] = set()
  unbegun: dict[Path, tuple[Path, Mapping[str, Any]]] = {}
  # By the place on the disk, since one folder may be given in several ways.
  folders: dict[Path, Path] = {}
  for path in paths:
    if not path.is_dir():
      raise ValueError(f'{path}: is no folder' if path.exists() else f'{path}: does not exist')
    inside = [*_workdirs(path)]
    has_members = False
    for folder in _sweeps(path):
      for member, entry in _members(folder):
        has_members = True
        place = member.resolve()
        if entry.get('error'):
          errors[place] = shorten(str(entry['error']), 300)
        if entry.get('pruned') is True:
          pruned.add(place)
        if not any(workdir == member or member in workdir.parents for workdir in inside):
          unbegun.setdefault(place, (member, entry))
    if not inside and not has_members:
      raise ValueError(f'{path}: there is no run in it (no {CONFIG})')
    for folder in inside:
      folders.setdefault(folder.resolve(), folder)
  unbegun = {place: unbegun[place] for place in unbegun if place not in folders}
  names = _names([*folders.values(), *(folder for folder, _ in unbegun.values())])
  runs = [_read(folder, names[folder], _error_of(place, errors))._replace(pruned=place in pruned)
          for place, folder in folders.items()]
  return runs + [_unbegun(folder, names[folder], entry, errors.get(place, ''))
                 for place, (folder, entry) in unbegun.items()]


def _is_workdir(path: Path) -> bool:
  return any((path / name).is_file() for name in (CONFIG, journal.METRICS, journal.RECEIPTS))


def _workdirs(path: Path, depth: int = _DEPTH) -> Iterator[Path]:
  """Yields the workdirs at a path and below it; those inside of a workdir do not count."""
  if _is_workdir(path):
    yield path
  elif depth:
    for folder in _folders(path):
      yield from _workdirs(folder, depth - 1)


def _folders(path: Path) -> list[Path]:
  """Returns the folders in a folder, in natural order: seed2 before seed10."""
  def key(folder: Path) -> list[tuple[int, Any]]:
    digits = ''.join(x if x.isdigit() else f' {x} ' for x in folder.name).split()
    return [(0, int(x)) if x.isdigit() and x.isascii() else (1, x) for x in digits]
  try:
    return sorted((x for x in path.iterdir() if x.is_dir() and not x.name.startswith('.')),
                  key=key)
  except OSError:
    return []


def _sweeps(path: Path, depth: int = _DEPTH) -> Iterator[Path]:
  if (path / SWEEP).is_file():
    yield path
  elif depth and not _is_workdir(path):
    for folder in _folders(path):
      yield from _sweeps(folder, depth - 1)


def _members(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
  """Yields the folder and the entry of each member of a sweep; none of a garbled file."""
  try:
    members = files.read_json(folder / SWEEP)['members']
    for member in members:
      name = str(member['name'])
      if (folder / name).parent == folder:
        yield folder / name, member
  except (OSError, ValueError, KeyError, TypeError):
    return


def commands_of_sweeps(paths: Sequence[Path]) -> list[list[str]]:
  """Returns the commands of all sweeps in folders, in order; none of a garbled file."""
  commands: list[list[str]] = []
  for path in paths:
    for folder in _sweeps(path):
      try:
        commands += [[*map(str, command)] for command in
                     files.read_json(folder / SWEEP).get('commands', ())]
      except (OSError, ValueError, AttributeError, TypeError):
        continue
  return commands


def _error_of(place: Path, errors: Mapping[Path, str]) -> str:
  """Returns the error of a workdir's member, which may have several workdirs."""
  return next((errors[path] for path in (place, place.parent) if path in errors), '')


def _names(folders: Sequence[Path]) -> dict[Path, str]:
  """Returns a short name for each folder: its path without what all have in common."""
  if not folders:
    return {}
  parts = [folder.absolute().parts for folder in folders]
  common = 0
  while len(folders) > 1 and len({x[:common + 1] for x in parts}) == 1:
    common += 1
  common = min(common, min(map(len, parts)) - 1)
  if len(folders) == 1:
    common = len(parts[0]) - 1
  short = [shorten('/'.join(x[common:]), 120) for x in parts]
  return dict(zip(folders, distinct(short), strict=True))


def distinct(names: Sequence[str]) -> list[str]:
  """Returns names of which no two are equal: the second of a name gets (2), and so on."""
  counts: dict[str, int] = {}
  unique = []
  for name in names:
    counts[name] = counts.get(name, 0) + 1
    unique.append(f'{name} ({counts[name]})' if counts[name] > 1 else name)
  return unique


def _read(path: Path, name: str, error: str) -> Run:
  notes: list[str] = []
  content = _config(path, notes)
  starts = [start for start in content.get('starts', ()) if isinstance(start, dict)]
  history = content.get('history')
  stages = history.get('stages') if isinstance(history, dict) else None
  return Run(
      name=name, path=path, config=flat(_completed(from_json(content['config']), content)),
      metrics=_metrics(path, notes), evaluations=_lines(path / EVALUATIONS),
      commands=[line for line in _lines(path / COMMANDS)
                if isinstance(line.get('statistics'), dict)],
      receipts=_receipts(path, notes), versions=content['versions'], starts=starts,
      stages=len(stages) if isinstance(stages, list) and stages else 1,
      running=lock.is_held(path), error=error, notes=notes, eval_wait_s=_eval_wait_s(path))


def _completed(config: Mapping[str, Any], content: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns a config of an earlier version with the options that were added since.

  Else runs of two versions would be of two groups. Configs with parts of a user's own stay as they
  are, since nothing of theirs is imported.
  """
  if content['versions'].get('podracer_jit') in (None, importlib.metadata.version('podracer_jit')):
    return config
  from podracer_jit.experiment import modules, schema  # they import JAX
  try:
    return config if modules.named(config) else schema.complete(config)
  except (ValueError, KeyError, TypeError, AttributeError):  # garbled, or of a later version
    return config


def _unbegun(path: Path, name: str, entry: Mapping[str, Any], error: str) -> Run:
  fields = entry.get('fields')
  command = entry.get('command')
  starts = [{'command': [*map(str, command)]}] if isinstance(command, list) else []
  return Run(name, path, dict(fields) if isinstance(fields, dict) else {}, {}, [], [],
             journal.Receipts([], {}, []), {}, starts, 1, False, error, [])


def _config(path: Path, notes: list[str]) -> dict[str, Any]:
  """Returns the contents of config.json with a config and versions that are dicts."""
  try:
    content = files.read_json(path / CONFIG)
  except (OSError, ValueError):
    content = None
  if not isinstance(content, dict) or not isinstance(content.get('config'), dict):
    notes.append(f'{CONFIG} is missing or garbled')
    content = {'config': {}}
  if not isinstance(content.get('versions'), dict):
    content['versions'] = {}
  if not isinstance(content.get('starts', ()), list | tuple):
    content['starts'] = []
  return content


def _lines(path: Path) -> list[dict[str, Any]]:
  try:
    return journal.read_lines(path, _LINE)
  except OSError:
    return []


def _metrics(path: Path, notes: list[str]) -> dict[str, np.ndarray]:
  """Returns the numbers of metrics.jsonl by name, [updates]."""
  try:
    lines = journal.sample_lines(path / journal.METRICS, _MOST_LINES, _LINE)
  except OSError:
    lines = []
  if not lines:
    notes.append('it has no metrics yet')
    return {}
  last = lines[-1]
  # A run that went on from an earlier checkpoint makes updates again; the later lines count.
  by_update = {line['update']: line for line in lines if line['update'] <= last['update']}
  lines = [by_update[update] for update in sorted(by_update)]
  if isinstance(last.get('warning'), str):
    notes.append(f'its last update warns: {shorten(last["warning"])}')
  names = dict.fromkeys(name for line in (lines[0], lines[len(lines) // 2], last) for name in line)
  columns = {name: _column([line.get(name) for line in lines]) for name in names}
  return {name: column for name, column in columns.items()
          if np.isfinite(column).any() or _is_number(last.get(name))}


def _eval_wait_s(path: Path) -> float:
  """Returns the time that training has waited for evaluations, the sum over all lines.

  Waits are so rare that a sample of the lines does not tell.
  """
  try:
    with files.open_regular(path / journal.METRICS) as file:
      return sum(float(wait) for line in file for wait in _EVAL_WAIT.findall(line))
  except OSError:
    return 0.0


def _column(values: Sequence[Any]) -> np.ndarray:
  """Returns the numbers of a field, [lines]; NaN in place of anything else."""
  if not any(isinstance(value, str | bool) for value in values[:1]):
    try:
      return np.array(values, float)  # None becomes NaN
    except (TypeError, ValueError, OverflowError):
      pass
  return np.array([_number(value) for value in values])


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
  if not _is_number(value):
    return math.nan
  try:
    return float(value)
  except OverflowError:  # a whole number of JSON may have any number of digits
    return math.inf


def _receipts(path: Path, notes: list[str]) -> journal.Receipts:
  try:
    return journal.first_receipt(path)
  except OSError:
    notes.append('it has no receipts')
    return journal.Receipts([], {}, [])


def fingerprints(run: Run) -> dict[int, tuple[str, str]]:
  """Returns the fingerprints of batch and parameters of all updates; empty if some are missing."""
  try:
    receipts = journal.read_receipts(run.path)
  except OSError:
    return {}
  if receipts.problems:
    return {}
  return {update: (receipt['batch'], receipt['params'])
          for update, receipt in receipts.by_update.items()}
