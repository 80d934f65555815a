"""Surprising behaviour of EnvPool, and how the package handles it."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys

import envpool
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit import experiment
from podracer_jit.envs import envpool_envs
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import resolve
from podracer_jit.runtime import placement
from tests.runs import changed, fresh, run, small

MUJOCO = 'HalfCheetah-v4'
ONE_THREAD = 1


def python_pool(task, seeds, **options):
  """Returns a pool of EnvPool's own Python API; `seeds` is a list, or one number for all."""
  num_envs = options.pop('num_envs', None) or len(seeds)
  return envpool.make(task, env_type='gymnasium', num_envs=num_envs, batch_size=num_envs,
                      seed=seeds, num_threads=ONE_THREAD, **options)


def first_obs(task, seeds, **options):
  pool = python_pool(task, seeds, **options)
  obs, _ = pool.reset()
  pool.close()
  return obs


def run_in_new_process(code, timeout=300):
  """Runs code that could crash its process; returns what it printed."""
  env = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
  with subprocess.Popen([sys.executable, '-c', code], env=env, stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
    try:
      out, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)  # with the games that it started
      raise
  assert process.returncode == 0, f'exit code {process.returncode}\n{errors[-4000:]}'
  return out


# Seeds.


def test_neighbouring_seeds_of_envpool_share_nearly_all_streams():
  """The package therefore gives each environment an explicit seed."""
  seed_7, seed_8 = (first_obs('CartPole-v1', seed, num_envs=4) for seed in (7, 8))
  assert_array_equal(seed_7[1:], seed_8[:-1])


@pytest.mark.parametrize('change', [dict(seed=2), dict(segment=1), dict(first_env=64)])
def test_seeds_of_two_pools_are_disjoint_and_their_streams_differ(change):
  arguments = dict(seed=1, segment=0, first_env=0, num_envs=64)
  seeds_a = env_seeds(**arguments)
  seeds_b = env_seeds(**arguments | change)
  assert len(set(seeds_a + seeds_b)) == 128
  obs = np.concatenate([first_obs('CartPole-v1', seeds) for seeds in (seeds_a, seeds_b)])
  assert len(np.unique(obs, axis=0)) == 128


def test_neighbouring_environments_have_no_neighbouring_seeds():
  seeds = np.sort(env_seeds(3, 0, 0, 4096))
  assert seeds[0] >= 0 and seeds[-1] < 2**31  # the seeds that EnvPool accepts
  assert np.diff(seeds).min() > 1


def test_an_environments_seed_depends_only_on_seed_segment_and_its_index():
  expected = env_seeds(5, 2, 0, 24)
  for width in (1, 4, 8):
    shards = [env_seeds(5, 2, first, width) for first in range(0, 24, width)]
    assert sum(shards, []) == expected


@pytest.mark.quick
def test_each_environment_has_its_own_seed():
  seeds = env_seeds(1, 0, 0, 6)
  vector_env = envpool_envs.EnvPoolVectorEnv('CartPole-v1', {}, seeds, ONE_THREAD)
  assert_array_equal(vector_env.first_obs, first_obs('CartPole-v1', seeds))
  assert_array_equal(vector_env.first_obs[4], first_obs('CartPole-v1', seeds[4:5])[0])
  vector_env.close()


# Steps.


def test_the_first_step_is_not_a_reset():
  vector_env = envpool_envs.EnvPoolVectorEnv('CartPole-v1', {}, [1, 2, 3], ONE_THREAD)
  _, _, step = vector_env.recv(*vector_env.send(vector_env.handle, (), jnp.zeros(3, jnp.int32)))
  assert_array_equal(step.reward, [1, 1, 1])  # a reset gives 0
  assert not np.any(np.all(step.obs == vector_env.first_obs, axis=1))
  vector_env.close()


@pytest.mark.parametrize('task', ['Humanoid-v4', 'Pendulum-v1'])
def test_actions_are_within_the_box_of_the_task(task, monkeypatch):
  """Humanoid's bound is 0.4 in float64, which float32 rounds up."""
  space = envpool_envs.spaces_of(task, {}).action
  vector_env = envpool_envs.EnvPoolVectorEnv(task, {}, [1, 2, 3], ONE_THREAD)
  sent = []
  monkeypatch.setattr(envpool_envs, '_call', lambda *args: sent.append(np.asarray(args[4])))
  high = np.float32(space.high)
  vector_env.send(vector_env.handle, (), jnp.array([high, -high, np.nextafter(high, 99)]))
  assert sent[0].dtype == space.dtype
  assert all(space.contains(action) for action in sent[0])
  assert_array_equal(sent[0], [space.high, space.low, space.high])
  vector_env.close()


MUJOCO_IN_A_LOOP = f"""
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from podracer_jit.envs import envpool_envs
assert not jax.config.jax_enable_x64

seeds = [11, 22, 33]
T = 40
vector_env = envpool_envs.EnvPoolVectorEnv('{MUJOCO}', {{}}, seeds, 1)
actions = np.random.default_rng(0).uniform(-1, 1, (T, 3, 6)).astype(np.float32)

def steps(handle, actions):
  def step(t, carry):
    handle, obs, reward = carry
    handle, _, step = vector_env.recv(*vector_env.send(handle, (), actions[t]))
    assert step.obs.dtype == step.reward.dtype == step.raw_reward.dtype == np.float32
    return handle, obs.at[t].set(step.obs), reward.at[t].set(step.reward)
  return lax.fori_loop(0, T, step, (handle, jnp.zeros((T, 3, 17)), jnp.zeros((T, 3))))

_, obs, reward = jax.block_until_ready(jax.jit(steps)(vector_env.handle, actions))
vector_env.close()
assert vector_env.first_obs.dtype == obs.dtype == reward.dtype == np.float32
assert jnp.ones(1).astype(float).dtype == np.float32  # x64 is still off

from tests.envs.test_envs import python_pool
pool = python_pool('{MUJOCO}', seeds)
first, _ = pool.reset()
assert first.dtype == np.float64
assert np.array_equal(vector_env.first_obs, first.astype(np.float32))
for t in range(T):
  expected_obs, expected_reward, *_ = pool.step(actions[t].astype(np.float64))
  assert np.array_equal(obs[t], expected_obs.astype(np.float32)), t
  assert np.array_equal(reward[t], expected_reward.astype(np.float32)), t
print('equal')
"""


def test_mujoco_steps_in_a_jitted_loop_with_x64_off_and_equals_the_python_api():
  assert run_in_new_process(MUJOCO_IN_A_LOOP).split() == ['equal']


def test_random_numbers_are_the_same_next_to_a_float64_environment():
  """With x64 enabled, JAX draws other integers, and default dtypes have 64 bits."""
  key = jax.random.key(7)

  def draws(key):
    return (jax.random.randint(key, (8,), 0, 1000), jax.random.categorical(key, jnp.zeros((8, 5))),
            jax.random.normal(key, (8,)), jnp.arange(3), jnp.zeros(2))

  outside = draws(key)
  vector_env = envpool_envs.EnvPoolVectorEnv(MUJOCO, {}, [1, 2], ONE_THREAD)

  def beside(handle, key):
    def step(t, carry):
      handle, _ = carry
      handle, _ = vector_env.send(handle, (), jnp.zeros((2, 6)))
      between = draws(key)
      handle, _, step = vector_env.recv(handle, ())
      after = draws(key)
      assert step.obs.dtype == np.float32
      return handle, (between, after)
    zeros = jax.tree.map(jnp.zeros_like, (outside, outside))
    return lax.fori_loop(0, 2, step, (handle, zeros))

  _, (between, after) = jax.block_until_ready(jax.jit(beside)(vector_env.handle, key))
  vector_env.close()
  for inside in (between, after):
    for actual, expected in zip(inside, outside, strict=True):
      assert actual.dtype == expected.dtype
      # Normal numbers may be rounded differently with and without jit.
      assert_allclose(actual, expected, rtol=1e-6)


# Threads.


def threads():
  """Returns the ids of this process's threads; Python does not know those of EnvPool."""
  return set(os.listdir('/proc/self/task'))


def test_a_pool_starts_the_given_number_of_threads_and_ends_them():
  def started(num_threads):
    before = threads()
    vector_env = envpool_envs.EnvPoolVectorEnv('CartPole-v1', {}, range(8), num_threads)
    new = threads() - before
    vector_env.close()
    assert not threads() & new
    return len(new)

  started(1)  # the first pool of a process starts more threads
  assert started(5) - started(1) == 4


def test_the_cores_are_divided_among_all_pools(monkeypatch):
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: range(12))
  options = placement.PlacementOptions(
      actor_platform='cpu', env_threads=0, actor_devices=(0,), learner_devices=(0,),
      actors_per_device=1)
  granted = [placement.resolve(options, vector_envs).env_threads for vector_envs in (1, 3, 5, 24)]
  assert granted == [12, 4, 2, 1]
  assert placement.resolve(dataclasses.replace(options, env_threads=7), 3).env_threads == 7


@pytest.mark.parametrize('allowed, pools, threads, expected', [
    (range(8), 4, 2, (0, 2, 4, 6)), (range(3, 8), 2, 2, (3, 5)), ({7, 2, 9}, 3, 1, (2, 7, 9)),
    # Two threads of each core of a NUMA node: its cores, and after them their second threads.
    ([0, 1, 2, 64, 65, 66], 2, 2, (0, 64)), ([0, 1, 2, 64, 65, 66], 2, 3, (0, 64))])
def test_each_thread_of_a_pool_has_a_core(monkeypatch, allowed, pools, threads, expected):
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(allowed))
  assert placement.first_cores(pools, threads) == expected
  options = placement.PlacementOptions(
      actor_platform='cpu', env_threads=threads, actor_devices=(0,), learner_devices=(0,),
      actors_per_device=1, pin_envs=True)
  assert placement.resolve(options, pools).env_cores == expected
  assert placement.resolve(dataclasses.replace(options, pin_envs=False), pools).env_cores == ()


@pytest.mark.parametrize('allowed, pools, threads', [
    (range(3), 2, 2), ([0, 2, 4, 6], 1, 2), (range(4), 5, 1)])
def test_more_threads_than_cores_are_refused(monkeypatch, allowed, pools, threads):
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(allowed))
  with pytest.raises(ValueError, match=rf'^placement\.pin_envs: {pools} pools \(num_shards\) of '
                     rf'{threads} threads .* may use {len(allowed)}'):
    placement.first_cores(pools, threads)


def test_threads_of_a_run_stay_on_their_cores_and_change_no_bit():
  """Two pools of one thread, on the cores that this process may use."""
  if len(os.sched_getaffinity(0)) < 2:
    pytest.skip('needs two cores')
  config = changed(small(num_shards=2), placement__env_threads=1, placement__xla_threads=2,
                   placement__actor_devices=(0,), placement__learner_devices=(0,))

  def cores_of(run):
    before = threads()
    actor = build.make_actor(run, 0, range(2), run.place.actors[0])
    cores = [os.sched_getaffinity(int(thread)) for thread in threads() - before]
    actor.rollout_program.close()
    return [min(core) for core in cores if len(core) == 1]

  pinned = changed(config, placement__pin_envs=True)
  assert sorted(cores_of(fresh(pinned))) == sorted(os.sched_getaffinity(0))[:2]
  assert cores_of(fresh(config)) == []
  assert run(pinned, updates=3)[0] == run(config, updates=3)[0]


@pytest.mark.parametrize('config, message', [
    (small(task='gymnax:CartPole-v1'), 'only the threads of EnvPool can stay on cores'),
    (small(task='gymnasium:CartPole-v1'), 'only the threads of EnvPool can stay on cores'),
    (changed(small('ppo'), scheme='dppo_async', placement__cluster='ray'), 'on a cluster, Ray')])
def test_threads_that_cannot_stay_on_cores_are_refused(config, message):
  with pytest.raises(ValueError, match=rf'^placement\.pin_envs: {message}'):
    resolve(changed(config, placement__pin_envs=True))


def test_actors_use_the_cpu_if_envpool_does_not_support_the_accelerator(monkeypatch):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  options = placement.PlacementOptions(actor_platform='auto', actor_devices=(1,), env_threads=1,
                                       learner_devices=(0,), actors_per_device=1)
  assert placement.resolve(options, 1).actors == (jax.devices('cpu')[1],)


# Options that are refused before EnvPool gets them.


def test_noop_max_0_never_reaches_envpool(monkeypatch):
  """EnvPool would kill the process."""
  envpool_make_spec = envpool.make_spec

  def make_spec(task, **options):
    assert options.get('noop_max') != 0
    return envpool_make_spec(task, **options)

  monkeypatch.setattr(envpool_envs.envpool, 'make_spec', make_spec)
  with pytest.raises(ValueError, match=r'env\.noop_max.*at least 1.*got 0'):
    envpool_envs.make_spec('Pong-v5', dict(noop_max=0))
  assert envpool_envs.make_spec('Pong-v5', dict(noop_max=1)).num_actions == 6


@pytest.mark.parametrize('envpool, jax, fits', [
    ('1.2.5', '0.10.2', True), ('1.2.6', '0.10.2', True), ('1.2.7', '0.10.2', False),
    ('1.2.7', '0.11.0', True), ('1.3', '0.10.9', False)])
def test_an_envpool_that_this_jax_cannot_call_is_refused(monkeypatch, envpool, jax, fits):
  monkeypatch.setattr(envpool_envs.importlib.metadata, 'version', lambda name: envpool)
  monkeypatch.setattr(envpool_envs.jax, '__version__', jax)
  if fits:
    assert envpool_envs.make_spec('CartPole-v1', {}).num_actions == 2
    return
  with pytest.raises(ValueError, match=f'^env.task: envpool {envpool} needs jax 0.11 or newer, and '
                     f'jax {jax} is installed; install another jax, or "envpool<1.2.7"$'):
    envpool_envs.make_spec('CartPole-v1', {})


@pytest.mark.parametrize('task, options, message', [
    ('Pongo-v5', {}, r"env\.task.*'Pongo-v5'.*Pong-v5"),
    ('xyzzy', {}, r"env\.task.*'xyzzy'"),
    ('Pong-v5', dict(noopmax=1), r'env\.noopmax.*not an option of Pong-v5.*noop_max'),
    ('Pong-v5', dict(seed=1), r'env\.seed.*not an option'),
    ('Pong-v5', dict(batch_size=2), r'env\.batch_size.*not an option'),
    ('CartPole-v1', dict(noop_max=1), r'env\.noop_max.*not an option of CartPole-v1'),
    ('Pong-v5', dict(frame_skip=4.5), r'env\.frame_skip.*int.*4\.5'),
    ('Pong-v5', dict(frame_skip='four'), r"env\.frame_skip.*int.*'four'"),
    ('Pong-v5', dict(frame_skip=True), r'env\.frame_skip.*int.*True'),
    ('Pong-v5', dict(episodic_life=1), r'env\.episodic_life.*bool.*1'),
    ('Pong-v5', dict(repeat_action_probability='0.25'), r'env\.repeat_action_probability.*float'),
    ('Pong-v5', dict(stack_num=0), r'env\.stack_num.*at least 1.*0'),
    ('Pong-v5', dict(frame_skip=0), r'env\.frame_skip.*at least 1.*0'),
    ('CartPole-v1', dict(max_episode_steps=-3), r'env\.max_episode_steps.*at least 1.*-3'),
    *[(task, dict(max_episode_steps=5), rf'env\.max_episode_steps: EnvPool ignores it for {task},')
      for task in ('Highway-v0', 'Jumanji/Snake-v1', 'Game2048-v1', 'Play2048-v1', 'Blackjack-v1')],
    ('FetchReach-v1', dict(reward_type=3), r'env\.reward_type.*str.*3'),
])
def test_an_error_names_the_field_the_value_and_the_expected_values(task, options, message):
  with pytest.raises(ValueError, match=message):
    envpool_envs.make_spec(task, options)


@pytest.mark.parametrize('task', [
    'CartPole-v1', 'FrozenLake-v1', 'Sokoban-v0', 'MiniGrid-Empty-5x5-v0', 'LunarLander-v2',
    'HalfCheetah-v4', 'WalkerWalk-v1'])
def test_a_limit_of_steps_truncates_episodes(task):
  options = dict(max_episode_steps=3)
  assert envpool_envs.make_spec(task, options).max_episode_steps == 3
  pool = envpool.make(task, env_type='gymnasium', num_envs=1, seed=1, **options)
  pool.reset()
  action = np.zeros((1, *pool.action_space.shape), pool.action_space.dtype)
  ends = [pool.step(action)[2:4] for _ in range(3)]
  assert [bool(truncated[0]) for _, truncated in ends] == [False, False, True]


@pytest.mark.parametrize('options', [
    dict(mode=99), dict(difficulty=99), dict(max_episode_steps=10**10)])
def test_an_error_of_envpool_names_the_field(options):
  (name, value), = options.items()
  with pytest.raises(ValueError, match=rf'env\.{name}.*{value}') as error:
    envpool_envs.make_spec('Pong-v5', options)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('task, message', [
    ('IntersectionMultiAgent-v0', 'several players'),
    ('Go9x9-v1', 'several players'),
])
def test_tasks_that_cannot_be_trained_are_refused(task, message):
  with pytest.raises(ValueError, match=rf'env\.task.*{task}.*{message}'):
    envpool_envs.make_spec(task, {})


def test_an_integer_is_accepted_for_a_float():
  envpool_envs.make_spec('Pong-v5', dict(repeat_action_probability=1))


def test_a_spec_has_the_shapes_and_dtypes_that_the_learner_gets():
  spec = envpool_envs.make_spec('Pong-v5', dict(img_height=42, stack_num=2, full_action_space=True,
                                        frame_skip=5, max_episode_steps=99))
  assert spec == EnvSpec('Pong-v5', (2, 42, 84), np.uint8, 18, (), (), 5, 99, 2, step_us=130.0)
  assert envpool_envs.make_spec('CartPole-v1', {}).frame_skip == 1
  assert envpool_envs.make_spec(MUJOCO, {}).obs_dtype == np.float32  # EnvPool says float64


def test_continuous_actions_have_bounds_and_no_count():
  spec = envpool_envs.make_spec('Pusher-v4', {})
  assert spec.num_actions == 0
  assert spec.action_low == (-2.0,) * 7 and spec.action_high == (2.0,) * 7


@pytest.mark.parametrize('task, policy', [
    (MUJOCO, 'categorical'), ('CartPole-v1', 'gaussian'), (MUJOCO, 'normal')])
def test_a_policy_that_does_not_fit_the_actions_is_refused(task, policy):
  config = experiment.config('impala', 'mlp', 'adam', policy=policy)
  config.env.task = task
  with pytest.raises(ValueError, match=rf'policy: must be one of auto, .* {task}, got .{policy}'):
    resolve(config)


def test_parts_of_a_dict_are_concatenated_in_the_order_of_their_names():
  spec = envpool_envs.make_spec('WalkerWalk-v1', {})
  assert spec.obs_shape == (24,) and spec.obs_dtype == np.float32
  vector_env = envpool_envs.EnvPoolVectorEnv('WalkerWalk-v1', {}, [3, 9])
  pool = python_pool('WalkerWalk-v1', [3, 9])

  def flat(obs):
    parts = [np.reshape(obs[name], (2, -1)) for name in ('height', 'orientations', 'velocity')]
    return np.concatenate(parts, axis=1).astype(np.float32)

  assert np.array_equal(vector_env.first_obs, flat(pool.reset()[0]))
  action = np.random.default_rng(0).uniform(-1, 1, (2, 6))
  step = jax.jit(lambda handle, a: vector_env.recv(*vector_env.send(handle, (), a))[2])
  timestep = step(vector_env.handle, action.astype(np.float32))
  expected, reward, *_ = pool.step(action.astype(np.float32).astype(np.float64))
  assert timestep.obs.dtype == np.float32 and np.array_equal(timestep.obs, flat(expected))
  assert np.array_equal(timestep.reward, reward.astype(np.float32))
  vector_env.close()


def test_a_spec_starts_no_environment():
  before = threads()
  envpool_envs.make_spec('Breakout-v5', {})
  assert threads() <= before


def test_a_spec_makes_one_game(monkeypatch):
  calls = []
  make_spec = envpool_envs.envpool.make_spec
  monkeypatch.setattr(envpool_envs, '_specs', {})
  monkeypatch.setattr(envpool_envs.envpool, 'make_spec',
                      lambda task, **options: calls.append(options) or make_spec(task, **options))
  options = dict(frame_skip=3, noop_max=5, stack_num=2)
  assert envpool_envs.make_spec('Pong-v5', options).stack == 2
  assert calls == [options]
  with pytest.raises(ValueError, match='env.img_height: '):
    envpool_envs.make_spec('Pong-v5', dict(options, img_height=0))


@pytest.mark.parametrize('program, expected', [
    (None, ''),
    ('print("ERROR: no OpenGL"); raise SystemExit(1)',
     'the simulator ends the process that draws: ERROR: no OpenGL'),
    ('import os; os.abort()', 'the simulator ends the process that draws'),
    ('raise RuntimeError("CartPole has no pictures")', '')])
def test_a_simulator_that_would_end_the_process_does_not_draw(monkeypatch, program, expected):
  """MuJoCo ends the process without OpenGL, so another process tries to draw first."""
  if program:
    monkeypatch.setattr(envpool_envs, '_DRAWS', program)
  envpool_envs._problem_of_rendering.cache_clear()
  try:
    assert envpool_envs._problem_of_rendering('CartPole-v1') == expected
    vector_env = envpool_envs.EnvPoolVectorEnv('CartPole-v1', {}, [1], 1, 0)
    with contextlib.closing(vector_env), pytest.raises(RuntimeError, match=expected or '.'):
      vector_env.render(None)  # without `render_options` EnvPool raises an error, too
  finally:
    envpool_envs._problem_of_rendering.cache_clear()
