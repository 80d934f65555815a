"""The errors that the package raises for people, and the exit codes of its commands.

  PodracerError
    Refused   nothing was started: InUse, OtherExperiment
    Failed    something was started: NotSaved, Broken, Diverged, CallbackFailed, EnvironmentFailed,
              OtherEpisodes, WorkerLost, Stuck, Differs
    Stopped   a signal or a sink has ended the training; commands only

`podracer_jit.train` raises KeyboardInterrupt for a signal, and returns if a sink has stopped it.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

# Exit codes of a training; docs/exit_codes.md has the same table.
FINISHED = 0  # total_steps are reached
FAILED = 1  # an error; the same command resumes from the newest checkpoint
REFUSED = 2  # the training did not start: the command or the workdir is wrong
STOPPED = 3  # a signal or a sink; everything is saved, and the same command resumes
INTERRUPTED = 130  # a signal before training, or a second one, which saves nothing


def extend(error: BaseException, words: str) -> None:
  """Adds words to the message of an error, or as a note if the message cannot be changed."""
  if str(error) and error.args == (str(error),):
    error.args = (f'{error}; {words}',)
  if words not in str(error):
    error.add_note(words)


class PodracerError(Exception):
  """Base class of the package's own errors. The message is one line."""

  code = FAILED  # of a command that ends with this error

  def _render_traceback_(self) -> list[str]:
    """Returns the lines that a notebook (IPython) prints instead of the whole traceback."""
    cause = traceback.format_exception(self.__cause__) if self.__cause__ else []
    return [*''.join(cause).splitlines(), f'{type(self).__name__}: {self}',
            *getattr(self, '__notes__', [])]


class Refused(PodracerError, ValueError):
  """Raised if an argument, a config, a file or the machine does not allow what was asked for.

  Nothing was started. The message begins with the field or the flag.
  """

  code = REFUSED


class InUse(Refused):
  """Raised if another process, or another run of this process, has the workdir."""


class OtherExperiment(Refused):
  """Raised if the workdir holds another experiment."""


class Failed(PodracerError, RuntimeError):
  """Raised if something fails after it was started."""


class NotSaved(OSError, Failed):
  """Raised if a file of a run cannot be written; the message names it."""


class Broken(Failed):
  """Raised if the contents of a checkpoint have changed since it was saved."""

  def __init__(self, update: int, problem: str):
    super().__init__(f'the checkpoint of update {update} is broken: {problem}')
    self.update = update
    self.problem = problem


class Diverged(Failed):
  """Raised if a loss, a gradient or the train state is not finite."""


class CallbackFailed(Failed):
  """Raised if a callback raises an exception, which is the cause, or returns a wrong value."""


class EnvironmentFailed(Failed):
  """Raised if an environment raises an exception or its process ends."""


class OtherEpisodes(EnvironmentFailed):
  """Raised if environments that were made again are not in the state in which they were left."""


class WorkerLost(Failed):
  """Raised if a process of the cluster cannot do its work."""


class Stuck(Failed):
  """Raised if threads did not end after a failure; only the end of the process can end them."""


class Differs(Failed):
  """Raised if a repeated update differs from its receipt."""


class Stopped(PodracerError):
  """Raised in a command whose training a signal or a sink has stopped."""

  def __init__(self, is_saved: bool):
    super().__init__('stopped; the same command goes on')
    self.code = STOPPED if is_saved else INTERRUPTED


@contextlib.contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
  """Turns every ValueError of the block into a `Refused` with the same text.

  It belongs to the functions that users call, around what they do before they start anything. The
  code behind them raises plain ValueErrors.

  Args:
    *kinds: further exceptions that mean a refusal.
  """
  caught: tuple[type[Exception], ...] = (ValueError, *kinds)
  try:
    yield
  except Refused:
    raise
  except caught as error:
    text = str(error) or type(error).__name__
    raise Refused(text).with_traceback(error.__traceback__) from None


def environment_failure(error: BaseException) -> str:
  """Returns the message of the `EnvironmentFailed` behind an error; empty if there is none.

  XLA turns an exception of a callback into an error with the exception's traceback as its text.
  """
  if isinstance(error, EnvironmentFailed):
    return str(error)
  match = re.search(rf'\b{EnvironmentFailed.__name__}: (.*)', str(error))
  if match:
    return match[1].strip()
  return environment_failure(error.__cause__) if error.__cause__ else ''


def line_of(error: BaseException) -> str:
  """Returns the text of an error for people; it has the error's name unless the text is enough."""
  name = type(error).__name__
  text = environment_failure(error) or str(error)
  if not text:
    return name
  is_enough = isinstance(error, Refused | OSError | WorkerLost) or environment_failure(error)
  return text if is_enough else f'{name}: {text}'
