"""What XLA is given to compile for the networks."""

import re

import jax
import jax.numpy as jnp
import pytest

from podracer_jit.agents.policies import categorical
from tests.agents.test_networks import FRAMES, IMAGE_TORSOS, of_rows
from tests.runs import make_network

pytestmark = pytest.mark.implementation


@pytest.mark.parametrize('name', IMAGE_TORSOS)
def test_gradients_stay_in_the_layout_that_loops_run_fast(name):
  """Autodiff's own gradients are 15 to 50 times slower inside XLA's CPU loops."""
  network = make_network(name, categorical(6))
  params = jax.eval_shape(lambda key, obs: network.init(key, obs[None]), jax.random.key(0), FRAMES)

  def loss(params, obs):
    return sum(jnp.sum(x) for x in of_rows(network, params, obs))

  program = jax.jit(jax.grad(loss)).trace(params, FRAMES).lower(lowering_platforms=('cpu',))
  layouts = re.findall(r'stablehlo.convolution.*dim_numbers = (.*?->.*?\])', program.as_text())
  # Each layer's output and the gradients of its kernel and, but for the first layer, its input.
  assert len(layouts) == 3 * (3 if name == 'nature_cnn' else 15) - 1
  assert set(layouts) == {'[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]'}
  assert 'select_and_scatter' not in program.as_text()
