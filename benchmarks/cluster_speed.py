"""Compares the speed of actors that are threads with that of actors on a Ray cluster, in turn.

.venv/bin/python -m benchmarks.cluster_speed --tasks=catch,pong --pairs=3 --seconds=30

A pair is two trainings of the same experiment with the same two actors: one with threads, one with
processes on a Ray cluster of this machine. The order alternates. Speeds are valid steps a second,
after the first `--warm_up` seconds of updates. Catch is the worst case: its rollouts take about as
long as a call. The last column has the mean CGD (delay of rollouts, in gradient steps) of both: two
calls under way make it larger.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Failed
from podracer_jit.run import journal

ACTORS = ('--config.scheme=impala', '--config.num_shards=2',
          '--config.placement.actors_per_device=2',
          '--config.placement.xla_threads=2', '--config.total_steps=1000000000',
          '--config.optimizer.anneal=False', '--config.checkpoint.every_updates=1000000',
          '--config.log.tensorboard=False')
TASKS = {
    'catch': ('--config=impala_catch', '--config.num_minibatches=1'),
    'pong': ('--config=impala_atari:nature_cnn', '--config.env.task=Pong-v5',
             '--config.env.num_envs=32', '--config.num_minibatches=2',
             '--config.num_grad_shards=1', '--config.microbatch_rows=0'),
}


def measure(task: str, cluster: str, workdir: Path, warm_up: float, seconds: float
            ) -> tuple[float, float]:
  """Trains for a while.

  Args:
    task: of TASKS.
    cluster: 'none' or 'ray'.
    workdir: of the training.
    warm_up: seconds of updates that do not count.
    seconds: that count.

  Returns:
    Valid steps a second, and the mean CGD of updates, in gradient steps.

  Raises:
    Failed: the training ended before.
  """
  log = workdir.with_suffix('.txt')
  with log.open('w') as output:
    process = subprocess.Popen(
        [sys.executable, '-m', 'podracer_jit', *TASKS[task], *ACTORS, f'--workdir={workdir}',
         f'--config.placement.cluster={cluster}'], stdout=output, stderr=subprocess.STDOUT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'})
  records: list[dict] = []
  try:
    # The first update includes compiling.
    while len(records) < 2 or records[-1]['elapsed_s'] - records[0]['elapsed_s'] < (
        warm_up + seconds):
      if process.poll() is not None:
        raise Failed(process, log)
      time.sleep(0.5)
      path = workdir / journal.METRICS
      records = journal.read_lines(path) if path.exists() else []
  finally:
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
  start = records[0]['elapsed_s'] + warm_up
  counted = [record for record in records if record['elapsed_s'] >= start]
  first = counted[0]
  last = counted[-1]
  speed = (last['steps'] - first['steps']) / (last['elapsed_s'] - first['elapsed_s'])
  return speed, statistics.mean(record['cgd'] for record in counted)


def main(argv: Sequence[str]) -> int:
  """Runs the comparison; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--tasks', default='catch,pong',
                      help=f'tasks among {", ".join(TASKS)}, separated by commas')
  parser.add_argument('--pairs', type=int, default=3)
  parser.add_argument('--warm_up', type=float, default=5.0, help='seconds that do not count')
  parser.add_argument('--seconds', type=float, default=30.0, help='seconds that count')
  args = parser.parse_args(argv[1:])
  for task in args.tasks.split(','):
    if task not in TASKS:
      parser.error(f'--tasks: must be of {", ".join(TASKS)}, got {task}')
  print(f'{"task":8}{"threads":>12}{"Ray":>12}{"Ray / threads":>15}{"lowest":>8}{"highest":>8}'
        f'{"CGD":>16}')
  for task in args.tasks.split(','):
    speeds: dict[str, list[float]] = {'none': [], 'ray': []}
    cgds: dict[str, list[float]] = {'none': [], 'ray': []}
    with tempfile.TemporaryDirectory() as folder:
      for pair in range(args.pairs):
        for cluster in (('none', 'ray'), ('ray', 'none'))[pair % 2]:
          try:
            speed, cgd = measure(task, cluster, Path(folder) / f'{cluster}{pair}', args.warm_up,
                                 args.seconds)
          except Failed as error:
            print(f'cluster_speed: {task}, {cluster}: {error}', file=sys.stderr)
            return error.code
          speeds[cluster].append(speed)
          cgds[cluster].append(cgd)
    ratios = [ray / none for none, ray in zip(speeds['none'], speeds['ray'], strict=True)]
    medians = [statistics.median(speeds[cluster]) for cluster in ('none', 'ray')]
    delays = ' to '.join(f'{statistics.mean(cgds[cluster]):.1f}' for cluster in ('none', 'ray'))
    print(f'{task:8}{medians[0]:12,.0f}{medians[1]:12,.0f}{statistics.median(ratios):15.2f}'
          f'{min(ratios):8.2f}{max(ratios):8.2f}{delays:>16}', flush=True)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
