"""A run that is stopped anywhere goes on to the bits of a run that was never stopped.

The runs are real, in this process, with segments of four updates. Where a case says so, the run
goes on with other devices, actors or threads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from podracer_jit.workdir import checkpoints
from tests import runs
from tests.runs import changed, contents, fresh, small
from tests.schemes import test_apex, test_function_envs
from tests.tiers import essential

SEGMENT = 4  # updates
# Twice in a segment: one update before its end, at its end, and one update after it.
STOPS = (2, 3, 4, 5)
TWO = dict(actor_devices=(0, 1), learner_devices=(0, 1))
SPLIT = dict(actor_devices=(0, 1), learner_devices=(2, 3))


class Case(NamedTuple):
  """An experiment, and how the run that goes on is placed."""

  config: Callable[[], dict[str, Any]]
  first: Mapping[str, Any] = {}  # noqa: RUF012 - the placement of the run
  then: Mapping[str, Any] = {}  # noqa: RUF012 - that of every second run that goes on
  stops: Sequence[int] = STOPS
  updates: int = 6


def two_shards(*args, **fields):
  return small(*args, num_shards=2, num_grad_shards=2, **fields)


def with_scheme(scheme, config=two_shards, *args, **fields):
  return lambda: changed(config(*args), scheme=scheme, **fields)


def normalised():
  config = two_shards('ppo', 'InvertedPendulum-v4', num_epochs=2)
  return changed(config, normalise={'obs': True, 'reward': True, 'value': True})


def recurrent():
  return changed(two_shards('ppo'), network__core='gru', network__core_size=8)


def gymnasium():
  return two_shards('impala', 'gymnasium:CartPole-v1')


def replay(kind):
  return test_apex.config(kind, replay__batch_size=64, replay__min_size=300, replay__capacity=1000)


CASES = {
    'sync': Case(with_scheme('sync'), then=dict(actors_per_device=2, env_threads=2)),
    'cleanba': Case(with_scheme('cleanba'), then=SPLIT),
    'fused': Case(with_scheme('fused'), dict(updates_per_call=3), dict(updates_per_call=2)),
    'dppo': Case(with_scheme('dppo'), TWO),
    'rapid': Case(with_scheme('rapid'), SPLIT, dict(actor_devices=(0,), learner_devices=(1,))),
    'GRU': Case(with_scheme('sync', recurrent), then=dict(env_threads=1)),
    'GRU, lag': Case(with_scheme('cleanba', recurrent), then=TWO),
    'moments': Case(with_scheme('sync', normalised), then=TWO),
    'moments, lag': Case(with_scheme('cleanba', normalised), then=TWO),
    'replay': Case(with_scheme('apex_lockstep', replay, 'dqn'), then=SPLIT),
    'replay, recent rows': Case(with_scheme('apex_lockstep', replay, 'dpg'), then=SPLIT),
    'replay, moments': Case(with_scheme('apex_lockstep', replay, 'dqn', normalise__obs=True),
                            then=SPLIT),
    'Gymnasium': Case(with_scheme('cleanba', gymnasium), then=dict(actors_per_device=2)),
    'JAX environments': Case(with_scheme('sync', test_function_envs.experiment), then=TWO),
    'JAX environments, fused': Case(with_scheme('fused', test_function_envs.experiment),
                                    dict(updates_per_call=3), TWO),
    'JAX environments, lag': Case(with_scheme('cleanba', test_function_envs.experiment),
                                  then=SPLIT),
    # From the beginning of a segment that never ends.
    'one segment': Case(with_scheme('cleanba', env__renew_every_updates=0), stops=(1, 5)),
}


def run_of(case, placement):
  config = case.config()
  if 'renew_every_updates' not in config['env'] or config['env']['renew_every_updates']:
    config['env']['renew_every_updates'] = SEGMENT
  rows = config['unroll_length'] * config['env']['num_envs']
  config = changed(config, total_steps=rows * (case.updates - 1) + 1, log__tensorboard=False,
                   checkpoint__every_updates=0, checkpoint__every_seconds=0.0)
  return fresh(changed(config, **{f'placement__{name}': value
                                  for name, value in placement.items()}))


@pytest.mark.parametrize('name', essential(CASES, 'sync', 'cleanba', 'JAX environments'))
def test_a_stopped_run_ends_with_the_bits_of_one_that_was_never_stopped(name, tmp_path):
  case = CASES[name]
  first = run_of(case, case.first)
  assert runs.train(first, tmp_path / 'never')
  expected = contents(tmp_path / 'never')
  assert max(expected[0]) >= case.updates
  others = [first, run_of(case, case.first | case.then) if case.then else first]
  stopped = tmp_path / 'stopped'
  for number, update in enumerate(case.stops):
    assert not runs.train(others[number % 2], stopped, update)
    assert checkpoints.saved_updates(stopped)[-1] == update
  assert runs.train(others[len(case.stops) % 2], stopped)
  assert contents(stopped) == expected
