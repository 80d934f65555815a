"""Opens a run in its workdir, ready to train, for the command line and the Python API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from podracer_jit.experiment import build
from podracer_jit.runtime import host
from podracer_jit.training import life
from podracer_jit.workdir import checkpoints, history, journal, workdirs

if TYPE_CHECKING:
  pass


class Session(NamedTuple):
  """A run whose workdir this process has opened."""

  run: build.Run
  workdir: Path
  entries: Sequence[history.Entry]  # the history of the run
  update: int | None  # of the checkpoint to go on from; None without one
  # The last update of each segment of a repeated run; None: the config decides.
  ends: Sequence[int] | None
  notes: Sequence[str]  # lines about memory, what was decided, repairs and changes


@contextlib.contextmanager
def opened_run(run: build.Run, workdir: Path, options: life.Life) -> Iterator[Session]:
  """Opens the workdir of a run that was built, in all processes; closes it on exit.

  Raises:
    ValueError: the workdir is in use, of another experiment, or cannot be repaired.
    OSError: it cannot be written to.
  """
  experiment = run.experiment
  ends = None
  if options.repeat:
    if not experiment.deterministic:
      raise ValueError(f'--repeat: {experiment.non_deterministic_setting} is not deterministic, '
                       'so a run cannot be repeated')
    ends = _ends_of(options.repeat)
  with _opened_workdir(workdir, run, options) as (update, notes):
    entries = workdirs.read_history(workdir)
    yield Session(run, workdir, entries, update, ends, notes)


def _ends_of(repeated: Path) -> list[int]:
  """Returns the last update of each segment of a run.

  Raises:
    ValueError: the run has no readable receipts.
  """
  try:
    return journal.segment_ends(repeated)
  except OSError as error:
    raise ValueError(f'--repeat: the receipts of {repeated} cannot be read: '
                     f'{error.strerror}') from None


@contextlib.contextmanager
def _opened_workdir(workdir: Path, run: build.Run, options: life.Life
                    ) -> Iterator[tuple[int | None, list[str]]]:
  """Opens the workdir in all processes.

  Process 0 creates and locks it, and only then looks whether a run has begun there. The other
  processes compare their config with that of process 0.

  Args:
    workdir: the workdir of the run.
    run: the run that begins or goes on.
    options: where the run begins, and which fields may differ if it goes on.

  Yields:
    The update of the checkpoint to resume from, None without one, and lines about repairs and
    changes.

  Raises:
    ValueError: the workdir is in use, of another experiment, or cannot be repaired.
    OSError: it cannot be written to.
  """
  is_first = run.place.process == 0
  with contextlib.ExitStack() as stack:
    problem = None
    if is_first:
      try:
        # Before anything in the workdir is read: another run must not change what is decided here.
        stack.enter_context(workdirs.locked(workdir))
        checkpoints.remove_unfinished(workdir)
      except (ValueError, OSError) as error:
        problem = error
    _raise_everywhere(problem)
    beginning = life.begin(run, workdir, options)
    inherited = beginning.inherited
    update = None
    notes = []
    if is_first:
      try:
        if beginning.has_begun:
          update, notes = life.resume_workdir(run, workdir, options)
        else:
          notes = life.clear_workdir(workdir)
      except (ValueError, OSError) as error:
        problem = error
    _raise_everywhere(problem)
    if inherited:
      life.write_first_state(run, workdir, inherited)
    if is_first and not beginning.has_begun:
      try:
        notes += life.start_workdir(run, workdir, options, inherited)
        update = checkpoints.newest_whole(workdir)
      except (ValueError, OSError) as error:
        problem = error
    _raise_everywhere(problem)
    if not is_first:
      if not (workdir / workdirs.CONFIG).exists():
        raise ValueError(f'--workdir: this process does not see what process 0 wrote to {workdir}; '
                         'all processes need one file system')
      workdirs.check_same(workdir, run.experiment.fields)
    # Otherwise the inherited state would stay in memory while the run trains.
    del beginning, inherited
    yield host.of_process_0(update), notes


def _raise_everywhere(problem: Exception | None) -> None:
  """Waits for process 0, and raises an error in all processes if process 0 has one.

  Args:
    problem: the error of this process, which only process 0 may have.
  """
  if not host.of_process_0(int(problem is None)):
    raise problem or ValueError('process 0 refuses the workdir; its message says why')
