"""Compares `fused` on gymnax's CartPole with a program of PureJaxRL's shape, in turn.

.venv/bin/python -m benchmarks.anakin [--num_envs=4] [--pairs=7] [--updates=100]

The other program is `benchmarks/peers/programs/scanned.py`. Both make the same number of updates of
the same size in a call, in one process: that is more precise than `benchmarks.peers`, which
measures whole commands. The script prints steps a second and their ratio: the median of the pairs,
the lowest and the highest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax

from benchmarks.peers.programs import scanned
from podracer_jit import experiment
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import resolve

STEPS = 128
EPOCHS = 4
MINIBATCHES = 4


def our_experiment(num_envs: int, updates: int) -> Any:
  """Returns the same experiment for this package; a call makes `updates` updates."""
  config = experiment.config('ppo', 'mlp', 'adam', scheme='fused', unroll_length=STEPS,
                             num_epochs=EPOCHS, num_minibatches=MINIBATCHES)
  config.env.task = 'gymnax:CartPole-v1'
  config.env.num_envs = num_envs
  config.network.separate_critic = True
  config.loss.clip = 0.2
  config.loss.clip_value = True
  config.optimizer.learning_rate = 2.5e-4
  config.optimizer.anneal = False
  config.total_steps = 2**30
  config.env.renew_every_updates = 0
  config.placement.updates_per_call = updates
  config.placement.xla_threads = 2
  return resolve(config)


def main() -> None:
  """Runs the script."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--num_envs', type=int, default=4)
  parser.add_argument('--pairs', type=int, default=7)
  parser.add_argument('--updates', type=int, default=100, help='updates of a call')
  args = parser.parse_args()
  measured = our_experiment(args.num_envs, args.updates)
  run = build.make_run(measured)
  first, train = scanned.program(measured.fields, args.updates)
  state = first(jax.random.key(0))
  train = jax.jit(train)
  steps = args.num_envs * STEPS * args.updates

  def fire_scanned() -> float:
    nonlocal state
    start = time.perf_counter()
    state, rewards = jax.block_until_ready(train(state))
    del rewards
    return steps / (time.perf_counter() - start)

  reports: list[Any] = []
  with build.segment(run, build.Snapshot(run.initial_state()), 10**6, reports.append) as segment:
    worker = next(worker for worker in segment.workers if worker.name == 'learner')
    ours = worker.state

    def fire_ours() -> float:
      nonlocal ours
      start = time.perf_counter()
      ours, outputs = worker.fire(ours)
      jax.block_until_ready(outputs)
      return steps / (time.perf_counter() - start)

    # The first call of each compiles or warms up.
    pairs = [(fire_scanned(), fire_ours()) for _ in range(args.pairs + 1)][1:]
  ratios = sorted(ours / scanned for scanned, ours in pairs)
  print(f'{args.num_envs} environments x {STEPS} steps: scanned '
        f'{statistics.median(scanned for scanned, _ in pairs):,.0f} steps/s, fused '
        f'{statistics.median(ours for _, ours in pairs):,.0f}; ratio '
        f'{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})')


if __name__ == '__main__':
  main()
