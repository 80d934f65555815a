"""The life of a run: its first state, the changes when it goes on, and the run that it repeats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from podracer_jit.experiment import build
from podracer_jit.experiment import schema as config_lib
from podracer_jit.experiment.experiment import Experiment
from podracer_jit.experiment.resolve import resolve
from podracer_jit.parts import user_path
from podracer_jit.runtime import host
from podracer_jit.training import inherit
from podracer_jit.workdir import changes, checkpoints, files, history, journal, sources, workdirs


class Life(NamedTuple):
  """The options of a run's life."""

  init_from: inherit.Request | None = None
  allowed: changes.Allowed = changes.NOTHING
  repeat: Path | None = None  # the workdir of the run that this run repeats


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags of a run's life."""
  flags.DEFINE_string('init_from', None, 'A workdir. A new run begins with the newest state of '
                      'that run, instead of random parameters.', flag_values=values)
  flags.DEFINE_list('init_parts', None, 'What --init_from takes, by comma: '
                    f'{", ".join(inherit.PARTS)}; or all. Default: '
                    f'{", ".join(inherit.BY_DEFAULT)}, but the optimizer only if it fits.',
                    flag_values=values)
  flags.DEFINE_bool('init_partly', False, 'With --init_from, arrays that do not fit begin anew. '
                    'Without it, such a run is refused.', flag_values=values)
  flags.DEFINE_bool('extend', False, 'Goes on in the workdir with a larger total_steps.',
                    flag_values=values)
  flags.DEFINE_list('change', [], 'Fields of the config, by comma, that may differ from those of '
                    'the workdir: the run goes on with the new values.', flag_values=values)


def of_flags(values: flags.FlagValues) -> Life:
  """Returns the options that the flags set.

  Raises:
    ValueError: a flag has a wrong value, in one line.
  """
  return make_life(values.init_from, values.init_parts, values.init_partly, values.extend,
                   values.change, values.repeat)


def make_life(init_from: str | Path | None = None, init_parts: Sequence[str] | None = None,
              init_partly: bool = False, extend: bool = False, change: Sequence[str] = (),
              repeat: str | Path | None = None) -> Life:
  """Checks the options of a run's life and returns them.

  Args:
    init_from: see the flag --init_from, and so on for the other arguments.
    init_parts: the parts to take, or 'all'.
    init_partly: arrays that do not fit begin anew.
    extend: total_steps may be larger.
    change: fields that may differ.
    repeat: the workdir of the run to repeat.

  Raises:
    ValueError: a value is wrong, or two do not go together, in one line.
  """
  repeated = user_path(repeat) if repeat else None
  allowed = changes.Allowed(extend, tuple(change))
  if not init_from:
    if init_parts is not None or init_partly:
      raise ValueError('--init_parts and --init_partly are for --init_from')
    return Life(None, allowed, repeated)
  for flag, is_set in (('--repeat', repeated), ('--extend or --change', allowed)):
    if is_set:
      raise ValueError(f'--init_from: begins a new run; it cannot be combined with {flag}')
  parts = None
  if init_parts is not None:
    known = (*inherit.PARTS, 'all')
    if not init_parts or any(part not in known for part in init_parts):
      raise ValueError(f'--init_parts: known are {", ".join(known)}; got {",".join(init_parts)!r}')
    # In the order of PARTS, whatever the order of the flag.
    parts = tuple(part for part in inherit.PARTS if part in init_parts or 'all' in init_parts)
  return Life(inherit.Request(user_path(init_from), parts, init_partly), allowed,
              repeated)


class Beginning(NamedTuple):
  """How a command begins."""

  has_begun: bool  # the workdir has a run to go on with
  inherited: inherit.Inherited | None  # the state of another run to begin with


def begin(run: build.Run, workdir: Path, life: Life) -> Beginning:
  """Checks the options of a run's life, before anything is written; all processes must call it.

  Args:
    run: the run that begins or goes on.
    workdir: the workdir of the run, which process 0 has locked.
    life: the options.

  Raises:
    ValueError: an option does not fit the run or its workdir.
  """
  known = workdirs.flat(run.experiment.fields).keys()
  for problem in changes.problems_of_flags(life.allowed, known):
    raise ValueError(problem)
  # A run that was killed while it wrote its first state has not begun. Process 0 decides for all: a
  # process that looks later could find files that process 0 has written meanwhile.
  has_begun = bool(host.of_process_0(int(
      (_has_config(workdir) or any(checkpoints.saved_updates(workdir)))
      and not _gives_way(workdir, run.experiment.fields, life))))
  if has_begun:
    return Beginning(True, None)
  if life.allowed:
    flag = '--extend' if life.allowed.extend else '--change'
    raise ValueError(f'{flag}: there is no run in {workdir} to go on with')
  if life.repeat:
    _check_repeats(run.experiment, life.repeat)
  if not life.init_from:
    return Beginning(False, None)
  inherited = inherit.read(run, life.init_from)
  if _has_config(life.init_from.workdir):
    workdirs.check_layout(life.init_from.workdir, run.experiment)
  return Beginning(False, inherited)


def _gives_way(workdir: Path, fields: Mapping[str, Any], life: Life) -> bool:
  """Returns whether a workdir has a run that never made an update, and that does not fit.

  Args:
    workdir: the workdir of the run.
    fields: the config of the run that begins or goes on, plain values.
    life: the options.
  """
  if life.allowed or not _has_config(workdir) or _made_updates(workdir):
    return False
  try:
    origin = history.origin_of(workdirs.read_history(workdir))
    fits = workdirs.fits(workdir, fields)
  except ValueError:
    return False  # a file that does not belong to a run stays, and the command is refused
  if life.init_from:
    source = str(life.init_from.workdir.resolve())
    fits = fits and origin is not None and origin.workdir == source
  return not fits


def _made_updates(workdir: Path) -> bool:
  return any(checkpoints.saved_updates(workdir)) or journal.has_updates(workdir)


def clear_workdir(workdir: Path) -> list[str]:
  """Sets the config and the first state aside that a run without any update has left.

  Args:
    workdir: the workdir of a run that begins; this process has locked it.

  Returns:
    A line about them, if there are any.

  Raises:
    ValueError: there are updates of a run whose config is lost.
  """
  if _made_updates(workdir):
    raise ValueError(f'--workdir: {workdir} has updates of a run, and no {workdirs.CONFIG}; put it '
                     'back, or choose another --workdir')
  notes = []
  # First the config: without it, a first state belongs to no run.
  if _has_config(workdir):
    aside = files.set_aside(workdir, workdir / workdirs.CONFIG)
    notes = [f'the run in {workdir} never made an update, so it begins anew with this config; the '
             f'config before is now {aside}']
  checkpoints.set_all_aside(workdir)
  return notes


def write_first_state(run: build.Run, workdir: Path, inherited: inherit.Inherited) -> None:
  """Saves the state that a run begins with as its checkpoint of update 0; all processes call it.

  Args:
    run: the run that begins.
    workdir: the workdir of the run; exists.
    inherited: the state.

  Raises:
    checkpoints.NotSaved: it cannot be written.
  """
  entries = [history.Entry(1, init_from=inherited.origin)]
  record = workdirs.record_of(run.experiment.fields, entries)
  with contextlib.closing(checkpoints.Checkpoints(workdir)) as saved:
    saved.save(inherited.state, {'segment': 0, 'run': record})


def start_workdir(run: build.Run, workdir: Path, life: Life,
                  inherited: inherit.Inherited | None) -> list[str]:
  """Writes the config and the history of a new run; afterwards the run has begun.

  A run that repeats another run gets its history, and a copy of its first state.

  Args:
    run: the run that begins.
    workdir: the workdir of the run; exists. With `inherited` it has the first state.
    life: the options.
    inherited: the state of another run to begin with, or None.

  Returns:
    A line about the state of another run, if the run begins with one.

  Raises:
    ValueError: the first state of the repeated run is missing or broken.
    OSError: a file cannot be written.
  """
  entries = []
  if inherited:
    entries = [history.Entry(1, init_from=inherited.origin)]
  elif life.repeat and _has_config(life.repeat):
    entries = workdirs.read_history(life.repeat)
    if history.origin_of(entries):
      _copy_first_state(life.repeat, workdir)
  workdirs.open_workdir(workdir, run.experiment.fields, entries=entries)
  notes = sources.keep(workdir, config_lib.sources(run.experiment.fields), 1)
  workdirs.note_start(workdir, 1)
  origin = history.origin_of(entries)
  return [*notes, *([f'the run begins with {origin.words()}'] if origin else [])]


def _copy_first_state(repeated: Path, workdir: Path) -> None:
  """Copies the checkpoint of update 0 of another run."""
  damage = checkpoints.problem(repeated, 0)
  if damage:
    raise ValueError(f'--repeat: the first state of the run in {repeated} is lost: {damage}')
  checkpoints.copy(repeated, workdir, 0)


def resume_workdir(run: build.Run, workdir: Path, life: Life) -> tuple[int | None, list[str]]:
  """Checks and repairs the workdir of a run that goes on, and notes changes of its config.

  Args:
    run: the run that goes on.
    workdir: the workdir of the run; this process may write to it.
    life: the options.

  Returns:
    The update of the checkpoint to go on from, None without one, and lines about repairs and
    changes.

  Raises:
    ValueError: the workdir is of another experiment, or cannot be repaired.
    OSError: it cannot be written to.
  """
  fields = run.experiment.fields
  notes = workdirs.open_workdir(workdir, fields, life.allowed)
  workdirs.check_layout(workdir, run.experiment)
  _check_origin(workdir, life)
  update, repairs = checkpoints.recover(workdir)

  def misfit() -> str:
    return '' if update is None else inherit.problem_of_shapes(run, workdir, update)

  changed = workdirs.write_changes(workdir, fields, update or 0, misfit)
  _check_stages(run.experiment, workdirs.read_history(workdir), update or 0)
  sourced = sources.keep(workdir, config_lib.sources(fields), (update or 0) + 1)
  workdirs.note_start(workdir, (update or 0) + 1)
  return update, [*notes, *repairs, *changed, *sourced]


def _check_origin(workdir: Path, life: Life) -> None:
  """Checks that a run in a workdir began as --init_from says, and still has a checkpoint.

  Args:
    workdir: the workdir of the run; it has a config.json.
    life: the options.

  Raises:
    ValueError: the run began differently, or with another run's state and has no checkpoint left.
  """
  origin = history.origin_of(workdirs.read_history(workdir))
  if life.init_from:
    source = str(life.init_from.workdir.resolve())
    if origin is None or origin.workdir != source:
      began = f'began with {origin.words()}' if origin else 'began with its seed'
      raise ValueError(f'--init_from: {workdir} has a run already, which {began}; choose another '
                       '--workdir for a new run')
  if origin and not checkpoints.saved_updates(workdir):
    raise ValueError(f'--workdir: the run in {workdir} began with the state of another run, and '
                     'has no checkpoint left; choose another --workdir to begin anew')


def stages(run: build.Run, entries: Sequence[history.Entry], update: int
           ) -> Iterator[tuple[build.Run, int | None]]:
  """Yields the stages of the rest of a run: one for each config, in order.

  Usually there is one stage. There are more if updates before a change of the config must be made,
  because the run repeats another run or has lost checkpoints.

  Args:
    run: the run of the newest config.
    entries: the history of the run.
    update: the last update that is done.

  Yields:
    A run, and its last update; None if the run ends at total_steps.
  """
  fields = run.experiment.fields
  for first_update in history.change_points(entries):
    if first_update - 1 > update:
      experiment = _experiment_at(fields, entries, first_update - 1)
      machines = run.machines.of(experiment) if run.machines else None
      yield build.make_run(experiment, machines), first_update - 1
  yield run, None


def _check_stages(experiment: Experiment, entries: Sequence[history.Entry], update: int) -> None:
  """Checks that one process can make the updates of all stages.

  Args:
    experiment: the experiment of the newest config.
    entries: the history of the run.
    update: the last update that is done.

  Raises:
    ValueError: fields differ that are fixed when JAX starts, or an earlier config is wrong.
  """
  for first_update in history.change_points(entries):
    if first_update - 1 > update:
      earlier = _experiment_at(experiment.fields, entries, first_update - 1)
      for field in ('xla_threads', 'actor_platform'):
        before, after = (getattr(each.placement, field) for each in (earlier, experiment))
        if before != after:
          raise ValueError(f'placement.{field}: it was {before} before update {first_update}, and '
                           f'{after} at the end; one process cannot make all these updates')


def _experiment_at(fields: Mapping[str, Any], entries: Sequence[history.Entry], update: int
                   ) -> Experiment:
  """Returns the experiment of an earlier config; refuses modules that only the workdir names."""
  earlier = history.config_at(fields, entries, update)
  config_lib.check_modules(earlier, config_lib.modules(fields).values(), workdirs.CONFIG)
  return resolve(earlier)


def _check_repeats(experiment: Experiment, repeated: Path) -> None:
  """Checks that a run can have the history of the run that it repeats.

  Raises:
    ValueError: the other run has a history, and its newest config is not this run's; or its
      observations have changed.
  """
  if _has_config(repeated):
    workdirs.check_layout(repeated, experiment)
  entries = workdirs.read_history(repeated) if _has_config(repeated) else []
  if not entries:
    return
  config = workdirs.record_of(experiment.fields)['config']
  differing = workdirs.differences(workdirs.read_fields(repeated), config, ('there', 'here'))
  if differing:
    raise ValueError(f'--repeat: the run in {repeated} began with another run, or has changed its '
                     'config on the way, and only its newest config can repeat that '
                     f'({"; ".join(differing)})')
  _check_stages(experiment, entries, 0)
  for first_update in history.change_points(entries):
    earlier = _experiment_at(experiment.fields, entries, first_update - 1)
    if not earlier.deterministic:
      raise ValueError(f'--repeat: before update {first_update} the run in {repeated} had '
                       f'{earlier.non_deterministic_setting}, which is not deterministic, so it '
                       'cannot be repeated')


def _has_config(workdir: Path) -> bool:
  return (workdir / workdirs.CONFIG).is_file()
