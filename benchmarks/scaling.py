"""What a second process adds: weak scaling, each process pinned to a core of its own.

.venv/bin/python -m benchmarks.scaling --rounds=3 --updates=8 --json=figures.json

Three layouts, in turn, round after round:

  together  --processes of one run, with that many times the environments, num_shards and
            num_grad_shards, so that each has the work that the config says
  apart     as many runs of the config at the same time, which know nothing of each other: what
            the cores of this machine take from each other, whatever the program does
  one       one run of the config, the other cores idle; each round on the next core

SPS is that of metrics.jsonl: of each process the median over --updates, counted from when all of a
layout are warm; then the median over the rounds. Efficiency is SPS(together) / (n SPS(one)), and
against the control SPS(together) / SPS(apart), where apart is the sum. Takes --config and its
overrides as training does; by default Nature CNN on Pong. CPUs only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.common import Failed, count_lines, refuse_replay, with_default, write_config
from podracer_jit.run import command_line, workdirs
from podracer_jit.run.experiment import Experiment
from podracer_jit.run.resolve import changed, resolve

PUBLISHED = 'Cleanba (2310.00036) has 0.93 of 1 at 128 GPUs'
LAYOUTS = ('together', 'apart', 'one')  # first what a config may not be able to do
WARM = 3  # updates of each process that are never counted
POLL_S = 0.1


def scaled(experiment: Experiment, processes: int) -> Experiment:
  """The experiment for so many processes, without an end: a run must not leave the others alone.

  Raises:
    ValueError: it cannot be so large.
  """
  return changed(
      experiment,
      env=dict(num_envs=experiment.env.num_envs * processes), total_steps=2**30,
      checkpoint=dict(every_updates=2**31 - 1),
      num_shards=experiment.num_shards * processes,
      num_grad_shards=experiment.num_grad_shards * processes)


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
  """Whatever is started meanwhile has this core alone."""
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {core})
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


class Runs:
  """Processes of the binary, each on a core; a context manager that ends them."""

  def __init__(self):
    self._processes: list[subprocess.Popen] = []
    self._logs: list[Path] = []

  def __enter__(self) -> Runs:
    return self

  def __exit__(self, *exc: Any) -> None:
    for process in self._processes:
      process.kill()  # nothing of theirs is kept
    for process in self._processes:
      process.wait()

  def start(self, core: int, log: Path, *args: str) -> None:
    """Starts the binary with `args` on the core; what it says goes to `log`."""
    command = [sys.executable, '-m', 'podracer_jit', *args]
    with pinned(core), log.open('w') as file:
      self._processes.append(subprocess.Popen(
          command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file,
          env=os.environ | {'JAX_PLATFORMS': 'cpu'}))
    self._logs.append(log)

  def wait(self, goals: Mapping[Path, int]) -> None:
    """Waits until each file has so many lines.

    Raises:
      Failed: a process ended before.
    """
    while any(count_lines(path) < goal for path, goal in goals.items()):
      for process, log in zip(self._processes, self._logs, strict=True):
        if process.poll() is not None:
          raise Failed(process, log)
      time.sleep(POLL_S)


def measure(layout: str, experiment: Experiment, cores: Sequence[int], updates: int
            ) -> list[float]:
  """SPS of each run of a layout: of one process on each core.

  Args:
    layout: one of LAYOUTS.
    experiment: of one process.
    cores: to pin processes to.
    updates: to count of each process.

  Raises:
    Failed: a process ended too early.
  """
  count = len(cores) if layout == 'together' else 1
  with tempfile.TemporaryDirectory() as directory, Runs() as runs:
    root = Path(directory)
    file = write_config(root / 'config.py', scaled(experiment, count).fields)
    workdirs = [root / 'run'] if layout == 'together' else [root / f'run{c}' for c in cores]
    with socket.socket() as probe:
      probe.bind(('localhost', 0))
      port = probe.getsockname()[1]
    for i, core in enumerate(cores):
      joining = [] if count == 1 else [
          '--distributed', f'--coordinator_address=localhost:{port}', f'--num_processes={count}',
          f'--process_id={i}']
      runs.start(core, root / f'log{i}', f'--config={file}',
                 f'--workdir={workdirs[i % len(workdirs)]}', *joining)
    paths = [workdir / 'metrics.jsonl' for workdir in workdirs]
    runs.wait(dict.fromkeys(paths, WARM))
    firsts = {path: count_lines(path) + 1 for path in paths}  # 1: it began before all were warm
    runs.wait({path: first + updates for path, first in firsts.items()})
    return [statistics.median(json.loads(line)['sps'] for line in
                              path.read_text().splitlines()[first:first + updates])
            for path, first in firsts.items()]


def efficiencies(rounds: Mapping[str, Sequence[Sequence[float]]], processes: int
                 ) -> dict[str, Any]:
  """SPS of each layout and their ratios, from the SPS of each layout's rounds and runs."""
  sums = {layout: [sum(runs) for runs in rounds[layout]] for layout in LAYOUTS}
  sps = {layout: statistics.median(values) for layout, values in sums.items()}
  return dict(
      layouts={layout: dict(sps=sps[layout], rounds=sums[layout], runs=list(rounds[layout]))
               for layout in LAYOUTS},
      efficiency=sps['together'] / (processes * sps['one']),
      efficiency_to_control=sps['together'] / sps['apart'],
      control=sps['apart'] / (processes * sps['one']))


def show(result: Mapping[str, Any]) -> None:
  """Prints the table and the ratios."""
  count = result['processes']
  names = dict(one='one process', together=f'{count} processes, one run',
               apart=f'{count} runs, their sum')
  print(f'{"":24}{"SPS":>10}{"lowest":>10}{"highest":>10}')
  for layout in reversed(LAYOUTS):
    row = result['layouts'][layout]
    print(f'{names[layout]:24}' + ''.join(f'{value:10,.0f}' for value in (
        row['sps'], min(row['rounds']), max(row['rounds']))))
  print(f'efficiency: {result["efficiency"]:.3f} of {count} times one process, '
        f'{result["efficiency_to_control"]:.3f} of {count} runs that share nothing but the machine')
  print(f'those runs make {result["control"]:.3f} of {count} times one process; {PUBLISHED}')


def define_flags() -> flags.FlagValues:
  """Defines the script's own flags, beside those of a config."""
  values = flags.FlagValues()
  flags.DEFINE_integer('processes', 2, 'How many, and cores to pin them to.', lower_bound=2,
                       flag_values=values)
  flags.DEFINE_integer('updates', 8, 'To count of each process.', lower_bound=1,
                       flag_values=values)
  flags.DEFINE_integer('rounds', 3, 'How often each layout is measured.', lower_bound=1,
                       flag_values=values)
  flags.DEFINE_string('json', None, 'Write all figures here.', flag_values=values)
  return values


def prepare(experiment: Experiment, processes: int) -> list[int]:
  """Checks the experiment for either number of processes; returns the cores.

  Raises:
    ValueError: in one line.
  """
  refuse_replay(experiment)
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < processes:
    raise ValueError(f'--processes: {processes} need a core each, there are {len(cores)}')
  for count in (1, processes):
    scaled(experiment, count)
  return cores[:processes]


def benchmark(argv: Sequence[str]) -> int:
  """Measures and prints; returns the exit code."""
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what ends the processes
  values = define_flags()
  try:
    config = command_line.parse(with_default(argv), values)
    if config is None:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    experiment = resolve(config)
    cores = prepare(experiment, values.processes)
    rounds = {layout: [] for layout in LAYOUTS}
    for k in range(values.rounds):
      for layout in LAYOUTS:
        where = [cores[k % len(cores)]] if layout == 'one' else cores
        rounds[layout].append(measure(layout, experiment, where, values.updates))
        print(f'round {k + 1} of {values.rounds}: {layout} '
              f'{sum(rounds[layout][-1]):,.0f} SPS', file=sys.stderr, flush=True)
  except (ValueError, Failed) as error:
    print(f'scaling: {error}', file=sys.stderr)
    return getattr(error, 'code', 2)
  result = dict(config=experiment.fields, processes=values.processes, updates=values.updates,
                cores=cores,
                versions=workdirs.versions(), published=PUBLISHED
                ) | efficiencies(rounds, values.processes)
  show(result)
  if values.json:
    Path(values.json).write_text(json.dumps(result, indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(benchmark(sys.argv))
