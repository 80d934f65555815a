"""Gradients and updates compared with plain NumPy, and bit by bit between meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.agents import networks, optimizers
from podracer_jit.agents.policies import categorical
from podracer_jit.envs import frames
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.experiment import build
from podracer_jit.learner import updates
from podracer_jit.learner.from_rollouts import FromRollouts, Prepared
from podracer_jit.losses import ALGORITHMS, IMPALA, PPO
from podracer_jit.losses.algorithm import Aux
from podracer_jit.losses.items import Items, transitions
from podracer_jit.numerics import blocks, deterministic, fingerprints
from podracer_jit.numerics.groups import Groups
from podracer_jit.types import Episodes, Rollout, TrainState
from tests import reference
from tests.agents.test_running_moments import of_replay
from tests.envs.test_frames import make_stacks
from tests.made import bound
from tests.runs import changed, on_mesh, run, small
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
RMSPROP = optimizers.RMSProp(learning_rate=0.1, anneal=False, decay=0.99, eps=0.01,
                             max_grad_norm=40.0)
ADAM = optimizers.Adam(learning_rate=0.1, anneal=False, b1=0.9, b2=0.999, eps=1e-5,
                       max_grad_norm=40.0)
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
      extras={'log_prob': np.log(rng.uniform(0.2, 0.5, size=shape)).astype(np.float32),
              'value': normal()},
      reward=np.where(valid, normal(), np.float32(0)),
      terminated=terminated, truncated=truncated, valid=valid,
      episodes=Episodes(terminated | truncated, normal(), np.ones(shape, np.int32)))


@dataclasses.dataclass(frozen=True)
class Plain(optimizers.Optimizer):
  """Takes the gradient itself as the step."""

  def scale(self):
    return optax.identity()


def make(name, options=None, **parts):
  """Returns a bound algorithm with the options of this file and others; see `made.bound`."""
  spec = EnvSpec('Test-v0', (5,), np.dtype(np.float32), ACTIONS, (), (), 1, 0)
  small = dict(spec=spec, torso=networks.MLP((6,)), unroll_length=STEPS)
  return bound(ALGORITHMS[name](**OPTIONS[name] | (options or {})), **small | parts)


def make_params(algorithm, seed=0):
  """Returns weights and biases large enough to matter in every layer."""
  shapes = jax.eval_shape(algorithm.init, jax.random.key(0))
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda s: rng.normal(size=s.shape, scale=1 / np.sqrt(s.shape[0] + 1)).astype(np.float32),
      shapes)


STEPS = 5
NUM_ENVS = 8
NETWORK = make('impala').network


@pytest.mark.parametrize('items, item_rows, microbatch_rows, expected', [
    (12, 1, 0, 1),  # no bound
    (12, 1, 12, 1), (12, 1, 11, 2), (12, 1, 5, 3), (12, 1, 1, 12),
    (12, 21, 64, 4),  # three sequences of 21 rows fit
    (12, 21, 20, 12),  # not even one sequence fits: one at a time
    (7, 1, 3, 7),  # 7 has no divisor that leaves at most 3
    (1, 21, 100, 1)])
def test_number_of_microbatches(items, item_rows, microbatch_rows, expected):
  assert updates.num_microbatches(items, item_rows, microbatch_rows) == expected


def _first_minibatch(source, minibatches=2, seed=5):
  """Returns the items that each group has in the first of `minibatches`, [groups, n]."""
  rng = np.random.default_rng(seed)
  algorithm = source.algorithm
  count = source.groups.envs * algorithm.items().count(algorithm.parts.unroll_length)
  order = rng.permutation if algorithm.shuffles else np.arange
  return np.stack([order(count)[:count // minibatches]
                   for _ in range(source.groups.count)]).astype(np.int32)


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
      ratio = reference.ratios(logits[:-1, b], action, rollout.extras['log_prob'][:, b])
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
  value = np.concatenate([rollout.extras['value'], value[-1:]])
  advantage = np.stack([
      reference.gae(value[:, b], rollout.reward[:, b], DISCOUNT, OPTIONS['ppo']['gae_lambda'],
                    (rollout.terminated[:, b], rollout.truncated[:, b], rollout.valid[:, b]))
      for b in range(value.shape[1])], axis=1)
  return {'advantage': advantage, 'value_target': advantage + rollout.extras['value']}


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
        logits, value, rollout.action[rows], rollout.extras['log_prob'][rows],
        rollout.extras['value'][rows], advantage, targets['value_target'][rows], valid,
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


def _view(params):
  return updates.view(_state(params))


def _gradient(source):
  """Returns a function that adds gradients and Aux of all groups; items are [local groups, n]."""
  def gradient(params, rollout, targets, items):
    prepared = Prepared(rollout._replace(episodes=None), targets, jnp.asarray(items)[None],
                        jax.random.key(0), None)
    return source.groups.total(source.gradients(_view(params), prepared, jnp.int32(0)))
  return gradient


def _source(name, groups, microbatch_rows=0, together=False):
  of_groups = Groups(groups, NUM_ENVS // groups, together=together)
  return FromRollouts(make(name), of_groups, 1, 2, microbatch_rows)


def _case(name, groups, microbatch_rows, together=False):
  rollout = make_rollout(1, STEPS, NUM_ENVS)
  source = _source(name, groups, microbatch_rows, together)
  params = make_params(source.algorithm)
  targets = None
  if name == 'ppo':  # the reference has NaN in invalid rows, which no mask would stop
    targets = {k: np.nan_to_num(v, nan=5.0).astype(np.float32)
               for k, v in _ppo_targets(params, rollout).items()}
  return rollout, params, _first_minibatch(source), targets, source


@pytest.mark.parametrize('groups, microbatch_rows, together', [
    (1, 0, False), (2, 6, False), (4, 1, False), (4, 0, True), (2, 6, True)])
@pytest.mark.parametrize('name', ['impala', 'ppo'])
def test_gradient_is_the_one_of_the_whole_minibatch(name, groups, microbatch_rows, together):
  rollout, params, items, targets, source = _case(name, groups, microbatch_rows, together)
  group_envs = NUM_ENVS // groups
  grads, aux = jax.jit(_gradient(source))(params, rollout, targets, items)
  terms = aux.terms | {'valid': aux.valid}
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
  algorithm = make('ppo')
  params = make_params(algorithm)
  targets = jax.jit(algorithm.targets)(_view(params), rollout)
  expected = _ppo_targets(params, rollout)
  assert set(targets) == set(expected)
  for name, value in expected.items():
    computed = np.array(targets[name])[rollout.valid]
    assert_allclose(computed, value[rollout.valid], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize('name', ['impala', 'ppo'])
def test_invalid_rows_do_not_matter(name):
  """Only the value of an invalid row counts, and only after a truncation."""
  rollout, params, items, _, source = _case(name, 2, 6)

  @jax.jit
  def run(rollout):
    targets = source.algorithm.targets(_view(params), rollout)
    return _gradient(source)(params, rollout, targets, items)

  before = run(rollout)
  corrupted = jax.tree.map(np.copy, rollout)
  invalid = ~corrupted.valid
  after_termination = invalid.copy()
  after_termination[1:] &= corrupted.terminated[:-1]
  assert (invalid & ~after_termination).any() and after_termination.any()
  corrupted.action[invalid] = (corrupted.action[invalid] + 1) % ACTIONS
  corrupted.extras['log_prob'][invalid] -= 1.5
  corrupted.reward[invalid] = 1e3
  corrupted.extras['value'][after_termination] = 1e3
  corrupted.obs[:-1][after_termination] = 3.0
  jax.tree.map(assert_array_equal, run(corrupted), before)


# A group has 2,048 rows of the MLP or 640 of the convolutional network. XLA does not split sums of
# few rows between threads, so that anything would be exact.
LARGE = {
    'mlp': (networks.MLP((64, 64)), 16, 512, (8,)),
    'cnn': (networks.NatureCNN(channels=(4, 8), kernels=(4, 3), strides=(2, 1), hidden=32),
            5, 512, (2, 16, 16))}


def _large(name, size, **parts):
  """Returns an algorithm with a large rollout and parameters."""
  torso, steps, num_envs, obs_shape = LARGE[size]
  dtype = np.dtype(np.uint8 if len(obs_shape) == 3 else np.float32)
  spec = EnvSpec('Large-v0', obs_shape, dtype, ACTIONS, (), (), 1, 0)
  algorithm = make(name, spec=spec, torso=torso, unroll_length=steps, **parts)
  return algorithm, make_rollout(3, steps, num_envs, obs_shape, dtype), make_params(algorithm)


@pytest.mark.parametrize('name, size, microbatch_rows', essential([
    ('impala', 'mlp', 1088), ('ppo', 'mlp', 0), ('impala', 'cnn', 0), ('ppo', 'cnn', 0)],
    ('impala', 'mlp', 1088), ('ppo', 'cnn', 0)))
@pytest.mark.same_bits('a gradient on 1, 2, 4 devices, large batches', 'IMPALA, PPO: MLP, CNN')
def test_gradient_is_exact_on_any_mesh(name, size, microbatch_rows):
  algorithm, rollout, params = _large(name, size)
  num_envs = rollout.reward.shape[1]
  sources = [FromRollouts(algorithm, Groups(4, num_envs // 4, devices), 1, 1, microbatch_rows)
             for devices in (1, 2, 4)]
  items = _first_minibatch(sources[0], minibatches=1)
  targets = jax.jit(algorithm.targets)(_view(params), rollout)
  specs = (PartitionSpec(), BY_ENV, BY_ENV, PartitionSpec(deterministic.AXIS))
  results = []
  for source in sources:
    gradient = on_mesh(_gradient(source), source.groups.mesh_size, specs, PartitionSpec())
    results.append(gradient(params, rollout, targets, items))
  leaves = jax.tree_util.tree_leaves_with_path(results[0][0])
  assert sum('bias' in jax.tree_util.keystr(path) for path, _ in leaves) >= 4
  assert all(np.any(leaf) for _, leaf in leaves)
  for on_several_devices in results[1:]:
    jax.tree.map(assert_array_equal, on_several_devices, results[0])


@pytest.mark.parametrize('normalise_advantage', [False, True])
def test_vtrace_as_in_nappos_program(normalise_advantage):
  """The advantage has the clipped weight and lambda 1; the ratio is to the trained policy."""
  rollout = make_rollout(3, STEPS, NUM_ENVS)
  algorithm = make('ppo', dict(vtrace=True, vtrace_variant='nappo',
                               normalise_advantage=normalise_advantage))
  params = make_params(algorithm)
  targets = algorithm.targets(_view(params), rollout)
  logits, value = _outputs(params, rollout.obs)
  expected = np.zeros((STEPS, NUM_ENVS))
  log_prob = np.zeros((STEPS, NUM_ENVS))
  for b in range(NUM_ENVS):
    ends = rollout.terminated[:, b], rollout.truncated[:, b], rollout.valid[:, b]
    ratio = reference.ratios(logits[:-1, b], rollout.action[:, b], rollout.extras['log_prob'][:, b])
    _, expected[:, b] = reference.vtrace(value[:, b], rollout.reward[:, b], ratio, DISCOUNT, ends)
    log_prob[:, b] = np.log(ratio) + rollout.extras['log_prob'][:, b]
  of_rows = expected[rollout.valid]
  if normalise_advantage:
    of_rows = (of_rows - of_rows.mean()) / of_rows.std()
  assert_allclose(np.array(targets['advantage'])[rollout.valid], of_rows, rtol=1e-4, atol=1e-4)
  assert_allclose(np.array(targets['log_prob'])[rollout.valid], log_prob[rollout.valid], rtol=1e-4,
                  atol=1e-5)
  mean, deviation = algorithm.statistics(_view(params), jnp.asarray(rollout.valid), targets)
  assert (mean, deviation) == (0, 1)
  # In the first gradient step of an update the policy is that of the targets: all ratios are 1.
  learn = jax.jit(FromRollouts(algorithm, Groups(2, NUM_ENVS // 2), 1, 1, 0).learn)
  metrics = learn(_state(params, algorithm), rollout)[1]
  assert_allclose(metrics['approx_kl'], 0, atol=1e-6)
  assert metrics['clip_fraction'] == 0


@pytest.mark.parametrize('vtrace', [False, True])
def test_scaled_rewards_are_as_if_the_task_gave_them(vtrace):
  rollout = make_rollout(3, STEPS, NUM_ENVS)
  scaled = rollout._replace(reward=rollout.reward * np.float32(0.25))
  targets = []
  for reward_scale, given in ((0.25, rollout), (1.0, scaled)):
    algorithm = make('ppo', dict(reward_scale=reward_scale, vtrace=vtrace))
    targets.append(algorithm.targets(_view(make_params(algorithm)), given))
  jax.tree.map(assert_array_equal, *targets)


def test_impalas_loss_is_divided():
  rollout = make_rollout(3, STEPS, NUM_ENVS)
  steps = []
  for divisor in (1, 4):
    # This step is the gradient.
    algorithm = make('impala', dict(divisor=divisor),
                     optimizer=Plain(learning_rate=0.1, max_grad_norm=1e9))
    params = make_params(algorithm)
    learn = jax.jit(FromRollouts(algorithm, Groups(2, NUM_ENVS // 2), 1, 1, 0).learn)
    after = learn(_state(params, algorithm), rollout)[0].params
    steps.append(jax.tree.map(lambda x, y: divisor * (y - x), params, after))  # noqa: B023
  jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-3, atol=1e-5), *steps)


@pytest.mark.parametrize('name, vtrace', essential(
    [('impala', False), ('ppo', False), ('ppo', True)], 'impala'))
def test_deduplicated_frames_give_the_same_gradient_as_whole_stacks(name, vtrace):
  stacks = make_stacks(4, 1, STEPS, NUM_ENVS)
  with_stacks = make_rollout(3, STEPS, NUM_ENVS)._replace(obs=stacks)
  with_frames = with_stacks._replace(obs=frames.from_stacks(stacks, 4))
  assert with_frames.obs.frame.size < stacks.size / 2
  spec = EnvSpec('Stacks-v0', stacks.shape[2:], stacks.dtype, ACTIONS, (), (), 1, 0, stack=4)
  algorithm = make(name, dict(vtrace=vtrace) if name == 'ppo' else {}, spec=spec,
                   optimizer=Plain(learning_rate=0.1))
  params = make_params(algorithm)
  learn = jax.jit(FromRollouts(algorithm, Groups(2, NUM_ENVS // 2), 2, 2, 0).learn)
  state, metrics = learn(_state(params, algorithm), with_stacks)
  other_state, other_metrics = learn(_state(params, algorithm), with_frames)
  jax.tree.map(assert_array_equal, state.params, other_state.params)
  assert (metrics.pop('batch') != other_metrics.pop('batch')).any()
  jax.tree.map(assert_array_equal, metrics, other_metrics)


def test_a_plain_sum_gives_the_same_gradient_but_for_rounding():
  algorithm, rollout, params = _large('impala', 'mlp')
  num_envs = rollout.reward.shape[1]
  items = jnp.arange(num_envs)  # each device has one group, so all have the same environments
  specs = (PartitionSpec(), BY_ENV, BY_ENV, PartitionSpec(deterministic.AXIS))
  results = []
  for devices, exact in ((1, True), (1, False), (4, False)):
    source = FromRollouts(algorithm, Groups(devices, num_envs // devices, devices, exact), 1, 1, 0)
    gradient = on_mesh(_gradient(source), devices, specs, PartitionSpec())
    local = items.reshape(devices, -1) % (num_envs // devices)
    results.append(gradient(params, rollout, None, local))
  for result in results[1:]:
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-3, atol=1e-3), result, results[0])


def _state(params, algorithm=None, **fields):
  opt_state = None if algorithm is None else algorithm.optimizer.init(params)
  state = TrainState(params, opt_state, jnp.int32(0), jnp.int32(0), jax.random.key(7))
  return state._replace(**fields)


@pytest.mark.parametrize('groups', essential([4, 8], 8))  # 8 devices sum with reduce-scatter
@pytest.mark.same_bits('a whole update on 1, 4, 8 devices, large batches', 'PPO: MLP')
def test_learning_is_exact_on_any_mesh(groups):
  """Compares parameters, receipts and all other metrics after two epochs of two minibatches."""
  adam = dataclasses.replace(ADAM, learning_rate=1e-3, anneal=True)
  algorithm, rollout, params = _large('ppo', 'mlp', optimizer=adam, total_steps=100_000)
  num_envs = rollout.reward.shape[1]
  before = _state(params, algorithm, update=jnp.int32(3), steps=jnp.int32(25_000))
  results = []
  for size in (1, groups):
    source = FromRollouts(algorithm, Groups(groups, num_envs // groups, size), 2, 2, 0)

    def split(state, rollout, learn=source.learn):
      state, metrics = learn(state, rollout)
      return state._replace(key=None), metrics.pop('episodes'), metrics

    results.append(on_mesh(split, size, (PartitionSpec(), BY_ENV),
                           (PartitionSpec(), BY_ENV, PartitionSpec()))(before, rollout))
  jax.tree.map(assert_array_equal, *results)
  state, episodes, metrics = results[0]
  jax.tree.map(assert_array_equal, episodes, rollout.episodes)
  batch = rollout._replace(episodes=None)
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
  algorithm = make(name, optimizer=Plain(learning_rate=0.25, max_grad_norm=1e9))
  params = make_params(algorithm)
  source = FromRollouts(algorithm, Groups(2, NUM_ENVS // 2), 1, 1, 0)
  state, metrics = jax.jit(source.learn)(_state(params, algorithm), rollout)
  items = _first_minibatch(source, minibatches=1)  # the whole rollout
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


class Recorder:
  """Records the rows that it reads for each gradient, and their PRNG keys, in `opt_state`.

  A row's action is its number.
  """

  def targets(self, state, rollout):
    return None

  def statistics(self, state, valid, targets):
    return None

  def gradient(self, state, batch, key):
    row = batch.items.action.reshape(-1)
    drawn = jax.random.uniform(key)
    return {name: zeros.at[row].add(value) for (name, zeros), value in zip(
        state.params.items(), (drawn, jnp.float32(1)), strict=True)}, Aux({}, jnp.float32(1))

  def update(self, state, grads, aux):
    step, record = state.opt_state
    record = jax.tree.map(lambda record, x: record.at[step].set(x), record, grads)
    return state._replace(opt_state=(step + 1, record))


class RowRecorder(Recorder, PPO):
  pass


class EnvRecorder(Recorder, IMPALA):
  pass


def _record(recorder, steps, groups, epochs, minibatches, mesh_size=1, update=0, microbatch_rows=0):
  """Returns what the gradients of an update read.

  Returns:
    'visits': how often each gradient read each row, [epochs, minibatches, T, B]; and 'keys': the
    sum of the random numbers that it drew then.
  """
  num_envs = groups.count * groups.envs
  algorithm = bound(recorder(), unroll_length=steps)
  source = FromRollouts(algorithm, groups._replace(mesh_size=mesh_size), epochs, minibatches,
                        microbatch_rows)
  rollout = make_rollout(0, steps, num_envs)
  rollout = rollout._replace(
      action=np.arange(rollout.action.size, dtype=np.int32).reshape(steps, num_envs))
  params = {name: jnp.zeros(rollout.action.size) for name in ('keys', 'visits')}
  record = {name: jnp.zeros((epochs * minibatches, len(x))) for name, x in params.items()}

  def learn(rollout):
    state = _state(params, update=jnp.int32(update), opt_state=(jnp.int32(0), record))
    return source.learn(state, rollout)[0].opt_state[1]

  record = on_mesh(learn, mesh_size, (BY_ENV,), PartitionSpec())(rollout)
  return {name: np.array(x).reshape(epochs, minibatches, steps, num_envs)
          for name, x in record.items()}


GROUPS = Groups(4, 2)


def _orders(visits):
  """Returns the number of the minibatch in which each epoch visits each row, by group."""
  assert_array_equal(visits.sum(axis=1), 1)
  number = visits.argmax(axis=1)
  return [tuple(number[..., group * 2:group * 2 + 2][epoch].reshape(-1))
          for group in range(4) for epoch in range(len(visits))]


def test_an_epoch_visits_every_row_once_and_in_its_own_order():
  visits = _record(RowRecorder, 10, GROUPS, 3, 5)['visits']
  for group in range(4):
    assert_array_equal(visits[..., group * 2:group * 2 + 2].sum(axis=(2, 3)), 4)
  orders = _orders(visits)
  orders += _orders(_record(RowRecorder, 10, GROUPS, 3, 5, update=1)['visits'])
  # The orders of all epochs, groups and updates differ.
  assert len(set(orders)) == 24


def test_each_microbatch_has_a_key_of_its_own():
  """Keys differ between updates, gradient steps, groups and the microbatches of a group."""
  drawn = [_record(RowRecorder, 10, GROUPS, 2, 5, update=update, microbatch_rows=2)
           for update in (0, 1)]
  for record in drawn:
    for keys, visits in zip(record['keys'].reshape(10, -1), record['visits'].reshape(10, -1),
                            strict=True):
      assert len(set(keys[visits > 0])) == 4 * 2  # four rows of each group, two at a time
  numbers = np.concatenate([record['keys'][record['visits'] > 0] for record in drawn])
  assert len(set(numbers)) == 2 * 10 * 4 * 2


def test_minibatches_and_keys_do_not_depend_on_the_mesh():
  expected = _record(RowRecorder, 10, GROUPS, 3, 5)
  for mesh_size in (2, 4):
    jax.tree.map(assert_array_equal, _record(RowRecorder, 10, GROUPS, 3, 5, mesh_size), expected)


def test_environments_are_visited_in_order():
  visits = _record(EnvRecorder, 2, Groups(4, 6), 2, 3)['visits']
  in_order = np.repeat(np.eye(3), 2, axis=1)  # of a group: minibatch i has environments 2i, 2i + 1
  assert_array_equal(visits, np.broadcast_to(np.tile(in_order, 4)[:, None], (2, 3, 2, 24)))


def _descend(optimizer, gradients, **terms):
  """Returns the parameters after each gradient of the sums over four rows; they start at zero."""
  algorithm = make('ppo', optimizer=optimizer)
  update = jax.jit(updates.make_update(algorithm))
  state = _state(jnp.zeros(len(gradients[0])), algorithm)
  path = []
  for i, gradient in enumerate(gradients):
    aux = Aux({name: jnp.float32(4 * values[i]) for name, values in terms.items()}, jnp.float32(4))
    state, _ = update(state, np.float32(gradient), aux)
    path.append(np.array(state.params))
  return path


class Sequences(IMPALA):
  """Learns from three rows each, which overlap by one."""

  def items(self):
    def make(window):
      return window.rows()._replace(obs=window.all_obs())
    return Items(3, 2, make, network_rows=4)


class Transitions(IMPALA):
  def items(self):
    return transitions(2, DISCOUNT)


@pytest.mark.parametrize('stacked', [False, True])
def test_items_are_windows_of_a_groups_rows(stacked):
  obs = make_stacks(4, 1, 7, 4)
  rollout = make_rollout(6, 7, 4)._replace(obs=obs, episodes=None)
  if stacked:
    rollout = rollout._replace(obs=frames.from_stacks(obs, 4))

  def read(algorithm, items):
    source = FromRollouts(bound(algorithm, unroll_length=7), Groups(2, 2), 1, 1, 0)
    prepared = Prepared(rollout, {'reward': rollout.reward}, None, None, None)
    return jax.jit(source.read)(prepared, jnp.int32(1), jnp.array(items))  # environments 2 and 3

  windows, targets = read(Sequences(), [0, 3, 4])
  rows = [slice(0, 3), slice(2, 5), slice(4, 7)]
  for i, (row, env) in enumerate(zip(rows, [2, 3, 2], strict=True)):
    assert_array_equal(windows.reward[:, i], rollout.reward[row, env])
    assert_array_equal(windows.extras['value'][:, i], rollout.extras['value'][row, env])
    assert_array_equal(windows.obs[:, i], obs[row.start:row.stop + 1, env])
  assert_array_equal(targets['reward'], windows.reward)
  assert windows.carry is None

  transition, _ = read(Transitions(), np.arange(12))
  for i in range(12):
    t, env = i // 2, 2 + i % 2
    over = rollout.terminated[t, env] or rollout.truncated[t, env]
    steps = 1 if over else 2
    assert_array_equal(transition.obs[i], obs[t, env])
    assert_array_equal(transition.next_obs[i], obs[t + steps, env])
    reward = rollout.reward[t, env] + (0 if over else DISCOUNT * rollout.reward[t + 1, env])
    assert_allclose(transition.reward[i], reward, rtol=1e-6)


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
  algorithm = make('ppo', optimizer=Plain(learning_rate=1.0, anneal=True), total_steps=1024)
  state, norm = updates.make_update(algorithm)(
      _state(jnp.float32([1, 2]), algorithm, steps=jnp.int32(768)), jnp.float32([6, -8]),
      Aux({}, jnp.float32(1)))
  assert norm == 10
  assert_array_equal(state.params, [-0.5, 4])
  assert (state.steps, state.update) == (768, 0)


def test_the_learning_rate_adapts_to_the_policys_kl():
  """rl_games divides the rate by 1.5 above twice the target KL, and multiplies it below half."""
  kl = [0.021, 0.019, 0.006, 0.004, 0.004, *[0.0] * 5, *[1.0] * 30]
  path = _descend(dataclasses.replace(ADAM, kl_target=0.01, learning_rate=1e-3), [[0.1]] * len(kl),
                  approx_kl=kl)
  # Adam's own step is g / (|g| + eps).
  factors = -np.diff(np.array(path)[:, 0], prepend=0) / 1e-3 / 0.9999
  assert_allclose(factors[:5], [1 / 1.5, 1 / 1.5, 1 / 1.5, 1, 1.5], rtol=1e-3)
  # The factor is bounded: with the base rate of 1e-3, the rate stays within 1e-6 and 1e-2.
  assert_allclose(factors[9], 10.0, rtol=1e-3)
  assert_allclose(factors[-1], 1e-3, rtol=2e-3)


def test_the_kl_of_a_minibatch_without_valid_rows_is_no_division_by_zero():
  algorithm = make('ppo', optimizer=dataclasses.replace(ADAM, kl_target=0.01, learning_rate=1e-3))
  state = _state(jnp.zeros(1), algorithm)
  state, _ = updates.make_update(algorithm)(state, jnp.zeros(1), Aux({'approx_kl': jnp.zeros(())},
                                                                     jnp.zeros(())))
  assert float(optax.tree.get(state.opt_state, 'kl_factor')) == 1.5


@pytest.mark.parametrize('loss', essential(['pqn', 'dqn', 'r2d2', 'sac'], 'dqn'))
def test_groups_together_learn_what_they_learn_one_after_the_other(loss, monkeypatch):
  """Compares the first update that learns, whose experience is the same."""
  if loss == 'pqn':
    config = changed(small('pqn', num_grad_shards=2), scheme='sync')
  else:
    config = of_replay(loss, num_grad_shards=4, scheme='apex_lockstep')

  def first_steps(learners=(0,)):
    _, reports, _ = run(changed(config, placement__learner_devices=learners), updates=3)
    metrics = [{name: np.asarray(x)[i] for name, x in report.metrics.items()
                if name.endswith('loss') or name == 'grad_norm'}
               for report in map(jax.device_get, reports) for i in range(report.count)]
    return next(of_update for of_update in metrics if of_update['grad_norm'])

  one_by_one = first_steps()
  monkeypatch.setattr(build, 'Groups', lambda *args, together: Groups(*args, together=True))
  # Two devices fetch the items of a replay from each other, of all their groups at once.
  for learners in [(0,)] if loss == 'pqn' else [(0,), (0, 1)]:
    together = first_steps(learners)
    assert len(one_by_one) > 1 and one_by_one.keys() == together.keys()
    for name, value in one_by_one.items():
      assert_allclose(together[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize('shape', [(), (3,), (2, 5), (blocks.JOIN_BELOW + 1,)])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf, 1.0])
def test_each_number_of_an_optimizer_is_looked_at(shape, dtype, value):
  x = jnp.zeros(shape, dtype).reshape(-1).at[-1].set(value).reshape(shape)
  others = [jnp.ones(4), jnp.int32(3), jnp.zeros((2, 0)), jnp.ones(blocks.JOIN_BELOW)]
  state = TrainState({}, [*others, x], {}, jnp.int32(0), jnp.int32(0), jax.random.key(0))
  finite = updates.finite_parts(state)
  # A scalar may be infinite.
  assert finite['optimizer'] == (np.isfinite(value) or not shape and not np.isnan(value))
  assert finite['moments']
