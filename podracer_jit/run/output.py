"""Printing that never ends a run: a terminal may be closed, and a pipe's reader gone."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO


class LastingStream:
  """A text stream that becomes silent when nobody can read it any more."""

  def __init__(self, stream: TextIO):
    self._stream = stream
    self._lost = False

  def write(self, text: str) -> int:
    """Writes the text, unless the stream is lost."""
    if not self._lost:
      with self._losing():
        self._stream.write(text)
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
    except (OSError, ValueError):  # a ValueError: it was closed
      self._lost = True


def complain(line: str) -> None:
  """Prints a line to stderr, if anybody can read it."""
  with contextlib.suppress(OSError):
    print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
  """Prints a line to stdout, if anybody can read it."""
  with contextlib.suppress(OSError):
    print(line, flush=True)


def give_up_lost_streams() -> None:
  """Keeps Python from failing at its end to write what a lost stream still has."""
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except OSError:
      with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
