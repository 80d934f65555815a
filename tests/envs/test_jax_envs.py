"""Environments that are JAX functions: rows, random streams, and errors in such functions."""

import sys

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.envs import gymnax_envs, jax_envs
from podracer_jit.envs import spaces as env_spaces
from podracer_jit.envs.families import family_of, own_module
from podracer_jit.workdir import checkpoints

CARTPOLE = 'gymnax:CartPole-v1'


class Counter:
  """Counts its steps. Episodes of even seeds terminate after 3 steps, the others do not."""

  observation_space = spaces.Box(0, np.inf, (2,), np.float32)
  action_space = spaces.Discrete(4)
  max_episode_steps = 5

  def reset(self, key):
    odd = jax.random.key_data(key)[..., -1] % 2
    state = jnp.zeros((), jnp.int32), odd.astype(jnp.int32)
    return self._observe(state), state

  def step(self, key, state, action):
    state = state[0] + 1, state[1]
    terminated = (state[0] == 3) & (state[1] == 0)
    return self._observe(state), state, 10.0 + action, terminated, False, None

  def _observe(self, state):
    return jnp.stack(state).astype(jnp.float32)


def counters(**changes):
  """Returns a family of `Counter` with some attributes replaced."""
  env = type('Changed', (Counter,), changes)()
  return jax_envs.JaxFamily(lambda task, options: env)


def steps_of(vector_env, actions):
  """Returns the TimeSteps [T, B, ...] of a vector environment for actions [T, B]."""
  def step(state, action):
    _, state, step = vector_env.recv(*vector_env.send(jnp.int32(0), state, action))
    return state, step
  return jax.jit(lambda state: jax.lax.scan(step, state, actions))(vector_env.first_state)[1]


@pytest.mark.quick
def test_the_step_after_an_episode_is_a_reset():
  vector_env = counters().make_vector_env('counter', {}, range(8))
  steps = jax.device_get(steps_of(vector_env, jnp.ones((12, 8), jnp.int32)))
  kinds = vector_env.first_obs[:, 1]
  assert set(np.asarray(kinds)) == {0, 1}
  for env in range(8):
    count = 0
    kind = int(kinds[env])
    ended = False
    for t in range(12):
      if ended:  # this step is a reset: it draws the kind of the next episode
        count = 0
        kind = int(steps.obs[t, env, 1])
        expected = (0.0, False, False)
      else:
        count += 1
        terminated = kind == 0 and count == 3
        expected = (11.0, terminated, count == 5 and not terminated)
      assert (steps.reward[t, env], steps.terminated[t, env], steps.truncated[t, env]) == expected
      assert_array_equal(steps.obs[t, env], [count, kind])
      ended = expected[1] or expected[2]
  assert_array_equal(steps.raw_reward, steps.reward)
  assert_array_equal(steps.game_over, steps.terminated)
  assert steps.truncated.any() and steps.terminated.any()


def test_a_step_that_terminates_at_the_time_limit_is_not_truncated():
  vector_env = counters(max_episode_steps=3).make_vector_env('counter', {}, range(8))
  steps = jax.device_get(steps_of(vector_env, jnp.zeros((3, 8), jnp.int32)))
  even = np.asarray(vector_env.first_obs[:, 1]) == 0
  assert_array_equal(steps.terminated[2], even)
  assert_array_equal(steps.truncated[2], ~even)


def test_gymnax_tasks_equal_gymnaxs_own_functions():
  """Each environment alone, step by step, with gymnax's functions and no vmap."""
  import gymnax
  env, params = gymnax.make('CartPole-v1')
  params = params.replace(max_steps_in_episode=12)
  vector_env = gymnax_envs.FAMILY.make_vector_env(CARTPOLE, {'max_steps_in_episode': 12}, [3, -7])
  actions = np.random.default_rng(0).integers(0, 2, (60, 2)).astype(np.int32)
  actions[:, 1] = 1  # falls over before the time limit
  steps = jax.device_get(steps_of(vector_env, jnp.array(actions)))
  assert steps.truncated.any() and steps.terminated.any()
  step_env, reset_env = jax.jit(env.step_env), jax.jit(env.reset_env)
  for i, seed in enumerate((3, -7)):
    key, step_key = jax.random.split(jax.random.key(seed))
    obs, state = reset_env(step_key, params)
    assert_allclose(vector_env.first_obs[i], obs, rtol=1e-6)
    ended = False
    for t in range(60):
      key, step_key = jax.random.split(key)
      if ended:
        obs, state = reset_env(step_key, params)
        expected = (0.0, False, False)
      else:
        obs, state, reward, terminated, _ = step_env(step_key, state, actions[t, i], params)
        truncated = bool(state.time >= 12) and not terminated
        expected = (float(reward), bool(terminated), truncated)
      assert (steps.reward[t, i], steps.terminated[t, i], steps.truncated[t, i]) == expected, t
      assert_allclose(steps.obs[t, i], obs, rtol=1e-4, atol=1e-6)
      ended = expected[1] or expected[2]


def test_episodes_do_not_depend_on_how_environments_are_split():
  actions = jnp.array(np.random.default_rng(1).integers(0, 2, (40, 6)), jnp.int32)
  make = gymnax_envs.FAMILY.make_vector_env
  together = steps_of(make(CARTPOLE, {}, range(6)), actions)
  for first, last in ((0, 2), (2, 6)):
    apart = steps_of(make(CARTPOLE, {}, range(first, last)), actions[:, first:last])
    assert_array_equal(apart.obs, together.obs[:, first:last])


@pytest.mark.parametrize('task, obs, num_actions, low', [
    ('CartPole-v1', (4,), 2, ()),
    ('Pendulum-v1', (3,), 0, (-2.0,)),
    ('MountainCarContinuous-v0', (2,), 0, (-1.0,)),
    ('Breakout-MinAtar', (10, 10, 4), 3, ()),
    ('Catch-bsuite', (10, 5), 3, ()),
    ('Reacher-misc', (8,), 0, (-1.0, -1.0)),
    ('FourRooms-misc', (4,), 4, ()),
])
def test_tasks_of_gymnax_are_described_and_step(task, obs, num_actions, low):
  family = gymnax_envs.FAMILY
  spec = family.make_spec(f'gymnax:{task}', {})
  assert (spec.obs_shape, spec.num_actions, spec.action_low) == (obs, num_actions, low)
  assert spec.is_function
  vector_env = family.make_vector_env(f'gymnax:{task}', {}, [1, 2, 3])
  action = jnp.zeros((4, 3), jnp.int32) if num_actions else jnp.zeros((4, 3, len(low)))
  steps = steps_of(vector_env, action)
  assert steps.obs.shape == (4, 3, *obs) and steps.obs.dtype == spec.obs_dtype
  assert np.isfinite(steps.reward).all()


def test_state_shapes_are_those_of_the_first_state():
  state = gymnax_envs.FAMILY.make_vector_env(CARTPOLE, {}, range(5)).first_state
  expected = jax.tree.map(lambda x: (x.shape, x.dtype), state)
  shapes = gymnax_envs.FAMILY.state_shapes(CARTPOLE, {}, 5)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == expected


@pytest.mark.parametrize('task, options, message', [
    ('gymnax:CartPole-v9', {}, 'env.task: gymnax has no task .*CartPole-v9.*gymnax:CartPole-v1'),
    (CARTPOLE, {'gravty': 1.0}, 'env.gravty: not an option of gymnax:CartPole-v1; .*gravity'),
    (CARTPOLE, {'gravity': 'up'}, "env.gravity: must be of type float, got 'up'"),
])
def test_an_unknown_task_or_option_of_gymnax_is_reported_in_one_line(task, options, message):
  with pytest.raises(ValueError, match=message) as error:
    family_of(task).make_spec(task, options)
  assert '\n' not in str(error.value)


def fails(self, *args):
  raise RuntimeError('no such luck')


@pytest.mark.parametrize('changes, message', [
    (dict(step=fails), 'counter cannot be traced: RuntimeError: no such luck'),
    (dict(reset=lambda self, key: (jnp.zeros(3), Counter.reset(self, key)[1])),
     'reset and step of counter give different shapes or dtypes of the observation'),
    (dict(reset=lambda self, key: (jnp.zeros(2), jnp.zeros((2,)))),
     'reset and step of counter give different shapes or dtypes of the state'),
    (dict(reset=lambda self, key: ({'x': jnp.zeros(2)}, jnp.zeros(()))), 'cannot be traced'),
    (dict(observation_space=spaces.Dict(a=spaces.Discrete(2))),
     'the observations of counter do not fit its observation_space'),
    (dict(action_space=spaces.Box(-1, 1, (2, 2))), 'the actions of counter are Box'),
    (dict(step=lambda self, key, state, action: (
        *Counter.step(self, key, state, action)[:2], jnp.zeros(2), False, False, None)),
     'cannot be traced|the reward of counter must be a scalar'),
])
def test_functions_that_do_not_fit_their_spaces_are_reported_in_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as error:
    counters(**changes).make_spec('counter', {})
  assert '\n' not in str(error.value)


class Several(Counter):
  """Observes a dict of its last action and its count; an action is two choices."""

  observation_space = spaces.Dict(
      last=spaces.MultiDiscrete([2, 3]), count=spaces.Box(0, 9, (1,), np.int32),
      of_6=spaces.Tuple([spaces.Discrete(6)]))
  action_space = spaces.MultiDiscrete([2, 3])

  def reset(self, key):
    return self._observation(jnp.zeros(2, jnp.int32), jnp.int32(0)), super().reset(key)[1]

  def step(self, key, state, action):
    _, state, _, terminated, truncated, _ = super().step(key, state, 0)
    return self._observation(action, state[0]), state, action[1], terminated, truncated, None

  def _observation(self, action, count):
    return {'last': action, 'count': count[None], 'of_6': (count,)}


def test_nested_observations_are_a_flat_vector_and_several_choices_an_array():
  family = jax_envs.JaxFamily(lambda task, options: Several())
  spec = family.make_spec('several', {})
  assert (spec.obs_shape, spec.obs_dtype) == ((12,), np.float32)
  assert [part.name for part in spec.parts] == ['count', 'last/0', 'last/1', 'of_6/0']
  assert (spec.num_actions, spec.action_choices) == (0, (2, 3))

  vector_env = family.make_vector_env('several', {}, [4, 5])
  #                         count | 2    | 3      | 6
  assert_array_equal(vector_env.first_obs, [[0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0]] * 2)
  actions = jnp.array([[[1, 2], [0, 1]], [[0, 0], [1, 1]]], jnp.int32)
  steps = jax.device_get(steps_of(vector_env, actions))
  assert_array_equal(steps.obs[0], [[1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0],
                                    [1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0]])
  assert_array_equal(steps.obs[1, 1], [2, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0])
  assert_array_equal(steps.reward, [[2, 1], [0, 1]])


def test_frozen_lake_of_gymnax_is_observed_as_a_one_hot():
  task = 'gymnax:FrozenLake-misc'
  assert family_of(task).make_spec(task, {}).obs_shape == (16,)
  vector_env = family_of(task).make_vector_env(task, {}, [1, 2])
  assert_array_equal(vector_env.first_obs, [np.eye(16)[0]] * 2)
  steps = jax.device_get(steps_of(vector_env, jnp.ones((30, 2), jnp.int32)))
  assert_array_equal(steps.obs.sum(axis=-1), 1)


def test_rewards_and_flags_may_be_plain_python_values():
  """A step returns `False` and 1 in place of arrays."""
  def step(self, key, state, action):
    return self._observe(state), state, 1, False, False, {}

  family = counters(step=step)
  assert family.make_spec('counter', {}).num_actions == 4
  steps = steps_of(family.make_vector_env('counter', {}, [1]), jnp.zeros((7, 1), jnp.int32))
  assert_array_equal(steps.reward[:, 0], [1, 1, 1, 1, 1, 0, 1])
  assert_array_equal(steps.truncated[:, 0], [0, 0, 0, 0, 1, 0, 0])


class WithEmptyArray(Counter):
  """The state has an array without elements, like those of MJX; `step` and `render` need it."""

  def reset(self, key):
    obs, state = super().reset(key)
    return obs, {'count': state, 'empty': jnp.zeros((3, 0))}

  def step(self, key, state, action):
    assert state['empty'].shape == (3, 0)
    obs, count, *rest = super().step(key, state['count'], action)
    return obs, {'count': count, 'empty': state['empty']}, *rest

  def render(self, state):
    return np.full((4, 4, 3), state['empty'].size + state['count'][0], np.uint8)


def test_empty_arrays_are_not_part_of_the_stored_state():
  """Orbax cannot save empty arrays, and XLA does not shard them."""
  family = jax_envs.JaxFamily(lambda task, options: WithEmptyArray())
  vector_env = family.make_vector_env('counter', {}, range(4))
  assert family.make_spec('counter', {}).is_function
  actions = jnp.ones((12, 4), jnp.int32)
  plain = steps_of(counters().make_vector_env('counter', {}, range(4)), actions)
  assert_array_equal(steps_of(vector_env, actions).obs, plain.obs)
  _, state, _ = vector_env.recv(*vector_env.send(jnp.int32(0), vector_env.first_state, actions[0]))
  for stored in (vector_env.first_state, state):
    assert all(x.size for x in jax.tree.leaves(stored))
  assert_array_equal(vector_env.render(state), np.ones((4, 4, 3)))
  shapes = family.state_shapes('counter', {}, 4)
  assert jax.tree.structure(shapes) == jax.tree.structure(state)


class Echo:
  """Observes its last action."""

  observation_space = spaces.Box(-9, 9, (2,), np.float32)
  max_episode_steps = 0

  def __init__(self, dtype):
    self.action_space = spaces.Box(-0.1, 0.3, (2,), dtype)

  def reset(self, key):
    return jnp.zeros(2), jnp.int32(0)

  def step(self, key, state, action):
    return action, state, jnp.float32(0), False, False, {}


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_actions_are_within_the_box_of_the_task(dtype):
  env = Echo(dtype)
  vector_env = jax_envs.JaxFamily(lambda task, options: env).make_vector_env('echo', {}, [0, 1])
  actions = jnp.array([[[-0.1, 0.3], [-5.0, np.nextafter(np.float32(0.3), 9)]]], jnp.float32)
  obs, = np.asarray(steps_of(vector_env, actions).obs)
  assert all(env.action_space.contains(action.astype(dtype)) for action in obs)
  np.testing.assert_allclose(obs, [[-0.1, 0.3]] * 2, rtol=1e-7)
@pytest.mark.parametrize('space', [spaces.Discrete(3, start=5),
                                   spaces.MultiDiscrete([3, 2], start=[5, -1])])
def test_choices_begin_where_the_space_says(space):
  class Choice(Echo):
    def step(self, key, state, action):
      obs = jnp.broadcast_to(jnp.float32(action), (2,))
      return obs, state, jnp.float32(0), False, False, {}

  env = Choice(np.float32)
  env.action_space = space
  vector_env = jax_envs.JaxFamily(lambda task, options: env).make_vector_env('choice', {}, [0])
  action = np.ones((1, *space.shape), np.int32)
  obs, = np.asarray(steps_of(vector_env, jnp.array([action])).obs)
  expected = env_spaces.task_actions(action, space)
  np.testing.assert_array_equal(obs, np.broadcast_to(expected.reshape(1, -1), (1, 2)))
  assert space.contains(expected[0])


@flax.struct.dataclass
class Checked:
  """State that checks its arrays, and that cannot be compared or printed before it has any."""

  count: jax.Array
  history: tuple
  nothing: jax.Array

  def __post_init__(self):
    assert self.count.shape == () and self.history[0].shape == (3,)

  def __eq__(self, other):
    raise TypeError('arrays are not compared')

  __hash__ = None


class WithOwnState(Counter):
  """Counts in a state of its own class; cannot be hashed itself."""

  def reset(self, key):
    obs, state = super().reset(key)
    return obs, self._state(state)

  def step(self, key, state, action):
    obs, after, *rest = super().step(key, (state.count, state.history[1]['odd']), action)
    return obs, self._state(after), *rest

  def _state(self, state):
    return Checked(state[0], (jnp.full(3, state[0]), {'odd': state[1]}), jnp.zeros((0, 2)))

  def render(self, state):
    assert isinstance(state, Checked) and state.nothing.shape == (0, 2)
    return np.full((4, 4, 3), state.count, np.uint8)

  def __eq__(self, other):
    raise TypeError('environments are not compared')

  __hash__ = None


def test_a_users_class_of_states_is_neither_compared_nor_made_of_batches():
  family = jax_envs.JaxFamily(lambda task, options: WithOwnState())
  assert family.make_spec('own', {}).obs_shape == (2,)
  vector_env = family.make_vector_env('own', {}, range(4))
  actions = jnp.ones((12, 4), jnp.int32)
  plain = steps_of(counters().make_vector_env('counter', {}, range(4)), actions)
  steps = steps_of(vector_env, actions)
  jax.tree.map(assert_array_equal, steps, plain)
  _, state, _ = vector_env.recv(*vector_env.send(jnp.int32(0), vector_env.first_state, actions[0]))
  assert_array_equal(vector_env.render(state), np.ones((4, 4, 3)))
  # Names are those of the class, as checkpoints have had them.
  assert checkpoints.leaves(vector_env.first_state).keys() == {
      'env/count', 'env/history/0', 'env/history/1/odd', 'key', 'action', 'ended', 'length'}
  shapes = family.state_shapes('own', {}, 4)
  assert jax.tree.structure(shapes) == jax.tree.structure(state)


def test_a_state_of_another_structure_is_refused():
  def reset(self, key):
    obs, (count, odd) = Counter.reset(self, key)
    return obs, {'count': count, 'odd': odd}

  def step(self, key, state, action):
    obs, (count, odd), *rest = Counter.step(self, key, (state['count'], state['odd']), action)
    return obs, {'count': count, 'even': odd}, *rest

  with pytest.raises(ValueError, match='the state: .*count.*odd.* and .*count.*even'):
    counters(reset=reset, step=step).make_spec('counter', {})


def test_an_array_alone_in_a_dict_keeps_its_shape():
  def observe(self, state):
    return {'board': jnp.full((2, 3, 3), state[0], jnp.uint8)}

  family = counters(_observe=observe, observation_space=spaces.Dict(
      board=spaces.Box(0, 255, (2, 3, 3), np.uint8)))
  spec = family.make_spec('counter', {})
  assert (spec.obs_shape, spec.obs_dtype, spec.parts) == ((2, 3, 3), np.uint8, ())
  steps = steps_of(family.make_vector_env('counter', {}, [2]), jnp.ones((2, 1), jnp.int32))
  assert_array_equal(steps.obs, np.broadcast_to(
      np.uint8([1, 2]).reshape(2, 1, 1, 1, 1), (2, 1, 2, 3, 3)))


def test_images_of_bits_are_bools():
  image = jnp.uint8([[[0, 1]]])
  for space in (spaces.MultiBinary([1, 1, 2]), spaces.Box(0, 1, (1, 1, 2), np.uint8)):
    family = counters(observation_space=space, reset=lambda self, key: (image, jnp.int32(0)),
                      step=lambda self, key, state, action: (image, state, 0.0, False, False, {}))
    assert family.make_spec('counter', {}).obs_dtype == np.bool_
    steps = steps_of(family.make_vector_env('counter', {}, [2]), jnp.ones((2, 1), jnp.int32))
    assert steps.obs.dtype == np.bool_
    assert_array_equal(steps.obs, np.broadcast_to(image, (2, 1, 1, 1, 2)))


def test_numbers_that_are_no_bits_are_refused():
  flags = spaces.Box(0, 1, (2,), np.uint8)
  for space, part in ((flags, 'one'), (spaces.Dict(a=flags, b=spaces.Discrete(2)), 'the part a')):
    numbers = jnp.uint8([0, 213])
    obs = numbers if space is flags else {'a': numbers, 'b': jnp.int32(0)}
    family = counters(observation_space=space,
                      reset=lambda self, key, obs=obs: (obs, jnp.int32(0)),
                      step=lambda self, key, state, action, obs=obs: (
                          obs, state, 0.0, False, False, {}))
    with pytest.raises(ValueError, match=rf'do not fit its observation_space: ValueError: {part} '
                       r'has the number 213, and its space is Box\(0, 1, \(2,\), uint8\)'):
      family.make_spec('counter', {})


@pytest.mark.parametrize('limit', [None, 0, np.int64(0)])
def test_an_environment_may_have_no_limit(limit):
  family = counters(max_episode_steps=limit)
  assert family.make_spec('counter', {}).max_episode_steps == 0
  steps = steps_of(family.make_vector_env('counter', {}, range(8)), jnp.ones((20, 8), jnp.int32))
  assert not steps.truncated.any() and steps.terminated.any()


PARTS = {'a': np.zeros(3, np.float32), 'mask': np.ones(2, bool), 'z': np.zeros(2, np.float32)}
VALUES = 'step returns six values: obs, state, reward, terminated, truncated, info; that of'


@pytest.mark.parametrize('changes, message', [
    (dict(step=lambda self, key, state, action: Counter.step(self, key, state, action)[:5]),
     f'{VALUES} counter returns 5'),
    (dict(step=lambda self, key, state, action: (  # gymnax before 1.0: done, info
        *Counter.step(self, key, state, action)[:4], {'discount': 1.0})), f'{VALUES} .* 5'),
    (dict(step=lambda self, key, state, action: 3), f'{VALUES} counter returns 1'),
    (dict(reset=lambda self, key: jnp.zeros(2)),
     'reset returns two values: obs, state; that of counter returns 1'),
    (dict(reset=lambda self, key, params: 0),
     r'reset of counter takes \(key, params\); .* reset\(key\), and its constructor'),
    (dict(step=lambda self, key, state, action, params: 0),
     r'step of counter takes \(key, state, action, params\); .* step\(key, state, action\)'),
    (dict(step=lambda self, key, state, action: (
        *Counter.step(self, key, state, action)[:2], jnp.ones(1), False, False, {})),
     r'the reward of counter must be a scalar, got \(1,\)'),
    (dict(step=lambda self, key, state, action: (
        *Counter.step(self, key, state, action)[:2], None, False, False, {})),
     'the reward of counter must be a scalar, got'),
    (dict(max_episode_steps=-1), 'max_episode_steps of counter must be a whole number.*got -1'),
    (dict(max_episode_steps=2.5), 'max_episode_steps of counter must be .*got 2.5'),
    (dict(max_episode_steps=True), 'max_episode_steps of counter must be .*got True'),
    (dict(observation_space=spaces.Discrete(5000)), 'a number with 5,000 values'),
    (dict(action_space=spaces.Box(-1, 3, (2,), np.int32)), r'Box\(-1, 3, .*; only one choice'),
    (dict(action_space=spaces.Dict(a=spaces.Discrete(2))), 'Dict.*; only one choice'),
    # The mask would be read one element too early.
    (dict(observation_space=spaces.Dict(a=spaces.Box(-9, 9, (2,)), mask=spaces.MultiBinary(2),
                                        z=spaces.Box(-9, 9, (3,))),
          reset=lambda self, key: (PARTS, jnp.int32(0)),
          step=lambda self, key, state, action: (PARTS, state, 0.0, False, False, {})),
     r'do not fit its observation_space: .*the part a is an array \(3,\), and its space is Box')])
def test_functions_with_other_arguments_or_values_are_refused_in_one_line(changes, message):
  with pytest.raises(ValueError, match=rf'^env\.task: .*{message}') as error:
    counters(**changes).make_spec('counter', {})
  assert '\n' not in str(error.value)


OWN = '''
import jax.numpy as jnp
from gymnasium import spaces

class Own:
  observation_space = spaces.Box(-1, 1, (2,))
  action_space = spaces.Discrete(2)

  def __init__(self, size=1):
    if size == 2:
      raise ValueError('boom\\nin two lines')
    if size == 3:
      min(size=3)
    if size == 4:
      self.observation_space = lambda params: None

  def reset(self, key):
    return jnp.zeros(2), jnp.zeros(())

  def step(self, key, state, action):
    return jnp.zeros(2), state, 0.0, False, False, {}
'''


@pytest.mark.parametrize('options, message', [
    (dict(size=2), r'env.task: own_functions:Own fails \(own_functions.py, line 11\): ValueError: '
                   'boom in two lines'),
    (dict(size=3), r'env.task: own_functions:Own fails \(own_functions.py, line 13\): TypeError: '
                   'min'),
    (dict(size=4), 'env.task: observation_space of own_functions:Own is a function; it must be a'),
    (dict(depth=4), 'env.depth: own_functions:Own does not take these options: .*depth')])
def test_an_error_of_a_constructor_is_told_as_what_it_is(options, message, tmp_path, monkeypatch):
  (tmp_path / 'own_functions.py').write_text(OWN)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match=message) as error:
    family_of('own_functions:Own').make_spec('own_functions:Own', options)
  assert '\n' not in str(error.value)


def test_a_task_of_gymnax_whose_limit_is_a_float_steps():
  task = 'gymnax:BernoulliBandit-misc'
  for options, limit in (({}, 100), (dict(max_steps_in_episode=5), 5)):
    assert family_of(task).make_spec(task, options).max_episode_steps == limit
    vector_env = family_of(task).make_vector_env(task, options, [1])
    steps = steps_of(vector_env, jnp.zeros((8, 1), jnp.int32))
    assert np.flatnonzero(steps.terminated | steps.truncated)[:1].tolist() == [4][:limit == 5]


def test_the_last_value_of_a_step_may_be_anything():
  def step(self, key, state, action):
    return *Counter.step(self, key, state, action)[:5], {'text': 'x', 'object': object()}

  family = counters(step=step)
  assert family.make_spec('counter', {}).num_actions == 4
  assert steps_of(family.make_vector_env('counter', {}, [1]), jnp.ones((3, 1), int)).reward.all()


@pytest.mark.parametrize('is_function, hits', [(True, 1), (False, 0)])
def test_only_programs_without_pointers_are_loaded_from_the_cache(is_function, hits):
  vector_env = counters().make_vector_env('counter', {}, range(4))
  vector_env.is_function = is_function

  def load():
    def program(state, action):  # the token differs, so that the two cases do not share a program
      return vector_env.recv(*vector_env.send(jnp.int32(hits), state, action))

    args = vector_env.first_state, jnp.ones(4, jnp.int32)
    RolloutProgram([vector_env]).load(program, args, ())

  events = []

  def listen(event, **kwargs):
    events.append(event)

  seconds = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.monitoring.register_event_listener(listen)
  try:
    load()
    events.clear()
    load()
  finally:
    jax.monitoring.unregister_event_listener(listen)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', seconds)
  assert events.count('/jax/compilation_cache/cache_hits') == hits


@pytest.mark.parametrize('kind, library', [
    ('gymnax', 'gymnax'), ('playground', 'mujoco_playground')])
def test_a_missing_library_is_named_with_the_command_that_installs_it(kind, library, monkeypatch):
  monkeypatch.setitem(sys.modules, library, None)
  monkeypatch.delitem(sys.modules, f'podracer_jit.envs.{kind}_envs', raising=False)
  with pytest.raises(ValueError, match=rf'needs {kind}.*pip install {kind}$'):
    family_of(f'{kind}:Any')


def test_an_incompatible_release_of_a_library_is_reported_in_one_line(monkeypatch, tmp_path):
  (tmp_path / 'gymnax.py').write_text('import jax\njax.no_such_attribute\n')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'gymnax', raising=False)
  monkeypatch.delitem(sys.modules, 'podracer_jit.envs.gymnax_envs', raising=False)
  with pytest.raises(ValueError, match='cannot be imported .*no_such_attribute'):
    family_of(CARTPOLE)


def test_shipped_kinds_import_no_module_of_a_user():
  assert own_module('Pong-v5') == own_module(CARTPOLE) == '' and own_module('mine:Env') == 'mine'
  assert own_module('playground:CartpoleBalance') == ''
