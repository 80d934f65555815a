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
from benchmarks.parts.rounds import Round
from benchmarks.parts.segments import Figures, Measure
from podracer_jit.experiment import build
from podracer_jit.types import TrainState
from podracer_jit.workdir import record

BASES = ('environment', 'sync', 'conventional_sync', 'conventional_cleanba')  # to divide by
# By part, the figures of each round, with the distance of two cores before and after it.
Measurements = Mapping[str, Sequence[tuple[Figures, tuple[float, float]]]]


class Measured:
  """The figures of a measurement, which grow while other threads read them.

  Attributes:
    rounds: by part, the figures of each round, with the distance of two cores before and after.
    memory: by part, the largest heap and the computed bytes, in MB.
    round: a round of a scheme, split into parts; None if there is none yet.
  """

  def __init__(self) -> None:
    """Begins with nothing."""
    self.rounds: dict[str, list[tuple[Figures, tuple[float, float]]]] = {}
    self.memory: dict[str, dict[str, float | None]] = {}
    self.round: Round | None = None

  def result(self, unroll_length: int) -> dict[str, Any]:
    """Returns the figures of all parts that were measured; see `summarise`."""
    rounds = {name: list(figures) for name, figures in dict(self.rounds).items()}
    result = summarise(rounds, unroll_length)
    for name, row in result['parts'].items():
      row |= self.memory[name]
    return result


def measure(names: Sequence[str], run: build.Run, seconds: float, rounds: int,
            measured: Measured) -> None:
  """Builds the parts one after the other, and measures each of them in every round.

  In the first round, a part is measured as soon as it is built.

  Args:
    names: the names of the parts.
    run: the run of the experiment.
    seconds: measured time of each part, all rounds together.
    rounds: number of rounds.
    measured: receives the measurements.
  """
  state = run.initial_state()
  measures: dict[str, Measure] = {}
  with contextlib.ExitStack() as stack:
    for k in range(rounds):
      before_ns = core_distance.apart_ns()
      for name in names:
        if not k:
          say(f'building {name}')
          measures[name], measured.memory[name] = build_part(name, run, state, stack)
          before_ns = core_distance.apart_ns()
        figures = measures[name](seconds / rounds)
        after_ns = core_distance.apart_ns()
        measured.rounds.setdefault(name, []).append((figures, (before_ns, after_ns)))
        before_ns = after_ns
        say(f'{name}: {figures.sps:,.0f} SPS'
            + (f' (round {k + 1} of {rounds})' if rounds > 1 else ''))


def build_part(name: str, run: build.Run, state: TrainState, stack: contextlib.ExitStack
               ) -> tuple[Measure, dict[str, float | None]]:
  """Builds a part and calls it twice; returns its measurement and its memory.

  Args:
    name: the name of the part.
    run: the run of the experiment.
    state: the part begins with a copy of it.
    stack: closes the part.
  """
  base, variant_run = timed_parts.of_variant(name, run)
  before_mb = memory_use.in_use()
  needs = memory_use.Needs(variant_run)
  with needs.noting():
    call = timed_parts.make(base, needs.run, state, stack)
    call(0.0)  # compiles and warms up
  peak_mb = memory_use.most_in_use(functools.partial(call, 0.0))
  return call, dict(peak_mb=peak_mb - before_mb, computed_mb=needs.mb(base))


def summarise(measurements: Measurements, unroll_length: int) -> dict[str, Any]:
  """Returns the medians of each part and the ratios between parts; at least one was measured."""
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
