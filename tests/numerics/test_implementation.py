"""The programs of convolutions and exact sums that XLA compiles."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numpy.testing import assert_array_equal

from podracer_jit.numerics import convolution, deterministic
from tests.numerics.test_convolution import normal
from tests.runs import on_mesh

pytestmark = [pytest.mark.implementation, pytest.mark.as_shipped]


def test_only_programs_for_cpus_have_chunks(monkeypatch):
  """The program for a GPU has neither chunks nor the other formulations for CPUs."""
  monkeypatch.setattr(convolution, 'IMAGE', 8 * 8 * 4)
  def layers(x, w):
    return convolution.in_chunks(lambda x: convolution.conv2d(x, w, 1, 'SAME'), x, 16)

  x, w = normal(0, 32, 8, 8, 4)[0], normal(1, 3, 3, 4, 16)[0]
  lowered = {platform: jax.jit(layers).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
             for platform in ('cpu', 'cuda')}
  for text in ('while', '3x2x8x32'):  # the loop over chunks, and the kernel for two columns
    assert text in lowered['cpu'] and text not in lowered['cuda']
  assert lowered['cuda'].count('stablehlo.convolution') == 1


def test_only_programs_for_cpus_pool_without_select_and_scatter():
  gradient = jax.grad(lambda x: convolution.max_pool(x, 3, 2).sum())
  x = normal(0, 2, 8, 8, 4)[0]
  of_cpu, of_cuda = (
      jax.jit(gradient).trace(x).lower(lowering_platforms=(platform,)).as_text()
      for platform in ('cpu', 'cuda'))
  assert 'select_and_scatter' in of_cuda and 'select_and_scatter' not in of_cpu


def test_an_exact_sum_is_one_collective_for_each_dtype():
  tree = dict(w=np.ones((4, 30), np.float32), b=np.ones((4, 2), np.float32),
              n=np.arange(4, dtype=np.int32), m=np.ones((4, 3), np.int32))
  program = on_mesh(lambda tree: deterministic.exact_sum(tree, 2), 2,
                    (PartitionSpec(deterministic.AXIS),),
                    PartitionSpec())
  assert program.lower(tree).compile().as_text().count(' all-gather(') == 2
  jax.tree.map(assert_array_equal, program(tree), jax.tree.map(lambda x: x.sum(axis=0), tree))
