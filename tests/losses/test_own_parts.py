"""A user's own algorithm, network, optimizer, policy, scheme and environment, in own modules."""

import dataclasses
import importlib
import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest
from absl import flags

import podracer_jit
from podracer_jit.agents import networks, optimizers
from podracer_jit.run import command_line, evaluation, journal, train, workdirs
from podracer_jit.run.resolve import resolve
from tests.runs import fresh, prepared, run

PACKAGE = pathlib.Path(podracer_jit.__file__).parent
EXAMPLES = PACKAGE.parent / 'examples'
SHORT = ['--config.checkpoint.every_updates=4', '--config.total_steps=100000']


def parse(*args):
  return command_line.parse(['podracer_jit', *args, *SHORT], flags.FlagValues())


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


@pytest.mark.parametrize('config, shipped, attribute', [
    ('ppo_cartpole:smoke', 'ppo', 'PPO'), ('apex_dqn_catch:smoke', 'dqn', 'DQN')])
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


def test_the_example_of_an_own_algorithm_trains_and_is_about_sixty_lines():
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
    workdirs.make(workdir)
    workdirs.open_workdir(workdir, config)
    prepared_run = prepared(config)
    experiment = dataclasses.replace(prepared_run.experiment, total_steps=10 * 256)
    train.train(dataclasses.replace(prepared_run, experiment=experiment), workdir)
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
  assert len(evaluation.play(agent, 3, 2, 1, 1000).returns) == 3


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


def test_auxiliary_heads_that_no_loss_calls_change_nothing(write_module):
  module = write_module('heads_of_my_own', HEADS)
  original = parse('--config=ppo_cartpole:smoke')
  plain = run(original)[2].params['params']
  headed = run(parse('--config=ppo_cartpole:smoke', f'--config.loss.name={module}:Idle',
                     *options_of(original, 'loss')))[2].params['params']
  assert set(headed) - set(plain) == {'heads_guess', 'heads_other'}
  for name, tree in plain.items():
    assert jax.tree.all(jax.tree.map(np.array_equal, tree, headed[name])), name


@pytest.mark.parametrize('core', ['none', 'gru'])
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


@pytest.mark.parametrize('scheme', ['fused', 'cleanba'])
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
'''


@pytest.mark.parametrize('fields, message', [
    (['loss.name={}:Undecorated'], 'loss.name: Undecorated.clip is no option yet: the class needs'),
    (['loss.name={}:WithoutLoss'], 'loss.name: parts_with_mistakes:WithoutLoss lacks loss'),
    (['network.name={}:Fails'], 'network.name: parts_with_mistakes:Fails fails on '),
    (['network.name={}:Flat'], 'network.name: parts_with_mistakes:Flat fails on '),
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


def test_a_config_with_the_name_of_an_imported_package_does_not_replace_it(tmp_path):
  """EnvPool stays importable although the config file is called envpool.py."""
  (tmp_path / 'envpool.py').write_text(
      'from podracer_jit import experiment\ndef get_config():\n'
      '  env = dict(task="Catch-v0", num_envs=8)\n'
      '  return experiment.config("impala", "mlp", "adam", env=env)\n')
  assert resolve(parse(f'--config={tmp_path / "envpool.py"}')).env.num_envs == 8
  assert 'envpool.py' not in str(sys.modules['envpool'].__file__)
