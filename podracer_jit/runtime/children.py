"""Starts commands of the package as processes that end with this one."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import Any

from podracer_jit.errors import INTERRUPTED

# Loaded here, since little may be done between fork and exec, where it is used.
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def python() -> list[str]:
  """Returns the command of this Python, which imports from where this process does.

  Without -P, the current folder would come before all other modules.
  """
  return [sys.executable, *([] if {'', os.getcwd()} & set(sys.path) else ['-P'])]


def start(arguments: Sequence[str], cpus: Collection[int] = (), **options: Any
          ) -> subprocess.Popen:
  """Starts `podracer_jit ARGUMENTS` with this Python, in a session of its own.

  A terminal's Ctrl-C does not reach the process. It gets SIGTERM when this process ends, however it
  ends.

  Args:
    arguments: of the command.
    cpus: the CPUs that it may use; none: those of this process.
    **options: of subprocess.Popen.
  """
  return subprocess.Popen([*python(), '-m', 'podracer_jit', *arguments],
                          start_new_session=True,
                          preexec_fn=functools.partial(_prepare, os.getpid(), set(cpus)), **options)


def end_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
  """Lets the kernel send this process a signal when its parent ends, however it ends.

  Args:
    parent: its process id. If it has ended before the call, this process ends, too.
    by: the signal.
  """
  _LIBC.prctl(_PR_SET_PDEATHSIG, int(by))
  if os.getppid() != parent:
    os._exit(INTERRUPTED)


def _prepare(parent: int, cpus: Collection[int]) -> None:
  """Prepares the new process, between fork and exec.

  Args:
    parent: its process id. If it has ended before the call, this process ends, too.
    cpus: see `start`.
  """
  end_with_parent(parent, signal.SIGTERM)
  if cpus:
    os.sched_setaffinity(0, cpus)
