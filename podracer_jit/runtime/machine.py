"""The machine of this process: the cores and the memory that it may use, its GPUs and TPUs."""

from __future__ import annotations

import collections
import importlib.util
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_CPUS = Path('/sys/devices/system/cpu')
_GROUPS = Path('/sys/fs/cgroup')


class Machine(NamedTuple):
  """Resources to which a placement is fitted."""

  cores: int  # that this process may use and that others leave idle, at least 1
  near: int  # the most cores, idle or not, that share a cache (of the third level)
  gpus: int = 0
  devices: int | None = None  # CPU devices with which JAX has started; None: it has not
  tpus: int = 0
  busy: int = 0  # further cores that this process may use, which others keep busy

  @property
  def allowed(self) -> int:
    """The cores that this process may use, idle or not."""
    return self.cores + self.busy

  @property
  def accelerators(self) -> int:
    """The devices that learn, if they are not CPUs."""
    return self.gpus or self.tpus


def here(devices: int | None = None) -> Machine:
  """Returns this machine as it is now.

  Args:
    devices: CPU devices with which JAX has started; None: it has not.
  """
  # Two hardware threads of a core share its units of arithmetic, so they count once.
  cores = {_shared(cpu, 'topology/thread_siblings_list') or cpu: cpu
           for cpu in os.sched_getaffinity(0)}.values()
  by_cache = collections.Counter(_shared(cpu, 'cache/index3/shared_cpu_list') for cpu in cores)
  # Others may have their own share of what a control group leaves.
  allowed = max(1, math.floor(min(len(cores), quota())))
  usable = max(1, min(allowed, len(cores) - _load_of_others(len(cores) / 2)))
  return Machine(usable, min(allowed, max(by_cache.values())), num_gpus(), devices,
                 num_tpus(), allowed - usable)


def _shared(cpu: int, file: str) -> str:
  """Returns the CPUs that share a resource with this one, as Linux writes them; '' if unknown."""
  try:
    return (_CPUS / f'cpu{cpu}' / file).read_text().strip()
  except OSError:
    return ''


def quota(groups: Path = _GROUPS, own: Path = Path('/proc/self/cgroup')) -> float:
  """Returns the cores that control groups allow this process; infinity if they set no limit.

  Args:
    groups: where Linux mounts the control groups.
    own: the file that names the groups of this process.
  """
  try:
    lines = own.read_text().splitlines()
  except OSError:
    return math.inf
  least = math.inf
  for line in lines:
    _, controllers, path = line.split(':', 2)
    if controllers and 'cpu' not in controllers.split(','):
      continue
    root = groups / 'cpu' if controllers else groups
    # A container may see its own group as the root. Groups above may have lower limits.
    folder = Path(path.lstrip('/'))
    for group in (root, *(root / part for part in (folder, *folder.parents))):
      least = min(least, _limit(group))
  return least


def _limit(group: Path) -> float:
  """Returns the cores that one control group allows, of version 2 or 1."""
  for names in (('cpu.max',), ('cpu.cfs_quota_us', 'cpu.cfs_period_us')):
    try:
      used, period = ' '.join((group / name).read_text() for name in names).split()
      if used != 'max' and float(used) > 0:
        return float(used) / float(period)
    except (OSError, ValueError):
      continue
  return math.inf


class _Times(NamedTuple):
  """Seconds since the machine has started, at one time."""

  elapsed: float
  busy: float  # of all CPUs that this process sees, together
  own: float  # of these, what this process has used


def _times() -> _Times | None:
  """Returns the times until now; None if Linux does not tell them."""
  tick = os.sysconf('SC_CLK_TCK')
  busy = 0.0
  visible = {f'cpu{cpu}' for cpu in os.sched_getaffinity(0)}
  try:
    for line in Path('/proc/stat').read_text().splitlines():
      name, *fields = line.split()
      if name in visible:
        user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
        busy += (user + nice + system + irq + softirq + steal) / tick
  except (OSError, ValueError):
    return None
  return _Times(time.monotonic(), busy, time.process_time())


def _load_of_others(most: float) -> int:
  """Returns the cores that other processes have kept busy since this module was imported.

  A core counts if it was busy for three quarters of that time, which may be a second or two: a
  short command must not halve the devices of a long run.

  Args:
    most: upper bound of the result: a load that is soon over must not take more from a long run.
  """
  now = _times()
  # Linux counts in hundredths of a second.
  if not (now and _FIRST) or now.elapsed - _FIRST.elapsed < _LEAST_S:
    return 0
  elapsed, busy, own = (b - a for a, b in zip(_FIRST, now, strict=True))
  return math.floor(min((busy - own) / elapsed + 0.25, most)) if busy > own else 0


_LEAST_S = 0.3
_FIRST = _times()


def num_gpus() -> int:
  """Returns the number of NVIDIA GPUs that JAX will see; starts nothing."""
  platforms = os.environ.get('JAX_PLATFORMS', '')
  if platforms and not {'cuda', 'gpu'} & set(platforms.split(',')):
    return 0
  if not any(importlib.util.find_spec(f'jax_cuda{version}_plugin') for version in (12, 13)):
    return 0
  named = os.environ.get('CUDA_VISIBLE_DEVICES')
  if named is not None:
    return _before_invalid(named.split(','))
  return len([x for x in Path('/dev').glob('nvidia*') if x.name.removeprefix('nvidia').isdigit()])


def num_tpus() -> int:
  """Returns the number of TPU chips that JAX will see; starts nothing."""
  platforms = os.environ.get('JAX_PLATFORMS', '')
  if platforms and 'tpu' not in platforms.split(',') or not importlib.util.find_spec('libtpu'):
    return 0
  from jax._src import hardware_utils  # noqa: PLC0415 - private, so only where it is needed
  return hardware_utils.num_available_tpu_chips_and_device_id()[0]


def _before_invalid(names: Iterable[str]) -> int:
  """Returns the number of CUDA's devices that are listed before the first invalid name."""
  count = 0
  for name in names:
    if not name.strip() or name.strip() == '-1':
      break
    count += 1
  return count


def hardware() -> dict[str, Any]:
  """Returns the processor's name, the hardware threads of this process and its memory in bytes."""
  names = [value.strip() for name, _, value in (line.partition(':') for line in
                                                _lines(Path('/proc/cpuinfo')))
           if name.strip() == 'model name']
  return {'processor': names[0] if names else platform.machine(),
          'threads': len(os.sched_getaffinity(0)), 'memory': host_memory()}


def numa_nodes(root: Path = Path('/')) -> list[set[int]]:
  """Returns the CPUs that this process may use, for each NUMA node that has any.

  Args:
    root: the folder of /sys.
  """
  allowed = os.sched_getaffinity(0)
  folders = (root / 'sys/devices/system/node').glob('node[0-9]*')
  nodes = [_cpus(''.join(_lines(folder / 'cpulist'))) & allowed
           for folder in sorted(folders, key=lambda folder: int(folder.name.removeprefix('node')))]
  return [cpus for cpus in nodes if cpus] or [allowed]


def _cpus(ranges: str) -> set[int]:
  """Returns the CPUs of a list as Linux writes it, such as '0-3,8'; of an empty one, none."""
  bounds = [tuple(map(int, part.split('-'))) for part in ranges.split(',') if part]
  return {cpu for bound in bounds for cpu in range(bound[0], bound[-1] + 1)}


def resident_memory() -> int:
  """Returns the bytes of memory that this process occupies; its children are not counted."""
  pages = int(Path('/proc/self/statm').read_text().split()[1])
  return pages * os.sysconf('SC_PAGE_SIZE')


def host_memory(root: Path = Path('/')) -> int | None:
  """Returns the bytes that this process may use: the machine's memory, or a cgroup's lower limit.

  Args:
    root: the folder of /proc and /sys.
  """
  limits = [*_cgroup_limits(root), *_machine_memory(root)]
  return min(limits, default=None)


def _machine_memory(root: Path) -> Iterator[int]:
  """Yields the bytes of the machine's memory, if they are known."""
  for line in _lines(root / 'proc/meminfo'):
    name, _, value = line.partition(':')
    if name == 'MemTotal':
      yield int(value.split()[0]) * 1024  # kB


def _cgroup_limits(root: Path) -> Iterator[int]:
  """Yields the limits of this process's cgroup and of its parents, for versions 2 and 1."""
  mount = root / 'sys/fs/cgroup'
  for line in _lines(root / 'proc/self/cgroup'):
    _, controllers, path = line.split(':', 2)
    if controllers == '':
      folders = [mount, mount / 'unified']
      file = 'memory.max'
    elif 'memory' in controllers.split(','):
      folders = [mount / 'memory']
      file = 'memory.limit_in_bytes'
    else:
      continue
    # In a container, the path may belong to the machine outside. Missing files are skipped.
    steps = [step for step in path.split('/') if step not in ('', '..')]
    for folder in folders:
      for depth in range(len(steps) + 1):
        for text in _lines(folder.joinpath(*steps[:depth], file)):
          if text != 'max':
            yield int(text)


def _lines(path: Path) -> list[str]:
  """Returns the lines of a file; none if it cannot be read."""
  try:
    return path.read_text().split('\n')[:-1]
  except OSError:
    return []


def smallest(machines: Iterable[Machine]) -> Machine:
  """Returns what each of several machines has."""
  machines = list(machines)
  devices = [machine.devices for machine in machines if machine.devices is not None]
  cores = min(machine.cores for machine in machines)
  return Machine(cores, min(machine.near for machine in machines),
                 min(machine.gpus for machine in machines), min(devices, default=None),
                 min(machine.tpus for machine in machines),
                 min(machine.allowed for machine in machines) - cores)
