"""What must be set before JAX starts, and how the processes of a run find each other."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from podracer_jit.options import shown
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
         process_id: int | None) -> None:
  """Joins this process to the others of a run; after `prepare_host`, before any device is used.

  Where something is not given, SLURM, Open MPI, Kubernetes and TPU pods are asked (JAX knows how).

  Raises:
    ValueError: there is no such surrounding, or the others did not come.
  """
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM from `main`
  given = (coordinator_address, num_processes, process_id)
  # Not one device for each process of a node, as JAX has it under SLURM and Open MPI.
  visible = list(range(options.num_devices))
  try:
    jax.distributed.initialize(
        *given, local_device_ids=visible, initialization_timeout=120,
        heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20)
  except (ValueError, RuntimeError) as error:
    hint = '' if None not in given else (
        '; without SLURM, Open MPI, Kubernetes or a TPU pod give --coordinator_address, '
        '--num_processes and --process_id')
    raise ValueError(f'--distributed: {" ".join(str(error).split())}{hint}') from None


def barrier(name: str) -> None:
  """Waits until every process is here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)
