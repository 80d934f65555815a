"""Options of a run on a cluster: refusals, and decisions before the run begins."""

import contextlib
import importlib.util
import subprocess
import sys
import time

import pytest

from podracer_jit import experiment, parts
from podracer_jit.cluster import ray_cluster
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import resolve
from podracer_jit.training import crew
from tests import processes
from tests.runs import changed, small

# As in the configs: a rule chooses.
OPEN = experiment.config('ppo', 'mlp', 'adam', scheme='sync').placement.to_dict()


def remote(scheme='impala', **fields):
  return changed(small(), scheme=scheme, placement__cluster='ray', **fields)


@pytest.mark.quick
@pytest.mark.parametrize('scheme', ['sync', 'cleanba', 'fused'])
def test_schemes_whose_actors_wait_are_refused(scheme):
  with pytest.raises(ValueError, match=rf'^placement.cluster: actors of {scheme} wait .* '
                     'dppo_async, rapid_async, impala, apex take ray$'):
    resolve(remote(scheme))


def test_actor_platform_is_refused_with_a_cluster():
  with pytest.raises(ValueError, match=r'^placement.actor_platform: .*actor_gpus'):
    resolve(remote(placement__actor_platform='cpu'))


def test_only_training_can_use_a_cluster():
  with pytest.raises(ValueError, match=r'^placement.cluster: ray is for training; .* none$'):
    build.make_run(resolve(remote()))


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match='pip install ray$'), crew.joined(
      remote()):
    pass


def test_a_wrong_config_is_refused_before_ray_starts():
  done = processes.run([sys.executable, '-m', 'podracer_jit', '--config=impala_catch',
                        '--config.placement.cluster=ray', '--config.scheme=sync'])
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert line.startswith('podracer_jit: placement.cluster: actors of sync wait')


def test_first_lives_have_the_seeds_of_threads_and_later_lives_have_others():
  first = env_seeds(1, 0, 0, 100)
  assert env_seeds(1, 0, 0, 100, life=0) == first
  lives = [seed for life in range(20) for seed in env_seeds(1, 0, 0, 100, life)]
  assert len(set(lives)) > 0.999 * len(lives)


def test_the_number_of_processes():
  two_actors = dict(num_shards=2, placement__actors_per_device=2)
  assert crew.num_processes(resolve(remote(**two_actors))) == 2
  workers = dict(num_shards=2, num_grad_shards=2, placement__actor_devices=(0, 0),
                 placement__learner_devices=(0, 0))
  config = changed(small('ppo'), placement__cluster='ray', **workers)
  assert crew.num_processes(resolve(changed(config, scheme='dppo_async'))) == 2
  assert crew.num_processes(resolve(changed(config, scheme='rapid_async'))) == 4


@contextlib.contextmanager
def _stopped_here(cpus, gpus, lives, processes, store_bytes, files):
  raise RuntimeError(f'{processes} processes')
  yield


@pytest.mark.parametrize('fields, count', [
    (dict(num_shards=4, placement__actors_per_device=4), 8),
    (dict(num_shards=4, placement__actors_per_device=2, placement__actor_devices=(0, 0)), 8),
    ({}, 2)])
def test_a_cluster_has_room_for_actors_of_tasks_that_start_jax(fields, count, monkeypatch):
  monkeypatch.setattr(ray_cluster, 'connected', _stopped_here)
  config = remote(env__task='gymnax:CartPole-v1')
  config['placement'] = OPEN | dict(cluster='ray')
  config = changed(config, **fields)
  with pytest.raises(RuntimeError, match=f'^{count} processes'), crew.joined(config):
    pass


def test_workers_on_one_device_need_no_other_field():
  for scheme in ('dppo_async', 'rapid_async'):
    config = changed(small('ppo'), scheme=scheme, num_shards=3, num_grad_shards=3, env__num_envs=12)
    config['placement'] = OPEN | dict(cluster='ray', learner_devices=(0, 0, 0))
    assert resolve(config).placement.actor_devices == (0, 0, 0)


def test_processes_of_a_cluster_choose_nothing_for_themselves():
  """Else each would take threads by the cores of its machine, and not by what it reserves."""
  class Cluster:
    def takes_over(self, owner):
      return True

    def remote(self, name, factory, args):
      (self.fields, *_), self.name = args(0), name

  config = remote(num_shards=2)
  config['placement'] = OPEN | dict(cluster='ray', actors_per_device=2, actor_cpus=2)
  cluster = Cluster()
  crew.Crew(cluster, resolve(config))
  assert resolve(cluster.fields).placement.env_threads == 0


def test_bytes_in_flight_depend_on_the_rollouts_and_start_no_backend():
  small_rollouts = crew.bytes_under_way(resolve(remote()))
  config = remote()
  config['unroll_length'] *= 100
  assert 10 < crew.bytes_under_way(resolve(config)) / small_rollouts < 100
  script = ('from podracer_jit.training import crew\n'
            'from podracer_jit.experiment.resolve import resolve\n'
            'from jax._src import xla_bridge\nimport podracer_jit as pj\n'
            'config = pj.load_config("impala_catch")\nconfig.scheme = "impala"\n'
            'assert crew.bytes_under_way(resolve(config)) > 1000\n'
            'assert not xla_bridge.backends_are_initialized()')
  subprocess.run([sys.executable, '-c', script], check=True)


def test_users_modules_are_shipped_with_the_files_beside_them(tmp_path, monkeypatch):
  for name in ('mine.py', 'beside.py', 'package/__init__.py', 'package/deep/part.py',
               'data/large.py', 'notes.txt'):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('')
  parts.look_beside(tmp_path / 'mine.py')
  shipped = crew.code({'network': {'name': 'mine:Torso'}, 'env': {'task': 'Catch-v0'}})
  assert {path.relative_to(tmp_path).as_posix() for path in shipped} == {
      'mine.py', 'beside.py', 'package'}
  # A config file may register what the task needs.
  for task, count in (('gymnasium:X-v0', 3), ('Catch-v0', 0)):
    assert len(crew.code({'env': {'task': task}})) == count
  monkeypatch.setattr(parts, '_files', [])
  # An installed package is on each machine already.
  assert not crew.code({'network': {'name': 'flax.linen:Dense'}})


def test_two_calls_are_in_flight_if_the_round_trip_is_long():
  pytest.importorskip('ray')
  from podracer_jit.cluster.remote import Answer
  from podracer_jit.schemes.remote import Pace

  def calls_after(rollout_s, trip_s, most=2):
    pace = Pace(most)
    for seconds in (100.0, *[rollout_s] * 5):  # the first one compiles
      assert pace.calls == 1
      pace.take_times(Answer(None, seconds, seconds + trip_s))
    return pace.calls

  assert calls_after(0.010, 0.002) == 2
  assert calls_after(0.100, 0.002) == 1
  assert calls_after(0.010, 0.002, most=1) == 1


def test_waits_end_some_time_after_a_stop():
  asked = []
  is_overdue = crew.overdue(lambda: bool(asked), grace_s=0.2)
  assert not is_overdue()
  asked.append(1)
  assert not is_overdue()
  time.sleep(0.25)
  assert is_overdue()


def test_a_part_of_the_main_program_is_refused_on_a_cluster():
  config = {'loss': {'name': '__main__:Mine'}, 'placement': {'cluster': 'ray'}}
  with pytest.raises(ValueError, match='loss.name: is in the main program .* mine.py'):
    with crew.joined(config):
      pass
