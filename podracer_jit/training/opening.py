"""Opens the workdir of a run for the command line and the Python API, in all processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podracer_jit import options
from podracer_jit.errors import OtherExperiment
from podracer_jit.experiment import build, modules
from podracer_jit.experiment.resolve import resolve
from podracer_jit.experiment.schema import EnvOptions, Experiment
from podracer_jit.options import shorten
from podracer_jit.runtime import host
from podracer_jit.training import inherit, restoring
from podracer_jit.workdir import checkpoints, record
from podracer_jit.workdir import workdir as workdir_lib
from podracer_jit.workdir.workdir import OpenWorkdir, Request, Workdir


class Opened(NamedTuple):
  """A run whose workdir this process, or process 0, has opened."""

  run: build.Run
  workdir: Path
  record: record.Record
  update: int | None  # of the checkpoint to go on from; None without one
  notes: Sequence[str]  # lines about memory, what was decided, repairs and changes


@contextlib.contextmanager
def opened_run(run: build.Run, workdir: Path, request: Request) -> Iterator[Opened]:
  """Opens the workdir of a run that was built, in all processes; closes it on exit.

  Raises:
    ValueError: the workdir is in use, of another experiment, or cannot be repaired.
    OSError: it cannot be written to.
  """
  with decided(run, workdir, request) as begin:
    yield begin()


@contextlib.contextmanager
def decided(run: build.Run, workdir: Path, request: Request
            ) -> Iterator[Callable[[], Opened]]:
  """Locks the workdir of a run that was built, and decides what happens there; closes it on exit.

  Process 0 locks the workdir, looks once, decides and tells all processes.

  Yields:
    What then writes to the workdir, and returns the opened run.

  Raises:
    ValueError: the workdir is in use, of another experiment, or cannot be repaired.
  """
  is_first = run.place.process == 0
  folder: OpenWorkdir | None = None
  first: record.Record | None = None
  with contextlib.ExitStack() as stack:
    def decide() -> bool:
      nonlocal folder, first
      folder = stack.enter_context(workdir_lib.opened(workdir))
      begins = folder.begins(run.experiment.fields, request)
      first = record.new(run.experiment.fields) if begins else _next_record(run, folder, request)
      return begins

    begins = _by_process_0(decide, is_first)

    def write() -> int | None:
      if begins:
        folder.begin(first)
        origin = first.origin
        folder.notes += [f'the run begins with {origin.words()}'] if origin else []
        return 0 if origin else None
      folder.go_on(first)
      return folder.seen.update

    def begin() -> Opened:
      nonlocal first
      state = None
      if begins and request.init_from:
        if (request.init_from / record.NAME).is_file():
          _check_layout_of_origin(run, request.init_from)
        state, origin = inherit.read(run, request.init_from, request.init_partly)
        first = record.new(run.experiment.fields, origin)
      if begins:
        _by_process_0(lambda: folder.clear(), is_first)
      if state is not None:
        with contextlib.closing(checkpoints.Checkpoints(workdir)) as saved:
          saved.save(build.Snapshot(state), {'run': first.as_json()})
      update = _by_process_0(write, is_first)
      opened = folder or _opened_by_process_0(workdir, run.experiment.fields)
      return Opened(run, workdir, opened.record, update, folder.notes if folder else ())

    yield begin


def _check_layout_of_origin(run: build.Run, source: Path) -> None:
  """Checks that observations have the layout that a run began with whose state is taken over.

  Raises:
    ValueError: they have another one, or the record of that run is broken.
  """
  try:
    Workdir(source).check_layout(run.experiment)
  except ValueError as error:
    raise ValueError(str(error).replace('--workdir: ', '--init_from: ', 1)) from None


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


def renewal_until_0_7(experiment: Experiment, workdir: Path) -> int | None:
  """Returns the renewal of a run whose command means it by `checkpoint.every_updates`, else None.

  Until version 0.7 both were one field, and the same command shall go on with such a run.
  """
  default = options.defaults(EnvOptions)['renew_every_updates']
  every = experiment.checkpoint.every_updates
  if not every or experiment.env.renew_every_updates != default:
    return None
  try:
    config = Workdir(workdir).record.config
  except ValueError:
    return None  # there is no run, or what is wrong is told later
  renewal = config.get('env', {}).get('renew_every_updates')
  return every if renewal == every != default else None


def as_it_began(experiment: Experiment, workdir: Path) -> Experiment:
  """Returns the experiment with the `microbatch_rows` of the run that it goes on with, if any."""
  config = Workdir(workdir).config_of_updates() if experiment.chooses_microbatch else None
  if config is None:
    return experiment
  rows = config.get('microbatch_rows', 0)
  is_number = type(rows) is int and rows >= 0  # otherwise the whole config is refused later
  return experiment.with_microbatch_rows(rows) if is_number else experiment


def _next_record(run: build.Run, folder: OpenWorkdir, request: Request) -> record.Record:
  """Returns the record of a run that goes on.

  Raises:
    ValueError: its changes do not fit the checkpoint, or come before later ones; or its
      environments cannot go on.
  """
  folder.check_layout(run.experiment)
  changes = folder.seen.record.differences(run.experiment.fields)
  update = folder.seen.update
  misfit = ''
  if changes and update is not None:
    renews_envs = request.renew_envs or record.renews(changes)
    misfit = inherit.problem_of_shapes(run, folder.path, update, renews_envs)
  if misfit:
    names = shorten(', '.join(changes), 600)
    raise OtherExperiment(f'{names}: cannot change in {folder.path}: {misfit}')
  changed = folder.changed_record(run.experiment.fields)
  _check_stages(run.experiment, changed, update or 0)
  if not update:
    return changed
  reason = record.ASKED if request.renew_envs else restoring.renewal(run, folder.path, update)
  next_record = changed.renewed(update + 1, reason)
  problem = restoring.problem_of_actions(run, folder.path, next_record, update)
  if problem:
    raise ValueError(problem)
  return next_record


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


def stages(run: build.Run, of_run: record.Record, update: int
           ) -> Iterator[tuple[build.Run, int | None]]:
  """Yields the stages of the rest of a run: one for each config, in order.

  Usually there is one stage. There are more if updates before a change of the config must be made
  again, because checkpoints are lost.

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
      before, after = (each.placement.actor_platform for each in (earlier, experiment))
      if before != after:
        raise ValueError(f'placement.actor_platform: it was {before} before update {first_update}, '
                         f'and {after} at the end; one process cannot make all these updates')


def _experiment_at(fields: Mapping[str, Any], of_run: record.Record, update: int) -> Experiment:
  """Returns the experiment of an earlier config; refuses modules that only the workdir names."""
  earlier = record.with_free_fields(of_run.at(update), fields)
  modules.check(earlier, modules.named(fields).values(), record.NAME)
  return resolve(earlier)
