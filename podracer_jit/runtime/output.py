"""Prints without ever ending a run, and without control characters that texts of files may have.

A terminal may be closed, a pipe may have no reader, and an encoding may lack a character.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

from podracer_jit.options import printable

# Errors of a stream that nobody can read, or that a program has closed.
_LOST = OSError, ValueError


class LastingStream:
  """A text stream that drops its text once nobody can read it."""

  def __init__(self, stream: TextIO):
    self._stream = stream
    self._lost = False

  def write(self, text: str) -> int:
    """Writes the text, unless the stream is lost."""
    if not self._lost:
      with self._losing():
        self._stream.write(_encodable(text, self._stream))
    return len(text)

  def flush(self) -> None:
    """Writes what the stream has buffered, unless it is lost."""
    if not self._lost:
      with self._losing():
        self._stream.flush()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  @contextlib.contextmanager
  def _losing(self):
    try:
      yield
    except _LOST:
      self._lost = True


def open_closed_streams() -> None:
  """Opens /dev/null for each standard stream that is closed, as after `2>&-`.

  Else the next files that are opened would be taken for these streams.
  """
  for descriptor, name in enumerate(('stdin', 'stdout', 'stderr')):
    try:
      os.fstat(descriptor)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
    if getattr(sys, name) is None:
      setattr(sys, name, open(descriptor, 'w' if descriptor else 'r', closefd=False))


def _encodable(text: str, stream: TextIO) -> str:
  """Returns the text with escapes for characters that the stream's encoding lacks."""
  encoding = getattr(stream, 'encoding', None) or 'utf-8'
  return text.encode(encoding, 'backslashreplace').decode(encoding)


def complain(line: str) -> None:
  """Prints a line to stderr, if anybody can read it."""
  with contextlib.suppress(*_LOST):
    print(printable(line), file=sys.stderr, flush=True)


def say(line: str) -> None:
  """Prints a line to stdout, if anybody can read it."""
  with contextlib.suppress(*_LOST):
    print(_encodable(printable(line), sys.stdout), flush=True)


def give_up_lost_streams() -> None:
  """Redirects lost streams to /dev/null, since Python flushes all streams when it ends."""
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except _LOST:
      with contextlib.suppress(*_LOST):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
