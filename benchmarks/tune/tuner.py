"""Trains with one placement after the other, and searches for the fastest."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks.common import say
from benchmarks.parts import core_distance
from benchmarks.parts.segments import copy_of, small_replay
from benchmarks.tune.candidates import Candidate, Machine, as_text, own_of, placed, vary
from benchmarks.tune.search import LAST_ROUNDS, Figures, Search, search
from podracer_jit import loops
from podracer_jit.experiment import build, memory
from podracer_jit.experiment.config_dict import plain
from podracer_jit.experiment.resolve import changed, placement_of, resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.runtime import host
from podracer_jit.runtime.placement import PlacementOptions
from podracer_jit.schemes.reports import Report
from podracer_jit.training.meter import Meter
from podracer_jit.types import TrainState


class Tuner:
  """Trains with one placement after the other; placements share programs where they can."""

  def __init__(self, experiment: Experiment):
    """Creates a tuner; measures nothing.

    Args:
      experiment: the experiment that `prepare` returned.
    """
    self.experiment = experiment
    self._runs: dict[Candidate, build.Run] = {}
    self._shared: dict[tuple[int, ...], build.Run] = {}  # by learner devices
    self._state: TrainState | None = None

  def run(self, candidate: Candidate) -> build.Run:
    """Returns the run of a candidate.

    Candidates with the same learner devices share the learner program.

    Raises:
      ValueError: the config cannot have this placement.
    """
    if candidate not in self._runs:
      run = build.make_run(placed(self.experiment, candidate))
      memory.check(run)
      shared = self._shared.setdefault(candidate.learner_devices, run)
      self._runs[candidate] = dataclasses.replace(
          shared, experiment=run.experiment, place=run.place)
    return self._runs[candidate]

  def measure(self, candidate: Candidate, seconds: float) -> Figures:
    """Trains for `seconds` in fresh environments; the speed is 0 if the device lacks memory."""
    run = self.run(candidate)
    if self._state is None:
      self._state = run.initial_state()
    try:
      return train(run, self._state, seconds)
    except loops.Stuck as error:
      # Nothing can end those threads, and a normal exit would wait for them.
      say(f'{error.__cause__!r}; {error}')
      os._exit(1)
    except jax.errors.JaxRuntimeError as error:
      say(f'failed: {str(error).splitlines()[0]}')
      return Figures(0.0, 0.0)


def warm_up(run: build.Run) -> int:
  """Returns the number of first reports to skip, until the channels are full."""
  scheme = run.experiment.scheme
  if scheme.each:
    return 2 * len(run.place.workers)
  # While the first update is compiled, actors make as many rollouts as the channels allow: the lag,
  # or else one in the queue and one that waits to be put.
  return 2 if scheme.lag is None else scheme.lag


def train(run: build.Run, state: TrainState, seconds: float) -> Figures:
  """Trains from a copy of the state, which has no replay, until `seconds` were counted."""
  first = warm_up(run)
  times = []  # (time, steps) of each report

  def report(item: Report) -> None:
    # Computing the statistics is a part of training.
    *_, (record, _) = meter.records(item._replace(waits=segment.waits()))
    # Updates that only fill a replay do not count.
    if record.get('sampled', 1):
      times.append((time.perf_counter(), record['steps']))

  def is_over() -> bool:
    return len(times) > first + 1 and times[-1][0] - times[first][0] >= seconds

  state = copy_of(state, run)
  events = build.Events(after=lambda position, wait_written: is_over())
  with build.segment(run, build.Snapshot(state), 10**9, report, events) as segment:
    meter = Meter(run.experiment, {})
    loops.run(segment.workers)
  start_s, start_steps = times[first]
  end_s, end_steps = times[-1]
  elapsed = end_s - start_s
  return Figures((end_steps - start_steps) / elapsed, elapsed)


def prepare(config: Mapping[str, Any]) -> tuple[Experiment, Candidate]:
  """Returns the experiment to measure, on one device, and the placement of its config.

  The experiment does not end, and its replay is small. The config's placement may be impossible.

  Raises:
    ValueError: the config is wrong, or the scheme has no single speed.
  """
  config_place = placement_of(config)
  fields = plain(config)
  one_device = dict(actor_devices=(0,), learner_devices=(0,), actors_per_device=1)
  experiment = resolve(fields | {'placement': dict(fields.get('placement', {})) | one_device})
  if experiment.scheme.graph.free_rates:
    raise ValueError(f'scheme: {experiment.scheme_name} acts and learns at separate rates, so no '
                     'single figure says which placement is better; tune apex_lockstep instead')
  experiment = changed(experiment, total_steps=2**30, env=dict(renew_every_updates=0),
                       **small_replay(experiment))
  return experiment, own_of(experiment, config_place)


def find_machine(own: Candidate, options: PlacementOptions) -> Machine:
  """Starts JAX, with a CPU device for each core, and returns the devices to choose from.

  Args:
    own: the config's placement, whose devices are included.
    options: the experiment's placement, for the options that all candidates share.

  Raises:
    ValueError: `host.prepare_host` refuses the placement.
  """
  cores = len(os.sched_getaffinity(0))
  cpus = min(cores, options.xla_threads)
  # Unused CPU devices cost nothing, since all devices share one thread pool.
  host.prepare_host(dataclasses.replace(
      options, actor_devices=(*own.actor_devices, cpus - 1), learner_devices=own.learner_devices))
  kind = jax.default_backend()
  learners = cpus if kind == 'cpu' else jax.local_device_count()
  on_cpu = options.actor_platform == 'cpu' or kind not in ('cpu', 'gpu')
  return Machine(cores, cpus if on_cpu else learners, learners, not on_cpu or kind == 'cpu',
                 not on_cpu and kind == 'gpu')


def accept(tuner: Tuner, candidates: Sequence[Candidate]) -> list[Candidate]:
  """Returns the candidates that the config allows.

  Args:
    tuner: builds the runs.
    candidates: placements, the config's own first; if that is refused, a line says why.

  Raises:
    ValueError: all candidates are refused; the message is about the first.
  """
  accepted = []
  refusals = {}
  for candidate in candidates:
    try:
      tuner.run(candidate)
      accepted.append(candidate)
    except ValueError as error:
      refusals[candidate] = error
  if not accepted:
    raise refusals[candidates[0]]
  if candidates[0] in refusals:
    say(f"the config's own placement is impossible on this machine: {refusals[candidates[0]]}")
  for shards in {c.num_shards for c in candidates} - {c.num_shards for c in accepted}:
    say(next(f'num_shards = {shards}: {error}' for c, error in refusals.items()
             if c.num_shards == shards))
  return accepted


def run(tuner: Tuner, own: Candidate, machine: Machine, first: Sequence[Candidate],
        seconds: float) -> Search:
  """Searches for the fastest placement, with a line on stderr for each measurement.

  Args:
    tuner: measures a placement.
    own: the config's own placement.
    machine: the devices to choose from.
    first: the placements to begin with.
    seconds: measured time of the whole search.

  Returns:
    All rounds of the search.
  """
  experiment = tuner.experiment
  apart = []  # distances of two cores, before each measurement and after the last

  def measure(candidate: Candidate, seconds: float) -> Figures:
    apart.append(core_distance.apart_ns())
    figures = tuner.measure(candidate, seconds)
    say(f'{figures.sps:10,.0f} SPS  {as_text(own, candidate)}')
    return figures

  def variants(candidate: Candidate) -> list[Candidate]:
    return vary(experiment, machine, candidate)

  say(f'{len(first)} placements, then {len(variants(first[0]))} variants of the best; '
      'compiling takes longer than measuring')
  if not experiment.deterministic:
    say(f'{experiment.non_deterministic_setting} is not deterministic: the result depends on the '
        'speed of actors and learner, and so on the placement')
  outcome = search(first, variants, [own] if own in first else [], measure, seconds)
  if len(outcome.last) < LAST_ROUNDS:
    say('--seconds were spent before the last rounds; take more seconds for a more certain result')
  apart.append(core_distance.apart_ns())
  if max(apart) > core_distance.far(min(apart)):
    say(f'the distance of two cores changed meanwhile, between {min(apart):.0f} and '
        f'{max(apart):.0f} ns: close figures do not tell which placement is faster')
  return outcome
