"""Writes and reads the config of a run in its workdir; a resumed run must have the same."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from podracer_jit.run import checkpoint, safe_files
from podracer_jit.run import config as config_lib

PACKAGES = ('podracer_jit', 'jax', 'jaxlib', 'flax', 'optax', 'rlax', 'envpool', 'numpy')
CONFIG = 'config.json'
# Fields that may differ between two runs of the same experiment, and exceptions among them.
_FREE = ('placement.', 'log.', 'checkpoint.keep')
_BOUND = ('placement.xla_threads', 'placement.actor_platform')


class ConfigChanged(ValueError):
  """The workdir holds another experiment."""


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that results depend on."""
  by_package = {'python': platform.python_version()}
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      by_package[name] = importlib.metadata.version(name)
  return by_package


def record_of(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the contents of config.json for a config of plain values; checkpoints have a copy."""
  as_read = json.loads(json.dumps(config))  # tuples become lists, as in the file
  return {'config': as_read, 'versions': versions()}


def make(workdir: Path) -> None:
  """Makes the folder.

  Raises:
    ValueError: it cannot be made or written to.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / '.writable'
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise ValueError(f'--workdir: {workdir} cannot be written to: {error.strerror}') from None


def open_workdir(workdir: Path, config: Mapping[str, Any]) -> list[str]:
  """Writes config.json, or checks that it holds this experiment.

  If there are checkpoints and config.json is missing or garbled, it is restored from them.

  Args:
    workdir: exists, and is this process's to write to.
    config: plain values.

  Returns:
    Lines about what has changed and what was repaired.

  Raises:
    ConfigChanged: fields differ; the message has each of them with both values.
    ValueError: config.json is not that of a run, or is lost.
    OSError: it cannot be written.
  """
  path = workdir / CONFIG
  record = record_of(config)
  if not path.exists() and not checkpoint.updates_in(workdir):
    safe_files.write_text(path, json.dumps(record, indent=2) + '\n')
    return []

  stored, notes = _restored_record(workdir)
  changed = differences(_completed(stored, record), record['config'], ('there', 'now'))
  if changed:
    raise ConfigChanged(f'{workdir} holds another experiment ({"; ".join(changed)}); '
                        'choose another --workdir or set the fields back')
  before = stored.get('versions', {})
  return notes + [
      f'{name} was {before.get(name)} when this run began and is {version} now: results go on, but '
      'not to the last bit'
      for name, version in record['versions'].items() if before.get(name) != version]


def check_same(workdir: Path, config: Mapping[str, Any]) -> None:
  """Checks that config.json, which another process has written, holds this experiment.

  Raises:
    ConfigChanged: fields differ; the message has each of them with both values.
    ValueError: there is no config.json, or it is not that of a run.
  """
  stored = _read(workdir / CONFIG)
  record = record_of(config)
  changed = differences(_completed(stored, record), record['config'], ('of process 0', 'here'))
  if changed:
    raise ConfigChanged(f'the processes have different experiments ({"; ".join(changed)})')


def _restored_record(workdir: Path) -> tuple[dict[str, Any], list[str]]:
  """Returns the record of config.json, and a line if it was restored from a checkpoint."""
  path = workdir / CONFIG
  problem = 'is missing'
  if path.exists():
    try:
      return _read(path), []
    except ValueError as error:
      if not checkpoint.updates_in(workdir):
        raise
      problem = str(error).removeprefix(f'--workdir: {path} ')
  for update in reversed(checkpoint.updates_in(workdir)):
    meta = checkpoint.read_meta(workdir, update)
    if meta is None or not _is_record(meta.get('run')) or checkpoint.problem(workdir, update):
      continue
    aside = ''
    if path.exists():
      aside = f'; what was there is now {safe_files.set_aside(workdir, path)}'
    safe_files.write_text(path, json.dumps(meta['run'], indent=2) + '\n')
    return meta['run'], [f'{path} {problem}; it was restored from the checkpoint of update '
                         f'{update}{aside}']
  raise ValueError(f'--workdir: {path} {problem}, and no checkpoint has a copy of it; put it back, '
                   'or choose another --workdir')


def read_config(workdir: Path, allow_modules: Collection[str] = ()) -> dict[str, Any]:
  """Returns the config of the run in workdir, as plain values.

  Args:
    workdir: of the run. It may be a stranger's: it is data, and nothing in it is executed.
    allow_modules: modules of a user's own parts that may be imported if the config names them.

  Raises:
    ValueError: there is no run, or its config names modules that are not allowed.
  """
  path = workdir / CONFIG
  _check_exists(path)

  def tuples(fields):
    # JSON has lists in place of tuples.
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}

  fields = _read(path, tuples)['config']
  config_lib.check_modules(fields, allow_modules, str(path))
  try:
    return config_lib.complete(fields)
  except ValueError as error:
    raise ValueError(f'--workdir: {CONFIG} of {workdir}: {error}') from None


def read_fields(workdir: Path) -> dict[str, Any]:
  """Returns the config of the run in workdir for display; imports none of its modules.

  Raises:
    ValueError: there is no run.
  """
  path = workdir / CONFIG
  _check_exists(path)
  fields = _read(path)['config']
  return fields if config_lib.modules(fields) else record_of(config_lib.complete(fields))['config']


def _check_exists(path: Path) -> None:
  if not path.is_file():
    problem = f'holds no run (no {CONFIG})' if path.parent.is_dir() else (
        'is no folder' if path.parent.exists() else 'does not exist')
    raise ValueError(f'--workdir: {path.parent} {problem}')


def _completed(stored: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the config of a stored record, with defaults for options that it does not have yet.

  If it names other modules than `record`, it is returned unchanged: no module may be imported only
  because a workdir names it.

  Args:
    stored: from a workdir.
    record: of the current config.
  """
  allowed = config_lib.modules(record['config']).values()
  try:
    config_lib.check_modules(stored['config'], allowed, CONFIG)
    completed = config_lib.complete(stored['config'])
  except ValueError:
    return dict(stored['config'])
  return json.loads(json.dumps(completed))


def _read(path: Path, hook: Callable[[dict], dict] | None = None) -> dict[str, Any]:
  try:
    record = json.loads(path.read_text(), object_hook=hook)
  except (OSError, ValueError):
    record = None
  if not _is_record(record):
    raise ValueError(f'--workdir: {path} is not of a run of podracer_jit')
  return record


def _is_record(record: Any) -> bool:
  if not isinstance(record, dict) or not isinstance(record.get('config'), dict):
    return False
  config = record['config']
  sections = ('env', 'replay', *config_lib.CHOICES, *config_lib.SECTIONS)
  return isinstance(config.get('placement'), dict) and all(
      isinstance(config.get(section, {}), dict) for section in sections)


def differences(config_a: Mapping[str, Any], config_b: Mapping[str, Any], where: tuple[str, str]
                ) -> list[str]:
  """Returns the fields in which two configs are different experiments, with both values.

  Args:
    config_a: nested dicts.
    config_b: nested dicts.
    where: words after the value of each config.
  """
  a = _flat(config_a)
  b = _flat(config_b)
  return [f'{name}: {a.get(name)!r} {where[0]}, {b.get(name)!r} {where[1]}'
          for name in sorted(a.keys() | b.keys())
          if a.get(name) != b.get(name)
          and (name in _BOUND or not name.startswith(_FREE))]


def _flat(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns nested dicts as one dict with dotted names."""
  flat = {}
  for name, value in tree.items():
    flat |= _flat(value, f'{prefix}{name}.') if isinstance(value, dict) else {prefix + name: value}
  return flat
