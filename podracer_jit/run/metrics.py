"""Computes the metrics of a run (episodes, throughput, delays) and writes its files."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from podracer_jit.actor import faults
from podracer_jit.envs.protocol import EnvironmentFailed
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.numerics.fingerprints import as_hex
from podracer_jit.run import journal, safe_files
from podracer_jit.run.build import Machines, Run
from podracer_jit.schemes.reports import Report, Waits
from podracer_jit.types import Episodes

Record = dict[str, Any]  # an update's line of metrics.jsonl
# Least seconds between two points in TensorBoard: a point takes as long as a short update.
EVENTS_S = 0.1
# Parts of `rollout_updates.finite_parts`, in words.
_PARTS = {'moments': 'the running statistics (normalise)',
          'optimizer': "the optimizer's statistics of gradients",
          'replay': 'the priorities of the replay'}
LIVES = 'lives'  # the field of receipts with the lives of actors, by name


class Meter:
  """Turns reports into records: one for each update, in order."""

  def __init__(self, window: int, frame_skip: int, waits: Callable[[], Waits],
               past: Mapping[str, Any], machines: Machines | None = None,
               check: Callable[[int, Episodes], None] = lambda update, episodes: None):
    """Creates a meter.

    Args:
      window: number of episodes that mean returns and lengths are over.
      frame_skip: frames of a step.
      waits: returns the seconds that actors and learner have waited since the segment began.
      past: the `meta` of the checkpoint that the run resumes from; empty for a new run.
      machines: that act outside of this process, if there are any.
      check: called with each update and its episodes; see `environment_check`.
    """
    self._check = check
    self._machines = machines
    self._lives: Mapping[str, int] = machines.lives() if machines else {}
    self._window = collections.deque(map(tuple, past.get('window', [])), maxlen=window)
    self._episodes = past.get('episodes', 0)
    self._elapsed = past.get('elapsed_s', 0.0)
    self._frame_skip = frame_skip
    self._waits = waits
    self._last_waits = Waits(0.0, 0.0)
    self._last_s = time.perf_counter()

  def meta(self) -> dict[str, Any]:
    """Returns the part of a checkpoint's `meta` from which a later meter continues."""
    return dict(window=list(self._window), episodes=self._episodes, elapsed_s=self._elapsed)

  def records(self, report: Report) -> Iterator[tuple[Record, Record]]:
    """Yields (metrics, receipt) of each update of the report.

    Raises:
      EnvironmentFailed: an environment of the next update has returned a wrong value.
      Diverged: the state after the update that was yielded is not finite.
    """
    # For arrays that are ready, this takes a fifth of the time of `jax.device_get`. The next
    # rollout runs meanwhile, on the same cores.
    metrics = jax.tree.map(np.asarray, report.metrics)

    # The updates of a call share its time evenly.
    now_s = time.perf_counter()
    waits = self._waits()
    seconds = (now_s - self._last_s) / report.count
    actor_wait_s = (waits.actor - self._last_waits.actor) / report.count
    learner_wait_s = (waits.learner - self._last_waits.learner) / report.count
    self._last_s = now_s
    self._last_waits = waits
    of_machines = self._machines.metrics() if self._machines else {}

    for i in range(report.count):
      update = jax.tree.map(lambda x, i=i: x[i], metrics)
      receipt = dict(update=int(update['update']), batch=as_hex(update.pop('batch')),
                     params=as_hex(update.pop('params')))
      receipt |= self._new_lives()
      episodes = update.pop('episodes')
      finite = update.pop('finite', {})
      self._check(receipt['update'], episodes)
      ended = np.asarray(episodes.ended)
      self._episodes += int(ended.sum())
      # Row by row, so that the order does not depend on which environments ran where.
      self._window.extend(zip(episodes.episode_return[ended].tolist(),
                              episodes.length[ended].tolist(), strict=True))
      self._elapsed += seconds
      returns, lengths = zip(*self._window, strict=True) if self._window else ((), ())
      valid = int(update.pop('valid'))
      steps = int(update.pop('steps'))
      record = dict(
          update=int(update.pop('update')), steps=steps, frames=steps * self._frame_skip,
          sps=valid / seconds, elapsed_s=self._elapsed,
          episode_return=_mean(returns), episode_length=_mean(lengths), episodes=self._episodes,
          actor_wait_s=actor_wait_s, learner_wait_s=learner_wait_s, **of_machines,
          # With a replay, CGD is the delay of a rollout until it is added, plus the age of the
          # drawn transitions.
          cgd=float(report.cgd[i] + update.get('sampled_age', 0.0)), gud=float(report.gud[i]))
      if 'sampled' in update:
        record['samples_per_s'] = int(update['sampled']) / seconds
      yield record | {name: float(value) for name, value in update.items()}, receipt
      # After the record, whose losses may show the cause.
      for name in finite:
        if not finite[name]:
          raise Diverged(f'update {record["update"]} ({steps:,} steps): {_PARTS[name]} are not '
                         'finite, because a number is too large to be squared in 32 bits')

  def _new_lives(self) -> dict[str, Mapping[str, int]]:
    """Returns the receipt's field with the lives of actors, if one was begun again since."""
    lives = self._machines.lives() if self._machines else {}
    if lives == self._lives:
      return {}
    self._lives = lives
    return {LIVES: lives}


def _mean(values) -> float | None:
  """Returns the mean; None if there are no values."""
  return float(np.mean(values)) if values else None


class Files:
  """metrics.jsonl, receipts.jsonl and TensorBoard events of a workdir, open for a whole run."""

  def __init__(self, workdir: Path, update: int, steps: int, tensorboard: bool):
    """Opens the files to append to them; removes the lines after the checkpoint.

    Args:
      workdir: the workdir of the run.
      update: the update of the checkpoint that the run resumes from; 0 for a new run.
      steps: valid steps of that checkpoint.
      tensorboard: whether to write events.

    Raises:
      OSError: a file cannot be read or written; the error names it.
    """
    self._paths = [workdir / journal.METRICS, workdir / journal.RECEIPTS]
    self.problems = [line for path in self._paths for line in journal.cut(workdir, path, update)]
    self._metrics, self._receipts = (path.open('a', buffering=1) for path in self._paths)
    # TensorBoard's file names have whole seconds. Without the suffix, a run that is resumed within
    # a second would overwrite the file.
    self._events = SummaryWriter(
        str(workdir / 'tensorboard'), purge_step=steps + 1, flush_secs=10,
        filename_suffix=f'.{update}') if tensorboard else None
    self._shown_s = -math.inf  # time of the newest point in TensorBoard
    self._not_shown = None  # the newest record, if TensorBoard does not have it

  def begin_segment(self, header: Mapping[str, Any]) -> None:
    """Writes the header of a segment to the receipts."""
    with safe_files.naming(self._paths[1]):
      self._receipts.write(json.dumps(dict(header)) + '\n')

  def write(self, record: Record, receipt: Record) -> None:
    """Appends an update; TensorBoard gets one every EVENTS_S, and the last one of a segment.

    Raises:
      OSError: a file cannot be written; the error names it.
    """
    with safe_files.naming(self._paths[0]):
      self._metrics.write(json.dumps(_finite(record)) + '\n')
    with safe_files.naming(self._paths[1]):
      self._receipts.write(json.dumps(receipt) + '\n')
    self._not_shown = record
    if self._events and time.perf_counter() - self._shown_s >= EVENTS_S:
      self._shown_s = time.perf_counter()
      self._show()

  def show_evaluation(self, record: Mapping[str, Any]) -> None:
    """Adds an evaluation to TensorBoard's events."""
    if self._events:
      for name, value in record.items():
        if isinstance(value, float):
          self._events.add_scalar(f'eval/{name}', value, record['steps'])

  def flush(self) -> None:
    """Writes buffered events, since the process may end during the save that follows."""
    if self._events:
      if self._not_shown:
        self._show()
      self._events.flush()

  def _show(self) -> None:
    """Adds the newest record to TensorBoard's events."""
    record = self._not_shown
    self._not_shown = None
    for name, value in record.items():
      if value is not None and name not in ('update', 'steps', 'frames'):
        self._events.add_scalar(name, value, record['steps'])

  def close(self) -> None:
    """Flushes and closes all files."""
    # A file that could not be written fails again here. That error was raised before.
    for file in (self._metrics, self._receipts):
      with contextlib.suppress(OSError):
        file.close()
    if self._events:
      self.flush()
      self._events.close()


def environment_check(run: Run, segment: int) -> Callable[[int, Episodes], None]:
  """Returns the check of the values that environments have returned in an update of a segment.

  It takes the update and its episodes, and raises EnvironmentFailed, in one line, for the first
  value that cannot be learned from.
  """
  experiment = run.experiment
  # Environments that go on in the next segment have the seeds of the first one.
  segment = 0 if run.keeps_envs else segment

  def check(update: int, episodes: Episodes) -> None:
    fault = faults.describe(episodes, experiment.spec)
    if fault is None:
      return
    env_id, what = fault
    who = f'environment {env_id}'
    if not (run.machines and run.machines.lives()):
      who += f', seed {env_seeds(experiment.seed, segment, env_id, 1)[0]}'
    raise EnvironmentFailed(f'{experiment.env.task}: {what} ({who}), in update {update}')

  return check


class Diverged(RuntimeError):
  """Raised if a loss, a gradient or a part of the train state is not finite."""


def check_finite(record: Record) -> None:
  """Checks that all metrics are finite; they are already on the host, so the check is cheap.

  Raises:
    Diverged: the message has the update and every loss term.
  """
  broken = [name for name, value in record.items()
            if isinstance(value, float) and not math.isfinite(value)]
  if broken:
    # The learner's metrics come after the delays, of which 'gud' is the last.
    names = list(record)
    learner_names = names[names.index('gud') + 1:]
    raise Diverged(f'update {record["update"]} ({record["steps"]:,} steps): '
                   f'{", ".join(broken)} not finite ('
                   + ', '.join(f'{name} {record[name]:g}' for name in learner_names) + ')')


def _finite(record: Record) -> Record:
  """Returns the record with None for each number that is not finite, which JSON cannot hold."""
  return {k: None if isinstance(v, float) and not math.isfinite(v) else v
          for k, v in record.items()}
