"""Reads and repairs receipts.jsonl and metrics.jsonl.

Receipts have a line for each update. Metrics have one for each n-th update, where n is in the
header of the segment in the receipts (1 if it is absent), and one for the last update of the run.
Each checkpoint has the size and the SHA-256 of both files, as they were when it was saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podracer_jit.workdir import files

RECEIPTS = 'receipts.jsonl'
METRICS = 'metrics.jsonl'
EVERY = 'metrics_every'  # in a header: metrics have a line of each n-th update
LEARNERS = 'learners'  # in a header: learner devices, if bits depend on their number
XLA_FLAGS = 'xla_flags'  # in a header: XLA_FLAGS of the environment, if there are any
_FINGERPRINTS = ('batch', 'params')  # of a receipt
_SPANS_SHOWN = 5
_BLOCK = 2**20  # bytes that are read at a time


class Line(NamedTuple):
  """A line of a file."""

  raw: bytes  # with its newline, if it has one
  entry: dict[str, Any] | None  # None if it is garbled


class Prefix(NamedTuple):
  """The first bytes of a file: all that it had when a checkpoint was saved."""

  size: int
  sha256: str


class Prefixes:
  """Gives the prefixes that files of a workdir have now; reads only what has been added."""

  def __init__(self, workdir: Path):
    self._workdir = workdir
    self._read: dict[str, tuple[int, Any]] = {}

  def now(self, names: Sequence[str]) -> dict[str, Prefix]:
    """Returns the prefix of each of these files that exists; all must have been written.

    Files that are not named are forgotten: another of the same name is read from its beginning.
    """
    self._read = {name: self._read.get(name, (0, hashlib.sha256())) for name in names}
    prefixes = {}
    for name, (size, total) in self._read.items():
      path = self._workdir / name
      if path.exists():
        size = _add_to(total, path, size)
        self._read[name] = (size, total)
        prefixes[name] = Prefix(size, total.hexdigest())
    return prefixes


def _add_to(total: Any, path: Path, start: int, end: int | None = None) -> int:
  """Adds the bytes of a file from `start` to a hash; returns where the last one ends."""
  with files.open_regular(path) as file:
    file.seek(start)
    while block := file.read(_BLOCK if end is None else min(_BLOCK, end - start)):
      total.update(block)
      start += len(block)
  return start


def is_unchanged(path: Path, prefix: Prefix) -> bool:
  """Returns whether a file still begins with its prefix."""
  total = hashlib.sha256()
  return _add_to(total, path, 0, prefix.size) == prefix.size and (
      total.hexdigest() == prefix.sha256)


class Gaps:
  """Collects the updates that are missing in a file with updates in order."""

  def __init__(self, intervals: Sequence[tuple[int, int]] = ()):
    """Creates it for the beginning of a file.

    Args:
      intervals: (first update, n) in order: from there on, each n-th update has a line; other
        updates may have one, too. Empty: each update has a line.
    """
    self.last = 0
    self.missing: list[tuple[int, int]] = []  # first and last update of each gap
    self._intervals = [(1, 1)]
    for first, every in intervals:
      if every != self._intervals[-1][1]:
        self._intervals.append((first, every))

  def add(self, update: int) -> None:
    """Adds the next update of the file; repeated updates are ignored."""
    ends = [first - 1 for first, _ in self._intervals[1:]] + [update - 1]
    for (first, every), end in zip(self._intervals, ends, strict=True):
      first_due = -(-max(first, self.last + 1) // every) * every
      last_due = min(end, update - 1) // every * every
      if first_due <= last_due:
        self.missing.append((first_due, last_due))
    self.last = max(self.last, update)

  def words(self) -> str:
    """Returns the missing updates: '3, 5 to 9'."""
    spans = [f'{first}' if first == last else f'{first} to {last}' for first, last in self.missing]
    more = [f'and {len(spans) - _SPANS_SHOWN} more ranges'] if len(spans) > _SPANS_SHOWN else []
    return ', '.join([*spans[:_SPANS_SHOWN], *more])


class Receipts(NamedTuple):
  """The contents of receipts.jsonl."""

  headers: list[dict[str, Any]]  # of the segments, in order
  by_update: dict[int, dict[str, Any]]
  problems: list[str]  # lines about missing or garbled receipts


def read_receipts(workdir: Path) -> Receipts:
  """Reads the receipts of a run, which may still be running.

  Raises:
    OSError: there is no such file, or it cannot be read.
  """
  headers = []
  by_update = {}
  garbled = 0
  gaps = Gaps()
  for line in _lines(workdir / RECEIPTS):
    if line.entry is None:
      # A process is still writing a line without an end, or was killed while it wrote it.
      garbled += line.raw.endswith(b'\n')
    elif _is_header(line.entry):
      headers.append(line.entry)
    elif _is_receipt(line.entry):
      by_update[line.entry['update']] = line.entry
      gaps.add(line.entry['update'])
    else:
      garbled += 1
  return Receipts(headers, by_update, _problems(garbled, gaps))


def read_lines(path: Path, fields: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
  """Returns the JSON objects of a file, one for each line; omits garbled lines.

  Args:
    path: the path of the file.
    fields: types by name; a line that lacks one of these fields, or has another type, is garbled.

  Raises:
    OSError: it cannot be read.
  """
  return [line.entry for line in _lines(path) if _is_good(line, fields)]


def _is_good(line: Line, fields: Mapping[str, Any] | None) -> bool:
  """Returns whether a line is an object with all these fields, by name, of these types."""
  # An object is of no type that a value of JSON has, so it stands for a missing field.
  return line.entry is not None and all(isinstance(line.entry.get(name, object()), kind)
                                        for name, kind in (fields or {}).items())


def sample_lines(path: Path, most: int, fields: Mapping[str, Any] | None = None
                 ) -> list[dict[str, Any]]:
  """Returns what `read_lines` does, but of a long file only some lines, at equal distances.

  The last line is always among them. Other lines are not parsed, which takes nearly all the time.

  Args:
    path: the path of the file.
    most: most lines that are returned.
    fields: see `read_lines`.

  Raises:
    OSError: it cannot be read.
  """
  with files.open_regular(path) as file:
    total = sum(1 for _ in file)
    every = max(1, -(-total // most))
    file.seek(0)
    # A process may have added lines meanwhile.
    lines = [_parsed(raw) for k, raw in enumerate(file, 1) if k % every == total % every]
  return [line.entry for line in lines if _is_good(line, fields)]


def first_receipt(workdir: Path) -> Receipts:
  """Returns the first receipt of a run, and the headers before it; reads no further.

  Raises:
    OSError: there is no such file, or it cannot be read.
  """
  headers = []
  for line in _lines(workdir / RECEIPTS):
    if line.entry is not None and _is_header(line.entry):
      headers.append(line.entry)
    elif line.entry is not None and _is_receipt(line.entry):
      return Receipts(headers, {line.entry['update']: line.entry}, [])
  return Receipts(headers, {}, [])


def intervals(workdir: Path) -> list[tuple[int, int]]:
  """Returns the intervals of the metrics of a run, for `Gaps`; its headers in the receipts say so.

  Raises:
    OSError: the receipts cannot be read.
  """
  path = workdir / RECEIPTS
  headers = (line.entry for line in _lines(path) if line.entry is not None and _is_header(
      line.entry)) if path.exists() else ()
  return [(header['first_update'], max(1, every)) for header in headers
          if isinstance(every := header.get(EVERY, 1), int)]


def has_updates(workdir: Path) -> bool:
  """Returns whether receipts or metrics have anything but headers of segments."""
  paths = [workdir / name for name in (RECEIPTS, METRICS)]
  return any(line.entry is None or not _is_header(line.entry)
             for path in paths if path.exists() for line in _lines(path))


def cut(workdir: Path, path: Path, last_update: int, prefix: Prefix | None = None) -> list[str]:
  """Removes the lines after the checkpoint that a run resumes from, and an incomplete last line.

  A file that begins as the checkpoint says is cut after that. Another file is read line by line, so
  a long one needs no more memory; if it was changed or has garbled lines, it is set aside and
  replaced by one without them.

  Args:
    workdir: the workdir of the run.
    path: the path of the file; it need not exist.
    last_update: the update of the checkpoint.
    prefix: what the file began with when that checkpoint was saved; None if it does not say so.

  Returns:
    A line about changed, garbled and missing lines up to that update; empty if there are none.

  Raises:
    OSError: naming the file.
  """
  good = _good(path)
  if good.exists() and not path.exists():  # a kill came while `_rewrite` replaced the file
    files.rename(good, path)
  if not path.exists():
    return [f'{path} is missing, with all updates up to {last_update}'] if last_update else []
  if prefix and is_unchanged(path, prefix):
    files.truncate(path, prefix.size)
    return []
  garbled = 0
  kept_bytes = 0
  ended = False  # whether a line after the checkpoint was read
  in_order = True  # whether all lines to keep come before all others
  gaps = Gaps(intervals(workdir) if path.name == METRICS else ())
  for line in _lines(path):
    if line.entry is None:
      garbled += line.raw.endswith(b'\n')
      continue
    if _is_later(line.entry, last_update):
      ended = True
      continue
    in_order = in_order and not ended
    kept_bytes += len(line.raw)
    if 'update' in line.entry:
      gaps.add(line.entry['update'])
  # The next update ends a gap at the end of the file.
  gaps.add(last_update + 1)
  problems = _problems(garbled, gaps)
  if prefix and not problems:
    problems = [f'it is not what was written up to update {last_update}']
  aside = ''
  if garbled or prefix or not in_order:
    aside = f'; the file as it was is now {_rewrite(workdir, path, last_update)}'
  else:
    files.truncate(path, kept_bytes)
  return [f'{path}: {"; ".join(problems)}{aside}'] if problems else []


def _rewrite(workdir: Path, path: Path, last_update: int) -> Path:
  """Replaces a file by its good lines; returns the new path of the original."""
  good = _good(path)
  files.write(good, (line.raw for line in _lines(path)
                     if line.entry is not None and not _is_later(line.entry, last_update)))
  with files.naming(path):
    aside = files.set_aside(workdir, path)
    files.rename(good, path)
  return aside


def _good(path: Path) -> Path:
  """Returns the path of a file's good lines before they replace it."""
  return path.with_name(f'{path.name}.good')


def _lines(path: Path) -> Iterator[Line]:
  """Yields the lines of a file, parsed."""
  with files.open_regular(path) as file:
    for raw in file:
      yield _parsed(raw)


def _parsed(raw: bytes) -> Line:
  try:
    entry = files.parse_json(raw)
  except ValueError:
    entry = None
  good = isinstance(entry, dict) and raw.endswith(b'\n') and all(
      isinstance(entry.get(name, 0), int) for name in ('update', 'segment', 'first_update'))
  return Line(raw, entry if good else None)


def _is_header(entry: dict[str, Any]) -> bool:
  return {'segment', 'first_update'} <= entry.keys()


def _is_receipt(entry: dict[str, Any]) -> bool:
  return 'update' in entry and all(isinstance(entry.get(name), str) for name in _FINGERPRINTS)


def _is_later(entry: dict[str, Any], last_update: int) -> bool:
  """Returns whether a line comes after an update; the header of a later segment does, too."""
  return entry.get('update', 0) > last_update or entry.get('first_update', 0) > last_update


def _problems(garbled: int, gaps: Gaps) -> list[str]:
  """Returns lines about garbled and missing lines."""
  problems = []
  if garbled:
    problems.append(f'{garbled} garbled {"line" if garbled == 1 else "lines"}')
  if gaps.missing:
    problems.append(f'no line of {gaps.words()}')
  return problems
