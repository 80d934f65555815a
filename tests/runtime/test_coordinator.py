"""The coordinator's address: parsing, ports in use and waits, with errors of one line."""

import os
import socket
import threading
import time

import jax
import pytest

from podracer_jit.runtime import coordinator, host


def listening(ip='127.0.0.1', port=0, sharing=None):
  """Returns a listening socket and its port; `sharing` is an option such as SO_REUSEPORT."""
  listener = socket.socket()
  if sharing is not None:
    listener.setsockopt(socket.SOL_SOCKET, sharing, 1)
  listener.bind((ip, port))
  listener.listen()
  return listener, listener.getsockname()[1]


def closed_port():
  listener, port = listening()
  listener.close()
  return port


@pytest.fixture
def names(monkeypatch):
  """Returns a dictionary of addresses by name; look-ups use it besides the machine's own names."""
  addresses_of = {}
  getaddrinfo = socket.getaddrinfo

  def look_up(name, *args, **kwargs):
    addresses = addresses_of.get(name, [name])
    return [info for address in addresses for info in getaddrinfo(address, *args, **kwargs)]
  monkeypatch.setattr(socket, 'getaddrinfo', look_up)
  return addresses_of


# Addresses.


@pytest.mark.parametrize('address, parsed', [
    ('10.0.0.1:1234', ('10.0.0.1', 1234)), ('node-1.cluster:65535', ('node-1.cluster', 65535)),
    ('[::1]:1', ('::1', 1))])
def test_an_address_is_a_host_and_a_port(address, parsed):
  assert coordinator.parse_address(address) == parsed
  assert coordinator.join_address(*parsed) == address


@pytest.mark.parametrize('address', [
    '', 'node', 'node:', ':1234', 'node:0', 'node:99999', 'node:-1', 'node:port', '::1:1234',
    'a b:1', 'http://node:1234', '[]:1'])
def test_an_invalid_address_is_refused(address):
  with pytest.raises(ValueError) as error:
    coordinator.parse_address(address)
  assert str(error.value) == ('--coordinator_address: must be HOST:PORT with a port from 1 to '
                              f'65535, or [IPV6]:PORT, got {address!r}')


# Where process 0 listens.


@pytest.mark.parametrize('name', ['127.0.0.1', 'localhost', '0.0.0.0'])
def test_process_0_listens_at_the_address_given(name):
  port = closed_port()
  expected = '127.0.0.1' if name == 'localhost' else name
  assert coordinator.bind_address(f'{name}:{port}') in (f'{expected}:{port}', f'[::1]:{port}')


def test_process_0_listens_at_the_address_that_belongs_to_its_machine(names):
  names['node'] = ['192.0.2.1', '127.0.0.2']  # the first is reserved for documentation
  port = closed_port()
  assert coordinator.bind_address(f'node:{port}') == f'127.0.0.2:{port}'


def test_process_0_listens_on_all_addresses_for_a_name_that_means_loopback(names, monkeypatch):
  warnings = []
  monkeypatch.setattr(
      coordinator._logger, 'warning', lambda message, *args: warnings.append(message % args))
  names['node'] = ['127.0.1.1']
  port = closed_port()
  assert coordinator.bind_address(f'node:{port}') == f'[::]:{port}'
  assert warnings == ['--coordinator_address: node is 127.0.1.1 on this machine, so process 0 '
                      'listens on all its addresses']


def test_an_address_of_another_machine_cannot_be_bound():
  with pytest.raises(ValueError) as error:
    coordinator.bind_address('192.0.2.1:1234')
  assert str(error.value) == (
      '--coordinator_address: 192.0.2.1:1234 cannot be bound on this machine (Cannot assign '
      'requested address); process 0 needs an address of its own machine, or '
      'JAX_COORDINATOR_BIND_ADDRESS')


def test_an_unknown_name_is_reported():
  message = r'^--coordinator_address: no-such-name\.invalid is not known on this machine \(.+\)$'
  with pytest.raises(ValueError, match=message):
    coordinator.bind_address('no-such-name.invalid:1234')


@pytest.mark.parametrize('ip, sharing', [
    ('127.0.0.1', None), ('127.0.0.1', socket.SO_REUSEPORT), ('', None)])
def test_a_port_in_use_is_reported_with_the_process_that_uses_it(ip, sharing):
  """This includes a port that gRPC would share with another run of the same user."""
  listener, port = listening(ip, sharing=sharing)
  with listener, pytest.raises(ValueError) as error:
    coordinator.bind_address(f'127.0.0.1:{port}')
  with open('/proc/self/comm') as file:
    name = file.read().strip()
  assert str(error.value) == (
      f'--coordinator_address: port {port} of 127.0.0.1 is in use on this machine by process '
      f'{os.getpid()} ({name}); choose another')


def test_a_port_that_is_only_reserved_is_free():
  """`launch` reserves its port, so that no other launch gets the same."""
  with socket.socket() as reserved:
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{reserved.getsockname()[1]}'
    assert coordinator.bind_address(address) == address


@pytest.mark.parametrize('sharing', [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_a_port_whose_last_process_has_just_ended_is_free(sharing):
  listener, port = listening(sharing=sharing)
  with socket.create_connection(('127.0.0.1', port)):
    listener.accept()[0].close()  # this side closes first, so the kernel keeps the port for a while
    listener.close()
  address = f'127.0.0.1:{port}'
  assert coordinator.bind_address(address) == address


# How the other processes reach it.


def test_other_processes_wait_until_process_0_listens():
  port = closed_port()
  listeners = []
  begin = threading.Timer(0.5, lambda: listeners.append(listening(port=port)[0]))
  begin.start()
  coordinator.wait_until_reachable(f'127.0.0.1:{port}', 30)
  begin.join()
  listeners[0].close()


def test_an_address_without_a_listener_is_reported_after_the_timeout():
  port = closed_port()
  start = time.monotonic()
  with pytest.raises(ValueError) as error:
    coordinator.wait_until_reachable(f'127.0.0.1:{port}', 1)
  assert 0.5 < time.monotonic() - start < 10
  assert str(error.value) == (
      f'--coordinator_address: 127.0.0.1:{port} did not answer within 1 s (Connection refused); is '
      'process 0 running there, and is the port open?')


def test_a_connection_to_itself_does_not_count_as_reached(monkeypatch):
  """The kernel may give a socket the port that it connects to; then it connects to itself."""
  def to_itself(address, timeout):
    connection = socket.socket()
    connection.bind(address)
    connection.connect(address)
    return connection
  monkeypatch.setattr(socket, 'create_connection', to_itself)
  with pytest.raises(ValueError, match=r'within 0 s \(Connection refused\)'):
    coordinator.wait_until_reachable(f'127.0.0.1:{closed_port()}', 0)


# Joining.


@pytest.fixture
def initialized(monkeypatch):
  """Replaces jax.distributed.initialize; returns the list of its calls."""
  calls = []
  monkeypatch.setattr(host, '_agree', lambda timeout_s: None)  # there is nobody to agree with
  monkeypatch.setattr(jax.distributed, 'initialize',
                      lambda *args, **kwargs: calls.append((args, kwargs)))
  monkeypatch.delenv('JAX_COORDINATOR_ADDRESS', raising=False)
  monkeypatch.delenv('JAX_COORDINATOR_BIND_ADDRESS', raising=False)
  return calls


def test_process_0_passes_its_address_to_jax_with_a_longer_timeout(initialized):
  address = f'127.0.0.1:{closed_port()}'
  host.join(address, 2, 0, 7)
  ((args, kwargs),) = initialized
  assert args == (address, 2, 0) and kwargs['coordinator_bind_address'] == address
  assert kwargs['initialization_timeout'] > 7


def test_the_bind_address_of_jax_is_respected(initialized, monkeypatch):
  monkeypatch.setenv('JAX_COORDINATOR_BIND_ADDRESS', '10.0.0.1:1234')
  host.join('192.0.2.1:1234', 2, 0, 7)
  assert initialized[0][1]['coordinator_bind_address'] is None


def test_without_an_address_jax_detects_the_cluster(initialized):
  host.join(None, None, None, 7)
  ((args, kwargs),) = initialized
  assert args == (None, None, None) and kwargs['coordinator_bind_address'] is None


@pytest.mark.parametrize('args, message', [
    ((None, 0, None), '--num_processes: must be at least 1, got 0'),
    ((None, None, -1), '--process_id: must be at least 0, got -1'),
    ((None, 2, 2), '--process_id: must be from 0 to 1 with --num_processes=2, got 2'),
    ((None, 2, 0, 0), '--coordinator_timeout_s: must be at least 1, got 0'),
    (('node', 2, 1), "--coordinator_address: must be HOST:PORT with a port from 1 to 65535, or "
                     "[IPV6]:PORT, got 'node'")])
def test_wrong_values_are_refused(args, message, initialized):
  with pytest.raises(ValueError) as error:
    host.join(*args)
  assert str(error.value) == message and not initialized


def test_processes_that_do_not_join_are_reported_before_jax_aborts(monkeypatch):
  never = threading.Event()
  monkeypatch.setattr(jax.distributed, 'initialize', lambda *args, **kwargs: never.wait(60))
  address = f'127.0.0.1:{closed_port()}'
  start = time.monotonic()
  with pytest.raises(ValueError) as error:
    host.join(address, 2, 0, 1)
  assert time.monotonic() - start < 10
  never.set()
  assert str(error.value) == (f'--distributed: not all 2 processes joined at {address} within 1 s '
                              '(--coordinator_timeout_s)')


def test_an_error_of_jax_is_reported_in_one_line(monkeypatch):
  def fail(*args, **kwargs):
    raise RuntimeError('no\n  cluster')
  monkeypatch.setattr(jax.distributed, 'initialize', fail)
  with pytest.raises(ValueError, match='^--distributed: without SLURM, Open MPI.*(no cluster)'):
    host.join(None, None, None)
