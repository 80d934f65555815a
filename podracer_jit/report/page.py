"""Writes a report: index.html with everything in it, tables as CSV, figures as SVG."""

from __future__ import annotations

import collections
import csv
import datetime
import importlib.metadata
import io
import itertools
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from podracer_jit import metrics, task_sets
from podracer_jit.options import shorten, shown
from podracer_jit.report import comparing, figures, film, findings, reading, statistics
from podracer_jit.report.comparing import AXES, Comparison, points
from podracer_jit.report.figures import Line
from podracer_jit.report.reading import Run
from podracer_jit.report.statistics import Interval
from podracer_jit.workdir import files

INDEX = 'index.html'
FIGURES = 'figures'  # folder of the SVGs
_TABLES = ('runs.csv', 'curves.csv', 'scores.csv', 'aggregates.csv', 'final.csv')
_PICTURE = re.compile(r'(curve|aggregate|scores|speed|metric)-.*|performance-profiles(-\d+)?|'
                      r'probability-of-improvement(-\d+)?')  # names of figures
MOST_BYTES = 5_000_000  # of index.html
_LABELS = {'steps': 'Steps', 'frames': 'Frames', 'wall': 'Wall time'}
_TEMPLATE = Path(__file__).parent / 'page.html'
_MEANINGS = {'Median': 'Median over tasks of the mean over seeds.',
             'IQM': 'Mean of the middle half of all runs: robust, and steadier than the median.',
             'Mean': 'Mean over all tasks; a few high scores decide it.',
             'Optimality gap': 'How far runs stay below a score of 1. Lower is better.'}
_MOST_PAIRS = 12  # of groups, in the picture of the probability of improvement
_NORMAL = 1.96  # standard errors on either side of a mean, for an interval of 95%
# Metrics that the page of one run does not draw: axes, and what has a section of its own.
_NOT_DRAWN = ('update', 'steps', 'elapsed_s', 'wall_s', 'frames')
_PARTS = (('losses', 'Learning'), ('charts', 'Training'), ('replay', 'Replay'),
          ('time', 'Time'), ('cluster', 'Cluster'))


class Table(NamedTuple):
  """A table of the page, which is also a file."""

  columns: Sequence[Mapping[str, Any]]
  rows: Sequence[Sequence[Any]]


def _table(columns: str, rows: Sequence[Sequence[Any]]) -> Table:
  """Returns a table.

  Args:
    columns: their names, separated by `|`; `#` before a name means numbers, `~` long texts.
    rows: the cells.
  """
  parsed = [dict(name=name.strip('#~'), numeric=name[0] == '#', wrap=name[0] == '~')
            for name in columns.split('|')]
  return Table(parsed, rows)


class Report(NamedTuple):
  """A report before it is written."""

  html: str
  tables: Mapping[str, str]  # contents by name of the file
  pictures: Mapping[str, str]  # SVGs by name of the file


class _Pictures:
  """Keeps the figures of a report: for the page, and as files."""

  def __init__(self, groups: Sequence[tuple[str, int]]):
    self._groups = groups
    self.as_files: dict[str, str] = {}

  def add(self, name: str, title: str, svg: str, of_groups: Iterable[int] | None = None) -> Markup:
    """Adds a figure; returns it for the page.

    Args:
      name: of the file, without its ending.
      title: what it shows.
      svg: the picture.
      of_groups: indices of the groups that it is of; all by default.
    """
    name = re.sub(r'[^A-Za-z0-9.=_-]+', '-', name).strip('-.')[:80]
    unique = name
    for k in itertools.count(2):
      if f'{unique}.svg' not in self.as_files:
        break
      unique = f'{name}-{k}'
    groups = self._groups if of_groups is None else [self._groups[index] for index in of_groups]
    self.as_files[f'{unique}.svg'] = figures.standalone(svg, title, groups)
    # The SVG is matplotlib's, which escapes the texts in it.
    return Markup(figures.inline(svg, len(self.as_files), title))


def build(runs: Sequence[Run], sweeps: Sequence[Sequence[str]], title: str,
          command: Sequence[str]) -> Report:
  """Returns the report of runs.

  Args:
    runs: the runs, as `reading.read` returns them.
    sweeps: the commands of their sweeps, as `reading.commands_of_sweeps` returns them.
    title: of the page.
    command: the command that makes the report.
  """
  comparison = comparing.compare(runs)
  groups = [(group.name, index) for index, group in enumerate(comparison.groups)]
  pictures = _Pictures(groups)
  unusual = {run.name: findings.findings(run) for run in runs}
  content: dict[str, Any] = dict(
      version=_version(), title=title, groups=[name for name, _ in groups],
      facts=_facts(comparison, runs), notes=_notes(comparison, runs, unusual),
      curves=_curves(comparison, pictures), scores=_scores(comparison, pictures),
      final=_final(comparison), differences=_differences(comparison),
      speed=_speed(comparison, pictures), pipeline=_pipeline(runs), machines=_machines(runs),
      identical=_identical(runs), runs=_runs(comparison, runs, unusual),
      film=_film(comparison), repeat=_repeat(runs, sweeps, command))
  content['lead'] = _lead(comparison, runs)
  content['headline'] = _headline(comparison)
  if len(runs) == 1:
    content['metrics'] = _metrics(runs[0], pictures)
    content['unusual'] = unusual[runs[0].name]
  content['contents'] = [(name, words) for name, words in (
      ('summary', 'Summary'), ('curves', 'Learning curves'), ('scores', 'Scores'),
      ('final', 'Final evaluation'), ('metrics', 'Metrics'), ('agent', 'The best agent'),
      ('ran', 'What ran'), ('runs', 'All runs'), ('repeat', 'Commands'))
      if name in ('summary', 'ran', 'runs', 'repeat')
      or content.get({'agent': 'film'}.get(name, name))]
  content['footer'] = (
      f'Made by podracer_jit {_version()} on '
      f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC: {shlex.join(command)}. Intervals '
      f'are {statistics.CONFIDENCE:.0%} percentile intervals of a bootstrap over seeds, stratified '
      f'by task, with {statistics.DRAWS:,} draws (Agarwal et al. 2021, arXiv 2108.13264).')
  return Report(_small_enough(content), _csvs(comparison, runs, content), pictures.as_files)


def write(report: Report, folder: Path) -> None:
  """Writes a report into a folder, which is made if it does not exist.

  Raises:
    OSError: a file cannot be written.
  """
  files.make_folder(folder / FIGURES)
  if (folder / INDEX).exists():
    for path in _files_of_earlier(folder):
      files.remove(path)
  # Not by `files.write`, which waits until a file is on the disk: there may be hundreds.
  for name, text in report.pictures.items():
    (folder / FIGURES / name).write_text(text, encoding='utf-8')
  for name, text in report.tables.items():
    (folder / name).write_text(text, encoding='utf-8')
  files.write(folder / INDEX, report.html)


def _files_of_earlier(folder: Path) -> Iterator[Path]:
  """Yields the figures and tables of an earlier report in a folder; other files are a user's."""
  yield from (folder / name for name in _TABLES)
  yield from (path for path in (folder / FIGURES).glob('*.svg') if _PICTURE.fullmatch(path.stem))


def _version() -> str:
  """Returns the version of the package; '' if it is not installed."""
  try:
    return importlib.metadata.version('podracer_jit')
  except importlib.metadata.PackageNotFoundError:
    return ''


def _render(content: Mapping[str, Any]) -> str:
  environment = jinja2.Environment(autoescape=True, trim_blocks=False,
                                   undefined=jinja2.ChainableUndefined)
  return environment.from_string(_TEMPLATE.read_text(encoding='utf-8')).render(content)


def _small_enough(content: dict[str, Any]) -> str:
  """Returns the page; leaves out what is large until it has `MOST_BYTES` at most."""
  html = _render(content)
  axes = [axis for axis in ('wall', 'frames') if content['curves']]
  while len(html.encode()) > MOST_BYTES:
    curves = content['curves']
    if content['film'] and content['film']['video']:
      content['film'] |= dict(video=None)
    elif axes:
      axis = axes.pop(0)
      for task in curves['tasks']:
        task['figures'].pop(axis, None)
      curves['axes'] = [(name, words) for name, words in curves['axes'] if name != axis]
      curves['dropped'] = (f'The page would be too large with all figures: those of each task over '
                           f'other axes than steps are in the folder {FIGURES}/.')
    elif curves and len(curves['tasks']) > 1:
      curves['tasks'] = curves['tasks'][:len(curves['tasks']) // 2]
      curves['dropped'] = ('The page would be too large with all figures; the others are in the '
                           f'folder {FIGURES}/.')
    elif len(content['runs'].rows) > 1:
      for name in ('runs', 'pipeline'):
        content[name] = content[name]._replace(rows=content[name].rows[
            :len(content[name].rows) // 2])
      for part in content['repeat']['parts']:
        part['lines'] = part['lines'][:max(1, len(part['lines']) // 2)]
    else:
      break
    html = _render(content)
  return html


# Words.


def _count(number: int, word: str) -> str:
  return f'{number:,} {word}' if number == 1 else f'{number:,} {word}s'


def _value(value: float | None) -> str:
  """Returns a number for people; '-' if there is none."""
  if value is None or not math.isfinite(value):
    return '-'
  if value == 0:
    return '0'
  size = abs(value)
  if size >= 1e7 or size < 1e-3:
    return f'{value:.3g}'
  return f'{value:,.{0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3}f}'


def _range(interval: Interval) -> str:
  return f'{_value(interval.low)} to {_value(interval.high)}' if interval.known else '-'


def _hours(seconds: float) -> str:
  if not math.isfinite(seconds):
    return '-'
  if seconds < 120:
    return f'{seconds:.0f} s'
  return f'{seconds / 60:.0f} min' if seconds < 7200 else f'{seconds / 3600:.1f} h'


def _last(run: Run, name: str) -> float:
  values = run.column(name)
  values = values[np.isfinite(values)]
  return float(values[-1]) if len(values) else math.nan


def _facts(comparison: Comparison, runs: Sequence[Run]) -> list[tuple[str, str]]:
  finished = sum(run.state == 'finished' for run in runs)
  # Seeds that one program has trained share its time.
  walls = {run.path.parent if run.shares_a_program else run.path: _last(run, 'wall_s')
           for run in runs}
  facts = [('Runs', f'{len(runs):,}'), ('Finished', f'{finished:,} of {len(runs):,}')]
  tasks = comparing.tasks_of(runs)
  if len(runs) == 1:
    run = runs[0]
    facts = [('Task', shorten(run.task, 40)), ('State', run.state),
             ('Last mean return', _value(_last(run, comparing.RETURN))),
             ('Episodes', f'{_last(run, "episodes"):,.0f}' if 'episodes' in run.metrics else '-')]
  else:
    facts += [('Groups', f'{len(comparison.groups):,}'), ('Tasks', f'{len(tasks):,}')]
  return [*facts, ('Steps in all', figures.number(sum(run.steps for run in runs))),
          ('Time in all', _hours(float(np.nansum([*walls.values()]))))]


def _lead(comparison: Comparison, runs: Sequence[Run]) -> str:
  tasks = comparing.tasks_of(runs)
  shown_tasks = ', '.join(tasks[:3]) + (f' and {len(tasks) - 3} more' if len(tasks) > 3 else '')
  if not comparison.groups:
    return f'{_count(len(runs), "run")}; none has an update yet'
  if len(runs) == 1:
    run = runs[0]
    steps = f'{run.steps:,}' + (f' of {run.total:,}' if run.total else '')
    return f'{comparison.groups[0].name} on {run.task}, seed {run.seed}, {steps} steps'
  seeds = {len(group.of_task(task)) for group in comparison.groups for task in tasks} - {0}
  each = f'{min(seeds)}' if len(seeds) == 1 else f'{min(seeds)} to {max(seeds)}'
  word = 'seed' if seeds == {1} else 'seeds'
  return (f'{_count(len(runs), "run")} in {_count(len(comparison.groups), "group")} on '
          f'{shown_tasks}, {each} {word} each')


def _headline(comparison: Comparison) -> list[str]:
  """Returns sentences with the main result."""
  tasks = comparison.common_tasks()
  lines = []
  if len(tasks) == 1:
    task = tasks[0]
    for group in comparison.groups:
      estimate = statistics.mean_interval(comparison.returns[group.name][task])
      seeds = len(comparison.returns[group.name][task])
      interval = f' (95%: {_range(estimate)})' if estimate.known else ''
      lines.append(f'{group.name}: mean return {_value(estimate.value)}{interval} after '
                   f'{comparison.scales[task].steps:,} steps of {task} '
                   f'with {_count(seeds, "seed")}.')
  elif tasks:
    for group in comparison.groups:
      estimate = statistics.interval(statistics.interquartile_mean,
                                     comparison.scores(group.name, tasks))
      interval = f' (95%: {_range(estimate)})' if estimate.known else ''
      lines.append(f'{group.name}: IQM of normalised scores {_value(estimate.value)}{interval} '
                   f'over {len(tasks)} tasks.')
  return lines[:6]


def _notes(comparison: Comparison, runs: Sequence[Run], unusual: Mapping[str, Sequence[str]]
           ) -> list[str]:
  """Returns lines about what a reader must know before the results."""
  notes = []
  for state, words in (('failed', 'has failed'), ('not begun', 'has not begun'),
                       ('stopped', 'has stopped before its last step'), ('running', 'still runs'),
                       ('pruned', 'was pruned by the search')):
    some = [run for run in runs if run.state == state]
    if some:
      plural = {'has failed': 'have failed', 'has not begun': 'have not begun',
                'has stopped before its last step': 'have stopped before their last step',
                'still runs': 'still run',
                'was pruned by the search': 'were pruned by the search'}[words]
      named = ', '.join(
          run.name + (f' ({run.steps:,} of {run.total:,} steps)' if run.total and run.steps else '')
          for run in some[:4])
      more = f' and {len(some) - 4} more' if len(some) > 4 else ''
      errors = ''.join(f'; {run.name}: {run.error}' for run in some[:3] if run.error)
      notes.append(f'{_count(len(some), "run")} {words if len(some) == 1 else plural}: '
                   f'{named}{more}{errors}.')
  single = [f'{group.name} on {task}' for group in comparison.groups
            for task, returns in comparison.returns[group.name].items() if len(returns) == 1]
  if single and len(runs) > 1:
    shown_single = ', '.join(single[:4])
    more = f' and {len(single) - 4} more' if len(single) > 4 else ''
    notes.append(f'A single seed says little about an algorithm, and has no interval over seeds: '
                 f'{shown_single}{more}.')
  elif single:
    notes.append('One run: nothing here says how much results vary between seeds.')
  compared = [run for run in runs if run.name in comparison.compared]
  unequal = []
  for task in comparing.tasks_of(compared):
    lengths = {run.steps for run in compared if run.task == task}
    if max(lengths) > 1.05 * min(lengths):
      unequal.append(f'{task} at {comparison.scales[task].steps:,}, where the shortest ends (the '
                     f'longest has {max(lengths):,})')
  if unequal:
    more = f' and {len(unequal) - 4} more tasks' if len(unequal) > 4 else ''
    notes.append('Runs have unequal lengths, so they are compared at equal steps: '
                 f'{"; ".join(unequal[:4])}{more}.')
  if comparison.left_out:
    notes.append(f'Not compared: {"; ".join(comparison.left_out[:6])}'
                 + (f'; and {len(comparison.left_out) - 6} more'
                    if len(comparison.left_out) > 6 else '') + '.')
  missing = set(comparison.scales) - set(comparison.common_tasks())
  if missing and len(comparison.groups) > 1:
    notes.append(f'{_count(len(missing), "task")} without a run of each group: these are not in '
                 'scores over tasks.')
  for run in runs:
    notes += [f'{run.name}: {note}.' for note in run.notes]
    if len(runs) > 1:
      notes += [f'{run.name}: {line}.' for line in unusual[run.name]
                if 'finite' in line or 'explodes' in line]
  return notes


# Sections.


def _curves(comparison: Comparison, pictures: _Pictures) -> dict[str, Any] | None:
  tasks = comparing.tasks_of([run for group in comparison.groups for run in group.runs])
  size = figures.SMALL if len(tasks) > 2 else figures.LARGE
  drawn = []
  for task in tasks:
    of_axes = {}
    count = 0
    for axis, label in AXES.items():
      lines = []
      for index, group in enumerate(comparison.groups):
        curve = comparing.curve(group.of_task(task), axis, comparison.compared)
        if curve is not None:
          lines.append(Line(group.name, index, curve))
      if not lines:
        continue
      count = max(count, sum(len(line.curve.seeds) for line in lines))
      svg = figures.curves(lines, label, 'return', size)
      of_axes[axis] = pictures.add(f'curve-{task}-{axis}', f'{task}: mean return of training', svg,
                                   [line.index for line in lines])
    if of_axes:
      drawn.append(dict(name=task, figures=of_axes, words=_count(count, 'run')))
  if not drawn:
    return None
  by_statistic: dict[str, dict[str, Markup]] = {}
  common = comparison.common_tasks()
  for axis, label in AXES.items() if len(common) > 1 else ():
    by_group = [comparing.aggregate_curves(comparison, group, axis) for group in comparison.groups]
    for name in statistics.AGGREGATES if any(by_group) else ():
      lines = [Line(group.name, index, by_group[index][name])
               for index, group in enumerate(comparison.groups) if by_group[index]]
      svg = figures.curves(lines, f'{label} of each task')
      by_statistic.setdefault(name, {})[axis] = pictures.add(
          f'aggregate-{name}-{axis}', f'{name} of normalised scores over {label}', svg)
  axes = [(axis, words) for axis, words in _LABELS.items()
          if any(axis in task['figures'] for task in drawn)]
  several = any(len(group.of_task(task)) > 1 for group in comparison.groups for task in tasks)
  words = ('The mean return of the last episodes of training (log.window, 100 by default). '
           + ('Bold: the mean over seeds, up to the end of the shortest run. Shaded: its 95% '
              'bootstrap interval. Faint: each seed.' if several else 'There is one seed of each '
              'group, so there are no intervals.'))
  aggregate = [dict(name=name, figures=of_axes, words=_MEANINGS[name])
               for name, of_axes in by_statistic.items()]
  return dict(tasks=drawn, aggregate=aggregate, axes=axes, common=len(common), words=words)


def _scores(comparison: Comparison, pictures: _Pictures) -> dict[str, Any] | None:
  tasks = comparison.common_tasks()
  groups = comparison.groups
  if not tasks or len(tasks) == 1 and len(groups) == 1:
    return None
  scores = {group.name: comparison.scores(group.name, tasks) for group in groups}
  estimates = {name: {of.name: statistics.interval(statistic, scores[of.name]) for of in groups}
               for name, statistic in statistics.AGGREGATES.items()
               if len(tasks) > 1 or name == 'Mean'}  # of one task, they say the same
  panels = []
  if len(groups) <= 24:
    for name, by_group in estimates.items():
      rows = [(group.name, index, by_group[group.name]) for index, group in enumerate(groups)]
      svg = figures.intervals(rows, 'normalised score')
      panels.append(dict(name=name, words=_MEANINGS[name],
                         figure=pictures.add(f'scores-{name}', name, svg)))
  pooled = np.concatenate([x for of_tasks in scores.values() for x in of_tasks])
  high = float(np.quantile(pooled, 0.98)) if len(pooled) else 1.0
  thresholds = np.linspace(min(0.0, float(pooled.min())), max(high, 1.0), 81)
  profile = None
  if len(tasks) > 1:
    shares = [(index, statistics.profile(scores[group.name], thresholds))
              for index, group in enumerate(groups)]
    profile = pictures.add('performance-profiles', 'Performance profiles',
                           figures.profiles(thresholds, shares))
  # What all names begin with says nothing here.
  common = os.path.commonprefix([group.name for group in groups]).rfind(', ') + 1
  common = common and common + 1
  pairs = [*itertools.combinations(range(len(groups)), 2)]
  rows = []
  for a, b in pairs:
    x, y = groups[a].name, groups[b].name
    rows.append((f'{x[common:]} > {y[common:]}', a,
                 statistics.improvement(scores[x], scores[y])))
  improvement = None
  if rows:
    improvement = pictures.add('probability-of-improvement', 'Probability of improvement',
                               figures.intervals(rows[:_MOST_PAIRS], 'P(X > Y)', 0.5))
  human = sum(comparison.scales[task].is_human for task in tasks)
  how = ('All scores are human-normalised.' if human == len(tasks) else
         'Scores are normalised by the range of returns of these runs, since these tasks have no '
         'published random and human scores: a score of 1 is the highest mean return of any run on '
         'the task, and says nothing about how good that is.' if not human else
         'Human-normalised where random and human scores are published, which is for '
         f'{_count(human, "task")}; the scores of the others are normalised by the range of '
         'returns of these runs.')
  table = []
  for group in groups:
    row = [group.name, sum(map(len, scores[group.name]))]
    for name in estimates:
      estimate = estimates[name][group.name]
      row += [_value(estimate.value), _range(estimate)]
    table.append(row)
  columns = '|'.join(['Group', '#Runs', *(f'#{name}|#95%' for name in estimates)])
  scales = [[scale.task, f'{scale.steps:,}', scale.words()] for scale in comparison.scales.values()]
  return dict(
      panels=panels, profile=profile, improvement=improvement, estimates=estimates, rows=rows,
      table=_table(columns, table), scales=_table('Task|#Compared at step|~Score', scales),
      words=f'{_count(len(tasks), "task")}; training returns at equal steps of each task. {how} '
            'Bars and shades are 95% stratified bootstrap intervals.')


class _Final(NamedTuple):
  """The newest measurement of a run's return."""

  mean: float
  error: float  # standard error over episodes; NaN if it is not known
  episodes: int
  source: str


def _finals(run: Run) -> dict[str, _Final]:
  """Returns the measurements of a run by kind, the best kind first."""
  results = {}
  trained = [record for record in run.evaluations if isinstance(record.get('mean'), int | float)]
  good = [record for record in run.commands
          if isinstance(record['statistics'].get('mean'), int | float) and _is_usual(run, record)
          and (not trained or record['update'] >= trained[-1]['update'])]
  if good:
    # Of the newest checkpoint: the evaluation with the most episodes, and of these the last.
    record = max(good, key=lambda record: (record['update'], record.get('num_episodes') or 0,
                                           str(record.get('time'))))
    results['evaluate'] = _final_of(record['statistics'], record, 'podracer_jit evaluate')
  if trained:
    results['evaluation'] = _final_of(trained[-1], trained[-1], 'evaluation while training')
  if run.steps and math.isfinite(_last(run, comparing.RETURN)):
    results['training'] = _Final(_last(run, comparing.RETURN), math.nan, 0, 'training return')
  return results


def _is_usual(run: Run, record: Mapping[str, Any]) -> bool:
  """Returns whether a command evaluated the run's own task, and explored no more than it asks."""
  epsilon = record.get('epsilon') or 0.0
  return not record.get('env') and epsilon in (0.0, run.config.get('eval.epsilon'))


def _final_of(values: Mapping[str, Any], record: Mapping[str, Any], source: str) -> _Final:
  error = values.get('standard_error')
  episodes = record.get('num_episodes')
  return _Final(float(values['mean']), float(error) if isinstance(error, int | float) else math.nan,
                episodes if isinstance(episodes, int) else 0, source)


def _final(comparison: Comparison) -> dict[str, Any] | None:
  rows = []
  exact = []
  tasks = comparing.tasks_of([run for group in comparison.groups for run in group.runs])
  for task in tasks:
    for group in comparison.groups:
      of_task = group.of_task(task)
      # Those that are compared, if any are: a run that broke off, or a copy, is no further seed.
      chosen = [run for run in of_task if run.name in comparison.compared] or of_task
      runs = [(run, finals) for run in chosen if (finals := _finals(run))]
      if not runs:
        word = 'no episode has ended' if of_task else 'not run'
        rows.append([task, group.name, 0, '-', word, *['-'] * (4 if _any_human(tasks) else 3)])
        continue
      kind = next(kind for kind in ('evaluate', 'evaluation', 'training', None)
                  if kind is None or all(kind in finals for _, finals in runs))
      finals = [finals[kind or next(iter(finals))] for _, finals in runs]
      estimate = statistics.mean_interval(np.array([final.mean for final in finals]))
      over = 'seeds'
      if not estimate.known and math.isfinite(finals[0].error):
        half = _NORMAL * finals[0].error
        estimate = Interval(estimate.value, estimate.value - half, estimate.value + half)
        over = f'{finals[0].episodes} episodes'
      human = task_sets.normalised(task, estimate.value)
      sources = ', '.join(dict.fromkeys(final.source for final in finals))
      nearest = task_sets.nearest(task, runs[0][0].algorithm, max(run.steps for run, _ in runs))
      interval = _range(estimate) + (f' ({over})' if estimate.known and over != 'seeds' else '')
      lengths = sorted({run.steps for run, _ in runs})
      steps = ' to '.join(f'{length:,}' for length in dict.fromkeys((lengths[0], lengths[-1])))
      rows.append([task, group.name, len(runs), steps, _value(estimate.value), interval,
                   *([_value(human)] if _any_human(tasks) else []),
                   f'{nearest.score:,.6g} ({nearest.title})' if nearest else '-', sources])
      exact.append([task, group.name, len(runs), *estimate, over, human, sources])
  if not exact:
    return None
  published = [[task, f'{score.score:,.10g}',
                '-' if score.deviation is None else f'{score.deviation:,.6g}', score.title,
                score.protocol, score.reference]
               for task in tasks for score in task_sets.published(task)]
  human = '|#Human-normalised' if _any_human(tasks) else ''
  without = [task for task in tasks if not task_sets.published(task)]
  return dict(
      table=_table(f'Task|Group|#Seeds|#Steps|#Mean return|#95%{human}|~Nearest published|'
                   '~Source', rows),
      published=_table('Task|#Return|#Deviation|~Program|~Protocol|~Source', published)
      if published else None,
      no_published=', '.join(without), exact=exact,
      words='The newest evaluation of each run that is compared, on its task as it was trained; '
            'without one, the mean return of its last training episodes. With several seeds the '
            'interval is a bootstrap over seeds; with one, 1.96 standard errors over its '
            'episodes.')


def _any_human(tasks: Sequence[str]) -> bool:
  return any(task in task_sets.human_scores() for task in tasks)


def _metrics(run: Run, pictures: _Pictures) -> list[dict[str, Any]]:
  """Returns a figure of each metric of a run, by part of the page."""
  parts: dict[str, list[dict[str, Any]]] = {words: [] for _, words in _PARTS}
  for name in run.metrics:
    x, y = points(run, 'steps', name)
    if name in _NOT_DRAWN or not len(x):
      continue
    metric = metrics.UPDATES.get(name)
    place = metrics.shown(name).partition('/')[0]
    part = next((words for prefix, words in _PARTS if prefix == place), 'Learning')
    title = name.replace('_', ' ')
    svg = figures.values(x, y, 'agent steps')
    parts[part].append(dict(
        name=title, figure=pictures.add(f'metric-{name}', f'{title} over agent steps', svg, ()),
        unit=metric.unit if metric else '',
        meaning=_sentence(metric.meaning) if metric else "A term of the algorithm's own.",
        unusual=_sentence(metric.unusual) if metric else ''))
  return [dict(name=name, figures=drawn) for name, drawn in parts.items() if drawn]


def _sentence(text: str) -> str:
  text = text.replace('`', '')
  return f'{text[:1].upper()}{text[1:]}.' if text else ''


def _differences(comparison: Comparison) -> Table | None:
  fields = comparing.differing([group.runs for group in comparison.groups])
  if not fields:
    return None
  if len(comparison.groups) <= 5:
    return _table('|'.join(['Field', *(f'~{_cell(group.name)}' for group in comparison.groups)]),
                  [[name, *values] for name, values in fields.items()])
  # With many groups a row for each.
  return _table('|'.join(['Group', *(f'~{_cell(name)}' for name in fields)]),
                [[group.name, *(values[k] for values in fields.values())]
                 for k, group in enumerate(comparison.groups)])


def _cell(text: str) -> str:
  return text.replace('|', '/')


def _speed(comparison: Comparison, pictures: _Pictures) -> list[dict[str, Any]]:
  drawn = []
  for name, title, words in (
      ('sps', 'Steps a second', 'Over the last 10 seconds of training; the mean over all runs of a '
       'group.'),
      ('cgd', 'Delay from collection to gradient', 'In gradient steps (CGD); of a replay it is '
       'mostly the age of what is drawn.')):
    lines = []
    for index, group in enumerate(comparison.groups):
      curve = comparing.curve([run for run in group.runs if run.name in comparison.compared],
                              'steps', comparison.compared, name)
      if curve is not None:
        lines.append(Line(group.name, index, curve._replace(
            seeds=curve.seeds if len(curve.seeds) <= 12 else curve.seeds[:12])))
    if lines:
      svg = figures.curves(lines, 'agent steps')
      drawn.append(dict(name=title, words=words,
                        figure=pictures.add(f'speed-{name}', title, svg)))
  return drawn


def _pipeline(runs: Sequence[Run]) -> Table:
  rows = []
  for run in runs:
    speeds = run.column('sps')
    speeds = speeds[np.isfinite(speeds)]
    shares = findings.wait_shares(run)
    rows.append([run.name, _value(float(np.median(speeds)) if len(speeds) else None),
                 _hours(_last(run, 'wall_s')), _value(_last(run, 'cgd')),
                 _value(_last(run, 'gud')), *(f'{share:.0%}' for share in shares.values()),
                 _bytes(_disk(run.path)), _memory(run, 'memory_mb'),
                 _memory(run, 'device_memory_mb')])
  return _table('Run|#Steps/s (median)|#Wall time|#CGD|#GUD|#Actors wait|#Learner waits|'
                '#Waits for evaluations|#Disk|#Memory|#Memory of GPU or TPU', rows)


def _memory(run: Run, name: str) -> str:
  """Returns the most memory in a metric; '-' where runs of earlier versions and CPUs lack it."""
  sizes = run.column(name)
  return _bytes(1e6 * float(np.nanmax(sizes))) if np.isfinite(sizes).any() else '-'


def _disk(folder: Path) -> int:
  total = 0
  for parent, _, names in os.walk(folder):
    for name in names:
      try:
        total += os.lstat(os.path.join(parent, name)).st_size
      except OSError:
        pass
  return total


def _bytes(size: float) -> str:
  for unit, letter in ((1e9, 'GB'), (1e6, 'MB'), (1e3, 'kB')):
    if size >= unit:
      return f'{size / unit:.3g} {letter}'
  return f'{size:.0f} B'


def _machines(runs: Sequence[Run]) -> Table:
  """Returns versions, commits, hardware and placement; runs with equal ones share a row."""
  rows: dict[tuple[str, ...], list[str]] = {}
  for run in runs:
    versions = ', '.join(f'{name} {version}' for name, version in run.versions.items())
    commits = ', '.join(dict.fromkeys(str(start['commit'])[:12] for start in run.starts
                                      if start.get('commit')))
    header = run.receipts.headers[-1] if run.receipts.headers else {}
    placement = header.get('placement')
    devices = ', '.join(f'{name} {shown(value)}' for name, value in placement.items()) if (
        isinstance(placement, dict)) else '-'
    canary = str(header.get('canary', '-'))
    hardware = ', '.join(dict.fromkeys(_hardware(start['hardware']) for start in run.starts
                                       if isinstance(start.get('hardware'), dict)))
    key = tuple(shorten(text, 400) or '-'
                for text in (versions, commits, hardware, devices, canary))
    rows.setdefault(key, []).append(run.name)
  def named(names: Sequence[str]) -> str:
    if len(names) == len(runs) and len(runs) > 1:
      return f'all {len(names)} runs'
    return ', '.join(names[:4]) + (f' and {len(names) - 4} more' if len(names) > 4 else '')
  return _table('Runs|~Versions|Commit|Hardware|~Placement|Canary',
                [[named(names), *key] for key, names in rows.items()])


def _hardware(of_start: Mapping[str, Any]) -> str:
  """Returns the hardware that a command noted in words."""
  memory = of_start.get('memory')
  threads = of_start.get('threads')
  words = [str(of_start.get('processor', ''))]
  if isinstance(threads, int):
    words.append(_count(threads, 'hardware thread'))
  if isinstance(memory, int):
    words.append(f'{_bytes(memory)} of memory')
  accelerators = of_start.get('accelerators')
  kinds = collections.Counter(accelerators if isinstance(accelerators, list) else [])
  return ', '.join(words + [f'{count} {kind}' for kind, count in kinds.items()])


def _identical(runs: Sequence[Run]) -> list[str]:
  lines = []
  for names, updates, equal_length in comparing.identical(runs):
    shown_names = ', '.join(names[:6]) + (f' and {len(names) - 6} more' if len(names) > 6 else '')
    lines.append(f'{shown_names} are identical to the last bit: the batches and parameters of '
                 f'{"all" if equal_length else "the first"} {updates:,} updates have equal '
                 'fingerprints. Within a group they count as one seed.')
  without = [run.name for run in runs if not run.receipts.by_update]
  if without and len(without) < len(runs):
    lines.append(f'Not known of {_count(len(without), "run")}, whose receipts are missing: '
                 f'{", ".join(without[:4])}{" and more" if len(without) > 4 else ""}.')
  elif without:
    lines.append('Not known, since the receipts are missing.')
  elif len(runs) == 1:
    complete = len(reading.fingerprints(runs[0]))
    lines.append(f'The receipts of {complete:,} updates are complete' if complete else
                 'Receipts of this run are missing or garbled')
    lines[-1] += '; podracer_jit compare tells whether another run is identical.'
  if not lines:
    lines.append('By their receipts, no two of these runs are identical.')
  return lines


def _film(comparison: Comparison) -> dict[str, Any] | None:
  """Returns the film of the best run that has one, or how to make one; None without a run."""
  ranked = [*comparing.best(comparison)]
  if not ranked:
    return None
  for rank, run in enumerate(ranked):
    path = film.of(run)
    if path is None:
      continue
    try:
      strip = film.strip(path)
    except OSError:
      continue
    video = None
    content = path.read_bytes() if path.stat().st_size <= film.MOST_VIDEO else b''
    if content:
      kind = 'image/gif' if path.suffix == '.gif' else 'video/mp4'
      source = film.data_uri(content, kind)
      video = Markup('<img alt="An episode of {}" src="{}">' if path.suffix == '.gif' else
                     '<video controls muted loop playsinline aria-label="An episode of {}" '
                     'src="{}"></video>').format(run.name, source)
    which = ('the run with the highest score' if rank == 0 else
             'the best run that has a film; better ones have none')
    return dict(name=run.name, strip=strip, video=video,
                words=f'An episode of {run.name}, {which}: {run.task}. Frames from its start to '
                      'its end.')
  run = ranked[0]
  return dict(name=run.name, strip=None, video=None,
              words=f'The run with the highest score is {run.name}. No run has a film; this makes '
                    f'one: podracer_jit evaluate --workdir={shlex.quote(str(run.path))} '
                    '--num_episodes=1 --video=mp4')


def _runs(comparison: Comparison, runs: Sequence[Run], unusual: Mapping[str, Sequence[str]]
          ) -> Table:
  group_of = {run.name: group.name for group in comparison.groups for run in group.runs}
  rows = []
  for run in runs:
    changed = [f'{run.stages} configs one after the other'] if run.stages > 1 else []
    resumed = [f'{len(run.starts)} starts'] if len(run.starts) > 1 else []
    looks = '; '.join([*changed, *resumed, *unusual[run.name]])
    of = f' of {run.total:,}' if run.total else ''
    rows.append([run.name, group_of.get(run.name, ''), run.task, shown(run.seed), run.state,
                 f'{run.steps:,}{of}', _value(_last(run, comparing.RETURN)),
                 f'{_last(run, "episodes"):,.0f}' if 'episodes' in run.metrics else '-',
                 looks or '-', str(run.path)])
  return _table('Run|Group|Task|#Seed|State|#Steps|#Last return|#Episodes|~Worth a look|~Workdir',
                rows)


def _command(arguments: Any) -> str:
  """Returns the command of a start as one types it."""
  if not isinstance(arguments, list) or not arguments:
    return ''
  program, *rest = map(str, arguments)
  if Path(program).name in ('__main__.py', 'podracer_jit'):
    program = 'podracer_jit'
  return shorten(shlex.join([program, *rest]), 4000)


def _repeat(runs: Sequence[Run], sweeps: Sequence[Sequence[str]], command: Sequence[str]
            ) -> dict[str, Any]:
  trained = dict.fromkeys(line for run in runs for start in run.starts
                          if (line := _command(start.get('command'))))
  evaluated = dict.fromkeys(_evaluation(run, record) for run in runs for record in run.commands)
  of_sweeps = dict.fromkeys(line for words in sweeps if (line := _command([*words])))
  parts = [dict(name='Sweeps', lines=[*of_sweeps]), dict(name='Training', lines=[*trained]),
           dict(name='Evaluation', lines=[*evaluated]),
           dict(name='This report', lines=[shlex.join(command)])]
  commits = dict.fromkeys(str(start['commit']) for run in runs for start in run.starts
                          if start.get('commit'))
  where = (f' The commands of training were given at the commit {", ".join([*commits][:3])}.'
           if commits else '')
  return dict(parts=[part for part in parts if part['lines']],
              words='Each command that was given, in order. With another --workdir and the '
                    'versions above, a command of training repeats its run; with the same, it '
                    f'goes on with what is unfinished.{where}')


def _evaluation(run: Run, record: Mapping[str, Any]) -> str:
  flags = [f'--{name}={record[name]}' for name in ('num_episodes', 'num_envs', 'seed', 'max_steps')
           if isinstance(record.get(name), int)]
  flags += ['--greedy'] if record.get('greedy') is True else []
  epsilon = record.get('epsilon')
  flags += [f'--epsilon={epsilon}'] if epsilon and isinstance(epsilon, float) else []
  env = record.get('env')
  flags += [f'--env.{name}={value}' for name, value in env.items()] if isinstance(env, dict) else []
  return shorten(shlex.join(['podracer_jit', 'evaluate', f'--workdir={run.path}',
                             f'--update={record["update"]}', *flags]), 2000)


# Files.


def _csv(columns: Sequence[str], rows: Sequence[Sequence[Any]] | Iterator[Sequence[Any]]) -> str:
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(columns)
  writer.writerows(rows)
  return text.getvalue()


def _csvs(comparison: Comparison, runs: Sequence[Run], content: Mapping[str, Any]
          ) -> dict[str, str]:
  group_of = {run.name: group.name for group in comparison.groups for run in group.runs}
  tables = {
      'runs.csv': _csv(
          ['run', 'group', 'task', 'seed', 'state', 'steps', 'total_steps', 'episodes',
           'last_return', 'compared', 'workdir'],
          [[run.name, group_of.get(run.name, ''), run.task, run.seed, run.state, run.steps,
            run.total, _last(run, 'episodes'), _last(run, comparing.RETURN),
            run.name in comparison.compared, run.path] for run in runs]),
      'curves.csv': _csv(
          ['run', 'group', 'task', 'seed', 'update', 'steps', 'frames', 'wall_s', 'return'],
          _points(runs, group_of)),
      'scores.csv': _csv(
          ['group', 'task', 'steps', 'return', 'score', 'human_normalised'],
          [[group.name, task, scale.steps, float(value), float(scale.normalised(value)),
            scale.is_human]
           for group in comparison.groups
           for task, values in comparison.returns[group.name].items()
           for scale in [comparison.scales[task]] for value in values])}
  scores = content['scores']
  if scores:
    tables['aggregates.csv'] = _csv(
        ['statistic', 'group', 'value', 'low', 'high'],
        [*([name, group, *estimate] for name, by_group in scores['estimates'].items()
           for group, estimate in by_group.items()),
         *(['Probability of improvement', name, *estimate] for name, _, estimate in
           scores['rows'])])
  final = content['final']
  if final:
    tables['final.csv'] = _csv(
        ['task', 'group', 'seeds', 'mean', 'low', 'high', 'interval_over', 'human_normalised',
         'source'], final['exact'])
  return tables


def _points(runs: Sequence[Run], group_of: Mapping[str, str]) -> Iterator[list[Any]]:
  """Yields points of all curves, at most 500 of each run."""
  for run in runs:
    returns = run.column(comparing.RETURN)
    known = np.flatnonzero(np.isfinite(returns))
    every = max(1, -(-len(known) // 500))
    for k in known[::-1][::every][::-1]:
      yield [run.name, group_of.get(run.name, ''), run.task, run.seed, int(run.column('update')[k]),
             int(run.column('steps')[k]), *(round(float(run.column(name)[k]), 3) for name in (
                 'frames', 'wall_s')), round(float(returns[k]), 6)]
