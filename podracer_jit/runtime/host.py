"""Settings that JAX reads when it starts, and the meeting of the processes of a run."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the processes agree before a backend starts
from jax.experimental import multihost_utils

from podracer_jit.options import shorten, shown
from podracer_jit.runtime import coordinator, stored_programs
from podracer_jit.runtime import machine as machines
from podracer_jit.runtime.machine import Machine
from podracer_jit.runtime.placement import PlacementOptions

_logger = logging.getLogger(__name__)


def prepare_host(options: PlacementOptions, deterministic: bool, devices: int = 1) -> None:
  """Sets XLA's kernels, threads and devices; call it before JAX's first backend starts.

  Args:
    options: the options of the placement.
    deterministic: whether kernels of NVIDIA GPUs are repeatable.
    devices: CPU devices to have at least, if JAX has not started; unused ones cost nothing.

  Raises:
    ValueError: JAX has started with fewer devices, with a single thread, or with other kernels.
  """
  _choose_kernels(deterministic)
  needed = _cpu_devices(options)
  _prepare(options, max(needed, devices) if started_devices() is None else needed)


def prepare_host_for_any(options: PlacementOptions, deterministic: bool, devices: int = 1
                         ) -> None:
  """Does the work of `prepare_host` before the whole placement is known.

  Environments that are JAX functions are created before that, and creating them may start JAX.
  Does nothing if JAX has started already.

  Args:
    options: the options of the placement.
    deterministic: whether kernels of NVIDIA GPUs are repeatable.
    devices: the most that it may get where it is left open.
  """
  with contextlib.suppress(ValueError):
    _choose_kernels(deterministic)
    _prepare(options, max(_cpu_devices(options), devices))


def _cpu_devices(options: PlacementOptions) -> int:
  """Returns the CPU devices that a process must have for a placement."""
  each, _ = machine()
  # Unused devices cost nothing.
  if not each.accelerators or started_devices() is None:
    return options.num_devices
  # Learners are on accelerators, and so are actors, unless their platform is named.
  return 1 + max(options.actor_devices, default=0) if options.actor_platform == 'cpu' else 1


def _prepare(options: PlacementOptions, devices: int) -> None:
  """Prepares JAX for a number of devices; see `prepare_host`."""
  threads = max(2, devices, options.xla_threads)
  started = _sizes.get('devices') or started_devices()
  if started is not None and started >= devices and (_sizes or _has_several_threads(started)):
    return
  try:
    # More threads than before would not be used, so the number stays.
    _set_sizes(max(threads, _sizes.get('threads', 0)), max(devices, _sizes.get('devices', 0)))
  except RuntimeError:
    if started >= devices:
      raise ValueError(
          'placement: JAX has started in this process with one thread, which rounds differently; '
          'call podracer_jit.prepare(config) before anything that uses JAX, or train in a new '
          'process') from None
    # The error names the field that the user set.
    field = 'actor_devices'
    if max(options.learner_devices, default=0) + 1 == devices:
      field = 'learner_devices'
    raise ValueError(
        f'placement.{field}: {shown(getattr(options, field))} needs {devices} devices in a '
        f'process, and JAX has started in this one with {started}; call '
        'podracer_jit.prepare(config) before anything that uses JAX, or train in a new process'
    ) from None


# XLA's flags of repeatable kernels. They are not chosen by the time that they take, and products
# are not merged into larger ones, since the rest of the program decides which.
REPEATABLE = {'--xla_gpu_deterministic_ops': 'true', '--xla_gpu_dot_merger_threshold_mb': '0'}


def _choose_kernels(deterministic: bool) -> None:
  """Asks XLA for repeatable kernels of NVIDIA GPUs, if there are any; a user's own flags stay.

  Raises:
    ValueError: JAX has started without the flags.
  """
  given = os.environ.get('XLA_FLAGS', '').split()
  own = {flag.partition('=')[0] for flag in given}
  missing = [f'{flag}={value}' for flag, value in REPEATABLE.items() if flag not in own]
  if not missing or not deterministic or not machines.num_gpus():
    return
  if started_devices() is not None:
    flags = ' '.join(missing)
    raise ValueError(
        f'numerics.deterministic: True needs XLA_FLAGS="{flags}", and JAX has started in '
        'this process without it; call podracer_jit.prepare(config) before anything that uses JAX, '
        'train in a new process, or set numerics.deterministic = False')
  os.environ['XLA_FLAGS'] = ' '.join([*given, *missing])


def xla_threads() -> int | None:
  """Returns the threads of XLA's CPU pool; None if this module has not set their number."""
  return _sizes.get('threads')


def started_devices() -> int | None:
  """Returns the CPU devices with which JAX has started; None: it has not."""
  before = jax.config.jax_num_cpu_devices
  try:
    # JAX refuses another number once it has started.
    jax.config.update('jax_num_cpu_devices', before + 1)
  except RuntimeError:
    return jax.local_device_count('cpu')
  jax.config.update('jax_num_cpu_devices', before)
  return None


def _has_several_threads(devices: int) -> bool:
  """Returns whether XLA's CPU pool has several threads, if JAX has started on its own."""
  threads = os.environ.get('PJRT_NPROC') or os.environ.get('NPROC') or ''
  count = int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0))
  return max(count, devices) > 1


def _set_sizes(threads: int, devices: int) -> None:
  """Sets the sizes of XLA's thread pool and the number of CPU devices.

  Raises:
    RuntimeError: JAX has started already.
  """
  devices = max(devices, _devices_of_user())
  jax.config.update('jax_num_cpu_devices', devices)
  # XLA takes the size of its CPU thread pool from here; a user's PJRT_NPROC would count more.
  os.environ['NPROC'] = str(threads)
  os.environ.pop('PJRT_NPROC', None)
  if not _sizes:
    jax.monitoring.register_event_duration_secs_listener(_give_back_memory)
    stored_programs.name_by_processor()
  _sizes.update(threads=threads, devices=devices)
  _keep_programs()


def _devices_of_user() -> int:
  """Returns the CPU devices that the user has asked JAX or XLA for; -1 if for none."""
  flags = re.findall(r'--xla_force_host_platform_device_count=(\d+)',
                     os.environ.get('XLA_FLAGS', ''))
  return max(jax.config.jax_num_cpu_devices, *map(int, flags), -1)


# Programs that compile in less time are not kept. A run has about ten that take longer, and JAX's
# own default would compile most of them at each start.
_LEAST_COMPILE_S = 0.03
_JAX_LEAST_COMPILE_S = 1.0
# JAX's event, and the time from which on a compilation takes so much memory that a trim pays.
_COMPILED = '/jax/core/compile/backend_compile_duration'
_LONG_COMPILE_S = 1.0
# Threads and devices that this process has set; empty before.
_sizes: dict[str, int] = {}
# One pair, or none yet: what each machine of the run has, and the number of processes.
_machine: list[tuple[Machine, int]] = []


def machine() -> tuple[Machine, int]:
  """Returns what each machine of the run has, and the number of processes; see `join`.

  It is looked at once, so that all placements of a process are for the same machine, but the
  number of devices that JAX has started with may change.
  """
  if not _machine:
    _machine.append((machines.here(), 1))
  each, processes = _machine[0]
  return each._replace(devices=started_devices()), processes


def _give_back_memory(event: str, seconds: float, **_: Any) -> None:
  """Has the C library give back what a long compilation took and XLA has freed.

  Otherwise it stays with the process: 400 MB after the learner of Nature CNN was compiled.
  """
  if event == _COMPILED and seconds >= _LONG_COMPILE_S:
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)  # of the GNU C library only
    if trim:
      trim(0)


def _keep_programs() -> None:
  """Sets a cache folder for compiled programs, unless JAX has one already.

  The cache is not used if others could have put programs there, wherever the folder comes from; a
  line says so.
  """
  name = 'jax_persistent_cache_min_compile_time_secs'
  if name.upper() not in os.environ and getattr(jax.config, name) == _JAX_LEAST_COMPILE_S:
    jax.config.update(name, _LEAST_COMPILE_S)
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
                    'executed (see Trust in docs/runs.md)', danger, shorten(folder))
    jax.config.update('jax_enable_compilation_cache', False)


def _set_own_cache() -> None:
  """Sets a folder in the user's cache as that of compiled programs.

  Each kind of processor has its own, because code for one may not run on another. There is no
  folder if the user has no home or cannot write there; if it exists all the same, programs are read
  from it.
  """
  try:
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    folder = cache / 'podracer_jit' / stored_programs.processor()
    stored_programs.make_private(folder)
  except (RuntimeError, OSError):  # a RuntimeError means that the user has no home
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  if not os.access(folder, os.W_OK):
    jax.config.update('jax_persistent_cache_min_compile_time_secs', math.inf)


def join(coordinator_address: str | None, num_processes: int | None, process_id: int | None,
         timeout_s: int = 60) -> None:
  """Joins this process to the other processes of a run, and agrees with them on a machine.

  Call it before any use of a device, since the placement follows from what all machines have. JAX
  asks SLURM, Open MPI, Kubernetes or the TPU pod for arguments that are None. Process 0 listens at
  `coordinator_address` only. If that is None or JAX_COORDINATOR_BIND_ADDRESS is set, JAX decides
  where it listens.

  Args:
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
      # Under SLURM and Open MPI, JAX would give each process of a node one GPU.
      local_device_ids=list(range(machines.num_gpus())) or None,
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
    text = ' '.join(str(error).split())
    if None in arguments:
      text = ('without SLURM, Open MPI, Kubernetes or a TPU pod it needs --coordinator_address, '
              f'--num_processes and --process_id ({text.rstrip(".")})')
    raise ValueError(f'--distributed: {text}') from None
  _agree(max(1.0, deadline - time.monotonic()))


def _agree(timeout_s: float) -> None:
  """Sets the machine to what the machines of all processes have; see `_shares`.

  Args:
    timeout_s: seconds until all processes must have told what they have.

  Raises:
    ValueError: some have not.
  """
  state = distributed.global_state
  state.client.key_value_set(f'podracer_jit/machine/{state.process_id}',
                             json.dumps([socket.gethostname(), sorted(os.sched_getaffinity(0)),
                                         machines.here()]))
  deadline = time.monotonic() + timeout_s
  told = []
  for process in range(state.num_processes):
    left_s = max(1.0, deadline - time.monotonic())
    try:
      told.append(json.loads(state.client.blocking_key_value_get(
          f'podracer_jit/machine/{process}', int(left_s * 1000))))
    except RuntimeError:
      raise ValueError(f'--distributed: process {process} has joined but does not answer') from None
  _machine[:] = [(machines.smallest(_shares(told)), state.num_processes)]


def _shares(told: Sequence[tuple[str, Sequence[int], Sequence[Any]]]) -> Iterator[Machine]:
  """Yields what each process has: processes that may use the same CPUs share the cores.

  A launcher may give each process of a machine CPUs of its own, as SLURM's --cpus-per-task does.

  Args:
    told: for each process its host, the CPUs that it may use, and its `Machine`.
  """
  for host, cpus, fields in told:
    own = Machine(*fields)
    sharing = sum(host == other and not set(cpus).isdisjoint(theirs) for other, theirs, _ in told)
    if sharing == 1:
      yield own
      continue
    # Each has counted the others as load.
    share = max(1, own.allowed // sharing)
    yield own._replace(cores=share, near=min(own.near, share), busy=0)


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
