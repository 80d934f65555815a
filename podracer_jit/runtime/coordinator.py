"""Checks of the coordinator's address, at which the processes of a run meet.

JAX aborts a process that cannot reach the coordinator, so the address is checked before.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import re
import socket
import time
from pathlib import Path

_logger = logging.getLogger(__name__)

FLAG = '--coordinator_address'
_RETRY_S = 0.2
# State of a listening socket in /proc/net/tcp.
_LISTENING = '0A'


def parse_address(address: str) -> tuple[str, int]:
  """Returns the host and the port of 'HOST:PORT' or '[IPV6]:PORT'.

  Raises:
    ValueError: the address has another form, or the port is not from 1 to 65535.
  """
  match = re.fullmatch(r'(?:\[([^\[\]\s]+)\]|([^\[\]:\s]+)):([0-9]{1,5})', address)
  if not match or not 1 <= int(match[3]) <= 65535:
    raise ValueError(f'{FLAG}: must be HOST:PORT with a port from 1 to 65535, or '
                     f'[IPV6]:PORT, got {address!r}')
  return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
  """Returns 'HOST:PORT', or '[HOST]:PORT' for an IPv6 address."""
  return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def bind_address(address: str) -> str:
  """Returns the address of this machine at which process 0 should listen.

  Process 0 listens at `address` only, so that only machines that can reach it can join the run. A
  machine's own name may resolve to a loopback address (Debian does this), while other machines
  resolve it to another address. Process 0 then listens on all addresses.

  Args:
    address: 'HOST:PORT' or '[IPV6]:PORT', as other processes know it.

  Raises:
    ValueError: the machine has no such name or address, or the port is in use.
  """
  host, port = parse_address(address)
  try:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except OSError as error:
    raise ValueError(f'{FLAG}: {host} is not known on this machine ({_reason(error)})') from None
  candidates = {sockaddr[0]: (family, sockaddr) for family, _, _, _, sockaddr in infos}
  if host != 'localhost' and host not in candidates and all(
      ipaddress.ip_address(ip).is_loopback for ip in candidates):
    _logger.warning('%s: %s is %s on this machine, so process 0 listens on all its addresses', FLAG,
                    host, ', '.join(candidates))
    # gRPC listens on 0.0.0.0 if '::' is not available.
    candidates = {'::': (socket.AF_INET, ('0.0.0.0', port))}

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
  """Returns the text of an error, without its number."""
  return error.strerror or str(error)


def _refuse_port_in_use(family: int, sockaddr: tuple) -> None:
  """Checks that process 0 can listen at an address and that no other process does.

  gRPC shares a port with other processes of the same user (SO_REUSEPORT), so two runs on one port
  would get each other's processes. A port that is bound but not listened on is free: `launch`
  reserves a port by binding it.

  Args:
    family: the family of the address, such as `socket.AF_INET`.
    sockaddr: (IP, port, ...).

  Raises:
    ValueError: the port is in use.
    OSError: the address cannot be bound for another reason.
  """
  ip, port = sockaddr[:2]
  with socket.socket(family) as probe:
    # gRPC sets both options.
    for sharing in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
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
  """Returns ' by process PID (NAME)' for the process that listens on a port, or '' if unknown."""
  inodes = set()
  for table in ('/proc/net/tcp', '/proc/net/tcp6'):
    with contextlib.suppress(OSError):
      for line in Path(table).read_text().splitlines()[1:]:
        # The columns of `man 5 proc`: sl, local address, remote address, state, ..., inode.
        columns = line.split()
        local_address = columns[1]
        if columns[3] == _LISTENING and int(local_address.rpartition(':')[2], 16) == port:
          inodes.add(f'socket:[{columns[9]}]')

  for descriptor in Path('/proc').glob('[0-9]*/fd/*'):
    # The process may belong to another user, or end meanwhile.
    with contextlib.suppress(OSError):
      if os.readlink(descriptor) in inodes:
        process = descriptor.parents[1]
        return f' by process {process.name} ({(process / "comm").read_text().strip()})'
  return ''


def _connect_error(host: str, port: int, timeout_s: float) -> OSError | None:
  """Returns the error of a connection to an address, or None if it succeeds."""
  try:
    with socket.create_connection((host, port), timeout_s) as connection:
      # The kernel may choose the target port as the connection's own port; the connection then
      # reaches itself.
      if connection.getsockname() == connection.getpeername():
        return ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
  except OSError as error:
    return error
  return None


def wait_until_reachable(address: str, timeout_s: float) -> None:
  """Blocks until process 0 listens. JAX would abort a process that cannot reach it.

  Args:
    address: 'HOST:PORT' or '[IPV6]:PORT' of process 0.
    timeout_s: most seconds to wait.

  Raises:
    ValueError: no process answers at the address within the time.
  """
  host, port = parse_address(address)
  deadline = time.monotonic() + timeout_s
  while (error := _connect_error(host, port, max(_RETRY_S, deadline - time.monotonic()))):
    if time.monotonic() + _RETRY_S > deadline:
      raise ValueError(f'{FLAG}: {address} did not answer within {timeout_s:.0f} s '
                       f'({_reason(error)}); is process 0 running there, and is the port open?')
    time.sleep(_RETRY_S)
