"""Where the processes of a run meet: an address that is checked before JAX, which would abort."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import time
from pathlib import Path

from absl import logging

FLAG = '--coordinator_address'
_RETRY_S = 0.2
_LISTENING = '0A'  # as /proc/net/tcp has it


def parse_address(address: str) -> tuple[str, int]:
  """Returns the host and the port of 'HOST:PORT' or '[IPV6]:PORT'.

  Raises:
    ValueError: it has not this form, or the port is not from 1 to 65535.
  """
  match = re.fullmatch(r'(?:\[([^\[\]\s]+)\]|([^\[\]:\s]+)):([0-9]{1,5})', address)
  if not match or not 1 <= int(match[3]) <= 65535:
    raise ValueError(f'{FLAG}: must be HOST:PORT with a port from 1 to 65535, or '
                     f'[IPV6]:PORT, got {address!r}')
  return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
  """Returns 'HOST:PORT', or '[IPV6]:PORT'."""
  return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def bind_address(address: str) -> str:
  """Returns the address of this machine at which process 0 is to listen, which was free just now.

  It is the one given: who cannot reach it cannot join the run. But where a name stands for a
  loopback address, as Debian has it for a machine's own name, other machines know it by another
  address. Then process 0 listens on all.

  Raises:
    ValueError: no such name or address on this machine, or the port is in use.
  """
  host, port = parse_address(address)
  try:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except OSError as error:
    raise ValueError(f'{FLAG}: {host} is not known on this machine ({_reason(error)})') from None
  candidates = {sockaddr[0]: (family, sockaddr) for family, _, _, _, sockaddr in infos}
  if host != 'localhost' and host not in candidates and all(
      ipaddress.ip_address(ip).is_loopback for ip in candidates):
    logging.warning('%s: %s is %s on this machine, so process 0 listens on all its addresses', FLAG,
                    host, ', '.join(candidates))
    candidates = {'::': (socket.AF_INET, ('0.0.0.0', port))}  # without IPv6, gRPC takes the latter

  errors = []
  for ip, (family, sockaddr) in candidates.items():
    try:
      _refuse_port_in_use(family, sockaddr)
      return join_address(ip, port)
    except OSError as error:
      errors.append(error)
  raise ValueError(
      f'{FLAG}: {address} cannot be bound on this machine ({_reason(errors[0])}); process 0 needs '
      'an address of its own machine, or JAX_COORDINATOR_BIND_ADDRESS')


def _reason(error: OSError) -> str:
  return error.strerror or str(error)


def _refuse_port_in_use(family: int, sockaddr: tuple) -> None:
  """Raises where process 0 could not listen, or would not be alone.

  gRPC shares its port (SO_REUSEPORT) with any process of the same user that does likewise, so two
  runs would get each other's processes: nobody may listen. A port that is only bound, as `launch`
  reserves one, is free.

  Raises:
    ValueError: the port is in use.
    OSError: the address cannot be bound for another reason.
  """
  ip, port = sockaddr[:2]
  with socket.socket(family) as probe:
    for sharing in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as gRPC has it
      probe.setsockopt(socket.SOL_SOCKET, sharing, 1)
    try:
      probe.bind(sockaddr)
      in_use = False
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise
      in_use = True
  if in_use or _connect_error(ip, port, timeout_s=1.0) is None:
    raise ValueError(f'{FLAG}: port {port} of {ip} is in use on this machine'
                     f'{_by_process(port)}; choose another')


def _by_process(port: int) -> str:
  """Returns ' by process PID (NAME)' of who listens on a port, or '' where /proc does not say."""
  inodes = set()
  for table in ('/proc/net/tcp', '/proc/net/tcp6'):
    with contextlib.suppress(OSError):
      for line in Path(table).read_text().splitlines()[1:]:
        _, local, _, state, *others = line.split()
        if state == _LISTENING and int(local.rpartition(':')[2], 16) == port:
          inodes.add(f'socket:[{others[5]}]')
  for descriptor in Path('/proc').glob('[0-9]*/fd/*'):
    with contextlib.suppress(OSError):  # of another user, or it has ended meanwhile
      if os.readlink(descriptor) in inodes:
        process = descriptor.parents[1]
        return f' by process {process.name} ({(process / "comm").read_text().strip()})'
  return ''


def _connect_error(host: str, port: int, timeout_s: float) -> OSError | None:
  """Returns why nobody answers at an address, or None if somebody does."""
  try:
    with socket.create_connection((host, port), timeout_s) as connection:
      # The kernel may give a connection the port that it connects to: then it talks to itself.
      if connection.getsockname() == connection.getpeername():
        return ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
  except OSError as error:
    return error
  return None


def wait_until_reachable(address: str, timeout_s: float) -> None:
  """Waits until process 0 listens, since JAX aborts a process that cannot reach it.

  Raises:
    ValueError: nobody answers at the address within the time.
  """
  host, port = parse_address(address)
  deadline = time.monotonic() + timeout_s
  while (error := _connect_error(host, port, max(_RETRY_S, deadline - time.monotonic()))):
    if time.monotonic() + _RETRY_S > deadline:
      raise ValueError(f'{FLAG}: {address} did not answer within {timeout_s:.0f} s '
                       f'({_reason(error)}); is process 0 running there, and is the port open?')
    time.sleep(_RETRY_S)
