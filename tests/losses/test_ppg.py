"""The example PPG compared with plain NumPy, and what the core keeps for its auxiliary phase."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from examples.ppg import PPG, Distillation
from podracer_jit import testing
from podracer_jit.agents.running_moments import Moments
from podracer_jit.experiment import memory
from podracer_jit.experiment.resolve import resolve
from podracer_jit.losses import PPO
from podracer_jit.losses.algorithm import Aux, Auxiliary, Batch
from podracer_jit.numerics import counters
from podracer_jit.types import Rollout
from podracer_jit.workdir import journal
from tests import reference, runs
from tests.runs import changed, fresh, open_workdir, run, small
from tests.tiers import essential

NAME = 'examples.ppg:PPG'
N = 9
TASKS = {'CartPole-v1': (4, 2), 'Pendulum-v1': (3, 1)}  # numbers in observations and in actions


def config_of(name=NAME, task='CartPole-v1', **fields):
  """Returns a small config with a phase after every other update, of four gradient steps."""
  config = changed(small(name, task), network__separate_critic=True, network__hidden=(8,),
                   loss__policy_updates=2, loss__aux_epochs=2, loss__aux_minibatches=1)
  return changed(config, **fields)


def _network(params, obs):
  """Returns the distribution's parameters, the value and the auxiliary value, in 64 bits."""
  params = jax.tree.map(np.float64, params['params'])

  def dense(layer, x):
    return x @ layer['kernel'] + layer['bias']

  x, y = (np.tanh(dense(params[torso]['Dense_0'], obs)) for torso in ('torso', 'critic'))
  outputs = dense(params['policy'], x)
  if 'log_std' in params:
    log_std = np.broadcast_to(params['log_std'], outputs.shape)
    outputs = np.concatenate([outputs, log_std], axis=-1)
  return (outputs, dense(params['value'], y)[:, 0],
          dense(params['heads_auxiliary_value']['Dense_0'], x)[:, 0])


def _divergence(old, new, discrete):
  if discrete:
    p, q = reference.log_softmax(old), reference.log_softmax(new)
    return np.sum(np.exp(p) * (p - q))
  mean, log_std = np.split(old, 2)
  new_mean, new_log_std = np.split(new, 2)
  return np.sum(new_log_std - log_std - 0.5 + (np.exp(2 * log_std) + (mean - new_mean) ** 2)
                / (2 * np.exp(2 * new_log_std)))


def _expected(params, state, batch, beta):
  """Returns the means of the phase's losses over valid rows, and their sum (section 2.1)."""
  rows = batch.items
  discrete = rows.action.dtype == np.int32
  new, value, auxiliary = _network(params, rows.obs[0])
  old, *_ = _network(state.target.params, rows.obs[0])
  valid = rows.valid[0]
  target = batch.targets['value_target'][0]
  losses = {'distillation_loss': np.mean((auxiliary - target)[valid] ** 2) / 2,
            'clone_kl': np.mean([_divergence(*pair, discrete) for pair in zip(
                old[valid], new[valid], strict=True)]),
            'aux_value_loss': np.mean((value - target)[valid] ** 2) / 2}
  return losses, (losses['distillation_loss'] + beta * losses['clone_kl']
                  + losses['aux_value_loss'])


def _case(task):
  """Returns the phase's algorithm, a state with another network before it, and a batch."""
  algorithm = resolve(config_of(task=task, loss__beta_clone=0.7)).algorithm
  phase = algorithm.auxiliary().algorithm.at(counters.zero(1000))
  state = phase.first_state(jax.random.key(0), jax.random.key(1))
  rng = np.random.default_rng(0)

  def moved(params):
    return jax.tree.map(lambda p: np.float32(p + 0.3 * rng.normal(size=p.shape)), params)

  state = state._replace(params=moved(state.params)).with_target(moved(state.target.params))
  obs_size, actions = TASKS[task]
  valid = rng.random((1, N)) < 0.7
  action = (rng.integers(actions, size=(1, N)).astype(np.int32) if task == 'CartPole-v1'
            else np.float32(rng.normal(size=(1, N, actions))))
  rows = Rollout(obs=np.float32(rng.normal(size=(1, N, obs_size))), action=action, extras=None,
                 reward=None, terminated=None, truncated=None, valid=valid, episodes=None)
  targets = {'value_target': np.float32(rng.normal(size=(1, N)))}
  return phase, state, Batch(rows, targets, None, jnp.float32(valid.sum()), None)


@pytest.mark.parametrize('task', essential(TASKS, 'CartPole-v1'))
def test_the_losses_are_those_of_the_paper(task):
  phase, state, batch = _case(task)
  loss, aux = jax.jit(phase.loss)(state.params, state, batch, None)
  losses, total = _expected(state.params, state, batch, beta=0.7)
  assert aux.terms.keys() == losses.keys()
  for name, expected in losses.items():
    assert_allclose(aux.terms[name] / batch.count, expected, rtol=1e-4, err_msg=name)
  assert_allclose(loss, total, rtol=1e-4)


@pytest.mark.parametrize('task', essential(TASKS, 'CartPole-v1'))
def test_the_gradient_has_the_slopes_of_the_losses(task):
  phase, state, batch = _case(task)
  grads, _ = jax.jit(phase.gradient)(state, batch, None)
  rng = np.random.default_rng(4)
  for _ in range(5):
    direction = jax.tree.map(lambda p: rng.normal(size=p.shape), state.params)

    def loss(step, direction=direction):
      moved = jax.tree.map(lambda p, d: np.float64(p) + step * d, state.params, direction)
      return _expected(moved, state, batch, beta=0.7)[1]

    slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, grads, direction)))
    assert abs(slope) > 1e-2
    assert_allclose(slope, (loss(1e-6) - loss(-1e-6)) / 2e-6, rtol=1e-3)


def test_values_that_are_normalised_count_in_their_deviations():
  phase, state, batch = _case('CartPole-v1')
  moments = {'values': Moments(*map(np.float32, (10, 0.0, 90.0)))}  # a deviation of 3
  terms = [phase.loss(params, state._replace(params=params), batch, None)[1].terms
           for params in (state.params, state.params | {'moments': moments})]
  for name, factor in (('distillation_loss', 9), ('aux_value_loss', 9), ('clone_kl', 1)):
    assert_allclose(terms[0][name], factor * terms[1][name], rtol=0.01, err_msg=name)


def test_the_divergence_is_from_the_network_before_the_phase():
  algorithm = resolve(config_of()).algorithm.at(counters.zero(1000))
  phase = algorithm.auxiliary().algorithm.at(counters.zero(1000))
  first = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  grads = jax.tree.map(jnp.ones_like, first.params)
  aux = Aux({'approx_kl': jnp.float32(0)}, jnp.float32(1))
  begun = algorithm.update(first, grads, aux)
  jax.tree.map(assert_array_equal, begun.target.params['params'], begun.params['params'])
  after = phase.update(begun, grads, aux._replace(terms={}))
  jax.tree.map(assert_array_equal, after.target.params, begun.target.params)
  assert not np.array_equal(*(s.params['params']['value']['bias'] for s in (after, begun)))


# The same terms of the rows that an update learns from, and of those of its phase.


def _rows(batch):
  """Returns numbers of the rows of a batch, as terms of a loss."""
  rows, targets = batch.items, batch.targets
  return {'reward': rows.reward, 'target': targets['value_target'], 'obs': rows.obs[..., 2],
          'action': rows.action.astype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class Tells(PPG):
  def loss(self, params, state, batch, key):
    loss, aux = super().loss(params, state, batch, key)
    return loss, aux._replace(terms=aux.terms | Aux.of(_rows(batch), batch.items.valid).terms)

  def auxiliary(self):
    phase = super().auxiliary()
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return phase._replace(algorithm=TellsOfPhase(**fields))


@dataclasses.dataclass(frozen=True)
class TellsOfPhase(Distillation):
  def loss(self, params, state, batch, key):
    loss, aux = super().loss(params, state, batch, key)
    terms = Aux.of(_rows(batch), batch.items.valid).terms
    return loss, aux._replace(terms={f'phase_{name}': x for name, x in terms.items()})


@pytest.mark.parametrize('groups', essential([1, 2], 2))
def test_a_phase_learns_from_all_rows_since_the_last_one(groups):
  config = config_of(f'{__name__}:Tells', loss__policy_updates=3, num_grad_shards=groups,
                     total_steps=6 * 64)
  _, reports, _ = run(config)
  names = ('reward', 'target', 'obs', 'action')
  metrics = [{name: float(np.squeeze(report.metrics[name])) for name in (
      'valid', *names, *(f'phase_{name}' for name in names))} for report in reports]
  assert len(metrics) >= 6
  for i, of_update in enumerate(metrics):
    for name in names:
      since = metrics[i - 2:i + 1]
      rows = sum(m['valid'] for m in since)
      expected = sum(m[name] * m['valid'] for m in since) / rows if i % 3 == 2 else 0.0
      assert_allclose(of_update[f'phase_{name}'], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('algorithm', essential([PPG, Distillation], PPG))
def test_it_holds_what_an_algorithm_must_hold(algorithm):
  # With a phase after each update, the check of two devices has one.
  config = changed(small('ppo'), network__separate_critic=True)
  assert testing.check(algorithm(policy_updates=1, aux_minibatches=2), config)


def test_a_run_is_the_same_in_one_program_and_on_two_devices():
  config = config_of(num_grad_shards=2, num_shards=2)
  of_sync = run(config)[0]
  assert len({params for _, params in of_sync}) == len(of_sync)
  assert run(changed(config, scheme='fused', placement__actor_devices=(0,),
                     placement__learner_devices=(0,)))[0] == of_sync
  assert run(changed(config, placement__actor_devices=(0, 1),
                     placement__learner_devices=(0, 1)))[0] == of_sync


def test_a_killed_run_has_the_rollouts_since_the_last_phase(tmp_path):
  config = config_of(loss__policy_updates=4, total_steps=12 * 64)

  def train_in(name):
    open_workdir(tmp_path / name, config)
    runs.train_in(fresh(config), tmp_path / name)
    return journal.read_receipts(tmp_path / name).by_update

  uninterrupted = train_in('uninterrupted')
  assert len(uninterrupted) >= 12
  shutil.copytree(tmp_path / 'uninterrupted', tmp_path / 'killed')
  for folder in (tmp_path / 'killed' / 'checkpoints').iterdir():
    if int(folder.name) != 6:
      shutil.rmtree(folder)
  assert train_in('killed') == uninterrupted


def test_memory_counts_the_rollouts():
  def of_phase(config):
    always, _ = memory._moments(fresh(config))
    return sum(part.nbytes for part in always if part.name == 'rollouts of the auxiliary phase')

  size = of_phase(config_of())
  # Of each row: observation, action, two extras, reward, three flags, two targets.
  rows = 2 * 8 * 8
  assert size == 2 * (rows * (4 * 4 + 4 + 8 + 4 + 3 + 8) + 2 * 8 * 4 * 4)
  assert of_phase(config_of(loss__policy_updates=6)) == 3 * size
  assert of_phase(small('ppo')) == 0


@pytest.mark.parametrize('fields, message', [
    (dict(scheme='dppo'), f'scheme: {NAME} has an auxiliary phase, which needs gradients and '
     'updates in one place; dppo has them apart'),
    (dict(loss__aux_minibatches=3), f'loss.name: the auxiliary phase of {NAME} has 6 minibatches, '
     'which must divide the 128 items of a gradient group in 2 updates')])
def test_what_cannot_be_is_one_line(fields, message):
  with pytest.raises(ValueError) as error:
    resolve(config_of(**fields))
  assert message in str(error.value)


def test_other_algorithms_have_no_phase():
  assert PPO().auxiliary() is None
  assert isinstance(PPG().auxiliary(), Auxiliary)
