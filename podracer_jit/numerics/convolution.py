"""Convolution and max-pooling in the formulations that are fast on CPUs; elsewhere XLA's own.

Networks use three functions, `conv2d`, `max_pool` and `in_chunks`, and need not know the rest. What
XLA makes of a convolution on a CPU depends on how it is written, most of all inside a loop, where
the backward convolutions of autodiff are 15 to 50 times slower (jax 0.10.2). Here are the same sums
in the order or the layout that wins; beside each what it gains, on one core and 16 to 24 rows
(docs/performance.md). tests/numerics/test_convolution.py compares values and gradients with XLA's
own, and tests/numerics/test_implementation.py what is chosen for which platform.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

_LAYOUT = ('NHWC', 'HWIO', 'NHWC')
IMAGE = 4 * 84 * 84  # numbers of an observation of which `near` rows are what fits the cache
VECTOR = 16  # channels: XLA's faster convolution takes none that has no more in and no more out


def in_chunks(function: Callable, x: jax.Array, near: int) -> jax.Array:
  """function(x [N, ...]) -> [N, ...], on CPUs for some rows at a time, whose layers fit the cache.

  Nature CNN with its gradient 2.2 to 2.8 times faster, the ResNet 1.3 times.

  near: see `rows_at_once`.
  """
  count = x.shape[0]
  rows = rows_at_once(count, x.shape[1:], near)
  if count <= rows:
    return function(x)

  def chunks(x):
    turns = -(-count // rows)
    x = jnp.pad(x, ((0, turns * rows - count), *((0, 0),) * (x.ndim - 1)))
    y = lax.map(function, x.reshape(turns, rows, *x.shape[1:]))
    return y.reshape(-1, *y.shape[2:])[:count]

  return lax.platform_dependent(x, cpu=chunks, default=function)


def rows_at_once(count: int, shape: Sequence[int], near: int) -> int:
  """How many of `count` observations of this shape `in_chunks` sends through at once.

  About `near` of 84x84x4, more of smaller ones: of 42x42 four times as many, of which sixteens
  would take 1.3 to 1.5 times as long. The number that leaves least over, since a last chunk is
  filled up, of those that four divides: kernel gradients contract the rows of a chunk, and take
  twice as long for others. Few observations go as they are.
  """
  near *= max(1, IMAGE // math.prod(shape))
  if count <= near * 3 // 2:
    return count
  return min(range(-(-near * 3 // 16) * 4, near * 3 // 2 + 1, 4),
             key=lambda rows: (-count % rows, abs(rows - near)))


def _pads(size: int, kernel: int, stride: int, padding: str) -> tuple[int, int]:
  if padding == 'VALID':
    return 0, 0
  total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
  return total // 2, total - total // 2


def _conv(x, w, strides, pads, **dilation):
  return lax.conv_general_dilated(x, w, strides, pads, dimension_numbers=_LAYOUT, **dilation)


def conv2d(x: jax.Array, w: jax.Array, stride: int, padding: str = 'VALID') -> jax.Array:
  """2D convolution, x [N, H, W, C] with w [KH, KW, C, O] -> [N, OH, OW, O]."""
  pads = tuple(_pads(s, k, stride, padding) for s, k in zip(x.shape[1:3], w.shape[:2], strict=True))

  def plain(x, w):
    return _conv(x, w, (stride, stride), pads)

  def fast(x, w):
    if padding == 'VALID' and w.shape[:2] == (stride, stride):
      return _as_product(x, w, stride)
    return _conv2d(x, w, stride, pads)

  return lax.platform_dependent(x, w, cpu=fast, default=plain)


def _as_product(x, w, stride):
  """Of windows that do not overlap: one matrix product, patches x weights."""
  rows, columns = (size // stride for size in x.shape[1:3])
  batch, channels, features = x.shape[0], x.shape[3], w.shape[3]
  x = x[:, :rows * stride, :columns * stride]
  x = x.reshape(batch, rows, stride, columns, stride, channels).transpose(0, 1, 3, 2, 4, 5)
  y = x.reshape(batch * rows * columns, -1) @ w.reshape(-1, features)
  return y.reshape(batch, rows, columns, features)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv2d(x, w, stride, pads):
  return _forward(x, w, stride, pads)


def _conv2d_fwd(x, w, stride, pads):
  return _forward(x, w, stride, pads), (x, w)


def _conv2d_bwd(stride, pads, saved, dy):
  x, w = saved
  return _input_gradient(x, w, dy, stride, pads), _kernel_gradient(x, w, dy, stride, pads)


_conv2d.defvjp(_conv2d_fwd, _conv2d_bwd)


def _forward(x, w, stride, pads):
  few = VECTOR // 2 < w.shape[3] <= VECTOR and w.shape[2] <= VECTOR
  if few and stride == 1 and w.shape[1] == 3:
    outputs = x.shape[2] + sum(pads[1]) - w.shape[1] + 1
    if outputs % 2 == 0:
      return _two_columns(x, w, pads)
  return _conv(x, w, (stride, stride), pads)


def _two_columns(x, w, pads):
  """Windows 3 wide, two neighbouring columns of outputs at a time: twice the output channels.

  As XLA has no faster convolution (VECTOR) for so few. 84x84x4, 3x3 -> 16: 255 us a row as it is,
  51 so; 42x42x16: 76 and 51; of 42x42x32, which is not so few, 78 and 105. A window of two columns
  is four columns wide, two blocks of two, so 12 of 16 products count.
  """
  batch, height, _, channels = x.shape
  kernel, _, _, features = w.shape
  x = jnp.pad(x, ((0, 0), (0, 0), pads[1], (0, 0))).reshape(batch, height, -1, 2 * channels)
  wide = jnp.stack([jnp.pad(w, ((0, 0), (i, 1 - i), (0, 0), (0, 0))) for i in range(2)], axis=3)
  y = _conv(x, wide.reshape(kernel, 2, 2 * channels, 2 * features), (1, 1), (pads[0], (0, 0)))
  return y.reshape(batch, y.shape[1], -1, features)


def _kernel_gradient(x, w, dy, stride, pads):
  """The batch is contracted as if it were the channels, in the canonical layout."""
  barrier = lax.optimization_barrier  # else XLA folds the transposes back into a slow layout
  dw = _conv(barrier(x.transpose(3, 1, 2, 0)), barrier(dy.transpose(1, 2, 0, 3)), (1, 1), pads,
             rhs_dilation=(stride, stride))
  return barrier(dw[:, :w.shape[0], :w.shape[1], :]).transpose(1, 2, 0, 3)


def _input_gradient(x, w, dy, stride, pads):
  """A convolution of dy with the kernel turned about."""
  kernel, size, out = w.shape[:2], x.shape[1:3], dy.shape[1:3]
  if stride > 1 and pads == ((0, 0), (0, 0)) and all(k % stride == 0 for k in kernel):
    return _input_gradient_in_blocks(x, w, dy, stride)
  back = tuple((k - 1 - lo, s + lo - (o - 1) * stride - 1)
               for k, (lo, _), s, o in zip(kernel, pads, size, out, strict=True))
  turned = lax.optimization_barrier(w[::-1, ::-1].transpose(0, 1, 3, 2))
  if stride > 1:
    return _conv(dy, turned, (1, 1), back, lhs_dilation=(stride, stride))
  if pads == ((0, 0), (0, 0)):
    dy, back = _bordered(dy, back), pads
  return _forward(dy, turned, 1, back)


def _bordered(dy, pads):
  """Zeros around dy, as an array of its own.

  XLA's faster convolution (as of VECTOR) takes no wider ones than those of SAME, the other is cut
  into a piece for each thread: Nature CNN with its gradient, 168 rows and 16 threads on a core,
  1,065 rows a second as it is, 1,291 so.
  """
  return lax.optimization_barrier(jnp.pad(dy, ((0, 0), *pads, (0, 0))))


def _input_gradient_in_blocks(x, w, dy, stride):
  """All stride x stride phases of dx as channels of one convolution, instead of a dy full of zeros.

  20x20x32, 4x4/2 -> 64: 114 us a row, 78 so.
  """
  batch, height, width, channels = x.shape
  rows, columns = w.shape[0] // stride, w.shape[1] // stride  # blocks of a window
  w = w.reshape(rows, stride, columns, stride, channels, -1)[::-1, :, ::-1]
  w = w.transpose(0, 2, 5, 1, 3, 4).reshape(rows, columns, dy.shape[3], -1)
  dy = _bordered(dy, ((rows - 1,) * 2, (columns - 1,) * 2))
  dx = _conv(dy, lax.optimization_barrier(w), (1, 1), ((0, 0), (0, 0)))
  _, rows, columns, _ = dx.shape
  dx = dx.reshape(batch, rows, columns, stride, stride, channels).transpose(0, 1, 3, 2, 4, 5)
  dx = dx.reshape(batch, rows * stride, columns * stride, channels)
  # What no window reaches has no gradient.
  return jnp.pad(dx, ((0, 0), (0, height - dx.shape[1]), (0, width - dx.shape[2]), (0, 0)))


def max_pool(x: jax.Array, window: int, stride: int) -> jax.Array:
  """SAME max-pooling of x [N, H, W, C]; of equal maxima the first in row order gets the gradient.

  Equal to `nn.max_pool`, ties included. With its gradient, 84x84x16 by 3x3/2: 1,637 us a row by the
  select-and-scatter that makes, 170 so.
  """
  return _max_pool(x, window, stride, x.shape[1:3])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _max_pool(x, window, stride, size):
  return _max_pool_fwd(x, window, stride, size)[0]


def _max_pool_fwd(x, window, stride, size):
  """The maxima, and for the gradient which of its window each is, [N, OH, OW, C] u8."""
  pads = [_pads(s, window, stride, 'SAME') for s in size]
  ends = [(-(-s // stride) - 1) * stride + 1 for s in size]
  x = jnp.pad(x, ((0, 0), *pads, (0, 0)), constant_values=-jnp.inf)
  best = x[:, :ends[0]:stride, :ends[1]:stride]
  which = jnp.zeros(best.shape, jnp.uint8)
  for place in range(1, window * window):
    i, j = divmod(place, window)
    new = x[:, i:i + ends[0]:stride, j:j + ends[1]:stride]
    keep = best >= new
    best, which = jnp.where(keep, best, new), jnp.where(keep, which, jnp.uint8(place))
  return best, which


def _max_pool_bwd(window, stride, size, which, dy):
  """Every pixel asks each of the windows that it may be in whether it was their maximum."""
  batch, *out, channels = dy.shape
  reach = -(-window // stride)  # windows along an axis that a pixel may be in
  around = ((0, 0), (reach - 1,) * 2, (reach - 1,) * 2, (0, 0))
  which, dy = jnp.pad(which.astype(jnp.int32), around, constant_values=-1), jnp.pad(dy, around)
  rows, columns = (n + reach - 1 for n in out)
  dx = 0.0
  for back in range(reach * reach):
    i, j = divmod(back, reach)
    def windows(x, i=reach - 1 - i, j=reach - 1 - j):
      return x[:, i:i + rows, None, j:j + columns, None]
    # Within a window so far back, the pixels of a block of stride x stride stand at:
    down, right = (jnp.arange(stride) + steps * stride for steps in (i, j))
    place = jnp.where((down < window)[:, None] & (right < window), down[:, None] * window + right,
                      -2)[:, None, :, None]
    dx += jnp.where(windows(which) == place, windows(dy), 0.0)
  dx = dx.reshape(batch, rows * stride, columns * stride, channels)
  (top, _), (left, _) = (_pads(s, window, stride, 'SAME') for s in size)
  return (dx[:, top:top + size[0], left:left + size[1]],)


_max_pool.defvjp(_max_pool_fwd, _max_pool_bwd)
