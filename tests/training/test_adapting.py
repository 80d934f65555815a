"""Runs that change their devices while they train have the bits of runs that do not."""

import json

import pytest

from podracer_jit.experiment import placing
from podracer_jit.experiment.resolve import resolve
from podracer_jit.training import adapting
from podracer_jit.workdir import journal
from tests import runs


def receipts_of(workdir):
  lines = map(json.loads, (workdir / 'receipts.jsonl').read_text().splitlines())
  return [line for line in lines if 'update' in line]


@pytest.fixture
def eager(monkeypatch):
  """Has runs try other devices at once, in legs of a few updates, and keep each."""
  for name, value in dict(LEAST_S=0.0, _LEG_S=1e-3, _LEG_UPDATES=3, _FIRST_UPDATES=3,
                          _SHARE=1e9, _GAIN=0.0).items():
    monkeypatch.setattr(adapting, name, value)


@pytest.fixture
def legs(monkeypatch):
  """The legs of runs, in order."""
  taken = []
  take = adapting.Adapting.next

  def note(self):
    taken.append(take(self))
    return taken[-1]

  monkeypatch.setattr(adapting.Adapting, 'next', note)
  return taken


@pytest.mark.parametrize('scheme', ['cleanba', 'sync', 'rapid'])
def test_devices_change_no_bit(tmp_path, eager, legs, scheme):
  config = runs.small(num_shards=2, num_grad_shards=2, total_steps=6000) | {'scheme': scheme}
  assert runs.train(runs.fresh(config), tmp_path / 'adapted')
  assert len({(leg.run.experiment.placement.actor_devices,
               leg.run.experiment.placement.learner_devices) for leg in legs}) > 1
  # Some legs end within a segment, others with it.
  assert any(leg.updates < 6 for leg in legs)
  metrics = journal.read_lines(tmp_path / 'adapted' / journal.METRICS)
  assert all(line[name] >= 0 for line in metrics for name in ('actor_wait_s', 'learner_wait_s'))
  legs.clear()
  assert runs.train(runs.fresh(runs.changed(config, placement__adapt=False)), tmp_path / 'plain')
  assert {leg.run.experiment.placement.learner_devices for leg in legs} == {(0,)}
  assert receipts_of(tmp_path / 'adapted') == receipts_of(tmp_path / 'plain')


def test_a_run_that_adapts_can_be_stopped_and_goes_on(tmp_path, eager, legs):
  config = runs.small(num_shards=2, num_grad_shards=2, total_steps=4000) | {'scheme': 'cleanba'}
  runs.train(runs.fresh(config), tmp_path / 'stopped', stop=13)
  assert runs.train(runs.fresh(config), tmp_path / 'stopped')
  assert len({leg.run.experiment.placement.learner_devices for leg in legs}) > 1
  assert runs.train(runs.fresh(runs.changed(config, placement__adapt=False)), tmp_path / 'plain')
  assert receipts_of(tmp_path / 'stopped') == receipts_of(tmp_path / 'plain')


def test_on_accelerators_only_actors_move(monkeypatch):
  experiment = runs.fresh(runs.small(num_shards=2, num_grad_shards=2)).experiment
  monkeypatch.setattr(adapting.jax, 'local_device_count', lambda: 2)
  learners = {place.learner_devices for place in adapting.candidates(experiment)}
  assert learners == {(0,), (0, 1)}
  monkeypatch.setattr(adapting.jax, 'default_backend', lambda: 'gpu')
  own = experiment.placement.learner_devices
  assert [place.learner_devices for place in adapting.candidates(experiment)] == [own]


def test_devices_that_a_config_sets_are_kept():
  def alternatives(**fields):
    config = runs.changed(runs.small(num_shards=2, num_grad_shards=2), **fields)
    return [(place.actor_devices, place.learner_devices)
            for place in placing.alternatives(resolve(config), devices=2)]

  assert alternatives() == [((0, 1), (0, 1)), ((0, 1), (0,)), ((0,), (0, 1))]
  assert alternatives(placement__actor_devices=(0,)) == [((0,), (0, 1))]
  assert alternatives(placement__auto=False) == [((0, 1), (0, 1)), ((0, 1), (0,)), ((0,), (0, 1))]
  assert alternatives(placement__actor_devices=(0,), placement__learner_devices=(1,)) == []
  assert alternatives(exact_reduce=False) == []
