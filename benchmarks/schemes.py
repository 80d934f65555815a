"""Measures the speed of each scheme and the age of its data, for several numbers of workers.

.venv/bin/python -m benchmarks.schemes --config=configs/ppo_cartpole.py --workers=1,2,4 --seconds=10

Like figure 4 of NAPPO (arXiv:2007.02622), the table has frames a second, CGD and GUD. The script
takes --config and its overrides as training does; env.num_envs, num_shards and num_grad_shards are
those of one worker. Each worker has its own device. It makes rollouts only (schemes with a separate
learner), or rollouts and gradients. Schemes with gradient workers of their own (rapid and
rapid_async) have as many of these as actors. The first two updates of each worker are a warm-up and
are not counted; for `fused`, the first two calls. --json writes all figures.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags

from benchmarks.common import parse_config
from podracer_jit import loops
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import changed, resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.runtime import host
from podracer_jit.schemes.reports import Report
from podracer_jit.schemes.table import SCHEMES


class Figures(NamedTuple):
  """The figures of one scheme with one number of workers."""

  scheme: str
  workers: int
  fps: float  # frames a second: valid steps, times the frame skip
  cgd: float  # mean over gradient steps
  gud: float
  updates: int  # the number of counted updates


class _Measured(NamedTuple):
  """A report of an update (or of the updates of one call) of a training."""

  seconds: float  # time of the report
  steps: int  # valid steps since the beginning
  cgd: float  # mean over the gradient steps
  gud: float
  updates: int


def placed(experiment: Experiment, scheme: str, workers: int) -> Experiment:
  """Returns the experiment with this scheme, made larger for so many workers."""
  devices = tuple(range(workers))
  apart = SCHEMES[scheme].graph.separate_updates or SCHEMES[scheme].colocated
  return changed(
      experiment,
      scheme=scheme, total_steps=2**30,
      env=dict(num_envs=experiment.env.num_envs * workers, renew_every_updates=0),
      placement=dict(actor_devices=devices, learner_devices=devices if apart else (0,),
                     xla_threads=max(experiment.placement.xla_threads, workers)),
      num_shards=experiment.num_shards * workers,
      num_grad_shards=experiment.num_grad_shards * workers)


def prepare_host(experiment: Experiment, workers: int) -> None:
  """Starts JAX with a device for each worker."""
  options = experiment.placement
  host.prepare_host(dataclasses.replace(
      options, actor_devices=tuple(range(workers)), learner_devices=(0,),
      xla_threads=max(options.xla_threads, workers)), experiment.numerics.deterministic)


def measure(experiment: Experiment, seconds: float) -> Figures:
  """Trains for so many seconds after a warm-up; returns the figures."""
  run = build.make_run(experiment)
  workers = len(experiment.placement.actor_devices)
  warm_up = 2 * workers
  measured: list[_Measured] = []

  def report(item: Report) -> None:  # `fused` reports a whole call, of several updates
    if not jax.device_get(item.metrics.get('sampled', [1] * item.count))[item.count - 1]:
      return  # the replay is still being filled
    steps = int(jax.device_get(item.metrics['steps'])[item.count - 1])
    measured.append(_Measured(time.perf_counter(), steps, sum(item.cgd) / item.count,
                              sum(item.gud) / item.count, item.count))

  def is_over() -> bool:
    if len(measured) <= warm_up + 1:
      return False
    return measured[-1].seconds - measured[warm_up].seconds >= seconds

  state = run.learner.allocate(run.initial_state())
  events = build.Events(after=lambda position, wait_written: is_over())
  with build.segment(run, build.Snapshot(state), 10**9, report, events) as segment:
    loops.run(segment.workers)

  # The last report of the warm-up only starts the clock.
  start, *counted = measured[warm_up:]
  steps_per_s = (counted[-1].steps - start.steps) / (counted[-1].seconds - start.seconds)
  return Figures(
      experiment.scheme_name, workers,
      fps=steps_per_s * experiment.spec.frame_skip,
      cgd=sum(row.cgd for row in counted) / len(counted),
      gud=sum(row.gud for row in counted) / len(counted),
      updates=sum(row.updates for row in counted))


def main(argv: Sequence[str]) -> int:
  """Runs the script; returns its exit code."""
  values = flags.FlagValues()
  flags.DEFINE_list('schemes', None, 'Schemes to measure; default: all that support the loss.',
                    flag_values=values)
  flags.DEFINE_list('workers', ['1', '2', '4'], 'Numbers of workers.', flag_values=values)
  flags.DEFINE_float('seconds', 10.0, 'Measured time of each scheme and number of workers.',
                     lower_bound=0.0, flag_values=values)
  flags.DEFINE_string('json', None, 'A file for all figures.', flag_values=values)
  try:
    config = parse_config(argv, values, __doc__)
    if config is None:
      return 0
    experiment = resolve(config)
    with_replay = experiment.algorithm.learns_from_replay
    schemes = values.schemes or [name for name, scheme in SCHEMES.items()
                                 if scheme.replay in (None, with_replay)]
    for name in set(schemes) - set(SCHEMES):
      raise ValueError(f'--schemes: unknown scheme {name!r}; known are {", ".join(SCHEMES)}')
    counts = [int(count) for count in values.workers]
    prepare_host(experiment, max(counts))
    rows = []
    print(f'{"scheme":12} workers        FPS      CGD    GUD  updates')
    for scheme in schemes:
      for count in [1] if SCHEMES[scheme].alone else counts:
        rows.append(measure(placed(experiment, scheme, count), values.seconds))
        print('{:12} {:7} {:10,.0f} {:8.2f} {:6.2f} {:8}'.format(*rows[-1]), flush=True)
  except ValueError as error:
    print(f'schemes: {error}', file=sys.stderr)
    return 2
  if values.json:
    Path(values.json).write_text(json.dumps([row._asdict() for row in rows], indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
