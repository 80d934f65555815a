"""Sinks are told the events of a run: files, trackers, the display, a user's own classes.

The writer's thread calls `update`, the main thread `begin` and `replaying`. The other methods are
called by the thread that trains, or by the main thread before and after it runs. A sink can only
ask for a stop; the run then ends as after a signal.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from podracer_jit import parts
from podracer_jit.errors import CallbackFailed, Diverged, line_of
from podracer_jit.runtime.output import complain
from podracer_jit.workdir import checkpoints, files, journal

_logger = logging.getLogger(__name__)
Record = dict[str, Any]  # an update's line of metrics.jsonl
# Fields that sinks add to a record.
WARNING = 'warning'
EVAL_WAIT_S = 'eval_wait_s'
STILL_UPDATES = 10  # updates in a row without any change, after which there is a warning


class _Stop(enum.Enum):
  STOP = enum.auto()


STOP = _Stop.STOP  # a method of a sink returns this to stop the run


class Start(NamedTuple):
  """The beginning of a segment, or of the rest of one."""

  workdir: Path
  process: int  # of the processes of the run, from 0; each has sinks of its own
  seed: int
  update: int  # updates done
  steps: int  # valid agent steps learned from
  # Its line in receipts.jsonl; empty if no update is made, but only evaluations that a stop cut.
  header: Mapping[str, Any]
  config: Mapping[str, Any] = {}  # the run's, nested dicts of plain values


class Saved(NamedTuple):
  """A checkpoint that was saved."""

  workdir: Path
  update: int  # updates done, and the number of the checkpoint
  steps: int  # valid agent steps learned from
  params: Any  # the network's parameters, on the learner's devices; valid during the call


class Sink:
  """Base class of what is told the events of a run; its methods do nothing.

  A sink does not change the bits of a run. Each method may return `STOP`: the run then ends, saves
  everything, and can go on later.
  """

  def begin(self, start: Start) -> Any:
    """Called before each segment, and when a run goes on within one, in the main thread."""

  def replaying(self, done: int, total: int) -> Any:
    """Called several times a second while environments are made again, in the main thread.

    Args:
      done: steps of environments that were made.
      total: steps that will be made.
    """

  def update(self, record: Record, receipt: Record) -> Any:
    """Called after each update, in a thread of its own.

    Learning goes on meanwhile, and waits only if a sink takes longer than an update. So a run that
    is stopped here may make a few more updates.

    Args:
      record: the metrics of the update, as in metrics.jsonl: 'update', 'steps', 'episode_return'
        (None before the first episode has ended), 'sps', 'loss' and so on.
      receipt: the fingerprints of the update, as in receipts.jsonl.
    """

  def before_save(self) -> Any:
    """Called before each checkpoint and at the end, in the thread that trains; keep all now."""

  def saved(self, at: Saved) -> Any:
    """Called after each checkpoint, in the thread that trains, which waits.

    A run that is stopped here ends with this checkpoint.
    """

  def evaluated(self, record: Mapping[str, Any]) -> Any:
    """Called after each evaluation (`eval.every_updates`), in the thread that trains.

    Args:
      record: the line of evaluations.jsonl: 'update', 'steps', 'num_episodes', 'mean',
        'standard_error' and so on; or an 'error'. 'video' is the path of a video, if there is one,
        relative to the workdir.
    """

  def note(self, line: str) -> Any:
    """Called with a line that a person should see, in the thread that trains.

    These are lines about evaluations, journals that were mended, episodes that never end, and
    replays that would take long.
    """

  def keeps(self) -> Collection[int]:
    """Returns updates of checkpoints that must not be deleted yet."""
    return ()

  def close(self) -> Any:
    """Called at the end of the training, however it ends, if the sink has begun."""


Callback = Sink  # its name until version 0.6


class Sinks:
  """Tells several sinks, in order."""

  def __init__(self, sinks: Sequence[Sink]):
    self._sinks = sinks
    self.ask_to_stop = False  # whether a sink has returned STOP

  def begin(self, start: Start) -> None:
    """See `Sink`, as for the other methods."""
    self._tell('begin', start)

  def replaying(self, done: int, total: int) -> None:
    """See `Sink`."""
    self._tell('replaying', done, total)

  def update(self, record: Record, receipt: Record) -> None:
    """See `Sink`."""
    self._tell('update', record, receipt)

  def before_save(self) -> None:
    """See `Sink`."""
    self._tell('before_save')

  def saved(self, at: Saved) -> None:
    """See `Sink`."""
    self._tell('saved', at)

  def evaluated(self, record: Mapping[str, Any]) -> None:
    """See `Sink`."""
    self._tell('evaluated', record)

  def note(self, line: str) -> None:
    """See `Sink`."""
    self._tell('note', line)

  def keeps(self) -> set[int]:
    """See `Sink`."""
    return {update for sink in self._sinks for update in sink.keeps()}

  def _tell(self, event: str, *what: Any) -> None:
    for sink in self._sinks:
      if getattr(sink, event)(*what) is STOP:
        self.ask_to_stop = True


@contextlib.contextmanager
def closing(sinks: Sequence[Sink]) -> Iterator[None]:
  """Closes sinks at the end of a block, also if one of them fails.

  An error of the block is not hidden by one of a sink, which is logged then.
  """
  try:
    yield
  except BaseException:
    for sink in sinks:
      try:
        sink.close()
      except Exception as error:  # noqa: BLE001 - the first error is the one that counts
        _logger.warning('%s', line_of(error))
    raise
  with contextlib.ExitStack() as stack:
    for sink in sinks:
      stack.callback(sink.close)


# Methods of `Callback` until version 0.6, and what they are called now.
_RENAMED = {'on_update': 'update(record, receipt)', 'on_segment_end': 'saved(at)',
            'on_evaluation': 'evaluated(record)'}


class _Users(Sink):
  """A user's sink or function: its failures become one line, and it gets copies."""

  def __init__(self, sink: Sink | Callable[[Mapping[str, Any]], Any], is_shared: bool,
               begun: set[int]):
    """Wraps a sink or function.

    Args:
      sink: the user's.
      is_shared: several seeds share it, so records have their 'seed'.
      begun: the ids of all sinks of the user that have begun, and are not closed yet.
    """
    self._sink = sink
    self._is_shared = is_shared
    self._begun = begun
    self._seed: dict[str, int] = {}

  def begin(self, start: Start) -> Any:
    self._begun.add(id(self._sink))
    if self._is_shared:
      self._seed = {'seed': start.seed}
    return self._call('begin', start.update, start._replace(
        header=dict(start.header), config=copy.deepcopy(dict(start.config))))

  def replaying(self, done: int, total: int) -> Any:
    return self._call('replaying', None, done, total)

  def update(self, record: Record, receipt: Record) -> Any:
    if isinstance(self._sink, Sink):
      return self._call('update', record['update'], record | self._seed, dict(receipt))
    return self._checked(self._sink, record['update'], record | self._seed)

  def before_save(self) -> Any:
    return self._call('before_save', None)

  def saved(self, at: Saved) -> Any:
    return self._call('saved', at.update, at)

  def evaluated(self, record: Mapping[str, Any]) -> Any:
    return self._call('evaluated', record['update'], dict(record))

  def note(self, line: str) -> Any:
    return self._call('note', None, line)

  def keeps(self) -> Collection[int]:
    if not isinstance(self._sink, Sink):
      return ()
    try:
      return {int(update) for update in self._sink.keeps()}
    except Exception as error:
      raise CallbackFailed(f'callback {type(self._sink).__qualname__}.keeps: '
                           f'{type(error).__name__}: {error}') from error

  def close(self) -> Any:
    if id(self._sink) not in self._begun:
      return None
    self._begun.remove(id(self._sink))
    return self._call('close', None)

  def _call(self, event: str, update: int | None, *what: Any) -> Any:
    if isinstance(self._sink, Sink):
      return self._checked(getattr(self._sink, event), update, *what)
    return None

  def _checked(self, call: Callable[..., Any], update: int | None, *what: Any) -> Any:
    name = getattr(call, '__qualname__', type(call).__name__)
    where = f'callback {name}' if update is None else f'callback {name}, update {update}'
    try:
      returned = call(*what)
    except Exception as error:
      raise CallbackFailed(f'{where}: {type(error).__name__}: {error}') from error
    if returned is not None and returned is not STOP:
      raise CallbackFailed(f'{where}: returned {returned!r}; it must return nothing, or STOP to '
                           'stop the run')
    return returned


def users(callbacks: Sequence[Any], num_runs: int = 1) -> list[list[Sink]]:
  """Returns the sinks of a user for each of some runs.

  Args:
    callbacks: functions, which are called with each update's record, and instances of `Sink`, which
      all runs share; subclasses of `Sink` or their names 'module:Class', of which each run gets its
      own instance.
    num_runs: number of runs.

  Raises:
    ValueError: one of them is none of these, cannot be found or made, or has a method of version
      0.6.
  """
  if isinstance(callbacks, str) or callable(callbacks) or isinstance(callbacks, Sink):
    raise ValueError(f'callbacks: must be a list of functions and sinks, got {callbacks!r}')
  chosen = [_function_or_sink(callback) for callback in callbacks]
  begun: set[int] = set()
  return [[_Users(_made(callback), num_runs > 1 and not isinstance(callback, type), begun)
           for callback in chosen] for _ in range(num_runs)]


def _function_or_sink(callback: Any) -> Any:
  """Returns a function, an instance of `Sink` or a class of sinks."""
  part = parts.find('callbacks', callback, {}) if isinstance(callback, str) else callback
  is_class = isinstance(part, type)
  if not (issubclass(part, Sink) if is_class else isinstance(part, Sink) or callable(part)):
    raise ValueError(f'callbacks: each must be a function, a Sink or a class of sinks, got '
                     f'{callback!r}')
  is_sink = is_class or isinstance(part, Sink)
  for before, now in _RENAMED.items():
    if is_sink and hasattr(part, before):
      raise ValueError(f'callbacks: {before} of {callback!r} is called {now} since version 0.7')
  return part


def _made(callback: Any) -> Any:
  """Returns an instance of a class of sinks, anything else as it is."""
  if not isinstance(callback, type):
    return callback
  try:
    return callback()
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's class may raise anything
    raise ValueError(f'callbacks: {callback.__qualname__} cannot be made without arguments: '
                     f'{type(error).__name__}: {error}') from error


class Journals(Sink):
  """metrics.jsonl and receipts.jsonl of a workdir, open for a whole run."""

  def __init__(self, workdir: Path, update: int,
               is_logged: Callable[[int, int], bool] = lambda update, steps: True):
    """Opens the files to append to them; removes the lines after the checkpoint.

    Args:
      workdir: the workdir of the run.
      update: the update of the checkpoint that the run resumes from; 0 for a new run.
      is_logged: (update, steps) -> whether metrics have a line of the update.

    Raises:
      OSError: a file cannot be read or written; the error names it.
    """
    paths = [workdir / journal.METRICS, workdir / journal.RECEIPTS]
    self.problems = checkpoints.cut_journals(workdir, update)
    self._metrics, self._receipts = map(files.Lines, paths)
    self._is_logged = is_logged
    self._eval_wait_s = 0.0  # of updates since the newest line of metrics

  def begin(self, start: Start) -> None:
    """Writes the header of a segment, if there is one, to the receipts.

    Raises:
      NotSaved: they cannot be written.
    """
    if start.header:
      with files.writing():
        self._receipts.write(json.dumps(dict(start.header)))

  def update(self, record: Record, receipt: Record) -> None:
    """Appends an update; to metrics only if they have a line of it.

    Raises:
      NotSaved: a file cannot be written; the error names it.
    """
    self._eval_wait_s += record.get(EVAL_WAIT_S, 0.0)
    with files.writing():
      if self._is_logged(record['update'], record['steps']):
        waited = {EVAL_WAIT_S: self._eval_wait_s} if EVAL_WAIT_S in record else {}
        self._metrics.write(json.dumps(_finite(record | waited)))
        self._eval_wait_s = 0.0
      self._receipts.write(json.dumps(receipt))

  def before_save(self) -> None:
    """Writes all to the disk, before a checkpoint is saved that counts on it.

    After a power failure, there is no complete checkpoint without the lines of its updates.

    Raises:
      NotSaved: a file cannot be written; the error names it.
    """
    with files.writing():
      self._metrics.sync()
      self._receipts.sync()

  def close(self) -> None:
    """Closes the files."""
    self._metrics.close()
    self._receipts.close()


def _finite(record: Record) -> Record:
  """Returns the record with None for each number that is not finite, which JSON cannot hold."""
  return {k: None if isinstance(v, float) and not math.isfinite(v) else v
          for k, v in record.items()}


class Finite(Sink):
  """Ends a run whose metrics are not finite; they are already on the host, so this is cheap."""

  def update(self, record: Record, receipt: Record) -> None:
    """Checks the metrics of an update.

    Raises:
      Diverged: the message has the update and every loss term.
    """
    broken = [name for name, value in record.items()
              if isinstance(value, float) and not math.isfinite(value)]
    if broken:
      # The learner's metrics come after the delays, of which 'gud' is the last.
      names = list(record)
      learner_names = [name for name in names[names.index('gud') + 1:]
                       if name not in (WARNING, EVAL_WAIT_S)]
      raise Diverged(f'update {record["update"]} ({record["steps"]:,} steps): '
                     f'{", ".join(broken)} not finite ('
                     + ', '.join(f'{name} {record[name]:g}' for name in learner_names) + ')')


class Standstill(Sink):
  """Notices that nothing is learned: gradients that are exactly 0, or parameters that stay equal.

  It reads what updates report anyway: the norm of the gradient, and the fingerprint of the
  parameters. Updates that take no gradient step, as before a replay is filled, do not count. Equal
  parameters do not count at a learning rate of 0, to which annealing leads. The records of such
  updates get a 'warning', and the first of them is printed.
  """

  def __init__(self, name: str = '', quiet: bool = False,
               past: Mapping[str, Any] = MappingProxyType({})):
    """Creates the sink.

    Args:
      name: of the run, in front of the line; '' if there is one run.
      quiet: prints nothing.
      past: the `meta` of the checkpoint that the run resumes from; empty for a new run.
    """
    self._name = f'{name}, ' if name else ''
    self._quiet = quiet
    self._zero_gradients, self._equal_params, self._params, self._is_warned = past.get(
        'standstill', (0, 0, '', False))

  def meta(self) -> dict[str, Any]:
    """Returns the part of a checkpoint's `meta` from which a later one goes on."""
    return dict(standstill=(self._zero_gradients, self._equal_params, self._params,
                            self._is_warned))

  def update(self, record: Record, receipt: Record) -> None:
    """Adds a 'warning' to the record if STILL_UPDATES or more updates in a row changed nothing."""
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
    if line:
      record[WARNING] = line
    if line and not self._is_warned and not self._quiet:
      complain(f'podracer_jit: warning: {self._name}update {record["update"]:,}: {line}')
    self._is_warned = bool(line)
