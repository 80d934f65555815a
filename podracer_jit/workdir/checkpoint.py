"""Checkpoints of the whole train state at segment boundaries, each with a manifest."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer_jit.errors import Broken, NotSaved
from podracer_jit.options import shorten
from podracer_jit.runtime import host
from podracer_jit.types import TrainState
from podracer_jit.workdir import manifest, safe_files

FOLDER = 'checkpoints'  # of a workdir
# Key in `meta`: checkpoints that were saved by versions before 0.5 have no manifest.
_HAS_MANIFEST = 'has_manifest'
_WRITING = '.orbax-checkpoint-tmp'  # in the name that Orbax gives a checkpoint while it writes it
_DELETING = '.deleted'  # in the name of a checkpoint while it is deleted
LAST_GOOD = 'the last good checkpoint is'  # in the message of each failure
# What is left after a failed save is also removed when a run begins, so the wait has an end.
_MAX_SECONDS_OF_REMOVAL = 10.0
# Beginnings of names of arrays that earlier versions saved, and the names of today.
_RENAMED = {'ring/fresh': 'ring/is_reset_stack', 'slots/held/': 'slots/transitions/'}


class Checkpoints:
  """Saves and restores checkpoints under `workdir/checkpoints`, by update."""

  def __init__(self, workdir: Path, keep: int = 3):
    """Opens the folder; the newest `keep` checkpoints, and one of update 0, are never deleted."""
    self._workdir = workdir
    self._keep = keep
    # Synchronous: between two segments nothing could run meanwhile. Orbax would delete old
    # checkpoints before the new checkpoint has its manifest, so it is told to keep all.
    options = ocp.CheckpointManagerOptions(max_to_keep=None, enable_async_checkpointing=False)
    self._manager = ocp.CheckpointManager((workdir / FOLDER).absolute(), options=options)

  def save(self, state: TrainState, meta: Mapping[str, Any], envs: Any | None = None,
           keep_also: Collection[int] = ()) -> None:
    """Saves the state with `meta` under its update, unless there is a checkpoint of that update.

    The state, its replay and the environments' state are separate items. The manifest is written
    last; after it, old checkpoints are deleted.

    Args:
      state: the state of the learner.
      meta: values that JSON can hold.
      envs: the environments' state, as in `actor.kept_envs`; None if it is not kept.
      keep_also: updates of further checkpoints that must not be deleted.

    Raises:
      NotSaved: a file cannot be written; the message names the folder and the last good
        checkpoint. Nothing of the new checkpoint is left.
    """
    update = int(state.update)
    before = saved_updates(self._workdir)
    if update in before:
      return
    without_replay = state._replace(replay=None)
    items = dict(state=ocp.args.StandardSave(without_replay),
                 meta=ocp.args.JsonSave(dict(meta) | {_HAS_MANIFEST: True}))
    if jax.tree.leaves(state.replay):
      items['replay'] = ocp.args.StandardSave(state.replay)
    if jax.tree.leaves(envs):
      items['envs'] = ocp.args.StandardSave(envs)
    state_digest = manifest.digest(without_replay)
    folder = path_of(self._workdir, update)
    safe = last_good(self._workdir)
    free = shutil.disk_usage(self._workdir).free
    needed = _local_bytes(state)
    # On a full disk, Orbax's threads would print many errors.
    if free < needed:
      raise NotSaved(f'cannot save the checkpoint of update {update} in {folder} (it needs at '
                     f'least {needed:,} bytes, and {free:,} are free); {safe}')
    try:
      self._manager.reload()  # A checkpoint that Orbax knows may have been set aside.
      self._manager.save(update, args=ocp.args.Composite(**items))
      if jax.process_index() == 0:
        manifest.write(folder, state_digest)
    except Exception as error:  # noqa: BLE001 - Orbax raises many types for unwritable files
      _remove_what_is_still_written(self._workdir, folder)
      raise NotSaved(f'cannot save the checkpoint of update {update} in {folder} '
                     f'({_root_cause(error)}); {safe}') from error
    if jax.process_index() == 0:
      for old in saved_updates(self._workdir)[:-self._keep]:
        # The checkpoint of update 0 is the first state of a run that began with another run.
        if old and old not in keep_also:
          _delete(path_of(self._workdir, old))
    host.barrier(f'manifest {update}')

  def restore_envs(self, like: Any, update: int) -> Any:
    """Returns the environments' state of a checkpoint; None if it has none.

    Args:
      like: the shapes of `kept_envs.shapes`; None if environments begin anew.
      update: the update of the checkpoint, whose files were checked.
    """
    if not jax.tree.leaves(like) or not (path_of(self._workdir, update) / 'envs').is_dir():
      return None
    return self._restore_items(update, envs=like)['envs']

  def restore(self, like: TrainState, update: int, files_checked: bool = False
              ) -> tuple[TrainState, dict[str, Any]]:
    """Returns a checkpoint in the shapes and shardings of `like`, and its `meta`.

    The replay is None if it was not saved, or if `like` has none.

    Args:
      like: arrays or shapes.
      update: the update of the checkpoint.
      files_checked: True if `problem` has checked the files, which means to read all of them.

    Raises:
      Broken: the contents have changed since the checkpoint was saved.
      Exception: `like` has other arrays or shapes.
    """
    damage = '' if files_checked else problem(self._workdir, update)
    if damage:
      raise Broken(update, damage)
    folder = path_of(self._workdir, update)
    items = {'state': like._replace(replay=None)}
    if jax.tree.leaves(like.replay) and (folder / 'replay').is_dir():
      items['replay'] = like.replay
    is_old = _is_old(self._workdir, update)
    try:
      restored = self._restore_items(update, **items)
    except Exception as error:  # noqa: BLE001 - Orbax has no type for unexpected contents
      # Without a manifest, this error is the only sign of a broken file.
      if is_old:
        raise Broken(update, _root_cause(error)) from error
      raise
    state = restored['state']
    if not is_old and manifest.digest(state) != manifest.read(folder)['state_sha256']:
      raise Broken(update, 'the state that was read is not the state that was saved')
    meta = read_meta(self._workdir, update)
    if meta is None:
      raise Broken(update, 'its meta cannot be read')
    return state._replace(replay=restored.get('replay')), meta

  def restore_leaves(self, update: int, mesh: Mesh) -> dict[str, jax.Array]:
    """Returns the arrays of a checkpoint's state by name; needs no experiment.

    Args:
      update: the update of the checkpoint, whose files were checked.
      mesh: the arrays are replicated on it.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
                        _metadata(self._workdir, update, 'state'))
    # Orbax's metadata has the numbers of a PRNG key, but it restores keys by their own dtype.
    key = jax.eval_shape(lambda: jax.random.key(0))
    like['key'] = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)
    restored = self._manager.restore(
        update, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))
    return leaves(restored['state'])

  def restore_replay(self, like: Any, update: int) -> Any:
    """Returns the replay of a checkpoint.

    Args:
      like: the shapes, which must equal those in the checkpoint, and the shardings.
      update: the update of the checkpoint, whose files were checked.
    """
    return self._restore_items(update, replay=like)['replay']

  def _restore_items(self, update: int, **likes: Any) -> dict[str, Any]:
    """Returns items of a checkpoint by name.

    Arrays are found by their names, not by the structure of the tree that was saved: earlier
    versions gave fields other names, and stored other values for absent ones.

    Args:
      update: the update of the checkpoint, whose files were checked.
      **likes: for each item, a tree of arrays or shapes with the structure to return.

    Raises:
      ValueError: an item has other arrays than its tree.
      Exception: Orbax's, for other shapes, and for files that cannot be read.
    """
    args = {item: ocp.args.StandardRestore(self._as_saved(update, item, like))
            for item, like in likes.items()}
    restored = self._manager.restore(update, args=ocp.args.Composite(**args))

    trees = {}
    for item, like in likes.items():
      arrays = _with_present_names(leaves(restored[item]))
      trees[item] = jax.tree.unflatten(jax.tree.structure(like),
                                       [arrays[name] for name in leaves(like)])
    return trees

  def _as_saved(self, update: int, item: str, like: Any) -> Any:
    """Returns the shapes and shardings of `like` in the structure in which an item was saved.

    Raises:
      ValueError: the item has other arrays.
    """
    shapes = leaves(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
    saved = _metadata(self._workdir, update, item)
    differing = _with_present_names(leaves(saved)).keys() ^ shapes.keys()
    if differing:
      name = min(differing)
      where = 'is only in this run' if name in shapes else 'is only in the checkpoint'
      raise ValueError(f'{item}: {shorten(name)} {where}')
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: shapes[_present_name(_name_of(path))], saved)

  def close(self) -> None:
    """Closes the folder; checkpoints cannot be saved or read afterwards."""
    self._manager.close()


def leaves(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a tree by name: 'params/params/policy/bias'.

  Dicts and lists in place of a tree's own types, as Orbax reads them, give the same names.
  """
  return {_name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name_of(path: Any) -> str:
  """Returns the name of a leaf from its path in a tree."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _present_name(name: str) -> str:
  """Returns the name that an array of a checkpoint has today."""
  for earlier, present in _RENAMED.items():
    if name.startswith(earlier):
      return present + name.removeprefix(earlier)
  return name


def _with_present_names(arrays: Mapping[str, Any]) -> dict[str, Any]:
  return {_present_name(name): array for name, array in arrays.items()}


def saved_leaves(workdir: Path, update: int, item: str = 'state') -> dict[str, Any]:
  """Returns the shapes and types of the arrays in a checkpoint, by name.

  Args:
    workdir: the workdir of the run.
    update: the update of the checkpoint.
    item: 'state', 'replay' or 'envs'; the result is empty if the checkpoint does not have it.
  """
  if not (path_of(workdir, update) / item).is_dir():
    return {}
  return _with_present_names(leaves(_metadata(workdir, update, item)))


def _metadata(workdir: Path, update: int, item: str) -> Any:
  """Returns the shapes and types of an item as nested dicts and lists."""
  folder = path_of(workdir, update) / item
  metadata = ocp.StandardCheckpointHandler().metadata(folder)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), metadata.tree)


def path_of(workdir: Path, update: int) -> Path:
  """Returns the folder of a checkpoint."""
  return (workdir / FOLDER / str(update)).absolute()


def updates_in(workdir: Path) -> list[int]:
  """Returns the updates of all checkpoints of a workdir in order, unfinished ones included."""
  folder = workdir / FOLDER
  if not folder.is_dir():
    return []
  names = [path.name for path in folder.iterdir()]
  # Other digits than those of ASCII are digits, too.
  return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def saved_updates(workdir: Path) -> list[int]:
  """Returns the updates of all checkpoints that were saved to the end, in order."""
  return [update for update in updates_in(workdir)
          if (path_of(workdir, update) / manifest.NAME).exists() or _is_old(workdir, update)]


def last_good(workdir: Path) -> str:
  """Returns which checkpoint a failed run goes on from, for the message about the failure."""
  try:
    saved = saved_updates(workdir)
  except OSError as error:
    return f'{LAST_GOOD} not known: {workdir} cannot be read ({error.strerror})'
  which = f'that of update {saved[-1]}' if saved else 'none: the run had just begun'
  return f'{LAST_GOOD} {which}, in {workdir}'


@contextlib.contextmanager
def naming_last_good(workdir: Path) -> Iterator[None]:
  """Adds the last good checkpoint to an exception of the block that does not name it yet.

  It comes to the message, or is a note if the message cannot be changed.
  """
  try:
    yield
  except Exception as error:
    if str(error) and LAST_GOOD not in str(error) and error.args == (str(error),):
      error.args = (f'{error}; {last_good(workdir)}',)
    if LAST_GOOD not in str(error):
      error.add_note(last_good(workdir))
    raise


def problem(workdir: Path, update: int) -> str:
  """Returns the first problem of a checkpoint's files; '' if they are as they were saved."""
  folder = path_of(workdir, update)
  if not _is_old(workdir, update):
    return manifest.problem(folder)
  try:
    manifest.sizes_of(folder)
  except OSError as error:
    return shorten(f'{error.filename} cannot be read: {error.strerror}')
  return ''


def newest_whole(workdir: Path) -> int | None:
  """Returns the update of the newest checkpoint whose files are as they were saved, or None."""
  return next((update for update in reversed(updates_in(workdir))
               if not problem(workdir, update)), None)


def recover(workdir: Path) -> tuple[int | None, list[str]]:
  """Finds the newest whole checkpoint, and sets newer checkpoints, which are broken, aside.

  Only the process that may write to the workdir may call this function.

  Returns:
    The update of the newest whole checkpoint, or None if the run has not saved one yet; and a line
    about each checkpoint that was set aside.

  Raises:
    ValueError: there are checkpoints, but none is whole. Nothing is set aside.
  """
  existing = updates_in(workdir)
  whole = None
  problems = {}
  for update in reversed(existing):
    damage = problem(workdir, update)
    if not damage:
      whole = update
      break
    problems[update] = damage
  if whole is None and not all(_is_interrupted(workdir, update) for update in existing):
    listed = '; '.join(f'{update}: {problems[update]}' for update in existing)
    raise ValueError(f'--workdir: none of the checkpoints in {workdir / FOLDER} is whole '
                     f'({listed}); put one back, or choose another --workdir to begin anew')
  return whole, [set_aside(workdir, update, problems[update]) for update in sorted(problems)]


def set_all_aside(workdir: Path) -> None:
  """Sets all checkpoints aside, before a new run begins in the workdir."""
  for update in updates_in(workdir):
    safe_files.set_aside(workdir, path_of(workdir, update))


def set_aside(workdir: Path, update: int, problem: str) -> str:
  """Moves a broken checkpoint to the folder for broken files; returns a line that says so.

  Args:
    workdir: the workdir of the run.
    update: the update of the checkpoint.
    problem: why the checkpoint is broken.
  """
  path = safe_files.set_aside(workdir, path_of(workdir, update))
  return f'the checkpoint of update {update} is broken ({problem}); it is now {path}'


def _is_old(workdir: Path, update: int) -> bool:
  """Returns whether a checkpoint was saved by a version without manifests."""
  if (path_of(workdir, update) / manifest.NAME).exists():
    return False
  meta = read_meta(workdir, update)
  return meta is not None and _HAS_MANIFEST not in meta


def _is_interrupted(workdir: Path, update: int) -> bool:
  """Returns whether a checkpoint lacks only the manifest, which is written last."""
  if (path_of(workdir, update) / manifest.NAME).exists():
    return False
  meta = read_meta(workdir, update)
  return meta is not None and _HAS_MANIFEST in meta


def read_meta(workdir: Path, update: int) -> dict[str, Any] | None:
  """Returns the `meta` of a checkpoint without loading its state; None if it cannot be read."""
  try:
    meta = safe_files.read_json(workdir / FOLDER / str(update) / 'meta' / 'metadata')
  except (OSError, ValueError):
    return None
  return meta if isinstance(meta, dict) else None


def remove_unfinished(workdir: Path) -> None:
  """Removes the remains of interrupted saves and deletions; no process may be saving meanwhile."""
  for pattern in (_WRITING, _DELETING):
    for path in (workdir / FOLDER).glob(f'*{pattern}*'):
      shutil.rmtree(path, ignore_errors=True)


def _remove_what_is_still_written(workdir: Path, folder: Path) -> None:
  """Removes all of a checkpoint whose save has failed, also files that threads write meanwhile.

  Orbax raises the first error while TensorStore's threads still write other arrays, and they
  create a folder again that was removed. No function of Orbax waits for them, so the files are
  removed until none has appeared for half a second.
  """
  deadline = time.monotonic() + _MAX_SECONDS_OF_REMOVAL
  quiet_since = time.monotonic()
  while time.monotonic() < min(quiet_since + 0.5, deadline):
    if folder.exists() or any((workdir / FOLDER).glob(f'*{_WRITING}*')):
      quiet_since = time.monotonic()
      remove_unfinished(workdir)
      shutil.rmtree(folder, ignore_errors=True)
    time.sleep(0.02)


def _delete(path: Path) -> None:
  """Deletes a checkpoint. Readers see it whole or not at all."""
  leaving = path.with_name(path.name + _DELETING)
  os.rename(path, leaving)
  shutil.rmtree(leaving, ignore_errors=True)


def _local_bytes(tree: Any) -> int:
  """Returns the bytes of this process's part of the arrays; copies of an array count once."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    copies = {str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}
    total += sum(copies.values())
  return total


def _root_cause(error: BaseException) -> str:
  """Returns the message of the error at the root, in one line."""
  while error.__cause__ is not None:
    error = error.__cause__
  by_tensorstore = re.search(r"os_error_code='(\d+)'", str(error))
  if by_tensorstore:
    return os.strerror(int(by_tensorstore[1]))
  if isinstance(error, OSError) and error.strerror:
    return f'{error.strerror}: {error.filename}' if error.filename else error.strerror
  return shorten(str(error)) or type(error).__name__
