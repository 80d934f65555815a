"""Action masks: which parts are masks, distributions and values under them, and whole runs."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces as gymnasium_spaces
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit import testing
from podracer_jit.agents import action_masks, networks, policies, q_networks
from podracer_jit.envs import envpool_envs, spaces
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.experiment.resolve import resolve
from podracer_jit.losses.algorithm import Batch
from podracer_jit.losses.dqn import DQN
from podracer_jit.losses.impala import IMPALA
from podracer_jit.losses.ppo import PPO
from podracer_jit.losses.pqn import PQN
from podracer_jit.losses.r2d2 import R2D2
from podracer_jit.play import evaluation
from podracer_jit.types import Rollout, Target, TrainState, Transition
from tests.envs import masked
from tests.runs import changed, contents, prepared, run, small, train
from tests.tiers import essential

Box, Dict, Tuple = (getattr(gymnasium_spaces, name) for name in ('Box', 'Dict', 'Tuple'))
HERE = 'tests.envs.masked:'


def spec_of(space, num_actions=0, choices=()):
  """Returns the spec of a task with these observations, as a family makes it."""
  shape, dtype, parts = spaces.layout('Any-v0', space)
  return EnvSpec('Any-v0', shape, dtype, num_actions, (), (), 1, 0, parts=parts,
                 channels_last=spaces.is_channels_last(shape), action_choices=choices)


def bits(*shape, dtype=np.int8):
  return Box(0, 1, shape, dtype)


HINT = Box(-1, 1, (2,), np.float32)
FLAT = dict(hint=HINT, action_mask=bits(4))


# Which part is the mask.


@pytest.mark.parametrize('space, choices, name, place', [
    (FLAT, (4,), 'action_mask', (0, 4)),
    (dict(hint=HINT, action_mask=bits(4, dtype=bool)), (4,), 'action_mask', (0, 4)),
    (dict(hint=HINT, action_mask=gymnasium_spaces.MultiBinary(4)), (4,), 'action_mask', (0, 4)),
    (dict(hint=HINT, legal=bits(4)), (4,), 'legal', (2, 6)),
    (dict(hint=HINT, inner=Dict(legal=bits(4), more=HINT)), (4,), 'inner/legal', (2, 6)),
    (dict(hint=HINT, action_mask=Tuple([bits(2), bits(3)])), (2, 3), 'action_mask', (0, 5)),
    (dict(hint=HINT, action_mask=bits(5)), (2, 3), 'action_mask', (0, 5)),
    (dict(hint=HINT, action_mask=bits(3, 2)), (2, 2, 2), 'action_mask', (0, 6)),
    (dict(hint=HINT, action_mask=Tuple([bits(2)] * 12)), (2,) * 12, 'action_mask', (0, 24)),
])
def test_a_part_is_the_mask(space, choices, name, place):
  one = len(choices) == 1
  spec = spec_of(Dict(space), choices[0] if one else 0, () if one else choices)
  mask = action_masks.find(spec, name).action_mask
  assert (mask.start, mask.start + mask.size) == place and mask.name == name


def test_a_task_without_the_part_of_the_default_name_has_no_mask():
  spec = spec_of(Dict(hint=HINT, mask=bits(4)), 4)
  assert action_masks.find(spec, 'action_mask', is_optional=True) is spec
  assert action_masks.find(spec_of(Dict(FLAT), 4), '').action_mask is None
  assert action_masks.seen(spec) is spec
  network = networks.MLP()
  assert action_masks.masked(network, spec) is network
  obs = jnp.ones((2, 6))
  assert action_masks.split(obs, spec) == (obs, None)


CONTINUOUS = spec_of(Dict(FLAT))._replace(action_low=(-1.0,), action_high=(1.0,))


@pytest.mark.parametrize('spec, name, message', [
    (spec_of(Dict(FLAT), 4), 'legal',
     r"have no part 'legal'; their parts are action_mask, hint"),
    (spec_of(Dict(FLAT), 4), 'action', r"have no part 'action'; their parts are action_mask, hint"),
    (spec_of(HINT, 4), 'legal', r"have no part 'legal'; they are a single array"),
    (spec_of(Dict(FLAT), 5), 'action_mask',
     r'action_mask of the observations of Any-v0 is \(4,\); actions are 5 choices, so a mask must '
     r"be \(5,\); if it is no mask, env.action_mask must be ''"),
    (spec_of(Dict(FLAT), 0, (2, 3)), 'action_mask',
     r'is \(4,\); actions are 2 x 3 choices, so a mask must be a tuple of \(2,\), \(3,\), one for'),
    (spec_of(Dict(hint=HINT, action_mask=bits(4, 10)), 0, (4, 10)), 'action_mask',
     r'is \(4, 10\); actions are 4 x 10 choices, so'),
    (spec_of(Dict(hint=HINT, action_mask=Tuple([bits(3), bits(2)])), 0, (2, 3)), 'action_mask',
     r'is \(3,\), \(2,\); actions'),
    # The order of a dict is that of its names.
    (spec_of(Dict(hint=HINT, action_mask=Dict(b=bits(2), a=bits(2))), 0, (2, 2)), 'action_mask',
     r'is \(2,\), \(2,\); actions are 2 x 2 choices, so a mask must be a tuple'),
    (spec_of(Dict(hint=HINT, action_mask=Box(0, 1, (4,), np.float32)), 4), 'action_mask',
     r'is float32; a mask must be int8 or bool'),
    (spec_of(Tuple([bits(2), bits(3)]), 5), '0', r'is \(2,\); actions are 5'),
    (CONTINUOUS, 'action_mask', r'cannot mask actions, which are continuous; if it is no mask'),
])
def test_what_cannot_be_the_mask_is_refused_in_words(spec, name, message):
  with pytest.raises(ValueError, match=f'^env.action_mask: .*{message}') as error:
    action_masks.find(spec, name)
  assert '\n' not in str(error.value)


def test_a_mask_alone_is_refused():
  spec = spec_of(Dict(action_mask=Tuple([bits(2), bits(3)])), 0, (2, 3))
  with pytest.raises(ValueError, match='is the whole observation, so the network would see nothi'):
    action_masks.find(spec, 'action_mask')


# What the network sees.


@pytest.mark.parametrize('others', [
    dict(hint=HINT), dict(hint=HINT, a=gymnasium_spaces.Discrete(3)),
    dict(hint=HINT, zebra=bits(2)), dict(a=bits(3), zebra=bits(2)), dict(a=bits(3, dtype=bool)),
    dict(a=Box(0, 255, (9, 9, 3), np.uint8)), dict(zebra=Box(0, 255, (3, 9, 9), np.uint8)),
    dict(a=Box(0, 255, (9, 9, 3), np.uint8), n=HINT, zebra=gymnasium_spaces.Discrete(2)),
    dict(a=Box(-9, 9, (3,), np.int64)), dict(a=gymnasium_spaces.Discrete(7))])
@pytest.mark.parametrize('name', ['action_mask', 'mask', 'zz'])
def test_a_network_sees_what_it_would_see_without_the_mask(others, name):
  """Compares with the layout of the observation that lacks the part."""
  rng = np.random.default_rng(1)
  whole = Dict(others | {name: bits(4, dtype=bool)})
  without = Dict(others)
  spec = action_masks.find(spec_of(whole, 4), name)
  expected = spec_of(without, 4)
  if type(spaces.innermost(without)).__name__ == 'Discrete':
    expected = expected._replace(obs_dtype=np.dtype(bool))  # a one-hot vector is of bits
  assert action_masks.seen(spec) == expected

  whole.seed(0)
  samples = [whole.sample() for _ in range(5)]
  for sample in samples:
    sample[name] = np.array([True, *(rng.random(3) < 0.5)])
  flat = np.stack([spaces.observe_one(x, whole, spaces.leaves_of('', whole)) for x in samples])
  seen, legal = action_masks.split(jnp.asarray(flat)[:, None], spec)
  leaves = spaces.leaves_of('', without)
  rest = [{key: x for key, x in sample.items() if key != name} for sample in samples]
  assert seen.dtype == expected.obs_dtype
  assert_array_equal(seen[:, 0], [spaces.observe_one(x, without, leaves) for x in rest])
  assert_array_equal(legal[:, 0], [x[name] for x in samples])


def test_where_an_element_of_an_action_has_no_legal_choice_nothing_is_masked():
  spec = action_masks.find(spec_of(Dict(hint=HINT, action_mask=bits(5)), 0, (2, 3)), 'action_mask')
  mask = np.array([[1, 0, 0, 1, 1], [0, 0, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
  obs = np.concatenate([mask, np.ones((4, 2))], axis=1).astype(np.float32)
  legal = [[1, 0, 0, 1, 1], [1, 1, 0, 1, 1], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
  assert_array_equal(action_masks.split(jnp.asarray(obs), spec)[1], legal)
  stuck = [[False, False], [True, False], [False, True], [True, True]]
  assert_array_equal(action_masks.without_choice(obs, spec), stuck)
  assert_array_equal(action_masks.without_choice(jnp.asarray(obs), spec), stuck)


# Distributions.


CHOICES = (4, 3)
RNG = np.random.default_rng(2)
LOGITS = RNG.normal(scale=3, size=(6, sum(CHOICES))).astype(np.float32)
LEGAL = RNG.random(LOGITS.shape) < 0.4
LEGAL[:, [1, 5]] = True
MASKED = action_masks.restrict(jnp.asarray(LOGITS), LEGAL)


def chances(logits=LOGITS, legal=LEGAL):
  """Returns the probabilities of each element's choices in float64, 0 for illegal ones."""
  weights = np.where(legal, np.exp(logits.astype(np.float64)), 0.0)
  return [part / part.sum(axis=-1, keepdims=True)
          for part in np.split(weights, np.cumsum(CHOICES)[:-1], axis=-1)]


def legal_actions(row):
  return [a for a in np.ndindex(CHOICES)
          if LEGAL[row, a[0]] and LEGAL[row, CHOICES[0] + a[1]]]


def test_a_masked_categorical_has_the_probabilities_of_the_legal_actions():
  policy = policies.categorical(4)
  logits, chance = MASKED[:, :4], chances()[0]
  assert_array_equal(np.asarray(jax.nn.softmax(logits))[~LEGAL[:, :4]], 0)
  for action in range(4):
    actions = np.full(6, action, np.int32)
    legal = LEGAL[:, action]
    log_prob = np.asarray(policy.log_prob(logits, actions))
    assert np.isfinite(log_prob).all()
    assert_allclose(log_prob[legal], np.log(chance[legal, action]), rtol=1e-5, atol=1e-6)
    assert (log_prob[~legal] < -1e37).all()
  entropy = [-sum(p * np.log(p) for p in row if p) for row in chance]
  assert_allclose(policy.entropy(logits), entropy, rtol=1e-5)
  assert_array_equal(policy.mode(logits), chance.argmax(axis=-1))
  drawn = np.asarray(jax.vmap(lambda key: policy.sample(key, logits))(
      jax.random.split(jax.random.key(0), 20_000)))
  for action in range(4):
    frequency = (drawn == action).mean(axis=0)
    assert_allclose(frequency, chance[:, action], atol=0.02)
    assert_array_equal(frequency[~LEGAL[:, action]], 0)


def test_a_masked_product_has_the_probabilities_of_the_legal_actions():
  """Compares with a table of all twelve actions; a divergence is one between two sets of logits."""
  policy = policies.product_of_categoricals(CHOICES)
  other = action_masks.restrict(jnp.asarray(LOGITS[::-1]), LEGAL)
  first, second = chances(), chances(LOGITS[::-1])
  drawn = np.asarray(jax.vmap(lambda key: policy.sample(key, MASKED))(
      jax.random.split(jax.random.key(0), 20_000)))
  divergences = jax.nn.log_softmax
  kl = sum(jnp.sum(jnp.exp(divergences(p)) * (divergences(p) - divergences(q)), axis=-1)
           for p, q in zip(jnp.split(MASKED, [4], axis=-1), jnp.split(other, [4], axis=-1),
                           strict=True))
  mode = np.asarray(policy.mode(MASKED))
  for row in range(6):
    table = {a: first[0][row, a[0]] * first[1][row, a[1]] for a in legal_actions(row)}
    others = {a: second[0][row, a[0]] * second[1][row, a[1]] for a in table}
    assert_allclose(sum(table.values()), 1, rtol=1e-9)
    for action, p in table.items():
      assert_allclose(policy.log_prob(MASKED[row], np.int32(action)), np.log(p), rtol=1e-4,
                      atol=1e-5)
    assert_allclose(policy.entropy(MASKED[row]), -sum(p * np.log(p) for p in table.values()),
                    rtol=1e-4, atol=1e-6)
    assert_allclose(kl[row], sum(p * np.log(p / others[a]) for a, p in table.items()), rtol=1e-4,
                    atol=1e-5)
    assert tuple(mode[row]) == max(table, key=table.get)
    assert {tuple(a) for a in drawn[:, row]} <= table.keys()


def test_logits_of_illegal_actions_have_no_gradient_however_large_the_others_are():
  policy = policies.categorical(3)
  legal = np.array([True, False, True])
  for logits in ([1.0, 2.0, 3.0], [3e9, -3e9, 2e9], [-3e9, 3e9, -3e9]):
    def numbers(x):
      x = action_masks.restrict(x, legal)
      return policy.log_prob(x, jnp.int32(2)), policy.entropy(x)
    logits = jnp.float32(logits)
    jacobian = np.stack(jax.jacobian(numbers)(logits))
    assert np.isfinite(numbers(logits)).all() and np.isfinite(jacobian).all()
    assert_array_equal(jacobian[:, 1], 0)


@pytest.mark.parametrize('epsilon', [0.0, 0.6, 1.0])
def test_exploration_is_uniform_among_legal_actions(epsilon):
  spec = action_masks.find(spec_of(Dict(FLAT), 4), 'action_mask')
  policy = action_masks.among_legal(policies.epsilon_greedy(4), spec)
  values = MASKED[:, :4]
  drawn = np.asarray(jax.vmap(lambda key: policy.explore(key, values, jnp.full(6, epsilon)))(
      jax.random.split(jax.random.key(3), 40_000)))
  assert drawn.dtype == np.int32
  legal = LEGAL[:, :4]
  expected = epsilon * legal / legal.sum(axis=-1, keepdims=True)
  expected[np.arange(6), np.asarray(policy.mode(values))] += 1 - epsilon
  for action in range(4):
    frequency = (drawn == action).mean(axis=0)
    assert_allclose(frequency, expected[:, action], atol=0.012)
    assert_array_equal(frequency[~legal[:, action]], 0)


def test_a_policy_of_ones_own_that_explores_vectors_takes_legal_choices():
  spec = action_masks.find(spec_of(Dict(hint=HINT, action_mask=bits(7)), 0, CHOICES), 'action_mask')

  def explore(key, values, exploration):
    return jax.random.randint(key, (*exploration.shape, 2), 0, jnp.array(CHOICES))
  policy = action_masks.among_legal(
      policies.product_of_categoricals(CHOICES)._replace(explore=explore), spec)
  drawn = np.asarray(jax.vmap(lambda key: policy.explore(key, MASKED, jnp.ones(6)))(
      jax.random.split(jax.random.key(3), 20_000)))
  for row in range(6):
    legal = legal_actions(row)
    assert {tuple(a) for a in drawn[:, row]} == set(legal)
    for action in legal:
      assert_allclose((drawn[:, row] == action).all(axis=-1).mean(), 1 / len(legal), atol=0.015)


# Networks.


SPEC = action_masks.find(spec_of(Dict(FLAT), 4), 'action_mask')
OBS = np.concatenate([LEGAL[:, :4], RNG.normal(size=(6, 2))], axis=1).astype(np.float32)[None]
MLP = networks.MLP(hidden=(8,))


def layers(params, x):
  """Returns a dense layer of named parameters on x, in float64."""
  return x @ np.asarray(params['kernel'], np.float64) + np.asarray(params['bias'], np.float64)


def test_dueling_values_are_advantages_over_the_mean_of_legal_ones():
  """Compares with equation 9 by NumPy, over the legal actions of each row."""
  network = q_networks.dueling(MLP, policies.epsilon_greedy(4))
  params = network.init(jax.random.key(1), OBS[..., 4:])
  q, value, _ = action_masks.masked(network, SPEC).apply(params, OBS)
  named = params['params']
  x = OBS[0, :, 4:].astype(np.float64)
  streams = {name: layers(named[name], np.maximum(layers(named[f'{name}_hidden'], x), 0))
             for name in ('value', 'advantage')}
  for row in range(6):
    legal = LEGAL[row, :4]
    advantage = streams['advantage'][row, legal]
    expected = streams['value'][row] + advantage - advantage.mean()
    assert_allclose(q[0, row, legal], expected, rtol=1e-4, atol=1e-5)
    assert_allclose(value[0, row], expected.max(), rtol=1e-4, atol=1e-5)
    assert (np.asarray(q)[0, row, ~legal] == action_masks.lowest(np.float32)).all()

  def square(params):
    return jnp.sum(jnp.square(action_masks.masked(network, SPEC).apply(params, obs)[0][..., 1]))
  obs = OBS.copy()
  obs[..., :4] = [0, 1, 0, 1]
  gradient = jax.grad(square)(params)['params']['advantage']['kernel']
  assert_array_equal(gradient[:, [0, 2]], 0)
  assert np.any(gradient[:, [1, 3]] != 0)


@pytest.mark.parametrize('core', ['', 'gru'])
def test_the_largest_action_value_is_a_legal_one(core):
  network = q_networks.ActionValues(MLP, policies.epsilon_greedy(4), core=core, core_size=4)
  carry = network.initial_carry(6)
  arguments = carry, np.ones((1, 6), bool)
  params = network.init(jax.random.key(1), OBS[..., 4:], *arguments)
  all_values = np.asarray(network.apply(params, OBS[..., 4:], *arguments)[0][0])
  q, value, after = action_masks.masked(network, SPEC).apply(params, OBS, *arguments)
  expected = [row[legal].max() for row, legal in zip(all_values, LEGAL[:, :4], strict=True)]
  assert_array_equal(value[0], np.float32(expected))
  assert_array_equal(q[0], np.where(LEGAL[:, :4], all_values, action_masks.lowest(np.float32)))
  assert jax.tree.structure(after) == jax.tree.structure(carry)


@pytest.mark.parametrize('loss, fields', [
    ('ppo', {}), ('ppo', dict(network__core='gru', network__core_size=8)),
    ('ppo', dict(network__separate_critic=True, normalise__obs=True)), ('dqn', {}), ('pqn', {}),
    ('r2d2', dict(network__core='lstm', network__core_size=8))])
def test_first_parameters_are_those_of_the_task_without_the_mask(loss, fields):
  """So the network has no weights for the mask, and weights are drawn and named alike."""
  config = changed(small(loss, f'{HERE}Doors'), num_minibatches=1, **fields)
  algorithm = resolve(config).algorithm
  spec = action_masks.seen(algorithm.parts.spec)
  plain = algorithm.bind(algorithm.parts._replace(spec=spec))
  params, expected = (each.init(jax.random.key(0)) for each in (algorithm, plain))
  assert jax.tree.structure(params) == jax.tree.structure(expected)
  assert jax.tree.all(jax.tree.map(np.array_equal, params, expected))


class Constant(nn.Module):
  """Network that returns an array in place of a tuple."""

  size: int

  @nn.compact
  def __call__(self, obs):
    """Returns [T, N, size]."""
    return nn.Dense(self.size)(obs)


def test_a_network_of_ones_own_is_masked_and_must_return_a_number_for_each_choice():
  network = action_masks.masked(Constant(4), SPEC)
  params = network.init(jax.random.key(0), OBS)
  assert params['params']['Dense_0']['kernel'].shape == (2, 4)
  assert_array_equal(np.asarray(network.apply(params, OBS))[0] == action_masks.lowest(np.float32),
                     ~LEGAL[:, :4])
  other = action_masks.masked(Constant(3), SPEC)
  with pytest.raises(ValueError, match=r'env.action_mask masks 4 choices, so the network must ret'
                     r'urn \(1, 6, 4\) first, a number for each choice; it returns \(1, 6, 3\)'):
    other.apply(other.init(jax.random.key(0), OBS), OBS)


# Losses.


def algorithm_of(loss, **fields):
  config = changed(small(loss, f'{HERE}Doors'), num_minibatches=1, **fields)
  return resolve(config).algorithm


def observations(rows, envs, size=5, seed=4):
  """Returns observations [rows, envs, D] of doors, their masks, and legal actions."""
  rng = np.random.default_rng(seed)
  legal = rng.random((rows, envs, size)) < 0.5
  legal[..., 2] = True
  obs = np.concatenate([legal, rng.normal(size=(rows, envs, size))], axis=-1).astype(np.float32)
  action = np.array([[rng.choice(np.flatnonzero(x)) for x in row] for row in legal], np.int32)
  return obs, legal, action


def moved(params):
  """Returns parameters away from the first ones, which may be equal for all actions."""
  rng = np.random.default_rng(8)
  return jax.tree.map(lambda x: x + np.float32(0.4) * rng.normal(size=x.shape).astype(np.float32),
                      params)


def raw_values(algorithm, params, obs):
  """Returns the values [..., A] that the inner network gives, without a mask of the maximum."""
  seen, legal = action_masks.split(jnp.asarray(obs), algorithm.parts.spec)
  others = {} if isinstance(algorithm, PQN) else dict(legal=legal)
  return np.asarray(algorithm.make_network().apply(params, seen, **others)[0], np.float64)


def test_double_q_learning_selects_among_legal_actions():
  algorithm = algorithm_of('dqn')
  assert isinstance(algorithm, DQN)
  params = moved(algorithm.init(jax.random.key(0)))
  target = moved(algorithm.init(jax.random.key(1)))
  (obs, _, action), (next_obs, legal, _) = (observations(1, 40, seed=seed) for seed in (4, 5))
  reward = RNG.normal(size=40).astype(np.float32)
  discount = np.where(np.arange(40) % 5 == 0, 0, 0.9).astype(np.float32)
  next_obs[0, ::5, :5] = 0  # terminal observations, without legal actions
  transition = Transition(obs[0], action[0], reward, discount, next_obs[0])
  batch = Batch(transition, None, jnp.ones(40), jnp.float32(40), None)
  state = TrainState(params, None, None, None, None, Target(target, None))
  loss, aux = algorithm.loss(params, state, batch, None)

  q = raw_values(algorithm, params, obs)[0]
  select = np.where(legal[0], raw_values(algorithm, params, next_obs)[0], -np.inf)
  value = raw_values(algorithm, target, next_obs)[0]
  bootstrap = discount * value[np.arange(40), select.argmax(axis=-1)]
  error = reward + bootstrap - q[np.arange(40), action[0]]
  assert_allclose(loss, 0.5 * np.mean(error ** 2), rtol=1e-4)
  assert_allclose(aux.priority, np.abs(error), rtol=1e-3, atol=1e-5)
  unmasked = raw_values(algorithm, params, next_obs)[0].argmax(axis=-1)
  assert (unmasked != select.argmax(axis=-1))[discount > 0].sum() > 5  # so the mask matters


def test_values_of_an_action_that_is_never_legal_do_not_matter_to_r2d2():
  algorithm = algorithm_of('r2d2', network__core='gru', network__core_size=4, loss__burn_in=2,
                           loss__trace_length=5, loss__n_step=2)
  obs, _, action = observations(9, 6)
  obs[..., 0] = 0
  action[action == 0] = 2  # which is always legal
  truncated = RNG.random((8, 6)) < 0.1
  valid = np.concatenate([np.ones((1, 6), bool), ~truncated[:-1]])
  carry = RNG.normal(size=(1, 6, 4)).astype(np.float32)
  rows = Rollout(obs, action[:8], None, RNG.normal(size=(8, 6)).astype(np.float32),
                 np.zeros((8, 6), bool), truncated, valid, None, carry=carry)
  batch = Batch(rows, None, jnp.ones(6), jnp.float32(6), None)
  networks_params = [moved(algorithm.init(jax.random.key(i))) for i in range(2)]

  def results(number, networks_params):
    biased = [jax.tree.map(lambda x: x, params) for params in networks_params]
    for params in biased:
      advantage = params['params']['advantage']
      advantage['bias'] = advantage['bias'].at[number].add(100.0)
    params, target = biased
    loss, aux = algorithm.loss(params, TrainState(params, None, None, None, None,
                                                  Target(target, None)), batch, None)
    return [loss, *aux.priority]

  expected = results(slice(0), networks_params)
  assert_allclose(results(0, networks_params), expected, rtol=1e-5)
  assert not np.allclose(results(1, networks_params), expected, rtol=1e-2)


def test_lambda_returns_of_pqn_are_of_the_largest_legal_values():
  algorithm = algorithm_of('pqn')
  params = moved(algorithm.init(jax.random.key(0)))
  obs, legal, action = observations(8, 6)
  done = np.zeros((7, 6), bool)
  done[3, ::2] = True
  obs[4, ::2, :5] = 0  # the last observations of these episodes
  reward = RNG.normal(size=(7, 6)).astype(np.float32)
  rollout = Rollout(jnp.asarray(obs), action[:-1], None, reward, done, np.zeros_like(done),
                    np.concatenate([np.ones((1, 6), bool), ~done[:-1]]), None)
  state = TrainState(params, None, None, None, None)
  value = np.where(legal, raw_values(algorithm, params, obs), -np.inf).max(axis=-1)
  expected = np.zeros((7, 6))
  later = value[-1]
  for t in reversed(range(7)):
    mixed = np.where(done[t], value[t + 1], 0.35 * value[t + 1] + 0.65 * later)
    expected[t] = later = reward[t] + np.where(done[t], 0, 0.99 * mixed)
  targets = algorithm.targets(state, rollout)
  assert_allclose(targets, expected, rtol=1e-4, atol=1e-5)


def gradient_of(algorithm, loss_of, params):
  """Returns the gradients of the head's kernel [F, A] and bias [A]."""
  head = jax.grad(loss_of)(params)['params'][
      'policy' if isinstance(algorithm, PPO | IMPALA) else 'q']
  assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), head))
  return np.asarray(head['kernel']), np.asarray(head['bias'])


@pytest.mark.parametrize('loss', ['ppo', 'impala', 'pqn'])
def test_no_gradient_reaches_the_outputs_of_actions_that_are_never_legal(loss):
  algorithm = algorithm_of(loss)
  params = moved(algorithm.init(jax.random.key(0)))
  obs, _, _ = observations(5, 6)
  obs[..., :5] = [1, 0, 1, 0, 1]
  obs[2, 0, :5] = 0  # the last one of an episode
  action = np.where(np.arange(24).reshape(4, 6) % 2, 0, 4).astype(np.int32)
  valid = np.ones((4, 6), bool)
  valid[2, 0] = False
  done = np.zeros((4, 6), bool)
  done[1, 0] = True
  extras = {'log_prob': np.full((4, 6), -1.0, np.float32), 'value': np.zeros((4, 6), np.float32)}
  rollout = Rollout(jnp.asarray(obs), action, extras, np.ones((4, 6), np.float32), done,
                    np.zeros_like(done), valid, None)
  state = TrainState(params, None, None, None, None)
  if loss == 'impala':
    batch = Batch(rollout, None, None, jnp.float32(23), None)
  else:
    targets = algorithm.targets(state, rollout)
    items = jax.tree.map(lambda x: x.reshape(1, 24, *x.shape[2:]),
                         rollout._replace(obs=jnp.asarray(obs[:-1])))
    targets = jax.tree.map(lambda x: x.reshape(1, 24), targets)
    statistics = algorithm.statistics(state, jnp.asarray(items.valid)[None], jax.tree.map(
        lambda x: x[None], targets))
    batch = Batch(items, targets, None, jnp.float32(23), statistics)
  kernel, bias = gradient_of(
      algorithm, lambda params: algorithm.loss(params, state, batch, None)[0], params)
  assert_array_equal(kernel[:, [1, 3]], 0)
  assert_array_equal(bias[[1, 3]], 0)
  assert np.all(bias[[0, 4]] != 0)


# Tasks of EnvPool.


@pytest.mark.parametrize('task, size, seen', [
    ('Game2048-v1', 4, (4, 4)), ('Cleaner-v0', 12, (207,)), ('Jumanji/TSP-v1', 20, (81,))])
def test_tasks_of_envpool_have_masks(task, size, seen):
  experiment = resolve(small('ppo', task))
  mask = experiment.spec.action_mask
  assert (mask.name, mask.start, mask.size) == ('action_mask', 0, size)
  assert action_masks.seen(experiment.spec).obs_shape == seen
  other = resolve(changed(small('ppo', task), env__action_mask=''))
  assert other.spec == envpool_envs.make_spec(task, {})


@pytest.mark.parametrize('environment', [masked.Doors, masked.PythonDoors])
@pytest.mark.parametrize('form', ['flat', 'rows', 'tuple'])
@pytest.mark.parametrize('dtype', ['int8', 'bool'])
def test_masks_have_one_layout_in_all_forms(environment, form, dtype):
  config = changed(small('ppo', HERE + environment.__name__), env__choices=(3, 3),
                   env__form=form, env__dtype=dtype)
  spec = resolve(config).spec
  assert (spec.action_mask.start, spec.action_mask.size) == (0, 6)
  assert action_masks.seen(spec).obs_shape == (6,)


# Runs.


def doors(loss, task='Doors', **fields):
  """Returns a config of a few updates in two groups; the replay learns from the second on."""
  config = small(loss, HERE + task, num_shards=2, num_grad_shards=2)
  if 'replay' in config:
    config['num_minibatches'] = 1
    config['replay'] |= dict(capacity=256, min_size=64, batch_size=32, gradient_steps=2)
  if loss == 'r2d2':
    config['loss'] |= dict(burn_in=2, trace_length=6, n_step=2)
    config['replay'] |= dict(capacity=32, min_size=16, batch_size=16)  # sequences
  return changed(config, **fields)


GRU = dict(network__core='gru', network__core_size=8)
PAIRS = dict(env__choices=(3, 4), env__form='tuple')
RUNS = {
    'ppo, a product in Python': ('ppo', 'PythonDoors', PAIRS),
    'dqn, JAX environments': ('dqn', 'Doors', dict(env__ends='truncated')),
    'ppo': ('ppo', 'Doors', dict(env__looks='several', normalise__obs=True)),
    'ppo, GRU, a product': ('ppo', 'Doors', PAIRS | GRU),
    'impala, LSTM': ('impala', 'Doors', GRU | dict(network__core='lstm')),
    'impala, rows of a product in Python': ('impala', 'PythonDoors', dict(
        env__choices=(3, 3), env__form='rows', env__dtype='bool')),
    'dqn, Python': ('dqn', 'PythonDoors', dict(loss__n_step=3)),
    'pqn': ('pqn', 'Doors', dict(loss__epsilon=0.5, env__looks='several')),
    'pqn, GRU, Python': ('pqn', 'PythonDoors', GRU),
    'V-MPO': ('examples.vmpo:VMPO', 'Doors', dict(num_minibatches=1)),
    'PPG': ('examples.ppg:PPG', 'Doors', dict(network__separate_critic=True)),
    'RND': ('examples.rnd:RND', 'Doors', dict(loss__embedding=8)),
    'r2d2': ('r2d2', 'Doors', GRU),
    'r2d2, Python': ('r2d2', 'PythonDoors', GRU)}


def check_legal(returns, lengths):
  """Checks that no action was illegal, which costs 100 and ends an episode."""
  assert len(returns) > 5 and min(returns) >= 0 and set(lengths) == {masked.LIMIT}


@pytest.mark.parametrize('name', essential(
    RUNS, 'ppo, a product in Python', 'dqn, JAX environments'))
@pytest.mark.same_bits('one program (`fused`) and several (`sync`), 2 devices and 1',
                       'PPO, IMPALA, DQN, PQN, R2D2, V-MPO, PPG, RND with action masks')
def test_runs_and_evaluations_take_legal_actions_with_the_same_bits_anywhere(name):
  loss, task, fields = RUNS[name]
  config = doors(loss, task, **fields)
  receipts, reports, state = run(config)
  assert len({params for _, params in receipts}) >= 5
  episodes = [jax.device_get(report.metrics['episodes']) for report in reports]
  check_legal(*(np.concatenate([getattr(each, field)[each.ended] for each in episodes])
                for field in ('episode_return', 'length')))

  prepared_run = prepared(config)
  acting = prepared_run.experiment.algorithm.acting(state)
  drawn = evaluation.make_player(prepared_run, acting, 6, 1)
  players = [drawn, drawn._replace(greedy=True)]
  if loss in ('dqn', 'pqn', 'r2d2'):
    players.append(evaluation.exploring(drawn, False, 0.5))
  for player in players:
    check_legal(*evaluation.play(player, evaluation.Settings(6, 3, seed=0, max_steps=100)))

  assert run(changed(config, scheme='fused', placement__actor_devices=(0,),
                     placement__learner_devices=(0,)))[0] == receipts
  assert run(changed(config, placement__actor_devices=(0, 1),
                     placement__learner_devices=(0, 1)))[0] == receipts


@pytest.mark.parametrize('name', essential(
    ['ppo, a product in Python', 'dqn, Python', 'dqn, JAX environments', 'pqn, GRU, Python',
     'r2d2, Python', 'V-MPO', 'PPG', 'RND'], 'dqn, Python'))
@pytest.mark.same_bits('stopped within a segment and at the end of one',
                       'PPO, DQN, PQN, R2D2, V-MPO, PPG, RND with action masks')
def test_a_run_that_was_stopped_goes_on_with_legal_actions(name, tmp_path):
  loss, task, fields = RUNS[name]
  config = changed(doors(loss, task, **fields), total_steps=600, log__tensorboard=False)
  prepared_run = prepared(config)
  assert prepared_run.experiment.env.renew_every_updates == 6
  for stop in (3, 6):
    assert not train(prepared_run, tmp_path / 'stopped', stop)
  for name in ('stopped', 'whole'):
    assert train(prepared_run, tmp_path / name)
  stopped, whole = (contents(tmp_path / name) for name in ('stopped', 'whole'))
  assert stopped == whole
  _, metrics, *_ = stopped
  assert len(metrics) > 9
  assert {line['episode_length'] for line in metrics} == {masked.LIMIT}  # none ended early


@pytest.mark.parametrize('loss', ['dqn', 'pqn', 'r2d2'])
def test_action_values_of_products_are_refused(loss):
  with pytest.raises(ValueError, match=f'^loss.name: {loss} wants '):
    resolve(doors(loss, **PAIRS))


@dataclasses.dataclass(frozen=True)
class IgnoresTheMask(IMPALA):
  """Its actions do not come from the network."""

  def act(self, params, obs, carry, valid, key, exploration):
    acted = super().act(params, obs, carry, valid, key, exploration)
    return acted._replace(action=jnp.full_like(acted.action, 2))


@pytest.mark.parametrize('algorithm, fields', essential([
    (DQN, {}), (PPO, PAIRS), (IMPALA, {}), (PQN, {}), (R2D2, GRU)], DQN))
def test_shipped_algorithms_pass_the_check_with_masks(algorithm, fields):
  name = algorithm.__name__.lower()
  assert testing.check(algorithm, doors(name, **fields))[2].endswith(' steps are legal')


def test_an_algorithm_that_takes_illegal_actions_does_not_pass_the_check():
  with pytest.raises(AssertionError, match='^act of .*IgnoresTheMask: takes the action 2, which '
                     'action_mask says is illegal; draw it from what self.network returns first$'):
    testing.check(IgnoresTheMask, doors('impala'))
