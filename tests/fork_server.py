"""The server of `tests.processes`: imports everything once, then forks a child for each command."""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys

MODULES = ('envpool', 'tensorboardX', *(
    f'podracer_jit.cli.{verb}' for verb in (
        'compare', 'evaluate', 'export', 'rerun', 'train')))


def serve(server: socket.socket) -> tuple[str, str, list[str]]:
  """Forks for each request; returns only in the children, with their commands.

  An intermediate process waits for the child and writes its id, then its exit code and its CPU
  seconds, to a pipe.
  """
  while True:
    head, files, _, _ = socket.recv_fds(server, 8, 4)
    if not head:
      os._exit(0)
    request = server.recv(int.from_bytes(head, 'little'), socket.MSG_WAITALL)
    if not os.fork():
      server.close()
      signal.signal(signal.SIGCHLD, signal.SIG_DFL)
      status = files.pop()
      child = os.fork()
      if not child:
        os.close(status)
        return _become(files, *json.loads(request))
      for file in files:
        os.close(file)
      for own in range(3):  # else these copies would keep a pipe of the child open
        os.close(own)
      os.write(status, f'{child}\n'.encode())
      _, code, used = os.wait4(child, 0)
      cpu_s = used.ru_utime + used.ru_stime
      os.write(status, f'{os.waitstatus_to_exitcode(code)} {cpu_s}\n'.encode())
      os._exit(0)
    for file in files:
      os.close(file)


def _become(files, kind, what, arguments, folder):
  """Gives this process the files, signal handlers and folder of a newly started command."""
  for own, given in enumerate(files):
    os.dup2(given, own)
  for given in files:
    if given > 2:
      os.close(given)
  signal.signal(signal.SIGINT, signal.default_int_handler)
  for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
  os.chdir(folder)
  return kind, what, arguments


def main() -> None:
  server = socket.socket(fileno=int(sys.argv[1]))
  for number in (signal.SIGINT, signal.SIGCHLD):  # ends of its children do not concern the server
    signal.signal(number, signal.SIG_IGN)
  gc.disable()
  for name in MODULES:
    importlib.import_module(name)
  from jax._src import xla_bridge
  assert not xla_bridge.backends_are_initialized()  # a fork does not copy its threads
  gc.freeze()  # so that collections in the children do not copy the server's pages
  kind, what, arguments = serve(server)
  gc.enable()
  if kind == '-m':
    sys.argv = [what, *arguments]
    runpy.run_module(what, run_name='__main__', alter_sys=True)
  else:
    sys.argv = ['-c', *arguments]
    exec(compile(what, '<string>', 'exec'), {'__name__': '__main__'})


if __name__ == '__main__':
  main()
