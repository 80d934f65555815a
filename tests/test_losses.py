"""The losses against the papers' equations in plain NumPy, and against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit import losses
from podracer_jit.losses import categorical

ACTIONS = 4
DISCOUNT = 0.9
# (how the sequence begins and ends, seed)
CASES = [dict(carried=c, ends_last=e, seed=s)
         for s, (c, e) in enumerate([(False, False), (True, False), (False, True), (True, True)] * 2)]
OPTIONS = [
    dict(),
    dict(vtrace_lambda=0.8),
    dict(clip_rho=1.7, clip_pg_rho=1.3, vtrace_lambda=0.95),
    dict(clip_pg_rho=2.5, baseline_coef=1.25, entropy_coef=0.3),
]
DEFAULTS = dict(vtrace_lambda=1.0, clip_rho=1.0, clip_pg_rho=1.0, baseline_coef=0.5,
                entropy_coef=0.01)


class Sequence:
  """A random sequence of 13 rows, float32 numbers in float64 arrays."""

  def __init__(self, seed, carried=False, ends_last=False, steps=13):
    rng = np.random.default_rng(seed)

    def normal(*shape):
      return rng.normal(size=shape).astype(np.float32).astype(np.float64)

    self.ends = reference.random_ends(rng, steps, carried, ends_last)
    self.terminated, self.truncated, self.valid = self.ends
    self.logits, self.value = normal(steps, ACTIONS), normal(steps + 1)
    self.action = rng.integers(ACTIONS, size=steps).astype(np.int32)
    self.behaviour_log_prob = np.array(
        [reference.log_softmax(x)[a] for x, a in zip(normal(steps, ACTIONS), self.action,
                                                     strict=True)])
    self.reward = np.where(self.valid, normal(steps), 0.0)
    self.ratio = reference.ratios(self.logits, self.action, self.behaviour_log_prob)

  def impala(self, logits, value, **options):
    return losses.impala_loss(
        jnp.float32(logits), jnp.float32(value), self.action, jnp.float32(self.behaviour_log_prob),
        jnp.float32(self.reward), jnp.float32(DISCOUNT * ~self.terminated), self.valid, **options)

  def gae(self, gae_lambda):
    return losses.gae(
        jnp.float32(self.value), jnp.float32(self.reward), jnp.float32(DISCOUNT * ~self.terminated),
        self.terminated | self.truncated, gae_lambda)


def test_the_cases_have_all_kinds_of_ends():
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
  x, o = Sequence(**case), DEFAULTS | options
  targets, advantages = reference.vtrace(
      x.value, x.reward, x.ratio, DISCOUNT, x.ends, o['vtrace_lambda'], o['clip_rho'],
      o['clip_pg_rho'])

  def objective(logits, value):
    return reference.impala_objective(logits, value, x.action, targets, advantages, x.valid,
                                      o['baseline_coef'], o['entropy_coef'])

  (loss, terms), gradients = jax.value_and_grad(
      lambda *a: x.impala(*a, **options), (0, 1), has_aux=True)(x.logits, x.value)
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
  # Exactly nothing comes from invalid rows, nor from the last value, which is only bootstrapped from.
  assert not np.any(gradients[0][~x.valid])
  assert not np.any(gradients[1][:-1][~x.valid]) and gradients[1][-1] == 0


def test_impala_advantage_carries_no_gradient():
  x = Sequence(3)
  gradient = jax.grad(lambda v: x.impala(x.logits, v, baseline_coef=0.0)[0])(jnp.float32(x.value))
  assert_array_equal(gradient, 0)


def test_vtrace_by_hand():
  """gamma = 1/2, V = 1, 2, 3 and then 4, ratios 3/2, 1/2, 3/2.

  delta = 1 (1 + 1 - 1), 1/2 (1 + 3/2 - 2), 1 (2 + 2 - 3) = 1, 1/4, 1
  v_2 = 3 + 1 = 4;  v_1 = 2 + 1/4 + 1/2 1/2 1 = 5/2;  v_0 = 1 + 1 + 1/2 1/4 + 1/4 1/2 1 = 9/4
  advantages 1 (1 + 5/4 - 1), 1/2 (1 + 2 - 2), 1 (2 + 2 - 3) = 5/4, 1/2, 1
  """
  logits = jnp.log(jnp.array([[0.25, 0.75]] * 3))

  def loss(value):
    return losses.impala_loss(
        logits, value, jnp.array([1, 0, 1]), jnp.full(3, jnp.log(0.5)), jnp.array([1.0, 1.0, 2.0]),
        jnp.full(3, 0.5), jnp.ones(3, bool))

  (total, terms), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.array([1.0, 2.0, 3.0, 4.0]))
  policy_loss = -(1.25 * np.log(0.75) + 0.5 * np.log(0.25) + 1.0 * np.log(0.75))
  bonus = -3 * (0.25 * np.log(0.25) + 0.75 * np.log(0.75))
  baseline_loss = 0.5 * (1.25 ** 2 + 0.5 ** 2 + 1.0 ** 2)
  assert_allclose(terms['policy_loss'], policy_loss, rtol=1e-6)
  assert_allclose(terms['baseline_loss'], baseline_loss, rtol=1e-6)
  assert_allclose(terms['entropy'], bonus, rtol=1e-6)
  assert_allclose(terms['rho'], 3.5, rtol=1e-6)
  assert_allclose(total, policy_loss + 0.5 * baseline_loss - 0.01 * bonus, rtol=1e-6)
  assert_allclose(gradient, [-0.625, -0.25, -0.5, 0], rtol=1e-6)


def test_gae_by_hand():
  """gamma = 1/2, lambda = 1/2; row 1 is truncated, row 2 invalid, row 4 terminated.

  delta = 1 + 1 - 1, 1 + 2 - 2, -, 0 + 1/2 - 3, 5 - 1 = 1, 1, -, -5/2, 4
  A_1 = 1, A_0 = 1 + 1/4;  A_4 = 4, A_3 = -5/2 + 1/4 4
  """
  advantage = losses.gae(
      jnp.array([1.0, 2.0, 4.0, 3.0, 1.0, 99.0]), jnp.array([1.0, 1.0, 0.0, 0.0, 5.0]),
      jnp.array([0.5, 0.5, 0.5, 0.5, 0.0]), jnp.array([False, True, False, False, True]), 0.5)
  assert_allclose(advantage[jnp.array([0, 1, 3, 4])], [1.25, 1.0, -1.5, 4.0], rtol=1e-6)


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('gae_lambda', [0.0, 0.95, 1.0])
def test_gae(case, gae_lambda):
  x = Sequence(**case)
  expected = reference.gae(x.value, x.reward, DISCOUNT, gae_lambda, x.ends)
  assert_allclose(x.gae(gae_lambda)[x.valid], expected[x.valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('case', CASES)
def test_on_policy_vtrace_targets_are_returns(case):
  """Where pi = mu and lambda = 1, V-trace is the n-step return to the sequence's end."""
  x = Sequence(**case)
  x.behaviour_log_prob = np.array(
      [reference.log_softmax(row)[a] for row, a in zip(x.logits, x.action, strict=True)])
  gradient = jax.grad(lambda v: x.impala(x.logits, v, baseline_coef=1.0)[0])(jnp.float32(x.value))
  targets = x.value[:-1] - gradient[:-1]
  expected = reference.returns(x.value, x.reward, DISCOUNT, x.ends)
  assert_allclose(targets[x.valid], expected[x.valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('case', CASES)
def test_on_policy_vtrace_with_lambda_is_gae(case):
  """Both the errors of the baseline and, through d loss / d log pi, the advantages."""
  x = Sequence(**case)
  x.behaviour_log_prob = np.array(
      [reference.log_softmax(row)[a] for row, a in zip(x.logits, x.action, strict=True)])
  by_logits, by_value = jax.grad(
      lambda *a: x.impala(*a, vtrace_lambda=0.7, baseline_coef=1.0, entropy_coef=0.0)[0], (0, 1))(
          jnp.float32(x.logits), jnp.float32(x.value))
  expected = reference.gae(x.value, x.reward, DISCOUNT, 0.7, x.ends)[x.valid]
  assert_allclose(-by_value[:-1][x.valid], expected, rtol=1e-5, atol=1e-5)
  rows = np.arange(len(x.action))
  pi = np.exp([reference.log_softmax(row)[a] for row, a in zip(x.logits, x.action, strict=True)])
  assert_allclose((-by_logits[rows, x.action] / (1 - pi))[x.valid], expected, rtol=1e-4, atol=1e-5)


# A chain 0 -> 1 -> 2 -> end with rewards 1, 2, 4. With gamma = 1/2 its values are
# V(2) = 4, V(1) = 2 + 4/2 = 4, V(0) = 1 + 4/2 = 3. What a network says of the end must not matter.
END = 77.0
CHAIN = dict(
    # Two rows of an episode that began before; one cut after its first step, by the time limit;
    # a whole one; the first step of the next, where the rollout ends.
    value=[4.0, 4.0, END, 3.0, 4.0, 3.0, 4.0, 4.0, END, 3.0, 4.0],
    reward=[2.0, 4.0, 0.0, 1.0, 0.0, 1.0, 2.0, 4.0, 0.0, 1.0],
    terminated=[0, 1, 0, 0, 0, 0, 0, 1, 0, 0],
    truncated=[0, 0, 0, 1, 0, 0, 0, 0, 0, 0],
    valid=[1, 1, 0, 1, 0, 1, 1, 1, 0, 1])


def _chain():
  value, reward = jnp.array(CHAIN['value']), jnp.array(CHAIN['reward'])
  flags = (np.array(CHAIN[name], bool) for name in ('terminated', 'truncated', 'valid'))
  return value, reward, *flags


@pytest.mark.parametrize('gae_lambda', [0.0, 0.9, 1.0])
def test_exact_values_leave_no_gae(gae_lambda):
  value, reward, terminated, truncated, valid = _chain()
  advantage = losses.gae(value, reward, 0.5 * (1.0 - terminated.astype(np.float32)),
                         terminated | truncated, gae_lambda)
  assert_array_equal(advantage[valid], 0)


@pytest.mark.parametrize('vtrace_lambda', [0.0, 0.9, 1.0])
def test_exact_values_leave_no_vtrace_error(vtrace_lambda):
  """Whatever the importance weights."""
  value, reward, terminated, _, valid = _chain()
  rng = np.random.default_rng(0)
  logits = jnp.float32(rng.normal(size=(len(valid), ACTIONS)))

  def loss(logits, value):
    return losses.impala_loss(
        logits, value, rng.integers(ACTIONS, size=len(valid)),
        jnp.float32(-rng.exponential(size=len(valid))), reward,
        0.5 * (1.0 - terminated.astype(np.float32)), valid, vtrace_lambda=vtrace_lambda,
        entropy_coef=0.0)

  (_, terms), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(logits, value)
  assert terms['baseline_loss'] == 0 and terms['policy_loss'] == 0
  for gradient in gradients:
    assert_array_equal(gradient, 0)


@pytest.mark.parametrize('seed', range(4))
def test_impala_invalid_rows_do_not_matter(seed):
  x = Sequence(seed, carried=True)
  # What follows a termination is worth nothing; a truncation bootstraps from the invalid row's value.
  after_termination = np.append(True, x.terminated)[:-1] & ~x.valid
  assert after_termination.any()

  def run():
    return jax.value_and_grad(lambda *a: x.impala(*a), (0, 1), has_aux=True)(x.logits, x.value)

  before = run()
  rng = np.random.default_rng(100 + seed)
  x.logits[~x.valid] += rng.normal(size=(np.sum(~x.valid), ACTIONS))
  x.action[~x.valid] = (x.action[~x.valid] + 1) % ACTIONS
  x.behaviour_log_prob[~x.valid] -= 1.5
  x.reward[~x.valid] = 1e3
  x.value[:-1][after_termination] = -1e3
  jax.tree.map(assert_array_equal, run(), before)


def _ppo_rows(seed, rows=40):
  rng = np.random.default_rng(seed)

  def normal(*shape, scale=1.0):
    return (scale * rng.normal(size=shape)).astype(np.float32).astype(np.float64)

  logits, action = normal(rows, ACTIONS), rng.integers(ACTIONS, size=rows).astype(np.int32)
  behaviour = logits + normal(rows, ACTIONS, scale=0.2)
  behaviour_log_prob = np.array(
      [reference.log_softmax(x)[a] for x, a in zip(behaviour, action, strict=True)])
  behaviour_value = normal(rows)
  return dict(
      logits=logits, value=behaviour_value + normal(rows, scale=0.2), action=action,
      behaviour_log_prob=behaviour_log_prob, behaviour_value=behaviour_value,
      advantage=normal(rows), value_target=normal(rows), valid=rng.random(rows) < 0.7)


def _ppo(rows, **options):
  rows = {k: jnp.float32(v) if v.dtype == np.float64 else v for k, v in rows.items()}

  def loss(logits, value):
    return losses.ppo_loss(**(rows | dict(logits=logits, value=value)), **options)

  return jax.value_and_grad(loss, (0, 1), has_aux=True)(rows['logits'], rows['value'])


PPO_DEFAULTS = dict(clip=0.1, clip_value=False, value_coef=0.5, entropy_coef=0.01)


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('options', [
    dict(), dict(clip_value=True), dict(clip=0.2, clip_value=True, value_coef=1.5, entropy_coef=0.2)])
def test_ppo_loss_and_gradient(seed, options):
  rows, o = _ppo_rows(seed), PPO_DEFAULTS | options
  ratio = reference.ratios(rows['logits'], rows['action'], rows['behaviour_log_prob'])
  for sign in (1, -1):  # both signs of advantage, inside the clip and beyond either end
    for part in (ratio > 1 + o['clip'], ratio < 1 - o['clip'], abs(ratio - 1) < o['clip']):
      assert np.any(rows['valid'] & part & (sign * rows['advantage'] > 0))

  (loss, terms), gradients = _ppo(rows, **options)
  expected, expected_terms = reference.ppo_objective(**rows, **o)
  assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)
  assert set(terms) == set(expected_terms)
  for name, value in expected_terms.items():
    assert_allclose(terms[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
  for name, gradient in zip(('logits', 'value'), gradients, strict=True):
    numeric = reference.numeric_gradient(
        lambda at, name=name: reference.ppo_objective(**(rows | {name: at}), **o)[0], rows[name])
    assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5, err_msg=name)


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
    (loss, terms), _ = _ppo(rows, clip_value=clip_value)
    assert_allclose(terms['policy_loss'], 1.6, rtol=1e-5)
    assert_allclose(terms['value_loss'], value_loss, rtol=1e-5)
    assert_allclose(terms['entropy'], bonus, rtol=1e-5)
    assert_allclose(terms['approx_kl'], -2 * np.log(1.5) - 2 * np.log(0.5), rtol=1e-5)
    assert terms['clip_fraction'] == 4
    assert_allclose(loss, 1.6 + 0.5 * value_loss - 0.01 * bonus, rtol=1e-5)


@pytest.mark.parametrize('clip_value', [False, True])
def test_ppo_invalid_rows_do_not_matter(clip_value):
  rows = _ppo_rows(7)
  before = _ppo(rows, clip_value=clip_value)
  rng = np.random.default_rng(8)
  invalid = ~rows['valid']
  for name, x in rows.items():
    if x.dtype == np.float64:
      x[invalid] += rng.normal(size=x[invalid].shape)
  rows['action'][invalid] = (rows['action'][invalid] + 1) % ACTIONS
  jax.tree.map(assert_array_equal, _ppo(rows, clip_value=clip_value), before)


def test_categorical():
  logits = np.array([[0.0, 1.0, -2.0], [1e4, 0.0, 3.0], [5.0, 5.0, 5.0]])
  action = np.array([2, 0, 1])
  expected = [reference.log_softmax(x)[a] for x, a in zip(logits, action, strict=True)]
  assert_allclose(categorical.log_prob(jnp.float32(logits), action), expected, rtol=1e-6)
  expected = [reference.entropy(logits[0]), 0.0, np.log(3)]
  assert_allclose(categorical.entropy(jnp.float32(logits)), expected, rtol=1e-6)


def test_wrong_shapes_raise():
  steps = 5
  row, value, logits = jnp.zeros(steps), jnp.zeros(steps + 1), jnp.zeros((steps, ACTIONS))
  action, flag = jnp.zeros(steps, jnp.int32), jnp.ones(steps, bool)
  impala = [logits, value, action, row, row, row, flag]
  ppo = [logits, row, action, row, row, row, row, flag]
  gae = [value, row, row, flag]
  for loss, arguments in ((losses.impala_loss, impala), (losses.ppo_loss, ppo),
                          (lambda *a: losses.gae(*a, 0.9), gae)):
    loss(*arguments)
    for i, right in enumerate(arguments):
      short, batched = right[:-1], jnp.stack([right, right], axis=1)
      for wrong in (short, batched):
        if loss is not losses.gae and right is logits and wrong is short:
          continue  # checked below
        with pytest.raises((AssertionError, TypeError, ValueError)):
          loss(*arguments[:i], wrong, *arguments[i + 1:])
