"""Parts of a program are traced once, also within several loops."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from numpy.testing import assert_array_equal

from podracer_jit.numerics.islands import observed
from podracer_jit.numerics.tracing import traced
from tests.runs import changed, run, small
from tests.schemes import test_apex


def test_a_traced_function_computes_the_same_and_is_called_once():
  calls = []

  def program(x, scale):
    def row(x):
      calls.append(x)
      return dict(scaled=x * scale, total=x.sum())  # closes over a traced array

    row, shapes = traced(row, x[0])
    assert shapes == dict(scaled=jax.ShapeDtypeStruct((3,), jnp.float32),
                          total=jax.ShapeDtypeStruct((), jnp.float32))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return lax.scan(lambda sums, x: (jax.tree.map(jnp.add, sums, row(x)), row(x)['total']),
                    zeros, x)

  x = jnp.arange(6.0).reshape(2, 3)
  sums, totals = jax.jit(program)(x, 10.0)
  assert_array_equal(sums['scaled'], [30, 50, 70])
  assert sums['total'] == 15
  assert_array_equal(totals, [3, 12])
  assert len(calls) == 1


@pytest.mark.parametrize('config', [small('ppo', num_epochs=2), test_apex.config('dqn')],
                         ids=['ppo', 'dqn'])
def test_a_program_traces_each_island_once(config):
  """The gradient is in loops over microbatches, groups, gradient steps and updates."""
  names = []
  # The seed is that of no other test, so the programs are new.
  config = changed(config, scheme='fused', seed=4321, placement__updates_per_call=2)
  with observed(lambda name, args, results: names.append(name)):
    run(config, updates=2)
  assert names.count('gradient') == names.count('update') == 1
