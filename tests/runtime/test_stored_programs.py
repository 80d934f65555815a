"""Programs with simulators are stored, and loaded for other simulators."""

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import shutil
import subprocess
import sys
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config as jax_config
from numpy.testing import assert_array_equal

from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.envs.envpool_envs import make_vector_env
from podracer_jit.runtime import placement, stored_programs
from podracer_jit.training import stopping
from podracer_jit.workdir import journal
from tests.runs import changed, fresh, prepared, run, small, train


@pytest.fixture
def folder(tmp_path):
  """Sets a new folder of the compilation cache, which keeps all programs; returns ours in it."""
  options = dict(jax_compilation_cache_dir=str(tmp_path / 'cache'),
                 jax_persistent_cache_min_compile_time_secs=0)
  before = {name: getattr(jax.config, name) for name in options}
  for name, value in options.items():
    jax.config.update(name, value)
  yield tmp_path / 'cache' / 'with_simulators'
  for name, value in before.items():
    jax.config.update(name, value)


class Event(NamedTuple):
  """An event of JAX."""

  name: str
  function: str  # '' if it has none
  thread: str


@contextlib.contextmanager
def events():
  """Collects JAX's events in the block."""
  names = []

  def listen(event, duration, **kwargs):
    names.append(Event(event.rsplit('/', 1)[1], kwargs.get('fun_name') or '',
                       threading.current_thread().name))

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield names
  finally:
    jax.monitoring.clear_event_listeners()


def traces(events):
  return [event for event in events if event.name == 'jaxpr_trace_duration']


def compilations(events):
  return [event for event in events if event.name == 'backend_compile_duration']


def play(*pools, kept=None, observe=lambda obs: None, device=0):
  """Returns the observations after a step of pools of CartPole, whose seeds are given.

  Args:
    *pools: the seeds of each pool.
    kept: see `RolloutProgram.load`.
    observe: called with the traced observations of each pool.
    device: number of the device that the program runs on.
  """
  program = RolloutProgram([make_vector_env('CartPole-v1', {}, seeds) for seeds in pools])
  envs = program.vector_envs

  def step(token):
    observations = []
    for env in envs:
      token, _ = env.send(token, None, jnp.ones(env.num_envs, jnp.int32))
      token, _, result = env.recv(token, None)
      observe(result.obs)
      observations.append(result.obs)
    return token, observations

  with contextlib.closing(program):
    token = jax.device_put(envs[0].handle, jax.devices()[device])
    observations = program.load(step, (token,), (), kept=kept)(token)[1]
    assert all(obs.devices() == {jax.devices()[device]} for obs in observations)
    return jax.tree.map(np.array, observations)


def expected(seeds):
  """Returns what `play` should return for a pool, by EnvPool's Python API."""
  pool = make_vector_env('CartPole-v1', {}, seeds)._pool
  obs, *_ = pool.step(np.ones(len(seeds), np.int32))
  pool.close()
  return obs


@pytest.mark.quick
def test_a_kept_program_plays_other_pools():
  kept = {}
  first = [1, 2], [3, 4]
  second = [5, 6], [7, 8]
  assert_array_equal(play(*first, kept=kept), [expected(seeds) for seeds in first])
  with events() as names:
    assert_array_equal(play(*second, kept=kept), [expected(seeds) for seeds in second])
  assert not compilations(names) and not traces(names)


@pytest.mark.parametrize('first, second', [(0, 3), (3, 0), (2, 3)])
def test_a_kept_program_plays_on_another_device(first, second):
  kept = {}
  assert_array_equal(play([1, 2], kept=kept, device=first), [expected([1, 2])])
  with events() as names:
    assert_array_equal(play([3, 4], kept=kept, device=second), [expected([3, 4])])
  assert not compilations(names) and not traces(names)


@pytest.mark.usefixtures('folder')  # empty, so that the program is compiled
def test_actors_on_several_devices_compile_one_rollout():
  config = changed(small(), scheme='cleanba', num_shards=4,
                   placement__actor_devices=(3, 0, 2, 1), placement__learner_devices=(4,))
  with events() as names:
    run(None, updates=2, prepared_run=fresh(config))
  assert [event.name for event in names if 'rollout' in event.function] == [
      'jaxpr_trace_duration', 'jaxpr_to_mlir_module_duration', 'backend_compile_duration']


@pytest.mark.usefixtures('folder')
@pytest.mark.parametrize('scheme, devices', [('cleanba', (0,)), ('sync', (0, 1))])
def test_the_learner_compiles_once_beside_the_first_rollouts(scheme, devices, monkeypatch):
  """The learner's thread compiles the program that it calls later, and nobody compiles it again."""
  shapes = []
  batch_shapes = placement.batch_shapes
  monkeypatch.setattr(placement, 'batch_shapes',
                      lambda *args: shapes.append(args) or batch_shapes(*args))
  config = changed(small(), scheme=scheme, num_shards=2, num_grad_shards=2,
                   placement__actor_devices=devices, placement__learner_devices=devices)
  with events() as names:
    run(None, updates=2, prepared_run=fresh(config))
  assert len(shapes) == 1
  assert [event.name for event in names if 'learner' in event.function] == [
      'jaxpr_trace_duration', 'jaxpr_to_mlir_module_duration', 'backend_compile_duration']


def test_replaced_runs_keep_programs_of_their_own():
  """The key of a program has no number of steps, for example."""
  before = fresh(small())
  run(None, updates=1, prepared_run=before)
  assert len(before.kept_programs) == 1
  assert not dataclasses.replace(before).kept_programs


def test_a_program_is_read_from_the_cache(folder):
  assert_array_equal(play([1, 2]), [expected([1, 2])])
  with events() as names:
    assert_array_equal(play([3, 4]), [expected([3, 4])])
  assert traces(names)  # the listener works
  assert not compilations(names)
  with events() as names:
    assert_array_equal(play([5, 6], device=1), [expected([5, 6])])
  assert not compilations(names)
  assert len(list(folder.iterdir())) == 1
  play([1, 2, 3])  # another program
  assert len(list(folder.iterdir())) == 2


OTHER_PROCESS = """
import sys
from tests.runtime.test_stored_programs import *
jax.config.update('jax_compilation_cache_dir', sys.argv[1])
with events() as names:
  assert_array_equal(play([3, 4], [5, 6]), [expected([3, 4]), expected([5, 6])])
print(len(compilations(names)))
"""


@pytest.mark.full
def test_another_process_reads_the_program(folder):
  def compiled():
    env = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path), 'JAX_NUM_CPU_DEVICES': '8',
                        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
    return int(subprocess.run([sys.executable, '-c', OTHER_PROCESS, str(folder.parent)], env=env,
                              check=True, stdout=subprocess.PIPE).stdout)

  before = compiled()
  assert len(list(folder.iterdir())) == 1
  assert compiled() < before
  assert len(list(folder.iterdir())) == 1


COMPILE = """
import sys
import jax
from podracer_jit.runtime import host, stored_programs
from podracer_jit.runtime.placement import PlacementOptions
stored_programs.processor = lambda: sys.argv[1]
host.prepare_host(PlacementOptions(xla_threads=int(sys.argv[2])), deterministic=True)
jax.jit(lambda x: x @ x)(jax.numpy.ones((8, 8)))
"""


def test_programs_of_a_shared_folder_are_for_a_processor_and_its_threads(tmp_path):
  def compiled(processor, threads):
    environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'cache'),
                                'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
    subprocess.run([sys.executable, '-c', COMPILE, processor, str(threads)], env=environment,
                   check=True)
    return {path.name for path in (tmp_path / 'cache').glob('*-cache')}

  first = compiled('one', 2)
  assert first and compiled('one', 2) == first
  second = compiled('another', 2)
  assert len(second) == 2 * len(first)
  assert len(compiled('another', 4)) == 3 * len(first)


def test_the_own_cache_is_for_a_processor_and_its_threads(folder, monkeypatch):
  play([1], kept={})
  others = dict(processor=lambda: 'another', processor_and_threads=lambda: ('one', 2, '4'))
  for name, value in others.items():
    before = set(folder.iterdir())
    with monkeypatch.context() as patch:
      patch.setattr(stored_programs, name, value)
      play([1], kept={})
    assert set(folder.iterdir()) > before


def test_programs_of_other_threads_are_kept_meanwhile():
  def least():
    return jax_config.persistent_cache_min_compile_time_secs.value

  before = least()
  with concurrent.futures.ThreadPoolExecutor(1) as other:
    with stored_programs.outside_of_jax_cache():
      assert least() == math.inf
      assert other.submit(least).result() == before
  assert least() == before


@pytest.mark.parametrize('can_exchange', [True, False])
def test_a_segment_compiles_one_rollout_where_addresses_cannot_be_exchanged(
    folder, tmp_path, monkeypatch, can_exchange):
  """So a GPU compiles a rollout a segment, beside the training, and no more.

  Only the first rollout is compiled by a thread for which the training waits.
  """
  monkeypatch.setattr(stored_programs, 'is_supported', lambda device: can_exchange)
  config = changed(small(), total_steps=600, env__renew_every_updates=3,
                   checkpoint__every_updates=1)
  with events() as names:
    assert train(prepared(config), tmp_path / 'run')
  compiled = compilations(names)
  segments = len(journal.read_receipts(tmp_path / 'run').headers)
  assert segments >= 3
  beside = [event.thread == stopping.BESIDE for event in compiled if 'rollout' in event.function]
  assert beside == [False, *([] if can_exchange else [True] * (segments - 1))]
  assert sum('learner' in event.function for event in compiled) <= 1


@pytest.mark.parametrize('damage', [lambda content: content[:-1], lambda content: b'',
                                    lambda content: content[:40] + b'x' + content[41:]])
def test_a_damaged_file_is_replaced(folder, damage):
  play([1, 2])
  (file,) = folder.iterdir()
  file.write_bytes(damage(file.read_bytes()))
  for times in (1, 0):
    with events() as names:
      assert_array_equal(play([3, 4]), [expected([3, 4])])
    assert len(compilations(names)) == times


@pytest.mark.parametrize('which', ['file', 'folder', 'cache'])
def test_a_program_that_others_could_have_written_is_not_read(folder, which):
  play([1, 2])
  (file,) = folder.iterdir()
  {'file': file, 'folder': folder, 'cache': folder.parent}[which].chmod(0o777)
  with events() as names:
    assert_array_equal(play([3, 4]), [expected([3, 4])])
  assert len(compilations(names)) == 1


def test_a_program_that_calls_python_is_not_stored(folder):
  called_with = []
  kept = {}
  for seeds in ([1, 2], [3, 4]):
    results = play(seeds, kept=kept, observe=lambda obs: jax.debug.callback(
        called_with.append, obs))
    jax.effects_barrier()
    assert_array_equal(results, [expected(seeds)])
    assert_array_equal(called_with.pop(), expected(seeds))
  assert not folder.exists()


def test_without_a_cache_folder_nothing_is_written(folder):
  jax.config.update('jax_compilation_cache_dir', None)
  assert_array_equal(play([1, 2]), [expected([1, 2])])
  assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_not_an_error(folder):
  folder.parent.mkdir()
  folder.write_text('a file in place of the folder')
  assert_array_equal(play([1, 2]), [expected([1, 2])])


def test_two_simulators_may_exchange_their_addresses():
  """A new pool may have the address that another pool of the program had before."""
  device = jax.devices()[0]
  envs = [make_vector_env('CartPole-v1', {}, seeds) for seeds in ([1, 2], [3, 4])]

  def observations(token):
    results = []
    for env in envs:
      token, _ = env.send(token, None, jnp.ones(2, jnp.int32))
      token, _, result = env.recv(token, None)
      results.append(result.obs)
    return results

  token = jax.device_put(envs[0].handle, device)
  addresses = [env.address for env in envs]
  _, stored = stored_programs.load_or_compile(jax.jit(observations).lower(token), addresses, device)
  results = stored.load(addresses[::-1], device)(token)
  assert_array_equal(results, [expected([3, 4]), expected([1, 2])])
  for env in envs:
    env.close()


def test_a_program_is_compiled_again_if_an_address_has_more_digits(folder):
  kept = {}
  play([1, 2], kept=kept)
  shutil.rmtree(folder)  # else it would be read from there
  (key, stored), = kept.items()
  kept[key] = stored._replace(addresses=(123,))
  assert kept[key].fits([99]) and not kept[key].fits([1000])
  with events() as names:
    assert_array_equal(play([3, 4], kept=kept), [expected([3, 4])])
  assert len(compilations(names)) == 1


def test_a_program_without_the_address_of_a_simulator_is_not_stored():
  device = jax.devices()[0]
  lowered = jax.jit(lambda x: x + 1).lower(jax.device_put(np.ones(2), device))
  program, stored = stored_programs.load_or_compile(lowered, [2**40], device)
  assert stored is None
  assert_array_equal(program(np.ones(2)), [2, 2])


@pytest.mark.parametrize('scheme', ['cleanba', 'fused'])
def test_the_next_segment_traces_and_compiles_nothing(scheme):
  prepared_run = fresh(changed(small(), scheme=scheme))
  first, *_ = run(None, prepared_run=prepared_run)
  with events() as names:
    second, *_ = run(None, prepared_run=prepared_run, index=1)
  assert not compilations(names)
  assert not [event for event in names if event.function in ('rollout', 'fused', 'learner')]
  again, *_ = run(None, prepared_run=fresh(changed(small(), scheme=scheme)), index=1)
  assert first != second == again
