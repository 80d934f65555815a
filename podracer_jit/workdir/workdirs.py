"""Writes and reads the config of a run in its workdir, and its history.

A resumed run must have the same config, except for fields that the command line allows to change.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podracer_jit import options, parts
from podracer_jit.envs import spaces
from podracer_jit.envs.families import family_of
from podracer_jit.errors import OtherExperiment
from podracer_jit.experiment import schema as config_lib
from podracer_jit.experiment.experiment import Experiment
from podracer_jit.options import shorten
from podracer_jit.workdir import changes, checkpoints, files, history, lock, sources

PACKAGES = ('podracer_jit', 'jax', 'jaxlib', 'flax', 'optax', 'rlax', 'envpool', 'numpy')
CONFIG = 'config.json'
_LAYOUT = 'layout'  # in config.json: `spaces.LAYOUT`
STARTS = 'starts'  # in config.json: the commands that have trained the run
# Fields in which two runs of one experiment may differ, and exceptions among these fields.
_FREE = ('placement.', 'log.', 'eval.', 'checkpoint.keep')
_BOUND = ('placement.xla_threads', 'placement.actor_platform')


def versions(*others: str) -> dict[str, str]:
  """Returns the versions of Python and of the packages on which results depend.

  Args:
    *others: further packages; those that are not installed are left out.
  """
  by_package = {'python': platform.python_version()}
  for name in (*PACKAGES, *others):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      by_package[name] = importlib.metadata.version(name)
  return by_package


def record_of(config: Mapping[str, Any], entries: Sequence[history.Entry] = ()) -> dict[str, Any]:
  """Returns the contents of config.json; checkpoints have a copy.

  Args:
    config: plain values.
    entries: the history of the run.
  """
  record = {'config': config_lib.as_json(config), 'versions': versions(), _LAYOUT: spaces.LAYOUT}
  if entries:
    record[history.KEY] = [entry.as_json() for entry in entries]
  return json.loads(json.dumps(record))  # tuples become lists, as in the file


def make(workdir: Path) -> None:
  """Makes the folder.

  Raises:
    ValueError: the folder cannot be made.
  """
  try:
    files.make_folder(workdir)
  except OSError as error:
    raise _not_writable(workdir, error) from None


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
  """Makes the folder and holds its lock; folders that stay empty because of an error are removed.

  Raises:
    lock.InUse: another run has the folder.
    ValueError: the folder cannot be made or written to.
  """
  new = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
  make(workdir)
  try:
    try:
      workdir_lock = lock.WorkdirLock(workdir)
    except OSError as error:
      raise _not_writable(workdir, error) from None
    with contextlib.closing(workdir_lock):
      yield
  except BaseException:
    for folder in new:
      files.remove_if_empty(folder)
    raise


def _not_writable(workdir: Path, error: OSError) -> ValueError:
  return ValueError(f'--workdir: {workdir} cannot be written to: {error.strerror}')


def open_workdir(workdir: Path, config: Mapping[str, Any],
                 allowed: changes.Allowed = changes.NOTHING,
                 entries: Sequence[history.Entry] = ()) -> list[str]:
  """Writes config.json, or checks that it holds this experiment.

  If there are checkpoints and config.json is missing or garbled, it is restored from them. Allowed
  changes are written by `write_changes`, once it is known that they fit the checkpoint.

  Args:
    workdir: the workdir of the run; exists, and only this process writes to it.
    config: plain values.
    allowed: the fields that may differ.
    entries: the history that a new run begins with.

  Returns:
    Lines about changed versions and repairs.

  Raises:
    OtherExperiment: fields differ; the message has each of them with both values.
    ValueError: config.json does not belong to a run, or is lost.
    OSError: it cannot be written.
  """
  path = workdir / CONFIG
  record = record_of(config, entries)
  if not path.exists() and (entries or not checkpoints.saved_updates(workdir)):
    files.write(path, json.dumps(record, indent=2) + '\n')
    return []

  stored, notes = _restored_record(workdir)
  refused = changes.refusals(
      changed_fields(_completed(stored, record), record['config']), allowed)
  if refused:
    raise OtherExperiment(f'{workdir} holds another experiment ({"; ".join(refused)}); set the '
                        'fields back, or choose another --workdir, where --init_from='
                        f'{workdir} begins with what this run has learned')
  before = stored.get('versions', {})
  return notes + [
      f'{name} was {shorten(str(before.get(name)))} when this run began and is {version} now: '
      'results go on, but perhaps not to the last bit'
      for name, version in record['versions'].items() if before.get(name) != version]


def note_start(workdir: Path, update: int) -> None:
  """Notes in config.json by which command a run begins or goes on; equal ones in a row only once.

  The commit is that of the folder of the user's config file, or else of the current folder.

  Args:
    workdir: the workdir of the run; `open_workdir` has written its config.json.
    update: the next update of the run.

  Raises:
    OSError: config.json cannot be written.
  """
  record = _read(workdir / CONFIG)
  starts = record.get(STARTS)
  starts = starts if isinstance(starts, list) else []
  config_files = parts.search().files
  folder = Path(config_files[-1]).parent if config_files else Path('.')
  start = {'host': platform.node(), 'command': sys.argv, 'commit': _commit_of(folder)}
  if starts and isinstance(starts[-1], dict) and start.items() <= starts[-1].items():
    return
  record[STARTS] = [*starts, {'first_update': update} | start]
  files.write(workdir / CONFIG, json.dumps(record, indent=2) + '\n')


def _commit_of(folder: Path) -> str | None:
  """Returns the git commit that a folder is at; None if it is in no repository, or without git."""
  command = ['git', '-C', str(folder), 'rev-parse', '--verify', 'HEAD']
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True,
                          stdin=subprocess.DEVNULL)
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip() or None


def write_changes(workdir: Path, config: Mapping[str, Any], update: int,
                  problem: Callable[[], str]) -> list[str]:
  """Writes a config with allowed changes to config.json, and the changes to its history.

  Args:
    workdir: the workdir of the run; `open_workdir` has checked the changes.
    config: plain values.
    update: the update of the checkpoint that the run goes on from; 0 without one.
    problem: returns why the changed config does not fit that checkpoint, '' if it does.

  Returns:
    A line about the changes, if there are any.

  Raises:
    OtherExperiment: the changes do not fit the checkpoint, or come before later ones.
    OSError: config.json cannot be written.
  """
  stored = _read(workdir / CONFIG)
  record = record_of(config)
  changed = changed_fields(_completed(stored, record), record['config'])
  if not changed:
    return []
  names = shorten(', '.join(sorted(changed)), 600)
  misfit = problem()
  if misfit:
    raise OtherExperiment(f'{names}: cannot change in {workdir}: {misfit}')
  try:
    entries = history.with_changes(history.read(stored), update + 1, changed)
  except ValueError as error:
    raise OtherExperiment(f'{names}: cannot change now: {error}') from None
  # The versions with which the run began stay, and its starts.
  record = record_of(config, entries) | {'versions': stored.get('versions', {})}
  record |= {STARTS: stored[STARTS]} if STARTS in stored else {}
  files.write(workdir / CONFIG, json.dumps(record, indent=2) + '\n')
  return [history.Entry(update + 1, changed).words()]


def fits(workdir: Path, config: Mapping[str, Any]) -> bool:
  """Returns whether the run in workdir has this config, but for fields that runs may differ in.

  Raises:
    ValueError: there is no config.json, or it does not belong to a run.
  """
  stored = _read(workdir / CONFIG)
  record = record_of(config)
  return not changed_fields(_completed(stored, record), record['config'])


def check_layout(workdir: Path, experiment: Experiment) -> None:
  """Checks that the network of a run reads observations as they are laid out today.

  Args:
    workdir: the workdir of the run, or the folder of a saved agent.
    experiment: on the task for which the network shall be used.

  Raises:
    ValueError: the layout has changed since the network was trained on this task.
  """
  record = _read(workdir / CONFIG)
  task = experiment.env.task
  if record.get(_LAYOUT, 1) == spaces.LAYOUT or record['config']['env'].get('task') != task:
    return
  spaces_of = getattr(family_of(task), 'spaces_of', None)
  if spaces_of is None:
    return
  spec = experiment.spec
  is_asked = hasattr(experiment.network, 'parts' if spec.parts else 'channels_last')
  change = spaces.change_of_layout(
      spaces_of(task, experiment.env_options).observation, spec.obs_shape,
      sees_images=is_asked and (bool(spec.parts) or spec.channels_last))
  if change:
    version = record.get('versions', {}).get('podracer_jit', 'of an earlier version')
    raise ValueError(f'{workdir}: its network was trained with podracer_jit {version}, and the '
                     f'observations of {task} have another layout since: {change}; train anew, or '
                     f'go on with podracer_jit {version}')


def check_same(workdir: Path, config: Mapping[str, Any]) -> None:
  """Checks that config.json, which another process has written, holds this experiment.

  Raises:
    OtherExperiment: fields differ; the message has each of them with both values.
    ValueError: there is no config.json, or it does not belong to a run.
  """
  stored = _read(workdir / CONFIG)
  record = record_of(config)
  changed = differences(_completed(stored, record), record['config'], ('of process 0', 'here'))
  if changed:
    raise OtherExperiment(f'the processes have different experiments ({"; ".join(changed)})')


def _restored_record(workdir: Path) -> tuple[dict[str, Any], list[str]]:
  """Returns the record of config.json, and a line if it was restored from a checkpoint."""
  path = workdir / CONFIG
  problem = 'is missing'
  if path.exists():
    try:
      return _read(path), []
    except ValueError as error:
      if not checkpoints.saved_updates(workdir):
        raise
      problem = str(error).removeprefix(f'--workdir: {path} ')
  for update in reversed(checkpoints.saved_updates(workdir)):
    meta = checkpoints.read_meta(workdir, update)
    if meta is None or not _is_record(meta.get('run')) or checkpoints.problem(workdir, update):
      continue
    aside = ''
    if path.exists():
      aside = f'; the old file is now {files.set_aside(workdir, path)}'
    files.write(path, json.dumps(meta['run'], indent=2) + '\n')
    return meta['run'], [f'{path} {problem}; it was restored from the checkpoint of update '
                         f'{update}{aside}']
  raise ValueError(f'--workdir: {path} {problem}, and no checkpoint has a copy of it; put it back, '
                   'or choose another --workdir')


def read_config(workdir: Path, allow_modules: Collection[str] = (), update: int | None = None
                ) -> dict[str, Any]:
  """Returns the config of the run in workdir, as plain values.

  Args:
    workdir: the workdir of the run. It may be a stranger's, so nothing in it is executed.
    allow_modules: modules of a user's own parts that may be imported if the config names them.
    update: returns the config with which this update was made; None: the newest config.

  Raises:
    ValueError: there is no run, or its config names modules that are not allowed.
  """
  path = workdir / CONFIG
  _check_exists(path)

  record = _read(path)
  fields = options.from_json(record['config'])
  if update is not None:
    try:
      fields = history.config_at(fields, history.read(record), update)
    except ValueError as error:
      raise ValueError(f'--workdir: {path}: {error}') from None
    if not _has_sections(fields):
      raise ValueError(f'--workdir: {path} is not of a run of podracer_jit')
  config_lib.check_modules(fields, allow_modules, str(path),
                           lambda name: sources.copy_of(workdir, name, update))
  try:
    return config_lib.complete(fields)
  except ValueError as error:
    raise ValueError(f'--workdir: {CONFIG} of {workdir}: {shorten(str(error), 600)}') from None


def read_history(workdir: Path) -> list[history.Entry]:
  """Returns the history of the run in workdir; empty if the run began with its seed.

  Raises:
    ValueError: there is no run.
  """
  _check_exists(workdir / CONFIG)
  return history.read(_read(workdir / CONFIG))


def read_fields(workdir: Path) -> dict[str, Any]:
  """Returns the config of the run in workdir for display; imports none of its modules.

  Raises:
    ValueError: there is no run.
  """
  path = workdir / CONFIG
  _check_exists(path)
  fields = options.from_json(_read(path)['config'])
  return fields if config_lib.modules(fields) else record_of(config_lib.complete(fields))['config']


def _check_exists(path: Path) -> None:
  if not path.is_file():
    problem = f'holds no run (no {CONFIG})' if path.parent.is_dir() else (
        'is no folder' if path.parent.exists() else 'does not exist')
    raise ValueError(f'--workdir: {path.parent} {problem}')


def _completed(stored: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the config of a stored record, completed by the defaults of options that it lacks.

  A config that names other modules than `record` is returned unchanged: a module must not be
  imported only because a workdir names it.

  Args:
    stored: the record of a workdir.
    record: the record of the current config.
  """
  allowed = config_lib.modules(record['config']).values()
  try:
    config_lib.check_modules(stored['config'], allowed, CONFIG)
    completed = config_lib.complete(stored['config'])
  except ValueError:
    return dict(stored['config'])
  return json.loads(json.dumps(completed))


def _read(path: Path) -> dict[str, Any]:
  try:
    record = files.read_json(path)
  except (OSError, ValueError):
    record = None
  if not _is_record(record):
    raise ValueError(f'--workdir: {path} is not of a run of podracer_jit')
  return record


def _is_record(record: Any) -> bool:
  if not isinstance(record, dict) or not isinstance(record.get('config'), dict):
    return False
  try:
    history.read(record)
  except ValueError:
    return False
  return _has_sections(record['config'])


def _has_sections(config: Mapping[str, Any]) -> bool:
  """Returns whether the sections that a config has are dicts; the placement is among them."""
  sections = ('env', 'replay', *config_lib.CHOICES, *config_lib.SECTIONS)
  return isinstance(config.get('placement'), dict) and all(
      isinstance(config.get(section, {}), dict) for section in sections)


def differences(config_a: Mapping[str, Any], config_b: Mapping[str, Any], where: tuple[str, str]
                ) -> list[str]:
  """Returns the fields in which two configs are different experiments, with both values.

  Args:
    config_a: nested dicts.
    config_b: nested dicts.
    where: a phrase after the value of each config, such as 'in A'.
  """
  return [f'{shorten(name)}: {change.get("was")!r} {where[0]}, {change.get("now")!r} {where[1]}'
          for name, change in changed_fields(config_a, config_b).items()]


def changed_fields(config_a: Mapping[str, Any], config_b: Mapping[str, Any]
                   ) -> dict[str, dict[str, Any]]:
  """Returns the fields in which two configs are different experiments, as in `history.Entry`.

  Args:
    config_a: nested dicts, from JSON or not.
    config_b: nested dicts, from JSON or not.
  """
  a = flat(options.from_json(config_a))
  b = flat(options.from_json(config_b))
  return {name: {key: values[name] for key, values in (('was', a), ('now', b)) if name in values}
          for name in sorted(a.keys() | b.keys())
          if not _same(a.get(name), b.get(name))
          and (name in _BOUND or not name.startswith(_FREE))}


def _same(a: Any, b: Any) -> bool:
  """Returns whether values are equal; a list equals a tuple, since older files do not tell."""
  if isinstance(a, list | tuple) and isinstance(b, list | tuple):
    return len(a) == len(b) and all(map(_same, a, b))
  return a == b or a != a and b != b  # not a number


def flat(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns nested dicts as one dict with dotted names."""
  flat_fields = {}
  for name, value in tree.items():
    full = prefix + name
    flat_fields |= flat(value, f'{full}.') if isinstance(value, dict) else {full: value}
  return flat_fields
