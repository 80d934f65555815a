"""The folder of a run: what state it is in, and what a command may begin or go on with there.

`Workdir` reads and never writes. `OpenWorkdir` exists only while this process has the lock. A start
locks, looks once, decides, and only then writes.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podracer_jit.envs import spaces
from podracer_jit.envs.families import family_of
from podracer_jit.errors import OtherExperiment
from podracer_jit.experiment import modules, schema
from podracer_jit.experiment.schema import Experiment
from podracer_jit.options import flat, from_json, shorten
from podracer_jit.parts import user_path
from podracer_jit.workdir import checkpoints, files, journal, lock, record, sources


class Request(NamedTuple):
  """The wishes of a command, beside its config."""

  init_from: Path | None = None  # a workdir, with whose newest state a new run begins
  init_partly: bool = False  # arrays of `init_from` that do not fit begin anew
  change: Collection[str] = ()  # fields, with dots, that may differ if a run goes on
  renew_envs: bool = False  # environments begin anew if a run goes on


def make_request(init_from: str | Path | None = None, init_partly: bool = False,
                 extend: bool = False, change: Sequence[str] = (),
                 renew_envs: bool = False) -> Request:
  """Checks what a command asks for and returns it.

  Args:
    init_from: see the flag --init_from, and so on for the other arguments.
    init_partly: arrays that do not fit begin anew.
    extend: total_steps may change, and only grow.
    change: fields that may differ.
    renew_envs: environments begin anew.

  Raises:
    ValueError: a value is wrong, or two do not go together, in one line.
  """
  if isinstance(change, str):
    raise ValueError(f'change: must be a list of fields, got {change!r}; write [{change!r}]')
  request = Request(user_path(init_from) if init_from else None, init_partly,
                    (*change, *([record.TOTAL] if extend else [])), renew_envs)
  if not init_from and init_partly:
    raise ValueError('--init_partly: is for --init_from')
  for flag, is_set in (('--renew_envs', renew_envs), ('--extend or --change', request.change)):
    if init_from and is_set:
      raise ValueError(f'--init_from: begins a new run; it cannot be combined with {flag}')
  return request


class State(enum.Enum):
  """The states of a workdir."""

  NEW = enum.auto()  # no run
  STOPPED = enum.auto()  # a run that has not made all its steps
  RUNNING = enum.auto()  # a run that a process trains
  FINISHED = enum.auto()  # a run that has total_steps
  BROKEN = enum.auto()  # a run that cannot go on until its user has put something back


class Look(NamedTuple):
  """The findings of one look at a workdir."""

  state: State
  record: record.Record | None  # of the run; None if the workdir is new or its record is lost
  update: int | None = None  # of the newest whole checkpoint
  broken: Mapping[int, str] = {}  # the problems of newer checkpoints, by update
  # Why the state is BROKEN; otherwise what is wrong with config.json, whose record is a copy.
  problem: str = ''
  made_updates: bool = False  # the run has made an update, or lines that may be of one


class Workdir:
  """Reads the files of a run; no method writes. The workdir may be a stranger's."""

  def __init__(self, path: Path):
    self.path = path

  @functools.cached_property
  def record(self) -> record.Record:
    """The contents of config.json, which is read once.

    Raises:
      ValueError: there is no run, or its config.json is garbled.
    """
    return record.read(self.path)

  def config_of_updates(self) -> dict[str, Any] | None:
    """Returns the newest config, as JSON has it, of a run that made updates; None without one.

    If config.json is lost, it is the copy in the newest whole checkpoint.
    """
    if not self._made_updates():
      return None
    try:
      return self.record.config
    except ValueError:
      of_checkpoint = self.look().record
      return of_checkpoint.config if of_checkpoint else None

  def _made_updates(self) -> bool:
    return any(checkpoints.saved_updates(self.path)) or journal.has_updates(self.path)

  def config(self, allow_modules: Collection[str] = (), update: int | None = None
             ) -> dict[str, Any]:
    """Returns the config of the run, completed, as plain values.

    Args:
      allow_modules: modules of a user's own parts that may be imported if the config names them.
      update: returns the config with which this update was made; None: the newest config.

    Raises:
      ValueError: there is no run, or its config names modules that are not allowed.
    """
    fields = from_json(self.record.config) if update is None else self.record.at(update)
    modules.check(fields, allow_modules, str(self.path / record.NAME),
                         lambda name: sources.copy_of(self.path, name, update))
    try:
      return schema.complete(fields)
    except ValueError as error:
      raise ValueError(f'--workdir: {record.NAME} of {self.path}: '
                       f'{shorten(str(error), 600)}') from None

  def shown_config(self) -> dict[str, Any]:
    """Returns the newest config for display, as JSON has it; imports none of its modules.

    Raises:
      ValueError: there is no run.
    """
    fields = from_json(self.record.config)
    return fields if modules.named(fields) else record.json_of(schema.complete(fields))

  def check_layout(self, experiment: Experiment) -> None:
    """Checks that the network of the run reads observations as they are laid out today.

    Args:
      experiment: on the task for which the network shall be used.

    Raises:
      ValueError: the layout has changed since the network was trained on this task.
    """
    task = experiment.env.task
    env = self.record.config.get('env', {})
    trained_on = env.get('task')
    version = self.record.versions.get('podracer_jit', 'of an earlier version')
    mask = experiment.spec.action_mask
    if mask is not None and trained_on == task and 'action_mask' not in env:
      raise ValueError(f'{self.path}: its network was trained with podracer_jit {version}, which '
                       f'gave it {mask.name} of the observations of {task}, the mask of actions '
                       f'today; train anew, or go on with podracer_jit {version}')
    if self.record.layout == spaces.LAYOUT or trained_on != task:
      return
    spaces_of = getattr(family_of(task), 'spaces_of', None)
    if spaces_of is None:
      return
    spec = experiment.spec
    is_asked = hasattr(experiment.network, 'parts' if spec.parts else 'channels_last')
    change = spaces.change_of_layout(
        self.record.layout, spaces_of(task, experiment.env_options).observation, spec.obs_shape,
        sees_images=is_asked and (bool(spec.parts) or spec.channels_last),
        reads_pixels=_reads_pixels(experiment))
    if change:
      raise ValueError(f'{self.path}: its network was trained with podracer_jit {version}, and '
                       f'the observations of {task} have another layout since: {change}; train '
                       f'anew, or go on with podracer_jit {version}')

  def look(self) -> Look:
    """Returns what the workdir holds; the one function that decides its state.

    All files of the newest checkpoint are read.
    """
    path = self.path / record.NAME
    updates = checkpoints.saved_updates(self.path)
    made_updates = self._made_updates()
    if not path.exists() and not made_updates:
      return Look(State.NEW, None)
    newest, broken = checkpoints.examine(self.path)
    saved, problem = self._found_record(newest)
    look = Look(State.STOPPED, saved, newest, broken, problem, made_updates)
    if self._is_running():
      return look._replace(state=State.RUNNING)
    if saved is None:
      return look._replace(state=State.BROKEN)
    if updates and newest is None:
      listed = '; '.join(f'{update}: {broken[update]}' for update in updates)
      return look._replace(state=State.BROKEN, problem=(
          f'--workdir: none of the checkpoints in {self.path / checkpoints.FOLDER} is whole '
          f'({listed}); put one back, or choose another --workdir to begin anew'))
    if saved.origin and newest is None:
      return look._replace(state=State.BROKEN, problem=(
          f'--workdir: the run in {self.path} began with the state of another run, and has no '
          'checkpoint left; choose another --workdir to begin anew'))
    steps = checkpoints.steps_of(self.path, newest) if newest else 0
    total = saved.config.get(record.TOTAL)
    is_finished = isinstance(total, int) and steps is not None and steps >= total
    return look._replace(state=State.FINISHED) if is_finished else look

  def _is_running(self) -> bool:
    return lock.is_held(self.path)

  def _found_record(self, newest: int | None) -> tuple[record.Record | None, str]:
    """Returns the record of config.json, or its copy in the newest whole checkpoint.

    Args:
      newest: the update of that checkpoint.

    Returns:
      The record, None if it is lost, and what is wrong with config.json.
    """
    path = self.path / record.NAME
    problem = 'is missing'
    if path.exists():
      try:
        return record.read(self.path), ''
      except ValueError as error:
        if newest is None:
          return None, str(error)
        problem = str(error).removeprefix(f'--workdir: {path} ')
    elif not checkpoints.saved_updates(self.path):
      return None, (f'--workdir: {self.path} has updates of a run, and no {record.NAME}; put it '
                    'back, or choose another --workdir')
    meta = checkpoints.read_meta(self.path, newest) if newest is not None else None
    try:
      return record.parse(meta['run']), problem
    except (KeyError, TypeError, ValueError):
      return None, (f'--workdir: {path} {problem}, and no checkpoint has a copy of it; put it '
                    'back, or choose another --workdir')


class OpenWorkdir(Workdir):
  """A workdir that this process has locked; `opened` makes it."""

  def __init__(self, path: Path):
    super().__init__(path)
    checkpoints.remove_unfinished(path)
    self.seen = self.look()
    if self.seen.record:
      self.record = self.seen.record
    self.notes: list[str] = []  # lines about what was repaired, set aside or changed

  def _is_running(self) -> bool:
    return False  # the lock is this process's

  def begins(self, fields: Mapping[str, Any], request: Request) -> bool:
    """Decides whether a run begins, or the one in the workdir goes on.

    Args:
      fields: the config of the command, plain values.
      request: what else it asks for.

    Raises:
      OtherExperiment: the run has another config, and not all of its changes are allowed.
      ValueError: the workdir is broken, or the request does not fit it.
    """
    for problem in record.problems_of_change(request.change, flat(fields).keys()):
      raise ValueError(problem)
    if self.seen.state is State.BROKEN:
      raise ValueError(self.seen.problem)
    saved = self.seen.record
    if saved is None or self._gives_way(saved, fields, request):
      if request.change:
        flag = '--extend' if tuple(request.change) == (record.TOTAL,) else '--change'
        raise ValueError(f'{flag}: there is no run in {self.path} to go on with')
      if request.renew_envs:
        raise ValueError(f'--renew_envs: there is no run in {self.path} to go on with')
      return True
    refused = record.refusals(saved.differences(fields), request.change)
    # A change may be taken back as long as no update with it was saved.
    earlier = saved.taken_back((self.seen.update or 0) + 1)
    if refused and record.refusals(earlier.differences(fields), request.change):
      raise OtherExperiment(f'{self.path} holds another experiment ({"; ".join(refused)}); set the '
                          'fields back, or choose another --workdir, where --init_from='
                          f'{self.path} begins with what this run has learned')
    if request.init_from and not _is_origin(saved.origin, request.init_from):
      began = f'with {saved.origin.words()}' if saved.origin else 'with its seed'
      raise ValueError(f'--init_from: {self.path} has a run already, which began {began}; choose '
                       'another --workdir for a new run')
    return False

  def _gives_way(self, saved: record.Record, fields: Mapping[str, Any], request: Request) -> bool:
    """Returns whether the run never made an update, and is not the one that is asked for."""
    if self.seen.made_updates or request.change:
      return False
    return bool(saved.differences(fields)) or bool(request.init_from) and not _is_origin(
        saved.origin, request.init_from)

  def changed_record(self, fields: Mapping[str, Any]) -> record.Record:
    """Returns the record of the run, which goes on with this config.

    Raises:
      OtherExperiment: the config changes before a later update.
    """
    saved = self.seen.record
    changes = saved.differences(fields)
    if not changes:
      return saved.refreshed(fields)
    try:
      return saved.changed(fields, (self.seen.update or 0) + 1)
    except ValueError as error:
      names = shorten(', '.join(changes), 600)
      raise OtherExperiment(f'{names}: cannot change now: {error}') from None

  def clear(self) -> None:
    """Sets aside what a run without any update has left, before a run begins."""
    # First the config: without it, a first state belongs to no run.
    if self.seen.record:
      aside = files.set_aside(self.path, self.path / record.NAME)
      self.notes.append(f'the run in {self.path} never made an update, so it begins anew with this '
                        f'config; the config before is now {aside}')
    checkpoints.set_all_aside(self.path)

  def begin(self, first: record.Record) -> None:
    """Writes the record of a new run; afterwards the run has begun."""
    self._write(first, 1)

  def go_on(self, changed: record.Record) -> None:
    """Repairs the workdir, and writes the record of the run, which goes on.

    Args:
      changed: of `changed_record`; the change was checked.

    Raises:
      OSError: a file cannot be written.
    """
    path = self.path / record.NAME
    first_update = (self.seen.update or 0) + 1
    before = self.seen.record
    if self.seen.problem:
      aside = f'; the old file is now {files.set_aside(self.path, path)}' if path.exists() else ''
      before.write(self.path)
      self.notes.append(f'{path} {self.seen.problem}; it was restored from the checkpoint of '
                        f'update {self.seen.update}{aside}')
    self.notes += [
        f'{name} was {shorten(str(before.versions.get(name)))} when this run began and is '
        f'{version} now: results go on, but perhaps not to the last bit'
        for name, version in record.versions().items()
        if before.versions.get(name) != version and first_update not in changed.renewals]
    self.notes += [checkpoints.set_aside(self.path, update, problem)
                   for update, problem in sorted(self.seen.broken.items())]
    if first_update in changed.renewals:
      self.notes.append('environments begin anew here, with new episodes: '
                        f'{changed.renewals[first_update]}')
    if changed.changes.get(first_update, {}) != before.changes.get(first_update, {}):
      self.notes += [changed.words_of(first_update)] if first_update in changed.changes else []
    self._write(changed, first_update)

  def _write(self, record_now: record.Record, first_update: int) -> None:
    """Writes config.json with a note of this start, and the source of the user's modules."""
    started = record_now.started(first_update)
    if started is not self.seen.record:
      started.write(self.path)
    self.record = started
    self.notes += sources.keep(self.path, modules.sources(from_json(started.config)), first_update)


def _reads_pixels(experiment: Experiment) -> bool:
  """Returns whether a network, or its normalisation, may tell bytes from other numbers."""
  torso = experiment.network
  is_own = not type(torso).__module__.startswith('podracer_jit.')
  return is_own or experiment.normalise.obs or any(
      getattr(torso, field, False) for field in ('needs_images', 'needs_parts'))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[OpenWorkdir]:
  """Makes the folder, locks it, and looks; folders that stay empty because of an error are removed.

  Raises:
    errors.InUse: another run has the folder.
    ValueError: the folder cannot be made or written to.
  """
  new = [folder for folder in (path, *path.parents) if not folder.exists()]
  try:
    try:
      if path.exists() and not path.is_dir():
        raise ValueError(f'--workdir: {path} is a file; name a folder')
      if path.is_symlink() and not path.exists():
        raise ValueError(f'--workdir: {path} is a link to {path.readlink()}, which does not exist')
      files.make_folder(path)
      workdir_lock = lock.WorkdirLock(path)
    except OSError as error:
      raise ValueError(f'--workdir: {path} cannot be written to: {error.strerror}') from None
    with contextlib.closing(workdir_lock):
      yield OpenWorkdir(path)
  except BaseException:
    for folder in new:
      files.remove_if_empty(folder)
    raise


def _is_origin(origin: record.Origin | None, source: Path) -> bool:
  return origin is not None and origin.workdir == str(source.resolve())
