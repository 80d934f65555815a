"""Searches for a placement that is faster than the rule's, and compares the two in pairs.

  python -m benchmarks.tune --folder=DIR --config=configs/impala_catch.py
  python -m benchmarks.tune --folder=DIR --configs=impala_atari:nature_cnn,ppo_mujoco
  python -m benchmarks.tune --folder=DIR --table

The command goes on where it stopped: DIR/results.jsonl has a line for each measurement, and one for
the candidates of each stage, which it keeps whatever is free later. It takes --config and its
overrides, like training, or names of shipped configs; with neither, eight of them.

Each measurement trains in a process of its own, whose first updates do not count, and neither do
those that only fill a replay; the run does not adapt. The search begins with the devices of actors
and learners (and on GPUs with actors_per_device), with `sync` and `fused` in place of each other.
For the best of these it tries env_threads, xla_threads and, for `fused`, updates_per_call. In both
stages all candidates are measured once, and the three fastest three times. At last the placement as
shipped and the best one are measured in seven pairs, in turn. With a deterministic scheme none of
them changes a result; a workdir keeps its scheme, so another scheme needs a new workdir.

The table has the median and the interval of the pairs' ratios, and the flags of the best placement.
Schemes that act and learn at rates of their own have two speeds, and are refused.

Exit code: 0 all is measured; 1 every training of a config failed; 2 it could not start; 3 the time
was over, or the command was interrupted: the same command goes on.
"""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from benchmarks import processes
from benchmarks.common import parse_config, say
from benchmarks.tune import candidates
from benchmarks.tune.candidates import Candidate
from benchmarks.tune.search import DEVICES, PAIRS, SHIPPED, THREADS, Search, Speed
from podracer_jit.cli import configs as shipped_configs
from podracer_jit.experiment.resolve import resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.parts import user_path
from podracer_jit.runtime import host

CONFIGS = ('impala_atari:nature_cnn', 'ppo_atari_8', 'pong_laptop', 'ppo_mujoco',
           'ppo_mujoco_fast', 'apex_dqn_pong_laptop', 'impala_memory', 'ppo_cartpole')
STEPS = 2**30  # of the trainings, which are ended before
WARMUP_UPDATES = 3
WARMUP_S = 4.0


class Case:
  """The search for one config, whose measurements are lines of a file."""

  def __init__(self, arguments: Sequence[str], path: Path):
    """Resolves the config.

    Args:
      arguments: --config and its overrides.
      path: the file of all measurements.

    Raises:
      ValueError: the config is wrong, or the scheme has no single speed.
    """
    self.arguments = list(arguments)
    self._path = path
    config = parse_config([sys.argv[0], *arguments], FlagValues(), __doc__)
    self._experiment: Experiment = resolve(config)
    if self._experiment.scheme.graph.free_rates:
      raise ValueError(f'scheme: {self._experiment.scheme_name} acts and learns at separate rates, '
                       'so no single figure says which placement is better; tune apex_lockstep '
                       'instead')
    here, _ = host.machine()
    self._machine = here._replace(cores=here.allowed, busy=0)  # others may have used a core

  @property
  def name(self) -> str:
    """The flags, as a shell needs them."""
    return shlex.join(self.arguments)

  def search(self) -> Search:
    """Returns the search after what has been measured."""
    speeds = [Speed(line['stage'], self._placement(line['flags']), line['sps'])
              for line in self._lines() if 'sps' in line]
    places = self._plan(DEVICES) or candidates.places(self._experiment, self._machine)

    def vary(candidate: Candidate) -> list[Candidate]:
      return (self._plan(THREADS) or
              candidates.variants(self._experiment, self._machine, candidate))

    return Search(places, vary, speeds)

  def _lines(self) -> list[dict[str, Any]]:
    """Returns the lines of the file that are of this config."""
    return [line for line in processes.read(self._path) if line.get('config') == self.name]

  def _plan(self, stage: str) -> list[Candidate] | None:
    """Returns the candidates of a stage that has begun, since the free cores may be others now."""
    for line in self._lines():
      if 'candidates' in line and line['stage'] == stage:
        return [self._placement(flags) for flags in line['candidates']]
    return None

  def _write(self, stage: str, **fields: Any) -> None:
    """Appends a line to the file."""
    processes.append(self._path, dict(config=self.name, stage=stage, **fields))

  def flags_of(self, placement: Any) -> list[str]:
    """Returns the flags of a placement; none for SHIPPED."""
    return [] if placement == SHIPPED else placement.flags(self._experiment.scheme_name)

  def _placement(self, written: Sequence[str]) -> Any:
    """Returns the placement whose flags these are; SHIPPED without flags."""
    if not written:
      return SHIPPED
    texts = dict(flag.rpartition('.')[2].split('=', 1) for flag in written)
    scheme = texts.pop('scheme', self._experiment.scheme_name)
    return Candidate(scheme, **{name: ast.literal_eval(text) for name, text in texts.items()})

  @property
  def fails(self) -> bool:
    """Whether placements were measured, and none of them works."""
    speeds = [line['sps'] for line in self._lines() if 'sps' in line]
    return bool(speeds) and not any(speeds)

  def measure(self, stage: str, placement: Any, folder: Path, seconds: float) -> float:
    """Measures a placement, and notes its speed.

    Args:
      stage: of the search.
      placement: SHIPPED, or a candidate.
      folder: of the process.
      seconds: of the measurement.

    Returns:
      The speed, 0 if the training failed.
    """
    for begun in (DEVICES,) if stage == DEVICES else (DEVICES, THREADS):
      if self._plan(begun) is None:
        planned = self.search().candidates(begun)
        self._write(begun, candidates=[self.flags_of(candidate) for candidate in planned])
    folder = processes.empty(folder)
    workdir = folder / 'workdir'
    given = self.flags_of(placement)
    command = [sys.executable, '-m', 'podracer_jit', *self.arguments, *given,
               f'--config.total_steps={STEPS}', '--config.placement.adapt=False',
               f'--workdir={workdir}']
    window = processes.Window(WARMUP_UPDATES, WARMUP_S, seconds)
    try:
      sps = processes.measure(command, workdir / 'metrics.jsonl', folder / 'log', window,
                              os.sched_getaffinity(0), os.environ)['sps']
    except processes.Failed as error:
      say(f'failed: {error}')
      sps = 0.0
    self._write(stage, flags=given, sps=sps)
    return sps


def parser() -> argparse.ArgumentParser:
  """Returns the parser of the command's own flags."""
  own = argparse.ArgumentParser(
      prog='python -m benchmarks.tune', description=__doc__, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  own.add_argument('--folder', required=True, help='for results')
  own.add_argument('--configs', help='shipped configs to tune in turn, separated by commas')
  own.add_argument('--seconds', type=float, default=8.0, help='of a measurement')
  own.add_argument('--minutes', type=float, default=30.0, help='of each config, in this call')
  own.add_argument('--table', action='store_true', help='only prints the table')
  return own


def cases_of(configs: str | None, arguments: Sequence[str], path: Path) -> list[Case]:
  """Returns the searches that a command line names.

  Args:
    configs: names of shipped configs, separated by commas.
    arguments: --config and its overrides.
    path: the file of measurements.

  Raises:
    ValueError: a config is wrong.
  """
  if any(arg.partition('=')[0] == '--config' for arg in arguments):
    if configs is not None:
      raise ValueError('--configs: --config names another one; give one of the two')
    return [Case(arguments, path)]
  names = CONFIGS if configs is None else [name for name in configs.split(',') if name]
  known = shipped_configs.shipped()
  for name in names:
    if name.partition(':')[0] not in known:
      raise ValueError(f'--configs: there is no {name!r}; known are {", ".join(known)}')
  return [Case([f'--config={name}', *arguments], path) for name in names]


def row(case: Case) -> list[str]:
  """Returns a row of the table."""
  search = case.search()
  ratios = search.ratios()
  if case.fails:
    return [case.name, '', '', 'every training failed']
  if search.best() is None:
    return [case.name, '', '', 'not measured yet']
  if search.is_shipped_best():
    return [case.name, '1', '', SHIPPED]
  best = shlex.join(case.flags_of(search.best()))
  if not ratios:
    return [case.name, '', f'0 of {PAIRS}', best]
  interval = f'{min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} of {PAIRS}'
  return [case.name, f'{statistics.median(ratios):.3f}', interval, best]


def show(cases: Sequence[Case]) -> None:
  """Prints the table."""
  print('| config | as shipped to the best | interval, pairs | the best |')
  print('| --- | --- | --- | --- |')
  for case in cases:
    print('| ' + ' | '.join(row(case)) + ' |')


def run(case: Case, folder: Path, seconds: float, minutes: float) -> bool:
  """Searches until all is measured or the time is over; returns whether all is measured.

  Args:
    case: the search.
    folder: of the processes.
    seconds: of a measurement.
    minutes: most minutes.
  """
  deadline = time.monotonic() + 60 * minutes
  while following := case.search().next():
    if time.monotonic() > deadline:
      return False
    stage, placement = following
    sps = case.measure(stage, placement, folder, seconds)
    say(f'{sps:10,.0f} SPS  {case.name}, {stage}: '
        f'{shlex.join(case.flags_of(placement)) or SHIPPED}')
  return True


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  args, arguments = parser().parse_known_args(argv)
  folder = user_path(args.folder).absolute()
  try:
    folder.mkdir(parents=True, exist_ok=True)
    cases = cases_of(args.configs, arguments, folder / 'results.jsonl')
  except (OSError, ValueError) as error:
    print(f'tune: {error}', file=sys.stderr)
    return 2
  if args.table:
    show(cases)
    return 0
  try:
    with processes.interruptible():
      over = all([run(case, folder / 'process', args.seconds, args.minutes) for case in cases])
  except KeyboardInterrupt:
    over = False
  show(cases)
  if not over:
    say('tune: not all is measured; the same command goes on')
    return 3
  for case in cases:
    if case.fails:
      say(f'tune: {case.name}: every training failed')
  if any(case.fails for case in cases):
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
