"""Computes the metrics of a run (episodes, throughput, delays) and writes its files."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
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
from podracer_jit.experiment.build import Machines, Run
from podracer_jit.numerics.fingerprints import as_hex
from podracer_jit.schemes.reports import Report, Waits
from podracer_jit.workdir import checkpoints, files, journal

Record = dict[str, Any]  # an update's line of metrics.jsonl
# Least seconds between two points in TensorBoard: a point takes as long as a short update.
EVENTS_S = 0.1
# Parts of `rollout_updates.finite_parts`, in words.
_PARTS = {'moments': 'the running statistics (normalise)',
          'optimizer': "the optimizer's statistics of gradients",
          'replay': 'the priorities of the replay'}
# Rates are over the updates of so many seconds, so that reports that arrive together, as after a
# pause of the writer, do not count as the speed of an instant.
RATE_S = 10.0
STILL_UPDATES = 10  # updates in a row without any change, after which there is a warning
LIVES = 'lives'  # the field of receipts with the lives of actors, by name


class Meter:
  """Turns reports into records: one for each update, in order."""

  def __init__(self, window: int, frame_skip: int, waits: Callable[[], Waits],
               past: Mapping[str, Any], machines: Machines | None = None,
               wall_s: Callable[[], float] = time.perf_counter):
    """Creates a meter.

    Args:
      window: number of episodes that mean returns and lengths are over.
      frame_skip: frames of a step.
      waits: returns the seconds that actors and learner have waited since the segment began.
      past: the `meta` of the checkpoint that the run resumes from; empty for a new run.
      machines: that act outside of this process, if there are any.
      wall_s: returns the seconds that commands have worked on the run, see `wall_clock`.
    """
    self._wall_s = wall_s
    self._machines = machines
    self._lives: Mapping[str, int] = machines.lives() if machines else {}
    self._window = collections.deque(map(tuple, past.get('window', [])), maxlen=window)
    self._episodes = past.get('episodes', 0)
    self._elapsed = past.get('elapsed_s', 0.0)
    self._frame_skip = frame_skip
    self._waits = waits
    self._last_waits = Waits(0.0, 0.0)
    self._last_s = time.perf_counter()
    # (time, valid steps, drawn transitions) at the ends of reports; the first begins the window.
    self._totals: collections.deque[tuple[float, int, int]] = collections.deque()

  def meta(self) -> dict[str, Any]:
    """Returns the part of a checkpoint's `meta` from which a later meter continues."""
    return dict(window=list(self._window), episodes=self._episodes, elapsed_s=self._elapsed,
                wall_s=self._wall_s())

  def records(self, report: Report) -> Iterator[tuple[Record, Record]]:
    """Yields (metrics, receipt) of each update of the report.

    Raises:
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
    sps, samples_per_s = self._rates(now_s, metrics, report.count)
    wall_s = self._wall_s()
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
      ended = np.asarray(episodes.ended)
      self._episodes += int(ended.sum())
      # Row by row, so that the order does not depend on which environments ran where.
      self._window.extend(zip(episodes.episode_return[ended].tolist(),
                              episodes.length[ended].tolist(), strict=True))
      self._elapsed += seconds
      returns, lengths = zip(*self._window, strict=True) if self._window else ((), ())
      del update['valid']
      steps = int(update.pop('steps'))
      record = dict(
          update=int(update.pop('update')), steps=steps, frames=steps * self._frame_skip,
          sps=sps, elapsed_s=self._elapsed, wall_s=wall_s,
          episode_return=_mean(returns), episode_length=_mean(lengths), episodes=self._episodes,
          actor_wait_s=actor_wait_s, learner_wait_s=learner_wait_s, **of_machines,
          # With a replay, CGD is the delay of a rollout until it is added, plus the age of the
          # drawn transitions.
          cgd=float(report.cgd[i] + update.get('sampled_age', 0.0)), gud=float(report.gud[i]))
      if 'sampled' in update:
        record['samples_per_s'] = samples_per_s
      yield record | {name: float(value) for name, value in update.items()}, receipt
      # After the record, whose losses may show the cause.
      for name in finite:
        if not finite[name]:
          raise Diverged(f'update {record["update"]} ({steps:,} steps): {_PARTS[name]} are not '
                         'finite, because a number is too large to be squared in 32 bits')

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

  def _new_lives(self) -> dict[str, Mapping[str, int]]:
    """Returns the receipt's field with the lives of actors, if one was begun again since."""
    lives = self._machines.lives() if self._machines else {}
    if lives == self._lives:
      return {}
    self._lives = lives
    return {LIVES: lives}


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


class Standstill:
  """Notices that nothing is learned: gradients that are exactly 0, or parameters that stay equal.

  It reads what updates report anyway: the norm of the gradient, and the fingerprint of the
  parameters. Updates that take no gradient step, as before a replay is filled, do not count. Equal
  parameters do not count at a learning rate of 0, to which annealing leads.
  """

  def __init__(self):
    self._zero_gradients = 0
    self._equal_params = 0
    self._params = ''
    self._is_warned = False

  def notice(self, record: Record, receipt: Record) -> str:
    """Adds a 'warning' to the record if STILL_UPDATES or more updates in a row changed nothing.

    Args:
      record: the metrics of the next update.
      receipt: the receipt of the next update.

    Returns:
      The warning, if the update before had none; otherwise ''.
    """
    if record.get('sampled', 1) > 0:
      self._zero_gradients = self._zero_gradients + 1 if record.get('grad_norm') == 0 else 0
      is_equal = receipt['params'] == self._params and record.get('learning_rate', 1) > 0
      self._equal_params = self._equal_params + 1 if is_equal else 0
    self._params = receipt['params']
    line = ''
    if self._zero_gradients >= STILL_UPDATES:
      line = (f'the gradient was exactly 0 in {self._zero_gradients:,} updates in a row, so '
              'nothing is learned; does the loss depend on the parameters?')
    elif self._equal_params >= STILL_UPDATES:
      line = (f'the parameters did not change in {self._equal_params:,} updates in a row, though '
              f'the learning rate is {record.get("learning_rate", 0):g}')
    is_new = bool(line) and not self._is_warned
    self._is_warned = bool(line)
    if line:
      record['warning'] = line
    return line if is_new else ''


def _mean(values) -> float | None:
  """Returns the mean; None if there are no values."""
  return float(np.mean(values)) if values else None


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
  """Turns an OSError of the block into a `checkpoints.NotSaved` that names the file."""
  try:
    with files.naming(path):
      yield
  except OSError as error:
    raise checkpoints.NotSaved(str(error)) from error


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
    self.problems = checkpoints.cut_journals(workdir, update)
    self._metrics, self._receipts = (path.open('a', buffering=1) for path in self._paths)
    files.sync_folder(workdir)
    # TensorBoard's file names have whole seconds. Without the suffix, a run that is resumed within
    # a second would overwrite the file.
    self._events = SummaryWriter(
        str(workdir / 'tensorboard'), purge_step=steps + 1, flush_secs=10,
        filename_suffix=f'.{update}') if tensorboard else None
    self._shown_s = -math.inf  # time of the newest point in TensorBoard
    self._not_shown = None  # the newest record, if TensorBoard does not have it

  def begin_segment(self, header: Mapping[str, Any]) -> None:
    """Writes the header of a segment to the receipts.

    Raises:
      checkpoints.NotSaved: they cannot be written.
    """
    with _writing(self._paths[1]):
      self._receipts.write(json.dumps(dict(header)) + '\n')

  def write(self, record: Record, receipt: Record) -> None:
    """Appends an update; TensorBoard gets one every EVENTS_S, and the last one of a segment.

    Raises:
      checkpoints.NotSaved: a file cannot be written; the error names it.
    """
    with _writing(self._paths[0]):
      self._metrics.write(json.dumps(_finite(record)) + '\n')
    with _writing(self._paths[1]):
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
    """Writes all to the disk, before a checkpoint is saved that counts on it.

    After a power failure, there is no complete checkpoint without the lines of its updates.

    Raises:
      checkpoints.NotSaved: a file cannot be written; the error names it.
    """
    for path, file in zip(self._paths, (self._metrics, self._receipts), strict=True):
      with _writing(path):
        os.fsync(file.fileno())
    if self._events:
      self._flush_events()

  def _flush_events(self) -> None:
    if self._not_shown:
      self._show()
    self._events.flush()

  def _show(self) -> None:
    """Adds the newest record to TensorBoard's events."""
    record = self._not_shown
    self._not_shown = None
    for name, value in record.items():
      if isinstance(value, int | float) and name not in ('update', 'steps', 'frames'):
        self._events.add_scalar(name, value, record['steps'])

  def close(self) -> None:
    """Closes all files."""
    # A file that could not be written fails again here. That error was raised before.
    for file in (self._metrics, self._receipts):
      with contextlib.suppress(OSError):
        file.close()
    if self._events:
      self._flush_events()
      self._events.close()


def environment_check(run: Run, segment: int) -> Callable[[Report], None]:
  """Returns the check of the values that environments have returned in a segment.

  It takes a report, and raises EnvironmentFailed, in one line, for the first value that cannot be
  learned from.
  """
  experiment = run.experiment
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
      if not (run.machines and run.machines.lives()):
        who += f', seed {env_seeds(experiment.seed, segment, env_id, 1)[0]}'
      update = int(np.asarray(report.metrics['update'])[i])
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
