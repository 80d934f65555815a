"""Segments whose environments are started while the run trains in the one before."""

import json
import threading

import pytest

from podracer_jit.envs import envpool_envs
from podracer_jit.errors import EnvironmentFailed
from podracer_jit.experiment import build
from podracer_jit.runtime import stored_programs
from podracer_jit.training import stopping
from podracer_jit.training.next_segment import NextSegment
from tests import runs

SEGMENTS = 3
SEGMENT_STEPS = 4 * 8 * 8  # 4 updates of 8 environments x 8 steps
PLACES = {
    'sync': {}, 'fused': {},
    'cleanba': dict(num_shards=2, placement__actor_devices=(1, 2), placement__learner_devices=(0,)),
    'dppo_async': dict(placement__actor_devices=(0,), placement__learner_devices=(0,))}


def config_of(scheme, **fields):
  return runs.changed(runs.small(), scheme=scheme, total_steps=SEGMENT_STEPS * 5 // 2,
                      env__renew_every_updates=4, **(PLACES[scheme] | fields))


def receipts_of(workdir):
  lines = map(json.loads, (workdir / 'receipts.jsonl').read_text().splitlines())
  return [line for line in lines if 'update' in line]


@pytest.fixture
def cannot_exchange(monkeypatch):
  """As on a GPU: addresses of simulators cannot be exchanged in compiled programs."""
  monkeypatch.setattr(stored_programs, 'is_supported', lambda device: False)


@pytest.fixture
def made(monkeypatch):
  """The indices of segments for which environments were started, each with its thread."""
  calls = []
  make = build.make_actor

  def note(run, index, *args):
    calls.append((index, threading.current_thread().name))
    return make(run, index, *args)

  monkeypatch.setattr(build, 'make_actor', note)
  return calls


@pytest.fixture
def pools(monkeypatch):
  """All vector environments that were started."""
  started = []
  begin = envpool_envs.EnvPoolVectorEnv.__init__

  def note(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    started.append(self)

  monkeypatch.setattr(envpool_envs.EnvPoolVectorEnv, '__init__', note)
  return started


def join_beside():
  for thread in threading.enumerate():
    if thread.name == stopping.BESIDE:
      thread.join()


@pytest.mark.parametrize('scheme', ['sync', 'fused', 'cleanba'])
def test_the_bits_are_the_same(tmp_path, monkeypatch, made, pools, scheme):
  config = config_of(scheme)
  assert runs.train(runs.fresh(config), tmp_path / 'exchanged')
  assert all(thread != stopping.BESIDE for _, thread in made)
  made.clear()
  monkeypatch.setattr(stored_programs, 'is_supported', lambda device: False)
  assert runs.train(runs.fresh(config), tmp_path / 'early')
  # Each segment is made once, none for after the end.
  actors = len(PLACES[scheme].get('placement__actor_devices', (0,)))
  assert [index for index, _ in made] == [i for i in range(SEGMENTS) for _ in range(actors)]
  assert all((thread == stopping.BESIDE) == (index > 0) for index, thread in made)
  assert all(pool.address is None for pool in pools)  # closed
  receipts = receipts_of(tmp_path / 'early')
  assert len(receipts) > (SEGMENTS - 1) * 4
  assert receipts == receipts_of(tmp_path / 'exchanged')


@pytest.mark.usefixtures('cannot_exchange')
def test_gradients_that_are_applied_as_they_come(tmp_path, made):
  assert runs.train(runs.fresh(config_of('dppo_async')), tmp_path)
  assert [thread == stopping.BESIDE for _, thread in made] == [False] + [True] * (SEGMENTS - 1)


@pytest.mark.usefixtures('cannot_exchange')
def test_a_stopped_run_closes_them_and_goes_on(tmp_path, made, pools):
  config = config_of('cleanba')
  runs.train(runs.fresh(config), tmp_path / 'stopped', stop=7)  # of the second segment
  join_beside()
  assert (2, stopping.BESIDE) in made
  assert all(pool.address is None for pool in pools)
  assert runs.train(runs.fresh(config), tmp_path / 'stopped')
  assert runs.train(runs.fresh(config), tmp_path / 'whole')
  assert receipts_of(tmp_path / 'stopped') == receipts_of(tmp_path / 'whole')


@pytest.mark.usefixtures('cannot_exchange')
def test_if_they_cannot_be_started_early_the_segment_starts_them(tmp_path, monkeypatch, caplog):
  assert runs.train(runs.fresh(config_of('sync')), tmp_path / 'early')
  make = build.make_actor

  def fail_beside(*args):
    if threading.current_thread().name == stopping.BESIDE:
      raise EnvironmentFailed('two of them at once are too many')
    return make(*args)

  monkeypatch.setattr(build, 'make_actor', fail_beside)
  assert runs.train(runs.fresh(config_of('sync')), tmp_path / 'late')
  assert receipts_of(tmp_path / 'late') == receipts_of(tmp_path / 'early')
  assert caplog.text.count('two of them at once are too many') == SEGMENTS - 1


def test_those_of_another_segment_or_run_are_closed(pools):
  run = runs.fresh(config_of('sync'))
  other = runs.fresh(config_of('sync'))
  for wanted in ((run, 2), (other, 1)):
    early = NextSegment(run, 1)
    assert early.take(*wanted) == ()
    join_beside()
    assert pools and all(pool.address is None for pool in pools)
    pools.clear()
  (actor,) = NextSegment(run, 1).take(run, 1)
  (pool,) = pools
  assert pool.address is not None
  actor.rollout_program.close()
  assert pool.address is None


@pytest.mark.usefixtures('cannot_exchange')
@pytest.mark.parametrize('task, expected', [
    ('CartPole-v1', True), ('gymnasium:CartPole-v1', False), ('gymnax:CartPole-v1', False)])
def test_only_simulators_with_an_address_are_started_early(task, expected):
  run = runs.fresh(config_of('sync', env__task=task))
  assert build.compiles_each_segment(run) == expected


