"""Arithmetic that has the same bits with any number of threads in XLA's CPU pool.

XLA cuts operations into a piece for each thread. Some pieces are parts of sums, and then the number
of threads decides in which order numbers are added. These are written differently:

- Eigen's matrix products, which XLA takes if the first operand is transposed, such as the gradient
  of a dense layer's kernel: the operand is transposed first, so that YNNPACK makes the product.
- Eigen's convolutions, which XLA takes if there are few channels (`VECTOR`), in other layouts than
  `_LAYOUT`, along one axis only, or with groups: in this layout, with a second axis, without
  groups, and with output channels that are filled up with zeros.
- Sums of more than 32,768 numbers (`LONGEST_SUM`): of sums of fewer numbers.

One thread is different from several, since XLA then cuts nothing; so pools have at least two.

Not rewritten: convolutions along three axes, factorisations of matrices, Fourier transforms.

Observed on CPUs with jax 0.10.2 and pools of 2 to 96 threads.
`tests/numerics/test_thread_pool.py` compares the bits, and fails without each rule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from podracer_jit.numerics.common_subexpressions import rewritten
from podracer_jit.numerics.convolution import VECTOR

# XLA cuts longer sums into pieces; see the module's docstring.
LONGEST_SUM = 2**15
# Output channels of a convolution that is filled up: more than VECTOR.
_FILLED = 24
# Eigen may add up pieces of sums with so few output channels, and of so many products.
_FEW_OUTPUTS = 8
_MANY_PRODUCTS = 64
# Images [N, H, W, C], kernels [H, W, I, O], results [N, H, W, C].
_LAYOUT = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))


def independent_of_threads(closed: ClosedJaxpr) -> ClosedJaxpr:
  """Returns an equivalent jaxpr whose bits do not depend on the number of XLA's threads."""
  return rewritten(closed, _rewritten, again=False)


def _rewritten(equation: JaxprEqn) -> ClosedJaxpr | None:
  """Returns the jaxpr of what an equation becomes; None if it stays."""
  if equation.primitive.name not in _RULES:
    return None
  inputs = tuple(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars)
  return _rule_of(equation.primitive.name, tuple(equation.params.items()), inputs, equation.ctx)


@functools.lru_cache(maxsize=10_000)
def _rule_of(name: str, params: tuple[tuple[str, Any], ...], inputs: tuple[Any, ...], context: Any
             ) -> ClosedJaxpr | None:
  """Returns the jaxpr of what a primitive becomes; None if it stays.

  Args:
    name: of the primitive, in `_RULES`.
    params: its parameters.
    inputs: the shapes and dtypes of its operands.
    context: of the equation (`JaxprEqn.ctx`), which is part of the key of this cache.
  """
  del context
  function = _RULES[name](dict(params), *inputs)
  return None if function is None else jax.make_jaxpr(function)(*inputs)


def _product(params: Mapping[str, Any], x: Any, y: Any) -> Callable | None:
  """Returns the matrix product of a first operand whose contracted axes are last.

  Args:
    params: of `dot_general`.
    x: shape of the first operand.
    y: shape of the second operand.
  """
  (contracted, other), (batch, other_batch) = params['dimension_numbers']
  free = [axis for axis in range(len(x.shape)) if axis not in (*contracted, *batch)]
  order = (*batch, *free, *contracted)
  if order == tuple(range(len(x.shape))) or not jnp.issubdtype(x.dtype, jnp.inexact):
    return None
  first = len(batch) + len(free)
  numbers = ((tuple(range(first, len(order))), other), (tuple(range(len(batch))), other_batch))

  def product(x, y):
    x = _apart(functools.partial(lax.transpose, permutation=order), x)
    return lax.dot_general_p.bind(x, y, **{**params, 'dimension_numbers': numbers})

  return product


def _transposition(params: Mapping[str, Any], x: Any) -> Callable | None:
  """Returns a transposition that XLA does not fold into a matrix product.

  Args:
    params: of `transpose`.
    x: shape of the operand.
  """
  moved = [axis for axis in params['permutation'] if x.shape[axis] != 1]
  if moved == sorted(moved) or not jnp.issubdtype(x.dtype, jnp.inexact):
    return None
  return functools.partial(_apart, functools.partial(lax.transpose_p.bind, **params))


def _apart(function: Callable, x: jax.Array) -> jax.Array:
  """Returns function(x), which XLA does not join with operations before and after it."""
  return lax.optimization_barrier(function(lax.optimization_barrier(x)))


def _sum(params: Mapping[str, Any], x: Any) -> Callable | None:
  """Returns a sum of many numbers along one axis after the other, the last first.

  Args:
    params: of `reduce_sum`.
    x: shape of the operand.
  """
  if not jnp.issubdtype(x.dtype, jnp.inexact) or math.prod(x.shape) <= LONGEST_SUM:
    return None
  return functools.partial(_total, sorted(params['axes']))


def _total(axes: Sequence[int], x: jax.Array) -> jax.Array:
  """Returns a sum along several axes.

  Args:
    axes: in ascending order.
    x: the array.
  """
  dtype = x.dtype
  x = x.astype(jnp.promote_types(dtype, jnp.float32))  # bfloat16 is rounded once, at the end
  axes = list(axes)
  while axes:
    last = first = axes.pop()
    while axes and axes[-1] == first - 1:
      first = axes.pop()
    if first < last:
      x = lax.optimization_barrier(x.reshape(*x.shape[:first], -1, *x.shape[last + 1:]))
    # Without the barrier, XLA would join this sum with the next one.
    x = lax.optimization_barrier(_sum_along(first, x))
  return x.astype(dtype)


def _sum_along(axis: int, x: jax.Array) -> jax.Array:
  """Returns a sum along one axis; a long one is the sum of the halves first."""
  # XLA makes a piece of each row of the result if there are enough numbers to add for it.
  rows = next((size for i, size in enumerate(x.shape) if i != axis and size > 1), 1)
  halved = x
  while math.prod(halved.shape) > LONGEST_SUM * rows and halved.shape[axis] > 1:
    half = halved.shape[axis] // 2
    parts = [lax.slice_in_dim(halved, i * half, (i + 1) * half, axis=axis) for i in range(2)]
    rest = lax.slice_in_dim(halved, 2 * half, None, axis=axis)
    halved = lax.concatenate([parts[0] + parts[1], rest], axis)
  return lax.reduce_sum(x if halved is x else lax.optimization_barrier(halved), [axis])


def _window_sum(params: Mapping[str, Any], x: Any) -> Callable | None:
  """Returns the sums of windows that have the size of the array, along some axes.

  Args:
    params: of `reduce_window_sum`.
    x: shape of the operand.
  """
  windows = params['window_dimensions']
  axes = tuple(axis for axis, size in enumerate(windows) if size > 1)
  if (any(windows[axis] != x.shape[axis] for axis in axes)
      or any(map(any, params['padding'])) or set(params['base_dilation']) != {1}
      or set(params['window_dilation']) != {1} or not _sum({'axes': axes}, x)
      or any(s > 1 for i, s in enumerate(params['window_strides']) if i not in axes)):
    return None

  def total(x):
    return jnp.expand_dims(_total(axes, x), axes)

  return total


def _convolution(params: Mapping[str, Any], x: Any, w: Any) -> Callable | None:
  """Returns the convolution with two axes, no groups and many output channels.

  Args:
    params: of `conv_general_dilated`.
    x: shape of the images.
    w: shape of the kernel.
  """
  if len(x.shape) == 3:
    return _of_one_axis(params)
  if len(x.shape) != 4:
    return None
  if params['feature_group_count'] > 1:
    return functools.partial(_without_feature_groups, params)
  if params['batch_group_count'] > 1:
    return functools.partial(_without_batch_groups, params)
  if params['dimension_numbers'] != _LAYOUT:
    return functools.partial(_in_layout, params)
  if not _may_be_cut(params, x, w):
    return None
  if any(lo + hi > (size - 1) * dilation or min(lo, hi) < 0 for (lo, hi), size, dilation in zip(
      params['padding'], w.shape[:2], params['rhs_dilation'], strict=True)) or set(
          params['lhs_dilation']) != {1}:
    return functools.partial(_with_border, params)
  return None if max(w.shape[2:]) > VECTOR else functools.partial(_filled, params)


def _may_be_cut(params: Mapping[str, Any], x: Any, w: Any) -> bool:
  """Returns whether Eigen may cut the sums of a convolution: those of few results are cut."""
  result = jax.eval_shape(lambda x, w: lax.conv_general_dilated_p.bind(x, w, **params), x, w)
  if 0 in result.shape or 0 in x.shape:
    return False
  products = math.prod(w.shape[:3])
  positions = math.prod(result.shape[:3])
  return products >= _MANY_PRODUCTS and (
      w.shape[3] < _FEW_OUTPUTS or products > positions // 4)


def _convolved(params: Mapping[str, Any], x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns a convolution as the rule writes it."""
  function = _convolution(params, x, w)
  return function(x, w) if function else lax.conv_general_dilated_p.bind(x, w, **params)


def _with_border(params: Mapping[str, Any], x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns a convolution of images that have their padding, and zeros between their pixels.

  YNNPACK handles no other padding than that of VALID and SAME.
  """
  sides = [(lo, hi, dilation - 1) for (lo, hi), dilation in zip(
      params['padding'], params['lhs_dilation'], strict=True)]
  x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *sides, (0, 0, 0)])
  plain = {'padding': ((0, 0),) * 2, 'lhs_dilation': (1, 1)}
  return _convolved({**params, **plain}, lax.optimization_barrier(x), w)


def _filled(params: Mapping[str, Any], x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns a convolution whose output channels are filled up with zeros."""
  outputs = w.shape[3]
  w = jnp.pad(w, (*[(0, 0)] * 3, (0, _FILLED - outputs)))
  y = _convolved(params, x, w)
  return lax.optimization_barrier(y)[..., :outputs]


def _in_layout(params: Mapping[str, Any], x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns a convolution of arrays that are transposed to `_LAYOUT`."""
  # Axis i of what is transposed is axis order[i] of what was given, and the other way round at the
  # end. Without barriers, XLA would fold the transpositions into the convolution.
  orders = [tuple(given[wanted.index(axis)] for axis in range(4))
            for given, wanted in zip(params['dimension_numbers'], _LAYOUT, strict=True)]
  x, w = (lax.optimization_barrier(a.transpose(order))
          for a, order in zip((x, w), orders[:2], strict=True))
  y = _convolved({**params, 'dimension_numbers': _LAYOUT}, x, w)
  back = tuple(orders[2].index(axis) for axis in range(4))
  return lax.optimization_barrier(y).transpose(back)


def _of_one_axis(params: Mapping[str, Any]) -> Callable:
  """Returns a convolution along one axis as one along two, the first of size 1."""
  specs = [(*spec[:2], 3, spec[2]) for spec in params['dimension_numbers']]
  changed = dict(
      params, dimension_numbers=lax.ConvDimensionNumbers(*specs),
      window_strides=(1, *params['window_strides']), padding=((0, 0), *params['padding']),
      lhs_dilation=(1, *params['lhs_dilation']), rhs_dilation=(1, *params['rhs_dilation']))

  def convolution(x, w):
    y = _convolved(changed, x[..., None], w[..., None])
    return jnp.squeeze(y, 3)

  return convolution


def _without_feature_groups(params: Mapping[str, Any], x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns a convolution with groups of channels, as one whose other kernels are zero."""
  groups = params['feature_group_count']
  outputs, inputs = params['dimension_numbers'].rhs_spec[:2]
  blocks = jnp.split(w, groups, outputs)
  width = w.shape[inputs]

  def placed(i, block):
    widths = [(0, 0)] * w.ndim
    widths[inputs] = i * width, (groups - 1 - i) * width
    return jnp.pad(block, widths)

  whole = jnp.concatenate([placed(i, block) for i, block in enumerate(blocks)], outputs)
  return _convolved({**params, 'feature_group_count': 1}, x, whole)


def _without_batch_groups(params: Mapping[str, Any], x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns a convolution with groups of images, of which each has kernels of its own."""
  groups = params['batch_group_count']
  y = _convolved({**params, 'batch_group_count': 1}, x, w)
  batch, features = params['dimension_numbers'].out_spec[:2]
  parts: Sequence[jax.Array] = jnp.split(y, groups, batch)
  return jnp.concatenate([jnp.split(part, groups, features)[i] for i, part in enumerate(parts)],
                         features)


_RULES: Mapping[str, Callable[..., Callable | None]] = {
    'dot_general': _product,
    'transpose': _transposition,
    'reduce_sum': _sum,
    'reduce_window_sum': _window_sum,
    'conv_general_dilated': _convolution,
}
