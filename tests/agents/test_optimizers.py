"""Optimizers against computations by hand."""

import numpy as np
import pytest

from podracer_jit.agents import optimizers


@pytest.mark.quick
def test_centred_rmsprop_begins_with_a_mean_of_squares_of_one():
  """TensorFlow's: the mean of squares is 1, then 0.9 + 0.1 * 4 = 1.3; that of gradients 0.2."""
  scale = optimizers.CentredRMSProp(decay=0.9, eps=0.01).scale()
  gradient = np.float32([2.0])
  state = scale.init(gradient)
  step, state = scale.update(gradient, state)
  np.testing.assert_allclose(step, 2 / np.sqrt(1.3 - 0.2**2 + 0.01), rtol=1e-6)
  step, _ = scale.update(gradient, state)  # 0.9 * 1.3 + 0.4 = 1.57; 0.9 * 0.2 + 0.2 = 0.38
  np.testing.assert_allclose(step, 2 / np.sqrt(1.57 - 0.38**2 + 0.01), rtol=1e-6)


def test_rmsprop_begins_with_a_mean_of_squares_of_zero():
  """PyTorch's: 0.1 * 4 = 0.4, and epsilon is added to the root."""
  scale = optimizers.RMSProp(decay=0.9, eps=0.01).scale()
  gradient = np.float32([2.0])
  step, _ = scale.update(gradient, scale.init(gradient))
  np.testing.assert_allclose(step, 2 / (np.sqrt(0.4) + 0.01), rtol=1e-6)
