"""Copies of a user's modules: the source with which each update of a run was made.

A workdir has them in `sources/N/`, where N is the first update that was made with this source, and
`sources/index.json` has the SHA-256 of each file. They are for people: nothing is imported from
there unless --allow_modules names such a copy.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from podracer_jit.workdir import files

FOLDER = 'sources'
INDEX = 'index.json'


class Entry(NamedTuple):
  """The source of a run's updates, from one of them on."""

  first_update: int
  files: Mapping[str, str]  # the SHA-256 of each file, by its relative path


def read(folder: Path) -> list[Entry]:
  """Returns the entries of a workdir or of a saved agent, in order; empty if there are none.

  Raises:
    ValueError: the index is garbled, in one line.
  """
  path = folder / FOLDER / INDEX
  if not path.exists():
    return []
  try:
    entries = [Entry(int(entry['first_update']),
                     {str(name): str(value) for name, value in entry['files'].items()})
               for entry in files.read_json(path)]
  except (OSError, ValueError, TypeError, KeyError, AttributeError):
    raise ValueError(f'--workdir: {path} is garbled') from None
  return sorted(entries)


def keep(folder: Path, contents: Mapping[str, bytes], first_update: int) -> list[str]:
  """Keeps copies of source files, if they differ from those of the update before.

  Args:
    folder: a workdir, or a folder for an agent; this process may write to it.
    contents: the contents of the source files, by their relative paths.
    first_update: the next update, which is made with these files.

  Returns:
    A line about files that have changed.

  Raises:
    OSError: a file cannot be written; the error names it.
  """
  notes = []
  try:
    entries = read(folder)
  except ValueError as error:
    aside = files.set_aside(folder, folder / FOLDER)
    notes.append(f'{str(error).removeprefix("--workdir: ")}; {FOLDER} is now {aside}')
    entries = []
  hashes = _hashes(contents)
  if entries == [Entry(1, hashes)]:
    return notes
  # No update that is left was made with later entries.
  earlier = [entry for entry in entries if entry.first_update < first_update]
  before = earlier[-1] if earlier else None
  has_changed = hashes != (before.files if before else {})
  if has_changed and Entry(first_update, hashes) not in entries:
    _copy(folder, contents, first_update)
  kept = [*earlier, Entry(first_update, hashes)] if has_changed else earlier
  if kept != entries:
    files.write(folder / FOLDER / INDEX,
                          json.dumps([entry._asdict() for entry in kept], indent=1) + '\n')
  if has_changed and before:
    target = folder / FOLDER / str(first_update)
    notes.append(f'the source of {", ".join(changed(before.files, hashes))} has changed since '
                 f'update {first_update - 1}: the run goes on with the new one; copies of both are '
                 f'in {folder / FOLDER / str(before.first_update)} and {target}')
  return notes


def _copy(folder: Path, contents: Mapping[str, bytes], first_update: int) -> None:
  """Writes the copies of an entry; sets an older folder of the same update aside."""
  target = folder / FOLDER / str(first_update)
  if target.exists():
    files.set_aside(folder, target)
  for name, content in contents.items():
    files.make_folder((target / name).parent)
    files.write(target / name, content)


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
  """Returns the files that differ between two entries, as they may be printed."""
  return [ascii(name)[1:-1] for name in sorted(before.keys() | after.keys())
          if before.get(name) != after.get(name)]


def change_since(folder: Path, contents: Mapping[str, bytes], update: int) -> str:
  """Returns a warning if the source files differ from those of an update, '' otherwise.

  Args:
    folder: a workdir, which may lack copies.
    contents: the contents of the source files that are used now, by their relative paths.
    update: the update that was made with the source to compare with.
  """
  try:
    entries = read(folder)
  except ValueError as error:
    return str(error).removeprefix('--workdir: ')
  # Update 0, the initial state, was made with the first source.
  entries = [entry for entry in entries if entry.first_update <= max(update, 1)]
  if not entries:
    return ''
  names = changed(entries[-1].files, _hashes(contents))
  if not names:
    return ''
  copies = folder / FOLDER / str(entries[-1].first_update)
  return (f'the source of {", ".join(names)} is not that of update {update}: results may differ; '
          f'copies of that source are in {copies}')


def _hashes(contents: Mapping[str, bytes]) -> dict[str, str]:
  return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def copy_of(folder: Path, module: str, update: int | None = None) -> str:
  """Returns the path of the copy of a module that a folder has, '' if it has none.

  Args:
    folder: a workdir, or the folder of a saved agent.
    module: the name of the module, possibly dotted.
    update: the copy is the one with which this update was made; None: the newest.
  """
  try:
    entries = [entry for entry in read(folder) if update is None or entry.first_update <= update]
  except ValueError:
    return ''
  for entry in reversed(entries):
    root = folder / FOLDER / str(entry.first_update)
    # The first is of a file whose name has dots, such as ppo_v1.2.py.
    for name in (f'{module}.py', f'{module.replace(".", "/")}.py',
                 f'{module.replace(".", "/")}/__init__.py'):
      if name in entry.files and (root / name).is_file():
        return str(root / name)
  return ''


def differences(a: Sequence[Entry], b: Sequence[Entry]) -> list[str]:
  """Returns lines about the files in which two runs differ, and about changes of only one run."""
  lines = []
  if a and b:
    names = changed(a[0].files, b[0].files)
    if names:
      lines.append(f'source: {", ".join(names)} differs in A and B, from the first update on')
  for name, entries, others in (('A', a, b), ('B', b, a)):
    lines += [f'source: {", ".join(changed(before.files, after.files))} of {name} changed before '
              f'update {after.first_update}'
              for before, after in itertools.pairwise(entries) if after not in others]
  return lines
