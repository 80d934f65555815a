"""What must be set before JAX starts, and how the processes of a run find each other."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from podracer_jit.options import shown
from podracer_jit.runtime import coordinator
from podracer_jit.runtime.placement import PlacementOptions


def prepare_host(options: PlacementOptions) -> None:
  """Sets what JAX reads when its first backend starts; call it before that.

  The size of XLA's CPU thread pool decides how reductions are split, so it belongs to the
  experiment: it must not follow the cores or the virtual devices that happen to be here.

  Raises:
    ValueError: more devices than `placement.xla_threads`.
  """
  devices = options.num_devices
  threads = options.xla_threads
  if devices > threads:
    field = 'actor_devices'
    if max(options.learner_devices) > max(options.actor_devices):
      field = 'learner_devices'
    name = field if options.differs(field) else 'xla_threads'
    raise ValueError(f'placement.{name}: {field} = {shown(getattr(options, field))} needs '
                     f'{devices} devices in a process, xla_threads = {threads} allows {threads}; '
                     f'take device indices below {threads}, or xla_threads = {devices}')
  os.environ['NPROC'] = str(threads)
  jax.config.update('jax_num_cpu_devices', devices)
  _keep_programs()


def _keep_programs() -> None:
  """Compiled programs are found again by the next run, unless JAX was told where to put them.

  In the user's cache, by processor, since code for one may not run on another.
  """
  if jax.config.jax_compilation_cache_dir is not None:
    return
  lines = Path('/proc/cpuinfo').read_text().splitlines()
  features = sorted({x for x in lines if x.startswith(('model name', 'flags', 'Features'))})
  processor = hashlib.sha256('\n'.join(features).encode()).hexdigest()[:12]
  cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
  jax.config.update('jax_compilation_cache_dir', str(cache / 'podracer_jit' / processor))


def join(options: PlacementOptions, coordinator_address: str | None, num_processes: int | None,
         process_id: int | None, timeout_s: int = 60) -> None:
  """Joins this process to the others of a run; after `prepare_host`, before any device is used.

  Where something is not given, SLURM, Open MPI, Kubernetes and TPU pods are asked (JAX knows how).
  Process 0 listens at the address given alone; where none is given, or
  JAX_COORDINATOR_BIND_ADDRESS says otherwise, JAX decides.

  Args:
    options: of the placement.
    coordinator_address: HOST:PORT of process 0.
    num_processes: how many there are.
    process_id: which this is, from 0.
    timeout_s: how long it may take until all processes have come, in seconds.

  Raises:
    ValueError: a value is wrong, process 0 cannot listen or be reached, there is no such
      surrounding, or the others did not come.
  """
  _check_numbers(num_processes, process_id, timeout_s)
  given = (coordinator_address, num_processes, process_id)
  coordinator_address = coordinator_address or os.environ.get('JAX_COORDINATOR_ADDRESS')
  deadline = time.monotonic() + timeout_s
  bind_address = None
  if coordinator_address is not None:
    coordinator.parse_address(coordinator_address)
    if process_id == 0 and 'JAX_COORDINATOR_BIND_ADDRESS' not in os.environ:
      bind_address = coordinator.bind_address(coordinator_address)
    elif process_id:
      coordinator.wait_until_reachable(coordinator_address, timeout_s)
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM from `main`
  initialize = functools.partial(
      jax.distributed.initialize, coordinator_address, num_processes, process_id,
      # Not one device for each process of a node, as JAX has it under SLURM and Open MPI.
      local_device_ids=list(range(options.num_devices)),
      coordinator_bind_address=bind_address,
      # JAX aborts the process when this time is over; by then `join` has raised.
      initialization_timeout=timeout_s + 600,
      heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20)
  try:
    _call_until(deadline, initialize)
  except TimeoutError:
    count = 'all' if num_processes is None else f'all {num_processes}'
    where = '' if coordinator_address is None else f' to {coordinator_address}'
    raise ValueError(f'--distributed: not {count} processes came{where} within {timeout_s} s '
                     '(--coordinator_timeout_s)') from None
  except (ValueError, RuntimeError) as error:
    hint = '' if None not in given else (
        '; without SLURM, Open MPI, Kubernetes or a TPU pod give --coordinator_address, '
        '--num_processes and --process_id')
    raise ValueError(f'--distributed: {" ".join(str(error).split())}{hint}') from None


def _check_numbers(num_processes: int | None, process_id: int | None, timeout_s: int) -> None:
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
  """Calls a function that nothing can interrupt, on a thread of its own.

  Raises:
    TimeoutError: it has not returned by `deadline`; its thread goes on.
    BaseException: what the function raises.
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
  """Waits until every process is here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def of_process_0(number: int | None) -> int | None:
  """Returns in every process what process 0 was given: a number that is not negative, or None."""
  if jax.process_count() == 1:
    return number
  sent = np.int32(-1 if number is None else number)
  received = int(multihost_utils.broadcast_one_to_all(sent))
  return None if received < 0 else received
