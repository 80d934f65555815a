"""The example V-MPO compared with plain NumPy, and with what it must hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from examples.vmpo import LEAST, VMPO
from podracer_jit import testing
from podracer_jit.experiment.resolve import resolve
from podracer_jit.losses.algorithm import Aux, Batch
from podracer_jit.numerics import counters
from podracer_jit.types import Rollout
from tests import reference
from tests.runs import changed, run, small
from tests.tiers import essential

NAME = 'examples.vmpo:VMPO'
T, N, GROUPS = 7, 3, 2  # rows, environments of a group, groups
DISCOUNT = 0.9
TASKS = {'CartPole-v1': (4, 2, 1), 'Pendulum-v1': (3, 1, 2)}  # numbers in obs, actions, divergences


def _algorithm(task, **fields):
  config = changed(small(NAME, task), network__hidden=(8,), loss__discount=DISCOUNT,
                   loss__temperature=0.7, loss__epsilon_alpha=0.02, loss__epsilon_sigma=0.003)
  return resolve(changed(config, **fields)).algorithm.at(counters.zero(1000))


def _rollouts(task):
  """Returns the rollouts of the groups, in which episodes end."""
  obs_size, actions, _ = TASKS[task]
  rng = np.random.default_rng(0)
  for _ in range(GROUPS):
    ends = [reference.random_ends(rng, T, carried=env == 1) for env in range(N)]
    terminated, truncated, valid = (np.stack(x, axis=1) for x in zip(*ends, strict=True))
    action = (rng.integers(actions, size=(T, N)).astype(np.int32) if task == 'CartPole-v1'
              else np.float32(rng.normal(size=(T, N, actions))))
    yield Rollout(obs=np.float32(rng.normal(size=(T + 1, N, obs_size))), action=action, extras=None,
                  reward=np.float32(rng.normal(size=(T, N)) * valid), terminated=terminated,
                  truncated=truncated, valid=valid, episodes=None)


def _network(params, obs):
  """Returns the distribution's parameters and the value of observations [..., D], in 64 bits."""
  params = jax.tree.map(np.float64, params['params'])

  def dense(layer, x):
    return x @ layer['kernel'] + layer['bias']

  x = np.tanh(dense(params['torso']['Dense_0'], obs))
  outputs = dense(params['policy'], x)
  if 'log_std' in params:
    log_std = np.broadcast_to(params['log_std'], outputs.shape)
    outputs = np.concatenate([outputs, log_std], axis=-1)
  return outputs, dense(params['value'], x)[..., 0]


def _log_prob(dist_params, action):
  if action.dtype == np.int32:
    return reference.log_softmax(dist_params)[action]
  mean, log_std = np.split(dist_params, 2)
  return np.sum(-0.5 * ((action - mean) / np.exp(log_std)) ** 2 - log_std - np.log(2 * np.pi) / 2)


def _divergences(old, new, discrete):
  """Returns the divergences of one row, by the formulas of whole distributions."""
  if discrete:
    p, q = reference.log_softmax(old), reference.log_softmax(new)
    return [np.sum(np.exp(p) * (p - q))]

  def kl(mean, std, other_mean, other_std):
    return np.sum(np.log(other_std / std) - 0.5
                  + (std ** 2 + (mean - other_mean) ** 2) / (2 * other_std ** 2))

  mean, log_std = np.split(old, 2)
  new_mean, new_log_std = np.split(new, 2)
  std, new_std = np.exp(log_std), np.exp(new_log_std)
  return [kl(mean, std, new_mean, std), kl(mean, std, mean, new_std)]


def _returns(rollout, value):
  """Returns the n-step returns [T, N]; NaN in invalid rows."""
  result = np.full((T, N), np.nan)
  for env in range(N):
    ends = (x[:, env] for x in (rollout.terminated, rollout.truncated, rollout.valid))
    for first, stop, terminal in reference.segments(*ends):
      total = 0.0 if terminal else value[stop, env]
      for t in reversed(range(first, stop)):
        result[t, env] = total = rollout.reward[t, env] + DISCOUNT * total
  return result


def _expected(params, algorithm, state, rollouts):
  """Returns the losses of the paper over the valid rows of all groups, and their sum.

  Args:
    params: to differentiate; returns, and what has no gradient, are those of `state`.
    algorithm: its options count.
    state: parameters and target network at the gradient step.
    rollouts: of the groups.
  """
  rows = []
  for rollout in rollouts:
    dist_params, value = _network(params, rollout.obs)
    old_dist_params, _ = _network(state.target.params, rollout.obs)
    fixed_dist_params, fixed_value = _network(state.params, rollout.obs)
    returns = _returns(rollout, fixed_value)
    for t, env in np.argwhere(rollout.valid):
      action, discrete = rollout.action[t, env], rollout.action.dtype == np.int32
      rows.append((returns[t, env] - fixed_value[t, env], _log_prob(dist_params[t, env], action),
                   value[t, env] - returns[t, env],
                   _divergences(old_dist_params[t, env], dist_params[t, env], discrete),
                   _divergences(old_dist_params[t, env], fixed_dist_params[t, env], discrete)))
  advantage, log_prob, error, kl, fixed_kl = map(np.array, zip(*rows, strict=True))
  duals, fixed = (jax.tree.map(np.float64, p['duals']) for p in (params, state.params))

  best = np.argsort(-advantage)[:(len(advantage) + 1) // 2]
  weight = np.exp(advantage[best] / fixed['temperature'])
  weight /= weight.sum()
  eta = duals['temperature']
  bounds = np.array([algorithm.epsilon_alpha, algorithm.epsilon_sigma])[:kl.shape[1]]
  losses = {
      'policy_loss': -np.sum(weight * log_prob[best]),
      'value_loss': np.mean(error ** 2) / 2,
      'temperature_loss': eta * (algorithm.epsilon_eta
                                 + np.log(np.mean(np.exp(advantage[best] / eta)))),
      'alpha_loss': np.mean(np.sum(duals['alpha'] * (bounds - fixed_kl) + fixed['alpha'] * kl, 1))}
  return losses, sum(losses.values())


def _case(task):
  """Returns an algorithm, a state whose target differs, the rollouts, and their batches."""
  algorithm = _algorithm(task)
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  # A first policy is uniform.
  rng = np.random.default_rng(1)
  moved = jax.tree.map(lambda p: np.float32(p + 0.3 * rng.normal(size=p.shape)),
                       state.params['params'])
  state = state._replace(params=state.params | {'params': moved})
  rollouts = list(_rollouts(task))
  targets = [jax.jit(algorithm.targets)(state, rollout) for rollout in rollouts]
  valid = np.stack([rollout.valid for rollout in rollouts])
  statistics = algorithm.statistics(state, valid, jax.tree.map(lambda *x: jnp.stack(x), *targets))
  count = jnp.float32(valid.sum())
  return algorithm, state, rollouts, [Batch(rollout, target, None, count, statistics)
                                      for rollout, target in zip(rollouts, targets, strict=True)]


@pytest.mark.parametrize('task', essential(TASKS, 'CartPole-v1'))
def test_the_losses_are_those_of_the_paper(task):
  algorithm, state, rollouts, batches = _case(task)
  results = [jax.jit(algorithm.loss)(state.params, state, batch, None) for batch in batches]
  losses, total = _expected(state.params, algorithm, state, rollouts)
  for name, expected in losses.items():
    got = sum(aux.terms[name] for _, aux in results) / batches[0].count
    assert_allclose(got, expected, rtol=2e-4, err_msg=name)
  assert_allclose(sum(loss for loss, _ in results), total, rtol=2e-4)


@pytest.mark.parametrize('task', essential(TASKS, 'CartPole-v1'))
def test_the_gradient_has_the_slopes_of_the_losses(task):
  algorithm, state, rollouts, batches = _case(task)
  grads = jax.tree.map(lambda *g: sum(map(np.float64, g)), *(
      jax.jit(algorithm.gradient)(state, batch, None)[0] for batch in batches))
  rng = np.random.default_rng(4)
  for part in ('params', 'temperature', 'alpha'):
    def along(path, p, part=part):
      names = {entry.key for entry in path}
      return rng.normal(size=p.shape) if part in names else np.zeros(p.shape)

    direction = jax.tree_util.tree_map_with_path(along, state.params)

    def loss(step, direction=direction):
      moved = jax.tree.map(lambda p, d: np.float64(p) + step * d, state.params, direction)
      return _expected(moved, algorithm, state, rollouts)[1]

    slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, grads, direction)))
    assert abs(slope) > 1e-3
    assert_allclose(slope, (loss(1e-6) - loss(-1e-6)) / 2e-6, rtol=2e-3)


def test_a_minibatch_without_valid_rows_has_no_gradient_of_the_network():
  algorithm, state, _, batches = _case('CartPole-v1')
  none = np.zeros((GROUPS, T, N), bool)
  targets = jax.tree.map(lambda x: jnp.stack([x] * GROUPS), batches[0].targets)
  batch = batches[0]._replace(
      items=batches[0].items._replace(valid=none[0]), count=jnp.float32(1),
      statistics=algorithm.statistics(state, none, targets))
  grads, _ = jax.jit(algorithm.gradient)(state, batch, None)
  assert all(np.all(g == 0) for g in jax.tree.leaves(grads))


def test_the_target_acts_and_is_copied_in_time_and_multipliers_stay_positive():
  algorithm = _algorithm('CartPole-v1', loss__target_every=3, optimizer__learning_rate=10.0)
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  grads = jax.tree.map(jnp.ones_like, state.params)
  first = state.params['params']
  for step in range(1, 4):
    state = algorithm.update(state, grads, Aux({}, jnp.float32(1)))
    expected = state.params['params'] if step == 3 else first
    jax.tree.map(assert_array_equal, algorithm.acting(state)['params'], expected)
    assert all(np.all(x == np.float32(LEAST)) for x in jax.tree.leaves(state.params['duals']))
    state = state._replace(target=state.target._replace(gradient_steps=jnp.int32(step)))


@pytest.mark.parametrize('fields', essential(
    [{}, {'network__core': 'gru'}, {'normalise__obs': True}], {}))
def test_it_holds_what_an_algorithm_must_hold(fields):
  assert testing.check(VMPO, changed(small('ppo'), **fields))


def test_a_run_is_the_same_in_one_program_and_on_two_devices():
  config = changed(small(NAME, num_grad_shards=2, num_shards=2), loss__target_every=3)
  of_sync = run(config)[0]
  assert len({params for _, params in of_sync}) == len(of_sync)
  assert run(changed(config, scheme='fused', placement__actor_devices=(0,),
                     placement__learner_devices=(0,)))[0] == of_sync
  assert run(changed(config, placement__actor_devices=(0, 1),
                     placement__learner_devices=(0, 1)))[0] == of_sync


def test_an_invalid_row_of_a_large_advantage_changes_nothing():
  """Its weight, the exponential of advantage over temperature, would be infinite."""
  algorithm, state, rollouts, batches = _case('CartPole-v1')
  cold = {'temperature': jnp.float32(0.01)}
  state = state._replace(params=state.params | {'duals': state.params['duals'] | cold})
  valid = np.stack([rollout.valid for rollout in rollouts])
  advantage = np.stack([batch.targets['advantage'] for batch in batches])
  group, t, env = np.argwhere(~valid)[0]

  def gradient(of_invalid):
    advantage[group, t, env] = of_invalid
    targets = batches[group].targets | {'advantage': jnp.asarray(advantage[group])}
    statistics = algorithm.statistics(state, valid, {'advantage': jnp.asarray(advantage)})
    batch = batches[group]._replace(targets=targets, statistics=statistics)
    return jax.jit(algorithm.gradient)(state, batch, None)[0]

  usual, large = gradient(0.0), gradient(advantage[valid].max() + 3)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(usual))
  jax.tree.map(assert_array_equal, large, usual)
