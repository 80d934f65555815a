"""New environments step through the actions of old ones, and are then where those were."""

import contextlib
import functools
import re
import threading

import jax
import numpy as np
import pytest

from podracer_jit.actor import kept_envs
from podracer_jit.errors import EnvironmentFailed, Stuck
from podracer_jit.experiment import build
from podracer_jit.runtime.channels import Closed
from podracer_jit.schemes import replaying
from tests.envs import test_families
from tests.runs import changed, fresh, initial_state, prepared, small
from tests.test_loops import must_end

ROLLOUTS = 5


TELLS = 'tests.envs.tells:Tells'

# Task, options and network.
TASKS = {
    'Pong': ('Pong-v5', dict(img_height=21, img_width=21, max_episode_steps=12), 'nature_cnn'),
    'CartPole': ('CartPole-v1', {}, 'mlp'),
    'HalfCheetah': ('HalfCheetah-v4', {}, 'mlp'),
    'a vector of numbers, Gymnasium': (TELLS, {}, 'mlp'),
    **{f'{family}: {task}': (task, options, network)
       for family, task, options, network in test_families.TASKS if family != 'atari'}}
ENDS = {'Pong', 'CartPole', 'a vector of numbers, Gymnasium'}
ESSENTIAL = {*ENDS, 'HalfCheetah', 'mujoco.dmc: CartpoleBalance-v1'}
SIZES = test_families.SIZES | {
    'nature_cnn': {'channels': (4,), 'kernels': (4,), 'strides': (4,), 'hidden': 8}}


def config_of(task, options, network, **fields):
  config = small('ppo', task, network)
  config['env'] = {'task': task, 'num_envs': 4, **options}
  config['network'] |= SIZES[network]
  fields = dict(placement__env_threads=1) | fields
  return changed(config, num_shards=2, num_minibatches=1, **fields)


def first(run):
  return build.Snapshot(initial_state(run), first=0)


def roll(run, actor, state):
  """Returns the state of an actor after one more rollout, and the rollouts, on the host."""
  program = actor.rollout_program
  given = jax.tree.map(lambda x: x.addressable_data(0),
                       run.learner.algorithm.for_actors(initial_state(run)))
  given = jax.device_put(given, actor.device)
  function = program.load(run.acting.rollout(program.vector_envs), (given, state), donate=(),
                          kept=run.kept_programs)
  state, rollouts = function(given, state)
  return state, jax.device_get(rollouts)


def drive(run, rollouts=ROLLOUTS):
  """Returns a snapshot after some rollouts of new environments, and the rollout after it."""
  with contextlib.ExitStack() as stack:
    (actor,) = build.make_actors(run, first(run), stack)
    state = actor.state
    sent = []
    for _ in range(rollouts):
      state, _ = roll(run, actor, state)
      sent.append([np.asarray(env.sent) for env in state.envs])
    snapshot = first(run)._replace(envs=kept_envs.gather([state]), sent=np.array(sent))
    _, following = roll(run, actor, state)
  return snapshot, following


@functools.cache
def driven(name, **fields):
  return drive(prepared(config_of(*TASKS[name], **fields)))


def next_rollouts(run, snapshot):
  """Returns the rollouts of all actors that go on from a snapshot."""
  with contextlib.ExitStack() as stack:
    actors = build.make_actors(run, snapshot, stack)
    return [x for actor in actors for x in roll(run, actor, actor.state)[1]]


def check_equal(left, right):
  for a, b in zip(left, right, strict=True):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(
        np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)), a, b)


def replay_of(run, snapshot, actor, state):
  """Returns the `Replay` of the only actor of a run."""
  return replaying.Replay(run.experiment.env.task, [5, 6, 7, 8], actor.rollout_program, state,
                          snapshot.sent, state._replace(envs=tuple(
                              kept_envs.pick(snapshot.envs, i, env)
                              for i, env in enumerate(state.envs))))


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name in ESSENTIAL else pytest.mark.full) for name in TASKS])
def test_new_environments_go_on_where_the_old_ones_were(name):
  """`make_actors` compares observations and ends of episodes; the next rollout tells the rest."""
  run = prepared(config_of(*TASKS[name]))
  snapshot, following = driven(name)
  assert snapshot.sent.shape[:4] == (ROLLOUTS, 2, 8, 2) and len(np.unique(snapshot.sent)) > 1
  if name in ENDS:
    assert (snapshot.envs.episode_length < ROLLOUTS * 8).any()
  check_equal(next_rollouts(run, snapshot), following)


@pytest.mark.parametrize('fields', [
    dict(placement__env_threads=3),
    dict(placement__actor_devices=(0, 1), placement__learner_devices=(0, 1), num_grad_shards=2)])
def test_they_go_on_with_other_threads_and_actors(fields):
  run = prepared(config_of(*TASKS['Pong'], **fields))
  snapshot, following = driven('Pong')
  check_equal(next_rollouts(run, snapshot), following)


@pytest.mark.parametrize('length', [1, 3, 7, 1024])
def test_the_length_of_a_call_changes_nothing(length, monkeypatch):
  monkeypatch.setattr(replaying, '_MOST_STEPS', length)
  snapshot, following = driven('CartPole')
  check_equal(next_rollouts(prepared(config_of(*TASKS['CartPole'])), snapshot), following)


def changed_action(snapshot, where, change):
  sent = snapshot.sent.copy()
  sent[where] = change(sent[where])
  assert not np.array_equal(sent, snapshot.sent)
  return snapshot._replace(sent=sent)


@pytest.mark.parametrize('name, where, change', [
    ('HalfCheetah', (0, 1, 3, 1, 3), lambda x: np.nextafter(x, np.float32(0))),
    ('CartPole', (ROLLOUTS - 1, 0, 7, 1), lambda x: 1 - x),
    ('a vector of numbers, Gymnasium', (ROLLOUTS - 1, 1, 6, 0, 1), lambda x: (x + 1) % 300)])
def test_another_action_is_noticed(name, where, change):
  run = prepared(config_of(*TASKS[name]))
  snapshot = changed_action(driven(name)[0], where, change)
  task = run.experiment.env.task
  with contextlib.ExitStack() as stack, pytest.raises(replaying.OtherEpisodes, match=(
      f'^env.task: {task} cannot go on where it was: after 40 steps with the same seeds and ')):
    build.make_actors(run, snapshot, stack)


def test_other_seeds_are_noticed():
  run = prepared(config_of(*TASKS['CartPole']))
  with contextlib.ExitStack() as stack, pytest.raises(replaying.OtherEpisodes):
    build.make_actors(run, driven('CartPole')[0]._replace(segment=1), stack)


def test_progress_is_told_from_no_step_to_all():
  told = []
  run = prepared(config_of(*TASKS['CartPole']))
  with contextlib.ExitStack() as stack:
    build.make_actors(run, driven('CartPole')[0], stack,
                      build.Events(replaying=lambda *x: told.append(x)))
  total = ROLLOUTS * 8 * 4
  assert told[0] == (0, total) and told[-1] == (total, total) and told == sorted(told)


@pytest.fixture
def watched(tmp_path):
  """Environments whose steps obey files in a folder: a run, a snapshot of it, and new ones."""
  run = prepared(config_of(TELLS, {}, 'mlp'))
  watched = fresh(config_of(TELLS, {'folder': str(tmp_path)}, 'mlp'))
  with contextlib.ExitStack() as stack:
    (actor,) = build.make_actors(watched, first(run), stack)
    snapshot, _ = driven('a vector of numbers, Gymnasium')
    yield tmp_path, replay_of(watched, snapshot, actor, actor.state)
    for path in tmp_path.glob('*.waits'):
      path.with_suffix('.goes_on').touch()
    for thread in threading.enumerate():
      if thread.name.startswith('replay of'):
        thread.join()


def test_a_stop_ends_a_replay_after_the_call_that_is_under_way(watched, monkeypatch):
  folder, replay = watched
  monkeypatch.setattr(replaying, '_MOST_STEPS', 4)
  monkeypatch.setattr(replaying, '_CALL_S', 1e9)  # calls are as long as they may be
  (folder / '6.waits').touch()  # calls are of 1, 4, ... steps
  (folder / '10.waits').touch()

  def stop():
    if not (folder / '6.reached').exists():
      return False
    (folder / '6.goes_on').touch()
    return True

  with pytest.raises(Closed):
    replaying.replay([replay], {}, stop, lambda done, total: None)
  assert not (folder / '10.reached').exists()


def test_an_environment_that_hangs_is_named(watched, monkeypatch, capsys):
  folder, replay = watched
  for name, value in (('_MOST_STEPS', 4), ('_CALL_S', 1e9), ('PATIENCE_S', 0.2), ('_GRACE_S', 0.1)):
    monkeypatch.setattr(replaying, name, value)
  (folder / '6.waits').touch()
  warned = []

  def complain(text):
    warned.append(text)

  monkeypatch.setattr(replaying, 'complain', complain)
  where = (f'{TELLS}, replayed to step 5 of each environment \\(seeds 5, 6, 7, 8\\)')
  with pytest.raises(Stuck, match=f'^{where} did not end within 0 s$') as error:
    replaying.replay([replay], {}, lambda: len(warned) > 2, lambda done, total: None)
  assert isinstance(error.value.__cause__, EnvironmentFailed)
  assert re.fullmatch(f'podracer_jit: warning: waiting for 0 s for {where}', warned[-1])


def test_an_environment_that_fails_is_named_with_its_error(watched, monkeypatch):
  folder, replay = watched
  monkeypatch.setattr(replaying, '_MOST_STEPS', 4)
  monkeypatch.setattr(replaying, '_CALL_S', 1e9)
  (folder / '8.fails').write_text('no such level')
  with pytest.raises(EnvironmentFailed, match=(
      f'^{TELLS}: step 8 .* no such level.*; it was replayed, in one of the steps 6 to 9$')
      ) as error:
    replaying.replay([replay], {}, lambda: False, lambda done, total: None)
  assert '\n' not in str(error.value)


def test_a_failure_does_not_wait_for_an_environment_that_hangs(watched, monkeypatch):
  folder, replay = watched
  monkeypatch.setattr(replaying, '_GRACE_S', 0.1)
  (folder / '1.waits').touch()
  snapshot = changed_action(driven('CartPole')[0], (ROLLOUTS - 1, 0, 7, 1), lambda x: 1 - x)
  run = prepared(config_of(*TASKS['CartPole']))
  with contextlib.ExitStack() as stack:
    (actor,) = build.make_actors(run, first(run), stack)
    other = replay_of(run, snapshot, actor, actor.state)
    with pytest.raises(Stuck, match=f'^{TELLS}, replayed to .* did not end within 0 s') as error:
      must_end(lambda: replaying.replay([replay, other], {}, lambda: False, lambda *_: None))
  assert isinstance(error.value.__cause__, replaying.OtherEpisodes)


def test_nothing_is_replayed_without_environments():
  replaying.replay([], {}, lambda: False, lambda done, total: pytest.fail('told'))
