"""Measures the time from the command to the first rollout and the first update.

.venv/bin/python -m benchmarks.startup --rounds=3 --updates=3 --json=figures.json

`cold` begins with an empty compilation cache (JAX_COMPILATION_CACHE_DIR is a new directory). `warm`
is the same command again, with the cache that `cold` filled. The two alternate; figures are medians
over the rounds. Seconds are from the start of `podracer_jit` to the first call of a program that
steps environments, to the first line of metrics.jsonl, and to the end of the process after about
--updates (a checkpoint included). `cpu s` are the CPU seconds of the process until the first
rollout, which depend less on what else the machine does.

Programs that compile quickly (JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS) are not cached. In the
first round, Python's packages may also be read from disk. Takes --config and its overrides as
training does.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from benchmarks.common import (
  Failed,
  count_lines,
  parse_config,
  refuse_replay,
  with_default,
  write_config,
)
from podracer_jit.experiment.resolve import changed, resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.workdir import record

KINDS = ('cold', 'warm')
POLL_S = 0.02
FILE = 'PODRACER_JIT_FIRST_ROLLOUT'  # the variable with the file for the time of the first rollout
# The command `podracer_jit`, which notes when a program with environments is first called.
COMMAND = f"""
import contextlib, importlib, os, time, types
from podracer_jit.cli import main

def imported(name):
  module = importlib.import_module(name)
  from podracer_jit.actor.rollout_program import RolloutProgram
  load = RolloutProgram.load

  def noting(*args, **kwargs):
    program = load(*args, **kwargs)

    def call(*args):
      if not os.path.exists(os.environ[{FILE!r}]):
        # Two actors may begin at once, and the first one counts.
        with contextlib.suppress(FileExistsError), open(os.environ[{FILE!r}], 'x') as file:
          print(time.perf_counter(), time.process_time(), file=file)
      return program(*args)

    return call

  RolloutProgram.load = noting
  return module

main.importlib = types.SimpleNamespace(import_module=imported)
main.run()
"""


class Figures(NamedTuple):
  """The figures of one training process."""

  first_rollout_s: float
  first_rollout_cpu_s: float
  first_update_s: float
  total_s: float
  cached: int  # programs in the cache when it ended


def measure(config_file: Path, workdir: Path, cache: Path) -> Figures:
  """Runs a training process to its end and measures it.

  Args:
    config_file: the config to train.
    workdir: a new workdir; the log is written beside it.
    cache: the folder of JAX's compilation cache.

  Raises:
    Failed: the process failed or made no update.
  """
  command = [sys.executable, '-c', COMMAND, f'--config={config_file}', f'--workdir={workdir}']
  log = workdir.with_suffix('.log')
  rollout = workdir.with_suffix('.rollout')
  metrics = workdir / 'metrics.jsonl'
  with log.open('w') as file:
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file,
        env=os.environ | {'JAX_COMPILATION_CACHE_DIR': str(cache), FILE: str(rollout)})
  try:
    while not count_lines(metrics) and process.poll() is None:
      time.sleep(POLL_S)
    first = time.perf_counter() - start
    process.wait()
    total = time.perf_counter() - start
  finally:
    process.kill()
    process.wait()
  if process.returncode or not count_lines(metrics):
    raise Failed(process, log)
  rollout_s, cpu_s = map(float, rollout.read_text().split())
  return Figures(rollout_s - start, cpu_s, first, total, len(list(cache.rglob('*-cache'))))


def measure_round(experiment: Experiment) -> list[Figures]:
  """Returns the figures of each kind of KINDS, in order."""
  with tempfile.TemporaryDirectory() as directory:
    root = Path(directory)
    (root / 'cache').mkdir(mode=0o700)  # programs are not read from a folder of others
    file = write_config(root / 'config.py', experiment.fields)
    return [measure(file, root / kind, root / 'cache') for kind in KINDS]


def summarise(rounds: Sequence[Sequence[Figures]]) -> dict[str, Any]:
  """Returns the medians over the rounds of each kind, and the seconds that the cache saves."""
  table = {}
  for kind, figures in zip(KINDS, zip(*rounds, strict=True), strict=True):
    columns = {name: [getattr(x, name) for x in figures] for name in Figures._fields}
    table[kind] = {name: statistics.median(column) for name, column in columns.items()} | dict(
        rounds=columns)
  saved = {name: table['cold'][name] - table['warm'][name]
           for name in ('first_rollout_s', 'first_update_s', 'total_s')}
  return dict(kinds=table, saved=saved)


def show(result: Mapping[str, Any]) -> None:
  """Prints the table."""
  print(f'{"":6}{"first rollout s":>25}{"cpu s":>8}{"first update s":>25}{"total s":>9}'
        f'{"cached":>8}')
  for kind, row in result['kinds'].items():
    print(f'{kind:6}{_with_range(row, "first_rollout_s"):>25}{row["first_rollout_cpu_s"]:8.2f}'
          f'  {_with_range(row, "first_update_s"):>23}{row["total_s"]:9.2f}{row["cached"]:8.0f}')
  print(f'saved: {result["saved"]["first_rollout_s"]:.2f} s until the first rollout, '
        f'{result["saved"]["first_update_s"]:.2f} s until the first update, '
        f'{result["saved"]["total_s"]:.2f} s of the whole run')
  if not result['kinds']['cold']['cached']:
    print('nothing was cached: every program compiled faster than JAX\'s threshold for caching')


def _with_range(row: Mapping[str, Any], name: str) -> str:
  """Returns the median of a figure with its lowest and highest value."""
  values = row['rounds'][name]
  return f'{row[name]:.2f} ({min(values):.2f} to {max(values):.2f})'


def define_flags() -> flags.FlagValues:
  """Defines the script's own flags, beside those of a config."""
  values = flags.FlagValues()
  flags.DEFINE_integer('updates', 3, 'Updates of each run.', lower_bound=1, flag_values=values)
  flags.DEFINE_integer('rounds', 3, 'Measurements of each kind.', lower_bound=1,
                       flag_values=values)
  flags.DEFINE_string('json', None, 'A file for all figures.', flag_values=values)
  return values


def benchmark(argv: Sequence[str]) -> int:
  """Measures and prints; returns the exit code."""
  # SIGTERM must unwind the stack, so that `finally` ends the training process.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  values = define_flags()
  try:
    config = parse_config(with_default(argv), values, __doc__)
    if config is None:
      return 0
    experiment = resolve(config)
    refuse_replay(experiment)
    steps = experiment.batch_rows * values.updates
    experiment = changed(experiment, total_steps=min(2**30, steps))
    rounds = []
    for k in range(values.rounds):
      rounds.append(measure_round(experiment))
      times = ', '.join(f'{kind} {figures.first_update_s:.2f} s'
                        for kind, figures in zip(KINDS, rounds[-1], strict=True))
      print(f'round {k + 1} of {values.rounds}: {times}', file=sys.stderr, flush=True)
  except (ValueError, Failed) as error:
    print(f'startup: {error}', file=sys.stderr)
    return getattr(error, 'code', 2)
  result = dict(config=experiment.fields, cores=len(os.sched_getaffinity(0)),
                versions=record.versions()) | summarise(rounds)
  show(result)
  if values.json:
    Path(values.json).write_text(json.dumps(result, indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(benchmark(sys.argv))
