"""Manifests of checkpoints: the SHA-256 of each file, and of the state."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podracer_jit.run import safe_files

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
  paths = _files(folder)
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
    sums = list(threads.map(_sha256, paths))
  files = {str(path.relative_to(folder)): {'bytes': path.stat().st_size, 'sha256': value}
           for path, value in zip(paths, sums, strict=True)}
  record = {'state_sha256': state_digest, 'files': files}
  safe_files.write_text(folder / NAME, json.dumps(record, indent=1) + '\n')


def problem(folder: Path) -> str:
  """Reads the files of a checkpoint and compares them with its manifest.

  Files that the manifest does not name are ignored.

  Returns:
    The first problem in words; '' if all files are as they were saved.
  """
  try:
    record = read(folder)
  except FileNotFoundError:
    return f'{NAME} is missing: saving it was interrupted'
  except ValueError:
    return f'{NAME} is garbled'
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
    problems = threads.map(lambda item: _problem_of_file(folder, *item), record['files'].items())
    return next(filter(None, problems), '')


def read(folder: Path) -> dict[str, Any]:
  """Returns the manifest of a checkpoint.

  Raises:
    FileNotFoundError: the checkpoint has no manifest.
    ValueError: the file is not a manifest.
  """
  record = json.loads((folder / NAME).read_bytes())
  files = record.get('files') if isinstance(record, dict) else None
  is_manifest = isinstance(files, dict) and 'state_sha256' in record and all(
      isinstance(entry, dict) and {'bytes', 'sha256'} <= entry.keys() for entry in files.values())
  if not is_manifest:
    raise ValueError(f'{folder / NAME} is not a manifest')
  return record


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


def _files(folder: Path) -> list[Path]:
  """Returns the files of a checkpoint, except for its manifest."""
  return sorted(path for path in folder.rglob('*') if path.is_file() and path.name != NAME)


def _sha256(path: Path) -> str:
  """Returns the SHA-256 of a file, which may be larger than the memory."""
  total = hashlib.sha256()
  with path.open('rb') as file:
    for block in _blocks(file):
      total.update(block)
  return total.hexdigest()


def _blocks(file: Any) -> Iterator[bytes]:
  while block := file.read(_BLOCK):
    yield block


def _problem_of_file(folder: Path, name: str, expected: dict[str, Any]) -> str:
  """Returns the problem of a file in words; '' if it is as it was saved.

  Args:
    folder: the folder of the checkpoint.
    name: the name of the file.
    expected: its entry in the manifest, 'bytes' and 'sha256'.
  """
  path = folder / name
  try:
    size = path.stat().st_size
    if size != expected['bytes']:
      return f'{name} has {size:,} bytes in place of {expected["bytes"]:,}'
    if _sha256(path) != expected['sha256']:
      return f'{name} is not what was saved'
  except OSError as error:
    return f'{name} cannot be read: {error.strerror}'
  return ''
