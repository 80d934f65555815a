"""Checkpoints of the whole train state, each with a manifest."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer_jit import errors
from podracer_jit.errors import Broken, NotSaved
from podracer_jit.experiment.build import Snapshot
from podracer_jit.late import loaded_late
from podracer_jit.numerics import counters
from podracer_jit.options import shorten
from podracer_jit.runtime import host
from podracer_jit.types import TrainState
from podracer_jit.workdir import actions, files, journal

with loaded_late(lambda spec: spec.name == 'orbax.checkpoint'):
  import orbax.checkpoint as ocp

FOLDER = 'checkpoints'  # of a workdir
MANIFEST = 'manifest.json'  # in the folder of a checkpoint, or of a saved agent
# In names of folders that are no checkpoint yet, or none any more. A number alone is the name of a
# checkpoint that was saved to the end.
_SAVING = '.saving'
_ORBAX_WRITING = '.orbax-checkpoint-tmp'
_DELETING = '.deleted'
# In a checkpoint's `meta`.
_STEPS = 'steps'
_JOURNALS = 'journals'  # the `journal.Prefix` of each, and of a segment's actions, by name
_SEGMENT = 'segment'
_FIRST = 'first'
_OF_0_5 = {'ring/fresh'}  # an array of a replay, which has another name since
# Arrays that version 0.6 saved under other names, in the items 'replay' and 'envs'.
_RENAMED = {'slots/transitions/added': 'slots/added',
            'recent/action_value': 'recent/extras/action_value',
            'recent/value': 'recent/extras/value'}
LAST_GOOD = 'the last good checkpoint is'  # in the message of each failure
# What is left after a failed save is also removed when a run begins, so the wait has an end.
_MAX_SECONDS_OF_REMOVAL = 10.0
_BLOCK = 2**20  # bytes of a file that are read at a time


class Checkpoints:
  """Saves and restores checkpoints under `workdir/checkpoints`, by update."""

  def __init__(self, workdir: Path, keep: int = 3):
    """Opens the folder.

    Args:
      workdir: the workdir of the run.
      keep: segments whose newest checkpoint is not deleted, beside the two newest checkpoints and
        that of update 0.
    """
    self._workdir = workdir
    self._keep = keep
    self._journals = journal.Prefixes(workdir)
    self._segments: dict[int, tuple[int, int]] = {}  # by update, as `segment_of` returns them

  @functools.cached_property
  def _orbax(self) -> ocp.Checkpointer:
    """Orbax's checkpointer, which is synchronous: the state is valid until the next update."""
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler())

  def save(self, at: Snapshot, meta: Mapping[str, Any], keep_also: Collection[int] = ()) -> None:
    """Saves where a run is under its update, unless there is a checkpoint of that update.

    The state, its replay, the environments' state and the parameters before the last update are
    separate items. Orbax writes them to a folder that gets the manifest, and then its name: readers
    see a checkpoint whole or not at all. After that, old checkpoints are deleted, and the actions
    of segments that have none.

    Args:
      at: where the run is; its actions are on the disk.
      meta: values that JSON can hold.
      keep_also: updates of further checkpoints that must not be deleted.

    Raises:
      NotSaved: a file cannot be written; the message names the folder and the last good
        checkpoint. Nothing of the new checkpoint is left.
    """
    state = at.state
    update = at.update
    if update in saved_updates(self._workdir):
      return
    without_replay = state._replace(replay=None)
    whole_meta = dict(meta) | {_STEPS: counters.fetch_int(state.steps), _SEGMENT: at.segment,
                               _FIRST: update if at.first is None else at.first}
    if jax.process_index() == 0:
      whole_meta[_JOURNALS] = self._journals.now(
          [journal.RECEIPTS, journal.METRICS, actions.name_of(at.segment)])
    items = dict(state=ocp.args.StandardSave(without_replay), meta=ocp.args.JsonSave(whole_meta))
    if jax.tree.leaves(state.replay):
      items['replay'] = ocp.args.StandardSave(state.replay)
    for name in ('envs', 'before'):
      if jax.tree.leaves(getattr(at, name)):
        items[name] = ocp.args.StandardSave(getattr(at, name))
    state_digest = digest(without_replay)
    folder = path_of(self._workdir, update)
    draft = folder.with_name(folder.name + _SAVING)
    safe = last_good(self._workdir)
    free = shutil.disk_usage(self._workdir).free
    needed = _local_bytes(state)
    # On a full disk, Orbax's threads would print many errors.
    if free < needed:
      raise NotSaved(f'cannot save the checkpoint of update {update} in {folder} '
                     f'({os.strerror(errno.ENOSPC)}: it needs at least {needed:,} bytes, and '
                     f'{free:,} are free); {safe}')
    try:
      self._orbax.save(draft, args=ocp.args.Composite(**items))
      if jax.process_index() == 0:
        write_manifest(draft, state_digest)
        files.rename(draft, folder)
    except Exception as error:  # noqa: BLE001 - Orbax raises many types for unwritable files
      _remove_what_is_still_written(self._workdir)
      raise NotSaved(f'cannot save the checkpoint of update {update} in {folder} '
                     f'({_root_cause(error)}); {safe}') from error
    if jax.process_index() == 0:
      self._delete_old(keep_also)
    host.barrier(f'saved {update}')

  def _delete_old(self, keep_also: Collection[int]) -> None:
    """Deletes checkpoints that are not needed any more, and then the actions of their segments."""
    updates = self._read_segments()
    newest = {self._segments[update][0]: update for update in updates}
    # The checkpoint of update 0 is the first state of a run that began with another run.
    kept = {0, *updates[-2:], *sorted(newest.values())[-self._keep:], *keep_also}
    for update in updates:
      if update not in kept:
        _delete(path_of(self._workdir, update))
    self.remove_actions()

  def remove_actions(self) -> None:
    """Removes the actions of segments that have no checkpoint within them."""
    within = [self._segments[update][0] for update in self._read_segments()
              if self._segments[update][1] < update]
    actions.remove_others(self._workdir, within)

  def _read_segments(self) -> list[int]:
    """Returns the updates of all checkpoints, after their segments were read."""
    updates = saved_updates(self._workdir)
    for update in updates:
      if update not in self._segments:
        meta = read_meta(self._workdir, update) or {}
        self._segments[update] = segment_of(meta, update)
    return updates

  def restore_item(self, name: str, like: Any, update: int) -> Any:
    """Returns an item of a checkpoint beside its state; None if it has none.

    Args:
      name: 'envs', the environments' state, or 'before', the parameters before the last update.
      like: its shapes; None if the run has none.
      update: the update of the checkpoint, whose files were checked.
    """
    if not jax.tree.leaves(like) or not (path_of(self._workdir, update) / name).is_dir():
      return None
    return self._restore_items(update, **{name: like})[name]

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
    # The count of steps has the form that the total_steps of that time needed.
    steps = saved_leaves(self._workdir, update).get(_STEPS, like.steps)
    if steps.shape != like.steps.shape:
      steps = jax.ShapeDtypeStruct(steps.shape, steps.dtype, sharding=like.steps.sharding)
      items['state'] = items['state']._replace(steps=steps)
    if jax.tree.leaves(like.replay) and (folder / 'replay').is_dir():
      items['replay'] = like.replay
    restored = self._restore_items(update, **items)
    state = restored['state']
    if digest(state) != read_manifest(folder)['state_sha256']:
      raise Broken(update, 'the state that was read is not the state that was saved')
    state = state._replace(steps=counters.converted(state.steps, like.steps))
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
    restored = self._orbax.restore(
        path_of(self._workdir, update),
        args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))
    return leaves(restored['state'])

  def _restore_items(self, update: int, **likes: Any) -> dict[str, Any]:
    """Returns items of a checkpoint by name.

    Arrays are found by their names, not by the structure of the tree that was saved: earlier
    versions stored other values for absent ones.

    Args:
      update: the update of the checkpoint, whose files were checked.
      **likes: for each item, a tree of arrays or shapes with the structure to return.

    Raises:
      ValueError: an item has other arrays than its tree.
      Exception: Orbax's, for other shapes, and for files that cannot be read.
    """
    args = {item: ocp.args.StandardRestore(self._as_saved(update, item, like))
            for item, like in likes.items()}
    restored = self._orbax.restore(path_of(self._workdir, update),
                                   args=ocp.args.Composite(**args))

    trees = {}
    for item, like in likes.items():
      arrays = {_today(name): x for name, x in leaves(restored[item]).items()}
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
    differing = set(map(_today, leaves(saved))) ^ shapes.keys()
    if differing:
      name = min(differing)
      where = 'is only in this run' if name in shapes else 'is only in the checkpoint'
      if differing & _OF_0_5:
        where = 'was saved by an early version 0.5; podracer_jit 0.6 must resume such a run once'
      raise ValueError(f'{item}: {shorten(name)} {where}')
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: shapes[_today(_name_of(path))], saved)

  def close(self) -> None:
    """Closes the folder; checkpoints cannot be saved or read afterwards."""
    if '_orbax' in self.__dict__:
      self._orbax.close()


def leaves(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a tree by name: 'params/params/policy/bias'.

  Dicts and lists in place of a tree's own types, as Orbax reads them, give the same names.
  """
  return {_name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name_of(path: Any) -> str:
  """Returns the name of a leaf from its path in a tree."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def has_replays_of_groups(workdir: Path, update: int) -> bool:
  """Returns whether a checkpoint has a replay for each of several gradient groups.

  They were so until version 0.8; now there is one for all.
  """
  size = saved_leaves(workdir, update, 'replay').get('size')
  return size is not None and size.shape != (1,)


def saved_leaves(workdir: Path, update: int, item: str = 'state') -> dict[str, Any]:
  """Returns the shapes and types of the arrays in a checkpoint, by name.

  Args:
    workdir: the workdir of the run.
    update: the update of the checkpoint.
    item: 'state', 'replay', 'envs' or 'before'; the result is empty if the checkpoint does not have
      it.
  """
  if not (path_of(workdir, update) / item).is_dir():
    return {}
  return {_today(name): x for name, x in leaves(_metadata(workdir, update, item)).items()}


def _today(name: str) -> str:
  """Returns today's name of an array that a checkpoint has under an earlier name."""
  return _RENAMED.get(name, name)


def _metadata(workdir: Path, update: int, item: str) -> Any:
  """Returns the shapes and types of an item as nested dicts and lists."""
  folder = path_of(workdir, update) / item
  metadata = ocp.StandardCheckpointHandler().metadata(folder)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), metadata.tree)


def path_of(workdir: Path, update: int) -> Path:
  """Returns the folder of a checkpoint."""
  return (workdir / FOLDER / str(update)).absolute()


def saved_updates(workdir: Path) -> list[int]:
  """Returns the updates of all checkpoints of a workdir in order; all were saved to the end."""
  folder = workdir / FOLDER
  if not folder.is_dir():
    return []
  names = [path.name for path in folder.iterdir()]
  # Other digits than those of ASCII are digits, too.
  return sorted(int(name) for name in names if name.isascii() and name.isdigit())


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
    if LAST_GOOD not in str(error):
      errors.extend(error, last_good(workdir))
    raise


def problem(workdir: Path, update: int) -> str:
  """Returns the first problem of a checkpoint's files; '' if they are as they were saved."""
  return problem_of_folder(path_of(workdir, update))


def newest_whole(workdir: Path) -> int | None:
  """Returns the update of the newest checkpoint whose files are as they were saved, or None."""
  return examine(workdir)[0]


def examine(workdir: Path) -> tuple[int | None, dict[int, str]]:
  """Returns the update of the newest whole checkpoint, and the problems of newer ones by update."""
  problems = {}
  for update in reversed(saved_updates(workdir)):
    damage = problem(workdir, update)
    if not damage:
      return update, problems
    problems[update] = damage
  return None, problems


def steps_of(workdir: Path, update: int) -> int | None:
  """Returns the valid steps that a checkpoint has learned from; None if it does not say so.

  Checkpoints of version 0.6 and before do not.
  """
  steps = (read_meta(workdir, update) or {}).get(_STEPS)
  return steps if isinstance(steps, int) else None


def set_all_aside(workdir: Path) -> None:
  """Sets all checkpoints aside, before a new run begins in the workdir."""
  for update in saved_updates(workdir):
    files.set_aside(workdir, path_of(workdir, update))


def set_aside(workdir: Path, update: int, problem: str) -> str:
  """Moves a broken checkpoint to the folder for broken files; returns a line that says so.

  Args:
    workdir: the workdir of the run.
    update: the update of the checkpoint.
    problem: why the checkpoint is broken.
  """
  path = files.set_aside(workdir, path_of(workdir, update))
  return f'the checkpoint of update {update} is broken ({problem}); it is now {path}'


def read_meta(workdir: Path, update: int) -> dict[str, Any] | None:
  """Returns the `meta` of a checkpoint without loading its state; None if it cannot be read."""
  try:
    meta = files.read_json(workdir / FOLDER / str(update) / 'meta' / 'metadata')
  except (OSError, ValueError):
    return None
  return meta if isinstance(meta, dict) else None


def segment_of(meta: Mapping[str, Any], update: int) -> tuple[int, int]:
  """Returns the index of a checkpoint's segment, and the updates done when this began.

  Args:
    meta: of the checkpoint. Those of version 0.7 and before lie between two segments.
    update: of the checkpoint.
  """
  segment, first = meta.get(_SEGMENT), meta.get(_FIRST, update)
  return (segment, first) if isinstance(segment, int) and isinstance(first, int) else (-1, update)


def _unfinished(workdir: Path) -> list[Path]:
  """Returns the remains of interrupted saves and deletions."""
  return [path for pattern in (_SAVING, _ORBAX_WRITING, _DELETING)
          for path in (workdir / FOLDER).glob(f'*{pattern}*')]


def cut_journals(workdir: Path, update: int) -> list[str]:
  """Removes the lines of receipts and metrics after a checkpoint; see `journal.cut`.

  Args:
    workdir: the workdir of the run.
    update: the update of the checkpoint; 0: the run begins.

  Returns:
    A line about each file that was changed or lacks lines.

  Raises:
    OSError: a file cannot be read or written; the error names it.
  """
  problems = []
  for name in (journal.METRICS, journal.RECEIPTS):
    prefix = prefix_of(workdir, update, name)  # None in checkpoints of version 0.6 and before
    problems += journal.cut(workdir, workdir / name, update, prefix)
  return problems


def prefix_of(workdir: Path, update: int, name: str) -> journal.Prefix | None:
  """Returns what a file began with when a checkpoint was saved; None if it does not say so."""
  try:
    size, sha256 = (read_meta(workdir, update) or {})[_JOURNALS][name]
    return journal.Prefix(int(size), str(sha256))
  except (KeyError, TypeError, ValueError, OverflowError):
    return None


def remove_unfinished(workdir: Path) -> None:
  """Removes the remains of interrupted saves and deletions; no process may be saving meanwhile."""
  for path in _unfinished(workdir):
    files.remove_folder(path)


def _remove_what_is_still_written(workdir: Path) -> None:
  """Removes all of a checkpoint whose save has failed, also files that threads write meanwhile.

  Orbax raises the first error while TensorStore's threads still write other arrays, and they
  create a folder again that was removed. No function of Orbax waits for them, so the files are
  removed until none has appeared for half a second.
  """
  deadline = time.monotonic() + _MAX_SECONDS_OF_REMOVAL
  quiet_since = time.monotonic()
  while time.monotonic() < min(quiet_since + 0.5, deadline):
    if _unfinished(workdir):
      quiet_since = time.monotonic()
      remove_unfinished(workdir)
    time.sleep(0.02)


def _delete(path: Path) -> None:
  """Deletes a checkpoint. Readers see it whole or not at all."""
  leaving = path.with_name(path.name + _DELETING)
  files.rename(path, leaving)
  files.remove_folder(leaving)


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


def write_manifest(folder: Path, state_digest: str) -> None:
  """Writes the manifest of a checkpoint, whose files must be complete, and has all reach the disk.

  Args:
    folder: the folder of the checkpoint.
    state_digest: the `digest` of its state.

  Raises:
    OSError: a file cannot be read or written; the error names it.
  """
  sizes = _sizes_of(folder)
  names = sorted(name for name in sizes if Path(name).name != MANIFEST)
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
    # Orbax leaves small files to the kernel, which a power failure would leave empty.
    sums = list(threads.map(functools.partial(_sha256, sync=True),
                            (folder / name for name in names)))
  for inside in {path for name in names for path in Path(name).parents}:
    files.sync_folder(folder / inside)
  entries = {name: {'bytes': sizes[name], 'sha256': value}
             for name, value in zip(names, sums, strict=True)}
  record = {'state_sha256': state_digest, 'files': entries}
  files.write(folder / MANIFEST, json.dumps(record, indent=1) + '\n')


def problem_of_folder(folder: Path) -> str:
  """Reads the files of a checkpoint and compares them with its manifest.

  Only names of regular files inside of the checkpoint count, and all sizes are compared before a
  file is read: the checkpoint may be a stranger's. Files that the manifest does not name are
  ignored.

  Returns:
    The first problem in words, on one line; '' if all files are as they were saved.
  """
  try:
    sizes = _sizes_of(folder)
    record = read_manifest(folder)
  except FileNotFoundError:
    return (f'{MANIFEST} is missing: it was cut, or saved by a version before 0.5, and '
            'podracer_jit 0.6 must resume the run once')
  except OSError as error:
    return shorten(f'{error.filename} cannot be read: {error.strerror}')
  except ValueError:
    return f'{MANIFEST} is garbled'
  for name, expected in record['files'].items():
    if name not in sizes:
      return f'{shorten(name)} cannot be read: there is no such file in the folder'
    if sizes[name] != expected['bytes']:
      return (f'{shorten(name)} has {sizes[name]:,} bytes in place of '
              f'{shorten(format(expected["bytes"], ","))}')
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
    problems = threads.map(lambda item: _problem_of_file(folder, *item), record['files'].items())
    return next(filter(None, problems), '')


def _sizes_of(folder: Path) -> dict[str, int]:
  """Returns the size of each file of a checkpoint, by its name relative to the folder.

  Raises:
    OSError: something in the folder is neither a folder nor a regular file, or cannot be read; the
      error names it. A link counts as such, since it may lead out of the folder.
  """
  sizes = {}
  folders = [folder]
  while folders:
    with os.scandir(folders.pop()) as entries:
      for entry in entries:
        name = os.path.relpath(entry.path, folder)
        if entry.is_dir(follow_symlinks=False):
          folders.append(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
          sizes[name] = entry.stat(follow_symlinks=False).st_size
        else:
          kind = 'is a link' if entry.is_symlink() else 'is not a regular file'
          raise OSError(errno.EINVAL, f'it {kind}', name)
  return sizes


def read_manifest(folder: Path) -> dict[str, Any]:
  """Returns the manifest of a checkpoint.

  Raises:
    FileNotFoundError: the checkpoint has no manifest.
    OSError: it cannot be read.
    ValueError: the file is not a manifest.
  """
  record = files.read_json(folder / MANIFEST, _distinct)
  entries = record.get('files') if isinstance(record, dict) else None
  is_manifest = isinstance(entries, dict) and 'state_sha256' in record and all(
      isinstance(entry, dict) and type(entry.get('bytes')) is int
      and isinstance(entry.get('sha256'), str) for entry in entries.values())
  if not is_manifest:
    raise ValueError(f'{folder / MANIFEST} is not a manifest')
  return record


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  """Returns an object of JSON.

  Raises:
    ValueError: a name comes twice, and readers would differ in which they take.
  """
  if len(dict(pairs)) < len(pairs):
    raise ValueError('a name comes twice')
  return dict(pairs)


def digest(tree: Any) -> str:
  """Returns the SHA-256 of a pytree of arrays: of their places, shapes, types and bytes.

  If an array has copies on several devices, one of them counts.
  """
  total = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if isinstance(leaf, jax.Array):
      leaf = leaf.addressable_data(0)
      if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.ascontiguousarray(leaf)
    total.update(f'{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n'.encode())
    total.update(array.tobytes())
  return total.hexdigest()


def _sha256(path: Path, sync: bool = False) -> str:
  """Returns the SHA-256 of a file, which may be larger than the memory.

  Args:
    path: the path of the file.
    sync: whether the file must have reached the disk.
  """
  total = hashlib.sha256()
  with path.open('rb') as file:
    if sync:
      os.fsync(file.fileno())
    while block := file.read(_BLOCK):
      total.update(block)
  return total.hexdigest()


def _problem_of_file(folder: Path, name: str, expected: dict[str, Any]) -> str:
  """Returns the problem of a file's content in words; '' if it is as it was saved.

  Args:
    folder: the folder of the checkpoint.
    name: the name of the file; `_sizes_of` has it.
    expected: its entry in the manifest, 'bytes' and 'sha256'.
  """
  try:
    return '' if _sha256(folder / name) == expected['sha256'] else (
        f'{shorten(name)} is not what was saved')
  except OSError as error:
    return f'{shorten(name)} cannot be read: {error.strerror}'
