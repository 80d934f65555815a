"""Runs that change their devices while they train have the bits of runs that do not."""

import collections
import dataclasses
import itertools
import json
import signal
import subprocess
import sys
import threading

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
  for name, value in dict(LEAST_S=0.0, _LEG_S=1e-3, _LEG_CALLS=4, _FIRST_CALLS=4,
                          _PROBE_CALLS=4, _SHARE=1e9, _FAR_SLOWER=1e9, _PAIRS=2,
                          _NOT_SLOWER=0.0, _GAIN=0.0).items():
    monkeypatch.setattr(adapting, name, value)


@pytest.fixture
def at_once(monkeypatch):
  """Has what is built beside the training be ready before the next leg."""
  begin = adapting._Prepared.__init__

  def begin_and_wait(self, *args):
    begin(self, *args)
    self._thread.join()

  monkeypatch.setattr(adapting._Prepared, '__init__', begin_and_wait)


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


def test_the_headers_have_the_devices_with_which_a_segment_begins(tmp_path, eager, at_once,
                                                                  monkeypatch):
  begun = []
  begin = adapting.build.segment

  def note(run, *args):
    begun.append(list(run.experiment.placement.learner_devices))
    return begin(run, *args)

  monkeypatch.setattr(adapting.build, 'segment', note)
  config = runs.small(num_shards=2, num_grad_shards=2, total_steps=6000) | {'scheme': 'cleanba'}
  assert runs.train(runs.fresh(config), tmp_path)
  lines = map(json.loads, (tmp_path / 'receipts.jsonl').read_text().splitlines())
  places = [line['placement'] for line in lines if 'first_update' in line]
  assert [place['learner_devices'] for place in places] == begun
  assert len(places) > 3 and len(set(map(str, begun))) > 1
  assert all(place['env_threads'] >= 1 and place['xla_threads'] >= 2 for place in places)


def test_a_run_that_adapts_can_be_stopped_and_goes_on(tmp_path, eager, legs):
  config = runs.small(num_shards=2, num_grad_shards=2, total_steps=4000) | {'scheme': 'cleanba'}
  runs.train(runs.fresh(config), tmp_path / 'stopped', stop=13)
  assert runs.train(runs.fresh(config), tmp_path / 'stopped')
  assert len({leg.run.experiment.placement.learner_devices for leg in legs}) > 1
  assert runs.train(runs.fresh(runs.changed(config, placement__adapt=False)), tmp_path / 'plain')
  assert receipts_of(tmp_path / 'stopped') == receipts_of(tmp_path / 'plain')


def test_one_program_moves_to_several_devices_and_back(tmp_path, eager, at_once, legs,
                                                       monkeypatch):
  monkeypatch.setattr(adapting, '_COMPILE_S', 0.0)
  config = runs.small(num_shards=2, num_grad_shards=2, total_steps=12_000) | {'scheme': 'fused'}
  config = runs.changed(config, env__task='gymnax:CartPole-v1', env__renew_every_updates=0,
                        placement__updates_per_call=2)
  assert runs.train(runs.fresh(config), tmp_path / 'adapted')
  assert {leg.run.experiment.placement.learner_devices for leg in legs} == {(0,), (0, 1)}
  # Calls of two updates: a leg is a number of calls, and its end is told.
  assert {leg.updates % 2 for leg in legs[:-1]} == {0}
  assert runs.train(runs.fresh(runs.changed(config, placement__adapt=False)), tmp_path / 'plain')
  assert receipts_of(tmp_path / 'adapted') == receipts_of(tmp_path / 'plain')


class Clock:
  """The time of a run whose updates take as long as its devices need."""

  def __init__(self, monkeypatch, seconds):
    self.now = 100.0
    self.seconds = seconds  # of an update, by the number of learner devices
    monkeypatch.setattr(adapting.time, 'perf_counter', lambda: self.now)

  def make(self, chooser, leg, update):
    """Makes the updates of a leg; returns the last one."""
    took = self.seconds(leg.run.experiment.placement)
    last = update + leg.updates
    for number in range(update + 1, last + 1):
      self.now += took
      chooser.told(number, 1000 * number)
    return last


class Ready:
  """A run on other devices that was built at once."""

  is_done = True

  def __init__(self, run, place):
    self.run = dataclasses.replace(
        run, experiment=dataclasses.replace(run.experiment, placement=place))
    self.is_given_up = threading.Event()


def devices_of(place):
  return place.actor_devices, place.learner_devices


def two_devices(total_steps=10_000_000, **fields):
  return runs.changed(runs.small(num_shards=2, num_grad_shards=2), total_steps=total_steps,
                      **fields)


def trial(monkeypatch, seconds, config, start_s=0.0, prepared=Ready):
  """Returns the placement as it began and ended, the legs on trial, and what was said.

  Args:
    monkeypatch: of the test.
    seconds: that an update takes with a placement.
    config: of the run, with 1,000 steps an update.
    start_s: seconds that each change of devices takes.
    prepared: stands for `adapting._Prepared`.

  Returns:
    Two placements; the devices and updates of all legs but the last; and lines.
  """
  monkeypatch.setattr(adapting, '_Prepared', prepared)
  run = runs.fresh(config)
  clock = Clock(monkeypatch, seconds)
  said = []
  chooser = adapting.Adapting(run, said.append)
  taken = []
  update, before = 0, run
  while (leg := chooser.next()).updates < adapting.INT32_MAX:
    if leg.run is not before:
      clock.now += start_s
    before = leg.run
    taken.append((devices_of(leg.run.experiment.placement), leg.updates))
    update = clock.make(chooser, leg, update)
    assert len(taken) < 200
  return run.experiment.placement, leg.run.experiment.placement, taken, said


def test_the_faster_devices_are_kept(monkeypatch):
  def seconds(place):
    return 0.9 if place.learner_devices == (0, 1) else 1.0

  own, kept, taken, (said,) = trial(monkeypatch, seconds, two_devices())
  assert own.learner_devices == (0,) and kept.learner_devices == (0, 1)
  assert f'goes on with actor_devices={kept.actor_devices} learner_devices=(0, 1);' in said
  assert '1.11 times as fast' in said
  # Legs of twelve updates in four pairs, which begin with either.
  first = [learners for (_, learners), updates in taken if updates == 12]
  assert first[:8] == [(0, 1), (0,), (0,), (0, 1)] * 2


def test_slower_devices_are_given_up_after_a_pair(monkeypatch):
  one = (0,), (0,)
  own, kept, taken, _ = trial(
      monkeypatch, lambda place: 1.0 if devices_of(place) == one else 1.2, two_devices())
  assert kept is own and devices_of(own) == one
  tried = collections.Counter(place for place, updates in taken if updates == 12 and place != one)
  assert len(tried) == 3 and set(tried.values()) == {1}
  # Far slower ones after a few updates.
  _, _, taken, _ = trial(
      monkeypatch, lambda place: 1.0 if devices_of(place) == one else 2.0, two_devices())
  assert [updates for place, updates in taken if place != one] == [6, 6, 6]


def test_devices_of_which_the_last_pair_is_slower_are_not_kept(monkeypatch):
  one = (0,), (0,)
  legs = collections.Counter()

  def seconds(place):
    legs[devices_of(place)] += 1
    # The probe and three legs are faster, the fourth one is not.
    return 1.0 if devices_of(place) == one else 0.9 if legs[devices_of(place)] <= 4 else 1.5

  own, kept, taken, _ = trial(monkeypatch, seconds, two_devices())
  assert kept is own
  assert max(collections.Counter(place for place, updates in taken if updates == 12
                                 and place != one).values()) == 4


def test_short_updates_are_measured_in_few_legs(monkeypatch):
  _, _, taken, _ = trial(monkeypatch, lambda place: 0.001, two_devices(total_steps=2_000_000_000))
  place, updates = zip(*taken, strict=True)
  first = next(i for i, other in enumerate(place) if other != place[0])
  # 16 calls, then five seconds; the third leg is beside the probe.
  assert updates[:first] == (16, 5500, 625)


@pytest.mark.parametrize('start_s, fewest, most', [(0.0, 12, 12), (3.0, 4, 8), (30.0, 0, 0)])
def test_trials_take_at_most_their_share(monkeypatch, start_s, fewest, most):
  # Half an hour is left: 36 s may be spent. Three placements are faster, but not by enough to be
  # kept, so each is compared in four pairs unless the time is over.
  one = (0,), (0,)
  own, kept, taken, _ = trial(
      monkeypatch, lambda place: 1.0 if devices_of(place) == one else 0.99,
      two_devices(total_steps=1_800_000), start_s)
  assert kept is own
  assert fewest <= sum(updates == 12 for place, updates in taken if place != one) <= most
  # A change that begins within the share may end beyond it, and then the run goes back.
  switches = sum(a != b for (a, _), (b, _) in itertools.pairwise(taken))
  assert start_s * switches <= 36 + 2 * start_s


def test_what_a_compilation_takes_from_the_training_is_counted(monkeypatch):
  compiling = []

  class Never(Ready):
    """A run whose program compiles for ever."""

    is_done = False

    def __init__(self, run, place):
      super().__init__(run, place)
      compiling.append(place)

  # Quarter of an hour is left: 18 s may be spent, and each leg loses 12.
  _, _, taken, said = trial(monkeypatch, lambda place: 2.0 if compiling else 1.0,
                            two_devices(total_steps=950_000), prepared=Never)
  assert len(compiling) == 1 and not said
  assert [updates for _, updates in taken] == [16, 12, 12]


def test_a_leg_that_a_segment_cuts_short_is_not_measured(monkeypatch):
  clock = Clock(monkeypatch, lambda place: 1.0)
  chooser = adapting.Adapting(runs.fresh(two_devices()), print)
  leg = chooser.next()
  clock.make(chooser, leg._replace(updates=leg.updates // 2), 0)
  assert chooser._seconds() == 0.0
  # It is begun again, but not for ever.
  legs = 1
  while (leg := chooser.next()).updates < adapting.INT32_MAX:
    clock.make(chooser, leg._replace(updates=leg.updates // 2), 0)
    legs += 1
  assert legs == 3


def test_calls_of_several_updates_are_whole(monkeypatch):
  config = two_devices(scheme='fused', env__task='gymnax:CartPole-v1', total_steps=100_000_000,
                       placement__updates_per_call=10)
  _, _, taken, _ = trial(monkeypatch, lambda place: 0.1, config)
  assert taken and {updates % 10 for _, updates in taken} == {0}


@pytest.mark.parametrize('scheme, hours, tries', [
    ('fused', 0.5, False), ('fused', 2.0, True), ('rapid', 0.5, False), ('sync', 0.5, True)])
def test_programs_that_compile_in_a_leg_are_tried_in_long_runs_only(monkeypatch, scheme, hours,
                                                                    tries):
  config = two_devices(scheme=scheme, env__task='gymnax:CartPole-v1',
                       total_steps=round(3_600_000 * hours), placement__updates_per_call=1)
  own, _, taken, _ = trial(monkeypatch, lambda place: 1.0, config)
  assert any(place != devices_of(own) for place, _ in taken) == tries


def test_runs_with_an_auxiliary_phase_keep_their_devices():
  config = runs.small('examples.ppg:PPG', num_shards=2, num_grad_shards=2)
  experiment = runs.fresh(runs.changed(config, network__separate_critic=True)).experiment
  assert experiment.algorithm.auxiliary() and not adapting.candidates(experiment)


def test_what_does_not_depend_on_the_devices_does_not_count(monkeypatch):
  run = runs.fresh(runs.small(num_shards=2, num_grad_shards=2))
  clock = Clock(monkeypatch, lambda place: 1.0)
  chooser = adapting.Adapting(run, print)
  chooser.next()
  for update in range(1, 17):
    clock.now += 1.0
    chooser.told(update, update)
    with chooser.apart():
      clock.now += 50.0
  assert chooser._seconds() == 1.0


def test_devices_without_enough_memory_are_not_tried(tmp_path, eager, at_once, legs, monkeypatch,
                                                     caplog):
  config = runs.small(num_shards=2, num_grad_shards=2, total_steps=4000)
  monkeypatch.setattr(adapting.memory, 'check', lambda run: ['nearly all of it'])
  assert runs.train(runs.fresh(config), tmp_path / 'run')
  assert {leg.run.experiment.placement.learner_devices for leg in legs} == {(0,)}
  assert not caplog.records

  def refuse(run):
    raise ValueError('env.num_envs: does not fit')

  monkeypatch.setattr(adapting.memory, 'check', refuse)
  assert runs.train(runs.fresh(config), tmp_path / 'other')
  assert {leg.run.experiment.placement.learner_devices for leg in legs} == {(0,)}
  assert 'ValueError: env.num_envs: does not fit; placement.adapt=False' in caplog.messages[0]


def test_an_error_on_devices_that_are_tried_says_so(tmp_path, eager, at_once, monkeypatch):
  config = two_devices(total_steps=4000)
  told = adapting.Adapting.told

  def fail(self, *args):
    if self._is_trial:
      raise RuntimeError('RESOURCE_EXHAUSTED')
    told(self, *args)

  monkeypatch.setattr(adapting.Adapting, 'told', fail)
  with pytest.raises(RuntimeError, match='RESOURCE_EXHAUSTED; .*; placement.adapt=False turns'):
    runs.train(runs.fresh(config), tmp_path / 'run')


COMPILING = """
import sys
import time
import jax
import jax.numpy as jnp
from podracer_jit.cli import main
from podracer_jit.experiment import build
from podracer_jit.training import adapting

def compile_long(run):
  print('compiling', file=sys.stderr, flush=True)
  until = time.monotonic() + 60
  n = 0
  while time.monotonic() < until:
    n += 1
    x = jnp.ones((4, 4))
    jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda i, x: jnp.sort(jnp.tanh(x @ x) + i), x)).lower(
        x).compile()
  print('compiled', file=sys.stderr, flush=True)

build.compile_learner = compile_long
adapting.LEAST_S, adapting._LEG_S, adapting._FIRST_CALLS, adapting._SHARE = 0.0, 1e-3, 4, 1e9
sys.argv = ['podracer_jit', *sys.argv[1:]]
main.run()
"""


def test_a_signal_while_other_devices_compile_ends_the_run_as_any_other(tmp_path):
  """A normal exit would wait a minute for the compilation."""
  command = [sys.executable, '-c', COMPILING, '--config=impala_catch', '--config.num_shards=2',
             '--config.num_grad_shards=2', '--config.placement.actor_devices=(0,1)',
             f'--workdir={tmp_path / "run"}']
  process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  lines = []
  for line in process.stderr:
    lines.append(line)
    if line == 'compiling\n':
      process.send_signal(signal.SIGTERM)
  process.stdout.read()
  assert process.wait() == 3, lines
  assert 'compiling\n' in lines and 'compiled\n' not in lines


def test_on_accelerators_only_actors_move(monkeypatch):
  config = runs.small(num_shards=2, num_grad_shards=2)
  experiment = runs.fresh(config).experiment
  fixed = runs.fresh(runs.changed(config, placement__auto=False)).experiment
  monkeypatch.setattr(adapting.jax, 'local_device_count', lambda: 2)
  learners = {place.learner_devices for place in adapting.candidates(experiment)}
  assert learners == {(0,), (0, 1)}
  monkeypatch.setattr(adapting.jax, 'default_backend', lambda: 'gpu')
  own = experiment.placement.learner_devices
  assert [place.learner_devices for place in adapting.candidates(experiment)] == [own]
  # Without a rule there is one device.
  assert not adapting.candidates(fixed)


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
