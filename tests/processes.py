"""Starts commands of the package without the seconds that Python takes to import everything.

A server process imports everything once and then waits. For each command it forks: the child has
its own process id, files, signals and exit code, as `subprocess.Popen` would give it. Tests of what
happens at start-up, or of other environment variables, start Python itself.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys

from tests.runs import QUICK


class Popen(subprocess.Popen):
  """A `subprocess.Popen` of `python -m MODULE ...` or `python -c PROGRAM ...`.

  It runs with the environment QUICK and with Python's own signal handlers, as a terminal would
  start it.
  """

  def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
    del executable, close_fds
    # After `startupinfo, creationflags, shell` come pairs of pipe ends: p2c is parent to child, c2p
    # is child to parent.
    _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_ = rest
    assert env in (None, QUICK) and not shell and not preexec_fn and not pass_fds
    python, *words = [os.fspath(arg) for arg in args]
    assert python == sys.executable
    words = [word for word in words if word != '-P'] if words[0] == '-P' else words
    kind, what, *arguments = words
    assert kind in ('-m', '-c')

    status, status_of_child = os.pipe()
    files = [own if given == -1 else given
             for own, given in enumerate((p2cread, c2pwrite, errwrite))]
    request = json.dumps([kind, what, arguments, str(cwd or os.getcwd())]).encode()
    server = _server()
    socket.send_fds(server, [len(request).to_bytes(8, 'little')], [*files, status_of_child])
    server.sendall(request)
    os.close(status_of_child)

    self._status = os.fdopen(status)
    self.pid = int(self._status.readline())
    self._child_created = True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

  def _internal_poll(self, *_, **__):
    if self.returncode is None and select.select([self._status], [], [], 0)[0]:
      self._ended()
    return self.returncode

  def _wait(self, timeout):
    if self.returncode is None:
      if not select.select([self._status], [], [], timeout)[0]:
        raise subprocess.TimeoutExpired(self.args, timeout)
      self._ended()
    return self.returncode

  def _ended(self):
    global _cpu_s
    code, cpu_s = self._status.readline().split()
    self.returncode = int(code)
    _cpu_s += float(cpu_s)
    self._status.close()


def run(command, timeout=300, **kwargs):
  """Returns what `subprocess.run` would, with the output as text."""
  kwargs = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | kwargs
  with Popen(command, **kwargs) as process:
    try:
      out, errors = process.communicate(timeout=timeout)
    except BaseException:
      process.kill()
      raise
  return subprocess.CompletedProcess(command, process.returncode, out, errors)


@contextlib.contextmanager
def start_together(count, *args):
  """Starts one training as several processes, each with the flags `args`; kills them at the end.

  `podracer_jit launch` does the same with processes that import everything anew. Tests that are not
  about `launch` use this function.
  """
  with socket.socket() as reserved:  # bound until the end, so that nobody else gets the port
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(('127.0.0.1', 0))
    flags = ['--distributed', f'--coordinator_address=127.0.0.1:{reserved.getsockname()[1]}',
             f'--num_processes={count}']
    processes = [Popen(command(*args, *flags, f'--process_id={i}'), stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, text=True) for i in range(count)]
    try:
      yield processes
    finally:
      for process in processes:
        process.kill()
        process.stdout.close()


def together(count, *args, timeout=300):
  """Runs one training as several processes; returns what `subprocess.run` would for each."""
  with start_together(count, *args) as processes:
    outputs = [process.communicate(timeout=timeout)[0] for process in processes]
  return [subprocess.CompletedProcess(process.args, process.returncode, output)
          for process, output in zip(processes, outputs, strict=True)]


def command(*args):
  """Returns the command line of `podracer_jit ARGS`, with this Python."""
  return [sys.executable, '-P', '-m', 'podracer_jit', *map(str, args)]


@contextlib.contextmanager
def as_a_user_that_is_not_root():
  """Root may write everywhere; leaves that to the name of this process for a while."""
  if os.geteuid():
    yield
    return
  os.seteuid(65534)
  try:
    yield
  finally:
    os.seteuid(0)


def default_signals():
  """Sets the signal handlers of a program in a terminal; background jobs have signals ignored."""
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)


def cpu_s_of_commands():
  """Returns the CPU seconds of all commands of this process that have ended."""
  return _cpu_s


_servers = {}
_cpu_s = 0.0


def _server():
  """Returns the socket of this process's server, which ends with this process."""
  if os.getpid() not in _servers:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, '-P', '-m', 'tests.fork_server',
                                str(theirs.fileno())],
                               env=QUICK | {'PYTHONPATH': os.pathsep.join(sys.path)},
                               pass_fds=[theirs.fileno()], start_new_session=False)
    theirs.close()
    _servers[os.getpid()] = ours
    atexit.register(_end, ours, process)
  return _servers[os.getpid()]


def _end(server, process):
  server.close()
  try:
    process.wait(timeout=10)
  except subprocess.TimeoutExpired:
    process.send_signal(signal.SIGKILL)
