"""Says how fast the code here is beside that of an older commit, one after the other in turn.

.venv/bin/python -m benchmarks.in_turn --old=main~1 --configs=impala_catch,ppo_cartpole --pairs=5

Each pair measures a config once with each commit's `podracer_jit benchmark`, and the older goes
first in every second pair only. The table has, for each part, the new speed over the old: the
median of the pairs, the lowest and the highest. It counts the pairs in which the machine's cores
were as far apart in both measurements, for a virtual machine moves them (`cores_apart_ns` of the
benchmark), unless there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trees import old_and_new

CONFIGS = 'impala_catch,ppo_cartpole,ppo_mujoco_fast,pong_laptop,apex_dqn_catch'
PARTS = 'rollout,learner,sync,cleanba'
SAME_DISTANCE = 1.5  # near cores are about 90 ns apart, far ones 250 to 520


def measure(tree: Path, config: str, parts: str, seconds: float, figures: Path) -> dict:
  """Returns the figures of one benchmark with the code of `tree`, as its --json has them.

  Raises:
    RuntimeError: with its last line, where it failed.
  """
  script = tree / 'scripts' / 'benchmark.py'  # before it was a verb of the command
  start = [str(script)] if script.exists() else ['-m', 'podracer_jit', 'benchmark']
  flags = [f'--config=configs/{config}.py', f'--parts={parts}', f'--seconds={seconds}',
           '--rounds_of=', f'--json={figures}']
  done = subprocess.run([sys.executable, *start, *flags], cwd=tree, check=False, text=True,
                        env=os.environ | {'PYTHONPATH': str(tree), 'JAX_PLATFORMS': 'cpu'},
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  if done.returncode:
    raise RuntimeError(f'{tree.name}, {config}: {done.stdout.strip().splitlines()[-1]}')
  return json.loads(figures.read_text())


def same_distance(old: dict, new: dict) -> bool:
  """Whether both were measured with cores as far apart; true where that is not known."""
  distances = sorted(figures['derived']['cores_apart_ns'] or 0 for figures in (old, new))
  return distances[1] <= SAME_DISTANCE * distances[0]


def table(config: str, pairs: Sequence[tuple[dict, dict]]) -> list[str]:
  """The lines of one config: new over old of each part, and how many pairs they count."""
  counted = [pair for pair in pairs if same_distance(*pair)] or pairs
  lines = []
  for part in counted[0][0]['parts']:
    ratios = [new['parts'][part]['sps'] / old['parts'][part]['sps'] for old, new in counted]
    lines.append(f'{config:20} {part:10} {statistics.median(ratios):6.3f} {min(ratios):8.3f} '
                 f'{max(ratios):8.3f}   {len(counted)} of {len(pairs)}')
  return lines


def main() -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--old', required=True, help='the commit to compare with')
  parser.add_argument('--configs', default=CONFIGS, help='shipped configs, by comma')
  parser.add_argument('--parts', default=PARTS, help="the benchmark's parts, by comma")
  parser.add_argument('--pairs', type=int, default=4, help='an even number is fair to both')
  parser.add_argument('--seconds', type=float, default=5.0, help='measured time of each part')
  args = parser.parse_args()
  try:
    with tempfile.TemporaryDirectory(prefix='in-turn-') as folder:
      with old_and_new(args.old, Path(folder)) as trees:
        print('config               part       median   lowest  highest   pairs', flush=True)
        for config in args.configs.split(','):
          pairs = []
          for i in range(args.pairs):
            figures = [measure(trees[which], config, args.parts, args.seconds,
                               Path(folder) / 'figures.json') for which in (i % 2, 1 - i % 2)]
            pairs.append((figures[i % 2], figures[1 - i % 2]))
          print(*table(config, pairs), sep='\n', flush=True)
  except (ValueError, RuntimeError) as error:
    print(error, file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
