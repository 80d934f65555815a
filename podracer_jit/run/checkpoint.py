"""The workdir: its config, and checkpoints of the whole train state at segment boundaries."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging as std_logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from podracer_jit.run import config as config_lib
from podracer_jit.types import TrainState

PACKAGES = ('podracer_jit', 'jax', 'jaxlib', 'flax', 'optax', 'rlax', 'envpool', 'numpy')
# What may differ between two runs of the same experiment.
_FREE = ('placement.', 'log.', 'checkpoint.keep')
_BOUND = ('placement.xla_threads', 'placement.actor_platform')


class ConfigChanged(ValueError):
  """The workdir holds another experiment."""


def versions() -> dict[str, str]:
  """Of everything whose arithmetic or randomness a result depends on."""
  found = {'python': platform.python_version()}
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def open_workdir(workdir: Path, config: Mapping[str, Any]) -> None:
  """Makes the workdir and writes config.json, or checks that it holds this experiment.

  Raises:
    ConfigChanged: naming each field that differs, with both values.
    OSError: the workdir cannot be written.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / 'config.json'
  new = json.loads(json.dumps(config))  # tuples to lists, as the file has them
  if path.exists():
    old = _read(path)
    there = json.loads(json.dumps(config_lib.complete(old['config'])))
    changed = differences(there, new, ('there', 'now'))
    if changed:
      raise ConfigChanged(f'{workdir} holds another experiment ({"; ".join(changed)}); '
                          'choose another --workdir or set the fields back')
    for name, version in versions().items():
      before = old.get('versions', {}).get(name)
      if before != version:
        logging.warning('%s was %s when this run began and is %s now: results go on, but not to '
                        'the last bit', name, before, version)
    return
  # In one step: a half-written file would pass for another experiment.
  draft = path.with_suffix('.tmp')
  draft.write_text(json.dumps({'config': new, 'versions': versions()}, indent=2) + '\n')
  os.replace(draft, path)


def read_config(workdir: Path) -> dict[str, Any]:
  """The config of the run in workdir.

  Raises:
    ValueError: there is no run.
  """
  path = workdir / 'config.json'
  if not path.is_file():
    what = 'holds no run (no config.json)' if workdir.is_dir() else 'does not exist'
    raise ValueError(f'--workdir: {workdir} {what}')

  def tuples(fields):  # which JSON has as lists
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}

  fields = _read(path, tuples)['config']
  try:
    return config_lib.complete(fields)
  except ValueError as error:
    raise ValueError(f'--workdir: config.json of {workdir}: {error}') from None


def _read(path: Path, hook: Callable[[dict], dict] | None = None) -> dict[str, Any]:
  try:
    record = json.loads(path.read_text(), object_hook=hook)
    record['config']['placement'].items()
    for section in ('env', 'loss', 'network', 'optimizer', 'normalise', 'log'):
      record['config'].get(section, {}).items()  # `resolve` names one that is missing
  except (ValueError, KeyError, TypeError, AttributeError):
    raise ValueError(f'--workdir: {path} is not of a run of podracer_jit') from None
  return record


def read_receipts(workdir: Path) -> tuple[list[dict], dict[int, dict]]:
  """The headers of the segments, and the receipts by update.

  Raises:
    OSError: there are none.
  """
  lines = read_lines(workdir / 'receipts.jsonl')
  return ([x for x in lines if 'segment' in x], {x['update']: x for x in lines if 'update' in x})


def read_lines(path: Path) -> list[dict[str, Any]]:
  """The JSON objects of a file, one a line."""
  found = []
  for line in path.read_text().splitlines():
    with contextlib.suppress(json.JSONDecodeError):  # of a run that was killed, or is running
      found.append(json.loads(line))
  return found


def segment_ends(workdir: Path) -> list[int]:
  """The last update of each segment of the run in workdir."""
  headers, receipts = read_receipts(workdir)
  return [*(header['first_update'] - 1 for header in headers[1:]), max(receipts, default=0)]


def differences(one: Mapping[str, Any], two: Mapping[str, Any], where: tuple[str, str]
                ) -> list[str]:
  """The fields that make two configs two experiments, with both values."""
  one, two = _flat(one), _flat(two)
  return [f'{name}: {one.get(name)!r} {where[0]}, {two.get(name)!r} {where[1]}'
          for name in sorted(one.keys() | two.keys())
          if one.get(name) != two.get(name)
          and (name in _BOUND or not name.startswith(_FREE))]


def _flat(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  flat = {}
  for name, value in tree.items():
    flat |= _flat(value, f'{prefix}{name}.') if isinstance(value, dict) else {prefix + name: value}
  return flat


class Checkpoints:
  """Checkpoints under `workdir/checkpoints`, by update; an interrupted one is never read."""

  def __init__(self, workdir: Path, keep: int = 3):
    """Opens the folder; the newest `keep` checkpoints stay."""
    std_logging.getLogger('absl').addFilter(_no_orbax_chatter)
    # Synchronous: at a boundary there is nothing to overlap with, and saved means saved.
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
    self._folder = (workdir / 'checkpoints').absolute()
    self._manager = ocp.CheckpointManager(self._folder, options=options)

  def save(self, state: TrainState, meta: Mapping[str, Any]) -> None:
    """Saves the state with `meta` (JSON) under its update, unless that is there already.

    Its replay, if it has one, is an item of its own.
    """
    update = int(state.update)
    if update == self._manager.latest_step():
      return
    items = dict(state=ocp.args.StandardSave(state._replace(replay=())),
                 meta=ocp.args.JsonSave(dict(meta)))
    if jax.tree.leaves(state.replay):
      items['replay'] = ocp.args.StandardSave(state.replay)
    self._manager.save(update, args=ocp.args.Composite(**items))

  def newest(self) -> int | None:
    """The update of the newest whole checkpoint."""
    return self._manager.latest_step()

  def updates(self) -> list[int]:
    """The updates of all whole checkpoints."""
    return sorted(self._manager.all_steps())

  def restore(self, like: TrainState, update: int | None = None
              ) -> tuple[TrainState, dict[str, Any]]:
    """A checkpoint, the newest by default, in the shapes and shardings of `like`.

    A replay that was not saved is (); one that `like` has not is not read.
    """
    update = self.newest() if update is None else update

    def shapes(tree):
      return ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
    items = dict(state=shapes(like._replace(replay=())), meta=ocp.args.JsonRestore())
    if jax.tree.leaves(like.replay) and (self._folder / str(update) / 'replay').is_dir():
      items['replay'] = shapes(like.replay)
    restored = self._manager.restore(update, args=ocp.args.Composite(**items))
    replay = restored['replay'] if 'replay' in items else ()
    return restored['state']._replace(replay=replay), restored['meta']

  def close(self) -> None:
    """Lets go of the folder."""
    self._manager.close()


def _no_orbax_chatter(record: std_logging.LogRecord) -> bool:
  return 'orbax' not in record.pathname or record.levelno > std_logging.WARNING
