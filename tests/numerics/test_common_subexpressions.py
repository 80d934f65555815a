"""Without duplicates, an island has the same bits in programs for one device and for several."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun
from numpy.testing import assert_allclose

from benchmarks.fuzz_islands import arguments, different_programs, draw
from podracer_jit.numerics import islands
from podracer_jit.numerics.common_subexpressions import without_duplicates
from tests.tiers import essential


def _primitives(function, *args, simplified=True):
  """Returns how often a function has each primitive, also in the bodies of loops."""
  closed = jax.make_jaxpr(function)(*args)
  jaxpr = (without_duplicates(closed) if simplified else closed).jaxpr
  return collections.Counter(_all_primitives(jaxpr))


def _all_primitives(jaxpr):
  for equation in jaxpr.eqns:
    yield equation.primitive.name
    for inner in jax.tree.leaves(list(equation.params.values()),
                                 is_leaf=lambda value: hasattr(value, 'eqns')):
      if hasattr(inner, 'eqns'):
        yield from _all_primitives(getattr(inner, 'jaxpr', inner))


X, Y = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[0.5], [0.25]])


def test_equal_equations_are_merged():
  assert _primitives(lambda x: jnp.sin(x) * jnp.sin(x), X) == {'sin': 1, 'mul': 1}


def test_operands_of_a_sum_may_change_places_and_those_of_a_difference_may_not():
  assert _primitives(lambda x, y: (x + y) * (y + x), X, X) == {'add': 1, 'mul': 1}
  assert _primitives(lambda x, y: (x - y) * (y - x), X, X) == {'sub': 2, 'mul': 1}


def test_implicit_broadcasts_become_equations_and_are_merged():
  """Two quotients with one denominator, as in the gradient of a softmax."""
  assert _primitives(lambda x, y: lax.div(x, y) + lax.div(x + 1, y), X, Y) == {
      'broadcast_in_dim': 2, 'div': 2, 'add': 2}  # of y and of 1


def _with_jvp():
  function = jax.custom_jvp(jnp.sin)
  function.defjvp(lambda primals, tangents: (jnp.sin(*primals), tangents[0]))
  return function


def _with_vjp():
  function = jax.custom_vjp(jnp.sin)
  function.defvjp(lambda x: (jnp.sin(x), None), lambda _, cotangent: (cotangent,))
  return function


@pytest.mark.parametrize('call', [jax.jit(jnp.sin), _with_jvp(), _with_vjp()])
def test_what_a_call_computes_is_merged_with_the_rest(call):
  assert _primitives(lambda x: call(x) * jnp.sin(x), X) == {'sin': 1, 'mul': 1}


def test_a_square_and_a_product_are_the_same():
  def squares(x):
    return (jnp.square(x), x * x, x ** 2, lax.stop_gradient(x) * x)

  assert _primitives(squares, X) == {'mul': 1}


def _simplified(function, *args):
  """Returns the results of a function without duplicates."""
  return jaxpr_as_fun(without_duplicates(jax.make_jaxpr(function)(*args)))(*args)


@pytest.mark.parametrize('exponent', [-3, -1, 0, 1, 5, 6, 11])
def test_powers_become_the_same_products_as_in_jax(exponent):
  def power(x):
    return lax.integer_pow(x, exponent)

  x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
  (result,) = _simplified(power, x)
  assert np.asarray(result).tobytes() == np.asarray(power(x)).tobytes()


def test_what_only_looks_different_is_merged():
  def reshapes(x):
    total = jnp.sum(x, 1)
    return total[:, None], total.reshape(2, 1), jnp.squeeze(total[:, None], 1)[:, None]

  assert _primitives(reshapes, X) == {'reduce_sum': 1, 'reshape': 1}

  def copies(x):
    return jnp.sin(x), jnp.sin(jnp.array(x, copy=True)), jnp.sin(checkpoint_name(x, 'x'))

  assert _primitives(copies, X) == {'sin': 1}

  def products(x):
    return x @ x.T, lax.dot_general(x, x.T, (((1,), (0,)), ((), ())))

  assert _primitives(products, X)['dot_general'] == 1

  def conversions(x):
    whole = x.astype(jnp.int32)
    return jnp.sin(whole * 1.0), jnp.sin(whole.astype(jnp.float32) * 1.0)

  assert _primitives(conversions, X)['sin'] == 1


def test_equal_bodies_with_different_constants_are_not_merged():
  """The constants are those of jitted functions within the bodies."""
  tables = np.float32([[1, 2, 3], [10, 20, 30]])

  def with_each(use):
    return lambda x: [use(jax.jit(lambda c, table=table: c * table), x) for table in tables]

  for use in (lambda inner, x: lax.fori_loop(0, 2, lambda i, c: inner(c), x),
              lambda inner, x: lax.cond(x[0] > 0, inner, jnp.sin, x),
              lambda inner, x: jax.checkpoint(lambda c: inner(c) + 1)(x),
              lambda inner, x: inner(x)):
    expected = with_each(use)(X[0])
    assert (np.asarray(expected[0]) != np.asarray(expected[1])).all()
    for result, value in zip(_simplified(with_each(use), X[0]), expected, strict=True):
      assert_allclose(result, value, rtol=1e-6)


def test_equations_in_different_contexts_are_not_merged():
  def bits(key):
    drawn = []
    for partitionable in (True, False):
      with jax.threefry_partitionable(partitionable):
        drawn.append(jax.random.bits(key, (3,)))
    return drawn

  key = jax.random.key(0)
  assert (np.asarray(bits(key)[0]) != np.asarray(bits(key)[1])).any()
  for result, expected in zip(_simplified(bits, key), bits(key), strict=True):
    assert (np.asarray(result) == np.asarray(expected)).all()


def test_loops_and_branches_have_no_duplicates_either():
  def function(x):
    carry, _ = lax.scan(lambda c, row: (jnp.sin(c) * jnp.sin(c) + row, None), x[0], x)
    carry = lax.while_loop(lambda c: c[0] < 9, lambda c: jnp.cos(c) * jnp.cos(c) + c + 1, carry)
    carry = lax.cond(carry[0] > 9, lambda c: jnp.exp(c) / jnp.exp(c), jnp.tanh, carry)
    return jax.checkpoint(lambda c: jnp.log(c) + jnp.log(c))(carry)

  before, after = _primitives(function, X, simplified=False), _primitives(function, X)
  for name in ('sin', 'cos', 'exp', 'log'):
    assert (before[name], after[name]) == (2, 1)


def test_equal_loops_are_merged_and_different_ones_are_not():
  def loop(x, step):
    return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * step, x)

  assert _primitives(lambda x: loop(x, 2.0) + loop(x, 2.0), X)['scan'] == 1
  assert _primitives(lambda x: loop(x, 2.0) + loop(x, 3.0), X)['scan'] == 2


def test_effects_and_barriers_are_never_merged():
  def function(x):
    jax.debug.callback(lambda x: None, x)
    jax.debug.callback(lambda x: None, x)
    return lax.optimization_barrier(x) + lax.optimization_barrier(x)

  counts = _primitives(function, X)
  assert (counts['debug_callback'], counts['optimization_barrier']) == (2, 2)


def test_results_constants_and_scopes_are_kept():
  table = np.arange(6, dtype=np.float32).reshape(2, 3)

  def function(x):
    with jax.named_scope('outer'):
      looked_up = jax.jit(lambda x: x * table + jnp.sin(table))(x)
    return {'a': x, 'b': looked_up, 'c': 3.0}, looked_up

  closed, shapes = jax.make_jaxpr(function, return_shape=True)(X)
  simplified = without_duplicates(closed)
  results = jaxpr_as_fun(simplified)(X)
  jax.tree.map(assert_allclose, jax.tree.unflatten(jax.tree.structure(shapes), results),
               function(X))
  product = next(equation for equation in simplified.eqns if equation.primitive.name == 'mul')
  assert 'outer' in str(product.source_info.name_stack)


def _norm(x):
  return jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))


# Before equal operations were merged, most had other bits on two devices than on one.
FUNCTIONS = {
    'softmax': lambda w, x: jax.nn.softmax(x @ w),
    'entropy': lambda w, x: jax.nn.softmax(x @ w) * jax.nn.log_softmax(x @ w),
    'layer norm': lambda w, x: jax.nn.standardize(x @ w) + x / _norm(x),
    'unit vectors': lambda w, x: (x @ w) / _norm(x @ w),
    'distributive law': lambda w, x: (x @ w) * x[..., :1] + (x @ w.T) * x[..., :1],
    'quotients of quotients': lambda w, x: (x @ w) / jnp.exp(x[..., :1]) / jnp.exp(w[0]),
    'normal density': lambda w, x: jax.scipy.stats.norm.logpdf(x, x @ w, jax.nn.softplus(w[0])),
    'softmax in a loop': lambda w, x: lax.scan(
        lambda c, row: (jax.nn.softmax(c @ w + row), c), x[0], x)[1],
    'an unrolled loop': lambda w, x: lax.scan(
        lambda c, row: (jnp.tanh(c + row / _norm(w[:4])), c / _norm(w[:4])), x[0], x,
        unroll=True)[1],
    'reshapes': lambda w, x: (x / jnp.squeeze(_norm(x @ w), -1)[..., None]
                              + jnp.cos(x) / _norm(x @ w).reshape(6, 4).reshape(6, 4, 1)),
    'copies': lambda w, x: x / _norm(x @ w) + jnp.cos(x) / _norm(jnp.array(x @ w, copy=True)),
    'kinds of products': lambda w, x: (x / _norm(x @ w) + jnp.cos(x) / _norm(
        lax.dot_general(x, w, (((2,), (0,)), ((), ()))))),
}


@pytest.mark.as_shipped
@pytest.mark.parametrize('name', FUNCTIONS)
@pytest.mark.same_bits('what stands around an island, and 2 devices and 1',
                       'functions with a shared denominator or factor')
def test_shared_factors_and_denominators_have_the_same_bits(name):
  weights, x, *_ = arguments(0)
  assert not different_programs(lambda w, x: jnp.sum(jnp.sin(FUNCTIONS[name](w, x))), [weights, x])


@pytest.mark.as_shipped
def test_attention_of_flax_has_the_same_bits():
  module = nn.MultiHeadDotProductAttention(2)
  _, x, *_ = arguments(0)
  variables = module.init(jax.random.key(0), x)
  assert not different_programs(lambda v, x: jnp.sum(jnp.sin(module.apply(v, x))), [variables, x])


@pytest.mark.as_shipped
@pytest.mark.parametrize('number', essential(range(1, 9), 1, 4))
@pytest.mark.same_bits('what stands around an island, and 2 devices and 1',
                       'eight functions drawn at random')
def test_functions_drawn_at_random_have_the_same_bits(number):
  _, function = draw(number)
  assert not different_programs(function, arguments(number))


@pytest.mark.as_shipped
def test_with_duplicates_a_softmax_has_other_bits_on_two_devices(monkeypatch):
  monkeypatch.setattr(islands, 'without_duplicates', lambda closed: closed)
  weights, x, *_ = arguments(0)
  function = FUNCTIONS['softmax']
  different = different_programs(lambda w, x: jnp.sum(jnp.sin(function(w, x))), [weights, x])
  assert 'on two devices' in different
