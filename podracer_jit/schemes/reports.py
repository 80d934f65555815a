"""Reports of the learner: metrics of updates, and waiting times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Waits(NamedTuple):
  """Seconds spent waiting since the segment began."""

  actor: float  # mean over actors
  learner: float  # mean over learners


class Report(NamedTuple):
  """Report of `count` updates."""

  metrics: Mapping[str, Any]  # arrays [count or more, ...]; the first `count` rows are set
  count: int
  # NAPPO's delays (2007.02622, section 3) of each update: means over its gradient steps, in
  # versions of the policy, which are gradient steps.
  cgd: tuple[float, ...]  # collection-to-gradient delay
  gud: tuple[float, ...]  # gradient-to-update delay
  # Added where a graph runs: when its environments and programs were ready, by `time.perf_counter`;
  # waits since then; and of machines that act elsewhere their figures, and the lives of actors that
  # were begun again, by name.
  since_s: float = 0.0
  waits: Waits = Waits(0.0, 0.0)
  machines: Mapping[str, float] = {}
  lives: Mapping[str, int] = {}
