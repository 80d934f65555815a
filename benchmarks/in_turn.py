"""Compares the speed of the working tree with that of an older commit.

.venv/bin/python -m benchmarks.in_turn --old=main~1 --configs=impala_catch,ppo_cartpole --pairs=5

A pair is two measurements of a config by `benchmarks.parts`, one with each code. The order
alternates from pair to pair. For each part, the table has the ratio of the new speed to the old:
the median of the pairs, the lowest and the highest.

A virtual machine may move to cores that are farther apart (`cores_apart_ns` of the benchmark). The
table therefore uses only pairs whose two measurements had about the same distance; if there is no
such pair, it uses all.
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
  """Runs one benchmark with the code of `tree`; returns the figures of its --json.

  Args:
    tree: a folder with the code.
    config: the name of a shipped config.
    parts: the benchmark's parts, separated by commas.
    seconds: measured time of each part.
    figures: the file for --json.

  Raises:
    RuntimeError: the benchmark failed; the message has the last line of its output.
  """
  flags = [f'--config=configs/{config}.py', f'--parts={parts}', f'--seconds={seconds}',
           '--rounds_of=', f'--json={figures}']
  process = subprocess.run([sys.executable, *command(tree), *flags], cwd=tree, check=False,
                           env=os.environ | {'PYTHONPATH': str(tree), 'JAX_PLATFORMS': 'cpu'},
                           text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  if process.returncode:
    raise RuntimeError(f'{tree.name}, {config}: {process.stdout.strip().splitlines()[-1]}')
  return json.loads(figures.read_text())


def command(tree: Path) -> list[str]:
  """Returns Python's arguments for the benchmark of a tree; older commits have it elsewhere."""
  if (tree / 'benchmarks' / 'parts').exists():
    return ['-m', 'benchmarks.parts']
  script = tree / 'scripts' / 'benchmark.py'
  return [str(script)] if script.exists() else ['-m', 'podracer_jit', 'benchmark']


def same_distance(old_figures: dict, new_figures: dict) -> bool:
  """Returns whether the cores were about equally far apart in both; true if it is not known."""
  distances = sorted(figures['derived']['cores_apart_ns'] or 0
                     for figures in (old_figures, new_figures))
  return distances[1] <= SAME_DISTANCE * distances[0]


def table(config: str, pairs: Sequence[tuple[dict, dict]]) -> list[str]:
  """Returns the lines of one config: new over old speed of each part, and the pairs used."""
  counted = [pair for pair in pairs if same_distance(*pair)] or pairs
  lines = []
  for part in counted[0][0]['parts']:
    ratios = [new_figures['parts'][part]['sps'] / old_figures['parts'][part]['sps']
              for old_figures, new_figures in counted]
    lines.append(f'{config:20} {part:10} {statistics.median(ratios):6.3f} {min(ratios):8.3f} '
                 f'{max(ratios):8.3f}   {len(counted)} of {len(pairs)}')
  return lines


def main() -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--old', required=True, help='the commit to compare with')
  parser.add_argument('--configs', default=CONFIGS,
                      help='names of shipped configs, separated by commas')
  parser.add_argument('--parts', default=PARTS,
                      help='parts of `benchmarks.parts`, separated by commas')
  parser.add_argument('--pairs', type=int, default=4,
                      help='measurements of each code; with an even number each is first as often')
  parser.add_argument('--seconds', type=float, default=5.0, help='measured time of each part')
  args = parser.parse_args()
  try:
    with tempfile.TemporaryDirectory(prefix='in-turn-') as folder:
      with old_and_new(args.old, Path(folder)) as trees:
        print('config               part       median   lowest  highest   pairs', flush=True)
        for config in args.configs.split(','):
          pairs = []
          for i in range(args.pairs):
            first = i % 2
            # By index in `trees`: 0 is the older code.
            figures = {index: measure(trees[index], config, args.parts, args.seconds,
                                      Path(folder) / 'figures.json')
                       for index in (first, 1 - first)}
            pairs.append((figures[0], figures[1]))
          print(*table(config, pairs), sep='\n', flush=True)
  except (ValueError, RuntimeError) as error:
    print(error, file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
