"""Gradients and updates compared with plain NumPy, and bit by bit between meshes."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.agents import networks, optimizers
from podracer_jit.agents.networks import Model
from podracer_jit.agents.policies import categorical
from podracer_jit.envs import frames
from podracer_jit.learner import rollout_updates
from podracer_jit.losses import ALGORITHMS
from podracer_jit.losses.objective import Objective
from podracer_jit.numerics import deterministic, fingerprints
from podracer_jit.types import Episodes, Rollout, TrainState
from tests import reference
from tests.envs.test_frames import make_stacks
from tests.runs import on_mesh
from tests.tiers import essential

ACTIONS = 3
POLICY = categorical(ACTIONS)
DISCOUNT = 0.9
OPTIONS = {
    'impala': dict(discount=DISCOUNT, vtrace_lambda=0.9, clip_rho=1.0, clip_pg_rho=1.0,
                   baseline_coef=0.5, entropy_coef=0.05),
    'ppo': dict(discount=DISCOUNT, gae_lambda=0.8, clip=0.1, clip_value=True, value_coef=0.5,
                entropy_coef=0.05, normalise_advantage=True, vtrace=False),
}
RMSPROP = optimizers.RMSProp(decay=0.99, eps=0.01, max_grad_norm=40.0, kl_target=0.0)
ADAM = optimizers.Adam(b1=0.9, b2=0.999, eps=1e-5, max_grad_norm=40.0, kl_target=0.0)
BY_ENV = PartitionSpec(None, deterministic.AXIS)


def make_rollout(seed, steps, num_envs, obs_shape=(5,), dtype=np.float32):
  """Returns random rows with all kinds of ends of episodes, as arrays of NumPy."""
  rng = np.random.default_rng(seed)
  ends = [reference.random_ends(rng, steps, carried=rng.random() < 0.3) for _ in range(num_envs)]
  terminated, truncated, valid = (np.stack(x, axis=1) for x in zip(*ends, strict=True))
  shape = (steps, num_envs)
  obs = rng.normal(size=(steps + 1, num_envs, *obs_shape))
  if dtype == np.uint8:
    obs = rng.integers(256, size=obs.shape)

  def normal():
    return rng.normal(size=shape).astype(np.float32)

  return Rollout(
      obs=obs.astype(dtype), action=rng.integers(ACTIONS, size=shape).astype(np.int32),
      behaviour_log_prob=np.log(rng.uniform(0.2, 0.5, size=shape)).astype(np.float32),
      behaviour_value=normal(), reward=np.where(valid, normal(), np.float32(0)),
      terminated=terminated, truncated=truncated, valid=valid,
      episodes=Episodes(terminated | truncated, normal(), np.ones(shape, np.int32)))


def make_network(name='mlp', **sizes):
  return networks.actor_critic(networks.TORSOS[name](**sizes), POLICY)


def make_objective(name, network, unroll_length, **options):
  algorithm = ALGORITHMS[name](**OPTIONS[name] | options)
  return Objective(algorithm, Model(network.apply, POLICY), unroll_length)


def make_params(network, obs, seed=0):
  """Returns weights and biases large enough to matter in every layer."""
  shapes = jax.eval_shape(network.init, jax.random.key(0), obs[:1])
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda s: rng.normal(size=s.shape, scale=1 / np.sqrt(s.shape[0] + 1)).astype(np.float32),
      shapes)


NETWORK = make_network(hidden=(6,))


@pytest.mark.parametrize('items, item_rows, microbatch_rows, expected', [
    (12, 1, 0, 1),  # no bound
    (12, 1, 12, 1), (12, 1, 11, 2), (12, 1, 5, 3), (12, 1, 1, 12),
    (12, 21, 64, 4),  # three sequences of 21 rows fit
    (12, 21, 20, 12),  # not even one sequence fits: one at a time
    (7, 1, 3, 7),  # 7 has no divisor that leaves at most 3
    (1, 21, 100, 1)])
def test_number_of_microbatches(items, item_rows, microbatch_rows, expected):
  assert rollout_updates.num_microbatches(items, item_rows, microbatch_rows) == expected


def _first_minibatch(groups, group_envs, objective, minibatches=2, seed=5):
  """Returns the elements that each group has in the first of `minibatches`, [groups, n]."""
  rng = np.random.default_rng(seed)
  count = group_envs * objective.elements_per_env
  order = rng.permutation if objective.algorithm.shuffles else np.arange
  return np.stack([order(count)[:count // minibatches] for _ in range(groups)]).astype(np.int32)


def _impala_expected(params, rollout, items, group_envs):
  """Returns the gradients by logits and by values of all T + 1 rows, and the loss terms."""
  options = OPTIONS['impala']
  logits, value = _outputs(params, rollout.obs)
  by_logits = np.zeros(logits.shape)
  by_value = np.zeros(value.shape)
  terms = []
  for group, envs in enumerate(items):
    for b in group * group_envs + envs:
      ends = rollout.terminated[:, b], rollout.truncated[:, b], rollout.valid[:, b]
      action = rollout.action[:, b]
      ratio = reference.ratios(logits[:-1, b], action, rollout.behaviour_log_prob[:, b])
      targets, advantages = reference.vtrace(
          value[:, b], rollout.reward[:, b], ratio, DISCOUNT, ends, options['vtrace_lambda'])
      coefs = options['baseline_coef'], options['entropy_coef']

      def loss(logits, value, constants=(action, targets, advantages, ends[2], *coefs)):
        return reference.impala_objective(logits, value, *constants)

      by_logits[:-1, b] = reference.numeric_gradient(
          lambda x, b=b, loss=loss: loss(x, value[:, b])[0], logits[:-1, b])
      by_value[:, b] = reference.numeric_gradient(
          lambda x, b=b, loss=loss: loss(logits[:-1, b], x)[0], value[:, b])
      parts = loss(logits[:-1, b], value[:, b])[1]
      terms.append(parts | {'rho': ratio[ends[2]].sum(), 'valid': ends[2].sum()})
  return by_logits, by_value, {name: sum(t[name] for t in terms) for name in terms[0]}


def _ppo_targets(params, rollout):
  _, value = _outputs(params, rollout.obs)
  value = np.concatenate([rollout.behaviour_value, value[-1:]])
  advantage = np.stack([
      reference.gae(value[:, b], rollout.reward[:, b], DISCOUNT, OPTIONS['ppo']['gae_lambda'],
                    (rollout.terminated[:, b], rollout.truncated[:, b], rollout.valid[:, b]))
      for b in range(value.shape[1])], axis=1)
  return {'advantage': advantage, 'value_target': advantage + rollout.behaviour_value}


def _ppo_expected(params, rollout, items, group_envs, targets):
  """Returns what `_impala_expected` returns, for PPO.

  Losses are means over the valid rows of the minibatch, whose advantages are normalised.
  """
  logits, value = _outputs(params, rollout.obs)
  rows = [(i // group_envs, group * group_envs + i % group_envs)
          for group, elements in enumerate(items) for i in elements]
  rows = tuple(np.array([row for row in rows if rollout.valid[row]]).T)
  advantage = targets['advantage'][rows]
  advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
  names = ('clip', 'clip_value', 'value_coef', 'entropy_coef')
  valid = np.ones(len(advantage), bool)

  def loss(logits, value):
    return reference.ppo_objective(
        logits, value, rollout.action[rows], rollout.behaviour_log_prob[rows],
        rollout.behaviour_value[rows], advantage, targets['value_target'][rows], valid,
        *(OPTIONS['ppo'][name] for name in names))

  row_logits = logits[rows]
  row_value = value[rows]
  by_logits = np.zeros(logits.shape)
  by_value = np.zeros(value.shape)
  by_logits[rows] = reference.numeric_gradient(lambda x: loss(x, row_value)[0], row_logits)
  by_value[rows] = reference.numeric_gradient(lambda x: loss(row_logits, x)[0], row_value)
  terms = loss(row_logits, row_value)[1] | {'valid': len(valid)}
  return by_logits / len(valid), by_value / len(valid), terms


def _outputs(params, obs):
  logits, value, _ = NETWORK.apply(params, obs)
  return np.array(logits, np.float64), np.array(value, np.float64)


def _pull_back(params, obs, by_logits, by_value):
  """Turns gradients by the network's outputs into gradients by its parameters, with autodiff."""
  _, pull_back = jax.vjp(lambda p: NETWORK.apply(p, obs)[:2], params)
  return pull_back((by_logits.astype(np.float32), by_value.astype(np.float32)))[0]


def _gradient(name, sizes, unroll_length):
  objective = make_objective(name, NETWORK, unroll_length)
  return objective, jax.jit(rollout_updates.make_gradient(objective, sizes, 1))


STEPS = 5
NUM_ENVS = 8


def _case(name, groups, microbatch_rows):
  rollout = make_rollout(1, STEPS, NUM_ENVS)
  params = make_params(NETWORK, rollout.obs)
  sizes = rollout_updates.Sizes(NUM_ENVS, groups, 2, 1, microbatch_rows)
  objective, gradient = _gradient(name, sizes, STEPS)
  items = _first_minibatch(groups, NUM_ENVS // groups, objective)
  targets = ()
  if name == 'ppo':  # the reference has NaN in invalid rows, which no mask would stop
    targets = {k: np.nan_to_num(v, nan=5.0).astype(np.float32)
               for k, v in _ppo_targets(params, rollout).items()}
  return rollout, params, items, targets, gradient


@pytest.mark.parametrize('groups, microbatch_rows', [(1, 0), (2, 6), (4, 1)])
@pytest.mark.parametrize('name', ['impala', 'ppo'])
def test_gradient_is_the_one_of_the_whole_minibatch(name, groups, microbatch_rows):
  rollout, params, items, targets, gradient = _case(name, groups, microbatch_rows)
  group_envs = NUM_ENVS // groups
  grads, terms = gradient(params, rollout, targets, items)
  if name == 'impala':
    *by_outputs, expected_terms = _impala_expected(params, rollout, items, group_envs)
  else:
    *by_outputs, expected_terms = _ppo_expected(
        params, rollout, items, group_envs, _ppo_targets(params, rollout))
  expected = _pull_back(params, rollout.obs, *by_outputs)
  jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, expected)
  assert set(terms) == set(expected_terms)
  for term, value in expected_terms.items():
    assert_allclose(terms[term], value, rtol=1e-4, atol=1e-5, err_msg=term)


def test_ppo_prepares_advantages_and_targets():
  rollout = make_rollout(2, STEPS, NUM_ENVS)
  params = make_params(NETWORK, rollout.obs)
  objective, _ = _gradient('ppo', rollout_updates.Sizes(NUM_ENVS, 1, 1, 1, 0), STEPS)
  targets = jax.jit(objective.targets)(params, rollout)
  expected = _ppo_targets(params, rollout)
  assert set(targets) == set(expected)
  for name, value in expected.items():
    computed = np.array(targets[name])[rollout.valid]
    assert_allclose(computed, value[rollout.valid], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize('name', ['impala', 'ppo'])
def test_invalid_rows_do_not_matter(name):
  """Only the value of an invalid row counts, and only after a truncation."""
  rollout, params, items, _, gradient = _case(name, 2, 6)
  objective, _ = _gradient(name, rollout_updates.Sizes(NUM_ENVS, 2, 2, 1, 6), STEPS)

  def run(rollout):
    targets = jax.jit(objective.targets)(params, rollout)
    return gradient(params, rollout, targets, items)

  before = run(rollout)
  corrupted = jax.tree.map(np.copy, rollout)
  invalid = ~corrupted.valid
  after_termination = invalid.copy()
  after_termination[1:] &= corrupted.terminated[:-1]
  assert (invalid & ~after_termination).any() and after_termination.any()
  corrupted.action[invalid] = (corrupted.action[invalid] + 1) % ACTIONS
  corrupted.behaviour_log_prob[invalid] -= 1.5
  corrupted.reward[invalid] = 1e3
  corrupted.behaviour_value[after_termination] = 1e3
  corrupted.obs[:-1][after_termination] = 3.0
  jax.tree.map(assert_array_equal, run(corrupted), before)


# A group has 2,048 rows of the MLP or 640 of the convolutional network. XLA does not split sums of
# few rows between threads, so that anything would be exact.
LARGE = {
    'mlp': (make_network(hidden=(64, 64)), 16, 512, (8,)),
    'cnn': (make_network('nature_cnn', channels=(4, 8), kernels=(4, 3), strides=(2, 1), hidden=32),
            5, 512, (2, 16, 16))}


@pytest.mark.parametrize('name, size, microbatch_rows', essential([
    ('impala', 'mlp', 1088), ('ppo', 'mlp', 0), ('impala', 'cnn', 0), ('ppo', 'cnn', 0)],
    ('impala', 'mlp', 1088), ('ppo', 'cnn', 0)))
@pytest.mark.same_bits('a gradient on 1, 2, 4 devices, large batches', 'IMPALA, PPO: MLP, CNN')
def test_gradient_is_exact_on_any_mesh(name, size, microbatch_rows):
  network, steps, num_envs, obs_shape = LARGE[size]
  dtype = np.uint8 if len(obs_shape) == 3 else np.float32
  rollout = make_rollout(3, steps, num_envs, obs_shape, dtype)
  params = make_params(network, rollout.obs)
  sizes = rollout_updates.Sizes(num_envs, 4, 1, 1, microbatch_rows)
  objective = make_objective(name, network, steps)
  items = _first_minibatch(4, num_envs // 4, objective, minibatches=1)
  targets = jax.jit(objective.targets)(params, rollout)
  specs = (PartitionSpec(), BY_ENV, BY_ENV, PartitionSpec(deterministic.AXIS))
  results = []
  for devices in (1, 2, 4):
    gradient = rollout_updates.make_gradient(objective, sizes, devices)
    gradient = on_mesh(gradient, devices, specs, PartitionSpec())
    results.append(gradient(params, rollout, targets, items))
  leaves = jax.tree_util.tree_leaves_with_path(results[0][0])
  assert sum('bias' in jax.tree_util.keystr(path) for path, _ in leaves) >= 4
  assert all(np.any(leaf) for _, leaf in leaves)
  for on_several_devices in results[1:]:
    jax.tree.map(assert_array_equal, on_several_devices, results[0])


@pytest.mark.parametrize('name, vtrace', essential(
    [('impala', False), ('ppo', False), ('ppo', True)], 'impala'))
def test_deduplicated_frames_give_the_same_gradient_as_whole_stacks(name, vtrace):
  stacks = make_stacks(4, 1, STEPS, NUM_ENVS)
  with_stacks = make_rollout(3, STEPS, NUM_ENVS)._replace(obs=stacks)
  with_frames = with_stacks._replace(obs=frames.from_stacks(stacks, 4))
  assert with_frames.obs.frame.size < stacks.size / 2
  params = make_params(NETWORK, stacks)
  options = dict(vtrace=vtrace) if name == 'ppo' else {}
  objective = make_objective(name, NETWORK, STEPS, **options)
  sizes = rollout_updates.Sizes(NUM_ENVS, 2, 2, 2, 0)
  learn = jax.jit(rollout_updates.make_learn(objective, optax.identity(), lambda steps: 0.1, sizes))
  state, metrics = learn(_state(params, optax.identity()), with_stacks)
  other_state, other_metrics = learn(_state(params, optax.identity()), with_frames)
  jax.tree.map(assert_array_equal, state.params, other_state.params)
  assert (metrics.pop('batch') != other_metrics.pop('batch')).any()
  jax.tree.map(assert_array_equal, metrics, other_metrics)


def test_a_plain_sum_gives_the_same_gradient_but_for_rounding():
  network, steps, num_envs, obs_shape = LARGE['mlp']
  rollout = make_rollout(3, steps, num_envs, obs_shape)
  params = make_params(network, rollout.obs)
  objective = make_objective('impala', network, steps)
  items = jnp.arange(num_envs)  # each device has one group, so all have the same environments
  specs = (PartitionSpec(), BY_ENV, BY_ENV, PartitionSpec(deterministic.AXIS))
  results = []
  for devices, exact in ((1, True), (1, False), (4, False)):
    sizes = rollout_updates.Sizes(num_envs, devices, 1, 1, 0)
    gradient = on_mesh(rollout_updates.make_gradient(objective, sizes, devices, exact),
                       devices, specs, PartitionSpec())
    local = items.reshape(devices, -1) % (num_envs // devices)
    results.append(gradient(params, rollout, (), local))
  for result in results[1:]:
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-3, atol=1e-3), result, results[0])


def _state(params, optimizer=None, **fields):
  opt_state = () if optimizer is None else optimizer.init(params)
  state = TrainState(params, opt_state, jnp.int32(0), jnp.int32(0), jax.random.key(7))
  return state._replace(**fields)


@pytest.mark.parametrize('groups', essential([4, 8], 8))  # 8 devices sum with reduce-scatter
@pytest.mark.same_bits('a whole update on 1, 4, 8 devices, large batches', 'PPO: MLP')
def test_learning_is_exact_on_any_mesh(groups):
  """Compares parameters, receipts and all other metrics after two epochs of two minibatches."""
  network, steps, num_envs, obs_shape = LARGE['mlp']
  rollout = make_rollout(3, steps, num_envs, obs_shape)
  params = make_params(network, rollout.obs)
  sizes = rollout_updates.Sizes(num_envs, groups, 2, 2, 0)
  objective = make_objective('ppo', network, steps)
  optimizer = ADAM.transformation()
  rate = optimizers.Adam(learning_rate=1e-3, anneal=True).schedule(100_000)
  before = _state(params, optimizer, update=jnp.int32(3), steps=jnp.int32(25_000))
  results = []
  for size in (1, groups):
    learn = rollout_updates.make_learn(objective, optimizer, rate, sizes, size)

    def split(state, rollout, learn=learn):
      state, metrics = learn(state, rollout)
      return state._replace(key=()), metrics.pop('episodes'), metrics

    results.append(on_mesh(split, size, (PartitionSpec(), BY_ENV),
                           (PartitionSpec(), BY_ENV, PartitionSpec()))(before, rollout))
  jax.tree.map(assert_array_equal, *results)
  state, episodes, metrics = results[0]
  jax.tree.map(assert_array_equal, episodes, rollout.episodes)
  batch = rollout._replace(episodes=())
  assert_array_equal(metrics['batch'], fingerprints.fingerprint(batch, 1, 0, num_envs))
  assert_array_equal(metrics['params'], fingerprints.fingerprint(state.params))
  num_valid = rollout.valid.sum()
  assert (metrics['valid'], metrics['steps']) == (num_valid, 25_000 + num_valid)
  assert metrics['update'] == 4
  assert (state.steps, state.update) == (25_000 + num_valid, 4)
  assert_allclose(metrics['learning_rate'], 0.75e-3, rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize('name', ['impala', 'ppo'])
def test_learning_takes_a_step_against_the_gradient(name):
  """Takes one gradient step at a constant rate; metrics are means over valid rows."""
  rollout = make_rollout(1, STEPS, NUM_ENVS)
  params = make_params(NETWORK, rollout.obs)
  sizes = rollout_updates.Sizes(NUM_ENVS, 2, 1, 1, 0)
  objective, _ = _gradient(name, sizes, STEPS)

  def rate(steps):
    return jnp.float32(0.25)

  learn = jax.jit(rollout_updates.make_learn(objective, optax.identity(), rate, sizes))
  state, metrics = learn(_state(params, optax.identity()), rollout)
  items = _first_minibatch(2, NUM_ENVS // 2, objective, minibatches=1)  # the whole rollout
  if name == 'impala':
    *by_outputs, terms = _impala_expected(params, rollout, items, NUM_ENVS // 2)
  else:
    *by_outputs, terms = _ppo_expected(params, rollout, items, NUM_ENVS // 2,
                                       _ppo_targets(params, rollout))
  grads = _pull_back(params, rollout.obs, *by_outputs)
  jax.tree.map(lambda new, old, g: assert_allclose(new, old - 0.25 * g, rtol=1e-4, atol=1e-5),
               state.params, params, grads)
  norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
  assert_allclose(metrics['grad_norm'], norm, rtol=1e-4)
  rows = terms.pop('valid')
  for term, total in terms.items():
    assert_allclose(metrics[term], total / rows, rtol=1e-4, atol=1e-5, err_msg=term)


def _minibatch_indices(name, sizes, steps, mesh_size=1, update=0):
  """Returns the elements of each gradient in `fuse`, [epochs, minibatches, groups, n]."""
  objective = make_objective(name, NETWORK, steps)
  # The targets of the objective itself would need parameters of a network.
  without_targets = types.SimpleNamespace(
      algorithm=objective.algorithm, elements_per_env=objective.elements_per_env,
      target_inputs=objective.target_inputs, targets=lambda params, rollout: ())
  groups = sizes.num_grad_shards
  size = sizes.num_envs * objective.elements_per_env // groups // sizes.num_minibatches
  num_gradients = sizes.num_epochs * sizes.num_minibatches

  def gradient(params, rollout, targets, items):
    return items.astype(jnp.float32), {'valid': jnp.float32(1)}

  def record(state, items, terms):  # stands in for the optimizer's step
    recorded, count = state.params
    return state._replace(params=(recorded.at[count].set(items), count + 1)), jnp.float32(0)

  learn = rollout_updates.fuse(
      rollout_updates.make_prepare(without_targets, sizes, mesh_size), gradient, record,
      lambda steps: jnp.float32(0))

  def record_all(empty, rollout):
    state = _state((empty, jnp.int32(0)), update=jnp.int32(update))
    return learn(state, rollout)[0].params[0]

  rollout = make_rollout(0, steps, sizes.num_envs)
  recorded = on_mesh(record_all, mesh_size, (BY_ENV, BY_ENV), BY_ENV)(
      np.zeros((num_gradients, groups, size), np.float32), rollout)
  shape = (sizes.num_epochs, sizes.num_minibatches, groups, size)
  return np.array(recorded).astype(int).reshape(shape)


def test_an_epoch_visits_every_element_once_and_in_its_own_order():
  sizes = rollout_updates.Sizes(8, 4, 5, 3, 0)
  indices = _minibatch_indices('ppo', sizes, steps=10)
  assert indices.shape == (3, 5, 4, 4)
  orders = [indices[e, :, g].reshape(-1) for e in range(3) for g in range(4)]
  for order in orders:
    assert_array_equal(np.sort(order), np.arange(20))
  next_update = _minibatch_indices('ppo', sizes, steps=10, update=1)
  orders += [next_update[e, :, g].reshape(-1) for e in range(3) for g in range(4)]
  # The orders of all epochs, groups and updates differ.
  assert len({tuple(order) for order in orders}) == 24


def test_minibatches_do_not_depend_on_the_mesh():
  sizes = rollout_updates.Sizes(8, 4, 5, 3, 0)
  expected = _minibatch_indices('ppo', sizes, steps=10)
  for mesh_size in (2, 4):
    assert_array_equal(_minibatch_indices('ppo', sizes, 10, mesh_size), expected)


def test_sequences_are_visited_in_order():
  indices = _minibatch_indices('impala', rollout_updates.Sizes(24, 4, 3, 2, 0), steps=2)
  assert_array_equal(indices, np.broadcast_to(np.arange(6).reshape(3, 1, 2), (2, 3, 4, 2)))


def _descend(options, gradients, rate=0.1):
  """Returns the parameters after each gradient; they start at zero."""
  optimizer = options.transformation()
  update = jax.jit(rollout_updates.make_update(optimizer, lambda steps: rate))
  state = _state(jnp.zeros(len(gradients[0])), optimizer)
  path = []
  for gradient in gradients:
    state, _ = update(state, np.float32(gradient), {'valid': jnp.float32(1)})
    path.append(np.array(state.params))
  return path


def test_rmsprop_equals_pytorchs():
  """v = 0.99 v + 0.01 g^2; step 0.1 g / (sqrt(v) + 0.01): epsilon outside the square root.

  g = 3: v = 0.09, step 0.3 / 0.31; then g = -4: v = 0.0891 + 0.16.
  """
  first = -0.3 / 0.31
  second = first + 0.4 / (np.sqrt(0.2491) + 0.01)
  path = _descend(RMSPROP, [[3, 0], [-4, 0]])
  assert_allclose(path, [[first, 0], [second, 0]], rtol=1e-5)


def test_gradients_are_clipped_by_their_norm():
  """(30, 40) has norm 50 and is scaled to norm 40: (24, 32); (18, 24) has norm 30 and stays."""
  (path,) = _descend(RMSPROP, [[30, 40]])
  assert_allclose(path, [-2.4 / 2.41, -3.2 / 3.21], rtol=1e-5)
  (path,) = _descend(RMSPROP, [[18, 24]])
  assert_allclose(path, [-1.8 / 1.81, -2.4 / 2.41], rtol=1e-5)


@pytest.mark.quick
def test_adam_by_hand():
  """The first moments, corrected for bias, are g and g^2; the second are those of 1412.6980."""
  path = _descend(ADAM, [[3, -0.02, 1e-5], [-1, -0.02, 1e-5]])
  assert_allclose(path[0], [-0.3 / 3.00001, 0.002 / 0.02001, -1e-6 / 2e-5], rtol=1e-5)
  m = (0.9 * 0.1 * 3 - 0.1) / 0.19
  v = (0.999 * 0.001 * 9 + 0.001) / (1 - 0.999 ** 2)
  assert_allclose(path[1][0], path[0][0] - 0.1 * m / (np.sqrt(v) + 1e-5), rtol=1e-4)


def test_learning_rate_falls_to_zero():
  rate = optimizers.Adam(learning_rate=0.5, anneal=True).schedule(1000)
  rates = [float(rate(jnp.int32(steps))) for steps in (0, 250, 500, 999, 1000, 1100)]
  assert_allclose(rates, [0.5, 0.375, 0.25, 0.0005, 0, 0], rtol=1e-4)
  rate = optimizers.Adam(learning_rate=0.5, anneal=False).schedule(1000)
  assert [float(rate(jnp.int32(steps))) for steps in (0, 1100)] == [0.5, 0.5]


def test_update_uses_the_learning_rate_at_the_states_steps():
  optimizer = optax.identity()
  update = rollout_updates.make_update(optimizer, lambda steps: 1.0 / steps)
  state, norm = update(_state(jnp.float32([1, 2]), optimizer, steps=jnp.int32(4)),
                       jnp.float32([6, -8]), {'valid': jnp.float32(1)})
  assert norm == 10
  assert_array_equal(state.params, [-0.5, 4])
  assert (state.steps, state.update) == (4, 0)


def test_the_learning_rate_adapts_to_the_policys_kl():
  """rl_games divides the rate by 1.5 above twice the target KL, and multiplies it below half."""
  options = dataclasses.replace(ADAM, kl_target=0.01, learning_rate=1e-3)
  optimizer = options.transformation()
  update = jax.jit(rollout_updates.make_update(optimizer, lambda steps: 1.0))
  state = _state(jnp.zeros(1), optimizer)
  factors = []
  for kl in [0.021, 0.019, 0.006, 0.004, 0.004, *[0.0] * 5, *[1.0] * 30]:
    terms = {'valid': jnp.float32(4), 'approx_kl': jnp.float32(4 * kl)}
    before = state.params
    state, _ = update(state, np.float32([0.1]), terms)
    factors.append(float((before - state.params)[0]) / 0.9999)  # Adam's own step is g / (|g| + eps)
  assert_allclose(factors[:5], [1 / 1.5, 1 / 1.5, 1 / 1.5, 1, 1.5], rtol=1e-3)
  # The factor is bounded: with the base rate of 1e-3, the rate stays within 1e-6 and 1e-2.
  assert_allclose(factors[9], 10.0, rtol=1e-3)
  assert_allclose(factors[-1], 1e-3, rtol=2e-3)
