"""Writes a report of runs: one page with figures and statistics, tables as CSV, figures as SVG.

  podracer_jit report runs/pong
  podracer_jit report runs/ppo runs/sweep --out=report

A folder is a workdir, a sweep, or contains such. The page, OUT/index.html, holds all that it shows,
so it can be sent as a file. Runs that differ only in seed and task form a group. The page has
learning curves, scores over tasks and seeds with bootstrap intervals, evaluations beside published
figures, the differences of the configs, speed, machines, and every command. A single run has a page
with all its metrics, and what is unusual. Runs that have not ended, have failed or are unequally
long are taken, and the page says so. The command only reads the workdirs, and needs the extra
`report`: pip install '.[report]'.

Exit code: 0, or 2 if there is no run or the report cannot be written.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from absl import flags

from podracer_jit.cli import arguments, verb
from podracer_jit.errors import Refused, refusing
from podracer_jit.options import printable, shorten
from podracer_jit.parts import user_path
from podracer_jit.report import reading


@verb
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  values = flags.FlagValues()
  flags.DEFINE_string('out', 'report', 'The folder of the report; files of an earlier report there '
                      'are replaced.', flag_values=values)
  flags.DEFINE_string('title', None, 'Title of the page. Default: the names of the folders.',
                      flag_values=values)
  args = arguments.read(argv, values, __doc__, ['out'])
  if args is None:
    return 0
  if not args:
    raise Refused('a folder is needed: podracer_jit report runs/pong --out=report')
  page = _page()
  with refusing(OSError):
    out = user_path(values.out)
    if (out / reading.CONFIG).exists():
      raise ValueError(f'--out: {out} is a workdir; choose another folder')
    if out.exists() and not out.is_dir():
      raise ValueError(f'--out: {out} is a file; name a folder')
    folders = [user_path(arg) for arg in args]
    runs = reading.read(folders)
    title = values.title or shorten(', '.join(folder.absolute().name for folder in folders), 90)
    command = ['podracer_jit', 'report', *argv[1:]]
    sweeps = reading.commands_of_sweeps(folders)
    built = page.build(runs, sweeps, printable(title), command)
    try:
      page.write(built, out)
    except OSError as error:
      raise ValueError(f'--out: cannot write {error.filename or out}: {error.strerror}') from None
  print(printable(f'{out / page.INDEX}: {len(runs)} {"run" if len(runs) == 1 else "runs"}'))
  return 0


def _page():
  """Returns the module that makes pages.

  Raises:
    Refused: a package of the extra `report` is missing.
  """
  try:
    return importlib.import_module('podracer_jit.report.page')
  except ModuleNotFoundError as error:
    if (error.name or '').partition('.')[0] in ('matplotlib', 'jinja2', 'markupsafe', 'PIL'):
      raise Refused(f'{error.name} is missing; it is part of the extra report: '
                    "pip install '.[report]'") from None
    raise
