"""Losses of transitions, value networks and their policies, by hand and compared with NumPy."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit import losses, schedules
from podracer_jit.agents import networks, optimizers, policies, q_networks
from podracer_jit.configs import apex_dpg_dmc, apex_dqn_atari
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.losses.algorithm import Batch
from podracer_jit.losses.returns import n_step_priority, n_step_return
from podracer_jit.types import Rollout, Target, TrainState, Transition
from tests.made import bound
from tests.reference import numeric_gradient


@pytest.mark.quick
def test_double_q_learning_by_hand():
  """The network prefers the second action of the next state; the target network values it 5."""
  def error(q):
    return losses.dqn_td_error(q, jnp.int32(1), jnp.float32(2.0), jnp.float32(0.5),
                               jnp.array([9.0, 5.0]), jnp.array([0.0, 1.0]))
  q = jnp.array([1.0, 3.0])
  assert error(q) == 2.0 + 0.5 * 5.0 - 3.0
  assert_array_equal(jax.grad(lambda q: 0.5 * error(q) ** 2)(q), [0.0, -1.5])


def test_no_gradient_reaches_the_targets():
  def loss(q_t, selector):
    return losses.dqn_td_error(jnp.ones(2), jnp.int32(0), jnp.float32(1.0), jnp.float32(1.0), q_t,
                               selector) ** 2
  for gradient in jax.grad(loss, argnums=(0, 1))(jnp.array([2.0, 1.0]), jnp.array([0.0, 3.0])):
    assert_array_equal(gradient, [0.0, 0.0])
  assert jax.grad(lambda q_t: losses.critic_td_error(
      jnp.float32(0.0), jnp.float32(1.0), jnp.float32(0.9), q_t) ** 2)(3.0) == 0.0


def test_critic_and_policy_losses_by_hand():
  error = losses.critic_td_error(*map(jnp.float32, (1.0, 2.0, 0.5, 4.0)))
  assert error == 2.0 + 0.5 * 4.0 - 1.0
  slope = jnp.array([0.5, -3.0, 2.0])
  gradient = jax.grad(losses.policy_loss)(jnp.zeros(3), slope, 1.0)
  assert_array_equal(gradient, [-0.5, 1.0, -1.0])  # each component is clipped, not the norm


@pytest.mark.parametrize('terminated, truncated, expected', [
    ([0, 0, 0], [0, 0, 0], (1 + 0.5 * 2 + 0.25 * 4, 0.125, 3)),
    ([0, 1, 0], [0, 0, 0], (1 + 0.5 * 2, 0.0, 2)),
    ([0, 0, 0], [1, 0, 0], (1.0, 0.5, 1)),
    ([0, 0, 1], [0, 0, 1], (3.0, 0.0, 3)),
    ([1, 0, 0], [0, 1, 0], (1.0, 0.0, 1))])
def test_n_step_returns_are_cut_at_the_end_of_the_episode(terminated, truncated, expected):
  """Rewards 1, 2, 4 and gamma 0.5; a return bootstraps after a truncation, not a termination."""
  outputs = n_step_return(jnp.array([1.0, 2.0, 4.0]), jnp.array(terminated, bool),
                                 jnp.array(truncated, bool), 0.5)
  assert tuple(float(x) for x in outputs) == pytest.approx(expected)


def test_the_first_priority_is_the_n_step_error_of_the_acting_values():
  """gamma 0.5; the second item ends after a step by a time limit, the third is terminated."""
  reward = np.float32([[1, 1, 1], [2, 9, 9], [9, 9, 9]])
  terminated = np.array([[0, 0, 1], [0, 0, 0], [0, 0, 0]], bool)
  truncated = np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0]], bool)
  value = np.float32([[99, 99, 99], [99, 4, 99], [8, 99, 99]])
  action_value = np.float32([[3, 5, 7], [99, 99, 99], [99, 99, 99]])
  rows = Rollout(None, None, {'value': value, 'action_value': action_value}, reward, terminated,
                 truncated, ~truncated, None)
  expected = [1 + 0.5 * 2 + 0.25 * 8 - 3, abs(1 + 0.5 * 4 - 5), 7 - 1]
  assert_array_equal(n_step_priority(rows, 0.5), expected)


CONTINUOUS = EnvSpec('Test-v0', (5,), np.dtype(np.float32), 0, (-1.0, -1.0), (1.0, 1.0), 1, 0)
DISCRETE = CONTINUOUS._replace(num_actions=3, action_low=(), action_high=())


def _transitions(rng, count, obs, action):
  return Transition(
      rng.normal(size=(count, obs)).astype(np.float32), action,
      rng.normal(size=count).astype(np.float32),
      rng.choice([0.0, 0.97], count).astype(np.float32),
      rng.normal(size=(count, obs)).astype(np.float32))


def _states(algorithm):
  """Returns a state as losses get it, with a target network of other weights; its parameters."""
  params, target = (algorithm.init(jax.random.key(i)) for i in range(2))
  return TrainState(params, None, None, 0, None, Target(target, jnp.int32(0))), params, target


COUNT = 24.0  # transitions of the whole batch, of which a loss gets six


def test_dqn_gradient_is_the_one_of_the_weighted_loss():
  rng = np.random.default_rng(0)
  algorithm = bound(losses.DQN(), spec=DISCRETE, torso=networks.MLP((4, 4)))
  network = algorithm.network
  state, params, target = _states(algorithm)
  batch = _transitions(rng, 6, 5, rng.integers(0, 3, 6).astype(np.int32))
  weight = rng.random(6).astype(np.float32)
  gradient, aux = algorithm.gradient(state, Batch(batch, None, weight, COUNT, None), None)

  def q(params, obs):
    return np.asarray(network.apply(params, obs[None])[0][0], np.float64)
  chosen = q(params, batch.next_obs).argmax(axis=1)
  td_target = batch.reward + batch.discount * q(target, batch.next_obs)[np.arange(6), chosen]

  def td_error(params):
    return td_target - q(params, batch.obs)[np.arange(6), batch.action]

  def expected(params):
    return float(np.sum(weight * td_error(params) ** 2) / 2)
  assert float(aux.terms['loss']) == pytest.approx(expected(params), rel=1e-5)
  assert aux.valid == 6
  assert_allclose(aux.priority, np.abs(td_error(params)), rtol=1e-5)
  flat, unravel = jax.flatten_util.ravel_pytree(params)
  checked = slice(0, None, 7)  # every seventh parameter
  numeric = numeric_gradient(lambda x: expected(unravel(flat.at[checked].set(x))), flat[checked],
                             step=1e-2)
  # The two streams' gradients are scaled where they meet (1511.06581, section 4.2).
  scale = {'params': {name: jax.tree.map(
      lambda x, name=name: jnp.full_like(x, 2 ** -0.5 if name == 'torso' else 1.0), part)
      for name, part in params['params'].items()}}
  numeric = numeric * jax.flatten_util.ravel_pytree(scale)[0][checked]
  computed = COUNT * jax.flatten_util.ravel_pytree(gradient)[0][checked]
  assert_allclose(computed, numeric, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize('importance_weights', ['both', 'critic'])
def test_dpg_losses_train_each_network_alone(importance_weights):
  """The critic descends its TD loss; the policy's clipped gradient flows through its action."""
  rng = np.random.default_rng(1)
  clip = 1e-3  # below most slopes of a fresh critic
  algorithm = bound(losses.DPG(dqda_clip=clip, importance_weights=importance_weights),
                    spec=CONTINUOUS,
                    torso=q_networks.Deterministic(None, (8,), (8, 8)))
  network = algorithm.network
  state, params, target = _states(algorithm)
  batch = _transitions(rng, 6, 5, rng.uniform(-1, 1, (6, 2)).astype(np.float32))
  weight = rng.random(6).astype(np.float32)
  gradient, aux = algorithm.gradient(state, Batch(batch, None, weight, COUNT, None), None)

  def q(params, obs, action):
    return network.apply(params, obs, action, method='criticise')
  def critic_loss(params):
    next_q = q(target, batch.next_obs, network.apply(target, batch.next_obs, method='act'))
    td_target = batch.reward + batch.discount * next_q
    return jnp.sum(weight * (td_target - q(params, batch.obs, batch.action)) ** 2) / 2
  def act(params):
    return network.apply(params, batch.obs, method='act')
  slope = np.array([jax.grad(lambda a, o=o: q(params, o[None], a[None])[0])(a)
                    for o, a in zip(batch.obs, act(params), strict=True)])
  assert (np.abs(slope) > clip).any() and (np.abs(slope) < clip).any()
  of_policy = weight[:, None] if importance_weights == 'both' else 1.0
  by_action = -jnp.asarray(of_policy * np.clip(slope, -clip, clip))
  of_policy = jax.vjp(act, params)[1](by_action)[0]['params']
  of_critic = jax.grad(critic_loss)(params)
  flat, unravel = jax.flatten_util.ravel_pytree(params)
  checked = slice(0, None, 7)  # every seventh parameter
  numeric = numeric_gradient(lambda x: float(critic_loss(unravel(flat.at[checked].set(x)))),
                             flat[checked], step=1e-2)
  assert_allclose(jax.flatten_util.ravel_pytree(of_critic)[0][checked], numeric, rtol=0.02,
                  atol=1e-3)
  numeric = numeric_gradient(
      lambda x: float(jnp.sum(q(params, batch.obs, jnp.float32(x)))), act(params), step=1e-2)
  assert_allclose(slope, numeric, rtol=0.02, atol=1e-3)
  for name, part in gradient['params'].items():
    is_critic = name.startswith(('_critic', '_value'))
    expected = of_critic['params'] if is_critic else of_policy
    jax.tree.map(lambda a, b: assert_allclose(COUNT * a, b, rtol=1e-4, atol=1e-6), part,
                 expected[name])


def adam_steps(gradients, norms, b1=0.9, b2=0.999, eps=1e-8):
  """Returns Adam's steps for gradients that were clipped to a norm of 1, given their norms."""
  mean = square = 0.0
  steps = []
  for i, (gradient, norm) in enumerate(zip(gradients, norms, strict=True), 1):
    clipped = gradient / max(norm, 1.0)
    mean = b1 * mean + (1 - b1) * clipped
    square = b2 * square + (1 - b2) * clipped**2
    steps.append(mean / (1 - b1**i) / (np.sqrt(square / (1 - b2**i)) + eps))
  return steps


@pytest.mark.parametrize('separate', [True, False])
def test_dpg_optimizes_its_networks_separately(separate):
  """1803.00933, section 3.2: two clips and two rates; one optimizer clips both together."""
  optimizer = optimizers.Adam(learning_rate=1.0, anneal=False, max_grad_norm=1.0, eps=1e-8)
  rate = 0.5 if separate else 1.0
  algorithm = bound(losses.DPG(separate_optimizers=separate, critic_rate=rate), spec=CONTINUOUS,
                    torso=q_networks.Deterministic(None, (3,), (4, 5)), optimizer=optimizer)
  params = algorithm.init(jax.random.key(0))
  networks_of = jax.tree.leaves(algorithm.networks_of(params))
  layers = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  assert [('_critic' in name or '_value' in name) for name in layers] == [
      name == 'critic' for name in networks_of]

  rng = np.random.default_rng(0)
  gradients = [jax.tree.map(lambda x, scale=scale: scale * rng.normal(size=x.shape).astype(
      np.float32), params) for scale in (0.1, 3.0, 0.01)]
  state = algorithm.optimizer.init(params)
  steps = []
  for gradient in gradients:
    step, state = algorithm.optimizer.update(gradient, state, params)
    steps.append(jax.tree.leaves(step))

  def norms(name):
    return [np.sqrt(sum(np.square(x).sum() for x, of in zip(
        jax.tree.leaves(gradient), networks_of, strict=True) if not separate or of == name))
        for gradient in gradients]
  assert not np.allclose(norms('actor'), norms('critic')) or not separate
  for i, name in enumerate(networks_of):
    expected = adam_steps([jax.tree.leaves(gradient)[i] for gradient in gradients], norms(name))
    factor = rate if name == 'critic' else 1.0
    for step, number in zip(steps, expected, strict=True):
      assert_allclose(step[i], factor * number, rtol=2e-4, atol=1e-6)


class AllAtOnce(q_networks.Deterministic):
  """A policy that reads its critic, so its parameters are those of both."""

  def act(self, obs):
    action = super().act(obs)
    return action + 0 * self.criticise(obs, action)[:, None]


def test_dpg_cannot_tell_the_critic_of_a_network_whose_policy_reads_all_of_it():
  parts = dict(spec=CONTINUOUS, torso=AllAtOnce(None, (3,), (4, 5)))
  with pytest.raises(ValueError, match=r'^loss\.separate_optimizers: .*; must be False'):
    bound(losses.DPG(), **parts).state_shapes  # noqa: B018 - computed, and kept
  assert bound(losses.DPG(separate_optimizers=False), **parts).state_shapes.opt_state


def test_dpg_with_one_optimizer_has_one_rate():
  assert not list(losses.DPG(critic_rate=0.5).problems())
  assert list(losses.DPG(critic_rate=0.5, separate_optimizers=False).problems()) == [
      'critic_rate: with separate_optimizers = False both networks have one rate; must be 1.0, '
      'got 0.5']


@pytest.mark.parametrize('clip', [0.0, schedules.parse('linear:0.1:0'),
                                  schedules.parse('piecewise:0.1:0.5=0')])
def test_a_smooth_clip_is_never_0(clip):
  """Ratios are divided by it, so a schedule must not reach 0 either."""
  assert list(losses.PPO(clip=clip, clip_smoothly=True).problems()) == [
      'clip: with loss.clip_smoothly it must be above 0, got 0']
  assert not list(losses.PPO(clip=clip).problems())


def test_dueling_subtracts_the_mean_advantage():
  """1511.06581, equation 9, computed from the outputs of the two streams."""
  network = q_networks.dueling(networks.MLP((4, 6)), policies.epsilon_greedy(3))
  params = network.init(jax.random.key(0), jnp.zeros((1, 1, 5)))
  obs = np.random.default_rng(2).normal(size=(2, 3, 5)).astype(np.float32)
  w = jax.tree.map(np.asarray, params['params'])
  def dense(x, name):
    return x @ w[name]['kernel'] + w[name]['bias']
  x = np.tanh(obs.reshape(6, 5) @ w['torso']['Dense_0']['kernel'] + w['torso']['Dense_0']['bias'])
  value, advantage = (dense(np.maximum(dense(x, f'{name}_hidden'), 0), name)
                      for name in ('value', 'advantage'))
  expected = (value + advantage - advantage.mean(axis=1, keepdims=True)).reshape(2, 3, 3)
  q, best, _ = network.apply(params, obs)
  assert_allclose(q, expected, atol=1e-5)
  assert_allclose(best, expected.max(axis=-1), atol=1e-5)
  assert w['value_hidden']['kernel'].shape == (4, 6)


@pytest.mark.parametrize('algorithm, spec, torso, most', [
    (losses.DQN(), DISCRETE, networks.MLP((4,)), 1.0),
    (losses.DPG(), CONTINUOUS, q_networks.Deterministic(None, (4,), (4, 4)), 0.5)])
def test_acting_explores_as_told_and_gives_the_values_of_its_actions(algorithm, spec, torso, most):
  """Priorities need the value of the action that was taken, and the one of the best action."""
  algorithm = bound(algorithm, spec=spec, torso=torso)
  params = algorithm.init(jax.random.key(0))
  obs = np.random.default_rng(3).normal(size=(64, 5)).astype(np.float32)

  def act(exploration, key):
    return algorithm.act(params, obs, None, np.ones(64, bool), key, exploration)
  key = jax.random.key(4)
  best = act(None, key)
  assert_array_equal(act(None, None).action, best.action)  # a greedy evaluation has no key
  assert_array_equal(act(jnp.zeros(64), key).action, best.action)
  explored = act(jnp.full(64, most), key)
  assert (explored.action != best.action).any()
  assert_array_equal(explored.distribution, best.distribution)
  assert_array_equal(explored.extras['value'], best.extras['action_value'])
  if spec is DISCRETE:
    expected = explored.distribution[np.arange(64), explored.action]
  else:
    expected = algorithm.network.apply(params, obs, explored.action, method='criticise')
  assert_allclose(explored.extras['action_value'], expected, rtol=1e-6)


def test_epsilon_greedy_explores_with_the_given_probability():
  policy = policies.epsilon_greedy(4)
  q = jnp.tile(jnp.array([0.0, 3.0, 1.0, 2.0]), (3, 1))
  keys = jax.random.split(jax.random.key(0), 20_000)
  drawn = np.asarray(jax.vmap(lambda k: policy.explore(k, q, jnp.array([0.0, 0.2, 1.0])))(keys))
  best = (drawn == 1).mean(axis=0)
  assert best[0] == 1.0
  assert_allclose(best[1:], [0.8 + 0.2 / 4, 1 / 4], atol=0.015)
  assert_allclose(np.bincount(drawn[:, 2]) / len(drawn), 1 / 4, atol=0.015)
  assert (policy.sample(keys[0], q) == 1).all()


def test_a_deterministic_policy_adds_noise_of_the_given_deviation():
  policy = policies.deterministic(np.array([0.0], np.float32), np.array([4.0], np.float32))
  keys = jax.random.split(jax.random.key(0), 20_000)
  drawn = np.asarray(jax.vmap(
      lambda k: policy.explore(k, jnp.array([[0.5], [0.5]]), jnp.array([0.0, 0.1])))(keys))[..., 0]
  assert (drawn[:, 0] == 0.5).all()
  assert drawn[:, 1].mean() == pytest.approx(0.5, abs=0.005)
  assert drawn[:, 1].std() == pytest.approx(0.1, rel=0.03)
  clipped = jax.vmap(lambda k: policy.explore(k, jnp.ones((1, 1)), jnp.array([0.3])))(keys)
  assert clipped.max() == 1.0
  assert_array_equal(policy.to_env(jnp.array([-1.0, 0.0, 1.0])), [0.0, 2.0, 4.0])


APEX = {  # 1803.00933: section 4.1, appendices C and D, and values that are missing in its text
    apex_dqn_atari: {
        'loss.discount': 0.99, 'loss.n_step': 3, 'loss.target_every': 2500, 'loss.epsilon': 0.4,
        'loss.epsilon_alpha': 7.0, 'optimizer.name': 'centred_rmsprop',
        'optimizer.learning_rate': 0.00025 / 4, 'optimizer.decay': 0.95, 'optimizer.eps': 1.5e-7,
        'optimizer.max_grad_norm': 40.0, 'optimizer.anneal': False, 'replay.capacity': 2_000_000,
        'replay.min_size': 50_000, 'replay.batch_size': 512, 'replay.priority_exponent': 0.6,
        'replay.importance_exponent': 0.4, 'replay.eviction': 'fifo', 'replay.evict_every': 100,
        'replay.copies': 1, 'scheme': 'apex', 'env.num_envs': 360,
        'env.max_episode_steps': 12_500, 'network.hidden': 512},
    apex_dpg_dmc: {
        'loss.n_step': 5, 'loss.target_every': 100, 'loss.noise': 0.3, 'loss.dqda_clip': 1.0,
        'network.actor_hidden': (300, 200), 'network.critic_hidden': (400, 300),
        'loss.separate_optimizers': True, 'loss.importance_weights': 'both',
        'loss.critic_rate': 1.0, 'optimizer.name': 'adam', 'optimizer.learning_rate': 1e-4,
        'optimizer.anneal': False, 'optimizer.max_grad_norm': 40.0, 'replay.capacity': 1_000_000,
        'replay.batch_size': 256, 'replay.priority_exponent': 0.6,
        'replay.importance_exponent': 0.4,
        'replay.eviction': 'prioritised', 'replay.eviction_exponent': -0.4, 'scheme': 'apex',
        'env.num_envs': 64}}


@pytest.mark.parametrize('module', APEX, ids=lambda module: module.__name__.split('.')[-1])
def test_configs_have_the_papers_values(module):
  config = module.get_config()
  for field, value in APEX[module].items():
    configured = config
    for part in field.split('.'):
      configured = configured[part]
    assert configured == value, field
  # Parameters every 400 frames of an environment (4 a step on Atari).
  steps = config.replay.params_every * config.unroll_length
  assert steps == 100
