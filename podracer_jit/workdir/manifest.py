"""Manifests of checkpoints: the SHA-256 of each file, and of the state."""

from __future__ import annotations

import concurrent.futures
import errno
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podracer_jit.options import shorten
from podracer_jit.workdir import safe_files

NAME = 'manifest.json'
_BLOCK = 2**20  # bytes read at a time


def write(folder: Path, state_digest: str) -> None:
  """Writes the manifest of a checkpoint, whose files must be complete.

  Args:
    folder: the folder of the checkpoint.
    state_digest: the `digest` of its state.

  Raises:
    OSError: a file cannot be read or written; the error names it.
  """
  sizes = sizes_of(folder)
  names = sorted(name for name in sizes if Path(name).name != NAME)
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
    sums = list(threads.map(_sha256, (folder / name for name in names)))
  files = {name: {'bytes': sizes[name], 'sha256': value}
           for name, value in zip(names, sums, strict=True)}
  record = {'state_sha256': state_digest, 'files': files}
  safe_files.write_text(folder / NAME, json.dumps(record, indent=1) + '\n')


def problem(folder: Path) -> str:
  """Reads the files of a checkpoint and compares them with its manifest.

  Only names of regular files inside of the checkpoint count, and all sizes are compared before a
  file is read: the checkpoint may be a stranger's. Files that the manifest does not name are
  ignored.

  Returns:
    The first problem in words, on one line; '' if all files are as they were saved.
  """
  try:
    sizes = sizes_of(folder)
    record = read(folder)
  except FileNotFoundError:
    return f'{NAME} is missing: it is not saved to the end'
  except OSError as error:
    return shorten(f'{error.filename} cannot be read: {error.strerror}')
  except ValueError:
    return f'{NAME} is garbled'
  for name, expected in record['files'].items():
    if name not in sizes:
      return f'{shorten(name)} cannot be read: there is no such file in the folder'
    if sizes[name] != expected['bytes']:
      return (f'{shorten(name)} has {sizes[name]:,} bytes in place of '
              f'{shorten(format(expected["bytes"], ","))}')
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
    problems = threads.map(lambda item: _problem_of_file(folder, *item), record['files'].items())
    return next(filter(None, problems), '')


def sizes_of(folder: Path) -> dict[str, int]:
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


def read(folder: Path) -> dict[str, Any]:
  """Returns the manifest of a checkpoint.

  Raises:
    FileNotFoundError: the checkpoint has no manifest.
    OSError: it cannot be read.
    ValueError: the file is not a manifest.
  """
  record = safe_files.read_json(folder / NAME, _distinct)
  files = record.get('files') if isinstance(record, dict) else None
  is_manifest = isinstance(files, dict) and 'state_sha256' in record and all(
      isinstance(entry, dict) and type(entry.get('bytes')) is int
      and isinstance(entry.get('sha256'), str) for entry in files.values())
  if not is_manifest:
    raise ValueError(f'{folder / NAME} is not a manifest')
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


def _sha256(path: Path) -> str:
  """Returns the SHA-256 of a file, which may be larger than the memory."""
  total = hashlib.sha256()
  with path.open('rb') as file:
    while block := file.read(_BLOCK):
      total.update(block)
  return total.hexdigest()


def _problem_of_file(folder: Path, name: str, expected: dict[str, Any]) -> str:
  """Returns the problem of a file's content in words; '' if it is as it was saved.

  Args:
    folder: the folder of the checkpoint.
    name: the name of the file; `sizes_of` has it.
    expected: its entry in the manifest, 'bytes' and 'sha256'.
  """
  try:
    return '' if _sha256(folder / name) == expected['sha256'] else (
        f'{shorten(name)} is not what was saved')
  except OSError as error:
    return f'{shorten(name)} cannot be read: {error.strerror}'
