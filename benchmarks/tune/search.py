"""The order in which a search measures placements, and how it chooses the best one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

Placement = TypeVar('Placement', bound=Hashable)

FINALISTS = 3  # of the first round of a stage
ROUNDS = 3  # in which finalists are measured
PAIRS = 7
DEVICES, THREADS, PAIR = 'devices', 'threads', 'pair'
SHIPPED = 'as shipped'


class Speed(NamedTuple):
  """A measurement."""

  stage: str  # DEVICES, THREADS or PAIR
  placement: Hashable  # SHIPPED, or a candidate
  sps: float  # 0: it failed


class Search:
  """A search for the fastest placement: among devices, then among numbers of threads and calls.

  In each stage, all candidates are measured once, and the FINALISTS fastest of them ROUNDS times.
  At last the shipped placement and the best one are measured in PAIRS, in turn.
  """

  def __init__(self, places: Sequence[Placement], vary: Callable[[Placement], list[Placement]],
               speeds: Sequence[Speed]):
    """Begins, or goes on.

    Args:
      places: the candidates of the first stage, that of the rule first.
      vary: (candidate) -> it and its variants, the candidates of the second stage.
      speeds: what has been measured.
    """
    self._places = places
    self._vary = vary
    self._speeds = speeds

  def of(self, stage: str, placement: Hashable) -> list[float]:
    """Returns the speeds of a placement in a stage."""
    return [x.sps for x in self._speeds if (x.stage, x.placement) == (stage, placement)]

  def candidates(self, stage: str) -> Sequence[Placement]:
    """Returns the candidates of DEVICES or, once that is over, of THREADS."""
    if stage == DEVICES:
      return self._places
    return self._vary(self._best_of(DEVICES, self._places))

  def next(self) -> tuple[str, Hashable] | None:
    """Returns the stage and the placement to measure next; None if the search is over."""
    following = self._next_of(DEVICES, self._places)
    if following:
      return following
    variants = self.candidates(THREADS)
    following = self._next_of(THREADS, variants)
    if following:
      return following
    best = self._best_of(THREADS, variants)
    if best == self._places[0]:
      return None  # it is the shipped one
    counts = [len(self.of(PAIR, placement)) for placement in (SHIPPED, best)]
    if min(counts) == PAIRS:
      return None
    # Every second pair begins with the other one.
    order = (SHIPPED, best) if min(counts) % 2 == 0 else (best, SHIPPED)
    return PAIR, next(x for x in order if len(self.of(PAIR, x)) == min(counts))

  def best(self) -> Hashable | None:
    """Returns the fastest placement; None if the search has not found it yet."""
    if self._next_of(DEVICES, self._places):
      return None
    variants = self.candidates(THREADS)
    return None if self._next_of(THREADS, variants) else self._best_of(THREADS, variants)

  def is_shipped_best(self) -> bool:
    """Returns whether the search is over, and nothing is faster than the shipped placement."""
    return self.best() == self._places[0]

  def ratios(self) -> list[float]:
    """Returns the speed as shipped over that of the best, of each pair whose two sides worked."""
    pairs = zip(self.of(PAIR, SHIPPED), self.of(PAIR, self.best()), strict=False)
    return [shipped / best for shipped, best in pairs if shipped and best]

  def _next_of(self, stage: str, candidates: Sequence[Placement]) -> tuple[str, Placement] | None:
    """Returns the next measurement of a stage; None if it is over."""
    if len(candidates) == 1:
      return None
    new = [x for x in candidates if not self.of(stage, x)]
    if new:
      return stage, new[0]
    finalists = self._finalists(stage, candidates)
    counts = [len(self.of(stage, x)) for x in finalists]
    if min(counts) == ROUNDS:
      return None
    return stage, finalists[counts.index(min(counts))]

  def _finalists(self, stage: str, candidates: Sequence[Placement]) -> list[Placement]:
    """Returns the candidates that were the fastest in the first round; failures are none."""
    order = sorted(candidates, key=lambda x: self.of(stage, x)[0], reverse=True)
    return [x for x in order[:FINALISTS] if self.of(stage, x)[0]] or order[:1]

  def _best_of(self, stage: str, candidates: Sequence[Placement]) -> Placement:
    """Returns the candidate with the highest median."""
    if len(candidates) == 1:
      return candidates[0]
    return max(self._finalists(stage, candidates),
               key=lambda x: statistics.median(self.of(stage, x)))
