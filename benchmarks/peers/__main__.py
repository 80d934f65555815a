"""Measures this package as shipped beside other programs, with equal sizes and losses, in turn.

python -m benchmarks.peers --folder=DIR
python -m benchmarks.peers --folder=DIR --tasks=cheetah_64,cartpole_jax --peers=sb3_envpool,scanned
python -m benchmarks.peers --folder=DIR --table

The command goes on where it stopped: DIR/results.jsonl has a line for each measurement, and what it
lacks is measured. It makes virtual environments in DIR, with packages from PyPI; the settings of
pip decide which build of PyTorch that is (PIP_CONSTRAINT). The tasks, and the peers that have them:

  pong_impala         IMPALA, Nature CNN, 128 x 20       cleanba
  pong_ppo            PPO, Nature CNN, 8 x 128           sb3 (ale-py), sb3_envpool, cleanrl
  cheetah_1x2048      PPO, HalfCheetah                   sb3, sbx
  cheetah_64          PPO, HalfCheetah, 64 x 64          sb3_envpool, sbx_envpool
  cartpole_jax        PPO, gymnax, 64 to 16,384          rejax, scanned (PureJaxRL's shape)
  cartpole_seeds      the same with 16 seeds at once     scanned
  cheetah_replay      SAC and TD3, HalfCheetah           sb3, sbx
  cartpole_gymnasium  PPO, Gymnasium; only if it is named in --tasks    sb3, sb3_subproc

Cleanba and CleanRL are measured if --cleanba and --cleanrl name a checkout of their repository.
`programs/checkouts.py` says how their scripts run on a machine of today; a checkout stays as it is.

Ours is `python -m podracer_jit` with a shipped config and the sizes of the task; nothing says where
it runs, and it looks for no faster placement meanwhile (placement.adapt). Peers read sizes and loss
from that config. Learning rates of peers do not fall; SBX does not clip the value; rejax always
does, and clips each number of a gradient instead of its norm. SAC and TD3 learn from the first
batch on.

Each measurement is a process of its own, without a GPU, on all cores that the command may use; two
tasks also run on one core. The first --warmup_updates updates and --warmup_s seconds after the
first update do not count. Speed is steps over time between two updates at least --seconds apart.
A program with PyTorch is first measured with 1, 2 and all cores as its number of threads, and then
runs with the fastest. *Cores busy* are CPU seconds of all processes by the clock, *peak MB* the
largest sum of their memory, with shared pages once.

Exit code: 0 everything is measured; 1 a program failed; 2 wrong arguments; 3 the time was over, or
the command was interrupted: the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from benchmarks import processes
from benchmarks.peers import tasks, venvs
from benchmarks.peers.table import failures, table
from benchmarks.peers.tasks import CASES, OURS, PEERS, TASKS, Measurement
from benchmarks.versions import commit
from podracer_jit.experiment.flags import parse
from podracer_jit.parts import user_path
from podracer_jit.workdir import record

FIRST_S = 60.0  # assumed of a measurement that was never made
INTERRUPTED = 'interrupted'
# Variables that would change how programs use the cores.
LEFT_OUT = ('XLA_FLAGS', 'NPROC', 'OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'PYTHONPATH')
SCRIPT_OF = {'cleanba': 'cleanba/cleanba_impala.py', 'cleanrl': 'cleanrl/ppo_atari_envpool.py'}


class Results:
  """The measurements of a folder: a line of results.jsonl each."""

  def __init__(self, folder: Path):
    """Reads what there is; raises ValueError if it is another command's."""
    self.path = folder / 'results.jsonl'
    lines = processes.read(self.path)
    if lines and 'settings' not in lines[0]:
      raise ValueError(f'--folder: {self.path} is not of this command; name another folder')
    self.settings: dict[str, Any] | None = lines[0]['settings'] if lines else None
    self.lines = lines[1:]

  def begin(self, settings: Mapping[str, Any]) -> None:
    """Notes the settings of new measurements, or compares them with those of earlier ones.

    Raises:
      ValueError: earlier measurements have other settings.
    """
    if self.settings is None:
      self.settings = dict(settings)
      self._write()
    for name, value in settings.items():
      if self.settings.get(name) != value:
        raise ValueError(f'{self.path} was measured with {name} {self.settings.get(name)}, not '
                         f'{value}; remove it, or name another --folder')

  def add(self, measurement: Measurement, figures: Mapping[str, Any]) -> None:
    """Adds a line."""
    self.lines.append(measurement._asdict() | dict(figures))
    self._write()

  def has(self, measurement: Measurement) -> bool:
    """Returns whether something was measured."""
    return any('sps' in line for line in self._of(measurement))

  def seconds(self, measurement: Measurement) -> float:
    """Returns the seconds that such a measurement takes."""
    return max([line['took_s'] for line in self.lines
                if (line['case'], line['program']) == (measurement.case, measurement.program)],
               default=FIRST_S)

  def threads(self, measurement: Measurement) -> int:
    """Returns the fastest number of threads that was tried, or else 1; 0 without PyTorch."""
    if measurement.program == OURS or not PEERS[measurement.program].has_torch:
      return 0
    if measurement.threads:
      return measurement.threads
    trials = [(line['sps'], line['threads']) for line in self.lines
              if not line['run'] and 'sps' in line and (
                  line['case'], line['program'], line['cores']) == (
                      measurement.case, measurement.program, measurement.cores)]
    return max(trials, default=(0.0, 1))[1]

  def _of(self, measurement: Measurement) -> list[dict[str, Any]]:
    names = [name for name in measurement._fields if name != 'threads' or not measurement.run]
    return [line for line in self.lines
            if all(line[name] == getattr(measurement, name) for name in names)]

  def _write(self) -> None:
    processes.write(self.path, [dict(settings=self.settings), *self.lines])


class Measuring:
  """Measures in a folder, one process at a time."""

  def __init__(self, folder: Path, results: Results, window: processes.Window,
               checkouts: Mapping[str, Path]):
    """Keeps where and how to measure.

    Args:
      folder: for virtual environments and for what the processes write.
      results: receives the measurements.
      window: when a training is measured; trials take half of its seconds.
      checkouts: of peers, by their names.
    """
    self._folder = folder
    self._results = results
    self._window = window
    self._checkouts = checkouts
    self._configs: dict[str, dict[str, Any]] = {}

  def run(self, measurement: Measurement) -> bool:
    """Measures one process, and notes the result; returns whether that worked."""
    threads = self._results.threads(measurement)
    start = time.monotonic()
    try:
      peer = PEERS.get(measurement.program)
      if peer and peer.venv:
        venvs.python_of(self._folder / 'venvs', peer.venv)  # makes it once, which may take minutes
        start = time.monotonic()
      figures = self._measure(measurement, threads)
      told = f'{figures["sps"]:,.0f} steps/s'
    except (processes.Failed, venvs.CannotMake) as error:
      figures = dict(error=str(error))
      told = f'failed: {error}'
    self._results.add(measurement, figures | dict(
        threads=threads, took_s=time.monotonic() - start))
    kind = f'run {measurement.run}' if measurement.run else f'trial with {threads} threads'
    print(f'{measurement.case}, {measurement.cores} cores, {kind}, {measurement.program}: {told}',
          file=sys.stderr, flush=True)
    return 'sps' in figures

  def _measure(self, measurement: Measurement, threads: int) -> dict[str, Any]:
    """Returns the figures of one process; see `processes.measure`."""
    peer = PEERS.get(measurement.program)
    python = sys.executable
    if peer and peer.venv:
      python = venvs.python_of(self._folder / 'venvs', peer.venv)
    window = self._window
    if not measurement.run:
      window = window._replace(seconds=window.seconds / 2)
    folder = processes.empty(self._folder / 'process')
    if peer:
      (folder / 'config.json').write_text(json.dumps(self._config(measurement.case)))
    metrics, trainings = tasks.metrics_file(measurement, folder)
    log = folder / 'log'
    command = tasks.command(measurement, folder, python, self._checkouts.get(measurement.program))
    try:
      figures = processes.measure(command, metrics, log, window, tasks.cores_of(measurement),
                                  environment_of(threads))
    except processes.Failed:
      kept = self._folder / 'logs' / f'{measurement.case}-{measurement.program}.log'
      kept.parent.mkdir(exist_ok=True)
      log.replace(kept)
      raise
    finally:
      shutil.rmtree(folder)  # a workdir has checkpoints
    return figures | dict(sps=figures['sps'] * trainings)

  def _config(self, case: str) -> dict[str, Any]:
    """Returns the fields of our config, which a peer reads."""
    if case not in self._configs:
      self._configs[case] = parse([sys.argv[0], *CASES[case].flags], absl_flags.FlagValues())
    return self._configs[case]


def measure_all(plan: Sequence[Measurement], results: Results, deadline: float,
                run: Callable[[Measurement], bool]) -> int:
  """Measures what the results lack; returns the number of measurements that the time left out.

  A program that fails is not tried again in this call.

  Args:
    plan: all measurements, in their order.
    results: what there is.
    deadline: by `time.monotonic`.
    run: measures one, and returns whether that worked.
  """
  failed = set()
  left_out = 0
  for measurement in plan:
    program = measurement.case, measurement.cores, measurement.program
    if results.has(measurement) or program in failed:
      continue
    if left_out or time.monotonic() + results.seconds(measurement) > deadline:
      left_out += 1
    elif not run(measurement) and measurement.run:
      failed.add(program)
  return left_out


def show(folder: Path, results: Results) -> None:
  """Prints the table, what failed, and what was measured where."""
  print(*table(results.lines), sep='\n')
  print()
  for line in failures(results.lines):
    print(f'failed: {line}')
  for name, value in (results.settings or {}).items():
    print(f'{name}: {value}')
  for name in venvs.PACKAGES:
    if (folder / 'venvs' / name / 'versions.json').exists():
      versions = venvs.versions(folder / 'venvs', name)
      print(f'{name}: ' + ', '.join(f'{package} {versions[package]}' for package in venvs.NAMED
                                    if package in versions))


def environment_of(threads: int) -> dict[str, str]:
  """Returns the variables of a process without a GPU.

  Args:
    threads: of PyTorch; 0: not set.
  """
  environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
  environment |= {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': ''}
  return environment | ({'OMP_NUM_THREADS': str(threads)} if threads else {})


def machine() -> dict[str, Any]:
  """Returns the processor, the cores that this process may use, our commit and versions."""
  lines = Path('/proc/cpuinfo').read_text().splitlines()
  model = next((line.partition(':')[2].strip() for line in lines
                if line.startswith('model name')), 'unknown')
  return dict(cpu=model, cores=len(os.sched_getaffinity(0)), commit=commit(),
              versions=record.versions())


def chosen(flag: str, value: str, known: Sequence[str]) -> list[str]:
  """Returns the names of a flag.

  Raises:
    ValueError: there is no such name.
  """
  names = [name for name in value.split(',') if name]
  for name in names:
    if name not in known:
      raise ValueError(f'--{flag}: there is no {name!r}; known are {", ".join(known)}')
  return names


def checkouts_of(args: argparse.Namespace) -> dict[str, Path]:
  """Returns the checkouts that the flags name.

  Raises:
    ValueError: a checkout has no such script.
  """
  paths = {name: user_path(getattr(args, name)) for name in SCRIPT_OF if getattr(args, name)}
  for name, path in paths.items():
    if not (path / SCRIPT_OF[name]).exists():
      raise ValueError(f'--{name}: {path} has no {SCRIPT_OF[name]}')
  return paths


def peers_of(args: argparse.Namespace, checkouts: Mapping[str, Path]) -> list[str]:
  """Returns the peers to measure.

  Raises:
    ValueError: a peer is unknown, or its checkout is missing.
  """
  peers = chosen('peers', args.peers, list(PEERS)) if args.peers is not None else list(PEERS)
  for name in [name for name in peers if PEERS[name].checkout and name not in checkouts]:
    if args.peers is not None:
      raise ValueError(f'--peers: {name} needs --{name}=CHECKOUT')
    print(f'{name}: left out, without --{name}=CHECKOUT', file=sys.stderr)
    peers.remove(name)
  return peers


def parser() -> argparse.ArgumentParser:
  """Returns the parser of the flags."""
  flags = argparse.ArgumentParser(
      prog='python -m benchmarks.peers', description=__doc__, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  flags.add_argument('--folder', required=True, help='for virtual environments and results')
  flags.add_argument('--tasks', default=','.join(tasks.DEFAULT), help='separated by commas')
  flags.add_argument('--peers', help='separated by commas; empty: only ours; default: all')
  flags.add_argument('--minutes', type=float, default=90.0, help='of this call')
  flags.add_argument('--cleanba', metavar='CHECKOUT', help='a checkout of vwxyzjn/cleanba')
  flags.add_argument('--cleanrl', metavar='CHECKOUT', help='a checkout of vwxyzjn/cleanrl')
  flags.add_argument('--runs', type=int, default=3, help='of each program')
  flags.add_argument('--seconds', type=float, default=12.0, help='that are measured')
  flags.add_argument('--warmup_s', type=float, default=6.0, help='seconds after the first update')
  flags.add_argument('--warmup_updates', type=int, default=3)
  flags.add_argument('--table', action='store_true', help='only prints the table')
  return flags


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  args = parser().parse_args(argv)
  folder = user_path(args.folder).absolute()
  try:
    results = Results(folder)
    if args.table:
      if results.settings is None:
        raise ValueError(f'--folder: {results.path} does not exist')
      show(folder, results)
      return 0
    checkouts = checkouts_of(args)
    plan = tasks.plan(chosen('tasks', args.tasks, list(TASKS)), peers_of(args, checkouts),
                      len(os.sched_getaffinity(0)), args.runs)
    folder.mkdir(parents=True, exist_ok=True)
    results.begin(machine() | dict(seconds=args.seconds, warmup_s=args.warmup_s,
                                   warmup_updates=args.warmup_updates))
  except (OSError, ValueError) as error:
    print(f'peers: {error}', file=sys.stderr)
    return 2
  window = processes.Window(args.warmup_updates, args.warmup_s, args.seconds)
  measuring = Measuring(folder, results, window, checkouts)
  try:
    with processes.interruptible():
      left_out = measure_all(plan, results, time.monotonic() + 60 * args.minutes, measuring.run)
    ending = f'{left_out} of {len(plan)} measurements do not fit into the time' if left_out else ''
  except KeyboardInterrupt:
    ending = INTERRUPTED
  show(folder, results)
  if ending:
    print(f'peers: {ending}; the same command goes on', file=sys.stderr)
    return 3
  return 1 if failures(results.lines) else 0


if __name__ == '__main__':
  sys.exit(main())
