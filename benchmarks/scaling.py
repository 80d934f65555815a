"""Measures weak scaling over processes, each pinned to its own core.

.venv/bin/python -m benchmarks.scaling --rounds=3 --updates=8 --json=figures.json

Three layouts take turns, round after round:

  together  one run of --processes processes, with that many times the environments, num_shards and
            num_grad_shards, so that each process has the work of the config
  apart     as many separate runs of the config at the same time: the control, which shows how much
            the cores of this machine slow each other down without any communication
  one       one run of the config, the other cores idle; each round on the next core

SPS comes from metrics.jsonl. Its value for a process is the median over --updates, which begin when
all processes of a layout are warm; the table has medians over the rounds. Efficiency is
SPS(together) / (n SPS(one)). Efficiency against the control is SPS(together) / SPS(apart), where
SPS(apart) is the sum of the runs. Takes --config and its overrides as training does; the default is
Nature CNN on Pong. CPUs only.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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

PUBLISHED = 'Cleanba (2310.00036) has 0.93 of 1 at 128 GPUs'
LAYOUTS = ('together', 'apart', 'one')  # 'together' is first, since a config may not support it
WARM = 3  # updates of each process that are a warm-up
POLL_S = 0.1


def scaled(experiment: Experiment, processes: int) -> Experiment:
  """Returns the experiment for so many processes, with the same work for each.

  It has no end: if one run ended before the others, they would have more of the machine.

  Raises:
    ValueError: the experiment does not support so many processes.
  """
  return changed(
      experiment,
      env=dict(num_envs=experiment.env.num_envs * processes, renew_every_updates=0),
      total_steps=2**30, checkpoint=dict(every_seconds=0.0, every_updates=0),
      num_shards=experiment.num_shards * processes,
      num_grad_shards=experiment.num_grad_shards * processes)


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
  """Pins this process to a core; processes started meanwhile inherit it."""
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {core})
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)


class Runs:
  """Training processes, each pinned to a core; a context manager that kills them at its end."""

  def __init__(self):
    self._processes: list[subprocess.Popen] = []
    self._logs: list[Path] = []

  def __enter__(self) -> Runs:
    return self

  def __exit__(self, *exc: Any) -> None:
    for process in self._processes:
      process.kill()  # a clean end would take longer, and their checkpoints are not needed
    for process in self._processes:
      process.wait()

  def start(self, core: int, log: Path, *args: str) -> None:
    """Starts a training with `args` on the core.

    Args:
      core: the core to pin it to.
      log: a file for the process's stderr.
      *args: flags of training.
    """
    command = [sys.executable, '-m', 'podracer_jit', *args]
    with pinned(core), log.open('w') as file:
      self._processes.append(subprocess.Popen(
          command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file,
          env=os.environ | {'JAX_PLATFORMS': 'cpu'}))
    self._logs.append(log)

  def wait(self, goals: Mapping[Path, int]) -> None:
    """Waits until each file has so many whole lines.

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
  """Measures a layout with one process on each core.

  Args:
    layout: one of LAYOUTS.
    experiment: the experiment of one process.
    cores: the cores to pin the processes to.
    updates: number of updates to measure of each process.

  Returns:
    The SPS of each run; 'together' has one run, the others one per core.

  Raises:
    Failed: a process ended too early.
  """
  count = len(cores) if layout == 'together' else 1
  with tempfile.TemporaryDirectory() as directory, Runs() as runs:
    root = Path(directory)
    file = write_config(root / 'config.py', scaled(experiment, count).fields)
    workdirs = [root / 'run'] if layout == 'together' else [root / f'run{c}' for c in cores]

    # The operating system chooses a free port for the coordinator.
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
    # One more update is skipped, since it began before all processes were warm.
    firsts = {path: count_lines(path) + 1 for path in paths}
    runs.wait({path: first + updates for path, first in firsts.items()})

    medians = []
    for path, first in firsts.items():
      lines = path.read_text().splitlines()[first:first + updates]
      medians.append(statistics.median(json.loads(line)['sps'] for line in lines))
    return medians


def efficiencies(rounds: Mapping[str, Sequence[Sequence[float]]], processes: int
                 ) -> dict[str, Any]:
  """Returns the SPS of each layout and the efficiencies.

  Args:
    rounds: for each layout the rounds; each round has the SPS of its runs.
    processes: number of processes of 'together'.
  """
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
        f'{result["efficiency_to_control"]:.3f} of {count} separate runs on the same machine')
  print(f'the separate runs reach {result["control"]:.3f} of {count} times one process; '
        f'{PUBLISHED}')


def define_flags() -> flags.FlagValues:
  """Defines the script's own flags, beside those of a config."""
  values = flags.FlagValues()
  flags.DEFINE_integer('processes', 2, 'Number of processes; each needs a core.', lower_bound=2,
                       flag_values=values)
  flags.DEFINE_integer('updates', 8, 'Measured updates of each process.', lower_bound=1,
                       flag_values=values)
  flags.DEFINE_integer('rounds', 3, 'Measurements of each layout.', lower_bound=1,
                       flag_values=values)
  flags.DEFINE_string('json', None, 'A file for all figures.', flag_values=values)
  return values


def prepare(experiment: Experiment, processes: int) -> list[int]:
  """Checks the experiment for one process and for all; returns the cores to use.

  Raises:
    ValueError: the experiment or the machine does not support it; the message is one line.
  """
  refuse_replay(experiment)
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < processes:
    raise ValueError(f'--processes: {processes} processes need a core each; this machine has '
                     f'{len(cores)}')
  for count in (1, processes):
    scaled(experiment, count)
  return cores[:processes]


def benchmark(argv: Sequence[str]) -> int:
  """Measures and prints; returns the exit code."""
  # SIGTERM must unwind the stack, so that `Runs` ends its processes.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  values = define_flags()
  try:
    config = parse_config(with_default(argv), values, __doc__)
    if config is None:
      return 0
    experiment = resolve(config)
    cores = prepare(experiment, values.processes)
    rounds = {layout: [] for layout in LAYOUTS}
    for k in range(values.rounds):
      for layout in LAYOUTS:
        used_cores = [cores[k % len(cores)]] if layout == 'one' else cores
        rounds[layout].append(measure(layout, experiment, used_cores, values.updates))
        print(f'round {k + 1} of {values.rounds}: {layout} '
              f'{sum(rounds[layout][-1]):,.0f} SPS', file=sys.stderr, flush=True)
  except (ValueError, Failed) as error:
    print(f'scaling: {error}', file=sys.stderr)
    return getattr(error, 'code', 2)
  settings = dict(config=experiment.fields, processes=values.processes, updates=values.updates,
                  cores=cores, versions=record.versions(), published=PUBLISHED)
  result = settings | efficiencies(rounds, values.processes)
  show(result)
  if values.json:
    Path(values.json).write_text(json.dumps(result, indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(benchmark(sys.argv))
