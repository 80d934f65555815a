"""Turns reports of updates into metrics and receipts: episodes, throughput, delays."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from podracer_jit import schedules
from podracer_jit.actor import faults
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.errors import EnvironmentFailed
from podracer_jit.experiment.schema import Experiment
from podracer_jit.numerics import counters
from podracer_jit.numerics.fingerprints import as_hex
from podracer_jit.runtime import machine
from podracer_jit.schemes.reports import Report, Waits
from podracer_jit.training.sinks import Diverged, Record
from podracer_jit.types import Episodes

# Parts of `updates.finite_parts`, in words.
_PARTS = {'moments': 'the running statistics (normalise)',
          'optimizer': "the optimizer's statistics of gradients",
          'replay': 'the priorities of the replay'}
# Rates are over the updates of so many seconds, so that reports that arrive together, as after a
# pause of the writer, do not count as the speed of an instant.
RATE_S = 10.0
DEVICE_MEMORY = 'device_memory_mb'
GREEDIEST = 'greediest_return'
# The least number of episodes over which this metric is a mean.
_GREEDIEST_EPISODES = 10
LIVES = 'lives'  # the field of receipts with the lives of actors, by name


class Meter:
  """Turns reports into records: one for each update, in order."""

  def __init__(self, experiment: Experiment, past: Mapping[str, Any],
               wall_s: Callable[[], float] = time.perf_counter):
    """Creates a meter; `begin` comes before the first report.

    Args:
      experiment: of the run.
      past: the `meta` of the checkpoint that the run resumes from; empty for a new run.
      wall_s: returns the seconds that commands have worked on the run, see `wall_clock`.
    """
    self._wall_s = wall_s
    self._experiment = experiment
    self._window = collections.deque(map(tuple, past.get('window', [])),
                                     maxlen=experiment.log.window)
    self._greediest = greediest_envs(experiment)
    share = experiment.log.window * len(self._greediest) // experiment.env.num_envs
    self._greediest_window = collections.deque(past.get('greediest', []),
                                               maxlen=max(share, _GREEDIEST_EPISODES))
    # Episodes since the newest line of metrics.jsonl: number, sums of returns and of lengths.
    self._unlogged = tuple(past.get('unlogged', (0, 0.0, 0.0)))
    self._episodes = past.get('episodes', 0)
    self._elapsed = past.get('elapsed_s', 0.0)
    self._frame_skip = experiment.spec.frame_skip
    self._acting = (0, 0.0)  # valid steps, and the seconds in which actors worked on them
    self.begin()

  def begin(self, lives: Mapping[str, int] | None = None) -> None:
    """Begins a segment; its header has the lives of actors."""
    self._lives = lives or {}
    self._last_waits = Waits(0.0, 0.0)
    self._last_s = time.perf_counter()
    # (time, valid steps, drawn transitions) at the ends of reports; the first begins the window.
    self._totals: collections.deque[tuple[float, int, int]] = collections.deque()

  @property
  def episodes(self) -> int:
    """Episodes that have ended."""
    return self._episodes

  @property
  def acting_s(self) -> float:
    """Seconds in which actors made a step, on the average; 0 as long as that is not known."""
    steps, seconds = self._acting
    return seconds / steps if steps else 0.0

  def meta(self) -> dict[str, Any]:
    """Returns the part of a checkpoint's `meta` from which a later meter continues."""
    return dict(window=list(self._window), greediest=list(self._greediest_window),
                unlogged=self._unlogged, episodes=self._episodes, elapsed_s=self._elapsed,
                wall_s=self._wall_s())

  def records(self, report: Report) -> Iterator[tuple[Record, Record]]:
    """Yields (metrics, receipt) of each update of the report.

    Raises:
      Diverged: the state after the update that was yielded is not finite.
    """
    for x in jax.tree.leaves(report.metrics):
      if isinstance(x, jax.Array) and any(d.platform != 'cpu' for d in x.devices()):
        x.copy_to_host_async()  # so that the device is waited for once
    # For arrays that are ready, this takes a fifth of the time of `jax.device_get`. The next
    # rollout runs meanwhile, on the same cores.
    metrics = jax.tree.map(np.asarray, report.metrics)

    # The updates of a call share its time evenly.
    now_s = time.perf_counter()
    waits = report.waits
    self._last_s = max(self._last_s, report.since_s)
    seconds = (now_s - self._last_s) / report.count
    actor_wait_s = (waits.actor - self._last_waits.actor) / report.count
    learner_wait_s = (waits.learner - self._last_waits.learner) / report.count
    if self._totals:  # the first report may have the time of compiling
      steps, before_s = self._acting
      self._acting = (steps + int(metrics['valid'][:report.count].sum()),
                      before_s + (seconds - actor_wait_s) * report.count)
    sps, samples_per_s = self._rates(now_s, metrics, report.count)
    process = {'wall_s': self._wall_s(), 'memory_mb': machine.resident_memory() / 1e6,
               **device_memory(jax.local_devices())}
    self._last_s = now_s
    self._last_waits = waits

    for i in range(report.count):
      update = jax.tree.map(lambda x, i=i: x[i], metrics)
      receipt = dict(update=int(update['update']), batch=as_hex(update.pop('batch')),
                     params=as_hex(update.pop('params')))
      receipt |= self._new_lives(report.lives)
      episodes = update.pop('episodes')
      finite = update.pop('finite', {})
      ended = np.asarray(episodes.ended)
      self._episodes += int(ended.sum())
      # Row by row, so that the order does not depend on which environments ran where.
      returns = episodes.episode_return[ended].tolist()
      lengths = episodes.length[ended].tolist()
      self._window.extend(zip(returns, lengths, strict=True))
      greediest = self._greediest_return(episodes)
      self._unlogged = tuple(before + now for before, now in zip(
          self._unlogged, (len(returns), sum(returns), sum(lengths)), strict=True))
      self._elapsed += seconds
      steps = counters.fetch_int(update.pop('steps'))
      mean_return, mean_length = self._episode_means(int(update['update']), steps)
      del update['valid']
      record = dict(
          update=int(update.pop('update')), steps=steps, frames=steps * self._frame_skip,
          sps=sps, elapsed_s=self._elapsed, **process,
          episode_return=mean_return, episode_length=mean_length, **greediest,
          episodes=self._episodes,
          actor_wait_s=actor_wait_s, learner_wait_s=learner_wait_s, **report.machines,
          # With a replay, CGD is the delay of a rollout until it is added, plus the age of the
          # drawn transitions; there is no gradient if none are drawn.
          cgd=float(report.cgd[i] + update.get('sampled_age', 0.0)
                    if update.get('sampled', 1) > 0 else 0.0), gud=float(report.gud[i]))
      if 'sampled' in update:
        record['samples_per_s'] = samples_per_s
      yield record | {name: float(value) for name, value in update.items()}, receipt
      # After the record, whose losses may show the cause.
      for name in finite:
        if not finite[name]:
          raise Diverged(f'update {record["update"]} ({steps:,} steps): {_PARTS[name]} are not '
                         'finite, because a number is too large to be squared in 32 bits')

  def _episode_means(self, update: int, steps: int) -> tuple[float | None, float | None]:
    """Returns the mean return and length of the newest episodes, None before the first has ended.

    They are the episodes of the window, or all since the newest line of metrics.jsonl if these are
    more and lines are left out.

    Args:
      update: after which the episodes have ended.
      steps: valid steps until then.
    """
    count, returns, lengths = self._unlogged
    if self._experiment.logs(update, steps):
      self._unlogged = (0, 0.0, 0.0)
    if count > len(self._window) and self._experiment.log.every_updates > 1:
      return returns / count, lengths / count
    if not self._window:
      return None, None
    window_returns, window_lengths = zip(*self._window, strict=True)
    return float(np.mean(window_returns)), float(np.mean(window_lengths))

  def _greediest_return(self, episodes: Episodes) -> Record:
    """Returns the metric with the mean return of the environments that explore least.

    It is empty if environments do not differ, and None before the first of their episodes has
    ended. It is over as many of their newest episodes as there are on the average in `log.window`,
    or over 10.

    Args:
      episodes: of an update, NumPy arrays.
    """
    if not len(self._greediest):
      return {}
    if episodes.fault is not None:
      # Rollouts may arrive in any order, so the column does not tell which environment it is.
      ended = episodes.ended & np.isin(faults.envs(episodes), self._greediest)
      self._greediest_window.extend(episodes.episode_return[ended].tolist())
    window = self._greediest_window
    return {GREEDIEST: float(np.mean(window)) if window else None}

  def _rates(self, now_s: float, metrics: Mapping[str, Any], count: int) -> tuple[float, float]:
    """Returns valid steps and drawn transitions a second, over the updates of RATE_S seconds.

    Args:
      now_s: time of the report.
      metrics: of the report, arrays [count or more, ...].
      count: updates in the report.
    """
    valid = int(metrics['valid'][:count].sum())
    sampled = int(metrics['sampled'][:count].sum()) if 'sampled' in metrics else 0
    if not self._totals:
      # The first update may include the compilation of the learner, so it begins the window.
      self._totals.append((now_s, 0, 0))
      seconds = now_s - self._last_s
      return valid / seconds, sampled / seconds
    _, valid_before, sampled_before = self._totals[-1]
    self._totals.append((now_s, valid_before + valid, sampled_before + sampled))
    while now_s - self._totals[1][0] >= RATE_S:
      self._totals.popleft()
    first_s, valid_first, sampled_first = self._totals[0]
    seconds = now_s - first_s
    return ((valid_before + valid - valid_first) / seconds,
            (sampled_before + sampled - sampled_first) / seconds)

  def _new_lives(self, lives: Mapping[str, int]) -> dict[str, Mapping[str, int]]:
    """Returns the receipt's field with the lives of actors, if one was begun again since."""
    if lives == self._lives:
      return {}
    self._lives = lives
    return {LIVES: lives}


def greediest_envs(experiment: Experiment) -> np.ndarray:
  """Returns the indices of the environments that explore least; empty if all explore alike.

  If an option changes during a run, its value at half of `total_steps` counts.
  """
  algorithm = experiment.algorithm
  if schedules.scheduled(algorithm):
    algorithm = algorithm.at(counters.of(experiment.total_steps // 2,
                                         algorithm.state_shapes.steps))
  exploration = algorithm.exploration(experiment.env.num_envs)
  if exploration is None:
    return np.arange(0)
  exploration = np.asarray(exploration)
  least = exploration == exploration.min()
  return np.flatnonzero(least & ~least.all())


def wall_clock(past: Mapping[str, Any], began_s: float) -> Callable[[], float]:
  """Returns a function that gives the seconds that commands have worked on a run.

  These are all seconds since a command began: imports, compilation, environments, saves and pauses.
  A command that resumes the run adds to the seconds of the checkpoint. Time between commands does
  not count, nor what a killed command did after its newest checkpoint, as it is done again.

  Args:
    past: the `meta` of the checkpoint that the run resumes from.
    began_s: when the command began, by `time.perf_counter`.
  """
  # Checkpoints of earlier versions lack it.
  before_s = past.get('wall_s', past.get('elapsed_s', 0.0))
  return lambda: before_s + time.perf_counter() - began_s


def device_memory(devices: Sequence[jax.Device]) -> Record:
  """Returns the metric with the most memory that has been in use on one of the devices.

  It is empty where devices do not count their memory, as CPUs do not.
  """
  counted = [stats['peak_bytes_in_use'] for stats in (device.memory_stats() for device in devices)
             if stats and 'peak_bytes_in_use' in stats]
  return {DEVICE_MEMORY: max(counted) / 1e6} if counted else {}


def environment_check(experiment: Experiment, segment: int) -> Callable[[Report], None]:
  """Returns the check of the values that environments have returned in a segment.

  It takes a report, and raises EnvironmentFailed, in one line, for the first value that cannot be
  learned from.
  """
  # Environments that go on in the next segment have the seeds of the first one.
  segment = 0 if experiment.keeps_envs else segment

  def check(report: Report) -> None:
    episodes = report.metrics['episodes']
    if episodes.fault is None or not np.asarray(episodes.fault)[:report.count, ..., 0].any():
      return
    for i in range(report.count):
      of_update = jax.tree.map(lambda x, i=i: np.asarray(x)[i], episodes)
      if not of_update.fault[..., 0].any():
        continue
      env_id, what = faults.describe(of_update, experiment.spec)
      who = f'environment {env_id}'
      if not report.lives:
        who += f', seed {env_seeds(experiment.seed, segment, env_id, 1)[0]}'
      update = int(np.asarray(report.metrics['update'])[i])
      raise EnvironmentFailed(f'{experiment.env.task}: {what} ({who}), in update {update}')

  return check
