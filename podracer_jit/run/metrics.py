"""What a run tells: episode statistics, throughput, delays, and the files they go to."""

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

from podracer_jit.numerics.fingerprints import as_hex
from podracer_jit.run import journal, safe_files
from podracer_jit.schemes.reports import Report, Waits

Record = dict[str, Any]  # one update, as metrics.jsonl has it
EVENTS_S = 0.1  # at least between two points in TensorBoard: each costs as much as a short update


class Meter:
  """Turns reports into records: one for each update, in order."""

  def __init__(self, window: int, frame_skip: int, waits: Callable[[], Waits],
               past: Mapping[str, Any]):
    """Goes on from `past`, the `meta` of a checkpoint (or nothing)."""
    self._window = collections.deque(map(tuple, past.get('window', [])), maxlen=window)
    self._episodes = past.get('episodes', 0)
    self._elapsed = past.get('elapsed_s', 0.0)
    self._frame_skip = frame_skip
    self._waits, self._waited = waits, Waits(0.0, 0.0)
    self._last = time.perf_counter()

  def meta(self) -> dict[str, Any]:
    """Returns the part of a checkpoint's `meta` from which the statistics go on."""
    return dict(window=list(self._window), episodes=self._episodes, elapsed_s=self._elapsed)

  def records(self, report: Report) -> Iterator[tuple[Record, Record]]:
    """Yields (metrics, receipt) of each update of the report."""
    # Of ready arrays a fifth of the time that device_get takes, beside which the next rollout runs.
    metrics = jax.tree.map(np.asarray, report.metrics)
    now, waited = time.perf_counter(), self._waits()
    seconds = (now - self._last) / report.count  # a call's updates share its time evenly
    spent = [(new - old) / report.count for new, old in zip(waited, self._waited, strict=True)]
    self._last, self._waited = now, waited
    for i in range(report.count):
      one = jax.tree.map(lambda x, i=i: x[i], metrics)
      receipt = dict(update=int(one['update']), batch=as_hex(one.pop('batch')),
                     params=as_hex(one.pop('params')))
      episodes = one.pop('episodes')
      ended = np.asarray(episodes.ended)
      self._episodes += int(ended.sum())
      # Row by row, so that the order does not depend on which environments ran where.
      self._window.extend(zip(episodes.episode_return[ended].tolist(),
                              episodes.length[ended].tolist(), strict=True))
      self._elapsed += seconds
      returns, lengths = zip(*self._window, strict=True) if self._window else ((), ())
      valid, steps = int(one.pop('valid')), int(one.pop('steps'))
      record = dict(
          update=int(one.pop('update')), steps=steps, frames=steps * self._frame_skip,
          sps=valid / seconds, elapsed_s=self._elapsed,
          episode_return=_mean(returns), episode_length=_mean(lengths), episodes=self._episodes,
          actor_wait_s=spent[0], learner_wait_s=spent[1],
          # From a replay: what rollouts were late when they came, and the age of what was drawn.
          cgd=float(report.cgd[i] + one.get('sampled_age', 0.0)), gud=float(report.gud[i]))
      if 'sampled' in one:
        record['samples_per_s'] = int(one['sampled']) / seconds
      yield record | {name: float(value) for name, value in one.items()}, receipt


def _mean(values) -> float | None:
  return float(np.mean(values)) if values else None


class Files:
  """metrics.jsonl, receipts.jsonl and TensorBoard events of a workdir, open for a whole run."""

  def __init__(self, workdir: Path, update: int, steps: int, tensorboard: bool):
    """Opens them to go on after `update` and its steps: what was lost with a crash goes.

    Args:
      workdir: of the run.
      update: of the checkpoint that the run goes on from; 0 at its beginning.
      steps: of that checkpoint.
      tensorboard: whether to write events.

    Raises:
      OSError: naming the file.
    """
    self._paths = [workdir / journal.METRICS, workdir / journal.RECEIPTS]
    self.problems = [words for path in self._paths for words in journal.cut(workdir, path, update)]
    self._metrics, self._receipts = (path.open('a', buffering=1) for path in self._paths)
    # The name of a file has whole seconds; that of a run stopped at once would be written over.
    self._events = SummaryWriter(
        str(workdir / 'tensorboard'), purge_step=steps + 1, flush_secs=10,
        filename_suffix=f'.{update}') if tensorboard else None
    self._shown_s, self._not_shown = -math.inf, None  # in TensorBoard

  def begin_segment(self, header: Mapping[str, Any]) -> None:
    """Writes the header of a segment to the receipts."""
    with safe_files.naming(self._paths[1]):
      self._receipts.write(json.dumps(dict(header)) + '\n')

  def write(self, record: Record, receipt: Record) -> None:
    """Appends one update; to TensorBoard's events only now and then, and the last of a segment.

    Raises:
      OSError: naming the file.
    """
    with safe_files.naming(self._paths[0]):
      self._metrics.write(json.dumps(_finite(record)) + '\n')
    with safe_files.naming(self._paths[1]):
      self._receipts.write(json.dumps(receipt) + '\n')
    self._not_shown = record
    if self._events and time.perf_counter() - self._shown_s >= EVENTS_S:
      self._shown_s = time.perf_counter()
      self._show()

  def flush(self) -> None:
    """Writes what is not written yet: what comes next may be the end."""
    if self._events:
      if self._not_shown:
        self._show()
      self._events.flush()

  def _show(self) -> None:
    record, self._not_shown = self._not_shown, None
    for name, value in record.items():
      if value is not None and name not in ('update', 'steps', 'frames'):
        self._events.add_scalar(name, value, record['steps'])

  def close(self) -> None:
    """Flushes everything."""
    # A file that cannot be written to says so again; nothing more is to be lost by that.
    for file in (self._metrics, self._receipts):
      with contextlib.suppress(OSError):
        file.close()
    if self._events:
      self.flush()
      self._events.close()


class Diverged(RuntimeError):
  """A loss or a gradient is not a finite number any more."""


def check_finite(record: Record) -> None:
  """Looks at the numbers that were fetched anyway, so nothing waits for it.

  Raises:
    Diverged: naming the update and every term.
  """
  terms = {k: v for k, v in record.items() if isinstance(v, float)}
  broken = [name for name, value in terms.items() if not math.isfinite(value)]
  if broken:
    last = list(record)[list(record).index('gud') + 1:]  # what the learner says, after the delays
    raise Diverged(f'update {record["update"]} ({record["steps"]:,} steps): '
                   f'{", ".join(broken)} not finite ('
                   + ', '.join(f'{name} {record[name]:g}' for name in last) + ')')


def _finite(record: Record) -> Record:
  """Replaces numbers that are not finite, which JSON does not have, by None."""
  return {k: None if isinstance(v, float) and not math.isfinite(v) else v
          for k, v in record.items()}
