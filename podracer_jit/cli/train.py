"""Trains an experiment in a workdir, or goes on with the run there.

  podracer_jit --config=configs/impala_atari.py --workdir=runs/x
  podracer_jit train --config=configs/impala_atari.py --workdir=runs/x

Exit code: 0: finished; 1: failed; 2: refused, nothing was started; 3: stopped by a signal or
a sink, and saved; 130: interrupted while starting, or by a second signal, without a save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from podracer_jit.cli import quieten
from podracer_jit.errors import (
  FAILED,
  FINISHED,
  INTERRUPTED,
  REFUSED,
  CallbackFailed,
  PodracerError,
  Refused,
  Stopped,
  Stuck,
  environment_failure,
  line_of,
  refusing,
)
from podracer_jit.experiment.flags import default_workdir, parse
from podracer_jit.experiment.resolve import resolve
from podracer_jit.parts import user_path
from podracer_jit.runtime import host
from podracer_jit.runtime.output import complain, give_up_lost_streams
from podracer_jit.training import crew, profiling, sinks, stopping, trainer
from podracer_jit.workdir import checkpoints
from podracer_jit.workdir.workdir import make_request

_logger = logging.getLogger(__name__)


def main(argv: Sequence[str], began_s: float | None = None) -> int:
  """Trains; returns one of the exit codes of `errors`.

  Args:
    argv: the name of the program, and its arguments.
    began_s: when the command began, by `time.perf_counter`; None: now.
  """
  began_s = time.perf_counter() if began_s is None else began_s
  quieten()
  # absl's global flags belong to the importing program, and main may be called again.
  values = flags.FlagValues()
  flags.DEFINE_string('workdir', None, 'A folder for checkpoints and metrics; default: runs/ and '
                      'the name of the config.', flag_values=values)
  flags.DEFINE_string('profile_dir', None, 'A folder for a jax.profiler trace of a few updates, '
                      'and a memory profile.', flag_values=values)
  flags.DEFINE_string('profile_updates', None, 'A:B, the first and the last update of the trace; '
                      'default: a few after the programs are warm.', flag_values=values)
  flags.DEFINE_integer('profile_port', None, 'A port at which jax.profiler listens meanwhile, for '
                       "TensorBoard's and xprof's captures.", flag_values=values)
  flags.DEFINE_bool('renew_envs', False, 'Goes on with new episodes, if the simulators of the run '
                    'cannot be made again as they were.', flag_values=values)
  flags.DEFINE_string('init_from', None, 'A workdir. A new run begins with the newest state of '
                      'that run, instead of random parameters: with its parameters, its running '
                      'statistics, and the state of its optimizer if that fits.',
                      flag_values=values)
  flags.DEFINE_bool('init_partly', False, 'With --init_from, arrays that do not fit begin anew. '
                    'Without it, such a run is refused.', flag_values=values)
  flags.DEFINE_list('change', [], 'Fields of the config, by comma, that may differ from those of '
                    'the workdir: the run goes on with the new values.', flag_values=values)
  flags.DEFINE_bool('extend', False, 'Short for --change=total_steps: goes on in the workdir with '
                    'a larger total_steps.', flag_values=values)
  flags.DEFINE_integer('num_seeds', None, 'Trains so many seeds at once, from --config.seed on, in '
                       'one program; each has a workdir in the workdir. For JAX environments and '
                       'scheme=fused.', flag_values=values)
  flags.DEFINE_list('callbacks', [], 'Classes of your own, module:Class, by comma: subclasses of '
                    'podracer_jit.Sink, which are told each update, checkpoint and evaluation.',
                    flag_values=values)
  flags.DEFINE_string('mirror', None, 'The address of a store, such as gs://bucket/runs/x, to '
                      'which the workdir is copied after each checkpoint, and from which it is '
                      'fetched if it is missing here.', flag_values=values)
  flags.DEFINE_bool('distributed', False, 'This is one of several processes of the run.',
                    flag_values=values)
  cluster = 'by default, SLURM, Open MPI, Kubernetes or the TPU pod gives it.'
  flags.DEFINE_string('coordinator_address', None, f'host:port of process 0; {cluster}',
                      flag_values=values)
  flags.DEFINE_integer('num_processes', None, f'Number of processes; {cluster}',
                       flag_values=values)
  flags.DEFINE_integer('process_id', None, f'Index of this process, from 0; {cluster}',
                       flag_values=values)
  flags.DEFINE_integer('coordinator_timeout_s', 60, 'Seconds that a process waits until process 0 '
                       'listens and all other processes have joined.', flag_values=values)
  with stopping.handled() as stop:
    try:
      return _main(argv, values, stop, began_s)
    finally:
      give_up_lost_streams()


def _main(argv: Sequence[str], values: flags.FlagValues, stop: stopping.Stopping, began_s: float
          ) -> int:
  """Trains as the flags say; returns the exit code."""
  failing: Path | None = None  # the workdir whose checkpoint a failure names
  with contextlib.ExitStack() as stack:
    try:
      with refusing(OSError, jax.errors.JaxRuntimeError):
        config = parse(argv, values)
        if config is None:
          print(f'{__doc__}\n{values.get_help()}')
          return FINISHED
        workdir = user_path(values.workdir or default_workdir(argv))
        if values.num_seeds is None:  # else each seed has a workdir
          failing = workdir
        request = make_request(values.init_from, values.init_partly, values.extend, values.change,
                               values.renew_envs)
        folder = user_path(values.profile_dir) if values.profile_dir else None
        to_record = profiling.make_profiling(folder, values.profile_updates)
        profiling.check_port(values.profile_port)
        joining = (values.coordinator_address, values.num_processes, values.process_id)
        is_distributed = values.distributed or joining != (None, None, None)
        if is_distributed and values.num_seeds is not None:
          raise ValueError('--num_seeds: is for one process')
        if values.mirror and (is_distributed or values.num_seeds is not None):
          raise ValueError('--mirror: is for one process and one seed')
        if is_distributed:
          # Processes must join before JAX starts, and creating some environments starts JAX.
          host.join(*joining, values.coordinator_timeout_s)
        cluster = None
        if values.num_seeds is None:
          cluster = stack.enter_context(crew.joined(config))
        told = sinks.users(values.callbacks, values.num_seeds or 1)
        notes = []
        if values.mirror:
          from podracer_jit.training import mirror  # noqa: PLC0415 - few runs need its packages
          copy = mirror.Mirror(values.mirror, workdir)
          notes += [copy.note_of_start] if copy.note_of_start else []
          told[0].append(copy)
        opened = stack.enter_context(trainer.opened(
            resolve(config), workdir, request, cluster, values.num_seeds))
        stack.enter_context(profiling.served(values.profile_port))
      failing = opened.workdir
      for note in [*notes, *opened.notes]:
        complain(f'podracer_jit: {note}')
      stop.begin_training()
      if not opened.train(stop, told, to_record, began_s=began_s):
        raise Stopped(is_saved=bool(checkpoints.saved_updates(opened.workdir)))
    except Stopped as stopped:
      return stopped.code
    # A user's code may exit, but its exit code must not be the command's: 3 means saved.
    except (KeyboardInterrupt, SystemExit, Exception) as error:  # noqa: BLE001 - `_failure` logs it
      stop.end()  # a further signal would keep the line from being printed
      code, line = _failure(error, failing)
      complain(f'podracer_jit: {line}')
      return _leave(code, at_once=isinstance(error, Stuck))
    finally:
      stop.end()
    return FINISHED


def _failure(error: BaseException, workdir: Path | None) -> tuple[int, str]:
  """Returns the exit code of a training that was refused, failed or interrupted, and a line.

  An exception that nobody has foreseen is also logged with its traceback.

  Args:
    error: the exception.
    workdir: the line names the last good checkpoint here; None: it names none.
  """
  if isinstance(error, Refused):
    return REFUSED, str(error)
  threads = ''
  if isinstance(error, Stuck):
    threads = f'; {error}'
    error = error.__cause__
  code = FAILED
  line = line_of(error)
  if isinstance(error, KeyboardInterrupt):
    code = INTERRUPTED
    line = 'interrupted; updates since the newest checkpoint are not saved'
  elif not (isinstance(error, PodracerError | OSError | SystemExit) or environment_failure(error)):
    _logger.error('the run failed', exc_info=error)
  elif isinstance(error, CallbackFailed) and error.__cause__:
    _logger.error('a callback failed', exc_info=error.__cause__)
  line += threads
  # The exception of a seed names that seed's own.
  if workdir is not None and checkpoints.LAST_GOOD not in line:
    line += f'; {checkpoints.last_good(workdir)}'
  return code, line


def _leave(code: int, at_once: bool = False) -> int:
  """Returns the exit code of a failure; with several processes, ends this process at once.

  JAX would wait for the other processes at a normal exit.

  Args:
    code: the exit code.
    at_once: ends this process at once anyway, because it has threads that do not end.
  """
  if jax.distributed.is_initialized():
    if code == REFUSED:
      # The other processes also refuse, and need time to print their messages: JAX aborts them once
      # process 0 has ended.
      time.sleep(3)
    at_once = True
  if at_once:
    give_up_lost_streams()
    os._exit(code)
  return code
