"""Options of a replay and of its rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from podracer_jit.options import INT32_MAX, option


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
  """Options of a prioritised replay, and of the rates of acting and learning."""

  capacity: int = option(2_000_000, 'items that are kept: transitions, or sequences', at_least=1,
                         at_most=INT32_MAX)
  min_size: int = option(50_000, 'items in the replay before learning begins',
                         at_least=1, at_most=INT32_MAX)
  copies: int = option(
      1, 'times that each item is added, with priorities of their own; the capacity, min_size and '
      'samples_per_insert count each', at_least=1, at_most=1024)
  batch_size: int = option(512, 'items of a gradient step', at_least=1, at_most=INT32_MAX)
  gradient_steps: int = option(
      1, 'gradient steps of an update; with free rates: between two additions to the replay',
      at_least=1, at_most=INT32_MAX)
  # Powers of small errors would underflow or overflow float32 with large exponents.
  priority_exponent: float = option(0.6, 'priorities are |TD error| to this power; 0: uniform',
                                    at_least=0, at_most=2)
  importance_exponent: float = option(0.4, 'importance weights are (N P) to minus this power',
                                      at_least=0, at_most=2)
  eviction: str = option(
      'fifo', 'which items make room: fifo, the oldest, or prioritised, drawn by '
      'priority^eviction_exponent', choices=('fifo', 'prioritised'))
  eviction_exponent: float = option(-0.4, 'exponent of priorities in prioritised eviction',
                                    at_least=-2, at_most=0)
  evict_every: int = option(
      0, '0: items beyond the capacity go as soon as others are added; n: all at once, each n '
      'gradient steps, or sooner if they are an eighth of the capacity', at_least=0,
      at_most=1_000_000)
  params_every: int = option(
      1, 'with free rates: rollouts that an actor makes with the same parameters', at_least=1,
      at_most=INT32_MAX)
  samples_per_insert: float = option(
      0.0, 'with free rates: items drawn for each one added; 0: neither side waits',
      at_least=0)
  tolerance: int = option(
      0, 'with free rates: drawn items by which either side may be ahead of that rate',
      at_least=0, at_most=INT32_MAX)

  def problems(self) -> Iterator[str]:
    """Yields problems of the combination of options, one line each."""
    if self.capacity < self.min_size:
      yield (f'capacity: must be at least replay.min_size = {self.min_size}, got '
             f'{self.capacity}')
