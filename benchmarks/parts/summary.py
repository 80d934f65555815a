"""Measures all parts of an experiment in turn, and summarises the measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import say
from benchmarks.parts import core_distance, memory_use, timed_parts
from benchmarks.parts.segments import Figures
from podracer_jit.experiment import build
from podracer_jit.workdir import record

BASES = ('environment', 'sync', 'conventional_sync', 'conventional_cleanba')  # to divide by
# By part, the figures of each round, with the distance of two cores before and after it.
Measurements = Mapping[str, Sequence[tuple[Figures, tuple[float, float]]]]


def measure(names: Sequence[str], run: build.Run, seconds: float, rounds: int
            ) -> tuple[Measurements, dict[str, dict[str, float]]]:
  """Builds all parts, then measures each part in every round.

  Args:
    names: the names of the parts.
    run: the run of the experiment.
    seconds: measured time of each part, all rounds together.
    rounds: number of rounds.

  Returns:
    The measurements of each part, and its memory: the largest heap and the computed bytes, in MB.
  """
  measurements = {name: [] for name in names}
  memory = {}
  state = run.initial_state()
  with contextlib.ExitStack() as stack:
    measures = {}
    for name in names:
      say(f'building {name}')
      base, variant_run = timed_parts.of_variant(name, run)
      before_mb = memory_use.in_use()
      needs = memory_use.Needs(variant_run)
      with needs.noting():
        measures[name] = timed_parts.make(base, needs.run, state, stack)
        measures[name](0.0)  # compiles and warms up
      peak_mb = memory_use.most_in_use(functools.partial(measures[name], 0.0))
      memory[name] = dict(peak_mb=peak_mb - before_mb, computed_mb=needs.mb(base))

    before_ns = core_distance.apart_ns()
    for k in range(rounds):
      say(f'round {k + 1} of {rounds}')
      for name in names:
        figures = measures[name](seconds / rounds)
        after_ns = core_distance.apart_ns()
        measurements[name].append((figures, (before_ns, after_ns)))
        before_ns = after_ns
  return measurements, memory


def summarise(measurements: Measurements, unroll_length: int) -> dict[str, Any]:
  """Returns the medians of each part and the ratios between parts."""
  counted, apart_ns = core_distance.comparable(measurements)
  sps = {name: statistics.median(x.sps for x in figures) for name, figures in counted.items()}
  period = {name: statistics.median(x.seconds_per_update for x in figures)
            for name, figures in counted.items()}
  table = {
      name: dict(sps=sps[name], seconds_per_update=period[name],
                 rounds=[x.sps for x in figures], left_out=len(measurements[name]) - len(figures),
                 **{f'to_{base}': sps[name] / sps[base] if base in sps else None
                    for base in BASES})
      for name, figures in counted.items()}
  return dict(parts=table, derived=ratios(period, unroll_length) | shares(sps) | dict(
      cores_apart_ns=apart_ns, rounds_left_out=sum(row['left_out'] for row in table.values())))


def ratios(period: Mapping[str, float], unroll_length: int) -> dict[str, float]:
  """Returns the time of each part over the time of its slower half, and over both halves' sum.

  Args:
    period: seconds an update, by part.
    unroll_length: T.
  """
  by_name = {}

  def compare(name, halves, allowed=1.0):
    if {name, *halves} <= period.keys():
      times = [period[half] for half in halves]
      by_name[f'{name}_to_slower_of_{"_and_".join(halves)}'] = period[name] / (allowed * max(times))
      by_name[f'{name}_to_sum_of_{"_and_".join(halves)}'] = period[name] / sum(times)

  # Two vector environments that take turns are drained once a rollout.
  compare('rollout', ('environment', 'policy'), 1 + 1 / unroll_length)
  for scheme in ('fused', 'sync', 'cleanba'):
    compare(scheme, ('rollout', 'learner'))
  return by_name


def shares(sps: Mapping[str, float]) -> dict[str, float]:
  """Returns the speed of acting and learning in turn, and the shares of the environment's speed."""
  derived = {}
  if {'rollout', 'learner'} <= sps.keys():
    derived['one_after_another_sps'] = 1 / (1 / sps['rollout'] + 1 / sps['learner'])
    if 'environment' in sps:
      derived['environment_share_of_rollout'] = sps['rollout'] / sps['environment']
      derived['environment_share_of_both'] = derived['one_after_another_sps'] / sps['environment']
  return derived


def describe(run: build.Run) -> dict[str, Any]:
  """Returns facts about the machine and the placement, for the figures' file."""
  place = run.place
  return dict(cores=len(os.sched_getaffinity(0)), versions=record.versions(),
              actors=[str(d) for d in place.actors], learners=[str(d) for d in place.learners],
              device_kinds=sorted({d.device_kind for d in (*place.actors, *place.learners)}),
              env_threads=place.env_threads,
              placement=dataclasses.asdict(run.experiment.placement))
