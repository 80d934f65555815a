"""Sinks that show a run as curves, under the names of `metrics`: TensorBoard, wandb and trackio.

A tracker of a user's own is a `Sink` like these: `begin` gets the config, `update` and `evaluated`
the records, and `metrics.shown` the name under which a metric is shown.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import importlib.util
import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from podracer_jit import metrics
from podracer_jit.errors import Refused
from podracer_jit.options import flat, shorten
from podracer_jit.training.sinks import Record, Sink, Start
from podracer_jit.workdir import files

# Least seconds between two points: a point in TensorBoard takes as long as a short update.
EVENTS_S = 0.1
FLUSHED_S = 10.0  # seconds after which TensorBoard sees points at the latest
TRACKED_S = 1.0  # of trackers that may send it to another machine
RUNS = 'tracker.json'  # names the run of each tracker, into which a run that goes on writes
_PROJECT = 'podracer_jit'


class Tracker(Sink):
  """Base class: shows updates at intervals, the last one before a checkpoint, and evaluations."""

  def __init__(self, workdir: Path, least_s: float):
    """Creates it.

    Args:
      workdir: the workdir of the run.
      least_s: least seconds between two updates that are shown.
    """
    self._workdir = workdir
    self._least_s = least_s
    self._shown_s = -math.inf  # time of the newest point
    self._not_shown: Record | None = None  # the newest record, if there is no point of it
    self._has_config = False

  @abc.abstractmethod
  def show(self, numbers: Mapping[str, float], steps: int) -> None:
    """Shows numbers by their names, after so many valid steps."""

  @abc.abstractmethod
  def show_config(self, config: Mapping[str, Any], steps: int) -> None:
    """Shows the config, nested dicts of plain values, with which a run goes on after some steps."""

  def show_video(self, path: Path, steps: int) -> None:
    """Shows the video of an evaluation, an MP4 file; by default does nothing."""

  def begin(self, start: Start) -> None:
    """Shows the config of the first segment; it does not change while a program runs."""
    if not self._has_config:
      self.show_config(start.config, start.steps)
    self._has_config = True

  def update(self, record: Record, receipt: Record) -> None:
    """Shows an update, unless one was shown just before."""
    self._not_shown = record
    if time.perf_counter() - self._shown_s >= self._least_s:
      self._shown_s = time.perf_counter()
      self._show_newest()

  def evaluated(self, record: Mapping[str, Any]) -> None:
    """Shows an evaluation, and its video."""
    self.show({metrics.EVALUATIONS[name].shown: value for name, value in _numbers(record).items()
               if name in metrics.EVALUATIONS and metrics.EVALUATIONS[name].shown},
              record['steps'])
    if 'video' in record:
      self.show_video(self._workdir / record['video'], record['steps'])

  def before_save(self) -> None:
    """Shows the newest update."""
    if self._not_shown:
      self._show_newest()

  def close(self) -> None:
    """Shows the newest update."""
    self.before_save()

  def _show_newest(self) -> None:
    record = self._not_shown
    self._not_shown = None
    named = {metrics.shown(name): value for name, value in _numbers(record).items()}
    self.show({name: value for name, value in named.items() if name}, record['steps'])


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
  return {name: value for name, value in record.items()
          if isinstance(value, int | float) and not isinstance(value, bool)}


class TensorBoard(Tracker):
  """TensorBoard's events; the config is a text, and the hparams of the run."""

  def __init__(self, workdir: Path, update: int, steps: int):
    """Opens a file of events.

    Args:
      workdir: the workdir of the run.
      update: the update that the run resumes from; 0 for a new run.
      steps: valid steps of that update.

    Raises:
      NotSaved: it cannot be written.
    """
    from tensorboardX.event_file_writer import EventsWriter  # only trainings need it
    from tensorboardX.proto import event_pb2
    super().__init__(workdir, EVENTS_S)
    self._new_event = event_pb2.Event
    folder = workdir / 'tensorboard'
    files.make_folder(folder)
    # Its `SummaryWriter` writes in a thread of its own. A full disk would end this thread, and then
    # all who add events would wait for it.
    # File names have whole seconds. Without the suffix, a run that is resumed within a second would
    # overwrite the file.
    self._path = folder / 'events'
    self._flushed_s = -math.inf
    with self._writing():
      self._events = EventsWriter(str(self._path), f'.{update}')
    # TensorBoard drops points from this step on that an interrupted run has left.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(steps + 1, session_log=start)

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Turns an OSError of the block into a `NotSaved` that names the files."""
    with files.writing(), files.naming(self._path):
      yield

  def _add(self, step: int, **content: Any) -> None:
    """Writes an event."""
    with self._writing():
      self._events.write_event(self._new_event(wall_time=time.time(), step=step, **content))

  def _flush(self) -> None:
    """Lets TensorBoard see all events."""
    self._flushed_s = time.perf_counter()
    with self._writing():
      self._events.flush()

  def show(self, numbers: Mapping[str, float], steps: int) -> None:
    """Adds points.

    Raises:
      NotSaved: they cannot be written.
    """
    from tensorboardX.summary import scalar
    for name, value in numbers.items():
      self._add(steps, summary=scalar(name, value))
    if time.perf_counter() - self._flushed_s >= FLUSHED_S:
      self._flush()

  def show_config(self, config: Mapping[str, Any], steps: int) -> None:
    """Adds the config as a text, and as hparams with the return as their metric.

    Raises:
      NotSaved: they cannot be written.
    """
    from tensorboardX.summary import hparams, text
    lines = json.dumps(config, indent=2, default=str).splitlines()
    # Markdown shows indented lines as they are.
    self._add(steps, summary=text('config', ''.join(f'    {line}\n' for line in lines)))
    values = {name: value if isinstance(value, bool | int | float) else str(value)
              for name, value in flat(config).items()}
    shown = [metrics.shown('episode_return'), metrics.EVALUATIONS['mean'].shown]
    for summary in hparams(values, dict.fromkeys(shown, 0.0)):
      self._add(steps, summary=summary)

  def before_save(self) -> None:
    """Writes all events.

    Raises:
      NotSaved: they cannot be written.
    """
    super().before_save()
    self._flush()

  def close(self) -> None:
    """Writes all events and closes the file.

    Raises:
      NotSaved: they cannot be written.
    """
    super().close()
    with self._writing():
      self._events.close()


def _identity(workdir: Path, tracker: str, update: int) -> str:
  """Returns the name of a tracker's run for the run in a workdir, which it keeps when it goes on.

  Raises:
    OSError: the file that holds it cannot be written.
  """
  path = workdir / RUNS
  try:
    runs = files.read_json(path)
  except (OSError, ValueError):
    runs = {}
  if not isinstance(runs, dict):
    runs = {}
  if update and isinstance(runs.get(tracker), str):
    return runs[tracker]
  runs[tracker] = f'{workdir.name}-{secrets.token_hex(4)}'
  files.write(path, json.dumps(runs) + '\n')
  return runs[tracker]


def check_installed(name: str) -> None:
  """Checks that the library of a tracker is installed, without importing it.

  Args:
    name: `log.tracker`.

  Raises:
    ValueError: it is not.
  """
  if name in TRACKERS and importlib.util.find_spec(name) is None:
    raise ValueError(f"log.tracker: {name} is not installed; pip install '.[{name}]' adds it")


@contextlib.contextmanager
def _starting(name: str) -> Iterator[Any]:
  """Yields the module of a tracker; an error of the block becomes one line.

  Raises:
    Refused: the tracker does not start.
  """
  try:
    yield importlib.import_module(name)
  except Exception as error:
    raise Refused(f'log.tracker: {name} does not start: {type(error).__name__}: '
                  f'{shorten(str(error))}') from error


class Wandb(Tracker):
  """Weights & Biases; `WANDB_MODE=offline` and its other variables decide where the run goes."""

  def __init__(self, workdir: Path, update: int):
    """Opens the run, or the run of the same workdir if it goes on.

    Args:
      workdir: the workdir of the run; wandb's files are in its folder wandb.
      update: the update that the run resumes from; 0 for a new run.

    Raises:
      Refused: wandb does not start.
    """
    super().__init__(workdir, TRACKED_S)
    identity = _identity(workdir, 'wandb', update)
    with _starting('wandb') as wandb:
      self._wandb = wandb
      # Several runs may be open at once, as those of several seeds.
      self._run = wandb.init(
          project=os.environ.get('WANDB_PROJECT', _PROJECT), name=workdir.name, dir=str(workdir),
          id=identity, resume='allow',
          settings=wandb.Settings(reinit='create_new', console='off', silent=True))
      # Its own step must not fall, as steps do when a killed run goes on from a checkpoint.
      self._run.define_metric('steps')
      self._run.define_metric('*', step_metric='steps')

  def show(self, numbers: Mapping[str, float], steps: int) -> None:
    """Logs numbers."""
    self._run.log({**numbers, 'steps': steps})

  def show_config(self, config: Mapping[str, Any], steps: int) -> None:
    """Sets the run's config."""
    self._run.config.update(_of_json(config), allow_val_change=True)

  def show_video(self, path: Path, steps: int) -> None:
    """Logs a video."""
    self._run.log({'eval/video': self._wandb.Video(str(path), format='mp4'), 'steps': steps})

  def close(self) -> None:
    """Ends the run, which waits until all is sent."""
    super().close()
    self._run.finish()


class Trackio(Tracker):
  """trackio, which keeps runs on this machine, and shows them with `trackio show`."""

  def __init__(self, workdir: Path, update: int):
    """Opens the run; see `Wandb`.

    Args:
      workdir: the workdir of the run.
      update: the update that the run resumes from; 0 for a new run.

    Raises:
      Refused: trackio does not start.
    """
    super().__init__(workdir, TRACKED_S)
    with _starting('trackio') as trackio:
      self._trackio = trackio
    self._name = _identity(workdir, 'trackio', update)
    self._run: Any = None

  def show_config(self, config: Mapping[str, Any], steps: int) -> None:
    """Opens the run, since trackio takes a config only then."""
    with _starting('trackio') as trackio:
      self._run = trackio.init(
          project=os.environ.get('TRACKIO_PROJECT', _PROJECT), name=self._name, resume='allow',
          config=_of_json(config), embed=False)

  def show(self, numbers: Mapping[str, float], steps: int) -> None:
    """Logs numbers."""
    self._run.log(dict(numbers), step=steps)

  def show_video(self, path: Path, steps: int) -> None:
    """Logs a video."""
    self._run.log({'eval/video': self._trackio.Video(str(path), format='mp4')}, step=steps)

  def close(self) -> None:
    """Ends the run, which waits until all is written."""
    super().close()
    if self._run:
      self._run.finish()


TRACKERS = {'wandb': Wandb, 'trackio': Trackio}


def _of_json(config: Mapping[str, Any]) -> dict[str, Any]:
  return json.loads(json.dumps(config, default=str))
