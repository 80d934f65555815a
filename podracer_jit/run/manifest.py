"""What a checkpoint must contain: the SHA-256 of each of its files, and of the state in it."""

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
  """Writes the manifest of a checkpoint whose files are all there.

  Args:
    folder: of the checkpoint.
    state_digest: what `digest` says of the state in it.

  Raises:
    OSError: naming the file that cannot be read or written.
  """
  paths = _files(folder)
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
    sums = list(threads.map(_sha256, paths))
  files = {str(path.relative_to(folder)): {'bytes': path.stat().st_size, 'sha256': value}
           for path, value in zip(paths, sums, strict=True)}
  record = {'state_sha256': state_digest, 'files': files}
  safe_files.write_text(folder / NAME, json.dumps(record, indent=1) + '\n')


def problem(folder: Path) -> str:
  """Returns what is wrong with the files of a checkpoint; '' if they are as they were saved.

  Every file is read. Files that the manifest does not name do no harm.
  """
  try:
    record = read(folder)
  except FileNotFoundError:
    return f'{NAME} is missing: saving it was interrupted'
  except ValueError:
    return f'{NAME} is garbled'
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
    said = threads.map(lambda item: _problem_of_file(folder, *item), record['files'].items())
    return next((words for words in said if words), '')


def read(folder: Path) -> dict[str, Any]:
  """Returns the manifest of a checkpoint.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is none.
  """
  record = json.loads((folder / NAME).read_bytes())
  files = record.get('files') if isinstance(record, dict) else None
  is_manifest = isinstance(files, dict) and 'state_sha256' in record and all(
      isinstance(entry, dict) and {'bytes', 'sha256'} <= entry.keys() for entry in files.values())
  if not is_manifest:
    raise ValueError(f'{folder / NAME} is no manifest')
  return record


def digest(tree: Any) -> str:
  """Returns the SHA-256 of a pytree of arrays: of their places, shapes, types and bytes.

  Of arrays that are on several devices one copy counts.
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
  return sorted(path for path in folder.rglob('*') if path.is_file() and path.name != NAME)


def _sha256(path: Path) -> str:
  total = hashlib.sha256()
  with path.open('rb') as file:
    for block in _blocks(file):
      total.update(block)
  return total.hexdigest()


def _blocks(file: Any) -> Iterator[bytes]:
  while block := file.read(_BLOCK):
    yield block


def _problem_of_file(folder: Path, name: str, expected: dict[str, Any]) -> str:
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
