"""Measures what evaluations cost a training that goes on meanwhile (`eval.every_updates`).

.venv/bin/python -m benchmarks.evaluations --config=ppo_cartpole --every_updates=100 --pairs=5

A pair is two trainings of the same config, one with evaluations and one without, each in a process
of its own; the order alternates. Both have a checkpoint every --every_updates updates, since an
update that is evaluated has one. Seconds are from the first update to the last one, so programs are
compiled before. The receipts of both must be equal.

`waits` is the time for which training waited at a checkpoint until an earlier evaluation was done
(`eval_wait_s` in metrics.jsonl). The rest of the difference is that both share the cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from podracer_jit.training import evaluator
from podracer_jit.workdir import journal

PROGRAM = """
import json, sys, time
import podracer_jit as pj

name, workdir, every_updates, saved_every, episodes, total_steps = sys.argv[1:]
config = pj.load_config(name)
config.eval.every_updates = int(every_updates)
config.checkpoint.every_updates = int(saved_every)
config.eval.num_episodes = int(episodes)
config.log.tensorboard = False
if int(total_steps):
  config.total_steps = int(total_steps)
times = []
pj.train(config, workdir, callbacks=[lambda record: times.append(time.monotonic())], quiet=True)
print(json.dumps(times[-1] - times[0]))
"""


class Training(NamedTuple):
  """One training."""

  seconds: float  # from the first update to the last
  evaluations: list[evaluator.Record]
  receipts: dict
  waits_s: float  # for evaluations


def train(args: argparse.Namespace, every_updates: int) -> Training:
  """Trains in a process of its own.

  Raises:
    RuntimeError: the training failed; the message has its last line.
  """
  with tempfile.TemporaryDirectory() as folder:
    workdir = Path(folder) / 'run'
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, args.config, workdir, str(every_updates),
         str(args.every_updates), str(args.episodes), str(args.total_steps)],
        capture_output=True, text=True, check=False)
    if done.returncode:
      raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return Training(json.loads(done.stdout.splitlines()[-1]), evaluator.read(workdir),
                    journal.read_receipts(workdir).by_update,
                    sum(line.get('eval_wait_s', 0.0)
                        for line in journal.read_lines(workdir / journal.METRICS)))


def main() -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--config', default='ppo_cartpole', help='a shipped config or a file')
  parser.add_argument('--every_updates', type=int, default=100,
                      help='eval.every_updates, and checkpoint.every_updates')
  parser.add_argument('--episodes', type=int, default=20, help='episodes of an evaluation')
  parser.add_argument('--total_steps', type=int, default=0, help="0: the config's")
  parser.add_argument('--pairs', type=int, default=5, help='trainings with and without')
  args = parser.parse_args()
  ratios = []
  for number in range(args.pairs):
    order = [args.every_updates, 0] if number % 2 else [0, args.every_updates]
    trainings = {every_updates: train(args, every_updates) for every_updates in order}
    without = trainings[0]
    with_evaluations = trainings[args.every_updates]
    if without.receipts != with_evaluations.receipts:
      print('the receipts differ', file=sys.stderr)
      return 1
    ratios.append(with_evaluations.seconds / without.seconds)
    records = with_evaluations.evaluations
    evaluation_s = statistics.median(record['seconds'] for record in records)
    print(f'pair {number + 1}: {without.seconds:.1f} s without, {with_evaluations.seconds:.1f} s '
          f'with {len(records)} evaluations of {evaluation_s:.1f} s; waits '
          f'{with_evaluations.waits_s:.1f} s',
          flush=True)
  print(f'ratio: median {statistics.median(ratios):.3f} (from {min(ratios):.3f} to '
        f'{max(ratios):.3f}); equal receipts')
  return 0


if __name__ == '__main__':
  sys.exit(main())
