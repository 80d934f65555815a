"""A run that looks for the fastest devices while it trains.

A placement changes no bit, so a run may change its own; on accelerators, where bits depend on the
number of learner devices, only that of its actors. Between two updates its environments and
its train state go on with other programs; nothing is made again. Whether a placement is faster is
measured in pairs of legs, a few updates each, since the speed of a machine drifts.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import jax

from podracer_jit.experiment import build, placing
from podracer_jit.experiment.schema import Experiment
from podracer_jit.options import INT32_MAX
from podracer_jit.runtime.placement import PlacementOptions

_logger = logging.getLogger(__name__)

# Seconds that must be left of a run.
LEAST_S = 15 * 60
# Share of the rest of the run that trials take: legs that may be slower, and compiling.
_SHARE = 0.02
# Seconds and updates of a leg whose speed is measured, and before anything is tried.
_LEG_S = 5.0
_LEG_UPDATES = 4
_FIRST_UPDATES = 16
# A placement is kept if it is faster by this factor, in each pair.
_GAIN = 1.02
_PAIRS = 2
# Fewer updates than that tell nothing about the speed of a leg.
_FEWEST = 3


class Leg(NamedTuple):
  """Updates of a run on the same devices."""

  run: build.Run
  updates: int  # most of them


class Adapting:
  """Decides on which devices a run makes its next updates."""

  def __init__(self, run: build.Run, say: Callable[[str], None]):
    """Begins with the run's own placement.

    Args:
      run: as it begins.
      say: prints a line.
    """
    self.run = run  # on the fastest devices so far
    self._say = say
    self._legs: Iterator[Leg] | None = self._plan() if candidates(run.experiment) else None
    self._times: list[tuple[float, int]] = []  # (seconds, steps) after each update of the leg

  def next(self) -> Leg:
    """Returns the next leg; the run has made all updates of the one before."""
    leg = next(self._legs, None) if self._legs else None
    self._times = []
    if leg is None:
      self._legs = None
      return Leg(self.run, INT32_MAX)
    return leg

  def told(self, steps: int) -> None:
    """Notes the end of an update; `steps` are the valid steps that the run has learned from."""
    if self._legs:
      self._times.append((time.perf_counter(), steps))

  def _seconds(self) -> float:
    """Returns the mean seconds of an update of the last leg, without the first; 0 if unknown."""
    if len(self._times) < _FEWEST:
      return 0.0
    times = [seconds for seconds, _ in self._times[1:]]
    return (times[-1] - times[0]) / (len(times) - 1)

  def _left_s(self) -> float:
    """Returns the seconds that the rest of the run takes at the speed of the last leg."""
    (since_s, since), *_, (until_s, until) = self._times[1:]
    speed = (until - since) / (until_s - since_s)
    return (self.run.experiment.total_steps - until) / speed if speed else 0.0

  def _measured(self, run: build.Run, updates: int) -> Generator[Leg, None, float]:
    """Yields a leg, again if the end of a segment has cut it short; returns its `_seconds`."""
    while True:
      yield Leg(run, updates)
      if self._seconds():
        return self._seconds()

  def _plan(self) -> Iterator[Leg]:
    """Yields legs until the fastest placement is known."""
    updates = _FIRST_UPDATES
    while (yield from self._measured(self.run, updates)) * updates < _LEG_S:
      updates *= 2
    left_s = self._left_s()
    budget_s = _SHARE * left_s
    others = candidates(self.run.experiment)
    # One leg of each pair is on devices that may be slower.
    legs = _PAIRS * len(others)
    least_s = _LEG_UPDATES * self._seconds()
    if left_s < LEAST_S or legs * least_s > budget_s:
      return
    updates = round(min(max(_LEG_S, least_s), budget_s / legs) / self._seconds())
    ratios = []
    for place in others:
      prepared = _Prepared(self.run, place)
      while not prepared.is_done:
        yield Leg(self.run, updates)
      if prepared.run is None:
        continue
      # The first updates load the programs.
      yield Leg(prepared.run, 2)
      gains = []
      for pair in range(_PAIRS):
        seconds = {}
        for run in (self.run, prepared.run)[::1 if pair % 2 else -1]:
          seconds[run is prepared.run] = yield from self._measured(run, updates)
        gains.append(seconds[False] / seconds[True])
      ratios.append(f'{_described(place)} {statistics.median(gains):.2f}')
      if min(gains) > _GAIN:
        self.run = prepared.run
    if ratios:
      kept = _described(self.run.experiment.placement)
      self._say(f'placement: {kept} is the fastest; speed of others to the one before: '
                f'{"; ".join(ratios)}')


def candidates(experiment: Experiment) -> Sequence[PlacementOptions]:
  """Returns the placements that may be faster than the rule's; () if a run must keep its own."""
  if not (experiment.placement.adapt and experiment.deterministic and experiment.replay is None
          and jax.process_count() == 1):
    return ()
  others = placing.alternatives(experiment, jax.local_device_count())
  if jax.default_backend() == 'cpu':
    return others
  # On accelerators, bits depend on the number of learner devices.
  learners = experiment.placement.learner_devices
  return [place for place in others if place.learner_devices == learners]


def _described(place: PlacementOptions) -> str:
  return f'actor_devices={place.actor_devices} learner_devices={place.learner_devices}'


class _Prepared:
  """The run on other devices, which is built on a thread beside the training."""

  def __init__(self, run: build.Run, place: PlacementOptions):
    self.run: build.Run | None = None  # None if it cannot have these devices
    self._args = run, place
    self._thread = threading.Thread(target=self._build, name='adapting', daemon=True)
    self._thread.start()

  @property
  def is_done(self) -> bool:
    """Whether the run was built, or has failed."""
    return not self._thread.is_alive()

  def _build(self) -> None:
    run, place = self._args
    try:
      other = build.on_devices(run, place)
      build.compile_learner(other)
      self.run = other
    except Exception:  # noqa: BLE001 - the run itself goes on whatever happens here
      _logger.warning('a placement cannot be tried: %s', _described(place), exc_info=True)
