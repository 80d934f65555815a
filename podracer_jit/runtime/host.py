"""Settings that JAX reads when it starts, and the meeting of the processes of a run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from podracer_jit.options import shorten, shown
from podracer_jit.runtime import coordinator, stored_programs
from podracer_jit.runtime.placement import PlacementOptions

_logger = logging.getLogger(__name__)


def prepare_host(options: PlacementOptions) -> None:
  """Sets the number of XLA's threads and devices; call it before JAX's first backend starts.

  The size of XLA's CPU thread pool decides how reductions are split. So it is a part of the
  experiment and does not follow the number of cores or virtual devices.

  Args:
    options: the options of the placement.

  Raises:
    ValueError: the placement has more devices than `placement.xla_threads`, or JAX has started
      with other sizes.
  """
  devices = options.num_devices
  threads = options.xla_threads
  if devices > threads:
    # The error names the field that the user set.
    field = 'actor_devices'
    if max(options.learner_devices) > max(options.actor_devices):
      field = 'learner_devices'
    name = field if options.differs(field) else 'xla_threads'
    raise ValueError(f'placement.{name}: {field} = {shown(getattr(options, field))} needs '
                     f'{devices} devices in a process, xla_threads = {threads} allows {threads}; '
                     f'take device indices below {threads}, or xla_threads = {devices}')

  if not _is_prepared(threads, devices):
    try:
      _set_sizes(threads, devices)
    except RuntimeError:
      raise ValueError(
          f'placement.xla_threads: is {threads}, and JAX has started in this process without it; '
          'call podracer_jit.prepare(config) before anything that uses JAX, or train in a new '
          'process') from None


def prepare_host_for_any(options: PlacementOptions) -> None:
  """Does the work of `prepare_host` for any placement with these `xla_threads`.

  Environments that are JAX functions are created before the whole placement is known, and creating
  them may start JAX. So JAX gets as many CPU devices as the placement can have; unused devices cost
  nothing. Does nothing if JAX has started already.
  """
  threads = options.xla_threads
  if not _is_prepared(threads, threads):
    with contextlib.suppress(RuntimeError):
      _set_sizes(threads, threads)


def _is_prepared(threads: int, devices: int) -> bool:
  """Returns whether the sizes were set, with at least this number of devices."""
  return _sizes.get('threads') == threads and _sizes['devices'] >= devices


def _set_sizes(threads: int, devices: int) -> None:
  """Sets the sizes of XLA's thread pool and the number of CPU devices.

  Raises:
    RuntimeError: JAX has started already.
  """
  jax.config.update('jax_num_cpu_devices', devices)
  # XLA takes the size of its CPU thread pool from here.
  os.environ['NPROC'] = str(threads)
  _sizes.update(threads=threads, devices=devices)
  _keep_programs()


# What this process has set; empty before.
_sizes: dict[str, int] = {}


def _keep_programs() -> None:
  """Sets a cache folder for compiled programs, unless JAX has one already.

  The cache is not used if others could have put programs there, wherever the folder comes from; a
  line says so.
  """
  if jax.config.jax_compilation_cache_dir is None:
    _set_own_cache()
  folder = jax.config.jax_compilation_cache_dir
  if folder is None or not jax.config.jax_enable_compilation_cache:
    return
  if '://' not in folder:
    with contextlib.suppress(OSError):  # JAX reports it
      stored_programs.make_private(Path(folder).absolute())
  danger = stored_programs.danger_of(folder)
  if danger:
    _logger.warning('compiled programs are neither kept nor read: %s; programs in %s would be '
                    'executed (see Trust in the README)', danger, shorten(folder))
    jax.config.update('jax_enable_compilation_cache', False)


def _set_own_cache() -> None:
  """Sets a folder in the user's cache as that of compiled programs.

  Each kind of processor has its own, because code for one may not run on another. There is no
  folder if the user has no home or cannot write there; if it exists all the same, programs are read
  from it.
  """
  lines = Path('/proc/cpuinfo').read_text().splitlines()
  features = sorted({x for x in lines if x.startswith(('model name', 'flags', 'Features'))})
  processor = hashlib.sha256('\n'.join(features).encode()).hexdigest()[:12]
  try:
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    folder = cache / 'podracer_jit' / processor
    stored_programs.make_private(folder)
  except (RuntimeError, OSError):  # a RuntimeError means that the user has no home
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  if not os.access(folder, os.W_OK):
    jax.config.update('jax_persistent_cache_min_compile_time_secs', math.inf)


def join(options: PlacementOptions, coordinator_address: str | None, num_processes: int | None,
         process_id: int | None, timeout_s: int = 60) -> None:
  """Joins this process to the other processes of a run.

  Call it after `prepare_host` and before any use of a device. JAX asks SLURM, Open MPI, Kubernetes
  or the TPU pod for arguments that are None. Process 0 listens at `coordinator_address` only. If
  that is None or JAX_COORDINATOR_BIND_ADDRESS is set, JAX decides where it listens.

  Args:
    options: the options of the placement.
    coordinator_address: HOST:PORT of process 0, or None.
    num_processes: number of processes, or None.
    process_id: index of this process, from 0, or None.
    timeout_s: seconds until all processes must have joined.

  Raises:
    ValueError: a value is out of range, process 0 cannot listen or be reached, no cluster provides
      the missing arguments, or not all processes joined in time.
  """
  _check_numbers(num_processes, process_id, timeout_s)
  arguments = (coordinator_address, num_processes, process_id)
  coordinator_address = coordinator_address or os.environ.get('JAX_COORDINATOR_ADDRESS')
  deadline = time.monotonic() + timeout_s
  bind_address = None
  if coordinator_address is not None:
    coordinator.parse_address(coordinator_address)
    if process_id == 0 and 'JAX_COORDINATOR_BIND_ADDRESS' not in os.environ:
      bind_address = coordinator.bind_address(coordinator_address)
    elif process_id:
      coordinator.wait_until_reachable(coordinator_address, timeout_s)

  # JAX's preemption service would catch SIGTERM, which `main` handles.
  jax.config.update('jax_enable_preemption_service', False)
  initialize = functools.partial(
      jax.distributed.initialize, coordinator_address, num_processes, process_id,
      # Under SLURM and Open MPI, JAX would give each process of a node one device.
      local_device_ids=list(range(options.num_devices)),
      coordinator_bind_address=bind_address,
      # JAX aborts the process after this time, so `join` must give up earlier.
      initialization_timeout=timeout_s + 600,
      heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20)

  try:
    _call_until(deadline, initialize)
  except TimeoutError:
    count = 'all' if num_processes is None else f'all {num_processes}'
    where = '' if coordinator_address is None else f' at {coordinator_address}'
    raise ValueError(f'--distributed: not {count} processes joined{where} within {timeout_s} s '
                     '(--coordinator_timeout_s)') from None
  except (ValueError, RuntimeError) as error:
    hint = '' if None not in arguments else (
        '; without SLURM, Open MPI, Kubernetes or a TPU pod give --coordinator_address, '
        '--num_processes and --process_id')
    raise ValueError(f'--distributed: {" ".join(str(error).split())}{hint}') from None


def _check_numbers(num_processes: int | None, process_id: int | None, timeout_s: int) -> None:
  """Raises ValueError if a number is out of range."""
  if num_processes is not None and num_processes < 1:
    raise ValueError(f'--num_processes: must be at least 1, got {num_processes}')
  if process_id is not None and process_id < 0:
    raise ValueError(f'--process_id: must be at least 0, got {process_id}')
  if None not in (num_processes, process_id) and process_id >= num_processes:
    raise ValueError(f'--process_id: must be from 0 to {num_processes - 1} with '
                     f'--num_processes={num_processes}, got {process_id}')
  if timeout_s < 1:
    raise ValueError(f'--coordinator_timeout_s: must be at least 1, got {timeout_s}')


def _call_until(deadline: float, function: Callable[[], None]) -> None:
  """Calls a function that cannot be interrupted, on a separate thread.

  Args:
    deadline: time (`time.monotonic`) until which to wait.
    function: the function to call.

  Raises:
    TimeoutError: the function has not returned by `deadline`; its thread continues.
    BaseException: the exception of the function.
  """
  errors: list[BaseException] = []
  returned = threading.Event()

  def call() -> None:
    try:
      function()
    except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
      errors.append(error)
    returned.set()

  threading.Thread(target=call, name='join', daemon=True).start()
  if not returned.wait(max(0.0, deadline - time.monotonic())):
    raise TimeoutError
  if errors:
    raise errors[0]


def barrier(name: str) -> None:
  """Blocks until every process calls this function with the same name."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def of_process_0(value: Any) -> Any:
  """Broadcasts a value of JSON from process 0 to all processes.

  Args:
    value: the value; ignored in processes other than 0.

  Returns:
    The value of process 0, in every process.
  """
  if jax.process_count() == 1:
    return value
  content = json.dumps(value).encode() if jax.process_index() == 0 else b''
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
  sent = np.zeros(size, np.uint8)
  if content:
    sent[:] = np.frombuffer(content, np.uint8)
  return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent), np.uint8)))
