"""Runs one training as several processes on this machine.

  podracer_jit launch -n 2 -- --config=configs/impala_catch.py --config.num_shards=2 \\
      --config.num_grad_shards=2 --workdir=runs/x

`-n numa` starts a process for each NUMA node of the machine, on the node's cores. Linux places
memory on the node that first writes it, so environments have theirs on the node of their threads.

Each process gets the flags after --. Device indices of the placement count the devices of one
process: with -n 2 and one learner device, the learner mesh has two devices. SIGINT, SIGTERM and
SIGHUP are passed on to the processes. If the launcher is killed, its processes get a SIGTERM. If a
process fails, the others end, too. The command is for CPUs, since one process uses all GPUs of a
machine.

Exit code: 0 if all processes have finished, 3 if a signal has stopped them, 2 if the arguments are
wrong; else the exit code of the process that failed first.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import IO

from podracer_jit.cli import verb
from podracer_jit.errors import FINISHED, STOPPED, Refused
from podracer_jit.runtime import children, machine
from podracer_jit.runtime.output import say
from podracer_jit.training import stopping

# The other processes notice a failure themselves and print it. After this time they are killed.
GRACE_S = 25.0


@verb
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  before = argv[1:argv.index('--')] if '--' in argv else argv[1:]
  if set(before) & {'-h', '--help'}:
    print(__doc__)
    return 0
  count = argv[2] if len(argv) > 4 and argv[1] == '-n' and argv[3] == '--' else ''
  if count != 'numa' and not (count.isdecimal() and int(count)):
    raise Refused('the number of processes, or numa, and the flags of training are needed: '
                  'podracer_jit launch -n 2 -- --config=... --workdir=...')
  # An empty set leaves a process all CPUs of this one.
  cpus = machine.numa_nodes() if count == 'numa' else [()] * int(count)

  # The port stays bound until the end, so that no other launch gets it. Process 0 can still listen
  # at it, since gRPC sets SO_REUSEPORT.
  reserved = socket.socket()
  reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
  reserved.bind(('127.0.0.1', 0))
  port = reserved.getsockname()[1]
  together = ['--distributed', f'--coordinator_address=127.0.0.1:{port}',
              f'--num_processes={len(cpus)}']
  processes = [
      children.start([*argv[4:], *together, f'--process_id={i}'], cpus_of_process,
                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace')
      for i, cpus_of_process in enumerate(cpus)]
  for number in stopping.numbers():
    signal.signal(number, lambda number, frame: _send(processes, number))
  readers = [threading.Thread(target=_print_lines, args=(i, p.stdout), daemon=True)
             for i, p in enumerate(processes)]
  for reader in readers:
    reader.start()
  code = _wait(processes)
  # A child of a process may keep the pipe open, so the readers get a limited time to end.
  for reader in readers:
    reader.join(5.0)
  reserved.close()
  return code


def _print_lines(i: int, lines: IO[str]) -> None:
  """Prints the lines of process i, with its index before each."""
  for line in lines:
    say(f'[{i}] {line.rstrip()}')


def _send(processes: Sequence[subprocess.Popen], number: int) -> None:
  """Sends a signal to the processes that still run."""
  for process in processes:
    if process.poll() is None:
      process.send_signal(number)


def _wait(processes: Sequence[subprocess.Popen]) -> int:
  """Waits for all processes; kills the others GRACE_S after one has failed.

  Returns:
    The exit code of the process that failed first, or else of a process that was stopped, or 0.
  """
  code = 0
  deadline = float('inf')
  while any(process.poll() is None for process in processes):
    time.sleep(0.1)
    failed = {i: p.returncode for i, p in enumerate(processes)
              if p.poll() not in (None, FINISHED, STOPPED)}
    if failed and not code:
      # Exit codes of signals are negative. A killed process counts before the processes that failed
      # because of it.
      i = min(failed, key=failed.get)
      code = failed[i]
      deadline = time.monotonic() + GRACE_S
      say(f'[{i}] ended with exit code {code}; the others cannot go on')
    if time.monotonic() > deadline:
      _send(processes, signal.SIGKILL)
  code = code or next((p.returncode for p in processes if p.returncode), 0)
  # A signal counts as in a shell: 2 and 3 already mean refused and stopped.
  return 128 - code if code < 0 else code
