"""Islands have the same bits in any surrounding program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.compiled import islands
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import _unrolled, island

pytestmark = pytest.mark.as_shipped  # the tests need XLA's usual optimisations


def _all_magnitudes(seed, count=10_000):
  """Returns floats of all magnitudes, including denormals."""
  rng = np.random.default_rng(seed)
  exponent = rng.integers(-140, 60, size=count)
  return np.ldexp(rng.normal(size=count), exponent).astype(np.float32)


def _normal(seed, count=10_000):
  return np.random.default_rng(seed).normal(size=count).astype(np.float32)


@island('product')
def product(x, y):
  return x * y


@island('sum_of_products')
def sum_of_products(x, y, z):
  return x * y + z


def test_a_product_in_an_island_is_rounded_before_a_sum():
  """Without the island, XLA contracts product and sum, and rounds once."""
  x, y, z = (_normal(seed) for seed in range(3))
  assert_array_equal(jax.jit(lambda x, y, z: product(x, y) + z)(x, y, z), x * y + z)  # in NumPy
  assert (jax.jit(lambda x, y, z: x * y + z)(x, y, z) != x * y + z).any()


@pytest.mark.parametrize('numbers', [_normal, _all_magnitudes])
@pytest.mark.parametrize('surroundings', [
    lambda x, y, z: sum_of_products(x * z, y, z) * x,
    lambda x, y, z: lax.fori_loop(0, 1, lambda i, a: sum_of_products(x * z, y, z), x) * x,
    lambda x, y, z: lax.scan(lambda a, row: (a, sum_of_products(row, y, z)), 0.0, (x * z)[None]
                             )[1][0] * x,
    lambda x, y, z: lax.map(lambda a: sum_of_products(a * z, y, z), jnp.stack([x, y, z]))[0] * x,
    lambda x, y, z: jax.vmap(lambda a: sum_of_products(a * z, y, z))(jnp.stack([x, y, z]))[0] * x,
])
@pytest.mark.same_bits('what stands around an island', '10,000 numbers of all magnitudes')
def test_an_island_has_the_same_bits_in_any_surroundings(surroundings, numbers):
  x, y, z = (numbers(seed) for seed in range(3))
  alone = np.asarray(jax.jit(sum_of_products)(jax.jit(lambda x, z: x * z)(x, z), y, z))
  expected = jax.jit(lambda a, x: a * x)(alone, x)
  assert_array_equal(jax.jit(surroundings)(x, y, z), expected)


def test_constants_are_not_folded_into_an_island():
  """XLA would replace the division by a constant with a product."""
  quotient = island('quotient')(lambda x, y: x / y)
  x = _normal(0)
  assert_array_equal(jax.jit(lambda x: quotient(x, jnp.float32(3.0)))(x),
                     jax.jit(quotient)(x, np.float32(3.0)))


@pytest.mark.parametrize('rows', [1, 2, 3])
def test_a_map_over_groups_has_the_same_bits_for_any_number_of_groups(rows):
  """Failed without the island (jax 0.10.2), because XLA unrolls a loop of one turn.

  The product is the same in all turns. XLA hoists it out of a loop of several turns; in an unrolled
  turn it contracts the product with the sum.
  """
  xs, p, q = (_normal(seed, 4 * 64).reshape(4, 64) for seed in range(3))

  def program(xs, p, q):
    groups = Groups(len(xs), 1)
    return groups.map(lambda x: sum_of_products(p, q, x), xs)

  all_groups = jax.jit(program)(xs, p[0], q[0])
  assert_array_equal(jax.jit(program)(xs[:rows], p[0], q[0]), all_groups[:rows])


def test_an_island_updates_a_donated_state_in_place():
  """`skipped` returns the state, so neither branch needs a copy of it."""
  def next_state(state, change):
    return jax.tree.map(lambda s: 0.9 * s - change, state)

  state = {'a': jnp.ones((1024, 1024)), 'b': jnp.ones(1024)}
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  in_place = island('in_place', skipped=lambda state, change: state)(next_state)
  copied = island('copied')(next_state)

  def temporaries(function):
    program = jax.jit(lambda s, c: function(s, c), donate_argnums=0)
    return program.lower(state, jnp.float32(1)).compile().memory_analysis().temp_size_in_bytes

  assert temporaries(in_place) < 1024
  assert temporaries(in_place) <= temporaries(copied) <= size + 1024


def test_an_island_can_return_nothing():
  assert jax.jit(island('nothing')(lambda x: ()))(jnp.ones(3)) == ()


def test_an_input_that_is_not_read_is_no_input_of_the_compiled_island():
  """So it need not be computed, and the state of an algorithm costs only what a loss reads."""
  @island('half')
  def half(state, unread):
    del unread
    return 0.5 * state['read']

  def text(function):
    return jax.jit(function).lower(jnp.ones(8), jnp.ones(7)).compile().as_text()

  def surrounded(x, y):
    return half(dict(read=jnp.sin(x), unread=jnp.cos(y)), jnp.cos(y))

  both = text(surrounded)
  assert 'cosine' not in both and 'f32[7]' not in both
  alone = text(lambda x, y: island('half')(lambda x: 0.5 * x)(jnp.sin(x)))
  assert islands(both) == islands(alone) and set(islands(both)) == {'half'}
  # An island reads what it returns, too.
  passed_on = island('passed_on')(lambda x, y: (2.0 * x, y))
  assert 'cosine' in text(lambda x, y: passed_on(x, jnp.cos(y)))


@pytest.mark.parametrize('platform, barriers', [('cuda', 2), ('tpu', 2), ('cpu', 3)])
def test_on_accelerators_an_island_is_two_barriers(platform, barriers):
  """On a CPU a third barrier hides the predicate of the cond."""
  traced = jax.jit(product).trace(*[jnp.ones(3)] * 2)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert text.count('optimization_barrier') == barriers


def test_the_body_of_an_island_can_be_found_in_a_program():
  def text(function):
    x = jnp.ones(8)
    return jax.jit(function).lower(x, x, x).compile().as_text()

  (body,), = islands(text(sum_of_products)).values()
  surrounded = islands(text(lambda x, y, z: jnp.sin(sum_of_products(jnp.cos(x), y, z) + 2 * y)))
  assert surrounded == {'sum_of_products': {body}}
  assert 'multiply' in body and 'add' in body and 'sine' not in body
  two_islands = islands(text(lambda x, y, z: product(sum_of_products(x, y, z), z)))
  assert set(two_islands) == {'product', 'sum_of_products'}
  assert two_islands['product'] != {body}


@pytest.mark.parametrize('length, turns', [(1, 1), (20, 20), (150, 64)])
def test_off_cpus_a_loop_of_few_operations_is_unrolled(length, turns):
  def returns(reward, discount):
    def step(after, inputs):
      reward, discount = inputs
      value = reward + discount * after
      return value, value
    return lax.scan(step, jnp.zeros(3), (reward, discount), reverse=True)[1]

  reward, discount = np.random.default_rng(0).uniform(size=(2, length, 3)).astype(np.float32)
  unrolled = _unrolled(jax.make_jaxpr(returns)(reward, discount))
  (loop,) = [eqn for eqn in unrolled.eqns if eqn.primitive.name == 'scan']
  assert loop.params['unroll'] == turns
  expected = np.zeros((length + 1, 3))
  for t in reversed(range(length)):
    expected[t] = reward[t] + discount[t] * expected[t + 1]
  (result,) = jaxpr_as_fun(unrolled)(reward, discount)
  assert_allclose(result, expected[:-1], rtol=1e-5)


def test_off_cpus_a_loop_with_products_stays():
  def states(x, w):
    return lax.scan(lambda state, x: (jnp.tanh(state @ w + x),) * 2, x[0], x)[1]

  closed = jax.make_jaxpr(states)(jnp.zeros((9, 2, 4)), jnp.eye(4))
  assert [eqn.params['unroll'] for eqn in _unrolled(closed).eqns
          if eqn.primitive.name == 'scan'] == [1]
