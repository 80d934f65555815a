"""What a scheme is: a graph, and how old and from whom what flows in it may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple


class Graph(NamedTuple):
  """How a segment's workers are joined; what the rest of the package must know of it."""

  # (plan, actors, segment start, reports) -> (workers, waits); see `wiring`
  wire: Callable[..., Any]
  one_program: bool = False  # R, G and U are one program, so there is nothing to wait for
  separate_updates: bool = False  # U is apart from G: one place that has the optimizer
  free_rates: bool = False  # acting and learning go on at rates of their own
  several_processes: bool = False  # its learner may span processes
  replay: bool | None = None  # True: only for learners from a replay; False: only for others


@dataclasses.dataclass(frozen=True)
class Scheme:
  """Where R, G and U run, and who waits for whom."""

  graph: Graph
  # How many updates behind a rollout's parameters are, after a segment's first; None: R takes the
  # latest there are and waits for nobody.
  lag: int | None = 0
  alone: bool = False  # R, G and U are on one device
  colocated: bool = False  # rollouts are made where gradients are
  each: bool = False  # U applies the gradient of each worker as it comes; else the sum of all
  # True: G draws from a replay; False: it takes rollouts; None: as the algorithm learns
  replay: bool | None = None

  @property
  def repeats(self) -> bool:
    """Whether the same experiment gives the same bits: all hand-offs block."""
    return self.lag is not None and not self.each
