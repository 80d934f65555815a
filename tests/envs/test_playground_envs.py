"""MuJoCo Playground's tasks: rows compared with its own step, options, pictures, and errors."""

import functools
import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.cli import envs
from podracer_jit.envs.families import family_of
from podracer_jit.envs.protocol import take_apart
from tests.envs.test_jax_envs import steps_of

if importlib.util.find_spec('mujoco_playground') is None:
  pytest.skip('needs the extra playground', allow_module_level=True)

from podracer_jit.envs import playground_envs  # before MuJoCo, because it sets how MuJoCo draws

# isort: split
from mujoco_playground import dm_control_suite, registry
from mujoco_playground._src import mjx_env
from mujoco_playground._src.dm_control_suite import cartpole

BALANCE = 'playground:CartpoleBalance'
SEEDS = (3, 8)


class Falling(cartpole.Balance):
  """CartpoleBalance that ends when the pole has fallen; observes a dict."""

  def __init__(self, config, config_overrides=None):
    super().__init__(False, False, config, config_overrides)

  def reset(self, rng):
    return self.change(super().reset(rng))

  def step(self, state, action):
    return self.change(super().step(state, action))

  @staticmethod
  def change(state):
    fallen = jnp.abs(state.data.qpos[1]) > 0.05
    obs = {'state': state.obs[:3], 'privileged_state': state.obs}
    return state.replace(obs=obs, done=fallen.astype(jnp.float32))


@pytest.fixture(scope='module')
def falling():
  """Registers a task with Playground, as a user could."""
  dm_control_suite.register_environment('Falling', Falling, cartpole.default_config)
  yield 'playground:Falling'
  dm_control_suite._envs.pop('Falling')
  dm_control_suite._cfgs.pop('Falling')


def flat(obs):
  """Concatenates the parts of a dict in the order of their names."""
  return np.concatenate([obs[name] for name in sorted(obs)]) if isinstance(obs, dict) else obs


@functools.cache
def balance():
  """Returns Playground's own reset and step of CartpoleBalance, compiled."""
  env = registry.load('CartpoleBalance', config_overrides={'impl': 'jax'})
  return jax.jit(env.reset), jax.jit(env.step)


def expected_rows(change, seed, actions, limit, repeat):
  """Steps one environment with Playground's functions, without vmap.

  Args:
    change: a function of a state of CartpoleBalance that returns that of the task.
    seed: of the environment.
    actions: [T, 1].
    limit: the most steps of an episode.
    repeat: how often each action is taken.

  Returns:
    (observation, reward, terminated, truncated) of the first observation and of each step.
  """
  reset_balance, step_balance = balance()
  key, step_key = jax.random.split(jax.random.key(seed))
  state = reset_balance(jax.random.key_data(step_key))
  shown = change(state)
  rows = [(flat(shown.obs), 0.0, False, False)]
  length = 0
  for action in actions:
    key, step_key = jax.random.split(key)
    if rows[-1][2] or rows[-1][3]:
      state = reset_balance(jax.random.key_data(step_key))
      length = 0
      rows.append((flat(change(state).obs), 0.0, False, False))
      continue
    reward = 0.0
    terminated = False
    for _ in range(repeat):
      state = step_balance(state, action)
      shown = change(state)
      reward += float(shown.reward)
      terminated |= bool(shown.done)
    length += 1
    rows.append((flat(shown.obs), reward, terminated, length == limit and not terminated))
  return rows


def check_rows(task, options, limit, repeat=1):
  """Compares the rows of two environments with those of Playground; returns their steps."""
  family = family_of(task)
  vector_env = family.make_vector_env(task, options, SEEDS)
  actions = np.random.default_rng(0).uniform(-1, 1, (30, len(SEEDS), 1)).astype(np.float32)
  actions[:, 1] = 1.0  # drives to one side
  steps = jax.device_get(steps_of(vector_env, jnp.array(actions)))
  change = Falling.change if task == 'playground:Falling' else lambda state: state
  for i, seed in enumerate(SEEDS):
    first, *rows = expected_rows(change, seed, actions[:, i], limit, repeat)
    assert_allclose(vector_env.first_obs[i], first[0], rtol=1e-5, atol=1e-6)
    obs, reward, terminated, truncated = map(np.array, zip(*rows, strict=True))
    assert_array_equal(steps.terminated[:, i], terminated)
    assert_array_equal(steps.truncated[:, i], truncated)
    assert_allclose(steps.reward[:, i], reward, rtol=1e-4)
    assert_allclose(steps.obs[:, i], obs, rtol=1e-3, atol=1e-5)
  return steps


@pytest.mark.full
def test_rows_equal_those_of_playgrounds_own_step():
  steps = check_rows(BALANCE, {'episode_length': 12}, limit=12)
  # Two episodes of 12 steps, each followed by a reset, and 4 steps of a third.
  assert_array_equal(np.flatnonzero(steps.truncated[:, 0]), [11, 24])
  assert_array_equal(np.flatnonzero(steps.reward[:, 0] == 0), [12, 25])
  assert not steps.terminated.any()


@pytest.mark.full
def test_a_failed_episode_is_terminated_and_actions_are_repeated(falling):
  options = {'episode_length': 25, 'action_repeat': 3}
  steps = check_rows(falling, options, limit=9, repeat=3)
  assert steps.terminated.any() and steps.truncated.any()

  spec = family_of(falling).make_spec(falling, options)
  assert (spec.obs_shape, spec.max_episode_steps) == ((8,), 9)
  parts = take_apart(steps.obs, spec.parts)
  assert {name: x.shape[2:] for name, x in parts.items()} == {
      'privileged_state': (5,), 'state': (3,)}
  assert_array_equal(parts['state'], parts['privileged_state'][..., :3])


@pytest.mark.parametrize('task, obs, actions', [
    ('CartpoleBalance', 5, 1), ('WalkerRun', 24, 6)])
def test_tasks_are_described(task, obs, actions):
  spec = family_of(BALANCE).make_spec(f'playground:{task}', {})
  assert (spec.obs_shape, spec.obs_dtype) == ((obs,), np.float32)
  assert (spec.action_low, spec.action_high) == ((-1.0,) * actions, (1.0,) * actions)
  assert (spec.num_actions, spec.max_episode_steps, spec.is_function) == (0, 1000, True)


def test_options_are_fields_of_the_tasks_configuration():
  spec = family_of(BALANCE).make_spec(BALANCE, {'episode_length': 7, 'action_repeat': 2})
  assert spec.max_episode_steps == 4
  by_dots = playground_envs.make(BALANCE, {
      'vision_config.nworld': 3, 'vision_config.cam_res': (8, 8), 'ctrl_dt': 0.05})
  # config.json of a workdir has lists in place of tuples.
  nested = playground_envs.make(BALANCE, {
      'vision_config': {'nworld': 3, 'cam_res': [8, 8]}, 'ctrl_dt': 0.05})
  assert by_dots.frame_rate == nested.frame_rate == 20
  assert by_dots._env._config.vision_config.nworld == 3
  assert by_dots._env._config == nested._env._config


@pytest.mark.parametrize('task, options, message', [
    ('Cartpole', {}, 'env.task: MuJoCo Playground has no task .*Cartpole.*playground:CartpoleSw'),
    ('CartpoleBalance', {'gravity': 1.0}, 'env.gravity: not an option of playground:Cartpole'),
    ('CartpoleBalance', {'vision_config': {'nworlds': 1}},
     'env.vision_config.nworlds: not an option of .*did you mean env.vision_config.nworld'),
    ('CartpoleBalance', {'sim_dt': 'low'}, "env.sim_dt: must be of type float, got 'low'"),
    ('CartpoleBalance', {'episode_length': 0}, 'env.episode_length: must be at least 1, got 0'),
    ('CartpoleBalance', {'impl': 'warp'}, "env.impl: must be 'jax', got 'warp'"),
    ('CartpoleBalanceSparse', {'vision': True}, 'env.task: .*cannot be made with these options: '
     'NotImplementedError: Sparse reward not implemented for vision'),
])
def test_an_unknown_task_or_option_of_playground_is_reported_in_one_line(task, options, message):
  with pytest.raises(ValueError, match=message) as error:
    family_of(BALANCE).make_spec(f'playground:{task}', options)
  assert '\n' not in str(error.value)


def test_no_task_fails_because_of_its_default_options(monkeypatch):
  """Checks the options of all tasks, including those of robots, without loading any."""
  loaded = []

  def load(name, config):
    loaded.append(name)
    assert config.get('impl', 'jax') == 'jax' and config.episode_length >= 1
    raise NotImplementedError

  monkeypatch.setattr(mjx_env, 'MENAGERIE_PATH', pathlib.Path(__file__))
  monkeypatch.setattr(registry, 'load', load)
  for name in playground_envs.tasks():
    with pytest.raises(ValueError, match='NotImplementedError'):
      playground_envs.make(f'playground:{name}', {'action_repeat': 1})
  assert loaded == playground_envs.tasks() and len(loaded) >= 54


def test_robots_are_not_downloaded_without_being_asked_for(monkeypatch, tmp_path):
  def download():
    raise AssertionError('Playground was about to clone its robots')

  monkeypatch.setattr(mjx_env, 'MENAGERIE_PATH', tmp_path / 'missing')
  monkeypatch.setattr(mjx_env, 'ensure_menagerie_exists', download)
  for task in ('Go1JoystickFlatTerrain', 'PandaPickCube'):
    with pytest.raises(ValueError, match='needs the robots of MuJoCo Menagerie; Playground'):
      family_of(BALANCE).make_spec(f'playground:{task}', {})
  assert envs.describe('playground:LeapCubeReorient') == '- needs the robots of MuJoCo Menagerie'


@pytest.mark.full
def test_render_gives_playgrounds_own_picture():
  vector_env = family_of(BALANCE).make_vector_env(BALANCE, {}, SEEDS)
  try:
    picture = vector_env.render(vector_env.first_state)
  except RuntimeError as error:
    pytest.skip(str(error))
  env = registry.load('CartpoleBalance', config_overrides={'impl': 'jax'})
  reset, _ = balance()
  _, step_key = jax.random.split(jax.random.key(SEEDS[0]))
  expected = env.render(reset(jax.random.key_data(step_key)), camera=0)
  assert picture.shape == (240, 320, 3) and picture.dtype == np.uint8
  # Positions differ in their last bits.
  assert np.mean(picture != expected) < 0.01 and picture.std() > 10
  assert vector_env.frame_rate == 100


@pytest.mark.full
def test_render_fails_with_one_line_if_the_machine_cannot_draw():
  program = ('from podracer_jit.envs import playground_envs\n'
             'env = playground_envs.make("playground:CartpoleBalance", {})\n'
             'try:\n'
             '  env.render(None)\n'
             'except RuntimeError as error:\n'
             '  print(error)\n')
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True,
                        timeout=300, env=os.environ | {'MUJOCO_GL': 'disable'}, check=False)
  assert done.returncode == 0, done.stderr
  (line,) = done.stdout.splitlines()
  assert line.startswith('MuJoCo cannot draw here, with MUJOCO_GL=disable: ')
