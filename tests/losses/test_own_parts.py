"""A user's own algorithm, network, optimizer, policy, scheme and environment, in own modules."""

import dataclasses
import importlib
import itertools
import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest
from absl.flags import FlagValues

import podracer_jit
from podracer_jit.agents import networks, optimizers
from podracer_jit.experiment import flags, trial
from podracer_jit.experiment.resolve import resolve
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
SHORT = ['--config.checkpoint.every_updates=4', '--config.total_steps=100000']


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


@pytest.mark.parametrize('config, shipped, attribute', essential([
    ('ppo_cartpole:smoke', 'ppo', 'PPO'), ('apex_dqn_catch:smoke', 'dqn', 'DQN')],
    'ppo_cartpole:smoke'))
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
  receipts = run(copy)[0]
  assert receipts == run(original)[0] and len(receipts) == 4


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
from podracer_jit.losses.algorithm import unroll_with_heads


class Head(nn.Module):
  @nn.compact
  def __call__(self, features, action):
    action = action.astype(jnp.float32).reshape(len(features), -1)
    return nn.Dense(3)(jnp.concatenate([features, action], axis=1))


@dataclasses.dataclass(frozen=True)
class Idle(PPO):
  def heads(self, spec):
    return {'guess': Head(), 'other': Head()}


@dataclasses.dataclass(frozen=True)
class Guess(IMPALA):
  weight: float = 1.0

  def heads(self, spec):
    return {'guess': Head()}

  def loss(self, model, params, minibatch, statistics):
    loss, terms = super().loss(model, params, minibatch, statistics)
    rollout = minibatch[0]
    guess = unroll_with_heads(model, params, rollout)[2]['guess']
    assert guess.shape == (*rollout.reward.shape, 3)
    error = jnp.sum(rollout.valid * jnp.square(guess[..., 0] - rollout.reward))
    return loss + self.weight * error, terms | {'error': error}


@dataclasses.dataclass(frozen=True)
class Broken(PPO):
  def heads(self, spec):
    return {'guess': nn.Dense(3)}


@dataclasses.dataclass(frozen=True)
class ForValues(DQN):
  def heads(self, spec):
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
from podracer_jit.agents.policies import DISTRIBUTION, Family, categorical
from podracer_jit.schemes import split
from podracer_jit.schemes.scheme import Scheme

POLICY = Family(lambda count: categorical(count), discrete=True, reads=DISTRIBUTION)
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
  reports = run(fields, updates=60)[1]
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
    ('policy={}:Guess', 'policy: must be one of auto, categorical')])
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
from podracer_jit.losses.algorithm import RolloutAlgorithm
from podracer_jit.options import option
from podracer_jit.schemes import central, free
from podracer_jit.schemes.scheme import Scheme

CENTRAL = Scheme(central.GRAPH)
FREE = Scheme(free.GRAPH, lag=None)


class Undecorated(PPO):
  clip: float = option(0.3, 'not the shipped one')


class WithoutLoss(RolloutAlgorithm):
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
from podracer_jit.agents.optimizers import Optimizer
from podracer_jit.losses import DQN
from podracer_jit.losses.algorithm import RolloutAlgorithm, unroll, unroll_with_heads
from podracer_jit.losses.minibatches import ROWS


@dataclasses.dataclass(frozen=True)
class Right(RolloutAlgorithm):
  def loss(self, model, params, minibatch, statistics):
    rollout, _ = minibatch
    _, value = unroll(model, params, rollout)
    error = rollout.reward - value[:-1]
    return self.results(jnp.sum(rollout.valid * error ** 2), {'valid': jnp.sum(rollout.valid)})

  def results(self, loss, terms):
    return loss, terms | {'value_loss': loss, 'one': 1.0}


class Constant(Right):
  def results(self, loss, terms):
    return 0.0 * loss, terms


class OnRows(Right):
  def minibatch_unit(self, recurrent):
    return ROWS


class HeadsOnRows(OnRows):
  def loss(self, model, params, minibatch, statistics):
    unroll_with_heads(model, params, minibatch[0])


class RightOnRows(OnRows):
  def loss(self, model, params, minibatch, statistics):
    rollout, _ = minibatch
    _, value, _ = model.apply(params, rollout.obs, None, rollout.valid)
    return self.results(jnp.sum(value), {'valid': jnp.sum(rollout.valid)})


class NamedUnit(Right):
  def minibatch_unit(self, recurrent):
    return 'rows'


class Vector(Right):
  def results(self, loss, terms):
    return jnp.stack([loss, loss]), terms


class Whole(Right):
  def results(self, loss, terms):
    return jnp.int32(loss), terms


class Alone(Right):
  def results(self, loss, terms):
    return loss


class NoDict(Right):
  def results(self, loss, terms):
    return loss, loss


class NoValid(Right):
  def results(self, loss, terms):
    return loss, {'value_loss': loss}


class ByRow(Right):
  def results(self, loss, terms):
    return loss, terms | {'rows': jnp.zeros(3)}


class Taken(Right):
  def results(self, loss, terms):
    return loss, terms | {'grad_norm': loss}


class Endless(Right):
  def results(self, loss, terms):
    return jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, loss), terms


class Missing(Right):
  def results(self, loss, terms):
    return loss * self.coef, terms


class Summed(Right):
  def targets(self, model, params, rollout):
    return rollout.reward.sum(axis=0)


class Counted(Right):
  def batch_statistics(self, valid, targets):
    return targets['advantage']


@dataclasses.dataclass(frozen=True)
class OneError(DQN):
  def loss(self, *args):
    loss, (terms, error) = super().loss(*args)
    return loss, (terms, jnp.sum(error))


@dataclasses.dataclass(frozen=True)
class NoError(DQN):
  def loss(self, *args):
    loss, (terms, error) = super().loss(*args)
    return loss, terms


@dataclasses.dataclass(frozen=True)
class OneForAll(DQN):
  def exploration(self, num_envs):
    return 0.1


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


@pytest.mark.parametrize('fields, message', [
    (['loss.name={}:Right'], ''),
    (['loss.name={}:RightOnRows'], ''),
    (['loss.name={}:OnRows'],
     'loss.name: loss of {}:OnRows ({}.py, line 14): unroll needs minibatches of environments, '
     'with T + 1 observations of T rows; it got 1 of 1, as minibatches of rows have. Let '
     'minibatch_unit return minibatches.ENVIRONMENTS, which is its default; or keep the rows, and '
     'call model.apply(params, rollout.obs, None, rollout.valid) in place of unroll'),
    (['loss.name={}:HeadsOnRows'],
     'loss.name: loss of {}:HeadsOnRows ({}.py, line 34): unroll_with_heads needs'),
    (['loss.name={}:RightOnRows', 'network.core=gru'],
     'network.core: {}:RightOnRows learns from single rows, and a recurrent network from rows in '
     'order; must be none, got gru'),
    (['loss.name={}:NamedUnit'], 'loss.name: minibatch_unit of {}:NamedUnit must return '
     "minibatches.ENVIRONMENTS or minibatches.ROWS, got 'rows'"),
    (['loss.name={}:Vector'], 'loss.name: loss of {}:Vector: must return a scalar loss of floats, '
     'the sum over valid rows; got float32 (2,)'),
    (['loss.name={}:Whole'], 'loss.name: loss of {}:Whole: must return a scalar loss of floats, '
     'the sum over valid rows; got int32 ()'),
    (['loss.name={}:Alone'],
     'loss.name: loss of {}:Alone: must return a pair, the loss and its terms; got an array'),
    (['loss.name={}:NoDict'],
     'loss.name: loss of {}:NoDict: must return a dict of loss terms; got an array'),
    (['loss.name={}:NoValid'], "loss.name: loss of {}:NoValid: must return the loss term 'valid', "
     'the number of valid rows; got value_loss'),
    (['loss.name={}:ByRow'], 'loss.name: loss of {}:ByRow: must return sums over rows as loss '
     "terms; 'rows' is an array (3,)"),
    (['loss.name={}:Taken'], "loss.name: loss of {}:Taken: must not return a loss term 'grad_norm'"
     ': every run has a metric of this name'),
    (['loss.name={}:Endless'], 'loss.name: loss of {}:Endless: Reverse-mode differentiation does '),
    (['loss.name={}:Missing'], 'loss.name: loss of {}:Missing ({}.py, line 91): AttributeError: '),
    (['loss.name={}:Summed'], 'loss.name: targets of {}:Summed: must return arrays [T, N, ...], '),
    (['loss.name={}:Counted'], 'loss.name: batch_statistics of {}:Counted ({}.py, line 101): Typ'),
    (['loss.name={}:OneError', *REPLAY],
     'loss.name: loss of {}:OneError: must return |TD error| [N], here (512,), got ()'),
    (['loss.name={}:NoError', *REPLAY], 'loss.name: loss of {}:NoError: must return a pair, the '
     'terms and the TD errors; got dict'),
    (['loss.name={}:OneForAll', *REPLAY], 'loss.name: exploration of {}:OneForAll must return an '
     'array (32,), a number for each environment; got ()'),
    (['optimizer.name={}:SumsUp'], 'optimizer.name: SumsUp: its update must keep shapes and '
     'types: of a step, params/policy/bias is float32 (3,) before and float32 () after'),
    (['optimizer.name={}:Grows'], "optimizer.name: Grows: its update must keep shapes and types:"
     " of the optimizer's state, 1 is int32 () before and float32 () after")])
def test_a_wrong_result_of_an_own_part_is_found_before_the_start(write_module, fields, message):
  module = write_module('parts_with_wrong_results', WRONG_RESULTS)
  config = ['--config=impala_catch', '--config.network.name=mlp', *(
      f'--config.{field.replace("{}", module)}' for field in fields)]
  if not message:
    trial.check(fresh(parse(*config)))
    return
  with pytest.raises(ValueError) as error:
    trial.check(fresh(parse(*config)))
  assert str(error.value).startswith(message.replace('{}', module))
  assert '\n' not in str(error.value)


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
