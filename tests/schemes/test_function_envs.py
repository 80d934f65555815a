"""JAX environments in whole schemes: one program on a mesh, and episodes across segments."""

import gymnax
import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_array_equal

from podracer_jit import loops
from podracer_jit.actor import kept_envs
from podracer_jit.envs import gymnax_envs
from podracer_jit.experiment import build
from podracer_jit.schemes import fused
from tests.runs import changed, fresh, initial_state, prepared, run_in_segments, small

UPDATES = 7
TWO = dict(placement__actor_devices=(0, 1), placement__learner_devices=(0, 1))


def experiment(loss='ppo', **fields):
  """Returns a config on CartPole of gymnax with 4 vector environments and 4 gradient groups."""
  config = small(loss, num_shards=4, num_grad_shards=4, seed=3)
  config['env'] = {'task': 'gymnax:CartPole-v1', 'num_envs': 16, 'max_steps_in_episode': 30}
  config['placement']['updates_per_call'] = 3
  if 'replay' in config:
    config['num_minibatches'] = 1
    config['replay'] |= dict(capacity=4 * 200, min_size=4 * 20, batch_size=32, gradient_steps=2)
  return changed(config, **fields)


def after_segment(run, snapshot):
  """Returns where a run is after the rest of a segment."""
  first = snapshot.begun  # its state is donated
  ends = []

  def after(position, wait_written):
    if position.update == build.segment_end(run.experiment, first):
      ends.append(build.snapshot_at(run, position, snapshot.segment, first))
    return False

  events = build.Events(after=after)
  with build.segment(run, snapshot, 10**6, lambda report: None, events) as segment:
    loops.run(segment.workers)
  return ends[0]


@pytest.fixture(scope='module')
def expected():
  return run_in_segments(experiment(scheme='fused'), (UPDATES,))


class EmptyArrays(gymnax_envs.GymnaxEnv):
  """CartPole with an empty array in its state, like the physics of MJX."""

  def __init__(self, max_steps_in_episode=30):
    env, params = gymnax.make('CartPole-v1')
    super().__init__(env, params.replace(max_steps_in_episode=max_steps_in_episode))

  def reset(self, key):
    obs, state = super().reset(key)
    return obs, (state, jnp.zeros((2, 0)))

  def step(self, key, state, action):
    obs, after, *rest = super().step(key, state[0], action)
    return obs, (after, state[1]), *rest


def test_empty_arrays_in_the_state_change_nothing(expected):
  config = experiment(scheme='fused', **TWO)
  config['env']['task'] = f'{__name__}:EmptyArrays'
  assert run_in_segments(config, (3, 4)) == expected
  run = prepared(config)
  shapes = jax.tree.leaves(build.kept_env_shapes(run))
  assert shapes and all(x.size for x in shapes)


@pytest.mark.parametrize('scheme', ['sync', 'dppo'])
def test_a_stopped_run_continues_from_the_last_used_rollout(expected, scheme):
  """The actor has made one more rollout by then, which must be made again."""
  assert run_in_segments(experiment(scheme=scheme), (5, 2)) == expected


def test_with_a_lag_the_next_segment_continues_the_episodes():
  """The new segment continues from the last used rollout; later rollouts are dropped."""
  run = prepared(experiment(scheme='cleanba', env__renew_every_updates=3))
  snapshot = build.Snapshot(initial_state(run))
  for index in (1, 2):
    snapshot = after_segment(run, snapshot)
    assert (snapshot.segment, snapshot.first, snapshot.before) == (index, None, None)
    envs = snapshot.envs
    assert_array_equal(envs.rollouts, [snapshot.update] * 4)
  assert snapshot.update == 6
  # 6 rollouts of 8 rows, and no more episodes ended than 30 steps allow.
  assert envs.episode_length.max() <= 30 and (envs.simulator.length <= 30).all()
  # An episode's length is counted by the environment and by the actor.
  running = ~envs.ended
  assert_array_equal(envs.simulator.length[running], envs.episode_length[running])


def test_kept_environments_have_the_order_of_all_actors():
  kept = []
  for config in (experiment(scheme='sync'), experiment(scheme='sync', **TWO)):
    config['env']['renew_every_updates'] = 2
    run = prepared(config)
    kept.append(after_segment(run, build.Snapshot(initial_state(run))).envs)
    shapes = build.kept_env_shapes(run)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), kept[-1]) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes)
  jax.tree.map(assert_array_equal, *kept)


def test_a_split_state_is_joined_in_order():
  run = prepared(experiment(scheme='fused', **TWO))
  with build.segment(run, build.Snapshot(initial_state(run)), 3, lambda report: None) as segment:
    state = segment.workers[0].state.actor
  joined = fused.join(state, 2)
  rejoined = fused.join(fused.split(joined, run.place.mesh), 2)
  jax.tree.map(assert_array_equal, kept_envs.gather([rejoined]), kept_envs.gather([joined]))
  assert len(joined.envs) == 4


def test_fused_on_several_devices_needs_jax_environments():
  config = experiment(scheme='fused', **TWO)
  config['env'] = {'task': 'CartPole-v1', 'num_envs': 16}
  with pytest.raises(ValueError, match='fused is on one device, with one actor'):
    fresh(config)
  with pytest.raises(ValueError, match='fused acts where it learns'):
    fresh(experiment(scheme='fused', placement__actor_devices=(0,),
                     placement__learner_devices=(0, 1)))


def test_jax_environments_refuse_env_batch():
  with pytest.raises(ValueError, match='env_batch.*step together'):
    fresh(experiment(scheme='sync', num_shards=1, num_grad_shards=1, env_batch=4))
