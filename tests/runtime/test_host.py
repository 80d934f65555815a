"""Settings made before JAX starts: the folder of compiled programs."""

import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from podracer_jit.runtime import host, stored_programs
from podracer_jit.runtime.machine import Machine
from tests import processes
from tests.runs import QUICK

TRAIN = ['--config=configs/impala_catch.py:smoke', '--config.log.tensorboard=False']
# The cache then also keeps programs that compile quickly.
WITH_CACHE = """
import os, sys
import jax
from podracer_jit.cli import main
os.environ['XDG_CACHE_HOME'] = {cache!r}
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
sys.argv[0] = 'podracer_jit'
main.run()
"""


def _train(workdir: pathlib.Path, cache: pathlib.Path):
  program = WITH_CACHE.format(cache=str(cache))
  done = processes.run([sys.executable, '-c', program, *TRAIN, f'--workdir={workdir}'])
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in (workdir / 'receipts.jsonl').read_text().splitlines()]


@pytest.mark.full
def test_programs_are_cached_unless_they_contain_pointers(tmp_path):
  cache = tmp_path / 'cache'
  first = _train(tmp_path / 'first', cache)
  (folder,) = (cache / 'podracer_jit').iterdir()
  cached = {path.name for path in folder.iterdir() if path.name.endswith('-cache')}
  assert any(name.startswith('jit_learner-') for name in cached)
  assert not any(name.startswith('jit_rollout-') for name in cached)
  assert _train(tmp_path / 'second', cache) == first
  assert {path.name for path in folder.iterdir() if path.name.endswith('-cache')} == cached


@pytest.mark.full
def test_jaxs_own_cache_folder_is_respected(tmp_path):
  env = QUICK | dict(XDG_CACHE_HOME=str(tmp_path / 'unused'), JAX_PLATFORMS='cpu',
                     JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
                     JAX_COMPILATION_CACHE_DIR=str(tmp_path / 'told'))
  subprocess.run([sys.executable, '-m', 'podracer_jit', *TRAIN, f'--workdir={tmp_path / "run"}'],
                 env=env, check=True, capture_output=True, timeout=300)
  assert not (tmp_path / 'unused').exists() and any((tmp_path / 'told').iterdir())


@pytest.fixture
def cache_settings():
  """Restores JAX's settings of its cache."""
  names = ('jax_compilation_cache_dir', 'jax_enable_compilation_cache',
           'jax_persistent_cache_min_compile_time_secs')
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.mark.parametrize('mode', [0o777, 0o775, 0o757, 0o1777])
@pytest.mark.parametrize('is_told', [True, False])
def test_a_cache_that_others_can_write_to_is_not_used(mode, is_told, tmp_path, cache_settings,
                                                      monkeypatch):
  warnings = []
  monkeypatch.setattr(host._logger, 'warning', lambda text, *args: warnings.append(text % args))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'told') if is_told else None)
  host._keep_programs()
  assert jax.config.jax_enable_compilation_cache and not warnings
  folder = pathlib.Path(jax.config.jax_compilation_cache_dir)
  assert folder.stat().st_mode & 0o777 == 0o700
  folder.chmod(mode)
  for _ in range(2):
    host._keep_programs()
  assert not jax.config.jax_enable_compilation_cache
  (line,) = warnings
  assert f'others can write to {folder}' in line and '\n' not in line


def test_folders_of_a_cache_are_made_for_the_user_only(tmp_path):
  before = os.umask(0)
  try:
    stored_programs.make_private(tmp_path / 'a' / 'b' / 'c')
  finally:
    os.umask(before)
  for path in ('a', 'a/b', 'a/b/c'):
    assert (tmp_path / path).stat().st_mode & 0o777 == 0o700
  stored_programs.make_private(tmp_path / 'a' / 'b' / 'c')


def test_a_folder_above_that_others_can_write_to_counts_unless_it_is_sticky(tmp_path):
  folder = tmp_path / 'a' / 'b'
  stored_programs.make_private(folder)
  assert stored_programs.danger_of(str(folder)) == ''
  assert stored_programs.danger_of(str(folder / 'new' / 'one')) == ''
  folder.parent.chmod(0o777)
  danger = stored_programs.danger_of(str(folder))
  assert danger == f'others can write to {folder.parent} (chmod go-w)'
  assert stored_programs.danger_of(str(folder / 'new')) == danger
  folder.parent.chmod(0o1777)
  assert stored_programs.danger_of(str(folder)) == ''
  # Through a link, both paths count.
  (tmp_path / 'link').symlink_to(folder)
  assert stored_programs.danger_of(str(tmp_path / 'link')) == ''
  folder.parent.chmod(0o777)
  assert stored_programs.danger_of(str(tmp_path / 'link')) == danger
  (folder / 'link').symlink_to(tmp_path)
  assert stored_programs.danger_of(str(folder / 'link')) == danger
  assert stored_programs.danger_of('gs://bucket/cache') == ''


def test_a_cache_of_another_user_is_not_used(tmp_path, monkeypatch):
  folder = tmp_path / 'a' / 'b'
  stored_programs.make_private(folder)
  owners = {folder: 12345}
  stat = pathlib.Path.stat

  def stat_with_owner(path, **options):
    values = list(stat(path, **options))
    values[4] = owners.get(path, values[4])
    return os.stat_result(values)
  monkeypatch.setattr(pathlib.Path, 'stat', stat_with_owner)
  assert stored_programs.danger_of(str(folder)) == f'{folder} belongs to another user'
  # The owner of a folder above gives the user a place, except for a sticky one.
  owners |= {folder: os.geteuid(), folder.parent: 12345}
  assert stored_programs.danger_of(str(folder)) == ''
  tmp_path.chmod(0o1777)
  assert stored_programs.danger_of(str(folder)) == f'{folder.parent} belongs to another user'


def test_the_command_says_in_one_line_that_the_cache_is_not_used(tmp_path):
  folder = tmp_path / 'cache'
  folder.mkdir()
  folder.chmod(0o777)
  env = QUICK | dict(JAX_PLATFORMS='cpu', JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
                     JAX_COMPILATION_CACHE_DIR=str(folder))
  done = subprocess.run(
      [sys.executable, '-m', 'podracer_jit', *TRAIN, f'--workdir={tmp_path / "run"}'], env=env,
      check=True, capture_output=True, text=True, timeout=300)
  assert done.stderr.count(f'others can write to {folder}') == 1
  assert not list(folder.iterdir())


@pytest.fixture
def no_cache(monkeypatch):
  """Has JAX without a cache folder, and without a folder that was told; they come back."""
  folder = jax.config.jax_compilation_cache_dir
  seconds = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update('jax_compilation_cache_dir', None)
  monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
  yield
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', seconds)


def test_a_user_without_a_home_has_no_cache(no_cache, tmp_path, monkeypatch):
  def no_home():
    raise RuntimeError('Could not determine home directory.')
  monkeypatch.setattr(pathlib.Path, 'home', no_home)
  host._keep_programs()
  assert jax.config.jax_compilation_cache_dir is None
  (tmp_path / 'file').write_text('')
  monkeypatch.setattr(pathlib.Path, 'home', lambda: tmp_path / 'file' / 'home')
  host._keep_programs()
  assert jax.config.jax_compilation_cache_dir is None


def test_nothing_is_written_to_a_home_that_is_read_only(no_cache, tmp_path, monkeypatch):
  monkeypatch.setattr(pathlib.Path, 'home', lambda: tmp_path)
  monkeypatch.setattr(os, 'access', lambda path, mode: False)
  host._keep_programs()
  assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path))
  assert jax.config.jax_persistent_cache_min_compile_time_secs == math.inf


@pytest.mark.parametrize('told, kept', [(None, 0.03), ('1', 1.0), ('5', 5.0)])
def test_programs_that_compile_fast_are_kept_unless_the_user_says_more(told, kept, tmp_path):
  name = 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'
  env = {key: value for key, value in os.environ.items() if key != name}
  env |= dict(XDG_CACHE_HOME=str(tmp_path)) | ({name: told} if told else {})
  code = ('import jax\nfrom podracer_jit.runtime import host, placement\n'
          'host.prepare_host(placement.PlacementOptions(), deterministic=True)\n'
          'print(jax.config.jax_persistent_cache_min_compile_time_secs)')
  done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True,
                        check=True, timeout=300)
  assert float(done.stdout) == kept


GIVE_BACK = """
import re, jax
from podracer_jit.runtime import host
from podracer_jit.runtime.placement import PlacementOptions
host.prepare_host(PlacementOptions(), deterministic=True)
def resident_mb():
  return int(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1e3
def freed():
  # Small pieces below one that stays, so that the C library keeps their pages.
  pieces = [bytearray(60_000) for _ in range(4000)]
  last = bytearray(60_000)
  before = resident_mb()
  del pieces
  return last, before
last, before = freed()
kept = resident_mb()
jax.monitoring.record_event_duration_secs({event!r}, {seconds})
print(before - kept, kept - resident_mb())
"""


@pytest.mark.parametrize('event, seconds, gives', [
    (host._COMPILED, 2.0, True), (host._COMPILED, 0.01, False), ('/other', 2.0, False)])
def test_what_a_long_compilation_took_is_given_back(event, seconds, gives):
  done = processes.run([sys.executable, '-c', GIVE_BACK.format(event=event, seconds=seconds)])
  at_once, after = map(float, done.stdout.split())
  assert at_once < 50 and (after > 150) == gives, done.stderr


def test_processes_of_a_machine_share_its_cores_unless_each_has_its_own():
  def told(host, cpus, cores, near=8, gpus=0):
    return host, list(cpus), list(Machine(cores, near, gpus))

  alone = told('c', range(16), 16)
  shared = [told('a', range(16), 16), told('a', range(16), 16)]
  own = [told('b', range(8), 8, gpus=1), told('b', range(8, 16), 8, gpus=1)]
  some = [told('d', range(6), 6), told('d', range(4, 16), 12), told('d', range(8, 16), 8)]
  assert list(host._shares([alone, *shared, *own, *some])) == [
      Machine(16, 8), Machine(8, 8), Machine(8, 8), Machine(8, 8, 1), Machine(8, 8, 1),
      Machine(3, 3), Machine(4, 4), Machine(4, 4)]
  assert list(host._shares([told('a', [0], 1)] * 3)) == [Machine(1, 1)] * 3


def test_processes_of_a_run_do_not_count_each_other_as_load():
  # Four processes share 16 cores, of which they kept twelve busy while they started.
  loaded = Machine(4, 8, busy=12)
  sharing = [('a', list(range(16)), list(loaded))] * 4
  assert list(host._shares(sharing)) == [Machine(4, 4)] * 4
  # The load of a process with cores of its own is that of others.
  assert list(host._shares([('b', [0, 1, 2, 3], list(Machine(3, 3, busy=1)))])) == [
      Machine(3, 3, busy=1)]


WITH_GPUS = """
import jax
from podracer_jit.runtime import host
from podracer_jit.runtime.machine import Machine
from podracer_jit.runtime.placement import PlacementOptions
host._machine.append((Machine(4, 4, gpus=4), 1))
jax.devices()
host.prepare_host(PlacementOptions(learner_devices=(0, 1, 2, 3), actor_devices=(0, 1)), False)
try:
  host.prepare_host(PlacementOptions(
      learner_devices=(0, 1, 2, 3), actor_devices=(0, 1), actor_platform='cpu'), False)
except ValueError as error:
  print(error)
"""


def test_gpus_are_no_devices_of_the_cpu():
  done = processes.run([sys.executable, '-c', WITH_GPUS])
  assert done.returncode == 0, done.stderr
  assert 'placement.actor_devices: (0, 1) needs 2 devices in a process' in done.stdout


ASKED = """
import os
import sys
os.environ['XLA_FLAGS'] = sys.argv[3]
import jax
from podracer_jit.runtime import host
from podracer_jit.runtime.placement import PlacementOptions
jax.config.update('jax_num_cpu_devices', int(sys.argv[1]))
host.prepare_host(PlacementOptions(), deterministic=True, devices=int(sys.argv[2]))
print(jax.device_count())
"""


@pytest.mark.parametrize('config, flags, needed, devices', [
    (-1, '', 2, 2), (5, '', 2, 5), (-1, '--xla_force_host_platform_device_count=6', 2, 6),
    (3, '--xla_force_host_platform_device_count=4', 2, 4), (3, '', 4, 4)])
def test_a_user_gets_the_devices_that_were_asked_for(config, flags, needed, devices):
  done = processes.run([sys.executable, '-c', ASKED, str(config), str(needed), flags])
  assert done.stdout.split() == [str(devices)], done.stderr


def test_jax_tells_of_each_compilation():
  told = []
  jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: told.append(event))
  try:
    jax.jit(lambda x: x + 1)(1.0)
  finally:
    jax.monitoring.clear_event_listeners()
  assert host._COMPILED in told
