"""Helpers of the parts of a benchmark: an endless segment, pools, and a small replay."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.parts import conventional
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import changed
from podracer_jit.experiment.schema import Experiment
from podracer_jit.runtime import placement
from podracer_jit.schemes import wiring
from podracer_jit.schemes.reports import Report
from podracer_jit.types import TrainState

CAPACITY = 65_536  # transitions of a replay, if they hold an update


class Figures(NamedTuple):
  """The result of one measurement of a part."""

  sps: float
  seconds_per_update: float


Measure = Callable[[float], Figures]  # runs a part for this number of seconds


class _WithoutStates(build.Run):
  """A run whose segments do not collect the states of actors, as conventional actors have none."""

  @property
  def plan(self) -> wiring.Plan:
    """See `build.Run`."""
    return super().plan._replace(keeps_actors=False)


def pools_of(run: build.Run, actor: int) -> list[conventional.PoolArgs]:
  """Returns the arguments of an actor's pools, the same as in `build.segment`."""
  experiment = run.experiment
  place = run.place
  width = experiment.env.num_envs // experiment.num_shards
  per_actor = experiment.num_shards // len(place.actors)
  return [conventional.PoolArgs(experiment.env.task, experiment.env_options,
                                env_seeds(experiment.seed, 0, i * width, width),
                                place.env_threads)
          for i in range(actor * per_actor, (actor + 1) * per_actor)]


def small_replay(experiment: Experiment) -> dict[str, Any]:
  """Returns the changes of a config that give it a small replay; none if it has no replay.

  A small replay fills soon, and several parts with a replay fit into memory. Options that only
  schemes with free rates accept are turned off.
  """
  options = experiment.replay
  if options is None:
    return {}
  rows = experiment.batch_rows
  groups = experiment.num_grad_shards
  # The capacity must be a multiple of the number of groups.
  enough = -(-max(CAPACITY, rows) // groups) * groups
  return dict(replay=dict(
      capacity=min(options.capacity, enough), min_size=min(options.min_size, rows),
      params_every=1, samples_per_insert=0.0))


def with_scheme(run: build.Run, scheme: str) -> build.Run:
  """Returns the run with another scheme; its programs are shared.

  Raises:
    ValueError: the experiment cannot have this scheme.
  """
  return dataclasses.replace(run, experiment=changed(run.experiment, scheme=scheme))


class _Called:
  """A jitted program that another function calls; it is lowered as itself."""

  def __init__(self, program: Any, call: Callable):
    self._call = call
    self.lower = program.lower

  def __call__(self, *args: Any) -> Any:
    return self._call(*args)


def with_program(run: build.Run, call: Callable) -> build.Run:
  """Returns the run whose learner's program is called by `call`, with the same arguments."""
  learner = copy.copy(run.learner)
  learner.program = _Called(learner.program, call)
  return dataclasses.replace(run, learner=learner)


def copy_of(state: TrainState, run: build.Run) -> TrainState:
  """Returns a copy of the state, which may be donated; its replay is empty."""
  return run.learner.allocate(placement.replicate(state._replace(replay=None), run.place.mesh))


def begin(run: build.Run, state: TrainState, scheme: str, by_python: bool,
          stack: contextlib.ExitStack, report: Callable[[Report], None],
          stop: Callable[[], bool]) -> wiring.Segment:
  """Starts a segment that does not end by itself.

  Args:
    run: the run of the experiment.
    state: the train state to begin with; it is copied.
    scheme: name of the scheme to run.
    by_python: whether Python steps the environments.
    stack: closes the segment and its pools.
    report: called with the report of each update.
    stop: the segment ends at the next update after this returned True.

  Returns:
    The segment, whose workers are not started yet.
  """
  run = with_scheme(run, scheme)
  if by_python:
    run = _WithoutStates(run.experiment, run.place, run.learner, run.acting)
  segment = stack.enter_context(build.segment(
      run, build.Snapshot(copy_of(state, run)), 2**31 - 1, report,
      build.Events(after=lambda position, wait_written: stop())))
  if not by_python:
    return segment
  policy = conventional.make_policy(run.experiment.algorithm)
  workers = list(segment.workers)
  # Actors are the first workers of a segment.
  for a, device in enumerate(run.place.actors):
    workers[a], close = conventional.replace_actor(
        workers[a], pools_of(run, a), device, policy, run.experiment.unroll_length,
        run.experiment.spec.stack)
    stack.callback(close)
  return segment._replace(workers=workers)
