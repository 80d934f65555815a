"""Values of environments that nothing can be learned from: found and named, or masked."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer_jit.actor import faults
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.errors import EnvironmentFailed, environment_failure
from podracer_jit.play import evaluation
from podracer_jit.training.meter import environment_check
from podracer_jit.types import Episodes
from podracer_jit.workdir import checkpoints
from tests.runs import changed, fresh, open_workdir, run, small, train_in
from tests.tiers import essential

HERE = 'tests.actor.test_faults'


class Sensor:
  """Episodes of three steps that end by a termination, or by a truncation; one value is wrong."""

  action_space = gymnasium.spaces.Discrete(2)

  def __init__(self, where='', value='nan', truncates=False, continuous=False):
    """Makes an environment.

    Args:
      where: 'end', 'second', 'first' or 'reward': the observation after the third or the second
        step or a reset, or the reward of the second step.
      value: the wrong value.
      truncates: whether episodes end by a truncation.
      continuous: whether actions are floats.
    """
    self.observation_space = gymnasium.spaces.Box(-1, 1, (2, 2), np.float32)
    if continuous:
      self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    self._where = where
    self._value = float(value)
    self._truncates = truncates

  def _obs(self, key, wrong):
    obs = jax.random.uniform(key, (2, 2))
    return obs.at[1, 0].set(jnp.where(wrong, self._value, obs[1, 0]))

  def reset(self, key):
    return self._obs(key, self._where == 'first'), jnp.int32(0)

  def step(self, key, t, action):
    t += 1
    over = t == 3
    wrong = (over & (self._where == 'end')) | ((t == 2) & (self._where == 'second'))
    reward = jnp.where((t == 2) & (self._where == 'reward'), self._value, jnp.sum(action) * 1.0)
    obs = self._obs(key, wrong)
    # Zeros where a wrong value at the end of an episode must be replaced by them.
    if self._where == 'zero':
      obs = obs.at[1, 0].set(jnp.where(over, 0.0, obs[1, 0]))
    return obs, t, reward, over & (not self._truncates), over & self._truncates, {}


class Numbers:
  """Observes a number of a Discrete space of three, and 3 after the second step."""

  observation_space = gymnasium.spaces.Discrete(3)
  action_space = gymnasium.spaces.Discrete(2)

  def reset(self, key):
    del key
    return jnp.int32(1), jnp.int32(0)

  def step(self, key, t, action):
    del key, action
    return jnp.where(t == 1, 3, 2), t + 1, 1.0, t == 4, False, {}


def config(loss='ppo', environment='Sensor', **options):
  """Returns a config of a few updates whose environments are made with these options."""
  fields = small(loss, f'{HERE}:{environment}', 'deterministic' if loss == 'dpg' else 'mlp')
  fields['env'] |= options
  if 'replay' in fields:
    fields |= dict(num_minibatches=1, scheme='apex_lockstep')
    fields['replay'] |= dict(capacity=256, min_size=1, batch_size=16, gradient_steps=2)
  if loss == 'r2d2':
    fields['network'] |= dict(core='gru', core_size=8)
    fields['loss'] |= dict(burn_in=2, trace_length=6, n_step=2)
  return fields


def slow(obs, reward, episode_return):
  """Returns the first fault of each environment by plain loops: what, value, row, element."""
  faults_of_envs = []
  for env in range(reward.shape[1]):
    first = (0, 0, -1, 0)
    for row in range(-1, len(reward)):
      wrong = [(1, i) for i, x in enumerate(obs[row + 1, env].ravel()) if not np.isfinite(x)]
      returned = reward[row, env] if row >= 0 else 0.0
      if row >= 0 and np.isfinite(returned):
        returned = episode_return[row, env]
      value = obs[row + 1, env].ravel()[wrong[0][1]] if wrong else returned
      if wrong or not np.isfinite(returned):
        kind = 1 if np.isnan(value) else 2 if value > 0 else 3
        first = (1, kind, row, wrong[0][1]) if wrong else (2, kind, row, 0)
        break
    faults_of_envs.append(first)
  return np.array(faults_of_envs)


@pytest.mark.parametrize('seed', range(4))
def test_the_first_fault_of_each_environment_is_found(seed):
  rng = np.random.default_rng(seed)
  obs = rng.normal(size=(6, 40, 3, 2)).astype(np.float32)
  reward, episode_return = rng.normal(size=(2, 5, 40)).astype(np.float32)
  for array, count in ((obs, 12), (reward, 6), (episode_return, 4)):
    places = rng.choice(array.size, count, replace=False)
    array.ravel()[places] = rng.choice([np.nan, np.inf, -np.inf], count)
  fault = np.asarray(jax.jit(faults.find)(obs, reward, episode_return, jnp.arange(40) + 7))
  expected = slow(obs, reward, episode_return)
  is_fault = expected[:, 0] > 0
  assert 10 < is_fault.sum() < 30
  np.testing.assert_array_equal(fault[0, is_fault, :4], expected[is_fault])
  np.testing.assert_array_equal(fault[0, :, 0], expected[:, 0])
  np.testing.assert_array_equal(fault[0, :, 4], np.arange(40) + 7)


def test_bytes_need_no_check_of_observations():
  obs = np.zeros((3, 2, 4), np.uint8)
  reward = np.array([[0, 0], [0, np.inf]], np.float32)
  fault = np.asarray(faults.find(jnp.asarray(obs), reward, reward, jnp.arange(2)))
  assert fault[0].tolist() == [[0, 0, -1, 0, 0], [2, 2, 1, 0, 1]]


@pytest.mark.parametrize('loss, continuous', essential([
    ('ppo', False), ('impala', False), ('dqn', False), ('dpg', True)], 'ppo', 'dqn'))
def test_a_wrong_value_at_the_end_of_a_terminated_episode_is_a_zero(loss, continuous):
  receipts = {where: run(config(loss, where=where, continuous=continuous), updates=3)[0]
              for where in ('zero', 'end')}
  assert receipts['zero'] == receipts['end']


def test_normalised_observations_do_not_see_the_end_of_a_terminated_episode():
  base = changed(config(), normalise__obs=True, normalise__reward=True)
  receipts = {where: run(changed(base, env__where=where), updates=3)[0]
              for where in ('zero', 'end')}
  assert receipts['zero'] == receipts['end']


@pytest.mark.parametrize('options, sentence', [
    (dict(where='second'), 'the observation [1, 0] that step 2 of an episode returned is nan'),
    (dict(where='second', value='inf'),
     'the observation [1, 0] that step 2 of an episode returned is inf'),
    (dict(where='end', truncates=True),
     'the observation [1, 0] that step 3 of an episode returned is nan'),
    (dict(where='first'), 'the observation [1, 0] that a reset returned is nan'),
    (dict(where='reward', value='-inf'), 'the reward that step 2 of an episode returned is -inf'),
    (dict(environment='Numbers'),
     'the observation [0] that step 2 of an episode returned is outside of its space'),
])
def test_a_wrong_value_is_named(options, sentence):
  fresh_run = fresh(config(**options))
  _, reports, _ = run(None, updates=1, prepared_run=fresh_run)
  episodes = jax.tree.map(lambda x: np.asarray(x)[0], reports[0].metrics['episodes'])
  env_id, what = faults.describe(episodes, fresh_run.experiment.spec)
  assert (env_id, what) == (0, sentence)
  with pytest.raises(EnvironmentFailed) as error:
    environment_check(fresh_run.experiment, 0)(reports[0])
  task = fresh_run.experiment.env.task
  assert str(error.value).startswith(f'{task}: {sentence} (environment 0, seed')
  assert str(error.value).endswith('in update 1') and '\n' not in str(error.value)


DOORS = 'tests.envs.masked:Doors'


@pytest.mark.parametrize('loss, task, options, sentence', essential([
    ('ppo', DOORS, dict(stuck_at=2), 'step 2 of an episode returned allows no action'),
    ('dqn', DOORS, dict(stuck_at=3, ends='truncated'),
     'step 3 of an episode returned allows no action'),
    ('pqn', DOORS, dict(stuck_at=2), 'step 2 of an episode returned allows no action'),
    ('r2d2', DOORS.replace('Doors', 'PythonDoors'), dict(stuck_at=3),
     'step 3 of an episode returned allows no action'),
    ('impala', DOORS, dict(stuck_at=0), 'a reset returned allows no action'),
    ('impala', DOORS.replace('Doors', 'PythonDoors'), dict(stuck_at=2, choices=(3, 4)),
     'step 2 of an episode returned allows no choice of element 1 of an action')], 'dqn', 'impala'))
def test_a_mask_without_a_legal_action_is_named_with_task_seed_and_step(
    loss, task, options, sentence):
  """Masks of the last observations of episodes allow nothing either, which is no fault."""
  fresh_run = fresh(changed(config(loss), env={'task': task, 'num_envs': 8, **options}))
  _, reports, _ = run(None, updates=1, prepared_run=fresh_run)
  with pytest.raises(EnvironmentFailed) as error:
    environment_check(fresh_run.experiment, 0)(reports[0])
  seed, = env_seeds(fresh_run.experiment.seed, 0, 0, 1)
  assert str(error.value) == (f'{task}: the mask action_mask (env.action_mask) that {sentence} '
                              f'(environment 0, seed {seed}), in update 1')
  if loss == 'impala':
    player = evaluation.make_player(fresh_run, fresh_run.initial_state().params, update=0, steps=0)
    with pytest.raises(EnvironmentFailed, match=(
        f'^{task}: the mask action_mask .* that {sentence} .environment 0 of the evaluation with '
        'seed 5.$')):
      evaluation.play(player, evaluation.Settings(2, 2, 5, 100))


def test_without_a_fault_there_is_no_sentence():
  fresh_run = fresh(config())
  _, reports, _ = run(None, updates=1, prepared_run=fresh_run)
  episodes = jax.tree.map(lambda x: np.asarray(x)[0], reports[0].metrics['episodes'])
  assert faults.describe(episodes, fresh_run.experiment.spec) is None
  environment_check(fresh_run.experiment, 0)(reports[0])
  flags = np.zeros((2, 3), bool)
  assert faults.describe(Episodes(flags, flags, flags), fresh_run.experiment.spec) is None


def test_statistics_that_overflow_are_reported_in_the_update_in_which_they_do():
  base = changed(config(where='second', value='1e30'), normalise__obs=True)
  _, reports, state = run(base, updates=1)
  finite = reports[0].metrics['finite']
  assert not finite['moments'][0] and finite['optimizer'][0]
  # No loss shows it: divided by an infinite deviation, all observations are 0.
  assert np.isfinite(reports[0].metrics['grad_norm'][0])
  assert not np.isfinite(state.params['moments']['obs'].m2).all()


def test_an_evaluation_names_a_wrong_value_too():
  fresh_run = fresh(config(where='second'))
  player = evaluation.make_player(fresh_run, fresh_run.initial_state().params, update=0, steps=0)
  with pytest.raises(EnvironmentFailed, match=(
      rf'^{HERE}:Sensor: the observation \[1, 0\] that step 2 of an episode returned is nan '
      r'\(environment 0 of the evaluation with seed 5\)$')):
    evaluation.play(player, evaluation.Settings(2, 2, 5, 100))


def test_a_run_with_a_wrong_value_ends_in_its_update_and_saves_nothing(tmp_path):
  fresh_run = fresh(config(where='reward') | {'total_steps': 10_000})
  open_workdir(tmp_path, fresh_run.experiment.fields)
  with pytest.raises(Exception) as error:  # noqa: PT011 - the thread that failed wraps it
    train_in(fresh_run, tmp_path)
  message = environment_failure(error.value)
  assert 'the reward that step 2 of an episode returned is nan' in message
  assert ', in update 1; the last good checkpoint is none' in message
  assert not checkpoints.saved_updates(tmp_path)
