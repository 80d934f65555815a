"""Without duplicates, an island has the same bits in programs for one device and for several."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy.testing import assert_allclose

from benchmarks.fuzz_islands import arguments, different_programs, draw
from podracer_jit.numerics import islands
from podracer_jit.numerics.common_subexpressions import without_duplicates


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
      'broadcast_in_dim': 2, 'div': 2, 'add': 2}  # one is the broadcast of 1


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


@pytest.mark.parametrize('exponent', [-3, -1, 0, 1, 5, 6])
def test_powers_become_the_same_products_as_in_jax(exponent):
  def power(x):
    return lax.integer_pow(x, exponent)

  simplified = jax.extend.core.jaxpr_as_fun(without_duplicates(jax.make_jaxpr(power)(X)))
  (result,) = jax.jit(simplified)(X)
  assert np.asarray(result).tobytes() == np.asarray(jax.jit(power)(X)).tobytes()


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
  results = jax.extend.core.jaxpr_as_fun(simplified)(X)
  jax.tree.map(assert_allclose, jax.tree.unflatten(jax.tree.structure(shapes), results),
               function(X))
  product = next(equation for equation in simplified.eqns if equation.primitive.name == 'mul')
  assert 'outer' in str(product.source_info.name_stack)


def _norm(x):
  return jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))


# Each had other bits on two devices than on one before equal operations were merged.
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
@pytest.mark.parametrize('number', range(1, 9))
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
