"""Convolution and max-pooling whose gradients are fast inside XLA's CPU loops.

The backward convolutions that autodiff writes miss XLA's fast CPU path inside a `while` (scan, map,
fori_loop) and are 15 to 50 times slower there. Written in the canonical NHWC / HWIO / NHWC layout,
with the transposes kept apart by barriers, the same gradients cost the same inside and outside.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

_LAYOUT = ('NHWC', 'HWIO', 'NHWC')
CHUNK = 16  # rows: a multiple of what a vector holds, since the kernel gradient contracts them
LARGE = 256  # values of a window


def _pads(size: int, kernel: int, stride: int, padding: str) -> tuple[int, int]:
  if padding == 'VALID':
    return 0, 0
  total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
  return total // 2, total - total // 2


def _conv(x, w, strides, pads, **dilation):
  return lax.conv_general_dilated(x, w, strides, pads, dimension_numbers=_LAYOUT, **dilation)


def conv2d(x: jax.Array, w: jax.Array, stride: int, padding: str = 'VALID') -> jax.Array:
  """2D convolution, x [N, H, W, C] with w [KH, KW, C, O] -> [N, OH, OW, O]."""
  if padding == 'VALID' and w.shape[:2] == (stride, stride):
    return _as_product(x, w, stride)
  pads = tuple(_pads(s, k, stride, padding) for s, k in zip(x.shape[1:3], w.shape[:2], strict=True))
  return _conv2d(x, w, stride, pads)


def _as_product(x, w, stride):
  """As one matrix product: blocks of stride x stride pixels become channels, few windows overlap.

  For windows that do not overlap, and for first layers: on few channels XLA's convolution and its
  kernel gradient are far below the machine's rate (84x84x4, 8x8/4 -> 32: 4.8 times slower).
  """
  n = w.shape[0] // stride  # windows are n x n blocks
  rows, columns = (size // stride for size in x.shape[1:3])
  batch, channels, features = x.shape[0], x.shape[3], w.shape[3]
  x = x[:, :rows * stride, :columns * stride]
  x = x.reshape(batch, rows, stride, columns, stride, channels).transpose(0, 1, 3, 2, 4, 5)
  x = x.reshape(batch, rows, columns, -1)
  w = w.reshape(n, stride, n, stride, channels, features).transpose(0, 2, 1, 3, 4, 5)
  rows, columns = rows - n + 1, columns - n + 1
  x = jnp.concatenate([x[:, i:i + rows, j:j + columns] for i in range(n) for j in range(n)], -1)
  x = x.reshape(batch * rows * columns, -1) @ w.reshape(-1, features)
  return x.reshape(batch, rows, columns, features)


def _in_chunks(function, w, *rows):
  """function(*rows) -> (sums, rows), for few rows at a time where windows are large; sums add up.

  XLA's CPU convolutions with large windows are up to 3 times slower where their patches do not fit
  the cache (84x84x4, 8x8/4 -> 32: 41 us a row of 16 or 21, 80 of 64, 237 of 128); others are not.
  """
  count = rows[0].shape[0]
  large = w[..., 0].size >= LARGE and jax.default_backend() == 'cpu'
  size = min(CHUNK, count) if large else count
  turns = -(-count // size)

  def cut(x):
    if turns * size > count:
      x = jnp.pad(x, ((0, turns * size - count), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(turns, size, *x.shape[1:])

  rows = tuple(map(cut, rows))
  zeros, _ = jax.eval_shape(function, *(x[0] for x in rows))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), zeros)

  def turn(total, xs):
    sums, out = function(*xs)
    return jax.tree.map(jnp.add, total, sums), out

  total, out = lax.scan(turn, zeros, rows)
  return total, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:count], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv2d(x, w, stride, pads):
  return _in_chunks(lambda x: ((), _conv(x, w, (stride, stride), pads)), w, x)[1]


def _conv2d_fwd(x, w, stride, pads):
  return _conv2d(x, w, stride, pads), (x, w)


def _conv2d_bwd(stride, pads, saved, dy):
  x, w = saved
  dw, dx = _in_chunks(lambda x, dy: _gradients(x, w, dy, stride, pads), w, x, dy)
  return dx, dw


def _gradients(x, w, dy, stride, pads):
  """Of the kernel and of the input."""
  kernel, size, out = w.shape[:2], x.shape[1:3], dy.shape[1:3]
  barrier = lax.optimization_barrier  # else XLA folds the transposes back into a slow layout
  # Kernel gradient: the batch is contracted as if it were the channels.
  dw = _conv(barrier(x.transpose(3, 1, 2, 0)), barrier(dy.transpose(1, 2, 0, 3)), (1, 1), pads,
             rhs_dilation=(stride, stride))
  dw = barrier(dw[:, :kernel[0], :kernel[1], :]).transpose(1, 2, 0, 3)
  # Input gradient: dy, spread out by the stride, with the kernel flipped.
  back = tuple((k - 1 - lo, s + lo - (o - 1) * stride - 1)
               for k, (lo, _), s, o in zip(kernel, pads, size, out, strict=True))
  flipped = barrier(w[::-1, ::-1].transpose(0, 1, 3, 2))
  dx = _conv(dy, flipped, (1, 1), back, lhs_dilation=(stride, stride))
  return dw, dx


_conv2d.defvjp(_conv2d_fwd, _conv2d_bwd)


def max_pool(x: jax.Array, window: int, stride: int) -> jax.Array:
  """SAME max-pooling of x [N, H, W, C]; of equal maxima the first in row order gets the gradient.

  A chain of selects over shifted slices: equal to `nn.max_pool`, ties included, and several times
  faster to differentiate on CPU than the select-and-scatter that makes.
  """
  for axis in (2, 1):  # columns first, so that ties fall in row-major order
    x = _max_pool_axis(x, window, stride, axis)
  return x


def _max_pool_axis(x, window, stride, axis):
  size = x.shape[axis]
  pads = [(0, 0)] * x.ndim
  pads[axis] = _pads(size, window, stride, 'SAME')
  padded = jnp.pad(x, pads, constant_values=-jnp.inf)
  length = (-(-size // stride) - 1) * stride + 1
  slices = [lax.slice_in_dim(padded, i, i + length, stride, axis) for i in range(window)]
  # A select, not `maximum`: that would split the gradient between equal values.
  return functools.reduce(lambda best, new: jnp.where(best >= new, best, new), slices)
