"""Finds the fastest candidate by successive halving."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from podracer_jit.run.tuning.candidates import Candidate

FINALISTS = 2  # of the last rounds, beside the config's own
LAST_ROUNDS = 3


class Figures(NamedTuple):
  """The result of one measurement."""

  sps: float
  seconds: float  # that were counted


class Search(NamedTuple):
  """All rounds, as SPS by candidate, and the rounds that decide."""

  rounds: list[dict[Candidate, float]]
  last: list[dict[Candidate, float]]


def search(first: Sequence[Candidate], vary: Callable[[Candidate], Sequence[Candidate]],
           own: Sequence[Candidate], measure: Callable[[Candidate, float], Figures],
           seconds: float) -> Search:
  """Halves the candidates `first` again and again, then the best two with variants of the best.

  Args:
    first: where it begins.
    vary: (candidate) -> others like it.
    own: takes part in every round: the config's own, or nothing.
    measure: (candidate, seconds) -> Figures, of a second or of many.
    seconds: in all. Once they are spent, the round that is on is the last.
  """
  rounds, left, alive = [], seconds, list(first)
  count = LAST_ROUNDS + sum(map(_rounds, (
      len(alive), min(len(alive), FINALISTS) + len(vary(alive[0])))))

  def go(alive: Sequence[Candidate]) -> None:
    nonlocal left
    alive, figures = dict.fromkeys((*alive, *own)), {}
    for candidate in alive:
      one_figure = measure(candidate, seconds / count / len(alive))
      figures[candidate], left = one_figure.sps, left - one_figure.seconds
    rounds.append(figures)

  for widen in (False, True):
    if widen:
      alive += vary(alive[0])
    for _ in range(_rounds(len(alive))):
      go(alive)
      # By this round alone: its figures were made one after the other.
      alive = sorted(alive, key=rounds[-1].get, reverse=True)[:max(FINALISTS, len(alive) // 2)]
      if left <= 0:
        return Search(rounds, rounds[-1:])
  before = len(rounds)
  while len(rounds) < before + LAST_ROUNDS and (left > 0 or len(rounds) == before):
    go(alive)
  return Search(rounds, rounds[before:])


def _rounds(count: int) -> int:
  """Returns the rounds that halve `count` to FINALISTS; at least one, to rank two."""
  if count < 2:
    return 0
  return 1 if count // 2 <= FINALISTS else 1 + _rounds(count // 2)


def best(rounds: Sequence[Mapping[Candidate, float]]) -> Candidate:
  """Returns the candidate with the highest median."""
  return max(rounds[0], key=lambda candidate: statistics.median(x[candidate] for x in rounds))
