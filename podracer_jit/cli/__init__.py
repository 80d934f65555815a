"""The command line: a verb is the function `main` of a module here."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence

from podracer_jit.errors import PodracerError, line_of
from podracer_jit.runtime.output import complain

Main = Callable[[Sequence[str]], int]  # (name of the program, *arguments) -> exit code


def verb(main: Main) -> Main:
  """Decorates the `main` of a verb: an error becomes one line on stderr, and the exit code."""
  name = f'podracer_jit {main.__module__.rpartition(".")[2]}'

  @functools.wraps(main)
  def run(argv: Sequence[str]) -> int:
    quieten()
    try:
      return main(argv)
    except BrokenPipeError:
      raise  # nobody reads what the verb prints
    except Exception as error:  # noqa: BLE001 - the one place where an error becomes a message
      complain(f'{name}: {" ".join(line_of(error).split())}')
      return error.code if isinstance(error, PodracerError) else PodracerError.code
  return run


def quieten() -> None:
  """Silences libraries in this process, which is the command's own."""
  # About bounds of spaces that we do not use.
  warnings.filterwarnings('ignore', module='gymnasium')
  logging.getLogger('absl').addFilter(_is_not_from_orbax)


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
  # Orbax also raises its errors, which are then printed in one line.
  return 'orbax' not in record.pathname
