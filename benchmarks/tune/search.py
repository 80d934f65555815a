"""Finds the fastest candidate by successive halving."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.tune.candidates import Candidate

FINALISTS = 2  # candidates of the last rounds, apart from the config's own
LAST_ROUNDS = 3


class Figures(NamedTuple):
  """The result of one measurement."""

  sps: float
  seconds: float  # counted seconds


class Search(NamedTuple):
  """The result of a search: the SPS of each candidate in each round."""

  rounds: list[dict[Candidate, float]]  # all rounds
  last: list[dict[Candidate, float]]  # the rounds that decide


def search(first: Sequence[Candidate], vary: Callable[[Candidate], Sequence[Candidate]],
           own: Sequence[Candidate], measure: Callable[[Candidate, float], Figures],
           seconds: float) -> Search:
  """Searches by successive halving: first among `first`, then among the best and its variants.

  Args:
    first: the first candidates.
    vary: (candidate) -> variants of it.
    own: candidates that take part in every round: the config's own, or none.
    measure: (candidate, seconds) -> Figures.
    seconds: measured time of the whole search. Once it is spent, the current round is the last.
  """
  rounds = []
  left_s = seconds
  alive = list(first)
  halvings = _rounds(len(alive))
  halvings_of_variants = _rounds(min(len(alive), FINALISTS) + len(vary(alive[0])))
  num_rounds = halvings + halvings_of_variants + LAST_ROUNDS

  def measure_round(alive: Sequence[Candidate]) -> None:
    nonlocal left_s
    # Without duplicates, in order: `own` may be alive by itself.
    candidates = dict.fromkeys((*alive, *own))
    sps = {}
    for candidate in candidates:
      figures = measure(candidate, seconds / num_rounds / len(candidates))
      sps[candidate] = figures.sps
      left_s -= figures.seconds
    rounds.append(sps)

  for widen in (False, True):
    if widen:
      alive += vary(alive[0])
    for _ in range(_rounds(len(alive))):
      measure_round(alive)
      # Only figures of one round are compared: the machine's speed may change between rounds.
      alive = sorted(alive, key=rounds[-1].get, reverse=True)[:max(FINALISTS, len(alive) // 2)]
      if left_s <= 0:
        return Search(rounds, rounds[-1:])
  before = len(rounds)
  while len(rounds) < before + LAST_ROUNDS and (left_s > 0 or len(rounds) == before):
    measure_round(alive)
  return Search(rounds, rounds[before:])


def _rounds(count: int) -> int:
  """Returns the number of rounds that halve `count` candidates to FINALISTS.

  It is at least 1 for two candidates or more, which a round ranks.
  """
  if count < 2:
    return 0
  return 1 if count // 2 <= FINALISTS else 1 + _rounds(count // 2)


def best(rounds: Sequence[Mapping[Candidate, float]]) -> Candidate:
  """Returns the candidate with the highest median."""
  return max(rounds[0], key=lambda candidate: statistics.median(x[candidate] for x in rounds))
