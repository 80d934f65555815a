"""Islands have the same bits with any number of threads in XLA's pool, and the right values."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podracer_jit.numerics import islands, thread_pool
from tests import processes

# Functions and shapes whose bits depend on the number of threads, unless they are in an island.
PROGRAM = """
import os, sys
os.environ['NPROC'] = '{threads}'
import hashlib, json
import jax, jax.numpy as jnp, numpy as np
from tests.numerics.test_thread_pool import CASES, inputs
from podracer_jit.numerics.islands import island
def digest(function, args):
  return hashlib.sha256(np.asarray(jax.jit(function)(*args)).tobytes()).hexdigest()
def digests(function, shapes, dtype):
  args = [x.astype(dtype) for x in inputs(*shapes)]
  return digest(island('x')(function), args), digest(function, args)
print(json.dumps({{f'{{name}}, {{dtype}}': digests(function, shapes, dtype)
                  for name, (function, shapes) in CASES.items()
                  for dtype in ('float32', 'bfloat16')}}))
"""


def inputs(*shapes):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def conv(x, w, stride=1, padding='VALID', groups=1):
  axes = 'HW'[:x.ndim - 2]
  return lax.conv_general_dilated(
      x, w, (stride,) * len(axes), padding, feature_group_count=groups,
      dimension_numbers=(f'N{axes}C', f'{axes}IO', f'N{axes}C'))


def kernel_gradient(**options):
  return lambda x, w: jax.grad(lambda w: jnp.sum(conv(x, w, **options)**2))(w)


CASES = {
    'first operand transposed': (lambda x, y: x.T @ y, [(65536, 64), (65536, 64)]),
    'first axes contracted': (
        lambda x, y: jnp.einsum('km,kn->mn', x, y), [(65536, 64), (65536, 64)]),
    'result transposed': (lambda x, y: (x.T @ y).T, [(3136, 16), (3136, 512)]),
    'kernel of a dense layer': (
        lambda x, w: jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), [(2048, 64), (64, 64)]),
    'batched product': (
        lambda x, y: jnp.einsum('bkm,bkn->bmn', x, y), [(4, 20000, 8), (4, 20000, 8)]),
    'long rows': (lambda x: jnp.sum(x, -1), [(5, 100000)]),
    'logarithm of long sums': (lambda x: jax.nn.logsumexp(x, -1), [(16, 65536)]),
    'few channels': (functools.partial(conv, stride=2), [(8, 42, 42, 16), (3, 3, 16, 1)]),
    'few channels, large kernel': (conv, [(16, 42, 42, 16), (40, 40, 16, 16)]),
    'kernel, few channels': (kernel_gradient(), [(16, 42, 42, 16), (3, 3, 16, 16)]),
    'kernel, stride': (kernel_gradient(stride=2), [(17, 42, 42, 8), (8, 8, 8, 8)]),
    'kernel, SAME': (kernel_gradient(padding='SAME'), [(17, 42, 42, 16), (1, 1, 16, 8)]),
    'one axis': (kernel_gradient(), [(16, 1000, 8), (5, 8, 16)]),
    'depthwise': (kernel_gradient(groups=8), [(4, 20, 20, 8), (3, 3, 1, 8)]),
}


def test_bits_do_not_depend_on_the_number_of_threads():
  digests = []
  for threads in (2, 3, 16):
    done = processes.run([sys.executable, '-P', '-c', PROGRAM.format(threads=threads)])
    assert done.returncode == 0, done.stderr
    digests.append(json.loads(done.stdout))
  inside, outside = ({name for name in digests[0]
                      if len({of_pool[name][i] for of_pool in digests}) > 1} for i in range(2))
  assert not inside
  # Without islands the number does count.
  assert {'first operand transposed, float32', 'first operand transposed, bfloat16',
          'long rows, float32', 'few channels, large kernel, float32'} <= outside


@pytest.mark.parametrize('name', CASES)
def test_values_are_those_of_the_function(name):
  function, shapes = CASES[name]
  args = inputs(*shapes)
  expected = np.asarray(jax.jit(function)(*args))
  result = np.asarray(jax.jit(islands.island('x')(function))(*args))
  scale = np.abs(expected).max()
  np.testing.assert_allclose(result / scale, expected / scale, atol=2e-5)


def test_what_does_not_depend_on_threads_stays_as_it_is():
  def function(x, w):
    return jnp.sum(jnp.tanh(x @ w), -1)

  closed = jax.make_jaxpr(function)(*inputs((64, 32), (32, 16)))
  assert str(thread_pool.independent_of_threads(closed).jaxpr) == str(closed.jaxpr)
