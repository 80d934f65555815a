"""A run that looks for the fastest devices while it trains.

A placement changes no bit, so a run may change its own; on accelerators, where bits depend on the
number of learner devices, only that of its actors. Between two updates its environments and
its train state go on with other programs; nothing is made again. Whether a placement is faster is
measured in pairs of legs, a few updates each, since the speed of a machine drifts.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import jax

from podracer_jit import errors, options
from podracer_jit.experiment import build, memory, placing
from podracer_jit.experiment.schema import Experiment
from podracer_jit.options import INT32_MAX
from podracer_jit.runtime.placement import PlacementOptions
from podracer_jit.training import stopping

_logger = logging.getLogger(__name__)

# Seconds that must be left of a run.
LEAST_S = 15 * 60
# Share of the rest of the run that trials may take.
_SHARE = 0.02
# Least seconds and calls of a leg whose speed is measured, and calls before anything is tried. A
# call makes one update, or several in a scheme of one program.
_LEG_S = 5.0
_LEG_CALLS = 12
_FIRST_CALLS = 16
# A probe, a short first leg with a placement, shows whether it is far slower: its least calls, its
# share of a whole leg, and the factor that counts as far.
_PROBE_CALLS = 6
_PROBE_SHARE = 0.125
_FAR_SLOWER = 1.5
# A leg that the end of a segment cuts short is repeated; after so many tries the search ends.
_MOST_TRIES = 3
# Seconds that a program may take to compile where that cannot be done beside the training.
_COMPILE_S = 60.0
# A placement is kept if each of so many pairs of legs says that it is faster, and their median by
# this factor.
_PAIRS = 4
_NOT_SLOWER = 1.0
_GAIN = 1.02


class Leg(NamedTuple):
  """Updates of a run on the same devices."""

  run: build.Run
  updates: int  # most of them


class _Mark(NamedTuple):
  """The end of a call of updates."""

  seconds: float  # of the clock that leaves out what does not depend on the placement
  update: int  # the last one
  steps: int  # valid ones that the run has learned from


class _GiveUp(Exception):
  """The time for trials is over, or nothing can be measured."""


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
    experiment = run.experiment
    self._call = experiment.placement.updates_per_call if (
        experiment.scheme.graph.one_program) else 1
    self._legs: Iterator[Leg] | None = self._plan() if candidates(experiment) else None
    self._marks: list[_Mark] = []  # of the leg
    self._update = 0  # the last one of which this was told
    self._asked = 0  # updates of the leg, if nothing cuts it short
    self._apart_s = 0.0
    self._own_s = 0.0  # seconds of an update on the fastest devices; 0: unknown
    self._left_to_spend_s = float('inf')
    self._prepared: _Prepared | None = None
    self._is_trial = False  # whether the leg is on devices that are only tried

  def next(self) -> Leg:
    """Returns the next leg; the run has made all updates of the one before."""
    leg = next(self._legs, None) if self._legs else None
    self._marks = []
    if leg is None:
      self._legs = None
      leg = Leg(self.run, INT32_MAX)
    self._is_trial = leg.run is not self.run
    return leg

  def told(self, update: int, steps: int) -> None:
    """Notes the end of a call of updates.

    Args:
      update: the last update.
      steps: valid steps that the run has learned from.
    """
    self._update = update
    if self._legs:
      self._marks.append(_Mark(self._now(), update, steps))

  @contextlib.contextmanager
  def apart(self) -> Iterator[None]:
    """Leaves the block's time out of the speed: what it does takes as long on other devices."""
    began_s = time.perf_counter()
    try:
      yield
    finally:
      self._apart_s += time.perf_counter() - began_s

  def explain(self, error: BaseException) -> None:
    """Adds to the error of a leg that it was on devices that were only tried.

    The package's own errors say what was wrong; others may be due to the devices.
    """
    if self._is_trial and not isinstance(error, errors.PodracerError):
      errors.extend(error, 'the run was trying other devices; placement.adapt=False turns this off')

  def close(self) -> None:
    """Ends what is built beside the training, as soon as its compilation is over."""
    if self._prepared:
      self._prepared.is_given_up.set()

  def _now(self) -> float:
    return time.perf_counter() - self._apart_s

  def _inner(self) -> Sequence[_Mark]:
    """Returns the marks between which a leg's speed is measured.

    In its first updates programs are loaded and the pipeline fills; before its end, actors rest.
    """
    return self._marks[1:-1]

  def _seconds(self) -> float:
    """Returns the mean seconds of an update of the last leg; 0 if it was cut short."""
    inner = self._inner()
    if len(inner) < 2 or 2 * (inner[-1].update - inner[0].update) < self._asked - 3 * self._call:
      return 0.0
    return (inner[-1].seconds - inner[0].seconds) / (inner[-1].update - inner[0].update)

  def _left_s(self) -> float:
    """Returns the seconds that the rest of the run takes at the speed of the last leg."""
    first, *_, last = self._inner()
    speed = (last.steps - first.steps) / (last.seconds - first.seconds)
    return (self.run.experiment.total_steps - last.steps) / speed if speed else 0.0

  def _leg(self, run: build.Run, calls: int) -> Generator[Leg, None, None]:
    """Yields a leg, and notes how much longer it took than on the fastest devices so far.

    Raises:
      _GiveUp: there may be no time for it.
    """
    self._asked = calls * self._call
    # Other devices may lose as much time as the leg takes on the fastest ones.
    if run is not self.run and self._asked * self._own_s > self._left_to_spend_s:
      raise _GiveUp
    began_s = self._now()
    before = self._update
    yield Leg(run, self._asked)
    if self._marks and self._own_s:
      last = self._marks[-1]
      expected_s = (last.update - before) * self._own_s
      self._left_to_spend_s -= max(0.0, last.seconds - began_s - expected_s)

  def _measured(self, run: build.Run, calls: int) -> Generator[Leg, None, float]:
    """Yields a leg, again if the end of a segment has cut it short; returns its `_seconds`."""
    for _ in range(_MOST_TRIES):
      yield from self._leg(run, calls)
      if self._seconds():
        return self._seconds()
    raise _GiveUp

  def _plan(self) -> Iterator[Leg]:
    """Yields legs until the fastest placement is known."""
    ratios: list[str] = []
    with contextlib.suppress(_GiveUp):
      yield from self._try_all(ratios)
    self.close()
    self._prepared = None
    if ratios:
      kept = _described(self.run.experiment.placement)
      self._say(f'placement: the run goes on with {kept}; it has tried {"; ".join(ratios)}')

  def _try_all(self, ratios: list[str]) -> Iterator[Leg]:
    """Yields the legs of `_plan`; adds a phrase for each placement that was measured."""
    calls = _FIRST_CALLS
    while True:
      own_s = yield from self._measured(self.run, calls)
      left_s = self._left_s()
      if left_s < LEAST_S or (
          _compiles_in_legs(self.run.experiment) and _SHARE * left_s < _COMPILE_S):
        return
      if calls * self._call * own_s >= _LEG_S:
        break
      # Each leg may compile a program anew, so few of them are made.
      calls = max(2 * calls, math.ceil(1.1 * _LEG_S / (own_s * self._call)))
    self._own_s = own_s
    self._left_to_spend_s = _SHARE * left_s
    calls = max(_LEG_CALLS, round(_LEG_S / (own_s * self._call)))
    for place in candidates(self.run.experiment):
      self._prepared = _Prepared(self.run, place)
      while not self._prepared.is_done:
        if self._left_to_spend_s < 0:
          return
        yield from self._leg(self.run, calls)
      other = self._prepared.run
      if other is None:
        continue
      gains = yield from self._compare(other, calls)
      gain = statistics.median(gains)
      ratios.append(f'{_described(place)}, {gain:.2f} times as fast')
      if len(gains) == _PAIRS and gain > _GAIN and min(gains) >= _NOT_SLOWER:
        self.run = other
        self._own_s /= gain

  def _compare(self, other: build.Run, calls: int) -> Generator[Leg, None, list[float]]:
    """Yields pairs of legs until one says that the other run is slower.

    Args:
      other: the run with other devices.
      calls: of a leg.

    Returns:
      The other run's speed over that of the fastest so far, of each pair.
    """
    gains: list[float] = []
    probe_calls = max(_PROBE_CALLS, round(_PROBE_SHARE * calls))
    # The machine may be slower than it was when the own speed was measured last.
    self._own_s = yield from self._measured(self.run, probe_calls)
    probe_s = yield from self._measured(other, probe_calls)
    if probe_s > _FAR_SLOWER * self._own_s:
      return [self._own_s / probe_s]
    for pair in range(_PAIRS):
      seconds = {}
      for run in (self.run, other)[::1 if pair % 2 else -1]:
        seconds[run is other] = yield from self._measured(run, calls)
      gains.append(seconds[False] / seconds[True])
      if gains[-1] < _NOT_SLOWER:
        break
    return gains


def candidates(experiment: Experiment) -> Sequence[PlacementOptions]:
  """Returns the placements that may be faster than the rule's; () if a run must keep its own."""
  given = experiment.placement
  # A replay, or what an auxiliary phase keeps, is shared out to the learner's devices.
  keeps = experiment.replay is not None or experiment.algorithm.auxiliary() is not None
  if not (given.auto and given.adapt) or not experiment.deterministic or keeps or (
      jax.process_count() > 1):
    return ()
  others = placing.alternatives(experiment, jax.local_device_count())
  if jax.default_backend() == 'cpu':
    return others
  # On accelerators, bits depend on the number of learner devices.
  learners = experiment.placement.learner_devices
  return [place for place in others if place.learner_devices == learners]


def _compiles_in_legs(experiment: Experiment) -> bool:
  """Returns whether programs compile while a leg waits; see `build.compile_learner`."""
  graph = experiment.scheme.graph
  return (graph.one_program or graph.separate_updates or experiment.spec.calls_python
          or jax.default_backend() != 'cpu')


def _described(place: PlacementOptions) -> str:
  return f'actor_devices={place.actor_devices} learner_devices={place.learner_devices}'


class _Prepared:
  """The run on other devices, which is built on a thread beside the training."""

  def __init__(self, run: build.Run, place: PlacementOptions):
    self.run: build.Run | None = None  # None if it cannot have these devices
    self.is_given_up = threading.Event()
    self._args = run, place
    # A process whose interpreter ends waits for it, since XLA would crash; see `cli.main.run`.
    self._thread = threading.Thread(target=self._build, name=stopping.BESIDE, daemon=False)
    self._thread.start()

  @property
  def is_done(self) -> bool:
    """Whether the run was built, or has failed."""
    return not self._thread.is_alive()

  def _build(self) -> None:
    run, place = self._args
    try:
      other = build.on_devices(run, place)
      if memory.check(other) or self.is_given_up.is_set():
        return
      build.compile_learner(other)
      self.run = other
    except Exception as error:  # noqa: BLE001 - the run itself goes on whatever happens here
      _logger.warning('placement: the run cannot try %s: %s: %s; placement.adapt=False turns this '
                      'off', _described(place), type(error).__name__,
                      options.shorten(str(error)))
