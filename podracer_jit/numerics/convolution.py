"""Convolution and max-pooling in formulations that are fast on CPUs.

Networks use `conv2d`, `conv2d_of_pixels`, `max_pool` and `in_chunks`. On platforms other than CPUs
they lower to XLA's own operations, and inside `plainly` they do so on CPUs, too.

The speed of a convolution in XLA's CPU backend depends on how the convolution is written. Inside a
loop, the backward convolutions of autodiff are 15 to 50 times slower (jax 0.10.2). This module
computes the same sums in a faster order or layout. Figures were measured on one core with 16 to 24
rows.

tests/numerics/test_convolution.py compares values and gradients with XLA's operations.
tests/numerics/test_implementation.py checks which formulation each platform gets.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import chex
import jax
import jax.numpy as jnp
from jax import lax

_LAYOUT = ('NHWC', 'HWIO', 'NHWC')
# Numbers in the observation (84x84x4) that the argument `chunk_rows` of `rows_at_once` refers to.
IMAGE = 4 * 84 * 84
# YNNPACK handles a convolution only if its input or output channels exceed this.
VECTOR = 16
# Bytes that `_blocks_of_words` moves at once: pixels of a row.
_WORD = 4

_plain = contextvars.ContextVar('plain', default=False)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
  """Makes this module's functions trace to XLA's own operations on every platform.

  It is for programs that are stored and run by other versions and on other machines.
  """
  token = _plain.set(True)
  try:
    yield
  finally:
    _plain.reset(token)


def in_chunks(function: Callable, x: jax.Array, chunk_rows: int) -> jax.Array:
  """Applies `function` to the rows of `x`, on CPUs a few rows at a time.

  The layers of one chunk of rows fit the CPU's cache. This makes Nature CNN with its gradient
  2.2 to 2.8 times faster.

  Args:
    function: maps [n, ...] to [n, ...] row by row, for any n.
    x: [N, ...].
    chunk_rows: rows of 84x84x4 observations that fit the cache; see `rows_at_once`.

  Returns:
    function(x), [N, ...].
  """
  chex.assert_scalar_positive(chunk_rows)
  if _plain.get():
    return function(x)
  count = x.shape[0]
  rows = rows_at_once(count, x.shape[1:], chunk_rows)
  if count <= rows:
    return function(x)

  def chunks(x):
    turns = -(-count // rows)
    # The last chunk is filled up with zeros, so that all chunks have one shape.
    x = jnp.pad(x, ((0, turns * rows - count), *((0, 0),) * (x.ndim - 1)))
    y = lax.map(function, x.reshape(turns, rows, *x.shape[1:]))
    return y.reshape(-1, *y.shape[2:])[:count]

  return lax.platform_dependent(x, cpu=chunks, default=function)


def rows_at_once(count: int, shape: Sequence[int], chunk_rows: int) -> int:
  """Returns the number of observations in each chunk of `in_chunks`.

  Args:
    count: observations in all.
    shape: the shape of one observation.
    chunk_rows: target number for observations of 84x84x4. Smaller observations go in larger
      chunks: four times as many of 42x42x4.

  Returns:
    `count` if all fit one chunk of up to 1.5 times the target; else a multiple of 4 between 0.75
    and 1.5 times the target, the one with the least padding.
  """
  chunk_rows *= max(1, IMAGE // math.prod(shape))
  if count <= chunk_rows * 3 // 2:
    return count
  # Kernel gradients contract the rows of a chunk, and take twice as long if 4 does not divide them.
  candidates = range(-(-chunk_rows * 3 // 16) * 4, chunk_rows * 3 // 2 + 1, 4)
  return min(candidates, key=lambda rows: (-count % rows, abs(rows - chunk_rows)))


def _pads(size: int, kernel: int, stride: int, padding: str) -> tuple[int, int]:
  """Returns the padding before and after an axis, as XLA and TensorFlow place it.

  Args:
    size: pixels along the axis.
    kernel: pixels of a window.
    stride: pixels between windows.
    padding: 'VALID' or 'SAME'.
  """
  if padding == 'VALID':
    return 0, 0
  total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
  return total // 2, total - total // 2


# The private functions below share these arguments:
#   x: [N, H, W, C] images.
#   w: [KH, KW, C, O] kernel.
#   dy: [N, OH, OW, O], gradient of the loss by the convolution's result.
#   stride: pixels between windows, along both axes.
#   pads: ((top, bottom), (left, right)), pixels of padding with zeros; may be negative.


def _conv(x, w, strides, pads, **dilation):
  """Returns XLA's convolution.

  Args:
    x: see above.
    w: see above.
    strides: along both axes.
    pads: see above.
    **dilation: `lhs_dilation` or `rhs_dilation`.
  """
  return lax.conv_general_dilated(x, w, strides, pads, dimension_numbers=_LAYOUT, **dilation)


def conv2d(x: jax.Array, w: jax.Array, stride: int, padding: str = 'VALID') -> jax.Array:
  """Returns the 2D convolution of a batch of images.

  Args:
    x: [N, H, W, C] floats.
    w: [KH, KW, C, O] kernel, of the type of x.
    stride: pixels between windows, along both axes.
    padding: 'VALID' or 'SAME'.

  Returns:
    [N, OH, OW, O].
  """
  chex.assert_rank([x, w], 4)
  chex.assert_shape(w, (None, None, x.shape[-1], None))
  pads = tuple(_pads(s, k, stride, padding) for s, k in zip(x.shape[1:3], w.shape[:2], strict=True))

  def plain(x, w):
    return _conv(x, w, (stride, stride), pads)

  def fast(x, w):
    # Windows that do not overlap need no convolution.
    if padding == 'VALID' and w.shape[:2] == (stride, stride):
      return _as_product(x, w, stride)
    return _conv2d(x, w, stride, pads)

  return plain(x, w) if _plain.get() else lax.platform_dependent(x, w, cpu=fast, default=plain)


def conv2d_of_pixels(x: jax.Array, w: jax.Array, stride: int, padding: str, to_image: Callable,
                     channels_last: bool) -> jax.Array:
  """Returns the 2D convolution of images that are made of observations.

  Args:
    x: observations, [N, H, W, C] or [N, C, H, W] of any type.
    w: [KH, KW, C, O] kernel.
    stride: pixels between windows, along both axes.
    padding: 'VALID' or 'SAME'.
    to_image: maps pixels [N, ...] to floats of the type of w; the order of the pixels does not
      matter.
    channels_last: whether x is [N, H, W, C].

  Returns:
    [N, OH, OW, O].
  """
  def plain(x, w):
    if not channels_last:
      # The barrier makes XLA transpose bytes, not floats.
      x = lax.optimization_barrier(x.transpose(0, 2, 3, 1))
    return conv2d(to_image(x), w, stride, padding)

  def fast(x, w):
    if channels_last:
      x = lax.optimization_barrier(x.transpose(0, 3, 1, 2))
    return _conv2d_in_blocks(to_image(_blocks_of_words(x)), _kernel_of_blocks(w))

  sizes = x.shape[1:3] if channels_last else x.shape[2:]
  if (_plain.get() or x.dtype != jnp.uint8 or padding != 'VALID' or stride != _WORD
      or w.shape[:2] != (2 * stride,) * 2
      or any(size % stride or size == stride for size in sizes)):
    return plain(x, w)
  return lax.platform_dependent(x, w, cpu=fast, default=plain)


def _blocks_of_words(x: jax.Array) -> jax.Array:
  """Returns blocks of 4x4 pixels of all channels, [N, H / 4, W / 4, 16 C] of [N, C, H, W] bytes.

  XLA transposes words of four bytes six times as fast as bytes.
  """
  words = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, _WORD), jnp.uint32)
  batch, channels, height, width = words.shape
  words = words.reshape(batch, channels, -1, _WORD, width).transpose(0, 2, 4, 3, 1)
  blocks = lax.bitcast_convert_type(lax.optimization_barrier(words), jnp.uint8)
  return blocks.reshape(batch, height // _WORD, width, -1)


def _kernel_of_blocks(w: jax.Array) -> jax.Array:
  """Returns a kernel [8, 8, C, O] as [16 C, 2, 2, O]: the products with each block of a window."""
  channels, features = w.shape[2:]
  w = w.reshape(2, _WORD, 2, _WORD, channels, features).transpose(1, 4, 3, 0, 2, 5)
  return w.reshape(-1, 2, 2, features)


@jax.custom_vjp
def _conv2d_in_blocks(x, w):
  """Returns a convolution whose windows are 2x2 neighbouring blocks of pixels.

  All blocks are multiplied by the whole kernel at once, and each window adds up its part of four
  blocks. A tenth of the products is not needed.
  84x84x4, 8x8 stride 4 -> 32 channels, on a core whose products have 100 GFLOP/s: 86 us a row
  instead of 141.

  Args:
    x: [N, R, Q, K] f32, blocks.
    w: [K, 2, 2, O], see `_kernel_of_blocks`.

  Returns:
    [N, R - 1, Q - 1, O].
  """
  inputs = w.shape[0]
  w = lax.optimization_barrier(w)
  y = x.reshape(-1, inputs) @ w.reshape(inputs, -1)
  y = y.reshape(*x.shape[:3], *w.shape[1:])
  return sum(_neighbours(y, i, j)[..., i, j, :] for i in range(2) for j in range(2))


def _neighbours(x: jax.Array, i: int, j: int) -> jax.Array:
  """Returns block (i, j) of each window of 2x2 blocks."""
  rows, columns = x.shape[1:3]
  return x[:, i:rows - 1 + i, j:columns - 1 + j]


def _conv2d_in_blocks_fwd(x, w):
  return _conv2d_in_blocks(x, w), (x, w)


def _conv2d_in_blocks_bwd(residuals, dy):
  """Returns the gradients of blocks and kernel.

  Args:
    residuals: (blocks, kernel).
    dy: [N, R - 1, Q - 1, O], gradient of the result.
  """
  x, w = residuals
  inputs, *_, features = w.shape
  barrier = lax.optimization_barrier
  transposed = barrier(dy.reshape(-1, features).T)
  dw = [transposed @ barrier(_neighbours(x, i, j).reshape(-1, inputs))
        for i in range(2) for j in range(2)]
  dw = barrier(jnp.stack(dw)).reshape(2, 2, features, inputs).transpose(3, 0, 1, 2)
  return _input_gradient_in_blocks(x, w.transpose(1, 2, 0, 3), dy, 1), dw


_conv2d_in_blocks.defvjp(_conv2d_in_blocks_fwd, _conv2d_in_blocks_bwd)


def _as_product(x, w, stride):
  """Returns the convolution with windows that do not overlap, as one matrix product."""
  rows, columns = (size // stride for size in x.shape[1:3])
  batch = x.shape[0]
  channels = x.shape[3]
  features = w.shape[3]
  # Rows and columns that no window covers are cut off.
  x = x[:, :rows * stride, :columns * stride]
  x = x.reshape(batch, rows, stride, columns, stride, channels).transpose(0, 1, 3, 2, 4, 5)
  y = x.reshape(batch * rows * columns, -1) @ w.reshape(-1, features)
  return y.reshape(batch, rows, columns, features)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv2d(x, w, stride, pads):
  """Returns the convolution, with gradients of its own.

  Args:
    x: images.
    w: kernel.
    stride: pixels between windows.
    pads: padding of each axis.
  """
  return _forward(x, w, stride, pads)


def _conv2d_fwd(x, w, stride, pads):
  """Returns the convolution and the residuals of its gradient; see `_conv2d`.

  Args:
    x: images.
    w: kernel.
    stride: pixels between windows.
    pads: padding of each axis.
  """
  return _forward(x, w, stride, pads), (x, w)


def _conv2d_bwd(stride, pads, residuals, dy):
  """Returns the gradients of images and kernel; see `_conv2d`.

  Args:
    stride: pixels between windows.
    pads: padding of each axis.
    residuals: (images, kernel).
    dy: gradient of the result.
  """
  x, w = residuals
  return _input_gradient(x, w, dy, stride, pads), _kernel_gradient(x, w, dy, stride, pads)


_conv2d.defvjp(_conv2d_fwd, _conv2d_bwd)


def _forward(x, w, stride, pads):
  """Returns the convolution, in the faster of two formulations.

  Args:
    x: images.
    w: kernel.
    stride: pixels between windows.
    pads: padding of each axis.
  """
  # Output channels exceed VECTOR only if they are doubled.
  doubling_helps = VECTOR // 2 < w.shape[3] <= VECTOR and w.shape[2] <= VECTOR
  if doubling_helps and stride == 1 and w.shape[1] == 3:
    outputs = x.shape[2] + sum(pads[1]) - w.shape[1] + 1
    if outputs % 2 == 0:
      return _two_columns(x, w, pads)
  return _conv(x, w, (stride, stride), pads)


def _two_columns(x, w, pads):
  """Returns a convolution with kernels 3 wide, computing two output columns in one window.

  Two columns double the output channels, so that YNNPACK handles the convolution (see VECTOR). A
  window of two output columns is four input columns wide, and a quarter of its products are with
  zeros. 84x84x4, 3x3 -> 16 channels: 51 us a row instead of 255.
  """
  batch, height, _, channels = x.shape
  kernel, _, _, features = w.shape
  # Pairs of neighbouring columns become channels.
  x = jnp.pad(x, ((0, 0), (0, 0), pads[1], (0, 0))).reshape(batch, height, -1, 2 * channels)
  # The kernel of each output column, in a window four columns wide.
  wide = jnp.stack([jnp.pad(w, ((0, 0), (i, 1 - i), (0, 0), (0, 0))) for i in range(2)], axis=3)
  y = _conv(x, wide.reshape(kernel, 2, 2 * channels, 2 * features), (1, 1), (pads[0], (0, 0)))
  return y.reshape(batch, y.shape[1], -1, features)


def _kernel_gradient(x, w, dy, stride, pads):
  """Returns the gradient of the kernel: a convolution that contracts the batch as channels.

  Args:
    x: images.
    w: kernel, of which only the shape counts.
    dy: gradient of the result.
    stride: pixels between windows.
    pads: padding of each axis.
  """
  # Without barriers XLA folds the transposes back into a slow layout.
  barrier = lax.optimization_barrier
  dw = _conv(barrier(x.transpose(3, 1, 2, 0)), barrier(dy.transpose(1, 2, 0, 3)), (1, 1), pads,
             rhs_dilation=(stride, stride))
  return barrier(dw[:, :w.shape[0], :w.shape[1], :]).transpose(1, 2, 0, 3)


def _input_gradient(x, w, dy, stride, pads):
  """Returns the gradient of the images: a convolution of dy with the flipped kernel.

  Args:
    x: images, of which only the shape counts.
    w: kernel.
    dy: gradient of the result.
    stride: pixels between windows.
    pads: padding of each axis.
  """
  kernel = w.shape[:2]
  size = x.shape[1:3]
  out = dy.shape[1:3]
  if pads == ((0, 0), (0, 0)) and all(k % stride == 0 for k in kernel):
    return _input_gradient_in_blocks(x, w, dy, stride)
  back = tuple((k - 1 - lo, s + lo - (o - 1) * stride - 1)
               for k, (lo, _), s, o in zip(kernel, pads, size, out, strict=True))
  flipped = lax.optimization_barrier(w[::-1, ::-1].transpose(0, 1, 3, 2))
  if stride > 1:
    return _conv(dy, flipped, (1, 1), back, lhs_dilation=(stride, stride))
  return _forward(dy, flipped, 1, back)


def _input_gradient_in_blocks(x, w, dy, stride):
  """Returns the gradient of images without padding, for kernels that are a multiple of the stride.

  The stride x stride phases of a block of dx are channels. dy is multiplied by the whole kernel at
  once, and each block adds up its part of the windows that cover it. Microseconds a row, beside a
  convolution of dy with the flipped kernel: 57 and 72 (20x20x32, 4x4 stride 2 -> 64 channels), 50
  and 78 (9x9x64, 3x3 -> 64), 61 and 1,680 (28x28x3, 5x5 -> 32).

  Args:
    x: images, of which only the shape counts.
    w: kernel.
    dy: gradient of the result.
    stride: pixels between windows; divides the height and width of the kernel.
  """
  batch, height, width, channels = x.shape
  out, features = dy.shape[1:3], dy.shape[3]
  # Blocks of stride x stride pixels in a window.
  rows = w.shape[0] // stride
  columns = w.shape[1] // stride
  w = w.reshape(rows, stride, columns, stride, channels, features).transpose(5, 0, 2, 1, 3, 4)
  parts = dy.reshape(-1, features) @ lax.optimization_barrier(w.reshape(features, -1))
  parts = parts.reshape(batch, *out, rows, columns, -1)
  dx = sum(jnp.pad(parts[:, :, :, i, j], ((0, 0), (i, rows - 1 - i), (j, columns - 1 - j), (0, 0)))
           for i in range(rows) for j in range(columns))
  _, rows, columns, _ = dx.shape
  dx = dx.reshape(batch, rows, columns, stride, stride, channels).transpose(0, 1, 3, 2, 4, 5)
  dx = dx.reshape(batch, rows * stride, columns * stride, channels)
  # Pixels that no window covers have no gradient.
  return jnp.pad(dx, ((0, 0), (0, height - dx.shape[1]), (0, width - dx.shape[2]), (0, 0)))


def max_pool(x: jax.Array, window: int, stride: int) -> jax.Array:
  """Returns the max-pooling of x with SAME padding.

  Values and gradients equal `flax.linen.max_pool`: among equal maxima the first in row order gets
  the gradient. The gradient avoids XLA's select-and-scatter. 84x84x16 by 3x3 stride 2,
  with the gradient: 170 us a row instead of 1,637.

  Args:
    x: [N, H, W, C] floats.
    window: height and width of a window.
    stride: pixels between windows, along both axes.

  Returns:
    [N, ceil(H / stride), ceil(W / stride), C].
  """
  chex.assert_rank(x, 4)
  chex.assert_type(x, float)

  def plain(x):
    sizes = ((1, window, window, 1), (1, stride, stride, 1))
    return lax.reduce_window(x, -jnp.inf, lax.max, *sizes, 'SAME')

  def fast(x):
    return _max_pool(x, window, stride, x.shape[1:3])

  return plain(x) if _plain.get() else lax.platform_dependent(x, cpu=fast, default=plain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _max_pool(x, window, stride, size):
  """Returns the maxima [N, OH, OW, C].

  Args:
    x: images.
    window: height and width of a window.
    stride: pixels between windows.
    size: height and width of x, which the gradient needs as static numbers.
  """
  return _max_pool_fwd(x, window, stride, size)[0]


def _max_pool_fwd(x, window, stride, size):
  """Returns the maxima and their positions, which are saved for the gradient.

  Args:
    x: images.
    window: height and width of a window.
    stride: pixels between windows.
    size: height and width of x.

  Returns:
    The maxima [N, OH, OW, C], and the position of each in its window in row order, as uint8.
  """
  pads = [_pads(s, window, stride, 'SAME') for s in size]
  # A strided slice up to here has one row for each window.
  ends = [(-(-s // stride) - 1) * stride + 1 for s in size]
  x = jnp.pad(x, ((0, 0), *pads, (0, 0)), constant_values=-jnp.inf)
  best = x[:, :ends[0]:stride, :ends[1]:stride]
  position = jnp.zeros(best.shape, jnp.uint8)
  for place in range(1, window * window):
    i, j = divmod(place, window)
    candidate = x[:, i:i + ends[0]:stride, j:j + ends[1]:stride]
    # `>=` lets the first of equal maxima win.
    keep = best >= candidate
    best = jnp.where(keep, best, candidate)
    position = jnp.where(keep, position, jnp.uint8(place))
  return best, position


def _max_pool_bwd(window, stride, size, position, dy):
  """Returns the gradient of the images.

  Each pixel adds up dy of the windows whose maximum it is. A gather by pixel is faster than a
  scatter by window.

  Args:
    window: height and width of a window.
    stride: pixels between windows.
    size: height and width of the images.
    position: [N, OH, OW, C] uint8, the positions of the maxima in their windows.
    dy: [N, OH, OW, C], gradient of the maxima.
  """
  batch, *out, channels = dy.shape
  # Windows along an axis that may cover a pixel.
  reach = -(-window // stride)
  around = ((0, 0), (reach - 1,) * 2, (reach - 1,) * 2, (0, 0))
  # -1 is the position of no pixel.
  position = jnp.pad(position.astype(jnp.int32), around, constant_values=-1)
  dy = jnp.pad(dy, around)

  # Pixels are taken in blocks of stride x stride, which the same windows may cover.
  rows, columns = (n + reach - 1 for n in out)
  dx = 0.0
  for back in range(reach * reach):
    i, j = divmod(back, reach)

    def windows(x, i=reach - 1 - i, j=reach - 1 - j):
      return x[:, i:i + rows, None, j:j + columns, None]

    # Positions of a block's pixels in the window that begins (i, j) blocks before; -2 outside it.
    down = jnp.arange(stride) + i * stride
    right = jnp.arange(stride) + j * stride
    inside = (down < window)[:, None] & (right < window)
    place = jnp.where(inside, down[:, None] * window + right, -2)[:, None, :, None]

    dx += jnp.where(windows(position) == place, windows(dy), 0.0)

  dx = dx.reshape(batch, rows * stride, columns * stride, channels)
  (top, _), (left, _) = (_pads(s, window, stride, 'SAME') for s in size)
  return (dx[:, top:top + size[0], left:left + size[1]],)


_max_pool.defvjp(_max_pool_fwd, _max_pool_bwd)
