"""`podracer_jit.testing.check`: right algorithms pass it, wrong ones get one line each."""

import dataclasses
import functools
import importlib
import itertools
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import podracer_jit as pj
from podracer_jit import testing
from podracer_jit.agents import policies, running_moments
from podracer_jit.agents.optimizers import Optimizer
from podracer_jit.learner import updates
from podracer_jit.losses import DPG, DQN, IMPALA, PPO
from podracer_jit.losses.items import rows
from podracer_jit.schedules import Schedule
from tests import runs
from tests.tiers import essential

EXAMPLES = pathlib.Path(__file__).parent.parent / 'examples'
LINES = [
    'shapes: init, init_target, acting, act, {}, loss, gradient, update return what their '
    'interfaces say',
    'pure functions: they read their arguments only, call nothing of Python and keep no state',
    'sums: gradient, terms and valid of {} items are those of 2 and of 4 parts together',
    'bits: an update on two devices gives the same parameters and metrics as on one']


@dataclasses.dataclass(frozen=True)
class FirstHalfNormalises(PPO):
  """Its statistics depend on the order of the groups, which is fixed."""

  def statistics(self, state, valid, targets):
    first = jax.tree.map(lambda x: x[:1], (valid, targets))
    return super().statistics(state, *first)


@dataclasses.dataclass(frozen=True)
class Weighted(IMPALA):
  """Is wrong only with an option that has another value than by default, such as a schedule."""

  weight: float = 0.0

  def loss(self, params, state, batch, key):
    loss, aux = super().loss(params, state, batch, key)
    return loss + (1 - self.share) * self.weight * aux.terms['entropy'] / aux.valid, aux


@functools.cache
def example(module, name):
  sys.path.insert(0, str(EXAMPLES))
  try:
    return getattr(importlib.import_module(module), name)
  finally:
    sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize('algorithm, items', essential([
    (FirstHalfNormalises, 128), (PPO, 128), (IMPALA, 8), (DQN, 32), (DPG, 32),
    (functools.partial(example, 'a2c', 'A2C'), 8),
    (functools.partial(example, 'transformer', 'PredictiveA2C'), 8),
    (functools.partial(example, 'vmpo', 'VMPO'), 8),
    (functools.partial(example, 'rnd', 'RND'), 128),
    (functools.partial(example, 'ppg', 'PPG'), 128)],
    FirstHalfNormalises, DQN))
def test_right_algorithms_pass(algorithm, items):
  algorithm = algorithm if isinstance(algorithm, type) else algorithm()
  middle = 'priority' if algorithm.learns_from_replay else 'targets, statistics'
  assert testing.check(algorithm) == [
      line.format(*each) for line, each in zip(LINES, [(middle,), (), (items,), ()], strict=True)]


@pytest.mark.full
def test_an_example_with_its_own_config_passes():
  config = example('transformer', 'get_config')()
  lines = testing.check(example('transformer', 'PredictiveA2C'), config)
  assert lines[2] == LINES[2].format(32) and lines[3] == LINES[3]
  assert config.scheme == 'cleanba' and config.num_grad_shards == 1  # the caller's is unchanged


def test_an_instance_is_checked_with_its_options():
  with pytest.raises(AssertionError, match='^loss of .*: the sum of the gradients of 2 parts'):
    testing.check(Weighted(weight=Schedule('linear', (0.5, 0.1), (1.0,))))
  with pytest.raises(AssertionError, match='^loss.discount: must be between 0 and 1, got 2.0$'):
    testing.check(Weighted(discount=2.0))
  with pytest.raises(AssertionError, match=r"^config: must be a whole config, .* got 'ppo'$"):
    testing.check(Weighted, 'ppo')


@dataclasses.dataclass(frozen=True)
class Draws(IMPALA):
  def loss(self, params, state, batch, key):
    loss, aux = super().loss(params, state, batch, key)
    return loss * jax.random.uniform(key), aux


class DrawsOwnMean(Draws):
  def loss(self, params, state, batch, key):
    loss, aux = super().loss(params, state, batch, key)
    return loss / batch.items.valid.shape[1], aux


def test_what_cannot_be_checked_is_a_line(monkeypatch):
  one = jax.devices()[:1]
  monkeypatch.setattr(jax, 'devices', lambda *args: one)
  config = runs.small(num_epochs=2)
  config['normalise'] |= {'obs': True, 'reward': True}
  config['loss'] = {'name': 'ppo'}
  config['network'] |= {'core': 'gru', 'core_size': 8}
  sums, bits = testing.check(Draws, config)[2:]
  assert sums.startswith('sums: ') and sums.endswith('where all random numbers are equal')
  assert [bits] == [
      'not checked, bits: this process has one device; call the check before anything uses JAX, or '
      'set JAX_NUM_CPU_DEVICES=2 in its environment']
  config['env']['num_envs'] = 3
  config['num_minibatches'] = 1
  assert testing.check(Draws, config)[2:] == [
      'not checked, sums and bits: an odd number of environments has no halves; env.num_envs is 3']


@pytest.mark.full
def test_a_process_that_has_not_used_jax_gets_two_devices():
  script = f'import sys; sys.path.append({str(EXAMPLES)!r}); import podracer_jit as pj; import a2c'
  lines = subprocess.run(
      [sys.executable, '-c', f'{script}; print(*pj.testing.check(a2c.A2C), sep="\\n")'],
      capture_output=True, text=True, check=True).stdout.splitlines()
  assert lines[-1] == LINES[-1]


def test_the_package_loads_it_on_first_use():
  script = ('import sys, podracer_jit as pj\n'
            'assert not {"jax", "podracer_jit.testing"} & set(sys.modules)\n'
            'assert "testing" in dir(pj) and pj.testing.check')
  subprocess.run([sys.executable, '-c', script], check=True)


# Wrong ones. Their classes have no docstrings; the table below says what is wrong.


def with_loss(change, base=IMPALA):
  """Returns the loss of `base` with changed results: change(self, params, batch, loss, aux)."""
  def loss(self, params, state, batch, key):
    return change(self, params, batch, *base.loss(self, params, state, batch, key))
  return loss


@dataclasses.dataclass(frozen=True)
class OwnMean(IMPALA):
  loss = with_loss(lambda self, params, batch, loss, aux: (loss / aux.valid, aux))


@dataclasses.dataclass(frozen=True)
class OwnMeanOfEntropy(PPO):
  loss = with_loss(lambda self, params, batch, loss, aux: (
      loss - 0.01 * aux.terms['entropy'] / aux.valid, aux), PPO)


@dataclasses.dataclass(frozen=True)
class OwnMeanInGradient(IMPALA):
  def gradient(self, state, batch, key):
    grads, aux = super().gradient(state, batch, key)
    return jax.tree.map(lambda x: x / aux.valid, grads), aux


@dataclasses.dataclass(frozen=True)
class MeanTerm(IMPALA):
  loss = with_loss(lambda self, params, batch, loss, aux: (
      loss, aux._replace(terms=aux.terms | {'entropy': aux.terms['entropy'] / aux.valid})))


@dataclasses.dataclass(frozen=True)
class ValidOfAll(IMPALA):
  loss = with_loss(lambda self, params, batch, loss, aux: (loss, aux._replace(valid=batch.count)))


@dataclasses.dataclass(frozen=True)
class Ranked(DQN):
  loss = with_loss(lambda self, params, batch, loss, aux: (
      loss, aux._replace(priority=aux.priority / jnp.max(aux.priority))), DQN)


@dataclasses.dataclass(frozen=True)
class OnlyPairs(IMPALA):
  def loss(self, params, state, batch, key):
    if batch.items.reward.shape[1] != 2:  # a training has two environments in a part
      raise ValueError('other numbers of environments')
    return super().loss(params, state, batch, key)


@dataclasses.dataclass(frozen=True)
class NoNumber(IMPALA):
  loss = with_loss(lambda self, params, batch, loss, aux: (loss / 0.0, aux))


@dataclasses.dataclass(frozen=True)
class Randomly(IMPALA):
  loss = with_loss(lambda self, params, batch, loss, aux: (loss * np.random.uniform(), aux))


COUNTER = itertools.count()


@dataclasses.dataclass(frozen=True)
class Counts(IMPALA):
  def targets(self, state, rollout):
    return {'number': jnp.full(rollout.reward.shape, next(COUNTER))}


@dataclasses.dataclass(frozen=True)
class Prints(IMPALA):
  def act(self, params, obs, carry, valid, key, exploration):
    jax.debug.print('{x}', x=jnp.sum(obs))
    return super().act(params, obs, carry, valid, key, exploration)


@dataclasses.dataclass(frozen=True)
class CallsBack(DQN):
  def priority(self, rows):
    priority = super().priority(rows)
    return jax.pure_callback(lambda x: x, jax.typeof(priority), priority)


@dataclasses.dataclass(frozen=True)
class Remembers(IMPALA):
  def statistics(self, state, valid, targets):
    object.__setattr__(self, 'last', valid)


TABLE = np.random.default_rng(0).normal(size=(100, 100)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class HoldsTable(IMPALA):
  loss = with_loss(lambda self, params, batch, loss, aux: (loss * jnp.asarray(TABLE)[0, 0], aux))


@dataclasses.dataclass(frozen=True)
class ComputesForActors(IMPALA):
  def acting(self, state):
    return jax.tree.map(lambda x: 0.5 * x, state.params)


@dataclasses.dataclass(frozen=True)
class ReadsDevices(IMPALA):
  loss = with_loss(lambda self, params, batch, loss, aux: (
      loss + aux.terms['entropy'] * jax.sharding.get_abstract_mesh().size, aux))


@dataclasses.dataclass(frozen=True)
class MixesTargets(PPO):
  def targets(self, state, rollout):
    targets = super().targets(state, rollout)
    return targets | {'advantage': targets['advantage'] - jnp.mean(targets['advantage'])}


@dataclasses.dataclass(frozen=True)
class SumsTargets(IMPALA):
  def targets(self, state, rollout):
    return jnp.sum(rollout.reward, axis=0)


@dataclasses.dataclass(frozen=True)
class NoAux(IMPALA):
  loss = with_loss(lambda self, params, batch, loss, aux: (loss, aux.terms))


@dataclasses.dataclass(frozen=True)
class NoKL(IMPALA):
  measures_kl = True


@dataclasses.dataclass(frozen=True)
class TakenName(IMPALA):
  loss = with_loss(lambda self, params, batch, loss, aux: (
      loss, aux._replace(terms={'steps': loss})))


@dataclasses.dataclass(frozen=True)
class UnrollsRows(IMPALA):
  def items(self):
    return rows()


@dataclasses.dataclass(frozen=True)
class OneMore(IMPALA):
  def make_network(self):
    return Wide(super().make_network())


class Wide(nn.Module):
  inner: nn.Module

  def __call__(self, obs, carry, valid):
    dist_params, value, carry = self.inner(obs, carry, valid)
    return jnp.concatenate([dist_params, value[..., None]], axis=-1), value, carry


@dataclasses.dataclass(frozen=True)
class FloatActions(IMPALA):
  def act(self, params, obs, carry, valid, key, exploration):
    acted = super().act(params, obs, carry, valid, key, exploration)
    return acted._replace(action=acted.action.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class OneExtra(IMPALA):
  def act(self, params, obs, carry, valid, key, exploration):
    acted = super().act(params, obs, carry, valid, key, exploration)
    return acted._replace(extras=acted.extras | {'mean': jnp.mean(acted.extras['value'])[None]})


@dataclasses.dataclass(frozen=True)
class PriorityOfRows(DQN):
  def priority(self, rows):
    return rows.reward


@dataclasses.dataclass(frozen=True)
class OnePriority(DQN):
  loss = with_loss(lambda self, params, batch, loss, aux: (
      loss, aux._replace(priority=jnp.max(aux.priority))), DQN)


@dataclasses.dataclass(frozen=True)
class OneExploration(DQN):
  def exploration(self, num_envs):
    return np.float32(0.1)


@dataclasses.dataclass(frozen=True)
class HalfPrecision(IMPALA):
  def update(self, state, grads, aux):
    state = super().update(state, grads, aux)
    return state._replace(params=jax.tree.map(lambda x: x.astype(jnp.float16), state.params))


@dataclasses.dataclass(frozen=True)
class OwnKind(IMPALA):
  policy_reads = 'quantiles'


@dataclasses.dataclass(frozen=True)
class Explores(DQN):
  pass


NO_EXPLORE = policies.PolicyFamily(policies.categorical, discrete=True,
                                   reads=policies.ACTION_VALUES)


@pytest.mark.parametrize('algorithm, message', [
    (OwnMean, 'loss of {}: the sum of the gradients of 2 parts differs from the gradient of the '
     'whole by 100 %; divide by batch.count, not by the number of rows of the part, and take '
     'what the rows share from batch.statistics'),
    (OwnMeanOfEntropy, 'loss of {}: the sum of the gradients of 2 parts differs from'),
    (DrawsOwnMean, 'loss of {}: the sum of the gradients of 2 parts differs from'),
    (OwnMeanInGradient, 'gradient of {}: the sum of the gradients of 2 parts differs from'),
    (MeanTerm, "loss of {}: the term 'entropy' of its Aux is 0."),
    (ValidOfAll, 'loss of {}: the number of valid rows of its Aux is '),
    (Ranked, 'loss of {}: the priority of an item depends on the other items of its part'),
    (OnlyPairs, 'loss.name: loss of {} (test_testing.py, line '),
    (NoNumber, 'loss of {}: is NaN or infinite with the first parameters'),
    (Randomly, 'loss of {}: two traces differ, so it reads something beside its arguments, such as '
     'numbers of numpy.random, the time or a counter; draw from its key, and count in the state'),
    (Counts, 'targets of {}: two traces differ'),
    (Prints, 'act of {}: calls Python from the compiled program (debug_print); leave callbacks and '
     "prints out, and return numbers to log as terms of the loss's Aux"),
    (CallsBack, 'priority of {}: calls Python from the compiled program (pure_callback); '),
    (Remembers, 'statistics of {}: keeps state on self (last), but it is traced once and then runs '
     'compiled; keep it in params or in init_target'),
    (HoldsTable, 'loss of {}: holds an array (100, 100) that is not among its arguments; keep it '
     'in params (init) or in init_target, as checkpoints do'),
    (ComputesForActors, 'acting of {}: computes (mul); it must select arrays only, and act '
     'computes'),
    (ReadsDevices, 'loss of {}: params/params/policy/bias has other bits after an update on '
     'two devices than on one; no method may depend on the devices'),
    (MixesTargets, 'targets of {}: the rows of an environment depend on the other environments of '
     'its gradient group; what a whole minibatch shares belongs into statistics'),
    (SumsTargets, 'loss.name: targets of {}: must return arrays [T, N, ...], here (16, 4), got '
     '(4,)'),
    (NoAux, 'loss.name: loss of {}: must return Aux(terms, valid) as its second result; got dict'),
    (NoKL, "loss.name: loss of {}: must return the loss term 'approx_kl', as measures_kl = True "
     'says; got '),
    (TakenName, "loss.name: loss of {}: must not return a loss term 'steps': every run has a "
     'metric of this name'),
    (UnrollsRows, 'loss.name: loss of {}: unroll needs whole environments, with T + 1 observations '
     'of T rows; it got 1 of 1'),
    (OneMore, 'policy: categorical reads 2 numbers, and mlp gives 3'),
    (FloatActions, 'loss.name: act of {}: must return the action int32 (8,) for 8 environments, '
     'got float32 (8,)'),
    (OneExtra, 'loss.name: act of {}: must return extras [B, ...], here (8, ...), got (1,)'),
    (PriorityOfRows, 'loss.name: priority of {}: must return priorities [N], here float32 (8,), '
     'got float32 (4, 8)'),
    (OnePriority, 'loss.name: loss of {}: must return priorities [N], here float32 (16,), got '
     'float32 ()'),
    (OneExploration, 'loss.name: exploration of {}: must return an array (8,), a number for each '
     'environment; got ()'),
    (HalfPrecision, 'loss.name: update of {}: must return parameters with the shapes and types '
     'that it got; params/policy/bias is float16 (2,), not float32 (2,)'),
    (OwnKind, "loss.name: no shipped policy reads 'quantiles', the policy_reads of {}; policy must "
     'name one of your own'),
    (jnp.float32, 'algorithm: must be a class derived from Algorithm, or an instance of one; got')])
def test_a_wrong_algorithm_gets_one_line(algorithm, message):
  with pytest.raises(AssertionError) as error:
    testing.check(algorithm)
  name = f'{__name__}:{getattr(algorithm, "__name__", "")}'
  assert str(error.value).startswith(message.replace('{}', name))
  assert '\n' not in str(error.value)


def test_a_policy_without_explore_is_a_line():
  config = pj.config(f'{__name__}:Explores', 'mlp', 'adam', policy=f'{__name__}:NO_EXPLORE')
  config.env.task = 'Catch-v0'
  with pytest.raises(AssertionError, match=rf'^policy: {__name__}:NO_EXPLORE has no explore, '
                     'which a policy that reads action values needs$'):
    testing.check(Explores, config)


def test_a_class_that_no_config_can_name_is_refused():
  class Local(IMPALA):
    pass

  with pytest.raises(AssertionError, match='Local is inside of a function or a class, where no '
                     f'config can name it; move it to the top level of {__name__}'):
    testing.check(Local)


@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
  """Adam with decoupled weight decay."""

  def scale(self):
    return optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.5))


def test_weight_decay_leaves_running_moments_alone():
  """Moments are parameters, too: they are merged with what is measured, and nothing else."""
  config = runs.small('ppo', num_epochs=2)
  config['normalise'] |= {'obs': True, 'reward': True, 'value': True}
  config['optimizer'] = {'name': f'{__name__}:AdamW', 'learning_rate': 0.1, 'anneal': False,
                         'max_grad_norm': 1.0, 'kl_target': 0.0}
  run = runs.fresh(config)
  state, (rollout,) = testing._collect(run)
  for _ in range(2):  # the first moments are zeros, which no decay changes
    prepared = jax.jit(run.learner.source.prepare)(
        updates.view(state), updates.update_key(state), rollout)
    measured = prepared.batch_stats['moments']
    expected = jax.device_get(jax.jit(running_moments.add)(state.params, measured))
    state, _ = run.learner.program(state, rollout)
    assert set(expected['moments']) == {'obs', 'returns', 'values'}
    jax.tree.map(np.testing.assert_array_equal, expected['moments'],
                 jax.device_get(state.params)['moments'])
  weights = state.params['params']['policy']['kernel']
  assert not np.array_equal(weights, expected['params']['policy']['kernel'])
