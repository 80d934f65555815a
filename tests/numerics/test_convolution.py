"""Convolution, pooling and their gradients, compared with those of JAX and flax."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.numerics import convolution

TURNS = 2  # turns of the loop around a convolution, with different numbers


def _plain(x, w, stride, padding):
  return lax.conv_general_dilated(x, w, (stride, stride), padding,
                                  dimension_numbers=('NHWC', 'HWIO', 'NHWC'))


def _with_gradients(function):
  """Returns a function (x, w, dy) -> y, dx, dw."""
  def with_gradients(x, w, dy):
    y, pull_back = jax.vjp(function, x, w)
    return y, *pull_back(dy)
  return with_gradients


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=(TURNS, *shape)).astype(np.float32)


# Sums in another order than XLA's are equal but for rounding; then same_bits is False.
@pytest.mark.parametrize('kernel, stride, padding, channels, features, same_bits', [
    (3, 1, 'VALID', 3, 5, False), (8, 4, 'SAME', 3, 5, True), (3, 1, 'SAME', 3, 5, True),
    (3, 2, 'SAME', 3, 5, True), (4, 3, 'SAME', 3, 5, True), (4, 4, 'SAME', 3, 5, True),
    (2, 3, 'VALID', 3, 5, True), (3, 2, 'VALID', 3, 5, True),
    (2, 2, 'VALID', 3, 5, False), (3, 3, 'VALID', 3, 5, False),  # one matrix product
    (4, 2, 'VALID', 3, 5, False), (8, 4, 'VALID', 3, 5, False),  # dx in blocks
    (3, 1, 'SAME', 4, 16, False), (3, 1, 'VALID', 16, 16, False),  # two columns
    (3, 1, 'SAME', 17, 16, True), (3, 1, 'SAME', 16, 12, False), (3, 1, 'SAME', 16, 8, False),
    (3, 1, 'SAME', 17, 20, True), (3, 1, 'SAME', 32, 17, True), (2, 1, 'SAME', 16, 16, True),
    (3, 1, 'SAME', 16, 32, True), (2, 1, 'SAME', 3, 33, True), (3, 1, 'VALID', 5, 40, False)])
def test_conv2d_equals_jaxs_convolution(kernel, stride, padding, channels, features, same_bits):
  x, w = normal(0, 3, 13, 16, channels), normal(1, kernel, kernel, channels, features)
  plain = _with_gradients(lambda *a: _plain(*a, stride, padding))
  ours = _with_gradients(lambda *a: convolution.conv2d(*a, stride, padding))
  shape = jax.eval_shape(lambda *a: _plain(*a, stride, padding), x[0], w[0]).shape
  dy = normal(2, *shape)

  outside, expected = jax.jit(ours), jax.jit(plain)
  inside = jax.jit(lambda *a: lax.map(lambda turn: ours(*turn), a))(x, w, dy)
  for turn in range(TURNS):
    results = outside(x[turn], w[turn], dy[turn])
    for name, a, b, c in zip(('y', 'dx', 'dw'), results, inside,
                             expected(x[turn], w[turn], dy[turn]), strict=True):
      assert_array_equal(a, b[turn], err_msg=f'{name} in a loop')
      if same_bits:
        assert_array_equal(a, c, err_msg=name)
      else:
        assert_allclose(a, c, rtol=1e-5, atol=1e-4, err_msg=name)


@pytest.mark.parametrize('channels_last, dtype, size, kernel, stride, padding', [
    (False, 'u1', (84, 84), 8, 4, 'VALID'), (False, 'u1', (8, 12), 8, 4, 'VALID'),  # in blocks
    (False, 'u1', (4, 12), 4, 4, 'VALID'), (False, 'u1', (13, 12), 8, 4, 'VALID'),
    (False, 'u1', (12, 12), 8, 4, 'SAME'), (False, 'f4', (12, 12), 8, 4, 'VALID'),
    (True, 'u1', (12, 16), 8, 4, 'VALID'), (False, 'u1', (12, 12), 4, 2, 'VALID')])
@pytest.mark.parametrize('centred', [False, True])
def test_conv2d_of_pixels_equals_jaxs_convolution(
    channels_last, dtype, size, kernel, stride, padding, centred):
  def to_image(pixels):
    image = pixels.astype('f4') / 255
    return image - image.mean(axis=(1, 2, 3), keepdims=True) if centred else image

  shape = (3, *size, 5) if channels_last else (3, 5, *size)
  x = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)
  w = normal(1, kernel, kernel, 5, 7)[0]
  images = to_image(x if channels_last else x.transpose(0, 2, 3, 1))
  expected, pull_back = jax.vjp(lambda w: _plain(images, w, stride, padding), w)
  y, of_ours = jax.vjp(lambda w: convolution.conv2d_of_pixels(
      x, w, stride, padding, to_image, channels_last), w)
  dy = normal(2, *expected.shape)[0]
  assert_allclose(y, expected, rtol=1e-5, atol=1e-4)
  assert_allclose(of_ours(dy)[0], pull_back(dy)[0], rtol=1e-5, atol=1e-3)
  with convolution.plainly():
    plain = convolution.conv2d_of_pixels(x, w, stride, padding, to_image, channels_last)
  assert_allclose(plain, expected, rtol=1e-5, atol=1e-4)


def test_blocks_have_gradients_of_both_arguments():
  """Blocks are pixels with many channels, and a window has 2x2 of them."""
  x, w = normal(0, 2, 5, 4, 6)[0], normal(1, 6, 2, 2, 3)[0]
  dy = normal(2, 2, 4, 3, 3)[0]
  ours = _with_gradients(convolution._conv2d_in_blocks)(x, w, dy)
  plain = _with_gradients(lambda x, w: _plain(x, w.transpose(1, 2, 0, 3), 1, 'VALID'))(x, w, dy)
  for name, a, b in zip(('y', 'dx', 'dw'), ours, plain, strict=True):
    assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize('rows', [7, 8, 12, 13, 16, 17, 23, 40])
def test_chunks_change_no_result(rows, monkeypatch):
  """The padding of the last chunk changes nothing, for any number of rows."""
  monkeypatch.setattr(convolution, 'IMAGE', 7)
  x, w, dy = (normal(seed, *shape)[0] for seed, shape in enumerate(
      [(rows, 7), (7, 5), (rows, 5)]))
  layer = _with_gradients(lambda x, w: jax.numpy.tanh(x @ w))
  chunked = _with_gradients(
      lambda x, w: convolution.in_chunks(lambda rows: jax.numpy.tanh(rows @ w), x, 8))
  for name, a, b in zip(('y', 'dx', 'dw'), jax.jit(chunked)(x, w, dy), layer(x, w, dy),
                        strict=True):
    assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize('count, shape, chunk_rows, rows', [
    (168, (4, 84, 84), 16, 12), (640, (4, 84, 84), 16, 16), (100, (12, 84, 84), 16, 20),
    (25, (4, 84, 84), 16, 16),  # chunks of 16 pad seven rows, chunks of 12 eleven
    (24, (4, 84, 84), 16, 24), (5, (4, 84, 84), 16, 5), (70, (4, 60, 60), 16, 12),
    (168, (4, 84, 84), 24, 24), (64, (4, 84, 84), 24, 32), (640, (4, 84, 84), 24, 20),
    (64, (4, 42, 42), 16, 64), (256, (4, 42, 42), 16, 64), (90_000, (7,), 16, 90_000)])
def test_chunks_fit_the_cache_and_pad_few_rows(count, shape, chunk_rows, rows):
  assert convolution.rows_at_once(count, shape, chunk_rows) == rows


@pytest.mark.quick
def test_conv2d_by_hand():
  """The image has 3x3 pixels from 1 to 9; the kernel is (1, 10; 100, 1000)."""
  x = np.arange(1.0, 10.0, dtype=np.float32).reshape(1, 3, 3, 1)
  w = np.float32([1, 10, 100, 1000]).reshape(2, 2, 1, 1)
  assert_array_equal(convolution.conv2d(x, w, 1)[0, :, :, 0], [[5421, 6532], [8754, 9865]])
  assert_array_equal(convolution.conv2d(x, w, 2)[0, :, :, 0], [[5421]])
  # SAME pads with zeros, first after the last row and column.
  assert_array_equal(convolution.conv2d(x, w, 2, 'SAME')[0, :, :, 0], [[5421, 603], [87, 9]])


@pytest.mark.parametrize('height, width, window, stride', [
    (7, 8, 3, 2), (8, 7, 3, 2), (6, 6, 3, 2), (1, 2, 3, 2), (7, 8, 2, 2), (5, 8, 3, 1)])
def test_max_pool_equals_flaxs(height, width, window, stride):
  """Small integers have many equal maxima, and their gradients sum exactly in any order."""
  rng = np.random.default_rng(0)
  x = rng.integers(-1, 2, size=(4, height, width, 3)).astype(np.float32)

  def plain(x):
    return nn.max_pool(x, (window, window), (stride, stride), 'SAME')

  def with_gradient(function, x, dy):
    y, pull_back = jax.vjp(function, x)
    return y, *pull_back(dy)

  with_gradient = jax.jit(with_gradient, static_argnums=0)
  dy = rng.integers(1, 100, size=jax.eval_shape(plain, x).shape).astype(np.float32)
  expected = with_gradient(plain, x, dy)
  results = with_gradient(lambda x: convolution.max_pool(x, window, stride), x, dy)
  for ours, flaxs in zip(results, expected, strict=True):
    assert_array_equal(ours, flaxs)


def test_max_pool_by_hand():
  """The first of several equal maxima, in row order, gets the gradient."""
  x = np.float32([[1, 1, 0, 0], [0, 1, 0, 2], [0, 3, 3, 0], [3, 0, 0, 0]]).reshape(1, 4, 4, 1)
  y, pull_back = jax.vjp(lambda x: convolution.max_pool(x, 2, 2), x)
  assert_array_equal(y[0, :, :, 0], [[1, 2], [3, 3]])
  (dx,) = pull_back(np.float32([[5, 6], [7, 8]]).reshape(1, 2, 2, 1))
  assert_array_equal(dx[0, :, :, 0], [[5, 0, 0, 0], [0, 0, 0, 6], [0, 7, 8, 0], [0, 0, 0, 0]])
