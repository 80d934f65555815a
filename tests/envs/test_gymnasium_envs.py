"""Gymnasium's environments compared with plain Python loops, and their failures."""

import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import time
import weakref

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from jax import lax
from numpy.testing import assert_array_equal

from podracer_jit import parts
from podracer_jit.envs import gymnasium_contract, gymnasium_envs, gymnasium_worker
from podracer_jit.envs import spaces as env_spaces
from podracer_jit.envs.families import family_of, own_module
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.errors import FAILED, EnvironmentFailed, environment_failure
from podracer_jit.experiment import modules
from podracer_jit.play import evaluation, video
from tests import processes
from tests.runs import QUICK, changed, fresh, small

CARTPOLE = 'gymnasium:CartPole-v1'

OWN = '''
import os, sys, time
import gymnasium
import numpy as np
from gymnasium import spaces

class Own(gymnasium.Env):
  """Counts its steps; `fails` is the place where it fails after `after` steps."""

  observation_space = spaces.Box(-1000, 1000, (2,), np.float64)
  action_space = spaces.Discrete(3, start=5)
  metadata = {'render_modes': ['rgb_array'], 'render_fps': 7}
  instances = 0

  def __init__(self, fails='', after=0, length=5, seconds=0.0, render_mode=None):
    Own.instances += 1
    self.fails = fails
    self.after = after
    self.length = length
    self.seconds = seconds
    self.steps = self.age = 0
    if fails == 'constructor' and Own.instances > after:
      raise KeyError('no level')

  def reset(self, seed=None, options=None):
    super().reset(seed=seed)
    if self.fails == 'reset' and self.steps > self.after:
      raise OSError(5, 'disk gone')
    self.age = 0
    return np.array([float('jax' in sys.modules), os.getpid() % 1000]), {}

  def step(self, action):
    assert action in (5, 6, 7) and type(action) is np.int64
    time.sleep(self.seconds)
    self.steps += 1
    self.age += 1
    if self.steps > self.after:
      if self.fails == 'step':
        raise ValueError('boom\\nin two lines')
      if self.fails == 'exit':
        sys.exit(3)
      if self.fails == 'kill':
        os.kill(os.getpid(), 9)
      if self.fails == 'shape':
        return np.zeros(3), 0, False, False, {}
    over = self.age == self.length
    return np.array([action, self.age]), np.float64(action), over, over, {}

  def render(self):
    return np.full((4, 6, 3), self.age, np.uint8)


class Swallows(Own):
  def __init__(self, **kwargs):
    super().__init__()

class Meets(Own):
  """A step ends only when another environment takes a step, too."""

  def __init__(self, mine, other):
    super().__init__()
    self.mine = mine  # a file that a step makes
    self.other = other  # the file of the other environment

  def step(self, action):
    open(self.mine, 'w').close()
    deadline = time.monotonic() + 60
    while not os.path.exists(self.other):
      if time.monotonic() > deadline:
        raise TimeoutError('the other environment takes no step')
      time.sleep(0.01)
    return super().step(action)

class Grows(Own):
  """Draws larger pictures from step to step."""

  def render(self):
    return np.zeros((4 + self.age, 6, 3), np.uint8)

def factory(length=3, **options):
  return Own(length=length, **options)

def bare(length=10):
  return Own(length=length)

def no_env():
  return 3

def needs_argument(level):
  return Own()

def fails():
  raise RuntimeError('mine')

def wrong_inside():
  return needs_argument()

def passes_on(**options):
  return Own(**options)

class Texts(Own):
  observation_space = spaces.Dict(a=spaces.Text(3))

class Several(gymnasium.Env):
  """Observes a dict of the last action and the number of steps."""

  observation_space = spaces.Dict(
      last=spaces.MultiDiscrete([2, 3], start=[0, 7]),
      inner=spaces.Tuple([spaces.Box(-9, 9, (2, 1), np.float64), spaces.Discrete(4, start=1)]))
  action_space = spaces.MultiDiscrete([2, 3], start=[0, 7])

  def reset(self, seed=None, options=None):
    super().reset(seed=seed)
    self.age = 0
    return self.observe(np.array([1, 8])), {}

  def step(self, action):
    assert self.action_space.contains(action), action
    self.age += 1
    return self.observe(action), float(action[1]), self.age == 3, False, {}

  def observe(self, action):
    return {'last': action, 'inner': (np.array([[self.age], [0.5]]), 1 + self.age)}

class Pictures(Own):
  """Observes a picture, alone in a dict."""

  observation_space = spaces.Dict(pixels=spaces.Box(0, 255, (1, 2, 3), np.uint8))

  def reset(self, seed=None, options=None):
    super().reset(seed=seed)
    return {'pixels': np.full((1, 2, 3), 7, np.uint8)}, {}

  def step(self, action):
    _, *rest = super().step(action)
    return {'pixels': np.arange(6, dtype=np.uint8).reshape(1, 2, 3) + self.age}, *rest

class Gym:
  """Stands for gym.Env."""

class Old(Gym):
  """Has the interface of Gymnasium, and another base class."""

  observation_space = spaces.Box(-1, 1, (3,), np.float32)
  action_space = spaces.Discrete(2)

  def reset(self, seed=None, options=None):
    return np.zeros(3, np.float32), {}

  def step(self, action):
    return np.zeros(3, np.float32), 1.0, False, False, {}

class Oldest(Old):
  def reset(self):
    return np.zeros(3, np.float32)

class Wrapped(Old):
  def step(self, *args, **options):
    return super().step(*args, **options)

class Agents(Old):
  possible_agents = ['first', 'second']

old = Old()
own = gymnasium.Env()
nothing = None

def makes_old():
  return Old()

def makes_agents():
  return Agents()

class Actions(Own):
  action_space = spaces.Dict(a=spaces.Discrete(2))

gymnasium.register('Noisy-v0', 'envs_of_my_own:Own', nondeterministic=True)
'''


@pytest.fixture
def user_module(tmp_path, monkeypatch):
  """Writes a user's module beside a config file, not on sys.path; returns its name."""
  monkeypatch.setattr(parts, '_folders', [])
  (tmp_path / 'envs_of_my_own.py').write_text(OWN)
  parts.look_beside(tmp_path / 'config.py')
  yield 'envs_of_my_own'
  sys.modules.pop('envs_of_my_own', None)


@pytest.fixture
def make():
  """Returns a function that makes vector environments, which are closed after the test."""
  vector_envs = []

  def make(task, options=None, seeds=(3, 1, 4, 1, 5), processes=2):
    vector_envs.append(gymnasium_envs.make_vector_env(task, options or {}, list(seeds), processes))
    return vector_envs[-1]

  yield make
  for vector_env in vector_envs:
    vector_env.close()


def play(vector_env, actions):
  """Steps in a compiled loop; returns obs, reward, terminated and truncated [T, B, ...]."""
  like = jax.eval_shape(lambda token: vector_env.recv(token, ())[2], vector_env.handle)
  like = like.obs, like.reward, like.terminated, like.truncated
  rows = [jnp.zeros((len(actions), *x.shape), x.dtype) for x in like]

  @jax.jit
  def steps(token, actions, rows):
    def step(t, carry):
      token, rows = carry
      token, state = vector_env.send(token, (), actions[t])
      token, _, step = vector_env.recv(token, state)
      fields = step.obs, step.reward, step.terminated, step.truncated
      return token, [row.at[t].set(x) for row, x in zip(rows, fields, strict=True)]
    return lax.fori_loop(0, len(actions), step, (token, rows))[1]

  return jax.device_get(steps(vector_env.handle, actions, rows))


def play_in_python(name, options, seeds, actions):
  """Steps Gymnasium's own environments; returns the first observations, and the rows of `play`."""
  columns = []
  first = []
  for seed, acts in zip(seeds, np.moveaxis(actions, 1, 0), strict=True):
    env = gymnasium.make(name, **options)
    first.append(env.reset(seed=seed)[0])
    rows = []
    over = False
    for action in acts:
      if over:
        rows.append((env.reset()[0], 0.0, False, False))
        over = False
        continue
      obs, reward, terminated, truncated, _ = env.step(action)
      rows.append((obs, reward, terminated, truncated and not terminated))
      over = terminated or truncated
    env.close()
    columns.append([np.stack(x) for x in zip(*rows, strict=True)])
  fields = [np.stack(x, axis=1) for x in zip(*columns, strict=True)]
  return np.stack(first), [x.astype(np.float32) if x.dtype == np.float64 else x for x in fields]


@pytest.mark.quick
@pytest.mark.parametrize('name, options', [
    ('CartPole-v1', {}), ('CartPole-v1', dict(max_episode_steps=9)),
    ('MountainCar-v0', dict(max_episode_steps=11)), ('Acrobot-v1', {}),
    ('Pendulum-v1', dict(max_episode_steps=7, g=3.0))])
def test_a_compiled_loop_equals_a_python_loop(make, name, options):
  seeds = [3, 1, 4, 15, 9]
  vector_env = make(f'gymnasium:{name}', options, seeds)
  rng = np.random.default_rng(0)
  spec = gymnasium_envs.make_spec(f'gymnasium:{name}', options)
  actions = (rng.integers(0, spec.num_actions, (60, 5)).astype(np.int32) if spec.num_actions
             else rng.uniform(-2, 2, (60, 5, 1)).astype(np.float32))
  first, expected = play_in_python(name, options, seeds, actions)
  assert_array_equal(vector_env.first_obs, first)
  rows = play(vector_env, actions)
  for field, expected_field in zip(rows, expected, strict=True):
    assert field.dtype == expected_field.dtype
    assert_array_equal(field, expected_field)
  _, _, terminated, truncated = rows
  if name != 'Acrobot-v1':
    assert truncated.any() if options else terminated.any()


def test_a_reset_follows_each_episode_and_a_truncation_has_the_last_observation(make):
  vector_env = make('gymnasium:Pendulum-v1', dict(max_episode_steps=4), [7])
  obs, reward, terminated, truncated = play(vector_env, np.ones((10, 1, 1), np.float32))
  assert_array_equal(truncated[:, 0].nonzero()[0], [3, 8])
  assert not terminated.any()
  assert_array_equal(reward[:, 0] == 0, [t == 4 or t == 9 for t in range(10)])
  env = gymnasium.make('Pendulum-v1').unwrapped
  env.reset(seed=7)
  assert_array_equal(obs[:4, 0], [env.step(np.ones(1, np.float32))[0] for _ in range(4)])
  assert_array_equal(obs[4, 0], env.reset()[0])


def test_an_environment_does_not_depend_on_its_neighbours_or_workers(make):
  actions = np.random.default_rng(1).integers(0, 2, (40, 4)).astype(np.int32)
  together = play(make(CARTPOLE, seeds=[1, 2, 3, 4], processes=3), actions)
  for i, seed in enumerate([1, 2, 3, 4]):
    alone = play(make(CARTPOLE, seeds=[seed], processes=9), actions[:, i:i + 1])
    for a, b in zip(alone, together, strict=True):
      assert_array_equal(a[:, 0], b[:, i])


def test_seeds_of_training_are_kept_and_those_of_evaluations_have_31_bits(make):
  seeds = [-2, -3, -2**31, 2**31 - 1, 2]
  first = make(CARTPOLE, seeds=seeds).first_obs
  assert len(np.unique(first, axis=0)) == 5
  assert_array_equal(first[3], gymnasium.make('CartPole-v1').reset(seed=2**31 - 1)[0])
  assert gymnasium_worker.seeds_of([0, 5, 2**31 - 1]) == [0, 5, 2**31 - 1]
  for seed in (0, 1, 12345):
    seeds = gymnasium_worker.seeds_of(evaluation.seeds(seed, 2000, index=3))
    assert len(set(seeds)) == 2000 and all(0 <= s < 2**31 for s in seeds)
    # Not one is a seed of training; nor is any of them the neighbour of such a seed in its stream.
    for segment in range(9):
      assert not set(seeds) & set(env_seeds(seed, segment, 0, 2000))
    assert len({(b - a) % 2**31 for a, b in itertools.pairwise(seeds)}) > 1900


def test_a_users_class_and_functions_run_in_workers_without_jax(user_module, make):
  vector_env = make(f'{user_module}:Own', dict(length=2), seeds=range(6), processes=3)
  assert not vector_env.first_obs[:, 0].any()  # jax is not imported
  pids = vector_env.first_obs[:, 1]
  assert os.getpid() % 1000 not in pids and len(set(pids)) == 3
  obs, reward, terminated, truncated = play(vector_env, np.ones((5, 6), np.int32))
  assert_array_equal(obs[[0, 1, 3, 4], 0], [[6, 1], [6, 2]] * 2)  # the actions begin at 5
  assert_array_equal(reward[:, 0], [6, 6, 0, 6, 6])
  # The environment returns both flags; then the episode counts as terminated.
  assert_array_equal(terminated[:, 0], [False, True, False, False, True])
  assert not truncated.any()
  spec = gymnasium_envs.make_spec(f'{user_module}:bare', dict(max_episode_steps=4))
  assert spec.max_episode_steps == 4 and spec.obs_dtype == np.float32 and spec.calls_python
  spec = gymnasium_envs.make_spec(f'{user_module}:Swallows', dict(max_episode_steps=4))
  assert spec.max_episode_steps == 4
  assert gymnasium_envs.make_spec(f'{user_module}:factory', {}).max_episode_steps == 0


# A config file as users have them: it imports a file beside it, and registers environments.
REGISTERS = '''
import gymnasium, sys
from own_cart import make_cart

gymnasium.register('OwnText-v0', 'own_cart:make_cart')
gymnasium.register('OwnFunction-v0', lambda **kwargs: make_cart(**kwargs))

def nested(**kwargs):
  return gymnasium.make('OwnFunction-v0', **kwargs)

def get_config():
  raise RuntimeError('this is not for workers')
'''
CART = '''
from own_length import LENGTH
import gymnasium

def make_cart(**kwargs):
  return gymnasium.make('CartPole-v1', max_episode_steps=LENGTH, **kwargs)
'''


@pytest.fixture
def registering(tmp_path):
  """Runs a config file that registers environments, as the command does; returns its path."""
  path = tmp_path / 'own_v1.2.py'
  path.write_text(REGISTERS)
  (tmp_path / 'own_cart.py').write_text(CART)
  (tmp_path / 'own_length.py').write_text('LENGTH = 7\n')
  parts.run_file(path)
  yield path
  for name in ('OwnText-v0', 'OwnFunction-v0'):
    gymnasium.registry.pop(name, None)
  for name in ('own_v1.2', 'own_cart', 'own_length'):
    sys.modules.pop(name, None)


@pytest.mark.parametrize('task', [
    'own_cart:make_cart', 'own_v1.2:nested', 'gymnasium:OwnText-v0', 'gymnasium:OwnFunction-v0'])
def test_workers_have_the_files_and_registrations_of_a_config_file(registering, make, task):
  assert gymnasium_envs.make_spec(task, {}).max_episode_steps == 7
  vector_env = make(task, seeds=(3,), processes=1)
  _, _, _, truncated = play(vector_env, np.zeros((7, 1), np.int32))
  assert truncated[:, 0].tolist() == [False] * 6 + [True]


def test_an_evaluation_has_registrations_of_a_file_that_is_allowed(registering, make):
  del gymnasium.registry['OwnFunction-v0']
  parts._files.clear()
  with pytest.raises(ValueError, match='gymnasium:MODULE:OwnFunction-v0'):
    gymnasium_envs.make_spec('gymnasium:OwnFunction-v0', {})
  del sys.modules['own_v1.2']  # as in another process
  modules.allowed([registering])
  assert gymnasium_envs.make_spec('gymnasium:OwnFunction-v0', {}).max_episode_steps == 7


def test_a_registration_of_the_program_reaches_the_workers(make):
  gymnasium.register('OwnProgram-v0', 'gymnasium.envs.classic_control:CartPoleEnv',
                     max_episode_steps=5)
  try:
    vector_env = make('gymnasium:OwnProgram-v0', seeds=(3,), processes=1)
    assert play(vector_env, np.zeros((5, 1), np.int32))[3][-1, 0]
  finally:
    del gymnasium.registry['OwnProgram-v0']


@pytest.mark.parametrize('entry', ['__main__:Mine', type('Mine', (), {'__module__': '__main__'})])
def test_an_environment_of_the_main_program_is_refused_before_the_start(entry):
  gymnasium.register('OwnMain-v0', entry)
  try:
    for task, new in (('gymnasium:OwnMain-v0', 'gymnasium:mine:OwnMain-v0'),
                      ('__main__:Mine', 'mine:Mine')):
      message = f'env.task: {task} is in the main program .* mine.py, and name it {new}$'
      with pytest.raises(ValueError, match=message):
        gymnasium_envs.make_spec(task, {})
  finally:
    del gymnasium.registry['OwnMain-v0']


def test_an_entry_that_only_this_process_has_is_refused_before_the_start():
  gymnasium.register('OwnLocal-v0', lambda: None)
  try:
    with pytest.raises(ValueError, match=f'gymnasium:{__name__}:OwnLocal-v0'):
      gymnasium_envs.make_spec('gymnasium:OwnLocal-v0', {})
  finally:
    del gymnasium.registry['OwnLocal-v0']


def test_a_task_of_the_arcade_that_nobody_registers_is_named_with_its_module():
  with pytest.raises(ValueError, match='gymnasium:ale_py:ALE/NoGame-v5'):
    gymnasium_envs.make_spec('gymnasium:ALE/NoGame-v5', {})


def test_nested_observations_are_a_flat_vector_and_several_choices_an_array(user_module, make):
  task = f'{user_module}:Several'
  spec = gymnasium_envs.make_spec(task, {})
  assert (spec.obs_shape, spec.obs_dtype) == ((11,), np.float32)
  assert [part.name for part in spec.parts] == ['inner/0', 'inner/1', 'last/0', 'last/1']
  assert (spec.num_actions, spec.action_choices, spec.action_low) == (0, (2, 3), ())

  vector_env = make(task, seeds=[5, 6])
  #                          age, 0.5 | one of 4    | 2    | 3
  assert_array_equal(vector_env.first_obs, [[0, .5, 1, 0, 0, 0, 0, 1, 0, 1, 0]] * 2)
  actions = np.array([[[1, 2], [0, 0]], [[0, 1], [1, 1]]], np.int32)
  obs, reward, *_ = play(vector_env, actions)
  assert_array_equal(obs[0], [[1, .5, 0, 1, 0, 0, 0, 1, 0, 0, 1],
                              [1, .5, 0, 1, 0, 0, 1, 0, 1, 0, 0]])
  assert_array_equal(obs[1, 0], [2, .5, 0, 0, 1, 0, 1, 0, 0, 1, 0])
  assert_array_equal(reward, [[9, 7], [8, 8]])


def test_a_picture_alone_in_a_dict_keeps_its_shape(user_module, make):
  spec = gymnasium_envs.make_spec(f'{user_module}:Pictures', {})
  assert (spec.obs_shape, spec.obs_dtype, spec.parts) == ((1, 2, 3), np.uint8, ())
  vector_env = make(f'{user_module}:Pictures', seeds=[1, 2])
  assert_array_equal(vector_env.first_obs, np.full((2, 1, 2, 3), 7))
  obs, *_ = play(vector_env, np.zeros((2, 2), np.int32))
  assert_array_equal(obs[1], [np.arange(2, 8).reshape(1, 2, 3)] * 2)


def test_a_number_is_observed_as_a_one_hot(make):
  actions = np.random.default_rng(0).integers(0, 4, (40, 3)).astype(np.int32)
  _, (numbers, *expected) = play_in_python('FrozenLake-v1', {}, [1, 2, 3], actions)
  obs, *fields = play(make('gymnasium:FrozenLake-v1', seeds=[1, 2, 3]), actions)
  assert_array_equal(obs, np.eye(16)[numbers])
  for field, expected_field in zip(fields, expected, strict=True):
    assert_array_equal(field, expected_field)
  assert len(set(numbers.ravel())) > 4


def test_the_family_of_a_task():
  assert family_of('gymnasium:Any-v0') is gymnasium_envs
  assert own_module('gymnasium:Any-v0') == own_module('Pong-v5') == ''
  assert own_module('gymnasium:mine.envs:Any-v0') == 'mine.envs'
  assert own_module('mine:Class') == 'mine'


def test_own_classes_and_functions_belong_to_the_gymnasium_family(user_module):
  assert family_of(f'{user_module}:Own') is family_of(f'{user_module}:factory') is gymnasium_envs


@pytest.mark.parametrize('name, message', [
    ('Old', 'is no subclass of gymnasium.Env, .* takes an action only; derive it from '
            r'gymnasium.Env \(of the package gymnasium, not gym\)'),
    ('Oldest', 'derive it from gymnasium.Env '), ('Wrapped', 'derive it from gymnasium.Env '),
    ('Agents', 'derive it from gymnasium.Env with one agent'),
    ('makes_old', "must make a gymnasium.Env, got 'Old', which is not derived from it"),
    ('makes_agents', "must make a gymnasium.Env with one agent, got 'Agents'"),
    ('old', "is an environment already, of the class 'Old'; must be a class, or a function that "
            'returns a new gymnasium.Env'),
    ('own', r'leads to an instance of gymnasium\.core\.Env, .*; must be a class or a function'),
    ('nothing', 'is no environment: .* a subclass of gymnasium.Env'),
    ('Gym', 'is no environment: .* a subclass of gymnasium.Env')])
def test_other_environments_are_told_to_derive_from_gymnasium(user_module, name, message):
  task = f'{user_module}:{name}'
  with pytest.raises(ValueError, match=rf"^env\.task: '?{task}'? .*{message}") as error:
    family_of(task).make_spec(task, {})
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('name, words', [
    ('ALE/Nothing-v5', 'name its module: gymnasium:ale_py:ALE/Nothing-v5 '),
    ('Nowhere/Nothing-v0', 'name its module: gymnasium:MODULE:Nowhere/Nothing-v0'),
    ('Nothing-v0', 'name its module: gymnasium:MODULE:Nothing-v0')])
def test_an_unknown_id_names_the_form_with_the_module_that_registers_it(name, words):
  with pytest.raises(ValueError, match=rf'^env\.task: gymnasium:{name}: .*{words}') as error:
    gymnasium_envs.make_spec(f'gymnasium:{name}', {})
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('task, options, message', [
    ('gymnasium:CartPoll-v1', {}, r'env\.task: .*CartPoll.*CartPole'),
    ('gymnasium:CartPole-v99', {}, r'env\.task: .*v99'),
    ('gymnasium:nowhere:CartPole-v1', {}, r"env\.task: cannot import 'nowhere'"),
    (CARTPOLE, dict(lenght=3), r'env\.lenght: gymnasium:CartPole-v1 does not take.*lenght'),
    (CARTPOLE, dict(id='x'), r'env\.id: not an option'),
    (CARTPOLE, dict(max_episode_steps=0), r'env\.max_episode_steps: .* at least 1, got 0'),
    (CARTPOLE, dict(max_episode_steps=True), r'env\.max_episode_steps: .*got True'),
    ('{}:Texts', {}, r'env\.task: the observations of .* are Text; only'),
    ('{}:Actions', {}, r'env\.task: the actions of .* are Dict.*; only'),
    ('{}:no_env', {}, r"env\.task: .*no_env must make a gymnasium.Env, got 'int'"),
    ('{}:needs_argument', {}, r'env\.task: .*needs_argument does not take these options.*level'),
    ('{}:fails', {}, r'env\.task: .*:fails fails: RuntimeError: mine'),
    ('{}:wrong_inside', {}, r'env\.task: .*:wrong_inside fails: TypeError: .* argument'),
    ('{}:passes_on', dict(depth=2), r'env\.depth: .*passes_on does not take these .*depth'),
    ('{}:factory', dict(depth=2), r'env\.depth: .*factory does not take these options.*depth')])
def test_an_error_names_the_field_in_one_line(user_module, task, options, message):
  with pytest.raises(ValueError, match=message) as error:
    gymnasium_envs.make_spec(task.format(user_module), options)
  assert '\n' not in str(error.value)


def test_a_missing_library_is_reported_with_the_command_that_installs_it():
  try:
    import Box2D  # noqa: F401
  except ImportError:
    with pytest.raises(ValueError, match=r'env\.task: .*LunarLander.*pip install'):
      gymnasium_envs.make_spec('gymnasium:LunarLander-v3', {})


def test_a_task_that_gymnasium_calls_nondeterministic_does_not_repeat(user_module):
  config = small(task=f'gymnasium:{user_module}:Noisy-v0')
  experiment = fresh(config).experiment
  assert not experiment.spec.repeats and not experiment.deterministic
  assert experiment.non_deterministic_setting == f'env.task = gymnasium:{user_module}:Noisy-v0'
  same = fresh(changed(config, env__task=f'{user_module}:Own')).experiment
  assert same.spec.repeats and same.deterministic


def test_actors_that_do_not_wait_for_all_environments_are_refused():
  config = changed(small(task=CARTPOLE), scheme='cleanba', env_batch=4)
  with pytest.raises(ValueError, match=r'env_batch: all environments of gymnasium:CartPole-v1'):
    fresh(config)


# Steps of several vector environments overlap.


def test_send_does_not_wait_for_the_step(user_module, make, tmp_path):
  names = [str(tmp_path / name) for name in ('first', 'second')]
  first, second = (make(f'{user_module}:Meets', dict(mine=mine, other=other), [0])
                   for mine, other in (names, names[::-1]))

  @jax.jit
  def step(token):
    action = jnp.zeros(1, jnp.int32)
    for vector_env in (first, second):
      token, _ = vector_env.send(token, (), action)
    ages = []
    for vector_env in (first, second):
      token, _, timestep = vector_env.recv(token, ())
      ages.append(timestep.obs[0, 1])
    return ages

  assert [int(age) for age in step(first.handle)] == [1, 1]


# What `reset` and `step` return.


class Returns(gymnasium.Env):
  """Returns the values that a test gives."""

  def __init__(self, space, results_of_reset, results_of_step, action_space=None):
    self.observation_space = space
    self.action_space = action_space or spaces.Discrete(2)
    self.results_of_reset = results_of_reset
    self.results_of_step = results_of_step
    self.actions = []

  def reset(self, seed=None, options=None):
    return self.results_of_reset

  def step(self, action):
    self.actions.append(action)
    return self.results_of_step


class Takes(Returns):
  """`reset` takes no seed."""

  def reset(self):
    return self.results_of_reset


class Lacks(gymnasium.Env):
  """Has only some of its spaces."""

  def __init__(self, **attributes):
    for name, value in attributes.items():
      setattr(self, name, value)


RETURNS = f'{__name__}:Returns'
FLOATS = spaces.Box(-1, 1, (2,), np.float32)
ZEROS = np.zeros(2, np.float32)
BYTES = spaces.Box(0, 255, (2, 2), np.uint8)
INT64 = spaces.Box(0, np.iinfo(np.int64).max, (2,), np.int64)


def environments(task=RETURNS, num_envs=1, **options):
  """Returns environments as a worker has them, in this process."""
  spec = gymnasium_envs.make_spec(task, options)
  layout = gymnasium_worker.Layout(
      num_envs, spec.obs_shape, spec.obs_dtype.name,
      () if spec.num_actions else (len(spec.action_choices or spec.action_low),),
      'float32' if spec.action_low else 'int32')
  seeds = list(range(7, 7 + num_envs))
  with gymnasium_envs._shared_memory(gymnasium_worker.num_bytes(layout)) as memory:  # noqa: SLF001
    return gymnasium_worker._Environments(  # noqa: SLF001
        gymnasium_worker.Setup(task, options, parts.search(), b'', 0, seeds, layout, memory))


def message(task=RETURNS, steps=2, **options):
  """Returns the message of an environment that fails."""
  envs = environments(task, **options)
  with pytest.raises(Exception) as error:  # noqa: PT011 - the test looks at the message
    envs.begin()
    for _ in range(steps):
      envs.step()
  # As in a worker, no frame of the caller.
  line = envs.describe(error.value.with_traceback(error.tb.tb_next))
  assert '\n' not in line and 'podracer_jit' not in line and ', line ' not in line
  assert line.startswith(f'{task}: ')
  return line.removeprefix(f'{task}: ')


def after_steps(**options):
  """Returns observation, reward, terminated and truncated of the first step."""
  envs = environments(**options)
  envs.begin()
  envs.step()
  return [view[0] for view in (envs._arrays.obs, envs._arrays.reward,  # noqa: SLF001
                               envs._arrays.terminated, envs._arrays.truncated)]  # noqa: SLF001


class Lazy:
  """An observation that becomes an array when it is read."""

  def __init__(self, array):
    self.array = array

  def __array__(self, dtype=None, copy=None):
    if self.array is None:
      raise RuntimeError('on another device')
    return np.array(self.array, dtype)


HALF_MASKED = np.ma.masked_array(ZEROS, [True, False])
NESTED = spaces.Dict(a=spaces.Tuple((spaces.Discrete(3), FLOATS)), b=spaces.MultiDiscrete([2, 3]))


@pytest.mark.parametrize('space, obs, text', [
    (FLOATS, None, r'the observation as None \(NoneType\); its shape must be \(2,\)'),
    (FLOATS, 'left', r"as 'left' \(str\); its shape must be"),
    (FLOATS, np.zeros(3, np.float32), r'\(float32 of shape \(3,\)\); its shape must be \(2,\)'),
    (FLOATS, np.zeros((1, 2), np.float32), r'its shape must be \(2,\), .* is \(1, 2\)'),
    (FLOATS, ['a', 'b'], r'its dtype must be float32, as its space has it, and is <U1'),
    (FLOATS, [None, 1.0], r'its dtype must be float32, .* is object'),
    (FLOATS, ZEROS.astype(complex), r'its dtype must be float32, .* is complex128'),
    (FLOATS, ZEROS.astype('m8[s]'), r'its dtype must be float32, .* is timedelta64'),
    (FLOATS, [[1.0], [1.0, 2.0]], r'it must be an array of float32'),
    (FLOATS, HALF_MASKED, r'it must be an array of float32'),
    (FLOATS, Lazy(None), r'it must be an array of float32'),
    (BYTES, np.full((2, 2), 0.5), r'\(float64 of shape \(2, 2\)\); its space has the dtype uint8'),
    (BYTES, [[1, 2], [3, 300]], r'from 0 to 255 \(Box\(0, 255, \(2, 2\), uint8\)\)'),
    (BYTES, np.full((2, 2), -1, np.int8), r'from 0 to 255'),
    (spaces.Box(0, 9, (2,), np.int64), [0, 2**31], r'from -2147483648 to 2147483647'),
    (spaces.Box(-1, 9, (2,), np.int32), np.array([0, 2**40]), r'from -2147483648 to 2147483647'),
    (spaces.Box(0, 9, (2,), np.uint64), [0, -1], r'from 0 to 4294967295'),
    (INT64, ZEROS, r'its space has the dtype int64, which float32 does not fit'),
    (INT64, np.array([0, 2**64 - 1], np.uint64), r'from -9223372036854775808 to'),
    (spaces.Box(0, 1, (2,), bool), [0, 2], r'from 0 to 1'),
    (spaces.Box(0, 1, (1, 1, 2), np.uint8), np.uint8([[[0, 2]]]), r'from 0 to 1'),
    (spaces.Box(0, 1, (2,), np.uint8), np.uint8([0, 7]), r'from 0 to 1'),
    (spaces.Discrete(3), 3, r'the observation as 3 \(int\); .* 0 to 2 \(Discrete'),
    (spaces.Discrete(3, start=5), np.int64(4), r'from 5 to 7'),
    (spaces.Discrete(3), -1, r'from 0 to 2'),
    (spaces.Discrete(3), 1.0, r'its space has the dtype int64, which float64 does not fit'),
    (spaces.Discrete(3), np.array([1]), r'its shape must be \(\), .* is \(1,\)'),
    (spaces.Discrete(3), None, r'which object does not fit'),
    (spaces.MultiDiscrete([2, 3], start=[0, 7]), [1, 10], r'from \[0, 7\] to \[1, 9\]'),
    (spaces.MultiBinary(2), np.array([0, 2], np.int8), r'from 0 to 1'),
    (spaces.MultiBinary(2), ZEROS, r'which float32 does not fit'),
    (NESTED, ZEROS, r"it must be a dict with the keys \['a', 'b'\]"),
    (NESTED, {'a': (1, ZEROS)}, r"the key 'b' of its space is missing"),
    (NESTED, {'a': (1,), 'b': [0, 0]}, r"part 'a' .*it has 1 parts; its space has 2"),
    (NESTED, {'a': 1, 'b': [0, 0]}, r"part 'a' of the observation .* a tuple of 2 parts"),
    (NESTED, {'a': (3, ZEROS), 'b': [0, 0]}, r"part 'a/0' of the observation as .* from 0 to 2"),
    (NESTED, {'a': (1, ZEROS), 'b': [0, 3]}, r"part 'b' of .* from \[0, 0\] to \[1, 2\]"),
    (NESTED, {'a': (1, ZEROS.astype('U')), 'b': [0, 0]}, r"'a/1' of .* dtype must be float32")])
def test_a_wrong_observation_is_refused_by_one_line(space, obs, text):
  right = np.zeros(2, np.int64) if space is INT64 else space.sample()
  step = message(space=space, results_of_reset=(right, {}),
                 results_of_step=(obs, 0.0, False, False, {}))
  start = 'step 1 of an episode of environment 0 (seed 7) returned the '
  assert step.startswith(start) and re.search(text, step), step
  reset = message(space=space, results_of_reset=(obs, {}), results_of_step=None)
  assert reset == step.replace(start, 'reset of environment 0 (seed 7) returned the ')


@pytest.mark.parametrize('space, obs, dtype, stored', [
    (FLOATS, [0.1, 0.2], np.float32, np.float32([0.1, 0.2])),
    (FLOATS, np.array([0.1, 0.2]), np.float32, np.float32([0.1, 0.2])),
    (FLOATS, np.array([True, False]), np.float32, [1, 0]),
    (FLOATS, np.array([3, -2]), np.float32, [3, -2]),
    (FLOATS, jnp.array([0.5, 0.25]), np.float32, [0.5, 0.25]),
    (FLOATS, Lazy([0.5, 0.25]), np.float32, [0.5, 0.25]),
    (FLOATS, np.ma.masked_array(ZEROS), np.float32, ZEROS),
    (FLOATS, ZEROS.astype('>f4') + 1, np.float32, [1, 1]),
    (spaces.Box(-1, 1, (), np.float32), 0.5, np.float32, 0.5),
    (spaces.Box(-1, 1, (2,), np.float64), np.array([0.1, 3.0]), np.float32, np.float32([0.1, 3.0])),
    (BYTES, [[1, 2], [3, 255]], np.uint8, [[1, 2], [3, 255]]),
    (spaces.Box(-5, 5, (2,), np.int64), np.array([-2**31, 2**31 - 1]), np.int32,
     [-2**31, 2**31 - 1]),
    (spaces.Box(0, 5, (2,), np.uint64), [0, 2**32 - 1], np.uint32, [0, 2**32 - 1]),
    (INT64, np.array([1_700_000_000_000, 3_000_000_000]), np.float32,
     np.float32([1_700_000_000_000, 3_000_000_000])),
    (spaces.Dict(t=INT64, x=FLOATS), {'t': [2**40, -1], 'x': ZEROS}, np.float32, [2**40, -1, 0, 0]),
    (spaces.Box(0, 1, (2,), bool), [0, 1], np.bool_, [False, True]),
    (spaces.MultiBinary(2), [True, False], np.uint8, [1, 0]),
    (spaces.MultiBinary(2), np.array([0, 1]), np.uint8, [0, 1]),
    # Networks divide images of bytes by 255, but not those of bits.
    (spaces.MultiBinary([1, 1, 2]), np.int8([[[0, 1]]]), np.bool_, [[[0, 1]]]),
    (spaces.Box(0, 1, (1, 1, 2), np.uint8), np.uint8([[[0, 1]]]), np.bool_, [[[0, 1]]]),
    (spaces.Box(0, 2, (1, 1, 2), np.uint8), np.uint8([[[0, 1]]]), np.uint8, [[[0, 1]]]),
    (spaces.Box(0, 1, (2,), np.uint8), np.uint8([0, 1]), np.uint8, [0, 1]),
    (spaces.Dict(a=spaces.Box(0, 1, (2,), np.uint8), b=FLOATS), {'a': np.uint8([0, 1]), 'b': ZEROS},
     np.float32, [0, 1, 0, 0]),
    (spaces.Discrete(3, start=2), 4, np.uint8, [0, 0, 1]),
    (spaces.Discrete(3), np.uint8(1), np.uint8, [0, 1, 0]),
    (spaces.Discrete(3), np.array(2), np.uint8, [0, 0, 1]),
    (spaces.Discrete(3), True, np.uint8, [0, 1, 0]),
    (spaces.Tuple((FLOATS, FLOATS)), np.ones((2, 2), np.float32), np.float32, [1, 1, 1, 1]),
    (spaces.Dict(x=FLOATS), {'x': ZEROS, 'more': 'text'}, np.float32, ZEROS)])
def test_a_right_observation_keeps_its_values(space, obs, dtype, stored):
  row, *_ = after_steps(space=space, results_of_reset=(obs, {}),
                        results_of_step=(obs, 0.0, False, False, {}))
  assert row.dtype == dtype
  assert_array_equal(row, stored)


@pytest.mark.parametrize('reward, stored', [
    (1, 1), (True, 1), (0.1, np.float32(0.1)), (np.float32(2), 2), (np.float64(-0.5), -0.5),
    (np.int64(3), 3), (np.bool_(True), 1), (np.array(4), 4), (np.array(4.5, np.float16), 4.5),
    (jnp.float32(2), 2), (None, None), ([1.0], None), (np.array([1.0]), None),
    (np.array([1.0, 2.0]), None), ('1', None), (1j, None), (np.array(1j), None), ({}, None),
    (np.ma.masked, None), (10**400, None), (Lazy(None), None)])
def test_a_reward_is_one_real_number(reward, stored):
  options = dict(space=FLOATS, results_of_reset=(ZEROS, {}),
                 results_of_step=(ZEROS, reward, False, False, {}))
  if stored is None:
    assert re.fullmatch(r'step 1 of an episode of environment 0 \(seed 7\) returned the reward .*; '
                        r'a reward must be one real number, such as 1\.0', message(**options))
  else:
    assert after_steps(**options)[1] == stored


@pytest.mark.parametrize('name', ['terminated', 'truncated'])
@pytest.mark.parametrize('flag, stored', [
    (True, True), (np.bool_(False), False), (1, True), (0, False), (np.int64(1), True),
    (np.array(True), True), (1.0, True), (None, None), (2, None), (float('nan'), None), ('', None),
    ({}, None), (np.array([True]), None), ([False, False], None)])
def test_the_ends_of_episodes_are_bools(name, flag, stored):
  flags = {'terminated': False, 'truncated': False, name: flag}
  options = dict(space=FLOATS, results_of_reset=(ZEROS, {}),
                 results_of_step=(ZEROS, 0.0, flags['terminated'], flags['truncated'], {}))
  if stored is None:
    assert re.search(rf'returned .* as {name}; {name} must be one bool', message(**options))
  else:
    assert after_steps(**options)[3 if name == 'truncated' else 2] == stored


@pytest.mark.parametrize('options', [{}, dict(max_episode_steps=9)])
def test_other_numbers_of_values_are_refused_with_the_right_ones(options):
  """A limit of steps wraps the environment, and then a wrapper of Gymnasium fails."""
  reset = 'reset must return two values: observation, info'
  step = 'step must return five values: observation, reward, terminated, truncated, info'
  good = (ZEROS, {})
  for results in (ZEROS, [0.1, 0.2], (ZEROS, {}, 3), (ZEROS,), None, (ZEROS, 0.5)):
    line = message(space=FLOATS, results_of_reset=results, results_of_step=None, **options)
    assert line.startswith('reset of environment 0 (seed 7)') and reset in line, line
  for results in ((ZEROS, 0.0, False, {}), (ZEROS, 0.0, False, False, {}, 0), ZEROS):
    line = message(space=FLOATS, results_of_reset=good, results_of_step=results, **options)
    assert line.startswith('step 1 of an episode') and step in line, line
  if not options:
    four = (ZEROS, 0.0, False, {})
    assert 'the old gym' in message(space=FLOATS, results_of_reset=good, results_of_step=four)
    assert step in message(space=FLOATS, results_of_reset=good, results_of_step=None)
  line = message(f'{__name__}:Takes', space=FLOATS, results_of_reset=good, results_of_step=None,
                 **options)
  assert re.search(r'reset must take (a seed|options), as reset\(self, \*, seed=None', line), line


def test_a_message_names_environment_seed_and_step():
  envs = environments(num_envs=3, space=FLOATS, results_of_reset=(ZEROS, {}),
                      results_of_step=(ZEROS, 0.0, False, False, {}))
  envs.begin()
  for _ in range(4):
    envs.step()
  second = envs._envs[1]  # noqa: SLF001
  second.results_of_step = (ZEROS, 0.0, True, False, {})
  envs.step()
  envs.step()  # the reset
  second.results_of_step = (ZEROS, None, False, False, {})
  with pytest.raises(gymnasium_contract.WrongValue) as error:
    envs.step()
  assert envs.describe(error.value) == (
      f'{RETURNS}: step 1 of an episode of environment 1 (seed 8) returned the reward None '
      '(NoneType); a reward must be one real number, such as 1.0')


def test_all_environments_of_a_task_have_observations_of_one_shape():
  envs = environments(space=FLOATS, results_of_reset=(ZEROS, {}), results_of_step=None)
  envs._setup.options['space'] = spaces.Box(-1, 1, (1,), np.float32)  # noqa: SLF001
  with pytest.raises(gymnasium_contract.WrongValue) as error:
    envs.begin()
  assert re.search(r'constructor of .* made the observation_space .* \(1,\); all environments of a '
                   r'task must be alike, .* \(2,\)', envs.describe(error.value))


@pytest.mark.parametrize('attributes, name', [
    ({}, 'observation_space'), (dict(observation_space=FLOATS), 'action_space'),
    (dict(observation_space=None, action_space=FLOATS), 'observation_space'),
    (dict(observation_space=FLOATS, action_space=None), 'action_space')])
def test_an_environment_without_a_space_is_refused(attributes, name):
  with pytest.raises(ValueError, match=rf'^env\.task: .*:Lacks has no {name}; '):
    gymnasium_envs.make_spec(f'{__name__}:Lacks', attributes)


@pytest.mark.parametrize('error', [AttributeError('no log'), SystemExit(3)])
def test_an_error_of_close_is_no_problem(error, monkeypatch):
  def close(self):
    raise error

  monkeypatch.setattr(Returns, 'close', close)
  envs = environments(space=FLOATS, results_of_reset=(ZEROS, {}), results_of_step=None)
  envs.begin()
  envs.close()
  with pytest.raises(ValueError, match='only one choice'):
    gymnasium_envs.make_spec(RETURNS, dict(space=FLOATS, results_of_reset=0, results_of_step=0,
                                           action_space=spaces.Dict(a=FLOATS)))


# Actions.


def actions_of(action_space, actions):
  """Returns the actions that environments get from actions [B, ...] of a policy."""
  envs = environments(num_envs=len(actions), space=FLOATS, results_of_reset=(ZEROS, {}),
                      results_of_step=(ZEROS, 0.0, False, False, {}), action_space=action_space)
  envs.begin()
  envs._arrays.action[...] = actions  # noqa: SLF001
  envs.step()
  return [env.actions[0] for env in envs._envs]  # noqa: SLF001


@pytest.mark.parametrize('space, actions, expected', [
    (spaces.Discrete(3), [0, 2], [0, 2]),
    (spaces.Discrete(3, start=-1), [0, 2], [-1, 1]),
    (spaces.Discrete(3, start=5, dtype=np.int8), [0, 2], [5, 7]),
    (spaces.Discrete(3, start=5, dtype=np.uint8), [0, 2], [5, 7]),
    (spaces.MultiDiscrete([2, 3], start=[1, -1]), [[1, 2]], [[2, 1]]),
    (spaces.MultiDiscrete([2, 3], dtype=np.int32), [[1, 2]], [[1, 2]]),
    (spaces.MultiBinary([2, 2]), [[1, 0, 0, 1]], [[[1, 0], [0, 1]]]),
    (spaces.Box(0, 3, (2,), np.int16), [[3, 0]], [[3, 0]])])
def test_whole_actions_have_the_type_of_a_sample(space, actions, expected):
  for action, each in zip(actions_of(space, actions), expected, strict=True):
    assert type(action) is type(space.sample()) and action.dtype == space.dtype
    assert space.contains(action)
    assert_array_equal(action, each)


@pytest.mark.parametrize('dtype', [np.float64, np.float32, np.float16])
@pytest.mark.parametrize('low, high', [(-0.1, 0.1), (0.1, 0.7), (-1e-3, 1 / 3), (-2, 2)])
def test_actions_are_within_a_box_of_any_dtype(dtype, low, high):
  space = spaces.Box(low, high, (3,), dtype)
  extremes = np.float32([[low, high, (low + high) / 2]])
  extremes = np.concatenate([np.nextafter(extremes, np.float32(x)) for x in (-9, 0, 9)])
  actions = actions_of(space, extremes)
  assert all(space.contains(action) and action.dtype == dtype for action in actions)
  assert_array_equal([action[2] for action in actions], extremes[:, 2].astype(dtype))
  # JAX has only 32 bits: its actions, made wider, are in the space, too.
  narrow = np.asarray(env_spaces.within(jnp.array(extremes), space))
  wide = narrow.astype(np.float64)
  assert narrow.dtype == np.float32
  assert (space.low <= wide).all() and (wide <= space.high.astype(np.float64)).all()


# Failures.


FAILURES = [
    ('constructor', r"constructor of environment 1 \(seed 11\) raised KeyError: 'no level' "
                    r'\(.*envs_of_my_own\.py, line \d+, in __init__\)'),
    ('reset', r'reset of environment . \(seed 1.\) raised OSError: \[Errno 5\] disk gone \(.*'),
    ('step', r'step 2 of an episode of environment . \(seed 1.\) raised ValueError: boom in two '
             r'lines \(.*'),
    ('exit', r'step 2 of .* raised SystemExit: 3 \(.*'),
    ('shape',
     r'step 2 of .* returned the observation as array\(.*\) \(float64 of shape \(3,\)\); '
     r'its shape must be \(2,\), as its space has it, and is \(3,\)'),
    ('kill', r'worker process \d+ of the environments was ended by SIGKILL .*')]


@pytest.mark.parametrize('fails, message', FAILURES)
def test_a_failure_is_one_line_with_the_environments_error(user_module, make, fails, message):
  task = f'{user_module}:Own'
  gymnasium_envs.make_spec(task, dict(fails=fails, after=1))
  vector_env = make(task, dict(fails=fails, after=1), seeds=[10, 11], processes=1)
  with pytest.raises(Exception) as error:  # noqa: PT011 - XLA has several types for it
    play(vector_env, np.zeros((12, 2), np.int32))
  line = environment_failure(error.value)
  assert line.startswith(f'{task}: ') and '\n' not in line
  assert re.fullmatch(
      message, line.removeprefix(f'{task}: ')), line
  # Nothing waits for the failed workers, and later calls fail with the same error.
  with pytest.raises(EnvironmentFailed, match='.*'):
    vector_env._workers.wait()  # noqa: SLF001
  vector_env.close()


FORKS = '''
import multiprocessing, os, pathlib, signal, time
import gymnasium
import numpy as np
from gymnasium import spaces
from podracer_jit.envs import gymnasium_worker

gymnasium_worker.GRACE_S = 60  # a worker that waits for its helper is not one that is slow

class Forks(gymnasium.Env):
  """Has a forked helper, as simulators do, whose number it notes."""

  observation_space = spaces.Box(-1, 1, (2,), np.float32)
  action_space = spaces.Discrete(2)

  def __init__(self, note='', dies=False):
    self.note, self.dies, self.helper = note, dies, None

  def reset(self, seed=None, options=None):
    if self.note and not self.helper:
      self.helper = multiprocessing.get_context('fork').Process(target=time.sleep, args=(100,))
      self.helper.start()
      pathlib.Path(self.note).write_text(str(self.helper.pid))
    return np.zeros(2, np.float32), {}

  def step(self, action):
    if self.dies:
      os.kill(os.getpid(), signal.SIGKILL)
    return np.zeros(2, np.float32), 0.0, False, False, {}

  def close(self):
    if self.helper:
      self.helper.terminate()
      self.helper.join()
'''


@pytest.mark.parametrize('dies', [False, True])
def test_a_helper_that_an_environment_forks_ends_with_it(dies, make, tmp_path, monkeypatch):
  """A forked helper inherits the socket to this process, and the worker's handlers of signals."""
  (tmp_path / 'forks_of_my_own.py').write_text(FORKS)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(gymnasium_worker, 'GRACE_S', 60)
  note = tmp_path / 'pid'
  vector_env = make('forks_of_my_own:Forks', dict(note=str(note), dies=dies), seeds=[1],
                    processes=1)
  assert vector_env.first_obs.shape == (1, 2)  # the workers have begun
  if dies:  # this process sees it, and does not wait for ever
    with pytest.raises(Exception, match='was ended by SIGKILL'):
      play(vector_env, np.zeros((3, 1), np.int32))
  helper = int(note.read_text())
  assert alive([helper])
  vector_env.close()
  (worker,) = vector_env._workers._processes  # noqa: SLF001
  # It was not ended from outside after its time of grace.
  assert worker.returncode == (-signal.SIGKILL if dies else 0)
  assert wait_until(lambda: not alive([helper]))


def test_a_closed_environment_raises_and_does_not_wait(make):
  vector_env = make(CARTPOLE)
  step = jax.jit(lambda token: vector_env.recv(*vector_env.send(token, (), jnp.zeros(5, int)))[2])
  step(vector_env.handle)
  vector_env.close()
  with pytest.raises(Exception) as error:  # noqa: PT011 - XLA has several types for it
    jax.block_until_ready(step(vector_env.handle))
  assert environment_failure(error.value) == f'{CARTPOLE}: the environments were closed'


def alive(pids):
  """Returns the processes that have not ended; a zombie counts as alive."""
  return [pid for pid in pids if os.path.exists(f'/proc/{pid}')]


def wait_until(condition, seconds=20):
  deadline = time.monotonic() + seconds
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.05)
  return condition()


def pids_of(vector_env):
  return [process.pid for process in vector_env._workers._processes]  # noqa: SLF001


def test_close_ends_the_workers_even_while_they_step(user_module, make):
  busy = make(f'{user_module}:Own', dict(seconds=60.0), [0, 1])
  busy.first_obs  # noqa: B018 - waits until they have started
  descriptors = len(os.listdir('/proc/self/fd'))
  idle = make(CARTPOLE)
  play(idle, np.zeros((3, 5), np.int32))
  jax.jit(lambda token: busy.send(token, (), jnp.zeros(2, int)))(busy.handle)
  pids = pids_of(idle) + pids_of(busy)
  assert len(alive(pids)) == 4
  idle.close()
  assert len(alive(pids)) == 2
  # One descriptor is left: the shared memory, until it is garbage-collected.
  assert len(os.listdir('/proc/self/fd')) <= descriptors + 1
  since = time.monotonic()
  busy.close()
  busy.close()
  assert not alive(pids) and time.monotonic() - since < 10


def test_a_garbage_collected_vector_environment_ends_its_workers():
  vector_env = gymnasium_envs.make_vector_env(CARTPOLE, {}, [1, 2], 2)
  play(vector_env, np.zeros((3, 2), np.int32))
  pids = pids_of(vector_env)
  workers = weakref.ref(vector_env._workers)  # noqa: SLF001
  program = jax.jit(lambda token, env=vector_env: env.recv(token, ())[2].obs).lower(
      vector_env.handle).compile()
  del vector_env
  jax.clear_caches()
  gc.collect()
  assert workers() is None and not alive(pids)
  del program


KILLED = '''
import os, signal, sys
from podracer_jit.envs import gymnasium_envs, gymnasium_worker
from podracer_jit import parts
from pathlib import Path
parts.look_beside(Path(sys.argv[1]))
vector_envs = [gymnasium_envs.make_vector_env('envs_of_my_own:Own', dict(seconds=s), [1, 2], 2)
               for s in (0.0, 600.0)]
for vector_env in vector_envs:
  vector_env.first_obs
  vector_env._workers.step(0)
print(*(p.pid for v in vector_envs for p in v._workers._processes), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
'''


def test_workers_end_when_their_parent_is_killed(user_module, tmp_path):
  memory = set(os.listdir('/dev/shm'))
  done = subprocess.run([sys.executable, '-c', KILLED, tmp_path / 'config.py'], text=True,
                        env=QUICK | {'PYTHONPATH': os.pathsep.join(sys.path)}, timeout=100,
                        stdout=subprocess.PIPE)
  pids = list(map(int, done.stdout.split()))
  assert done.returncode == -signal.SIGKILL and len(pids) == 4

  def running():
    states = [open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0]
              for pid in alive(pids)]
    return [state for state in states if state != 'Z']  # init reaps them

  assert wait_until(lambda: not running())
  assert set(os.listdir('/dev/shm')) <= memory


CONFIG = '''
from podracer_jit import experiment

def get_config():
  config = experiment.config('impala', 'mlp', 'adam', scheme='cleanba')
  config.env.task = 'envs_of_my_own:factory'
  config.env.num_envs = 8
  config.total_steps = 100_000_000
  config.unroll_length = 10
  config.num_shards = 2
  config.placement.actors_per_device = 2
  config.placement.xla_threads = 2
  return config
'''


@pytest.mark.parametrize('fails', ['step', 'kill'])
def test_a_run_ends_with_one_line_when_an_environment_fails(user_module, tmp_path, fails):
  """The environment of one of two actors fails; the other actor does not keep the run alive."""
  (tmp_path / 'config.py').write_text(CONFIG)
  since = time.monotonic()
  done = processes.run(processes.command(
      f'--config={tmp_path / "config.py"}', f'--config.env.fails={fails}',
      '--config.env.after=100', f'--workdir={tmp_path / "run"}'))
  assert done.returncode == FAILED
  assert time.monotonic() - since < 120
  last = done.stderr.splitlines()[-1]
  reason = {'step': 'raised ValueError: boom in two lines (', 'kill': 'was ended by SIGKILL'}[fails]
  assert last.startswith('podracer_jit: envs_of_my_own:factory: ') and reason in last
  assert 'Traceback' not in done.stderr
  assert 'slow environments: Python steps envs_of_my_own:factory' in done.stdout
  assert 'results repeat, if all that the environments draw follows from the seed' in done.stdout
  running = subprocess.run(['ps', '-eo', 'ppid,args'], capture_output=True, text=True).stdout
  assert not [line for line in running.splitlines()
              if line.split()[0] == '1' and 'gymnasium_worker' in line]


# Evaluations and videos.


def agent_of(config):
  run = fresh(config)
  return evaluation.make_player(run, run.initial_state().params, update=0, steps=0)


def test_an_evaluation_counts_whole_episodes(user_module):
  config = small(task=f'{user_module}:factory')
  config['env']['max_episode_steps'] = 4
  config['env']['length'] = 99
  episodes = evaluation.play(agent_of(config), evaluation.Settings(5, 3, 1, 100))
  assert episodes.lengths == [4] * 5


def test_a_video_shows_what_the_environment_renders(user_module, tmp_path):
  film = video.film(agent_of(small(task=f'{user_module}:factory')), tmp_path / 'x.gif',
                    evaluation.Settings(1, 1, 1, 100))
  assert film.shown == 'rendered by the environment' and film.frame_rate == 7
  film = tmp_path / 'x.gif'
  assert film.stat().st_size > 0


def test_a_video_of_pictures_that_grow_is_refused_and_leaves_no_file(user_module, tmp_path):
  with pytest.raises(ValueError, match=r'no video: render\(\) of .*Grows .* \(5, 6, 3\) after'):
    video.film(agent_of(small(task=f'{user_module}:Grows')), tmp_path / 'x.mp4',
               evaluation.Settings(1, 1, 1, 100))
  assert not list(tmp_path.glob('*.mp4'))


def test_render_fails_if_the_environment_has_no_render_mode(user_module, make):
  vector_env = make(f'{user_module}:bare', gymnasium_envs.render_options, [1])
  assert vector_env.first_obs.shape == (1, 2)
  assert vector_env.render(()).shape == (4, 6, 3)
  vector_env = make(CARTPOLE, {}, [1])
  vector_env.first_obs  # noqa: B018
  with pytest.raises(RuntimeError, match='render'):
    vector_env.render(())
