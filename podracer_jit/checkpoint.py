"""The workdir: its config, and checkpoints of the whole train state at segment boundaries."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging as std_logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from podracer_jit.types import TrainState

PACKAGES = ('podracer_jit', 'jax', 'jaxlib', 'flax', 'optax', 'rlax', 'envpool', 'numpy')
# What may differ between two runs of the same experiment.
_FREE = ('placement.', 'log.', 'checkpoint.keep')
_BOUND = ('placement.xla_threads',)


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
    old = json.loads(path.read_text())
    _refuse_changes(workdir, _flat(old['config']), _flat(new))
    for name, version in versions().items():
      before = old['versions'].get(name)
      if before != version:
        logging.warning('%s was %s when this run began and is %s now: results go on, but not to '
                        'the last bit', name, before, version)
    return
  # In one step: a half-written file would pass for another experiment.
  draft = path.with_suffix('.tmp')
  draft.write_text(json.dumps({'config': new, 'versions': versions()}, indent=2) + '\n')
  os.replace(draft, path)


def _refuse_changes(workdir: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
  changed = [f'{name}: {old.get(name)!r} there, {new.get(name)!r} now'
             for name in sorted(old.keys() | new.keys())
             if old.get(name) != new.get(name)
             and (name in _BOUND or not name.startswith(_FREE))]
  if changed:
    raise ConfigChanged(f'{workdir} holds another experiment ({"; ".join(changed)}); '
                        'choose another --workdir or set the fields back')


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
    self._manager = ocp.CheckpointManager((workdir / 'checkpoints').absolute(), options=options)

  def save(self, state: TrainState, meta: Mapping[str, Any]) -> None:
    """Saves the state with `meta` (JSON) under its update, unless that is there already."""
    update = int(state.update)
    if update == self._manager.latest_step():
      return
    self._manager.save(update, args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(dict(meta))))

  def newest(self) -> int | None:
    """The update of the newest whole checkpoint."""
    return self._manager.latest_step()

  def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """The newest checkpoint, in the shapes and shardings of `like`."""
    restored = self._manager.restore(self.newest(), args=ocp.args.Composite(
        state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like)),
        meta=ocp.args.JsonRestore()))
    return restored['state'], restored['meta']

  def close(self) -> None:
    """Lets go of the folder."""
    self._manager.close()


def _no_orbax_chatter(record: std_logging.LogRecord) -> bool:
  return 'orbax' not in record.pathname or record.levelno > std_logging.WARNING
