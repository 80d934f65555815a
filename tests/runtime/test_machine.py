"""The description of a machine, from files as Linux has them."""

import math

import pytest
from jax._src import hardware_utils

from podracer_jit.runtime import machine
from podracer_jit.runtime.machine import Machine


def test_this_machine_has_a_core():
  resources = machine.here(devices=3)
  assert resources.cores >= 1
  assert 1 <= resources.near <= resources.allowed
  assert resources.devices == 3


@pytest.mark.parametrize('own, files, cores', [
    # Version 2: the lowest limit of the group and those above it.
    ('0::/a/b\n', {'a/cpu.max': '150000 100000\n', 'a/b/cpu.max': 'max 100000\n'}, 1.5),
    ('0::/a/b\n', {'a/cpu.max': '400000 100000\n', 'a/b/cpu.max': '250000 100000\n'}, 2.5),
    # In a container, the group's own folder is the root.
    ('0::/../x\n', {'cpu.max': '50000 100000\n'}, 0.5),
    # Version 1, in which -1 is no limit; other controllers say nothing about cores.
    ('4:cpu,cpuacct:/a\n7:memory:/a\n',
     {'cpu/a/cpu.cfs_quota_us': '300000\n', 'cpu/a/cpu.cfs_period_us': '100000\n',
      'memory/a/cpu.cfs_quota_us': '1\n', 'memory/a/cpu.cfs_period_us': '100000\n'}, 3.0),
    ('4:cpu,cpuacct:/a\n',
     {'cpu/a/cpu.cfs_quota_us': '-1\n', 'cpu/a/cpu.cfs_period_us': '100000\n'}, math.inf),
    ('0::/\n', {}, math.inf),
    ('0::/\n', {'cpu.max': 'nonsense\n'}, math.inf)])
def test_quota(tmp_path, own, files, cores):
  (tmp_path / 'own').write_text(own)
  for name, text in files.items():
    (tmp_path / 'groups' / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / 'groups' / name).write_text(text)
  assert machine.quota(tmp_path / 'groups', tmp_path / 'own') == cores


def test_no_file_of_groups_is_no_quota(tmp_path):
  assert machine.quota(tmp_path, tmp_path / 'missing') == math.inf


@pytest.mark.parametrize('files, nodes', [
    ({'node0': '0-3,8-11\n', 'node1': '4-7,12-15\n'}, [{1, 2, 8}, {4, 5}]),
    # Numbered, not sorted as text; those without a core that this process may use are left out.
    ({'node10': '4-5\n', 'node2': '1\n', 'node3': '\n', 'node4': '0\n'}, [{1}, {4, 5}]),
    ({}, [{1, 2, 4, 5, 8}])])  # a kernel without NUMA
def test_numa_nodes(tmp_path, monkeypatch, files, nodes):
  monkeypatch.setattr(machine.os, 'sched_getaffinity', lambda _: {1, 2, 4, 5, 8})
  for node, cpus in files.items():
    folder = tmp_path / 'sys/devices/system/node' / node
    folder.mkdir(parents=True)
    (folder / 'cpulist').write_text(cpus)
  assert machine.numa_nodes(tmp_path) == nodes


def test_a_quota_limits_the_cores(monkeypatch):
  monkeypatch.setattr(machine, 'quota', lambda: 0.5)
  assert machine.here().cores == machine.here().near == 1


def test_cores_that_others_use_do_not_count(monkeypatch):
  visible = set(range(8))
  monkeypatch.setattr(machine.os, 'sched_getaffinity', lambda _: visible)
  monkeypatch.setattr(machine, '_shared', lambda cpu, file: '')
  monkeypatch.setattr(machine, '_FIRST', machine._Times(100.0, 50.0, 1.0))
  monkeypatch.setattr(machine, 'quota', lambda: math.inf)
  # In ten seconds 8 cores were busy for 34, of which this process took 4: three cores are not free.
  monkeypatch.setattr(machine, '_times', lambda: machine._Times(110.0, 84.0, 5.0))
  assert machine.here().cores == 5
  assert machine.here().allowed == 8
  # A core that others used for less than three quarters of the time is free.
  for busy_s, cores in ((7.0, 8), (7.6, 7), (17.0, 7), (17.6, 6)):
    now = machine._Times(110.0, 50.0 + busy_s, 1.0)
    monkeypatch.setattr(machine, '_times', lambda now=now: now)
    assert machine.here().cores == cores
  # At most half of the cores count.
  monkeypatch.setattr(machine, '_times', lambda: machine._Times(110.0, 129.0, 1.0))
  assert machine.here().cores == 4
  # A quota of five cores can be had beside others who use four of the eight.
  monkeypatch.setattr(machine, 'quota', lambda: 5.0)
  assert machine.here().cores == 4
  monkeypatch.setattr(machine, 'quota', lambda: 3.0)
  assert machine.here().cores == machine.here().allowed == 3
  monkeypatch.setattr(machine, 'quota', lambda: math.inf)
  # Four cores of two threads each: half of the cores is two.
  monkeypatch.setattr(
      machine, '_shared', lambda cpu, file: f'{cpu % 4}' if 'thread' in file else '')
  assert machine.here().cores == 2
  monkeypatch.setattr(machine, '_shared', lambda cpu, file: '')
  # Too short a time tells nothing.
  monkeypatch.setattr(machine, '_times', lambda: machine._Times(100.1, 51.0, 1.0))
  assert machine.here().cores == 8


def test_threads_of_a_core_count_once_and_caches_bound_what_is_near(monkeypatch):
  monkeypatch.setattr(machine.os, 'sched_getaffinity', lambda _: set(range(12)))
  monkeypatch.setattr(machine, '_load_of_others', lambda most: 0)
  monkeypatch.setattr(machine, 'quota', lambda: math.inf)

  def shared(cpu, file):
    # Six cores of two threads; four cores share one cache, two another one.
    return f'{cpu % 6}' if 'thread' in file else ('a' if cpu % 6 < 4 else 'b')

  monkeypatch.setattr(machine, '_shared', shared)
  assert machine.here() == Machine(
      cores=6, near=4, gpus=machine.num_gpus(), tpus=machine.num_tpus())


@pytest.mark.parametrize('platforms, visible, gpus', [
    ('', '0,1,2', 3), ('cuda', '0', 1), ('cpu', '0,1', 0), ('', '', 0), ('', '-1', 0),
    ('', '1,-1,2', 1), ('', 'GPU-3f,GPU-4e', 2)])
def test_gpus_that_jax_will_see(monkeypatch, platforms, visible, gpus):
  monkeypatch.setattr(machine.importlib.util, 'find_spec', lambda name: name)
  monkeypatch.setenv('JAX_PLATFORMS', platforms)
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
  assert machine.num_gpus() == gpus


@pytest.mark.parametrize('platforms, libtpu, tpus', [
    ('', True, 2), ('tpu', True, 2), ('tpu,cpu', True, 2), ('cpu', True, 0), ('', False, 0)])
def test_tpus_that_jax_will_see(monkeypatch, tmp_path, platforms, libtpu, tpus):
  # Google's network card and two chips of a TPU v5e, as Linux lists them.
  for i, device in enumerate(['0x0042', '0x0063', '0x0063']):
    card = tmp_path / str(i)
    card.mkdir()
    (card / 'vendor').write_text('0x1ae0\n')
    (card / 'device').write_text(f'{device}\n')
  monkeypatch.setattr(hardware_utils.glob, 'glob', lambda _: map(str, tmp_path.glob('*/vendor')))
  monkeypatch.setattr(machine.importlib.util, 'find_spec', lambda _: libtpu)
  monkeypatch.setenv('JAX_PLATFORMS', platforms)
  assert machine.num_tpus() == tpus


def test_no_plugin_no_gpus(monkeypatch):
  monkeypatch.setattr(machine.importlib.util, 'find_spec', lambda name: None)
  monkeypatch.setenv('JAX_PLATFORMS', '')
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
  assert machine.num_gpus() == 0


def test_the_smallest_of_several_machines():
  assert machine.smallest([Machine(8, 4, 2, tpus=1), Machine(4, 4, 1, 6, tpus=4),
                           Machine(16, 8, 4, 8, tpus=8)]) == Machine(4, 4, 1, 6, tpus=1)
  assert machine.smallest([Machine(8, 4), Machine(4, 4, busy=2)]) == Machine(4, 4, busy=2)
