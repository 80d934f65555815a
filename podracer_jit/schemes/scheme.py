"""The definition of a scheme: a graph of workers, and the lag and order of values in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple


class Graph(NamedTuple):
  """Graph of workers, and its properties that the rest of the package uses.

  R is the rollout, G the gradient and U the update; see ARCHITECTURE.md. One worker is called
  `learner`. Its state has the TrainState as `train`, its `until` calls `start.after(Position)`, and
  it puts a `Report` into `reports` for each call. `wiring.with_actors` adds the actors to the
  position, for plans that keep them.
  """

  # (plan of the run, actors of the segment, SegmentStart, channel of the learner's reports)
  #   -> (the workers, a function that returns their waiting times); see `wiring`
  wire: Callable[..., Any]
  # (plan, actor, most updates) compiles the program that steps an actor's environments, so that
  # `wire` need not; the train state may still be unknown.
  load: Callable[..., None]
  one_program: bool = False  # R, G and U are one program, without channels
  separate_updates: bool = False  # U runs on one device, the centre, which has the optimizer
  each: bool = False  # U applies the gradient of each worker as it arrives, not the sum of all
  free_rates: bool = False  # actors and learner run at independent rates
  several_processes: bool = False  # the learner may span processes
  # True: G draws from a replay; False: G takes rollouts; None: the algorithm decides
  replay: bool | None = None


@dataclasses.dataclass(frozen=True)
class Scheme:
  """Scheme: places of R, G and U, and the lag and order of the values between them."""

  graph: Graph
  # Number of updates that a rollout's parameters are behind; it is 0 in a segment's first update.
  # None: R takes the latest parameters and never waits for them.
  lag: int | None = 0
  alone: bool = False  # R, G and U run on one device
  colocated: bool = False  # R runs on the devices of G

  @property
  def replay(self) -> bool | None:
    """See `Graph.replay`."""
    return self.graph.replay

  @property
  def each(self) -> bool:
    """True if U applies the gradient of each worker as it arrives."""
    return self.graph.each

  @property
  def deterministic(self) -> bool:
    """True if the same experiment always gives the same bits, since all channels block."""
    return self.lag is not None and not self.each
