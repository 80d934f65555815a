"""Training: `podracer_jit --config=configs/impala_atari.py --workdir=runs/x`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags, logging

from podracer_jit import loops
from podracer_jit.numerics.fingerprints import canary
from podracer_jit.run import build, checkpoint, command_line, memory
from podracer_jit.run.metrics import Diverged, Files, Meter, check_finite
from podracer_jit.run.progress import Progress
from podracer_jit.run.resolve import resolve
from podracer_jit.runtime import host, placement
from podracer_jit.schemes.reports import Report


def main(argv: Sequence[str]) -> int:
  """Trains; returns the exit code: 0, 1 for a failed run, 2 if it could not start."""
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
  values = flags.FlagValues()  # not the global ones: main may be called again, and by others
  flags.DEFINE_string('workdir', None, 'Where checkpoints and metrics go; runs/ and the '
                      'name of the config by default.', flag_values=values)
  flags.DEFINE_string('profile_dir', None, 'Write a jax.profiler trace of a few updates here.',
                      flag_values=values)
  flags.DEFINE_string('repeat', None, 'A workdir whose segments, as its receipts have them, this '
                      'run makes again: also those that a signal ended.', flag_values=values)
  flags.DEFINE_bool('distributed', False, 'This is one of several processes of the run.',
                    flag_values=values)
  flags.DEFINE_string('coordinator_address', None, 'host:port of process 0; asked of SLURM, Open '
                      'MPI, Kubernetes or the TPU pod where not given.', flag_values=values)
  flags.DEFINE_integer('num_processes', None, 'How many there are; likewise.', flag_values=values)
  flags.DEFINE_integer('process_id', None, 'Which this is, from 0; likewise.', flag_values=values)
  try:
    config = command_line.parse(argv, values)
    if config is None:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    experiment = resolve(config)
    host.prepare_host(experiment.placement)
    joining = (values.coordinator_address, values.num_processes, values.process_id)
    if values.distributed or joining != (None, None, None):
      host.join(experiment.placement, *joining)
    run = build.make_run(experiment)
    for warning in memory.check(run):
      print(f'podracer_jit: warning: {warning}', file=sys.stderr)
    workdir = Path(values.workdir or command_line.default_workdir(argv))
    if values.repeat and not experiment.deterministic:
      raise ValueError(f'--repeat: {experiment.non_deterministic_setting} takes things as they '
                       'come, so no run of it can be run again')
    ends = checkpoint.segment_ends(Path(values.repeat)) if values.repeat else None
    _open(workdir, experiment.fields, run.place)
  except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
    print(f'podracer_jit: {error}', file=sys.stderr)
    return _leave(2)
  try:
    train(run, workdir, values.profile_dir, ends)
  except KeyboardInterrupt:
    if run.place.processes == 1:
      raise
    return _leave(130)
  except Exception as error:  # noqa: BLE001 - the one place where a failed run becomes a message
    logging.exception('the run failed')
    print(f'podracer_jit: {type(error).__name__}: {error}', file=sys.stderr)
    return _leave(1)
  return 0


def _leave(code: int) -> int:
  """Returns the exit code of a failure, or exits: JAX would wait for the other processes first."""
  if jax.distributed.is_initialized():
    if code == 2:  # the others are to say so too; without process 0 JAX would abort them
      time.sleep(3)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  return code


def _open(workdir: Path, config: Mapping[str, Any], place: placement.Placement) -> None:
  """Process 0 makes the workdir; the others find it, and compare their config with its own."""
  if place.process == 0:
    checkpoint.open_workdir(workdir, config)
  host.barrier('workdir')
  if place.process:
    if not (workdir / 'config.json').exists():
      raise ValueError(f'--workdir: what process 0 wrote to {workdir} is not to be seen here; all '
                       'processes need one file system')
    checkpoint.open_workdir(workdir, config)


def train(run: build.Run, workdir: Path, profile_dir: str | None = None,
          ends: Sequence[int] | None = None) -> None:
  """Trains from the workdir's newest checkpoint, segment by segment, to total_steps.

  SIGINT or SIGTERM ends the segment at its next update (of `fused`: after its call), saves, and
  returns; a second one raises. `ends` are the last updates of the segments, where another run has
  them otherwise than the config.
  """
  experiment, learner = run.experiment, run.learner
  state = run.initial_state()
  saved = checkpoint.Checkpoints(workdir, experiment.checkpoint.keep)
  meta: Mapping[str, Any] = {'segment': 0}
  title = (f'{experiment.env.task}  {experiment.scheme_name} {experiment.loss_name}  '
           f'{workdir}')

  def stopped() -> bool:
    return placement.any_process(stopping.is_set(), run.place.mesh)

  with (contextlib.closing(saved), _stopping() as stopping,
        Progress(experiment, title, quiet=run.place.process > 0) as progress):
    if saved.newest() is not None:
      # Into shapes: two replays would not fit beside each other.
      state, meta = saved.restore(state._replace(replay=learner.replay_shapes()))
      progress.note(f'going on from update {int(state.update)} ({int(state.steps):,} steps)')
    else:
      progress.note(f'{title}: starting')
    profiler = Profiler(profile_dir)
    while int(state.steps) < experiment.total_steps and not stopped():
      length = experiment.checkpoint.every_updates
      if ends is not None:
        length = next((end - int(state.update) for end in ends if end > int(state.update)), 0)
      if not length:
        break
      state = learner.allocate(state)
      state, meta = _segment(run, state, meta, length, workdir, progress, profiler,
                             stopping.is_set)
      if not experiment.checkpoint.replay:  # then a run that goes on has none either
        state = state._replace(replay=())
      saved.save(state, meta)
    profiler.close()
    if profile_dir and not profiler.traced:
      progress.note(f'no trace: it begins with the third report, and there were '
                    f'{profiler.reports}')
    done = int(state.steps) >= experiment.total_steps
    progress.note(f'{"finished" if done else "stopped"} at update {int(state.update)} '
                  f'({int(state.steps):,} steps); {workdir} has it all'
                  + ('' if done else '; the same command goes on'))


def _segment(run: build.Run, state, meta: Mapping[str, Any], length: int, workdir: Path,
             progress: Progress, profiler: Profiler, stop: Callable[[], bool]):
  """Runs one of `length` updates; returns the state after it, and what its checkpoint holds."""
  experiment, place = run.experiment, run.place
  index, saved = meta['segment'], int(state.update)

  def report(item: Report) -> None:
    for record, receipt in meter.records(item):
      if place.process == 0:
        files.write(record, receipt)
      progress.show(record)
      try:
        check_finite(record)
      except Diverged as error:
        raise Diverged(f'{error}; the last good checkpoint is '
                       + (f'that of update {saved}' if saved else 'none: the run had just begun')
                       + f', in {workdir}') from None
    profiler.reported()

  with contextlib.ExitStack() as stack:
    if place.process == 0:
      with jax.default_device(place.learners[0]):
        header = dict(segment=index, first_update=saved + 1, versions=checkpoint.versions(),
                      canary=canary())
      files = stack.enter_context(contextlib.closing(
          Files(workdir, saved, int(state.steps), header, experiment.log.tensorboard)))
    segment = stack.enter_context(build.segment(
        run, state, index, length, report, stop))
    meter = Meter(experiment.log.window, experiment.spec.frame_skip, segment.waits, meta)
    try:
      states = loops.run(segment.workers)
    except loops.Stuck as error:
      # EnvPool's receive cannot be interrupted, so nothing else ends those threads; leave before
      # anything on the way out waits for them.
      print(f'podracer_jit: {error.__cause__!r}; {error}', file=sys.stderr, flush=True)
      os._exit(1)
  return states['learner'].train, meter.meta() | {'segment': index + 1}


class Profiler:
  """Traces a few reports, from the third on: by then everything is compiled and warm."""

  FIRST, LAST = 3, 6

  def __init__(self, directory: str | None):
    self._directory, self.reports = directory, 0
    self.traced = self._tracing = False

  def reported(self) -> None:
    """Counts a report; starts or ends the trace."""
    self.reports += 1
    if self._directory and self.reports == self.FIRST:
      jax.profiler.start_trace(self._directory)
      self.traced = self._tracing = True
    elif self.reports == self.LAST:
      self.close()

  def close(self) -> None:
    """Ends a trace that is still on."""
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()


@contextlib.contextmanager
def _stopping():
  """An event that the first SIGINT or SIGTERM sets; after it, signals act as usual."""
  event, before = threading.Event(), {}

  def handle(number, frame):
    event.set()
    for number, old in before.items():
      signal.signal(number, old)

  if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGINT, signal.SIGTERM):
      before[number] = signal.signal(number, handle)
  try:
    yield event
  finally:
    for number, old in before.items():
      signal.signal(number, old)
