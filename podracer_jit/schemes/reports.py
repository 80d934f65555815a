"""What a learner reports of its updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Report(NamedTuple):
  """What the learner says of `count` updates, stacked along the leading axis."""

  metrics: Mapping[str, Any]
  count: int
  # NAPPO's delays (2007.02622, section 3), of each update the mean over its gradient steps, in
  # versions of the policy, that is in gradient steps:
  cgd: tuple[float, ...]  # from collection to gradient
  gud: tuple[float, ...]  # from gradient to update


class Waits(NamedTuple):
  """Seconds spent waiting since the segment began."""

  actor: float
  learner: float
