"""The programs of the networks that XLA compiles."""

import re

import jax
import jax.numpy as jnp
import pytest

from podracer_jit.agents.policies import categorical
from tests.agents.test_networks import FRAMES, IMAGE_TORSOS, of_rows
from tests.runs import make_network

pytestmark = pytest.mark.implementation


@pytest.mark.parametrize('name', IMAGE_TORSOS)
def test_gradients_use_the_layout_that_is_fast_in_loops(name):
  """The gradients of autodiff are 15 to 50 times slower inside XLA's CPU loops."""
  network = make_network(name, categorical(6))
  params = jax.eval_shape(lambda key, obs: network.init(key, obs[None]), jax.random.key(0), FRAMES)

  def loss(params, obs):
    return sum(jnp.sum(x) for x in of_rows(network, params, obs))

  program = jax.jit(jax.grad(loss)).trace(params, FRAMES).lower(lowering_platforms=('cpu',))
  layouts = re.findall(r'stablehlo.convolution.*dim_numbers = (.*?->.*?\])', program.as_text())
  # Each layer has three: the output, the gradient of the kernel and the gradient of the input,
  # which the first layer does not need. All of Nature CNN's first layer, and gradients of inputs
  # without padding, are matrix products.
  assert len(layouts) == (2 * 2 if name == 'nature_cnn' else 3 * 15 - 1)
  products = re.findall(r'stablehlo.dot_general', program.as_text())
  dense = 7  # the dense layer and the heads
  assert len(products) == dense + (1 + 4 + 2 if name == 'nature_cnn' else 0)
  assert set(layouts) == {'[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]'}
  assert 'select_and_scatter' not in program.as_text()
