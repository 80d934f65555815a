"""Shared by the parts of a benchmark: an endless segment, pools, and a small replay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from podracer_jit.envs.seeds import env_seeds
from podracer_jit.run import build, experiment
from podracer_jit.run.measure import conventional
from podracer_jit.run.metrics import Report
from podracer_jit.runtime import placement
from podracer_jit.schemes import wiring
from podracer_jit.schemes.table import SCHEMES
from podracer_jit.types import TrainState

CAPACITY = 65_536  # transitions of a replay, if they hold an update


class Figures(NamedTuple):
  """The result of one measurement of a part."""

  sps: float
  seconds_per_update: float


Measure = Callable[[float], Figures]  # runs a part for so many seconds


def pools_of(parts: wiring.Parts, actor: int) -> list[conventional.PoolArgs]:
  """Returns the arguments of an actor's pools, as `build.segment` has them."""
  config, place = parts.config, parts.place
  width = config['env']['num_envs'] // config['num_shards']
  per_actor = config['num_shards'] // len(place.actors)
  options = experiment.env_options(config)
  return [conventional.PoolArgs(config['env']['task'], options,
                                env_seeds(config['seed'], 0, i * width, width),
                                place.env_threads)
          for i in range(actor * per_actor, (actor + 1) * per_actor)]


def small_replay(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the config with a small replay, which fills soon and fits beside those of other parts.

  Options that only `apex` accepts are turned off. A config without a replay is returned as it is.
  """
  if 'replay' not in config:
    return dict(config)
  rows, groups = experiment.batch_rows(config), max(1, config['num_grad_shards'])
  enough = -(-max(CAPACITY, rows) // groups) * groups
  options = config['replay']
  return config | dict(replay=options | dict(
      capacity=min(options['capacity'], enough), min_size=min(options['min_size'], rows),
      params_every=1, samples_per_insert=0))


def copy_of(state: TrainState, parts: wiring.Parts) -> TrainState:
  """Returns a copy of the state, which may be donated; its replay is empty."""
  copy = placement.replicate(state._replace(replay=()), parts.place.mesh)
  return copy._replace(replay=build.empty_replay(parts)) if state.target else copy


def begin(parts: wiring.Parts, state: TrainState, scheme: str, by_python: bool,
          stack: contextlib.ExitStack, report: Callable[[Report], None],
          stop: Callable[[], bool]) -> wiring.Segment:
  """Starts a segment that does not end by itself.

  Args:
    parts: of the experiment.
    state: the train state to begin with; it is copied.
    scheme: name of the scheme to run.
    by_python: replace the actors by conventional ones.
    stack: closes the segment and its pools.
    report: called with the report of each update.
    stop: the segment ends at the next update after this returned True.

  Returns:
    The segment, whose workers are not started yet.
  """
  parts = parts._replace(scheme=SCHEMES[scheme])
  segment = stack.enter_context(build.segment(parts, copy_of(state, parts), 0, 2**31 - 1, report,
                                              stop))
  if not by_python:
    return segment
  policy, workers = conventional.make_policy(parts.network), list(segment.workers)
  for a, device in enumerate(parts.place.actors):  # they come first among the workers
    workers[a], close = conventional.replace_actor(
        workers[a], pools_of(parts, a), device, policy, parts.config['unroll_length'],
        parts.spec.stack)
    stack.callback(close)
  return segment._replace(workers=workers)
