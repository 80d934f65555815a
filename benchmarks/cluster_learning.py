"""Does IMPALA learn on machines that it calls as it learns with threads?

.venv/bin/python -m benchmarks.cluster_learning --tasks=catch,cartpole --seeds=1,2,3

Each seed is trained twice with the same two actors: as threads, and as processes on a Ray cluster
of three simulated machines, one for the learner and one for each actor. The table has the mean
return of the last tenth of the updates of each run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import Failed
from podracer_jit.workdir import journal
from tests.ray_nodes import Nodes

ACTORS = ('--config.scheme=impala', '--config.num_shards=2',
          '--config.placement.actors_per_device=2', '--config.log.tensorboard=False')
CONFIGS = {'catch': 'impala_catch', 'cartpole': 'impala_cartpole'}


def train(config: str, seed: int, cluster: str, workdir: Path, variables: Mapping[str, str],
          flags: Sequence[str]) -> float:
  """Trains to the end.

  Args:
    config: name of a shipped config.
    seed: of the run.
    cluster: 'none' or 'ray'.
    workdir: of the run.
    variables: of the environment, which say where the cluster is.
    flags: more flags.

  Returns:
    The mean return of the last tenth of the updates.

  Raises:
    Failed: the run has failed.
  """
  log = workdir.with_suffix('.txt')
  with log.open('w') as output:
    process = subprocess.Popen(
        [sys.executable, '-m', 'podracer_jit', f'--config={config}', *ACTORS, *flags,
         f'--config.seed={seed}', f'--config.placement.cluster={cluster}',
         f'--workdir={workdir}'], stdout=output, stderr=subprocess.STDOUT,
        env=os.environ | dict(variables) | {'JAX_PLATFORMS': 'cpu'})
    process.wait()
  if process.returncode:
    raise Failed(process, log)
  records = journal.read_lines(workdir / journal.METRICS)
  last = records[-max(1, len(records) // 10):]
  return float(np.mean([record['episode_return'] for record in last]))


def main(argv: Sequence[str]) -> int:
  """Trains, and prints the table; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--tasks', default='catch,cartpole', help=f'of {", ".join(CONFIGS)}')
  parser.add_argument('--seeds', default='1,2,3')
  parser.add_argument('flags', nargs='*', help='more flags of the training, after --')
  args = parser.parse_args(argv[1:])
  seeds = [int(seed) for seed in args.seeds.split(',')]
  print(f'{"task":10}{"actors":10}' + ''.join(f'{f"seed {seed}":>10}' for seed in seeds))
  with Nodes() as nodes, tempfile.TemporaryDirectory() as folder:
    for _ in range(2):
      nodes.add(1)
    for task in args.tasks.split(','):
      for cluster, name in (('none', 'threads'), ('ray', 'machines')):
        try:
          returns = [train(CONFIGS[task], seed, cluster, Path(folder) / f'{task}{cluster}{seed}',
                           nodes.variables, args.flags) for seed in seeds]
        except Failed as error:
          print(f'cluster_learning: {task}, {name}: {error}', file=sys.stderr)
          return error.code
        print(f'{task:10}{name:10}' + ''.join(f'{mean:10.2f}' for mean in returns), flush=True)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
