"""A user's own algorithm, network, optimizer, policy, scheme and environment, in own modules."""

import dataclasses
import importlib
import itertools
import pathlib
import re
import shutil
import sys

import jax
import numpy as np
import pytest
from absl.flags import FlagValues

import podracer_jit
from podracer_jit.agents import networks, optimizers
from podracer_jit.cli import main
from podracer_jit.experiment import flags, trial
from podracer_jit.experiment.resolve import resolve
from podracer_jit.losses import ALGORITHMS
from podracer_jit.play import evaluation
from podracer_jit.training import opening, stopping
from podracer_jit.training.trainer import Training
from podracer_jit.workdir import journal
from podracer_jit.workdir.workdir import make_request
from tests import runs
from tests.runs import changed, fresh, open_workdir, prepared, run, small
from tests.tiers import essential

PACKAGE = pathlib.Path(podracer_jit.__file__).parent
EXAMPLES = PACKAGE.parent / 'examples'
SHORT = ['--config.env.renew_every_updates=4', '--config.total_steps=100000']


def parse(*args):
  return flags.parse(['podracer_jit', *args, *SHORT], FlagValues())


def options_of(config, section):
  return [f'--config.{section}.{name}={value}' for name, value in config[section].items()
          if name != 'name']


@pytest.fixture
def write_module(tmp_path, monkeypatch):
  """Returns a function that writes a user's module on PYTHONPATH and returns its name."""
  monkeypatch.syspath_prepend(tmp_path)

  def write(name, text):
    (tmp_path / f'{name}.py').write_text(text)
    importlib.invalidate_caches()
    return name
  return write


TERMS = {
    'ppo': {'policy_loss', 'value_loss', 'entropy', 'approx_kl', 'clip_fraction',
            'explained_variance'},
    'impala': {'policy_loss', 'baseline_loss', 'entropy', 'rho', 'explained_variance'},
    'pqn': {'loss', 'abs_td_error', 'q'},
    'dqn': {'loss', 'abs_td_error', 'importance_weight', 'q'},
    'dpg': {'loss', 'abs_td_error', 'importance_weight', 'q'},
    'r2d2': {'loss', 'abs_td_error', 'importance_weight', 'q'},
    'sac': {'critic_loss', 'actor_loss', 'alpha_loss', 'q', 'entropy', 'alpha'},
    'td3': {'critic_loss', 'q'}}


@pytest.mark.parametrize('config, shipped, attribute', essential([
    ('ppo_cartpole:smoke', 'ppo', 'PPO'), ('impala_cartpole', 'impala', 'IMPALA'),
    ('pqn_cartpole:smoke', 'pqn', 'PQN'), ('apex_dqn_catch:smoke', 'dqn', 'DQN'),
    ('apex_dpg_cartpole_swingup:smoke', 'dpg', 'DPG'),
    ('sac_pendulum:smoke', 'sac', 'SAC'), ('td3_pendulum:smoke', 'td3', 'TD3'),
    ('r2d2_memory:smoke', 'r2d2', 'R2D2')], 'ppo_cartpole:smoke'))
def test_a_copy_of_a_shipped_algorithm_gives_the_same_bits(
    write_module, config, shipped, attribute):
  """No other file changes, so nothing in the package knows an algorithm by its name."""
  source = (PACKAGE / 'losses' / f'{shipped}.py').read_text()
  copied = source.replace(f'class {attribute}(', f'class {attribute}2(')
  assert copied != source
  module = write_module(f'copy_of_{shipped}', copied)
  original = parse(f'--config={config}')
  copy = parse(f'--config={config}', f'--config.loss.name={module}:{attribute}2',
               *options_of(original, 'loss'))
  assert copy['loss'].pop('name') == f'{module}:{attribute}2'
  assert original['loss'].pop('name') == shipped and copy == original
  original['loss']['name'] = shipped
  copy['loss']['name'] = f'{module}:{attribute}2'
  trial.check(prepared(copy))
  receipts, reports, _ = run(copy)
  assert receipts == run(original)[0] and len(receipts) == 4
  # Terms of losses may have any name but those of the other metrics.
  others = {name for name in reports[0].metrics if not name.startswith('loss.')}  # schedules
  assert others - TERMS[shipped] <= trial._TAKEN


def test_all_shipped_algorithms_are_copied():
  assert {f'podracer_jit.losses.{name}' for name in TERMS} == {
      algorithm.__module__ for algorithm in ALGORITHMS.values()}


def test_the_example_of_an_own_algorithm_trains():
  config = parse(f'--config={EXAMPLES / "a2c.py"}:smoke', '--config.loss.entropy_coef=0.02')
  experiment = resolve(config)
  assert type(experiment.algorithm).__name__ == 'A2C'
  assert experiment.algorithm.entropy_coef == 0.02
  receipts, reports, _ = run(config)
  assert len({params for _, params in receipts}) == 4
  assert {'policy_loss', 'value_loss', 'entropy'} <= set(reports[0].metrics)


def test_a_run_of_an_own_algorithm_resumes_to_the_same_bits_and_is_evaluated(tmp_path):
  def train_in(name):
    config = parse(f'--config={EXAMPLES / "a2c.py"}')
    workdir = tmp_path / name
    open_workdir(workdir, config)
    prepared_run = prepared(config)
    experiment = dataclasses.replace(prepared_run.experiment, total_steps=10 * 256)
    runs.train_in(dataclasses.replace(prepared_run, experiment=experiment), workdir)
    return journal.read_receipts(workdir).by_update

  uninterrupted = train_in('uninterrupted')
  assert len(uninterrupted) > 8
  shutil.copytree(tmp_path / 'uninterrupted', tmp_path / 'killed')
  newest = max((tmp_path / 'killed' / 'checkpoints').iterdir(), key=lambda path: int(path.name))
  shutil.rmtree(newest)
  assert train_in('killed') == uninterrupted
  assert newest.is_dir()
  experiment = evaluation.read_experiment(tmp_path / 'uninterrupted', allow_modules=['a2c'])
  assert experiment.loss_name == 'a2c:A2C'
  agent = evaluation.restore(tmp_path / 'uninterrupted', experiment)
  assert len(evaluation.play(agent, evaluation.Settings(3, 2, 1, 1000)).returns) == 3


TORSO = '''
import flax.linen as nn
import jax.numpy as jnp

from podracer_jit.options import option


class Torso(nn.Module):
  """[N, ...] -> [N, width]."""

  width: int = option(32, 'units', at_least=1)
  depth: int = 1

  @nn.compact
  def __call__(self, obs):
    x = obs.reshape(len(obs), -1).astype(jnp.float32)
    for _ in range(self.depth):
      x = nn.relu(nn.Dense(self.width)(x))
    return x
'''


@pytest.mark.parametrize('config, heads', [
    ('impala_cartpole', {'policy', 'value'}),
    ('apex_dqn_catch:smoke', {'value', 'advantage', 'value_hidden', 'advantage_hidden'})])
def test_an_own_torso_gets_heads_around_it(write_module, config, heads):
  module = write_module('torso_of_my_own', TORSO)
  fields = parse(f'--config={config}', f'--config.network.name={module}:Torso',
                 '--config.network.width=16', '--config.network.depth=2')
  params = run(fields)[2].params['params']
  assert set(params) == heads | {'torso'}
  assert params['torso']['Dense_1']['kernel'].shape == (16, 16)
  if 'value_hidden' in params:  # the dueling streams are as wide as the torso's output
    assert params['value_hidden']['kernel'].shape == (16, 16)


@pytest.mark.full
def test_an_own_torso_takes_a_core_or_a_separate_critic(write_module):
  module = write_module('torso_of_my_own', TORSO)
  choose = ('--config=impala_cartpole', f'--config.network.name={module}:Torso')
  params = run(parse(*choose, '--config.network.core=gru', '--config.network.core_size=8')
               )[2].params['params']
  assert 'core' in params and params['value']['kernel'].shape == (8, 1)
  params = run(parse(*choose, '--config.network.separate_critic=True'))[2].params['params']
  assert {'torso', 'critic'} < set(params)


@pytest.mark.parametrize('field, message', [
    ('width=0', 'network.width: must be at least 1, got 0'),
    ('hieght=3', '--config.network.hieght: the config has no such field')])
def test_options_of_an_own_torso_are_checked(write_module, field, message):
  module = write_module('torso_of_my_own', TORSO)
  with pytest.raises(ValueError, match=message):
    resolve(parse('--config=impala_cartpole', f'--config.network.name={module}:Torso',
                  f'--config.network.{field}'))


HEADS = """
import dataclasses
import flax.linen as nn
import jax.numpy as jnp
from podracer_jit.losses import DQN, IMPALA, PPO


class Head(nn.Module):
  @nn.compact
  def __call__(self, features, action):
    action = action.astype(jnp.float32).reshape(len(features), -1)
    return nn.Dense(3)(jnp.concatenate([features, action], axis=1))


@dataclasses.dataclass(frozen=True)
class Idle(PPO):
  def heads(self):
    return {'guess': Head(), 'other': Head()}


@dataclasses.dataclass(frozen=True)
class Guess(IMPALA):
  weight: float = 1.0

  def heads(self):
    assert self.parts.spec.num_actions == 2
    return {'guess': Head()}

  def loss(self, params, state, batch, key):
    loss, aux = super().loss(params, state, batch, key)
    rollout = batch.items
    guess = self.unroll(params, rollout, rollout.action)[2]['guess']
    assert guess.shape == (*rollout.reward.shape, 3)
    error = jnp.sum(rollout.valid * jnp.square(guess[..., 0] - rollout.reward))
    return loss + self.weight * error, aux._replace(terms=aux.terms | {'error': error})


@dataclasses.dataclass(frozen=True)
class Broken(PPO):
  def heads(self):
    return {'guess': nn.Dense(3)}


@dataclasses.dataclass(frozen=True)
class ForValues(DQN):
  def heads(self):
    return {'guess': Head()}
"""


@pytest.mark.full
def test_auxiliary_heads_that_no_loss_calls_change_nothing(write_module):
  module = write_module('heads_of_my_own', HEADS)
  original = parse('--config=ppo_cartpole:smoke')
  plain = run(original)[2].params['params']
  headed = run(parse('--config=ppo_cartpole:smoke', f'--config.loss.name={module}:Idle',
                     *options_of(original, 'loss')))[2].params['params']
  assert set(headed) - set(plain) == {'heads_guess', 'heads_other'}
  for name, tree in plain.items():
    assert jax.tree.all(jax.tree.map(np.array_equal, tree, headed[name])), name


@pytest.mark.parametrize('core', essential(['none', 'gru'], 'none'))
def test_an_auxiliary_head_is_learned(write_module, core):
  module = write_module('heads_of_my_own', HEADS)
  fields = parse('--config=impala_cartpole', f'--config.loss.name={module}:Guess',
                 f'--config.network.core={core}', '--config.optimizer.learning_rate=0.01')
  _, reports, state = run(fields)
  errors = [float(report.metrics['error'][0]) for report in reports]
  assert errors[-1] < 0.5 * errors[0]  # each reward is 1
  assert 'heads_guess' in state.params['params']


@pytest.mark.parametrize('name, config, message', [
    ('Broken', 'ppo_cartpole', 'loss.name: the heads of heads_of_my_own:Broken fail on CartPole'),
    ('ForValues', 'apex_dqn_catch', 'fail on Catch-v0: TypeError: Dueling takes no heads')])
def test_heads_that_do_not_fit_are_refused_in_one_line(write_module, name, config, message):
  module = write_module('heads_of_my_own', HEADS)
  with pytest.raises(ValueError, match=message) as error:
    fresh(parse(f'--config={config}:smoke', f'--config.loss.name={module}:{name}'))
  assert '\n' not in str(error.value)


def test_an_own_optimizer_trains(write_module):
  module = write_module('optimizer_of_my_own', '''
import dataclasses
import optax
from podracer_jit.agents.optimizers import Optimizer
from podracer_jit.options import option


@dataclasses.dataclass(frozen=True)
class Momentum(Optimizer):
  """Momentum."""

  momentum: float = option(0.9, 'decay', at_least=0, at_most=1)

  def scale(self):
    return optax.trace(self.momentum)
''')
  fields = parse('--config=impala_cartpole', f'--config.optimizer.name={module}:Momentum',
                 '--config.optimizer.momentum=0.5', '--config.optimizer.learning_rate=0.01')
  receipts, reports, _ = run(fields)
  assert len({params for _, params in receipts}) == 4
  assert reports[-1].metrics['learning_rate'][0] == np.float32(0.01)  # no annealing


def test_copies_of_a_policy_and_a_scheme_give_the_same_bits(write_module):
  module = write_module('more_of_my_own', '''
from podracer_jit.agents.policies import DISTRIBUTION, PolicyFamily, categorical
from podracer_jit.schemes import split
from podracer_jit.schemes.scheme import Scheme

POLICY = PolicyFamily(lambda count: categorical(count), discrete=True, reads=DISTRIBUTION)
SCHEME = Scheme(split.IN_ORDER, lag=1)
''')
  copy = parse('--config=impala_cartpole', f'--config.policy={module}:POLICY',
               f'--config.scheme={module}:SCHEME')
  assert run(copy)[0] == run(parse('--config=impala_cartpole'))[0]


ENVIRONMENT = '''
import jax.numpy as jnp
import numpy as np

from podracer_jit.envs.protocol import EnvSpec, TimeStep


class Guess:
  """Observes a number, 0 or 1, and rewards the action equal to it; each step is an episode."""

  @staticmethod
  def make_spec(task, options):
    if set(options) - {'reward'}:
      raise ValueError(f'env.{min(set(options) - {"reward"})}: {task} has no such option')
    return EnvSpec(task, (1,), np.dtype(np.float32), 2, (), (), 1, 1)

  @staticmethod
  def make_vector_env(task, options, seeds, num_threads, batch_size):
    return GuessVectorEnv(options.get('reward', 1.0), seeds)


class GuessVectorEnv:
  """The state has each environment's steps and last action; even steps are resets."""

  def __init__(self, reward, seeds):
    self.reward = reward
    self.num_envs = len(seeds)
    self.batch_size = len(seeds)
    self.seeds = np.array(seeds, np.uint32)
    self.first_obs = np.asarray(self._obs(jnp.zeros(len(seeds), jnp.int32)))
    self.handle = np.zeros((), np.int32)
    self.first_state = jnp.zeros(len(seeds), jnp.int32), jnp.zeros(len(seeds), jnp.int32)

  def _obs(self, step):
    mixed = (jnp.asarray(self.seeds) + step.astype(jnp.uint32)) * jnp.uint32(2654435761)
    return (mixed >> 31).astype(jnp.float32)[:, None]

  def send(self, token, state, action, env_id=None):
    return token, (state[0] + 1, action)

  def recv(self, token, state):
    step, action = state
    resets = step % 2 == 0
    correct = action == self._obs(step - 1)[:, 0].astype(jnp.int32)
    reward = jnp.where(resets | ~correct, 0.0, self.reward).astype(jnp.float32)
    truncated = jnp.zeros(self.num_envs, bool)
    return token, state, TimeStep(self._obs(step), reward, ~resets, truncated, reward,
                                  ~resets, jnp.arange(self.num_envs))

  def close(self):
    pass
'''


@pytest.mark.parametrize('scheme', essential(['fused', 'cleanba'], 'cleanba'))
def test_an_own_environment_is_learned(write_module, scheme):
  module = write_module('environment_of_my_own', ENVIRONMENT)
  fields = parse('--config=impala_catch', f'--config.env.task={module}:Guess',
                 '--config.env.reward=2.0', '--config.optimizer.learning_rate=0.01',
                 f'--config.scheme={scheme}')
  reports = run(changed(fields, env__renew_every_updates=0), updates=60)[1]
  episodes = reports[-1].metrics['episodes']
  last = reports[-1].count - 1
  returns = episodes.episode_return[last][episodes.ended[last]]
  assert set(returns.tolist()) <= {0.0, 2.0} and returns.mean() > 1.8  # random play: 1


@pytest.mark.parametrize('field, message', [
    ('env.task={}:Nothing', 'env.task: environment_of_my_own has no .Nothing'),
    ('env.task={}:GuessVectorEnv',
     'env.task: environment_of_my_own:GuessVectorEnv is no environment'),
    ('loss.name={}:Guess', 'loss.name: environment_of_my_own:Guess must be a class derived from'),
    ('network.name={}:Guess', 'network.name: environment_of_my_own:Guess must be a flax module'),
    ('optimizer.name={}:Guess', 'optimizer.name: environment_of_my_own:Guess must be a class'),
    ('scheme={}:Guess', 'scheme: environment_of_my_own:Guess must be a Scheme'),
    ('policy={}:Guess', 'policy: environment_of_my_own:Guess must be a PolicyFamily of agents')])
def test_a_part_of_another_kind_is_refused_in_one_line(write_module, field, message):
  module = write_module('environment_of_my_own', ENVIRONMENT)
  with pytest.raises(ValueError, match=message) as error:
    resolve(parse('--config=impala_catch', f'--config.{field.format(module)}'))
  assert '\n' not in str(error.value)


def test_a_part_chosen_by_flag_has_its_own_defaults():
  fields = parse('--config=impala_atari', '--config.network.centre=True',
                 '--config.network.name=nature_cnn')
  assert fields['network'] == dict(name='nature_cnn', centre=True, core='none', core_size=128,
                                   separate_critic=False, hidden=512, channels=(32, 64, 64),
                                   layer_norm=False, activation='relu',
                                   kernels=(8, 4, 3), strides=(4, 2, 1))
  assert networks.NatureCNN().hidden == 512
  fields = parse('--config=impala_catch', '--config.optimizer.name=centred_rmsprop')
  assert fields['optimizer']['decay'] == optimizers.CentredRMSProp().decay
  fields = parse('--config=impala_catch', '--config.loss.name=dqn', '--config.replay.capacity=9')
  assert fields['replay']['capacity'] == 9 and fields['loss']['n_step'] == 3
  assert 'replay' not in parse('--config=apex_dqn_catch', '--config.loss.name=ppo')


BROKEN = '''
import dataclasses
import flax.linen as nn
from podracer_jit.losses import PPO
from podracer_jit.losses.algorithm import Algorithm
from podracer_jit.options import option
from podracer_jit.schemes import free, split
from podracer_jit.schemes.scheme import Scheme

CENTRAL = Scheme(split.APART)
FREE = Scheme(free.GRAPH, lag=None)


class Undecorated(PPO):
  clip: float = option(0.3, 'not the shipped one')


class WithoutLoss(Algorithm):
  pass


class Fails(nn.Module):
  @nn.compact
  def __call__(self, obs):
    raise KeyError('mine')


class Flat(nn.Module):
  @nn.compact
  def __call__(self, obs):
    return obs.astype('float32')


class Counts(nn.Module):
  rates: tuple = (0.5, 0.1)

  @nn.compact
  def __call__(self, obs):
    self.variable('batch_stats', 'mean', lambda: obs.mean())
    return nn.Dense(3)(obs.reshape(len(obs), -1).astype('float32'))


def dense(obs):
  return nn.Dense(3)(obs.reshape(len(obs), -1).astype('float32'))


class Drops(nn.Module):
  @nn.compact
  def __call__(self, obs):
    return nn.Dropout(0.5, deterministic=False)(dense(obs))


class Mixes(nn.Module):
  @nn.compact
  def __call__(self, obs):
    return dense(obs).mean(axis=0, keepdims=True)


class ForOne(nn.Module):
  @nn.compact
  def __call__(self, obs):
    return nn.Dense(3)(obs.reshape(1, -1).astype('float32'))


class Sums(nn.Module):
  @nn.compact
  def __call__(self, obs):
    return dense(obs).sum(axis=-1)


class Pairs(nn.Module):
  @nn.compact
  def __call__(self, obs):
    return dense(obs), None
'''


@pytest.mark.parametrize('fields, message', [
    (['loss.name={}:Undecorated'], 'loss.name: Undecorated.clip is no option yet: the class needs'),
    (['loss.name={}:WithoutLoss'], 'loss.name: parts_with_mistakes:WithoutLoss lacks loss'),
    (['network.name={}:Fails'], 'network.name: parts_with_mistakes:Fails fails on '),
    (['network.name={}:Flat'], 'network.name: parts_with_mistakes:Flat fails on '),
    (['network.name={}:Drops'],
     'network.name: parts_with_mistakes:Drops draws random numbers in each call (Dropout_0 needs '
     'PRNG for "dropout"), but actors and learner must compute the same probabilities; leave '
     'dropout out, or make it deterministic=True'),
    (['network.name={}:Mixes'],
     'network.name: parts_with_mistakes:Mixes fails on 2 rows of 3 environments with observations '
     'of (10, 5), though not on a single one: ValueError: a torso must return features [N, F]: '
     'one row for each of the 6 observations; it returns an array (1, 3)'),
    (['network.name={}:ForOne'], 'network.name: parts_with_mistakes:ForOne fails on 2 rows of 3 '),
    (['network.name={}:Sums'],
     'network.name: parts_with_mistakes:Sums fails on observations of (10, 5): ValueError: a '
     'torso must return features [N, F]: one row for each of the 1 observations; it returns an '
     'array (1,)'),
    (['network.name={}:Pairs', 'loss.name=dqn', 'num_minibatches=1', 'scheme=sync'],
     'network.name: parts_with_mistakes:Pairs fails on observations of (10, 5): ValueError: a '
     'torso must return features [N, F]: one row for each of the 1 observations; it returns tuple'),
    (['network.name={}:Counts'], 'network.name: parts_with_mistakes:Counts has the variables'),
    (['network.name={}:Counts', 'network.rates=(0.5,)'],
     'network.name: parts_with_mistakes:Counts has the variables'),
    (['loss.name=dqn', 'num_minibatches=1', 'scheme={}:CENTRAL'],
     'scheme: parts_with_mistakes:CENTRAL is for losses without a replay'),
    (['scheme={}:FREE'], 'scheme: parts_with_mistakes:FREE is for losses with a replay'),
    (['loss.name=./mine.py:PPO'], 'loss.name: must be a name or module:attribute'),
    (['env.task=:'], 'env.task: must be a name or module:attribute')])
def test_a_mistake_in_an_own_part_is_reported_in_one_line(write_module, fields, message):
  module = write_module('parts_with_mistakes', BROKEN)
  with pytest.raises(ValueError) as error:
    fresh(parse('--config=impala_catch', *(
        f'--config.{field.replace("{}", module)}' for field in fields)))
  assert str(error.value).startswith(message) and '\n' not in str(error.value)


WRONG_RESULTS = """
import dataclasses
import jax, jax.numpy as jnp, numpy as np, optax
from podracer_jit.agents import policies, q_networks
from podracer_jit.agents.optimizers import Optimizer
from podracer_jit.losses import DQN
from podracer_jit.losses.algorithm import Acted, Algorithm, Aux
from podracer_jit.losses.items import Items, environments, rows, transitions


@dataclasses.dataclass(frozen=True)
class Right(Algorithm):
  def loss(self, params, state, batch, key):
    rollout = batch.items
    _, value = self.unroll(params, rollout)
    error = rollout.reward - value[:-1]
    return self.results(jnp.sum(rollout.valid * error ** 2), jnp.sum(rollout.valid))

  def results(self, loss, valid):
    return loss, Aux({'value_loss': loss, 'one': 1.0}, valid)


class Constant(Right):
  def results(self, loss, valid):
    return 0.0 * loss, Aux({}, valid)


class OnRows(Right):
  def items(self):
    return rows()


class RightOnRows(OnRows):
  def loss(self, params, state, batch, key):
    rollout = batch.items
    _, value, _ = self.network.apply(params, rollout.obs, None, rollout.valid)
    return self.results(jnp.sum(value), jnp.sum(rollout.valid))


class NamedItems(Right):
  def items(self):
    return 'rows'


class NoItems(Right):
  def items(self):
    return {}['rows']


class TooLong(Right):
  def items(self):
    return environments(self.parts.unroll_length + 1)


class EmptyItems(Right):
  def items(self):
    return environments(0)


class Vector(Right):
  def results(self, loss, valid):
    return jnp.stack([loss, loss]), Aux({}, valid)


class Whole(Right):
  def results(self, loss, valid):
    return jnp.int32(loss), Aux({}, valid)


class Alone(Right):
  def results(self, loss, valid):
    return loss


class NoAux(Right):
  def results(self, loss, valid):
    return loss, {'value_loss': loss}


class NoDict(Right):
  def results(self, loss, valid):
    return loss, Aux(loss, valid)


class NoValid(Right):
  def results(self, loss, valid):
    return loss, Aux({}, jnp.ones(3))


class ByRow(Right):
  def results(self, loss, valid):
    return loss, Aux({'rows': jnp.zeros(3)}, valid)


class Taken(Right):
  def results(self, loss, valid):
    return loss, Aux({'grad_norm': loss}, valid)


class NoKL(Right):
  measures_kl = True


class Endless(Right):
  def results(self, loss, valid):
    return jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, loss), Aux({}, valid)


class Missing(Right):
  def results(self, loss, valid):
    return loss * self.coef, Aux({}, valid)


class Summed(Right):
  def targets(self, state, rollout):
    return rollout.reward.sum(axis=0)


class Counted(Right):
  def statistics(self, state, valid, targets):
    return targets['advantage']


class OtherGradient(Right):
  def gradient(self, state, batch, key):
    return {}, Aux({}, jnp.ones(()))


class OnlyGradient(Right):
  def gradient(self, state, batch, key):
    return super().gradient(state, batch, key)[0]


class NoState(Right):
  def update(self, state, grads, aux):
    return state.params


class Doubled(Right):
  def update(self, state, grads, aux):
    return super().update(state._replace(params=state.params), grads, aux)._replace(
        params=jax.tree.map(lambda x: jnp.stack([x, x]), state.params))


class Unready(Right):
  def note_about_minibatches(self, rows):
    return self.nothing


class NotActed(Right):
  def act(self, params, obs, carry, valid, key, exploration):
    return jnp.zeros(len(obs), jnp.int32)


class Acts(Right):
  def act(self, params, obs, carry, valid, key, exploration):
    dist_params, value, carry = self.network.apply(params, obs[None], carry, valid[None])
    return self.acted(Acted(self.parts.policy.mode(dist_params[0]), {'value': value[0]}, carry,
                            dist_params[0]), key, exploration)

  def acted(self, acted, key, exploration):
    return acted


class FloatAction(Acts):
  def acted(self, acted, key, exploration):
    return acted._replace(action=acted.action + 0.5)


class OtherCarry(Acts):
  def acted(self, acted, key, exploration):
    return acted._replace(carry=acted.action)


class NoDistribution(Acts):
  def acted(self, acted, key, exploration):
    return acted._replace(distribution=None)


class ShortExtras(Acts):
  def acted(self, acted, key, exploration):
    return acted._replace(extras={'value': jnp.zeros(())})


class ForOne(Acts):
  def acted(self, acted, key, exploration):
    return acted._replace(action=acted.action.reshape(1))


class NeedsKey(Acts):
  def acted(self, acted, key, exploration):
    jax.random.split(key)
    return acted


class NeedsExploration(Acts):
  def exploration(self, num_envs):
    return np.ones(num_envs, np.float32)

  def acted(self, acted, key, exploration):
    exploration + 1.0
    return acted


class ByValues(Right):
  policy_reads = policies.ACTION_VALUES

  def make_network(self):
    return q_networks.dueling(self.parts.torso, self.parts.policy)


class ByGuesses(Acts):
  policy_reads = 'guesses'


class NoNetwork(Right):
  def make_network(self):
    return q_networks.Nothing()


class FunctionAsNetwork(Right):
  def make_network(self):
    return lambda obs: obs


class NoTarget(Right):
  def init_target(self, params):
    return params['critic']


class NoOptimizer(Right):
  def make_optimizer(self):
    return None


class TooFew(Right):
  def targets(self, state):
    return None


class NothingNormalised(Right):
  normalises = frozenset()


@dataclasses.dataclass(frozen=True)
class OneError(DQN):
  def loss(self, *args):
    loss, aux = super().loss(*args)
    return loss, aux._replace(priority=jnp.sum(aux.priority))


@dataclasses.dataclass(frozen=True)
class NoError(DQN):
  def loss(self, *args):
    loss, aux = super().loss(*args)
    return loss, aux._replace(priority=None)


@dataclasses.dataclass(frozen=True)
class OneForAll(DQN):
  def exploration(self, num_envs):
    return 0.1


@dataclasses.dataclass(frozen=True)
class SmallRows(DQN):
  def priority(self, rows):
    return super().priority(rows)[None]


@dataclasses.dataclass(frozen=True)
class ReadsActions(DQN):
  def priority(self, rows):
    return rows.action[0].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class OtherItems(DQN):
  def items(self):
    def make(window):
      return transitions(1, 0.9).make(window).missing
    return Items(1, 1, make, 1)


def sequences(length, period):
  def make(window):
    return window.rows()._replace(obs=window.all_obs())
  return Items(length, period, make, network_rows=length + 1)


class Sequences(Right):
  shuffles = True

  def items(self):
    return sequences(5, 3)


class FromReplay(Right):
  learns_from_replay = True

  def items(self):
    return sequences(5, 1)

  def loss(self, params, state, batch, key):
    rows = batch.items
    valid = jnp.ones(rows.obs.shape[:2], bool)
    _, value, _ = self.network.apply(params, rows.obs, None, valid)
    error = jnp.sum(jnp.square(rows.reward - value[:-1]), axis=0)
    return jnp.sum(batch.weight * error) / batch.count, Aux(
        {'value_loss': jnp.sum(error)}, jnp.float32(len(error)), error)


class WholeFromReplay(Right):
  learns_from_replay = True


class Targets(FromReplay):
  def targets(self, state, rollout):
    return rollout.reward


class Carries(Right):
  def initial_carry(self, num_envs):
    return jnp.zeros(num_envs, jnp.int32)

  def act(self, params, obs, carry, valid, key, exploration):
    acted = super().act(params, obs, None, valid, key, exploration)
    return acted._replace(carry=jnp.where(valid, carry + 1, 0))


class Explores(Right):
  def exploration(self, num_envs):
    return np.ones(num_envs, np.float32)


class Nested(Right):
  def init(self, key):
    return {'net': super().init(key)}

  def acting(self, state):
    return state.params['net']

  def loss(self, params, state, batch, key):
    return super().loss(params['net'], state, batch, key)


class Skips(FromReplay):
  def items(self):
    return sequences(5, 2)


class RowsFromReplay(FromReplay):
  def items(self):
    return rows()

  def loss(self, params, state, batch, key):
    row = batch.items
    _, value, _ = self.network.apply(params, row.obs, None, jnp.ones(row.reward.shape, bool))
    error = jnp.square(row.reward - value)[0]
    return jnp.sum(batch.weight * error) / batch.count, Aux(
        {'value_loss': jnp.sum(error)}, jnp.float32(len(error)), error)


class Missed:
  pass


def failing(count):
  def log_prob(dist_params, action):
    raise KeyError('mine')
  return policies.categorical(count)._replace(log_prob=log_prob)


def by_pairs(low, high):
  return policies.gaussian(low, high)._replace(dist_size=3 * len(low))


MORE = policies.PolicyFamily(by_pairs, discrete=False, reads=policies.DISTRIBUTION)
FAILING = policies.PolicyFamily(failing, discrete=True, reads=policies.DISTRIBUTION)
NONE = policies.PolicyFamily(lambda count: None, discrete=True, reads=policies.DISTRIBUTION)
VALUES = policies.PolicyFamily(policies.epsilon_greedy, discrete=True, reads=policies.ACTION_VALUES)
SEVERAL = policies.PolicyFamily(policies.product_of_categoricals, discrete=True,
                                reads=policies.DISTRIBUTION, several=True)
GUESSES = policies.PolicyFamily(policies.categorical, discrete=True, reads='guesses')


class Optimizer1(Optimizer):
  step = staticmethod(lambda g: g)
  state = staticmethod(lambda s: s)

  def scale(self):
    return optax.GradientTransformation(
        lambda params: jnp.int32(0),
        lambda grads, state, params=None: (jax.tree.map(self.step, grads), self.state(state)))


@dataclasses.dataclass(frozen=True)
class SumsUp(Optimizer1):
  step = staticmethod(jnp.sum)


@dataclasses.dataclass(frozen=True)
class Grows(Optimizer1):
  state = staticmethod(lambda s: s * 0.5)
"""
REPLAY = ['num_minibatches=1', 'scheme=sync', 'replay.capacity=1000', 'replay.min_size=500']


LOSSES = [
    ('Right', ''),
    ('RightOnRows', ''),
    ('Carries', ''),
    ('Explores', ''),
    ('Nested', ''),
    ('Acts', ''),
    ('OnRows', 'loss of {}:OnRows ({}.py, line N): unroll needs whole environments, with T + 1 '
     'observations of T rows; it got 1 of 1, as single rows have. Let items() return '
     'items.environments(self.parts.unroll_length), which is its default; or keep the rows, and '
     'call self.network.apply(params, rollout.obs, None, rollout.valid) in its place'),
    ('NamedItems', 'items of {}:NamedItems must return Items, such as items.rows() or '
     "items.environments(self.parts.unroll_length); got 'rows'"),
    ('NoItems', "items of {}:NoItems fails: KeyError: 'rows'"),
    ('EmptyItems', 'items of {}:EmptyItems must return Items with a length, a period and '
     'network_rows of at least 1, got (0, 0, 1)'),
    ('Vector', 'loss of {}:Vector: must return a scalar loss of floats, the sum over valid rows; '
     'got float32 (2,)'),
    ('Whole', 'loss of {}:Whole: must return a scalar loss of floats, the sum over valid rows; '
     'got int32 ()'),
    ('Alone', 'loss of {}:Alone: must return a pair, the loss and its Aux; got an array'),
    ('NoAux', 'loss of {}:NoAux: must return Aux(terms, valid) as its second result; got dict'),
    ('NoDict', 'loss of {}:NoDict: must return a dict of loss terms in its Aux; got an array'),
    ('NoValid', 'loss of {}:NoValid: must return the number of valid rows in its Aux; got an '
     'array (3,)'),
    ('ByRow', "loss of {}:ByRow: must return sums over rows as loss terms; 'rows' is an array "
     '(3,)'),
    ('Taken', "loss of {}:Taken: must not return a loss term 'grad_norm': every run has a metric "
     'of this name'),
    ('NoKL', "loss of {}:NoKL: must return the loss term 'approx_kl', as measures_kl = True says; "
     'got value_loss, one'),
    ('Endless', 'loss of {}:Endless: Reverse-mode differentiation does '),
    ('Missing', 'loss of {}:Missing ({}.py, line N): AttributeError: '),
    ('Summed', 'targets of {}:Summed: must return arrays [T, N, ...], '),
    ('Counted', 'statistics of {}:Counted ({}.py, line N): Typ'),
    ('TooFew', 'targets of {}:TooFew takes (state); must take (state, rollout)'),
    ('OtherGradient', 'gradient of {}:OtherGradient: must return the gradient with the structure '
     'of state.params'),
    ('OnlyGradient', 'gradient of {}:OnlyGradient: must return a pair, the gradient and its Aux; '
     'got dict'),
    ('NoState', 'update of {}:NoState: must return the state, with _replace; got dict'),
    ('Doubled', 'update of {}:Doubled: must return parameters with the shapes and types that it '
     'got; params/policy/bias is float32 (2, 3), not float32 (3,)'),
    ('Unready', 'note_about_minibatches of {}:Unready ({}.py, line N): AttributeError: '),
    ('NotActed', 'act of {}:NotActed: must return Acted(action, extras, carry, distribution); '),
    ('FloatAction', 'act of {}:FloatAction: must return the action int32 (32,) for 32 '
     'environments, got float32 (32,)'),
    ('OtherCarry', 'act of {}:OtherCarry: must return the carry None for 32 environments, got '
     'int32 (32,)'),
    ('NoDistribution', ''),
    ('ShortExtras', 'act of {}:ShortExtras: must return extras [B, ...], here (32, ...), got ()'),
    ('ForOne', 'act of {}:ForOne ({}.py, line N): TypeError: '),
    ('NeedsKey', 'act of {}:NeedsKey in greedy evaluations (key = None, exploration = None) '
     '({}.py, line N): '),
    ('NeedsExploration', 'act of {}:NeedsExploration in evaluations (exploration = None) '
     '({}.py, line N): TypeError: '),
    ('ByValues', "{}:ByValues has policy_reads = 'action values' but no method act: that of "
     'Algorithm draws from a distribution; write one (docs/own_parts.md)'),
    ('ByGuesses', "no shipped policy reads 'guesses', the policy_reads of {}:ByGuesses; policy "
     'must name one of your own'),
    ('NoNetwork', 'make_network of {}:NoNetwork ({}.py, line N): AttributeError: '),
    ('FunctionAsNetwork', 'make_network of {}:FunctionAsNetwork: AttributeError: '),
    ('NoTarget', "init_target of {}:NoTarget ({}.py, line N): KeyError: 'critic'"),
    ('NoOptimizer', 'make_optimizer of {}:NoOptimizer: '),
    ('Missed', '{}:Missed must be a class derived from Algorithm'),
]
VALUES = [
    ('NoError', ''),  # priorities stay as they are
    ('OneError', 'loss of {}:OneError: must return priorities [N], here float32 (512,), got '
     'float32 ()'),
    ('OneForAll', 'exploration of {}:OneForAll: must return an array (32,), a number for each '
     'environment; got ()'),
    ('SmallRows', 'priority of {}:SmallRows: must return priorities [N], here float32 (32,), got '
     'float32 (1, 32)'),
    ('ReadsActions', 'priority of {}:ReadsActions ({}.py, line N): TypeError: '),
    ('Skips', 'items of {}:Skips must return Items that begin in each row of a replay, so their '
     'period must be 1, got 2'),
    ('OtherItems', "items of {}:OtherItems ({}.py, line N): AttributeError: 'Transition' object"),
]
REPLAY = ['num_minibatches=1', 'scheme=sync', 'replay.capacity=1000', 'replay.min_size=500']


@pytest.mark.parametrize('fields, message', [
    *[([f'loss.name={{}}:{name}'], line and f'loss.name: {line}') for name, line in LOSSES],
    *[([f'loss.name={{}}:{name}', *REPLAY], line and f'loss.name: {line}')
      for name, line in VALUES],
    (['loss.name={}:TooLong'], 'unroll_length: {}:TooLong learns from items of 21 rows of a '
     'rollout; must be at least 21, got 20'),
    (['loss.name={}:RightOnRows', 'network.core=gru'],
     'network.core: {}:RightOnRows learns from single rows, and a recurrent network from rows in '
     'order; must be none, got gru'),
    (['loss.name={}:Right', 'network.core=gru'], ''),
    (['loss.name={}:Nested', 'normalise.obs=True', 'normalise.reward=True'],
     "loss.name: init of {}:Nested must return params['moments'] with obs, returns, the "),
    (['loss.name={}:FromReplay', *REPLAY, 'normalise.obs=True'], ''),
    (['loss.name={}:FromReplay', *REPLAY, 'normalise.reward=True'],
     'normalise.reward: {}:FromReplay cannot learn normalised rewards; must be False'),
    (['loss.name={}:WholeFromReplay', *REPLAY],
     'loss.name: {}:WholeFromReplay learns from a replay but has no method items: that of '),
    (['loss.name={}:Targets', *REPLAY],
     'loss.name: {}:Targets learns from a replay, which never calls targets; compute it in loss'),
    (['loss.name={}:Carries', 'env_batch=8', 'scheme=impala'],
     'env_batch: {}:Carries has a carry, which needs all environments at once; must be 0, got 8'),
    (['loss.name={}:Explores', 'env_batch=8', 'scheme=impala'],
     'env_batch: {}:Explores explores by environment, which needs all environments at once; must '),
    (['loss.name={}:NothingNormalised', 'normalise.reward=True'],
     'normalise.reward: {}:NothingNormalised cannot learn normalised rewards; must be False'),
    (['loss.name={}:FromReplay', *REPLAY, 'replay.eviction=prioritised'],
     'loss.name: items of {}:FromReplay: must make arrays [N, ...], here (7, ...), with '
     'replay.eviction = prioritised; got (6, 7, 10, 5)'),
    (['policy={}:NONE'], 'policy: {}:NONE must make a Policy, got None'),
    (['policy={}:FAILING'], "policy: {}:FAILING ({}.py, line N): KeyError: 'mine'"),
    (['policy={}:VALUES'], 'policy: {}:VALUES is for discrete actions and reads action values; '
     'Catch-v0 has discrete actions, and the algorithm gives a distribution'),
    (['policy={}:SEVERAL'], 'policy: {}:SEVERAL is for vectors of choices and reads a '
     'distribution; Catch-v0 has discrete actions, and the algorithm gives a distribution'),
    (['policy={}:GUESSES', 'loss.name={}:ByGuesses'], ''),
    (['policy={}:MORE', 'env.task=Pendulum-v1'],
     'policy: {}:MORE reads 3 numbers, and mlp gives 2'),
    (['optimizer.name={}:SumsUp'], 'optimizer.name: a step of SumsUp: must return a step with '
     'the shapes and types of the parameters; params/policy/bias is float32 (), not float32 (3,)'),
    (['optimizer.name={}:Grows'], 'optimizer.name: a step of Grows: must return opt_state with '
     'the shapes and types that it got; 1 is float32 (), not int32 ()')])
def test_a_wrong_result_of_an_own_part_is_found_before_the_start(write_module, fields, message):
  module = write_module('parts_with_wrong_results', WRONG_RESULTS)
  config = ['--config=impala_catch', '--config.network.name=mlp', *(
      f'--config.{field.replace("{}", module)}' for field in fields)]
  if not message:
    trial.check(fresh(parse(*config)))
    return
  with pytest.raises(ValueError) as error:
    trial.check(fresh(parse(*config)))
  line = str(error.value)
  assert re.sub(r'line \d+', 'line N', line).startswith(message.replace('{}', module))
  assert '\n' not in line
  if number := re.search(r'line (\d+)', line):  # it is the user's own
    assert WRONG_RESULTS.splitlines()[int(number[1]) - 1].startswith('    ')


@pytest.mark.parametrize('fields', essential([
    'loss.name={}:Right', 'loss.name={}:Sequences', 'policy={}:GUESSES loss.name={}:ByGuesses',
    f'loss.name={{}}:FromReplay {" ".join(REPLAY)}',
    f'loss.name={{}}:RowsFromReplay {" ".join(REPLAY)}',
    f'loss.name={{}}:NoError {" ".join(REPLAY)}'], 'loss.name={}:Sequences'))
def test_own_items_and_own_acting_are_learned_from(write_module, fields):
  module = write_module('right_in_its_own_way', WRONG_RESULTS)
  receipts, _, _ = run(parse('--config=impala_catch', '--config.network.name=mlp', *(
      f'--config.{field}' for field in fields.replace('{}', module).split())))
  assert len({params for _, params in receipts}) == 4


OF_VERSION_0_6 = {
    'RolloutAlgorithm': 'from podracer_jit.losses.algorithm import RolloutAlgorithm',
    'ReplayAlgorithm': 'from podracer_jit.losses import algorithm\nalgorithm.ReplayAlgorithm',
    'unroll': 'from podracer_jit.losses.algorithm import unroll',
    'unroll_with_heads': 'from podracer_jit.losses.algorithm import unroll_with_heads',
    'minibatches': 'from podracer_jit.losses.minibatches import ROWS',
    'objective': 'import podracer_jit.losses.objective',
    'kinds': 'from podracer_jit.agents import kinds',
    'Model': 'from podracer_jit.agents.networks import Model'}


NOW = {'unroll': 'self.unroll(params, rollout)', 'Model': 'self.network and self.parts.policy',
       'minibatches': 'the method items, with losses.items'}


@pytest.mark.parametrize('name, text', OF_VERSION_0_6.items(), ids=list(OF_VERSION_0_6))
def test_a_module_that_imports_what_version_0_6_had_is_refused_in_one_line(
    write_module, name, text):
  module = write_module('of_version_0_6', text)
  with pytest.raises(ValueError) as error:
    parse('--config=impala_catch', f'--config.loss.name={module}:Mine')
  start = ('loss.name: of_version_0_6:Mine is written for an earlier version (it imports '
           f'{name}, now {NOW.get(name, "")}')
  end = '); CHANGELOG.md says what to change'
  assert str(error.value).startswith(start) and str(error.value).endswith(end)


def test_a_module_that_imports_a_wrong_name_is_not_called_an_old_one(write_module):
  module = write_module('with_a_typo', 'from podracer_jit.losses.algorithm import Algoritm')
  with pytest.raises(ValueError, match=r"cannot import 'with_a_typo' of 'with_a_typo:Mine' \("
                                       "cannot import name 'Algoritm'"):
    parse('--config=impala_catch', f'--config.loss.name={module}:Mine')


@pytest.mark.parametrize('base, body, what', [
    ('PPO', 'def loss(self, model, params, minibatch, statistics): ...',
     'loss(model, ...), now (params, state, batch, key)'),
    ('DQN', 'def loss(self, network, params, target_params, batch, weight): ...',
     'loss(network, ...), now (params, state, batch, key)'),
    ('PPO', 'def targets(self, model, params, rollout): ...',
     'targets(model, ...), now (state, rollout)'),
    ('PPO', 'def heads(self, spec): ...', 'heads(spec, ...), now ()'),
    ('PPO', 'def batch_statistics(self, valid, targets): ...',
     'batch_statistics, now the method statistics'),
    ('PPO', 'def minibatch_unit(self, recurrent): ...', 'minibatch_unit, now the method items'),
    ('DQN', 'network_kind = None', 'network_kind, now the method make_network')])
def test_an_algorithm_with_methods_of_version_0_6_is_refused_in_one_line(
    write_module, base, body, what):
  module = write_module(f'{base}_has_{re.split("[(,]", what)[0]}',
                        f'from podracer_jit.losses import {base}\nclass Mine({base}):\n  {body}')
  with pytest.raises(ValueError) as error:
    parse('--config=impala_catch', f'--config.loss.name={module}:Mine')
  assert str(error.value) == (
      f'loss.name: {module}:Mine is written for an earlier version (it has {what}); '
      'CHANGELOG.md says what to change')


@pytest.mark.parametrize('args, field', [
    (['--config={}/old_a2c.py:smoke'], '--config: old_a2c.py'),
    (['--config={}/with_old_a2c.py'], 'loss.name: old_a2c:A2C'),
    (['--config=impala_cartpole', '--config.loss.name=old_a2c:A2C'], 'loss.name: old_a2c:A2C')])
def test_the_example_of_version_0_6_is_refused_with_exit_code_2(
    tmp_path, monkeypatch, capfd, args, field):
  shutil.copy(pathlib.Path(__file__).parent / 'a2c_of_version_0_6.txt', tmp_path / 'old_a2c.py')
  (tmp_path / 'with_old_a2c.py').write_text(
      'from podracer_jit import experiment\ndef get_config():\n'
      '  return experiment.config("old_a2c:A2C", "mlp", "adam")\n')
  monkeypatch.syspath_prepend(tmp_path)
  code = main.main(['podracer_jit', *(arg.format(tmp_path) for arg in args),
                    f'--workdir={tmp_path / "run"}'])
  assert code == 2
  line, end = capfd.readouterr().err.split('\n')
  assert line == (
      f'podracer_jit: {field} is written for an earlier version (it imports Model, now '
      'self.network and self.parts.policy); CHANGELOG.md says what to change'
  ) and not end
  assert not (tmp_path / 'run').exists()


def test_a_loss_without_a_gradient_is_a_warning_in_the_log_and_in_the_metrics(
    write_module, tmp_path, capsys):
  module = write_module('loss_without_gradient', WRONG_RESULTS)
  config = changed(small(f'{module}:Constant'), total_steps=700, checkpoint__every_updates=4)
  workdir = tmp_path / 'run'
  with opening.opened_run(fresh(config), workdir, make_request()) as opened:
    assert Training([opened], workdir, ()).train(stopping.Stopping(), quiet=True)
  (line,) = capsys.readouterr().err.splitlines()
  assert line == ('podracer_jit: warning: update 10: the gradient was exactly 0 in 10 updates in a '
                  'row, so nothing is learned; does the loss depend on the parameters?')
  records = journal.read_lines(workdir / journal.METRICS)
  assert {name for record in records for name in record} <= trial._TAKEN  # it has no terms
  assert [record['update'] for record in records if 'warning' in record] == [
      *range(10, len(records) + 1)]
  assert all(later['wall_s'] > record['wall_s'] >= record['elapsed_s']
             for record, later in itertools.pairwise(records))


def test_a_config_with_the_name_of_an_imported_package_does_not_replace_it(tmp_path):
  """EnvPool stays importable although the config file is called envpool.py."""
  (tmp_path / 'envpool.py').write_text(
      'from podracer_jit import experiment\ndef get_config():\n'
      '  env = dict(task="Catch-v0", num_envs=8)\n'
      '  return experiment.config("impala", "mlp", "adam", env=env)\n')
  assert resolve(parse(f'--config={tmp_path / "envpool.py"}')).env.num_envs == 8
  assert 'envpool.py' not in str(sys.modules['envpool'].__file__)
