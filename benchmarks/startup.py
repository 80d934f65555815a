"""Measures the time from the command to the first update, with an empty and with a full cache.

.venv/bin/python -m benchmarks.startup --rounds=3 --updates=3 --json=figures.json

`cold` begins with an empty compilation cache (JAX_COMPILATION_CACHE_DIR is a new directory). `warm`
is the same command again, with the cache that `cold` filled. The two alternate; figures are medians
over the rounds. Seconds are from the start of `python -m podracer_jit` to the first line of
metrics.jsonl, and to the end of the process after about --updates (a checkpoint included).

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


class Figures(NamedTuple):
  """The figures of one training process."""

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
  command = [sys.executable, '-m', 'podracer_jit', f'--config={config_file}',
             f'--workdir={workdir}']
  log = workdir.with_suffix('.log')
  metrics = workdir / 'metrics.jsonl'
  with log.open('w') as file:
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file,
        env=os.environ | {'JAX_COMPILATION_CACHE_DIR': str(cache)})
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
  return Figures(first, total, len(list(cache.rglob('*-cache'))))


def measure_round(experiment: Experiment) -> list[Figures]:
  """Returns the figures of each kind of KINDS, in order."""
  with tempfile.TemporaryDirectory() as directory:
    root = Path(directory)
    (root / 'cache').mkdir()
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
           for name in ('first_update_s', 'total_s')}
  return dict(kinds=table, saved=saved)


def show(result: Mapping[str, Any]) -> None:
  """Prints the table."""
  print(f'{"":8}{"first update s":>16}{"lowest":>9}{"highest":>9}{"total s":>9}{"cached":>8}')
  for kind, row in result['kinds'].items():
    first = row['rounds']['first_update_s']
    print(f'{kind:8}{row["first_update_s"]:16.2f}{min(first):9.2f}{max(first):9.2f}'
          f'{row["total_s"]:9.2f}{row["cached"]:8.0f}')
  print(f'saved: {result["saved"]["first_update_s"]:.2f} s until the first update, '
        f'{result["saved"]["total_s"]:.2f} s of the whole run')
  if not result['kinds']['cold']['cached']:
    print('nothing was cached: every program compiled faster than JAX\'s threshold for caching')


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
