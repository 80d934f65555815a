"""Calls of processes on simulated machines: errors, deaths, silence, lost results, versions."""

import importlib.util
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec('ray') is None:
  pytest.skip('needs the extra ray', allow_module_level=True)

from podracer_jit.cluster import set_ray_environment
from podracer_jit.errors import WorkerLost
from podracer_jit.runtime.channels import Closed
from tests.ray_nodes import Nodes

PROBE = Path(__file__).with_name('probe.py')


@pytest.fixture(scope='module')
def nodes():
  with Nodes() as nodes:
    nodes.add(2)
    yield nodes


@pytest.fixture(scope='module')
def cluster(nodes):
  set_ray_environment()
  from podracer_jit.cluster import ray_cluster
  with pytest.MonkeyPatch.context() as patch:
    for name, value in nodes.variables.items():
      patch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    with ray_cluster.connected(1, 0, 3, 2, 0, lambda folder: shutil.copy(PROBE, folder)) as cluster:
      assert signal.getsignal(signal.SIGTERM) == before
      yield cluster


@pytest.fixture
def remote(cluster):
  cluster.takes_over(object())
  return cluster.remote('actor 7', 'probe:Probe', lambda life: (life,))


@pytest.fixture
def warnings(monkeypatch):
  lines = []
  logger = logging.getLogger('podracer_jit.cluster.remote')
  monkeypatch.setattr(logger, 'warning', lambda text, *args: lines.append(text % args))
  return lines


def call(remote, *args, ended=lambda: False):
  return remote.wait(remote.submit(*args), ended).value


@pytest.mark.quick
def test_arrays_are_sent_and_returned(cluster, remote):
  array = np.arange(300_000.0)
  reference = cluster.publish(array)
  assert cluster.publish(array) is reference
  result = call(remote, 'add', reference, 1)
  np.testing.assert_array_equal(result, array + 1)
  assert not result.flags.writeable
  figures = cluster.metrics()
  assert figures['actors_alive'] == 1 and figures['actors_pending'] == 0
  assert figures['cluster_mb_per_s'] > 0 and figures['cluster_get_ms'] > 0


def test_a_result_may_take_longer_than_a_look_at_the_clock(remote, monkeypatch):
  monkeypatch.setattr('podracer_jit.cluster.remote._POLL_S', 0.002)
  until = time.monotonic() + 60
  result = call(remote, 'add', np.zeros(2**23), 1, ended=lambda: time.monotonic() > until)
  assert result.shape == (2**23,) and result[-1] == 1


def test_an_exception_is_reported_at_once_in_one_line(remote):
  call(remote, 'lived')
  since = time.monotonic()
  with pytest.raises(WorkerLost, match=rf'^actor 7 \(process {remote.about.pid} on .*\): '
                     'ValueError: no such option$'):
    call(remote, 'fail', 'no such\n option')
  assert time.monotonic() - since < 5


def test_a_new_process_has_the_next_life_and_repeats_the_call(cluster, remote, warnings):
  restarts = cluster.metrics()['actor_restarts']
  assert call(remote, 'lived') == 0
  assert call(remote, 'die', 2) == 2
  assert cluster.lives() == {'actor 7': 2}
  assert cluster.metrics()['actor_restarts'] == restarts + 2
  assert any('died' in line and line.endswith('life 1 begins') for line in warnings)
  # Only lives in a row that end without an answer count.
  assert call(remote, 'die', 4) == 4


def test_all_calls_in_flight_are_repeated(remote):
  assert call(remote, 'lived') == 0
  first = remote.submit('die', 1)
  second = remote.submit('add', 1, 2)
  assert remote.wait(first, bool).value == 1
  assert remote.wait(second, bool).value == 3


def test_a_process_that_dies_repeatedly_ends_the_run_with_its_last_output(remote, warnings):
  with pytest.raises(WorkerLost, match=r'actor 7: its process died 3 times in a row .*I was here'):
    call(remote, 'die', 1000)


def test_a_wait_ends_with_the_segment(remote):
  ended = threading.Event()
  threading.Timer(1, ended.set).start()
  since = time.monotonic()
  with pytest.raises(Closed):
    call(remote, 'sleep', 1000, ended=ended.is_set)
  assert time.monotonic() - since < 5


def test_a_frozen_process_is_named(remote, warnings):
  call(remote, 'lived')
  remote._patience_s = 0.5  # noqa: SLF001 - a minute otherwise
  os.kill(remote.about.pid, signal.SIGSTOP)
  with pytest.raises(Closed):
    call(remote, 'lived', ended=lambda: bool(warnings))
  assert 'actor 7: waiting for' in warnings[0]
  assert f'process {remote.about.pid}' in warnings[0]
  os.kill(remote.about.pid, signal.SIGCONT)


def test_processes_without_room_wait_for_a_machine(nodes, cluster, warnings):
  cluster.takes_over(object())
  remotes = [cluster.remote(f'actor {i}', 'probe:Probe', lambda life: (life,)) for i in range(3)]
  answers = [call(remote, 'lived') for remote in remotes[:2]]
  assert answers == [0, 0]
  remotes[2]._patience_s = 0.5  # noqa: SLF001 - a minute otherwise
  with pytest.raises(Closed):
    call(remotes[2], 'lived', ended=lambda: bool(warnings))
  assert 'on a machine with room for 1 CPU (placement.actor_cpus)' in warnings[0]
  figures = cluster.metrics()
  assert figures['actors_alive'] == 2 and figures['actors_pending'] == 1

  added = nodes.add(1)
  assert call(remotes[2], 'lived') == 0
  # A result that was not fetched is lost with its machine, and computed again elsewhere.
  array = cluster.publish(np.arange(300_000.0))
  kept = remotes[2].submit('add', array, 5)
  assert remotes[2].wait(kept, bool, fetch=False).seconds >= 0
  nodes.remove(added)
  remotes[0].close()
  assert remotes[2].wait(kept, bool).value[1] == 6
  assert remotes[2].life >= 1


def test_machines_with_other_versions_are_refused():
  from podracer_jit.cluster.process import about
  from podracer_jit.cluster.remote import problems_of_versions
  own = about()
  assert problems_of_versions(own, own) == []
  different = own._replace(host='far', versions=own.versions | {'jax': '0.0.1'})
  (line,) = problems_of_versions(different, own)
  assert line.startswith(f'far has other versions than the learner: jax 0.0.1 '
                         f'({own.versions["jax"]} here)')
