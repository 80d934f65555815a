"""Makes rows of docs/results.csv from workdirs, and trains a drawn row once more.

  .venv/bin/python -m benchmarks.results rows runs/small --commit=54cb9f0
  .venv/bin/python -m benchmarks.results again [--row=sac_pendulum] [--folder=runs/again]

`rows` reads finished runs, such as those of a sweep. Runs that differ in nothing but the seed are a
row. Its returns are those of `podracer_jit evaluate`, where each run was evaluated alike; else the
mean of the last 100 training episodes. It replaces rows of the same command in the file, writes the
table of docs/results.md, and prints the rows of these runs. `published` is filled by hand; `rows`
without workdirs writes the table again.

`again` is for a release: it draws a row, trains its config with the next seed, evaluates it in the
same way, and compares the return with the interval in which 99 of 100 further seeds are expected,
if returns are normally distributed (`expected`). With --folder it goes on where it was stopped.

Exit code: 0; 1 if the return is outside of the interval, or the training has failed; 2 wrong
arguments.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from benchmarks.common import say
from podracer_jit.experiment import modules
from podracer_jit.report import reading, statistics

TABLE = Path(__file__).resolve().parents[1] / 'docs' / 'results.csv'
TRAINING = 'training'  # the protocol of rows without evaluations
CONFIDENCE = 0.99  # of `expected`
# Flags of a command that do not belong to the row.
_OWN = ('--config', '--config.seed', '--workdir', '--num_seeds', '--resume')


class Row(NamedTuple):
  """Runs that differ in their seeds alone; the columns of the file."""

  config: str
  task: str
  flags: str  # further flags of the training, by spaces
  steps: int  # that the config asks for
  protocol: str  # greedy or drawn actions and episodes of each evaluation, or TRAINING
  seeds: str  # by spaces
  returns: str  # of each seed, by spaces
  seconds: float  # that the median run took
  commit: str
  date: str  # of the last training
  processor: str
  published: str = ''  # a figure of others and its source, or why there is none

  @property
  def key(self) -> tuple[str, str, str]:
    """The command of the row: config, task and further flags. No two rows have the same."""
    return self.config, self.task, self.flags

  @property
  def values(self) -> np.ndarray:
    """The returns, [seeds]."""
    return np.array(self.returns.split(), float)

  def markdown(self) -> str:
    """Returns the row of docs/results.md."""
    values = self.values
    mean = statistics.mean_interval(values)
    interval = f' ({_short(mean.low)} to {_short(mean.high)})' if mean.known else ''
    flags = ''.join(f' `{flag}`' for flag in self.flags.split()
                    if not flag.startswith('--config.env.task='))
    cells = (f'`{self.config}`{flags}', self.task, f'{self.steps:,}', len(values),
             f'{_short(mean.value)}{interval}', _short(values.min()), _short(values.max()),
             self.protocol, f'{self.seconds:,.0f} s',
             f'{self.commit}, {self.date}, {_bare(self.processor)}', self.published)
    return f'| {" | ".join(map(str, cells))} |'


COLUMNS = ('config', 'task', 'steps', 'seeds', 'mean (95%)', 'worst', 'best', 'return of', 'a run',
           'commit, date, CPU', 'published')
HEADER = f'| {" | ".join(COLUMNS)} |\n{"|---" * len(COLUMNS)}|'


def _bare(processor: str) -> str:
  """Returns the name of a processor without what all names have."""
  return ' '.join(processor.replace('(R)', '').replace('Processor', '').split())


def _short(value: float) -> str:
  """Returns a return with four digits or without decimals."""
  digits = 3 - math.floor(math.log10(abs(value))) if value else 0
  return f'{value:,.{min(max(digits, 0), 3)}f}'


def expected(values: np.ndarray) -> tuple[float, float]:
  """Returns the interval that has a further value with probability CONFIDENCE.

  It is the prediction interval of the normal distribution (Student 1908): the mean +- t s sqrt(1 +
  1 / n).

  Args:
    values: of n >= 2 runs, [n].
  """
  count = len(values)
  half = (stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * values.std(ddof=1)
          * math.sqrt(1 + 1 / count))
  return float(values.mean() - half), float(values.mean() + half)


def rows_of(runs: Sequence[reading.Run], commit: str) -> list[Row]:
  """Returns the rows of finished runs.

  Args:
    runs: of any configs.
    commit: of the package, where the runs do not know it.

  Raises:
    ValueError: a run has not finished, or the runs of a row were evaluated in different ways.
  """
  groups: dict[tuple[str, str, str], list[reading.Run]] = {}
  for run in runs:
    if run.state != 'finished':
      raise ValueError(f'{run.path}: {run.state} after {run.steps:,} steps; rows are of finished '
                       'runs')
    config, flags = _command(run)
    groups.setdefault((config, run.task, flags), []).append(run)
  return [_row(*key, sorted(of_row, key=lambda run: run.seed), commit)
          for key, of_row in groups.items()]


def _command(run: reading.Run) -> tuple[str, str]:
  """Returns the config that a run was trained with, and the further flags."""
  flags = [str(flag) for flag in run.starts[0]['command'][1:]]
  (config,) = [flag.partition('=')[2] for flag in flags if flag.startswith('--config=')]
  return config, ' '.join(flag for flag in flags if flag.partition('=')[0] not in _OWN)


def _row(config: str, task: str, flags: str, runs: Sequence[reading.Run], commit: str) -> Row:
  """Returns the row of runs that differ in their seeds alone; see `rows_of`."""
  protocols = {_protocol(run.commands[-1]) if run.commands else TRAINING for run in runs}
  if len(protocols) > 1:
    raise ValueError(f'{runs[0].path}: runs of {config} on {task} were evaluated in different '
                     f'ways: {", ".join(sorted(protocols))}')
  ended = max((run.path / 'receipts.jsonl').stat().st_mtime for run in runs)
  hardware = runs[0].starts[0].get('hardware', {})
  commits = {str(start['commit'])[:7] for run in runs for start in run.starts
             if start.get('commit')} or {commit}
  return Row(
      config, task, flags, int(runs[0].total), *protocols,
      ' '.join(str(run.seed) for run in runs), ' '.join(f'{_return(run):.6g}' for run in runs),
      round(float(np.median([run.wall[-1] for run in runs])), 1), ' '.join(sorted(commits)),
      str(datetime.datetime.fromtimestamp(ended, datetime.UTC).date()),
      str(hardware.get('processor', '')))


def _protocol(evaluation: Mapping[str, Any]) -> str:
  """Returns how an evaluation was made."""
  actions = 'greedy' if evaluation['greedy'] else 'drawn'
  return f'{actions}, {evaluation["num_episodes"]} episodes'


def _return(run: reading.Run) -> float:
  """Returns the mean return of a run's newest evaluation, or else of its last episodes."""
  if run.commands:
    return float(run.commands[-1]['statistics']['mean'])
  returns = run.column('episode_return')
  return float(returns[np.isfinite(returns)][-1])


def read(table: Path) -> list[Row]:
  """Returns the rows of a file, none if there is no file."""
  if not table.exists():
    return []
  with table.open(newline='') as lines:
    return [Row(**fields)._replace(steps=int(fields['steps']), seconds=float(fields['seconds']))
            for fields in csv.DictReader(lines)]


def write(table: Path, rows: Sequence[Row]) -> None:
  """Writes rows to a file, and to the table of the page beside it, if there is a page.

  Raises:
    ValueError: the page has no such table.
  """
  with table.open('w', newline='') as lines:
    writer = csv.writer(lines, lineterminator='\n')
    writer.writerow(Row._fields)
    writer.writerows(rows)
  page = table.with_suffix('.md')
  if page.exists():
    before, header, after = page.read_text().partition(HEADER)
    if not header:
      raise ValueError(f'{page}: has no table that begins with {COLUMNS}')
    after = re.sub(r'(\n\|.*)*', '', after, count=1)
    page.write_text('\n'.join([before + header, *(row.markdown() for row in rows)]) + after)


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
  """Returns rows in which new ones replace old ones of the same command; `published` stays."""
  published = {row.key: row.published for row in old}
  new = [row._replace(published=published.get(row.key, '')) for row in new]
  of_new = {row.key: row for row in new}
  kept = [of_new.pop(row.key, row) for row in old]
  return kept + [*of_new.values()]


def again(row: Row, folder: Path) -> bool:
  """Trains and evaluates a further seed of a row; returns whether it is as expected.

  Args:
    row: with two seeds or more.
    folder: for the workdir, which may have been begun.

  Raises:
    CalledProcessError: the training or the evaluation has failed.
  """
  seed = max(map(int, row.seeds.split())) + 1
  workdir = folder / f'{row.config.replace("/", "_").replace(":", "_")},{row.task},seed={seed}'
  command = [sys.executable, '-P', '-m', 'podracer_jit']
  subprocess.run([*command, f'--config={row.config}', *row.flags.split(), f'--config.seed={seed}',
                  f'--workdir={workdir}'], check=True)
  if row.protocol != TRAINING:
    actions, episodes, _ = row.protocol.split()
    copies = modules.by_comma(map(str, workdir.glob('sources/*/*.py')))  # of an example's modules
    subprocess.run([*command, 'evaluate', f'--workdir={workdir}', f'--num_episodes={episodes}',
                    f'--allow_modules={copies}',
                    '--greedy' if actions == 'greedy,' else '--nogreedy'], check=True)
  (run,) = reading.read([workdir])
  value = _return(run)
  low, high = expected(row.values)
  is_expected = low <= value <= high
  print(f'{row.config} on {row.task}, seed {seed}: {_short(value)} '
        f'{"is" if is_expected else "is NOT"} within {_short(low)} to {_short(high)}, where 99 of '
        f'100 seeds are expected by those of commit {row.commit}')
  return is_expected


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  own = argparse.ArgumentParser(prog='python -m benchmarks.results', description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
  own.add_argument('--table', type=Path, default=TABLE, help='the file of rows')
  commands = own.add_subparsers(dest='command', required=True)
  of_rows = commands.add_parser('rows', help='makes rows from workdirs')
  of_rows.add_argument('folders', nargs='*', type=Path, help='workdirs, sweeps, or folders of such')
  of_rows.add_argument('--commit', default='unknown', help="the package's, if runs do not name one")
  of_again = commands.add_parser('again', help='trains a row once more')
  of_again.add_argument('--row', help='its config, or CONFIG@TASK; default: a drawn one')
  of_again.add_argument('--folder', type=Path, help='for its workdir; default: a temporary one')
  args = own.parse_args(argv)
  try:
    if args.command == 'rows':
      new = rows_of(reading.read(args.folders), args.commit)
      rows = merged(read(args.table), new)
      write(args.table, rows)
      keys = {row.key for row in new}
      print('\n'.join([HEADER, *(row.markdown() for row in rows if row.key in keys)]))
      return 0
    row = _chosen(read(args.table), args.row)
  except ValueError as error:
    print(f'results: {error}', file=sys.stderr)
    return 2
  say(f'{row.config} on {row.task}, which took {row.seconds:,.0f} s')
  try:
    if args.folder:
      return 0 if again(row, args.folder) else 1
    with tempfile.TemporaryDirectory() as folder:
      return 0 if again(row, Path(folder)) else 1
  except subprocess.CalledProcessError as error:
    print(f'results: {json.dumps(list(map(str, error.cmd)))} ended with exit code '
          f'{error.returncode}', file=sys.stderr)
    return 1


def _chosen(rows: Sequence[Row], name: str | None) -> Row:
  """Returns the row of a name, or a drawn one.

  Raises:
    ValueError: there is no such row, or none with two seeds.
  """
  able = [row for row in rows if len(row.values) > 1]
  if name:
    able = [row for row in able if name in (row.config, f'{row.config}@{row.task}')]
  if not able:
    raise ValueError(f'--row: there is no row {name or "with two seeds or more"}; the file has '
                     + ', '.join(f'{row.config}@{row.task}' for row in rows))
  return random.SystemRandom().choice(able)


if __name__ == '__main__':
  sys.exit(main())
