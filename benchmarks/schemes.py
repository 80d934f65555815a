"""What each scheme does to speed and to the age of the data, by the number of workers.

.venv/bin/python -m benchmarks.schemes --config=configs/ppo_cartpole.py --workers=1,2,4 --seconds=10

As figure 4 of NAPPO (2007.02622): frames a second, CGD and GUD. Takes --config and its overrides as
the main binary does; env.num_envs, num_shards and num_grad_shards are those of one worker, and each
worker is a device of its own: makes rollouts (impala, sync, cleanba), or those and gradients (the
others). rapid and rapid_async have as many of either. The first two updates of each worker (of
`fused`: calls) are not counted. --json writes all figures.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags, logging

from podracer_jit import loops
from podracer_jit.run import build, command_line
from podracer_jit.run.experiment import Experiment
from podracer_jit.run.resolve import changed, resolve
from podracer_jit.runtime import host
from podracer_jit.schemes.reports import Report
from podracer_jit.schemes.table import SCHEMES


class Figures(NamedTuple):
  """Of one scheme with so many workers."""

  scheme: str
  workers: int
  fps: float  # frames a second: valid steps, times the frame skip
  cgd: float  # mean over gradient steps
  gud: float
  updates: int  # that were counted


def placed(experiment: Experiment, scheme: str, workers: int) -> Experiment:
  """The experiment with this scheme for `workers` of them."""
  devices = tuple(range(workers))
  apart = SCHEMES[scheme].graph.separate_updates or SCHEMES[scheme].colocated
  return changed(
      experiment,
      scheme=scheme, total_steps=2**30,
      env=dict(num_envs=experiment.env.num_envs * workers),
      placement=dict(actor_devices=devices, learner_devices=devices if apart else (0,),
                     xla_threads=max(experiment.placement.xla_threads, workers)),
      num_shards=experiment.num_shards * workers,
      num_grad_shards=experiment.num_grad_shards * workers)


def prepare_host(experiment: Experiment, workers: int) -> None:
  """Starts JAX with a device for each of so many workers."""
  options = experiment.placement
  host.prepare_host(dataclasses.replace(
      options, actor_devices=tuple(range(workers)), learner_devices=(0,),
      xla_threads=max(options.xla_threads, workers)))


def measure(experiment: Experiment, seconds: float) -> Figures:
  """Trains for so long and says how it went."""
  run = build.make_run(experiment)
  workers, seen = len(experiment.placement.actor_devices), []

  def report(item: Report) -> None:  # of `fused`: of a whole call
    if not jax.device_get(item.metrics.get('sampled', [1]))[item.count - 1]:
      return  # a replay that is being filled
    steps = int(jax.device_get(item.metrics['steps'])[item.count - 1])
    seen.append((time.perf_counter(), steps, *(sum(x) / item.count for x in (item.cgd, item.gud)),
                 item.count))

  def stop() -> bool:
    return len(seen) > 2 * workers + 1 and seen[-1][0] - seen[2 * workers][0] >= seconds

  state = run.learner.allocate(run.initial_state())
  with build.segment(run, state, 0, 10**9, report, stop) as segment:
    loops.run(segment.workers)
  (start, first, *_), *counted = seen[2 * workers:]
  fps = (counted[-1][1] - first) / (counted[-1][0] - start) * experiment.spec.frame_skip
  cgd, gud = (sum(row[i] for row in counted) / len(counted) for i in (2, 3))
  return Figures(experiment.scheme_name, workers, fps, cgd, gud, sum(row[-1] for row in counted))


def main(argv: Sequence[str]) -> int:
  """Runs the script; returns its exit code."""
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
  logging.set_verbosity(logging.ERROR)
  values = flags.FlagValues()
  flags.DEFINE_list('schemes', None, 'Which to measure; all that can learn the loss by default.',
                    flag_values=values)
  flags.DEFINE_list('workers', ['1', '2', '4'], 'How many of them.', flag_values=values)
  flags.DEFINE_float('seconds', 10.0, 'For each.', lower_bound=0.0, flag_values=values)
  flags.DEFINE_string('json', None, 'Write all figures here.', flag_values=values)
  try:
    config = command_line.parse(argv, values)
    if config is None:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    experiment = resolve(config)
    with_replay = experiment.algorithm.learns_from_replay
    schemes = values.schemes or [name for name, scheme in SCHEMES.items()
                                 if scheme.replay in (None, with_replay)]
    for name in set(schemes) - set(SCHEMES):
      raise ValueError(f'--schemes: there is no {name!r}; known are {", ".join(SCHEMES)}')
    counts = [int(count) for count in values.workers]
    prepare_host(experiment, max(counts))
    found = []
    print(f'{"scheme":12} workers        FPS      CGD    GUD  updates')
    for scheme in schemes:
      for count in [1] if SCHEMES[scheme].alone else counts:
        found.append(measure(placed(experiment, scheme, count), values.seconds))
        print('{:12} {:7} {:10,.0f} {:8.2f} {:6.2f} {:8}'.format(*found[-1]), flush=True)
  except ValueError as error:
    print(f'schemes: {error}', file=sys.stderr)
    return 2
  if values.json:
    Path(values.json).write_text(json.dumps([x._asdict() for x in found], indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
