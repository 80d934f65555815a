"""Trains members of a sweep as processes on this machine, each on cores of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from podracer_jit.runtime import children, machine
from podracer_jit.sweep.members import Member

# Variables by which a user may divide the memory of a GPU.
_MEMORY_OF_GPU = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION',
                  'XLA_PYTHON_CLIENT_PREALLOCATE', 'XLA_PYTHON_CLIENT_ALLOCATOR')
_SHARED = 0.9  # of a GPU's memory, for all members on it
LOGS = 'logs'  # in the folder of a sweep: what each member prints


class Slot(NamedTuple):
  """The part of the machine that a member gets."""

  cpus: Sequence[int]  # none: those of this process
  gpu: int | None = None


class _Job(NamedTuple):
  member: Member
  slot: Slot
  process: subprocess.Popen


def slots_of(jobs: int | None, cpus: Sequence[int], gpus: int) -> list[Slot]:
  """Divides a machine into parts for members.

  Small runs gain more from a core of their own than from a second one, so each core is a part; with
  GPUs, each GPU is one.

  Args:
    jobs: number of parts; None: as many as there are cores or GPUs.
    cpus: that may be used.
    gpus: that the machine has; one member at a time uses a GPU.
  """
  count = jobs or gpus or len(cpus)
  if count == 1:
    return [Slot(())]
  return [Slot(tuple(cpus[i::count]) or (cpus[i % len(cpus)],), i % gpus if gpus else None)
          for i in range(count)]


def slots(jobs: int | None) -> list[Slot]:
  """Returns the parts of this machine; see `slots_of`."""
  return slots_of(jobs, sorted(os.sched_getaffinity(0)), machine.num_gpus())


class Local:
  """Processes of members."""

  def __init__(self, out: Path, slots: Sequence[Slot]):
    """Begins without any process.

    Args:
      out: the folder of the sweep.
      slots: one for each member that may run at once.
    """
    self._out = out
    self._slots = slots
    self.room = len(slots)  # members that may run at once
    self._free = list(slots)
    self._jobs: list[_Job] = []

  @property
  def running(self) -> list[Member]:
    """The members that have a process."""
    return [job.member for job in self._jobs]

  @property
  def has_room(self) -> bool:
    """Whether a member could begin."""
    return bool(self._free)

  def begin(self, member: Member) -> None:
    """Starts the process of a member.

    Raises:
      OSError: its log cannot be written, or no process can be made.
    """
    path = log_of(self._out, member)
    path.parent.mkdir(exist_ok=True)
    slot = self._free[0]
    gpu = {} if slot.gpu is None else self._variables(slot.gpu)
    with path.open('ab') as log:
      process = children.start([*member.arguments(), f'--workdir={self._out / member.name}'],
                               slot.cpus, stdout=log, stderr=subprocess.STDOUT,
                               stdin=subprocess.DEVNULL, env=os.environ | gpu)
    del self._free[0]
    self._jobs.append(_Job(member, slot, process))

  def ended(self) -> Iterator[tuple[Member, int]]:
    """Yields the members that have ended since the last call, and their exit codes."""
    for job in list(self._jobs):
      code = job.process.poll()
      if code is not None:
        self._jobs.remove(job)
        self._free.append(job.slot)
        yield job.member, code

  def stop(self, member: Member | None = None) -> None:
    """Asks a member to save and end; None: all."""
    self._send(signal.SIGTERM, member)

  def close(self, grace_s: float = 0.0) -> None:
    """Ends all processes.

    Args:
      grace_s: seconds that they have to end by themselves.
    """
    deadline = time.monotonic() + grace_s
    while self._jobs and time.monotonic() < deadline:
      time.sleep(0.1)
      list(self.ended())
    self._send(signal.SIGKILL, None)
    for job in self._jobs:
      job.process.wait()

  def _variables(self, gpu: int) -> dict[str, str]:
    """Returns the environment variables of a member on a GPU."""
    variables = {'CUDA_VISIBLE_DEVICES': _visible(gpu)}
    members = sum(slot.gpu == gpu for slot in self._slots)
    if members > 1 and not any(name in os.environ for name in _MEMORY_OF_GPU):
      # By default, JAX takes three quarters of a GPU's memory when it starts.
      variables[_MEMORY_OF_GPU[0]] = f'{_SHARED / members:.3f}'
    return variables

  def _send(self, number: int, member: Member | None) -> None:
    for job in self._jobs:
      if member in (None, job.member) and job.process.poll() is None:
        job.process.send_signal(number)


def log_of(out: Path, member: Member) -> Path:
  """Returns the file with what a member printed."""
  return out / LOGS / f'{member.name}.log'


def last_line(path: Path) -> str:
  """Returns the last line of a log that is not empty; '' without one."""
  try:
    with path.open('rb') as file:
      file.seek(max(0, path.stat().st_size - 10_000))
      lines = file.read().decode(errors='replace').split('\n')
  except OSError:
    return ''
  return next((line.strip() for line in reversed(lines) if line.strip()), '')


def _visible(gpu: int) -> str:
  """Returns the name of a GPU of this process for CUDA_VISIBLE_DEVICES."""
  named = os.environ.get('CUDA_VISIBLE_DEVICES')
  return named.split(',')[gpu] if named else str(gpu)
