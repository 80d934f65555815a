"""Rollouts that step the first environments that are ready, compared environment by environment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.actor import asynchronous
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.envs import envpool_envs
from podracer_jit.envs.protocol import TimeStep
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.experiment.resolve import resolve
from podracer_jit.losses.algorithm import ForActors
from podracer_jit.losses.impala import IMPALA
from tests.actor.test_rollouts import SMALL, ExpectedRow, linear
from tests.envs.test_envs import MUJOCO, python_pool
from tests.made import SPEC, Function, bound
from tests.runs import changed, prepared, run, small
from tests.workers import wrap


def tagged(step):
  """Appends `env_id` to each observation, as one more number or as one more frame."""
  tag = step.env_id.reshape(-1, *[1] * (step.obs.ndim - 1)).astype(step.obs.dtype)
  tag = jnp.broadcast_to(tag, (len(tag), 1, *step.obs.shape[2:]))
  return step._replace(obs=jnp.concatenate([step.obs, tag], axis=1))


class Tagged(envpool_envs.EnvPoolVectorEnv):
  """EnvPool's environments, with tagged observations."""

  def recv(self, token, state):
    token, state, step = super().recv(token, state)
    return token, state, tagged(step)


def scripted_step(env, num_steps, age, over, action):
  """Steps the scripted environment number `env`, in NumPy or JAX.

  Args:
    env: which environment steps.
    num_steps: its steps before this one, over all its episodes.
    age: its steps before this one in its episode.
    over: whether its episode has ended; then this step is a reset.
    action: its action.

  Returns:
    (age, over, reward, terminated, truncated) after the step.
  """
  reset = (num_steps == 0) | over
  age = (age + 1) * ~reset
  over = (age == 2 + env % 4) & ~reset
  reward = (action + 10 * env + age) * ~reset
  return age, over, reward, over & (num_steps % 2 == 0), over & (num_steps % 2 > 0)


class Scripted:
  """Environments that are ready in an order drawn beforehand; the token holds their state."""

  def __init__(self, num_envs, batch_size, weights):
    self.num_envs = num_envs
    self.batch_size = batch_size
    draws = np.random.default_rng(0)
    self._order = jnp.array([draws.choice(num_envs, batch_size, replace=False, p=weights)
                             for _ in range(2000)], jnp.int32)
    self.first_state = ()
    # Rows: number of steps, age, over, action. The last row counts the calls of recv.
    self.handle = np.zeros((5, num_envs), np.int32)

  def recv(self, token, state):
    env = self._order[token[4, 0]]
    num_steps, age, over, action, _ = token[:, env]
    age, over, reward, terminated, truncated = scripted_step(env, num_steps, age, over > 0, action)
    obs = jnp.stack([env + 0.5, num_steps.astype(jnp.float32)], axis=1)
    token = token.at[:3, env].set(jnp.stack([num_steps + 1, age, over.astype(jnp.int32)]))
    reward = reward.astype(jnp.float32)
    return token.at[4].add(1), state, tagged(
        TimeStep(obs, reward, terminated, truncated, 2 * reward, terminated, env))

  def send(self, token, state, action, env_id):
    return token.at[3, env_id].set(action), state

  def close(self):
    pass


class ScriptedPool:
  """One scripted environment behind EnvPool's Python API."""

  def __init__(self, env):
    self._env = np.array([env])
    self._num_steps = 1
    self._age = 0
    self._over = False
    self._obs = lambda: np.array([[env + 0.5, self._num_steps - 1]], np.float32)

  def reset(self):
    return self._obs(), {}

  def step(self, action):
    self._age, self._over, reward, *ends = scripted_step(
        self._env, np.array([self._num_steps]), self._age, self._over, action)
    self._num_steps += 1
    return self._obs(), reward, *ends, {'reward': 2 * reward}

  def close(self):
    pass


CASES = {
    # task, environments, environments that a step waits for, rows, rollouts, options
    'terminations': ('CartPole-v1', 6, 2, 7, 12, {}),
    'both ends': ('CartPole-v1', 6, 3, 5, 12, dict(max_episode_steps=12)),
    'one at a time': ('CartPole-v1', 4, 1, 6, 6, {}),
    'every row an end': ('CartPole-v1', 4, 2, 3, 4, dict(max_episode_steps=1)),
    'frames': ('Pong-v5', 4, 2, 8, 8, dict(max_episode_steps=9 * 4, noop_max=30, **SMALL)),
    'lost lives': ('Breakout-v5', 4, 2, 16, 12, dict(
        max_episode_steps=144, episodic_life=True, reward_clip=True, **SMALL)),
    'numbers of 64 bits': (MUJOCO, 4, 2, 6, 3, dict(max_episode_steps=8)),
    'scripted': ('scripted', 6, 3, 5, 40, {}),
    'scripted, few rows': ('scripted', 6, 2, 1, 40, {}),
}


class AsynchronousActor:
  """Runs an asynchronous actor; keeps its rollouts and the columns of each environment in order."""

  def __init__(self, task, num_envs, batch, steps, count, options):
    scripted = task == 'scripted'
    seeds = env_seeds(4, 0, 0, num_envs)
    if scripted:
      weights = np.array([5, 4, 1, 1, 1, 0.2]) / 12.2
      vector_env = Scripted(num_envs, batch, weights)
      spec = SPEC._replace(obs_shape=(2,), num_actions=3)
    else:
      spec = envpool_envs.make_spec(task, options)
      vector_env = Tagged(task, options, seeds, 2, batch)
    # An observation with a tag is no stack of frames.
    shape = spec.obs_shape
    spec = spec._replace(obs_shape=(shape[0] + 1, *shape[1:]), stack=1)
    self.policy = bound(IMPALA(), spec=spec).parts.policy
    self.params = jax.random.normal(
        jax.random.key(0), (int(np.prod(spec.obs_shape)), 1 + self.policy.dist_size)) / 10
    algorithm = bound(IMPALA(), Function(linear, self.params), spec=spec, unroll_length=steps)
    state = asynchronous.initial_state(algorithm, vector_env, jax.random.key(3))
    self.rollouts = []
    self.leftover_columns = []
    rollout_program = RolloutProgram([vector_env])
    program = rollout_program.load(
        asynchronous.make_rollout(algorithm, vector_env), (ForActors(self.params), state), (1,))
    for _ in range(count):
      state, (rollout,) = program(ForActors(self.params), state)
      self.rollouts.append(jax.tree.map(np.asarray, rollout))
      self.leftover_columns.append(int(state.envs[0].complete))
    rollout_program.close()
    self.make_pool = [lambda e=e: ScriptedPool(e) if scripted else
                      python_pool(task, seeds[e:e + 1], **options) for e in range(num_envs)]
    self.columns = [[] for _ in range(num_envs)]
    for rollout in self.rollouts:
      for b, env in enumerate(self.env_ids(rollout)[0]):
        self.columns[env].append(jax.tree.map(lambda x, b=b: x[:, b], rollout))

  @staticmethod
  def env_ids(rollout):
    """Returns the tag of each observation: the number of its environment, [T + 1, B]."""
    return rollout.obs.reshape(*rollout.obs.shape[:3], -1)[:, :, -1, 0].astype(int)

  def stream(self, env):
    """Returns all rows of an environment one after the other, with observations without the tag."""
    columns = self.columns[env]
    for column, next_column in zip(columns[:-1], columns[1:], strict=True):
      assert_array_equal(column.obs[-1], next_column.obs[0])
    rows = jax.tree.map(lambda *x: np.concatenate(x),
                        *(c._replace(obs=c.obs[:-1]) for c in columns))
    return rows._replace(obs=np.concatenate([rows.obs, columns[-1].obs[-1:]])[:, :-1])


@pytest.fixture(scope='module', params=CASES)
def actor(request):
  return AsynchronousActor(*CASES[request.param])


def test_a_column_holds_rows_of_one_environment(actor):
  for rollout in actor.rollouts:
    env_ids = actor.env_ids(rollout)
    assert (env_ids == env_ids[0]).all()
    assert_array_equal(rollout.episodes.fault[0, :, 4], env_ids[0])


def test_the_rows_of_an_environment_equal_those_of_the_python_api(actor):
  """No row is missing or stored twice, over all rollouts and ends of episodes."""
  ends = 0
  for env, columns in enumerate(actor.columns):
    if not columns:
      continue
    rows = actor.stream(env)
    pool = actor.make_pool[env]()
    expected_row = ExpectedRow()
    obs, _ = pool.reset()
    for t, action in enumerate(np.asarray(actor.policy.to_env(rows.action))):
      assert_array_equal(rows.obs[t], obs[0].astype(rows.obs.dtype))
      obs, reward, terminated, truncated, info = pool.step(
          action[None].astype(np.float64 if action.ndim else np.int32))
      assert rows.reward[t] == reward[0].astype(np.float32)
      assert (rows.terminated[t], rows.truncated[t]) == (terminated[0], truncated[0])
      unclipped = np.float32(info.get('reward', reward)[0])
      expected = expected_row.step(reward[0], terminated[0], truncated[0], unclipped,
                                   info.get('lives', [0])[0])
      assert (rows.valid[t], *(x[t] for x in rows.episodes[:3])) == expected
    assert_array_equal(rows.obs[-1], obs[0].astype(rows.obs.dtype))
    ends += rows.episodes.ended.sum()
    pool.close()
  assert ends


def test_log_prob_and_value_belong_to_the_observation_of_the_same_row(actor):
  for rollout in actor.rollouts:
    obs = rollout.obs[:-1]
    dist, value = linear(actor.params, obs.reshape(-1, *obs.shape[2:]))
    action = rollout.action.reshape(-1, *rollout.action.shape[2:])
    expected = actor.policy.log_prob(dist, action).reshape(rollout.valid.shape)
    assert_allclose(rollout.extras['log_prob'], expected, rtol=1e-4, atol=1e-5)
    assert_allclose(rollout.extras['value'], value.reshape(rollout.valid.shape), rtol=1e-4,
                    atol=1e-5)


def test_fast_environments_fill_more_columns_and_leftover_columns_come_first_in_the_next_rollout():
  actor = AsynchronousActor(*CASES['scripted'])
  env_ids = [actor.env_ids(rollout)[0] for rollout in actor.rollouts]
  counts = np.array([np.bincount(ids, minlength=6) for ids in env_ids])
  assert counts.max() > 1 and counts.min() == 0
  assert max(actor.leftover_columns) > 0
  order = np.asarray(Scripted(6, 3, np.array([5, 4, 1, 1, 1, 0.2]) / 12.2)._order)
  num_obs = np.zeros(6, int)
  complete = []
  for env in order.ravel():  # a batch that completes several columns adds them in its own order
    num_obs[env] += 1
    if num_obs[env] > 1 and (num_obs[env] - 1) % 5 == 0:
      complete.append(env)
  columns = np.concatenate(env_ids)
  assert_array_equal(columns, complete[:len(columns)])


def test_actions_differ_between_turns_and_rollouts():
  actor = AsynchronousActor(*CASES['terminations'])
  actions = np.stack([c.action for columns in actor.columns for c in columns])
  assert len(np.unique(actions, axis=0)) > len(actions) // 2


# In a whole run.


def asynchronous_run(**fields):
  config = changed(small('impala', env_batch=4), scheme='cleanba', **fields)
  rollouts = []
  _, reports, train = run(config, tamper=wrap('actor 0', after=lambda call, state, outputs: (
      rollouts.append(jax.device_get(outputs[0].value[0])))))
  return rollouts, reports, train


def test_training_counts_the_valid_rows_of_the_actor():
  rollouts, reports, train = asynchronous_run(env__max_episode_steps=20)
  metrics = [jax.device_get(report.metrics) for report in reports]
  valid = [int(rollout.valid.sum()) for rollout in rollouts]
  assert len(reports) == len(rollouts) == 6
  assert [m['valid'][0] for m in metrics] == valid
  assert [m['steps'][0] for m in metrics] == np.cumsum(valid).tolist()
  assert min(valid) < 64 == rollouts[0].valid.size
  for tree in (metrics, train.params):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(tree) if x.dtype.kind == 'f')


def test_configs_with_asynchronous_actors_are_not_deterministic():
  assert resolve(small()).deterministic
  assert not resolve(small(env_batch=4)).deterministic
  assert not resolve(changed(small(), scheme='impala')).deterministic


@pytest.mark.parametrize('loss, fields, message', [
    ('impala', dict(env_batch=-1), 'env_batch: must not be negative, got -1'),
    ('impala', dict(env_batch=8), 'env_batch: must be 0, or a divisor of the 8 .* below 8, got 8'),
    ('impala', dict(env_batch=3), 'env_batch: must be 0, or a divisor of the 8 .* below 8, got 3'),
    ('impala', dict(num_shards=2), 'env_batch: must be 0, or a divisor of the 4 .* got 4'),
    ('impala', dict(scheme='fused'), 'env_batch: fused waits for all environments'),
    ('impala', dict(network__core='gru'), r'env_batch: .*network\.core = gru'),
    ('ppo', dict(normalise__reward=True), r'env_batch: normalise\.reward'),
    ('dqn', dict(scheme='apex_lockstep', num_minibatches=1), 'env_batch: dqn draws from a replay'),
])
def test_a_config_that_cannot_be_asynchronous_is_refused(loss, fields, message):
  config = changed(small(loss), **dict(env_batch=4) | fields)
  if loss == 'dqn':
    config['replay'].update(min_size=64, capacity=64, batch_size=8)
  with pytest.raises(ValueError, match=message):
    resolve(config)


def test_an_asynchronous_actor_needs_exactly_one_shard():
  with pytest.raises(ValueError, match=r'num_shards: must be the number of actors .*, 1; got 2'):
    prepared(changed(small(env_batch=2, num_shards=2), placement__actor_devices=(0,),
                     placement__actors_per_device=1))
  prepared(changed(small(env_batch=2, num_shards=2), placement__actors_per_device=2))
