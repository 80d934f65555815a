"""Compares the speed of actors that are threads with that of actors on a Ray cluster, in turn.

.venv/bin/python -m benchmarks.cluster_speed --tasks=catch,pong,apex --pairs=3 --seconds=30

A pair is two trainings of the same experiment with the same two actors: one with threads, one with
processes on a Ray cluster of this machine. The order alternates. Speeds are valid steps a second,
after the first `--warm_up` seconds of updates. Catch is the worst case: its rollouts take about as
long as a call. `CPU a step` is the processor time of all processes of the run. Its ratio is that of
the speeds on a machine whose cores are all busy; other programs disturb it less than they disturb
the speeds. `CGD` has the mean delay of rollouts, in gradient steps, of both: two calls under way
make it larger. `steps an update` differs where the learner does not wait for actors, as in `apex`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.common import Failed
from podracer_jit.workdir import journal

ACTORS = ('--config.num_shards=2', '--config.placement.actors_per_device=2',
          '--config.placement.xla_threads=2', '--config.total_steps=1000000000',
          '--config.optimizer.anneal=False', '--config.env.renew_every_updates=0',
          '--config.checkpoint.every_seconds=0', '--config.log.tensorboard=False')
TASKS = {
    'catch': ('--config=impala_catch', '--config.scheme=impala', '--config.num_minibatches=1'),
    'pong': ('--config=impala_atari:nature_cnn', '--config.scheme=impala',
             '--config.env.task=Pong-v5', '--config.env.num_envs=32', '--config.num_minibatches=2',
             '--config.num_grad_shards=1', '--config.microbatch_rows=0'),
    'apex': ('--config=apex_dqn_catch', '--config.scheme=apex', '--config.num_grad_shards=2'),
}


class Speed(NamedTuple):
  """Speed of a training."""

  steps_per_s: float  # valid steps a second
  cpu_per_step: float  # processor seconds of all its processes for a valid step
  cgd: float  # mean collection-to-gradient delay, in gradient steps
  steps_per_update: float  # valid steps that are made during an update


def cpu_seconds(session: int) -> float:
  """Returns the processor time of all processes of a session, which have not ended."""
  total = 0.0
  for process in psutil.process_iter():
    with contextlib.suppress(ProcessLookupError, psutil.Error):
      if os.getsid(process.pid) == session:
        times = process.cpu_times()
        total += times.user + times.system
  return total


def measure(task: str, cluster: str, workdir: Path, warm_up: float, seconds: float) -> Speed:
  """Trains for a while.

  Args:
    task: a key of TASKS.
    cluster: 'none' or 'ray'.
    workdir: the workdir of the training.
    warm_up: seconds of updates that do not count.
    seconds: seconds that count.

  Raises:
    Failed: the training ended before.
  """
  log = workdir.with_suffix('.txt')
  with log.open('w') as output:
    process = subprocess.Popen(
        [sys.executable, '-m', 'podracer_jit', *TASKS[task], *ACTORS, f'--workdir={workdir}',
         f'--config.placement.cluster={cluster}'], stdout=output, stderr=subprocess.STDOUT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'}, start_new_session=True)
  metrics = workdir / journal.METRICS

  def records_after(least: float) -> list[dict]:
    """Waits until the updates after the first, which includes compiling, took so many seconds."""
    while True:
      if process.poll() is not None:
        raise Failed(process, log)
      records = journal.read_lines(metrics) if metrics.exists() else []
      if len(records) > 1 and records[-1]['elapsed_s'] - records[0]['elapsed_s'] >= least:
        return records
      time.sleep(0.2)

  try:
    first = records_after(warm_up)[-1]
    cpu_start = cpu_seconds(process.pid)
    records = records_after(first['elapsed_s'] - journal.read_lines(metrics)[0]['elapsed_s']
                            + seconds)
    cpu_s = cpu_seconds(process.pid) - cpu_start
  finally:
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
  last = records[-1]
  steps = last['steps'] - first['steps']
  counted = [record['cgd'] for record in records if record['update'] > first['update']]
  return Speed(steps / (last['elapsed_s'] - first['elapsed_s']), cpu_s / steps,
               statistics.mean(counted), steps / (last['update'] - first['update']))


def main(argv: Sequence[str]) -> int:
  """Runs the comparison; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--tasks', default='catch,pong,apex',
                      help=f'tasks among {", ".join(TASKS)}, separated by commas')
  parser.add_argument('--pairs', type=int, default=3)
  parser.add_argument('--warm_up', type=float, default=5.0, help='seconds that do not count')
  parser.add_argument('--seconds', type=float, default=30.0, help='seconds that count')
  args = parser.parse_args(argv[1:])
  for task in args.tasks.split(','):
    if task not in TASKS:
      parser.error(f'--tasks: must be of {", ".join(TASKS)}, got {task}')
  print(f'{"task":8}{"threads":>12}{"Ray":>12}{"Ray / threads":>15}{"lowest":>8}{"highest":>8}'
        f'{"CPU a step":>20}{"ratio":>7}{"CGD":>16}{"steps an update":>18}')
  for task in args.tasks.split(','):
    speeds: dict[str, list[Speed]] = {'none': [], 'ray': []}
    with tempfile.TemporaryDirectory() as folder:
      for pair in range(args.pairs):
        for cluster in (('none', 'ray'), ('ray', 'none'))[pair % 2]:
          try:
            speeds[cluster].append(measure(task, cluster, Path(folder) / f'{cluster}{pair}',
                                           args.warm_up, args.seconds))
          except Failed as error:
            print(f'cluster_speed: {task}, {cluster}: {error}', file=sys.stderr)
            return error.code
    ratios = [ray.steps_per_s / none.steps_per_s
              for none, ray in zip(speeds['none'], speeds['ray'], strict=True)]
    none, ray = (Speed(*map(statistics.median, zip(*speeds[cluster], strict=True)))
                 for cluster in ('none', 'ray'))
    cpu = f'{1e6 * none.cpu_per_step:.0f} to {1e6 * ray.cpu_per_step:.0f} us'
    cgd = f'{none.cgd:.1f} to {ray.cgd:.1f}'
    steps = f'{none.steps_per_update:.0f} to {ray.steps_per_update:.0f}'
    print(f'{task:8}{none.steps_per_s:12,.0f}{ray.steps_per_s:12,.0f}'
          f'{statistics.median(ratios):15.2f}{min(ratios):8.2f}{max(ratios):8.2f}{cpu:>20}'
          f'{none.cpu_per_step / ray.cpu_per_step:7.2f}{cgd:>16}{steps:>18}', flush=True)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
