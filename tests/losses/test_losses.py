"""The losses compared with the papers' equations in plain NumPy, and with numbers by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit import losses
from podracer_jit.agents import policies
from podracer_jit.losses.ppo import smooth_clip
from tests import reference

ACTIONS = 4
POLICY = policies.categorical(ACTIONS)
DISCOUNT = 0.9
# carried: the sequence begins with an invalid row; ends_last: an episode ends with its last row.
CASES = [dict(seed=s, carried=s % 2 == 1, ends_last=s % 4 > 1) for s in range(8)]
OPTIONS = [
    dict(),
    dict(vtrace_lambda=0.8),
    dict(clip_rho=1.7, clip_pg_rho=1.3, vtrace_lambda=0.95),
    dict(clip_pg_rho=2.5, baseline_coef=1.25, entropy_coef=0.3),
]
DEFAULTS = dict(vtrace_lambda=1.0, clip_rho=1.0, clip_pg_rho=1.0, baseline_coef=0.5,
                entropy_coef=0.01)


@functools.cache
def _impala(**options):
  """Returns a jitted function (logits, value, *rest) -> (loss, terms), gradients."""
  def loss(logits, *rest):
    return losses.impala_loss(logits, *rest, policies.categorical(logits.shape[-1]), **options)
  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@functools.cache
def _ppo(**options):
  def loss(logits, *rest):
    return losses.ppo_loss(logits, *rest, policies.categorical(logits.shape[-1]), **options)
  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


_gae = jax.jit(losses.gae)


class Sequence:
  """A random sequence of 13 rows, float32 numbers in float64 arrays."""

  def __init__(self, seed, carried=False, ends_last=False, steps=13):
    rng = np.random.default_rng(seed)

    def normal(*shape):
      return rng.normal(size=shape).astype(np.float32).astype(np.float64)

    self.ends = reference.random_ends(rng, steps, carried, ends_last)
    self.terminated, self.truncated, self.valid = self.ends
    self.logits = normal(steps, ACTIONS)
    self.value = normal(steps + 1)
    self.action = rng.integers(ACTIONS, size=steps).astype(np.int32)
    self.behaviour_log_prob = np.array(
        [reference.log_softmax(x)[a] for x, a in zip(normal(steps, ACTIONS), self.action,
                                                     strict=True)])
    self.reward = np.where(self.valid, normal(steps), 0.0)
    self.ratio = reference.ratios(self.logits, self.action, self.behaviour_log_prob)

  def impala(self, **options):
    """Returns (loss, terms), and the gradients by logits and value."""
    return _impala(**options)(
        np.float32(self.logits), np.float32(self.value), self.action,
        np.float32(self.behaviour_log_prob), np.float32(self.reward),
        np.float32(DISCOUNT * ~self.terminated), self.valid)

  def on_policy(self):
    self.behaviour_log_prob = np.array(
        [reference.log_softmax(row)[a] for row, a in zip(self.logits, self.action, strict=True)])
    return self


def test_the_cases_contain_all_kinds_of_ends():
  cases = [Sequence(**case) for case in CASES]
  assert any((x.terminated & ~x.truncated).any() for x in cases)
  assert any((x.truncated & ~x.terminated).any() for x in cases)
  assert any((x.truncated & x.terminated).any() for x in cases)
  assert sum(not x.valid[0] for x in cases) == len(cases) / 2
  assert any((x.terminated | x.truncated)[-1] for x in cases)
  assert any(not x.valid[-1] for x in cases)
  assert any((x.ratio > 2.5).any() and (x.ratio < 1).any() for x in cases)


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('options', OPTIONS)
def test_impala_loss_and_gradient(case, options):
  x = Sequence(**case)
  o = DEFAULTS | options
  targets, advantages = reference.vtrace(
      x.value, x.reward, x.ratio, DISCOUNT, x.ends, o['vtrace_lambda'], o['clip_rho'],
      o['clip_pg_rho'])

  def objective(logits, value):
    return reference.impala_objective(logits, value, x.action, targets, advantages, x.valid,
                                      o['baseline_coef'], o['entropy_coef'])

  (loss, terms), gradients = x.impala(**options)
  expected, expected_terms = objective(x.logits, x.value)
  expected_terms['rho'] = x.ratio[x.valid].sum()
  assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
  assert set(terms) == set(expected_terms)
  for name, value in expected_terms.items():
    assert_allclose(terms[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
  for which, gradient in enumerate(gradients):
    numeric = reference.numeric_gradient(
        lambda at, which=which: objective(*((at, x.value) if which == 0 else (x.logits, at)))[0],
        (x.logits, x.value)[which])
    assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5)
  # The gradient is exactly 0 in invalid rows, and by the last value, which is only bootstrapped.
  assert not np.any(gradients[0][~x.valid])
  assert not np.any(gradients[1][:-1][~x.valid]) and gradients[1][-1] == 0


def test_impala_advantage_carries_no_gradient():
  _, (_, by_value) = Sequence(3).impala(baseline_coef=0.0)
  assert_array_equal(by_value, 0)


@pytest.mark.quick
def test_vtrace_by_hand():
  """gamma = 1/2, V = 1, 2, 3 and then 4, ratios 3/2, 1/2, 3/2.

  delta = 1 (1 + 1 - 1), 1/2 (1 + 3/2 - 2), 1 (2 + 2 - 3) = 1, 1/4, 1
  v_2 = 3 + 1 = 4;  v_1 = 2 + 1/4 + 1/2 1/2 1 = 5/2;  v_0 = 1 + 1 + 1/2 1/4 + 1/4 1/2 1 = 9/4
  advantages 1 (1 + 5/4 - 1), 1/2 (1 + 2 - 2), 1 (2 + 2 - 3) = 5/4, 1/2, 1
  """
  (total, terms), (_, gradient) = _impala()(
      np.log(np.float32([[0.25, 0.75]] * 3)), np.float32([1, 2, 3, 4]), np.int32([1, 0, 1]),
      np.log(np.float32([0.5] * 3)), np.float32([1, 1, 2]), np.float32([0.5] * 3), np.ones(3, bool))
  policy_loss = -(1.25 * np.log(0.75) + 0.5 * np.log(0.25) + 1.0 * np.log(0.75))
  bonus = -3 * (0.25 * np.log(0.25) + 0.75 * np.log(0.75))
  baseline_loss = 0.5 * (1.25 ** 2 + 0.5 ** 2 + 1.0 ** 2)
  assert_allclose(terms['policy_loss'], policy_loss, rtol=1e-6)
  assert_allclose(terms['baseline_loss'], baseline_loss, rtol=1e-6)
  assert_allclose(terms['entropy'], bonus, rtol=1e-6)
  assert_allclose(terms['rho'], 3.5, rtol=1e-6)
  assert_allclose(total, policy_loss + 0.5 * baseline_loss - 0.01 * bonus, rtol=1e-6)
  assert_allclose(gradient, [-0.625, -0.25, -0.5, 0], rtol=1e-6)


@pytest.mark.quick
def test_gae_by_hand():
  """gamma = 1/2, lambda = 1/2; row 1 is truncated, row 2 invalid, row 4 terminated.

  delta = 1 + 1 - 1, 1 + 2 - 2, -, 0 + 1/2 - 3, 5 - 1 = 1, 1, -, -5/2, 4
  A_1 = 1, A_0 = 1 + 1/4;  A_4 = 4, A_3 = -5/2 + 1/4 4
  """
  advantage = _gae(
      np.float32([1, 2, 4, 3, 1, 99]), np.float32([1, 1, 0, 0, 5]),
      np.float32([0.5, 0.5, 0.5, 0.5, 0]), np.array([0, 1, 0, 0, 1], bool), 0.5)
  assert_allclose(np.array(advantage)[[0, 1, 3, 4]], [1.25, 1.0, -1.5, 4.0], rtol=1e-6)


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('gae_lambda', [0.0, 0.95, 1.0])
def test_gae(case, gae_lambda):
  x = Sequence(**case)
  expected = reference.gae(x.value, x.reward, DISCOUNT, gae_lambda, x.ends)
  advantage = _gae(
      np.float32(x.value), np.float32(x.reward), np.float32(DISCOUNT * ~x.terminated),
      x.terminated | x.truncated, gae_lambda)
  assert_allclose(np.array(advantage)[x.valid], expected[x.valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('case', CASES)
def test_gae_has_the_bits_of_rlax(case):
  x = Sequence(**case)
  value, reward, discount = map(np.float32, (x.value, x.reward, DISCOUNT * ~x.terminated))
  done = x.terminated | x.truncated
  expected = jax.jit(rlax.truncated_generalized_advantage_estimation)(
      reward, discount, np.float32(0.95) * (1 - done.astype(np.float32)), value)
  assert np.array_equal(_gae(value, reward, discount, done, 0.95), expected)


@pytest.mark.parametrize('case', CASES)
def test_on_policy_vtrace_targets_are_returns(case):
  """With pi = mu and lambda = 1, V-trace is the n-step return to the sequence's end."""
  x = Sequence(**case).on_policy()
  _, (_, by_value) = x.impala(baseline_coef=1.0)
  targets = x.value - by_value
  expected = reference.returns(x.value, x.reward, DISCOUNT, x.ends)
  assert_allclose(targets[:-1][x.valid], expected[x.valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('case', CASES)
def test_on_policy_vtrace_with_lambda_is_gae(case):
  """Checks the errors of the baseline and, through d loss / d log pi, the advantages."""
  x = Sequence(**case).on_policy()
  _, (by_logits, by_value) = x.impala(vtrace_lambda=0.7, baseline_coef=1.0, entropy_coef=0.0)
  expected = reference.gae(x.value, x.reward, DISCOUNT, 0.7, x.ends)
  assert_allclose(-by_value[:-1][x.valid], expected[x.valid], rtol=1e-5, atol=1e-5)
  by_action_logit = np.array(by_logits)[np.arange(len(x.action)), x.action]
  advantages = -by_action_logit / (1 - np.exp(x.behaviour_log_prob))
  assert_allclose(advantages[x.valid], expected[x.valid], rtol=1e-4, atol=1e-5)


# A chain 0 -> 1 -> 2 -> end with rewards 1, 2, 4. With gamma = 1/2 its values are
# V(2) = 4, V(1) = 2 + 4/2 = 4, V(0) = 1 + 4/2 = 3. The network's value of the end must not matter.
END = 77.0
CHAIN = dict(
    # The last two rows of an episode; an episode that the time limit ends after one step; a whole
    # episode; the first step of an episode that goes on after the rollout.
    value=[4.0, 4.0, END, 3.0, 4.0, 3.0, 4.0, 4.0, END, 3.0, 4.0],
    reward=[2.0, 4.0, 0.0, 1.0, 0.0, 1.0, 2.0, 4.0, 0.0, 1.0],
    terminated=[0, 1, 0, 0, 0, 0, 0, 1, 0, 0],
    truncated=[0, 0, 0, 1, 0, 0, 0, 0, 0, 0],
    valid=[1, 1, 0, 1, 0, 1, 1, 1, 0, 1])


def _chain():
  value = np.float32(CHAIN['value'])
  reward = np.float32(CHAIN['reward'])
  flags = [np.array(CHAIN[name], bool) for name in ('terminated', 'truncated', 'valid')]
  return value, reward, np.float32(0.5 * ~flags[0]), *flags


@pytest.mark.parametrize('gae_lambda', [0.0, 0.9, 1.0])
def test_exact_values_give_zero_gae(gae_lambda):
  value, reward, discount, terminated, truncated, valid = _chain()
  advantage = _gae(value, reward, discount, terminated | truncated, gae_lambda)
  assert_array_equal(np.array(advantage)[valid], 0)


@pytest.mark.parametrize('vtrace_lambda', [0.0, 0.9, 1.0])
def test_exact_values_give_zero_vtrace_errors(vtrace_lambda):
  """The errors are 0 for any importance weights."""
  value, reward, discount, _, _, valid = _chain()
  rng = np.random.default_rng(0)
  (_, terms), gradients = _impala(vtrace_lambda=vtrace_lambda, entropy_coef=0.0)(
      np.float32(rng.normal(size=(len(valid), ACTIONS))), value,
      rng.integers(ACTIONS, size=len(valid)), np.float32(-rng.exponential(size=len(valid))),
      reward, discount, valid)
  assert terms['baseline_loss'] == 0 and terms['policy_loss'] == 0
  for gradient in gradients:
    assert_array_equal(gradient, 0)


@pytest.mark.parametrize('seed', range(4))
def test_impala_invalid_rows_do_not_matter(seed):
  x = Sequence(seed, carried=True)
  # The value after a termination does not count; a truncation bootstraps from the invalid row.
  after_termination = np.append(True, x.terminated)[:-1] & ~x.valid
  assert after_termination.any()

  before = x.impala()
  rng = np.random.default_rng(100 + seed)
  x.logits[~x.valid] += rng.normal(size=(np.sum(~x.valid), ACTIONS))
  x.action[~x.valid] = (x.action[~x.valid] + 1) % ACTIONS
  x.behaviour_log_prob[~x.valid] -= 1.5
  x.reward[~x.valid] = 1e3
  x.value[:-1][after_termination] = -1e3
  jax.tree.map(assert_array_equal, x.impala(), before)


def _ppo_rows(seed, rows=36):
  """Returns rows with ratios inside, above and below the clip, and advantages of both signs."""
  rng = np.random.default_rng(seed)

  def normal(*shape, scale=1.0):
    return (scale * rng.normal(size=shape)).astype(np.float32).astype(np.float64)

  logits = normal(rows, ACTIONS)
  action = rng.integers(ACTIONS, size=rows).astype(np.int32)
  log_ratio = np.tile([-0.5, 0.03, 0.6], rows // 3) * rng.uniform(0.8, 1.2, size=rows)
  log_prob = np.array([reference.log_softmax(x)[a] for x, a in zip(logits, action, strict=True)])
  behaviour_value = normal(rows)
  return dict(
      logits=logits, value=behaviour_value + normal(rows, scale=0.2), action=action,
      behaviour_log_prob=log_prob - log_ratio, behaviour_value=behaviour_value,
      advantage=np.abs(normal(rows)) * np.tile([1, 1, 1, -1, -1, -1], rows // 6),
      value_target=normal(rows), valid=rng.random(rows) < 0.7)


def _ppo_on(rows, **options):
  """Returns (loss, terms), and the gradients by logits and value."""
  return _ppo(**options)(
      *(np.float32(x) if x.dtype == np.float64 else x for x in rows.values()))


PPO_DEFAULTS = dict(clip=0.1, clip_value=False, value_coef=0.5, entropy_coef=0.01)


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('options', [
    dict(), dict(clip_value=True), dict(clip=0.3, clip_smoothly=True),
    dict(clip=0.2, clip_value=True, value_coef=1.5, entropy_coef=0.2)])
def test_ppo_loss_and_gradient(seed, options):
  rows = _ppo_rows(seed)
  o = PPO_DEFAULTS | options
  (loss, terms), gradients = _ppo_on(rows, **options)
  expected, expected_terms = reference.ppo_objective(**rows, **o)
  assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)
  assert set(terms) == set(expected_terms)
  for name, value in expected_terms.items():
    assert_allclose(terms[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
  for name, gradient in zip(('logits', 'value'), gradients, strict=True):
    numeric = reference.numeric_gradient(
        lambda at, name=name: reference.ppo_objective(**(rows | {name: at}), **o)[0], rows[name])
    assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.quick
def test_ppo_by_hand():
  """Ratios 3/2, 3/2, 1/2, 1/2 with advantages 2, -2, 2, -2 and epsilon 1/10.

  Surrogates min(3, 2.2), min(-3, -2.2), min(1, 1.8), min(-1, -1.8) = 2.2, -3, 1, -1.8: sum -1.6
  V = 1, old 1/2: clipped to 0.6. Targets 2, 0, 1, 1.6 give errors max(1, 1.96), max(1, 0.36),
  max(0, 0.16), max(0.36, 1): sum 4.12, and 2.36 unclipped.
  """
  rows = dict(
      logits=np.log(np.array([[0.25, 0.75]] * 4)), value=np.ones(4), action=np.array([1, 1, 0, 0]),
      behaviour_log_prob=np.log(np.full(4, 0.5)), behaviour_value=np.full(4, 0.5),
      advantage=np.array([2.0, -2.0, 2.0, -2.0]), value_target=np.array([2.0, 0.0, 1.0, 1.6]),
      valid=np.ones(4, bool))
  bonus = -4 * (0.25 * np.log(0.25) + 0.75 * np.log(0.75))
  for clip_value, value_loss in ((True, 2.06), (False, 1.18)):
    (loss, terms), _ = _ppo_on(rows, clip_value=clip_value)
    assert_allclose(terms['policy_loss'], 1.6, rtol=1e-5)
    assert_allclose(terms['value_loss'], value_loss, rtol=1e-5)
    assert_allclose(terms['entropy'], bonus, rtol=1e-5)
    assert_allclose(terms['approx_kl'], -2 * np.log(1.5) - 2 * np.log(0.5), rtol=1e-5)
    assert terms['clip_fraction'] == 4
    assert_allclose(loss, 1.6 + 0.5 * value_loss - 0.01 * bonus, rtol=1e-5)


def test_smooth_clip_by_hand():
  """The sigmoid of 4 (x - 0.8) / 0.4 - 2, at -2, 0, 2 and 4."""
  assert_allclose(smooth_clip(jnp.float32([0.8, 1.0, 1.2, 1.4]), 0.8, 1.2),
                  [0.8 + 0.4 * 0.1192029, 1.0, 1.2 - 0.4 * 0.1192029, 0.8 + 0.4 * 0.9820138],
                  rtol=1e-6)
  slope = jax.vmap(jax.grad(lambda x: smooth_clip(x, 0.8, 1.2)))(jnp.float32([1.0, 1e3, -1e3]))
  assert_allclose(slope, [1.0, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize('clip_value', [False, True])
def test_ppo_invalid_rows_do_not_matter(clip_value):
  rows = _ppo_rows(7)
  before = _ppo_on(rows, clip_value=clip_value)
  rng = np.random.default_rng(8)
  invalid = ~rows['valid']
  for x in rows.values():
    if x.dtype == np.float64:
      x[invalid] += rng.normal(size=x[invalid].shape)
  rows['action'][invalid] = (rows['action'][invalid] + 1) % ACTIONS
  jax.tree.map(assert_array_equal, _ppo_on(rows, clip_value=clip_value), before)


def test_categorical():
  logits = np.array([[0.0, 1.0, -2.0], [1e4, 0.0, 3.0], [5.0, 5.0, 5.0]])
  action = np.array([2, 0, 1])
  expected = [reference.log_softmax(x)[a] for x, a in zip(logits, action, strict=True)]
  assert_allclose(POLICY.log_prob(jnp.float32(logits), action), expected, rtol=1e-6)
  expected = [reference.entropy(logits[0]), 0.0, np.log(3)]
  assert_allclose(POLICY.entropy(jnp.float32(logits)), expected, rtol=1e-6)


STEPS = 5
ROW = np.zeros(STEPS, np.float32)
FLAG = np.ones(STEPS, bool)
ACTION = np.zeros(STEPS, np.int32)
VALUE = np.zeros(STEPS + 1, np.float32)
LOGITS = np.zeros((STEPS, ACTIONS), np.float32)
ARGUMENTS = {
    functools.partial(losses.impala_loss, policy=POLICY): [
        LOGITS, VALUE, ACTION, ROW, ROW, ROW, FLAG],
    functools.partial(losses.ppo_loss, policy=POLICY): [
        LOGITS, ROW, ACTION, ROW, ROW, ROW, ROW, FLAG],
    functools.partial(losses.gae, gae_lambda=0.9): [VALUE, ROW, ROW, FLAG],
}


@pytest.mark.parametrize('loss, arguments', ARGUMENTS.items(), ids=['impala', 'ppo', 'gae'])
def test_wrong_shapes_raise(loss, arguments):
  jax.eval_shape(loss, *arguments)
  batch = [np.stack([x, x], axis=1) for x in arguments]
  with pytest.raises(AssertionError):
    jax.eval_shape(loss, *batch)
  for i, right in enumerate(arguments):
    # A single row would broadcast silently.
    for wrong in (batch[i], right[:-1], right[:1]):
      with pytest.raises(AssertionError):
        jax.eval_shape(loss, *arguments[:i], wrong, *arguments[i + 1:])


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('trace_lambda', [1.0, 0.7])
def test_vtrace_for_ppo(case, trace_lambda):
  """The advantage has no importance weight of its own, because PPO multiplies by the ratio."""
  x = Sequence(**case)
  targets, weighted = reference.vtrace(x.value, x.reward, x.ratio, DISCOUNT, x.ends, trace_lambda)
  rho = np.where(x.valid, x.ratio, 0.0)
  advantage, value_target = jax.jit(losses.vtrace)(
      np.float32(x.value), np.float32(x.reward), np.float32(DISCOUNT * ~x.terminated),
      np.float32(rho), trace_lambda)
  rows = x.valid
  assert_allclose(value_target[rows], targets[rows], rtol=1e-4, atol=1e-5)
  assert_allclose(advantage[rows], weighted[rows] / np.minimum(1.0, x.ratio[rows]), rtol=1e-4,
                  atol=1e-5)


def test_vtrace_for_ppo_is_gae_on_policy():
  x = Sequence(3)
  args = [np.float32(a) for a in (x.value, x.reward, DISCOUNT * ~x.terminated)]
  advantage, _ = losses.vtrace(*args, np.float32(x.valid), 0.9)
  expected = _gae(*args, x.terminated | x.truncated, 0.9)
  assert_allclose(advantage[x.valid], expected[x.valid], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('rows, expected', [(1, (0.0, 1.0)), (2, (3.0, 1e-8))])
def test_the_only_advantage_of_a_minibatch_is_not_normalised(rows, expected):
  """Normalised, it would be 0 and the policy would never change."""
  statistics = losses.PPO().statistics(
      None, jnp.ones((1, 1, rows), bool), {'advantage': jnp.full((1, 1, rows), 3.0)})
  np.testing.assert_allclose(statistics, expected, rtol=1e-6)
