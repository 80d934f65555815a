"""Opens the workdir of a run for the command line and the Python API, in all processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podracer_jit.errors import OtherExperiment
from podracer_jit.experiment import build, modules
from podracer_jit.experiment.resolve import resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.options import shorten
from podracer_jit.runtime import host
from podracer_jit.training import inherit
from podracer_jit.workdir import checkpoints, journal, record
from podracer_jit.workdir import workdir as workdir_lib
from podracer_jit.workdir.workdir import OpenWorkdir, Request, Workdir


class Opened(NamedTuple):
  """A run whose workdir this process, or process 0, has opened."""

  run: build.Run
  workdir: Path
  record: record.Record
  update: int | None  # of the checkpoint to go on from; None without one
  # The last update of each segment of a repeated run; None: the config decides.
  ends: Sequence[int] | None
  notes: Sequence[str]  # lines about memory, what was decided, repairs and changes


@contextlib.contextmanager
def opened_run(run: build.Run, workdir: Path, request: Request) -> Iterator[Opened]:
  """Opens the workdir of a run that was built, in all processes; closes it on exit.

  Process 0 locks the workdir, looks once, decides and tells all processes, and then writes.

  Raises:
    ValueError: the workdir is in use, of another experiment, or cannot be repaired.
    OSError: it cannot be written to.
  """
  ends = _ends_of(run.experiment, request.repeat) if request.repeat else None
  is_first = run.place.process == 0
  folder: OpenWorkdir | None = None
  first: record.Record | None = None
  with contextlib.ExitStack() as stack:
    def decide() -> bool:
      nonlocal folder, first
      folder = stack.enter_context(workdir_lib.opened(workdir))
      begins = folder.begins(run.experiment.fields, request)
      first = _first_record(run, request) if begins else _next_record(run, folder)
      return begins

    begins = _by_process_0(decide, is_first)
    state = None
    if begins and request.init_from:
      if (request.init_from / record.NAME).is_file():
        Workdir(request.init_from).check_layout(run.experiment)
      state, origin = inherit.read(run, request.init_from, request.init_partly)
      first = record.new(run.experiment.fields, origin)
    if begins:
      _by_process_0(lambda: folder.clear(), is_first)
    if state is not None:
      with contextlib.closing(checkpoints.Checkpoints(workdir)) as saved:
        saved.save(state, {'segment': 0, 'run': first.as_json()})

    def write() -> int | None:
      if begins and first.origin and not request.init_from:
        checkpoints.copy(request.repeat, workdir, 0)
      if begins:
        folder.begin(first)
        origin = first.origin
        folder.notes += [f'the run begins with {origin.words()}'] if origin else []
        return 0 if origin else None
      folder.go_on(first)
      return folder.seen.update

    update = _by_process_0(write, is_first)
    opened = folder or _opened_by_process_0(workdir, run.experiment.fields)
    state = None  # otherwise it would stay in memory while the run trains
    yield Opened(run, workdir, opened.record, update, ends, folder.notes if folder else ())


def _by_process_0(function: Callable[[], Any], is_first: bool) -> Any:
  """Returns what a function of process 0 returns, a value of JSON, in all processes.

  Raises:
    ValueError: in all processes, if it has raised one in process 0, with the same message.
    OSError: likewise.
  """
  answer: dict[str, Any] = {}
  raised: Exception | None = None
  if is_first:
    try:
      answer = {'value': function()}
    except (ValueError, OSError) as error:
      raised = error
      answer = {'refusal': str(error)}
  answer = host.of_process_0(answer)
  if 'refusal' in answer:
    raise raised or ValueError(answer['refusal'])
  return answer['value']


def _first_record(run: build.Run, request: Request) -> record.Record:
  """Returns the record of a run that begins, unless it inherits a state.

  A run that repeats another run has its stages and its origin.

  Raises:
    ValueError: the other run cannot be repeated, or its first state is lost.
  """
  fields = run.experiment.fields
  if not request.repeat or not (request.repeat / record.NAME).is_file():
    return record.new(fields)
  repeated = Workdir(request.repeat)
  repeated.check_layout(run.experiment)
  past = repeated.record
  first = record.new(fields)
  if not past.origin and not past.changes:
    return first
  differing = record.differences(repeated.shown_config(), first.config, ('there', 'here'))
  if differing:
    raise ValueError(f'--repeat: the run in {request.repeat} began with another run, or has '
                     'changed its config on the way, and only its newest config can repeat that '
                     f'({"; ".join(differing)})')
  first = first.with_history_of(past)
  _check_stages(run.experiment, first, 0)
  for first_update in first.changes:
    earlier = _experiment_at(run.experiment.fields, first, first_update - 1)
    if not earlier.deterministic:
      raise ValueError(f'--repeat: before update {first_update} the run in {request.repeat} had '
                       f'{earlier.non_deterministic_setting}, which is not deterministic, so it '
                       'cannot be repeated')
  damage = checkpoints.problem(request.repeat, 0) if first.origin else ''
  if damage:
    raise ValueError(f'--repeat: the first state of the run in {request.repeat} is lost: {damage}')
  return first


def _next_record(run: build.Run, folder: OpenWorkdir) -> record.Record:
  """Returns the record of a run that goes on.

  Raises:
    ValueError: its changes do not fit the checkpoint, or come before later ones.
  """
  folder.check_layout(run.experiment)
  changes = folder.seen.record.differences(run.experiment.fields)
  update = folder.seen.update
  misfit = ''
  if changes and update is not None:
    misfit = inherit.problem_of_shapes(run, folder.path, update)
  if misfit:
    names = shorten(', '.join(changes), 600)
    raise OtherExperiment(f'{names}: cannot change in {folder.path}: {misfit}')
  changed = folder.changed_record(run.experiment.fields)
  _check_stages(run.experiment, changed, update or 0)
  return changed


def _opened_by_process_0(workdir: Path, fields: Mapping[str, Any]) -> Workdir:
  """Returns the workdir, into which process 0 has written the same experiment.

  Raises:
    ValueError: it is not there, or has another experiment.
  """
  if not (workdir / record.NAME).exists():
    raise ValueError(f'--workdir: this process does not see what process 0 wrote to {workdir}; '
                     'all processes need one file system')
  opened = Workdir(workdir)
  differing = record.differences(record.completed(opened.record.config, fields),
                                 record.json_of(fields), ('of process 0', 'here'))
  if differing:
    raise OtherExperiment('the processes have different experiments '
                                    f'({"; ".join(differing)})')
  return opened


def _ends_of(experiment: Experiment, repeated: Path) -> list[int]:
  """Returns the last update of each segment of a run that is repeated.

  Raises:
    ValueError: it cannot be repeated, or has no readable receipts.
  """
  if not experiment.deterministic:
    raise ValueError(f'--repeat: {experiment.non_deterministic_setting} is not deterministic, '
                     'so a run cannot be repeated')
  try:
    return journal.segment_ends(repeated)
  except OSError as error:
    raise ValueError(f'--repeat: the receipts of {repeated} cannot be read: '
                     f'{error.strerror}') from None


def stages(run: build.Run, of_run: record.Record, update: int
           ) -> Iterator[tuple[build.Run, int | None]]:
  """Yields the stages of the rest of a run: one for each config, in order.

  Usually there is one stage. There are more if updates before a change of the config must be made,
  because the run repeats another run or has lost checkpoints.

  Args:
    run: the run of the newest config.
    of_run: its record.
    update: the last update that is done.

  Yields:
    A run, and its last update; None if the run ends at total_steps.
  """
  for first_update in of_run.changes:
    if first_update - 1 > update:
      experiment = _experiment_at(run.experiment.fields, of_run, first_update - 1)
      crew = run.crew.of(experiment) if run.crew else None
      yield build.make_run(experiment, crew), first_update - 1
  yield run, None


def _check_stages(experiment: Experiment, of_run: record.Record, update: int) -> None:
  """Checks that one process can make the updates of all stages.

  Args:
    experiment: the experiment of the newest config.
    of_run: the record of the run.
    update: the last update that is done.

  Raises:
    ValueError: fields differ that are fixed when JAX starts, or an earlier config is wrong.
  """
  for first_update in of_run.changes:
    if first_update - 1 > update:
      earlier = _experiment_at(experiment.fields, of_run, first_update - 1)
      for field in ('xla_threads', 'actor_platform'):
        before, after = (getattr(each.placement, field) for each in (earlier, experiment))
        if before != after:
          raise ValueError(f'placement.{field}: it was {before} before update {first_update}, and '
                           f'{after} at the end; one process cannot make all these updates')


def _experiment_at(fields: Mapping[str, Any], of_run: record.Record, update: int) -> Experiment:
  """Returns the experiment of an earlier config; refuses modules that only the workdir names."""
  earlier = record.with_free_fields(of_run.at(update), fields)
  modules.check(earlier, modules.named(fields).values(), record.NAME)
  return resolve(earlier)
