"""Spaces of Gymnasium and gymnax as arrays: layout of observations, choices of integer actions.

Worker processes of Gymnasium import this module, so it does not import JAX. Its functions take
arrays of NumPy and of JAX alike. Kinds of spaces are told apart by the names of their classes,
since gymnax has classes of its own and EnvPool uses Gymnasium's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_MOST_CHOICES = 10_000  # of one element of an integer action
# Dtypes that programs do not have while x64 is off.
_NARROWED = {'float64': np.float32, 'int64': np.int32, 'uint64': np.uint32}


class ObsPart(NamedTuple):
  """Part of an observation that is a flat vector of several arrays; see `take_apart`."""

  name: str  # names of nested dicts are joined by '/'
  shape: tuple[int, ...]  # of the part in one observation
  dtype: np.dtype  # bool for a one-hot or a mask; float64 is converted to float32
  start: int  # index of the part's first element in the flat observation
  channels_last: bool = False  # the part is an image (H, W, C)
  num_values: int = 0  # the part is one number from 0 to num_values - 1; 0 for other parts

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def is_image(self) -> bool:
    """True if the part is an image, in which neighbouring elements belong together."""
    return len(self.shape) == 3


def is_channels_last(shape: tuple[int, ...]) -> bool:
  """Returns whether images of a shape are (H, W, C) and not (C, H, W).

  A square image has two equal axes, and the third axis is its channels: (4, 4, 31) has 31 channels.
  In other images the smaller outer axis is the channels.
  """
  if len(shape) != 3:
    return False
  first, middle, last = shape
  if (first == middle) != (middle == last):
    return first == middle
  return last < first


def choices(action: Any) -> tuple[int, ...]:
  """Returns the number of choices of each element of an integer action, else ()."""
  kind = type(action).__name__
  if kind == 'MultiDiscrete':
    return tuple(map(int, np.ravel(action.nvec)))
  if kind == 'MultiBinary':
    return (2,) * math.prod(action.shape)
  if kind == 'Box' and np.issubdtype(action.dtype, np.integer) and not np.any(action.low):
    sizes = np.ravel(action.high).astype(np.int64) + 1
    return tuple(map(int, sizes)) if sizes.size and sizes.max() <= _MOST_CHOICES else ()
  return ()


class Spaces(NamedTuple):
  """The spaces of a task, of Gymnasium or gymnax."""

  observation: Any
  action: Any


class Leaf(NamedTuple):
  """Array of an observation, and its place in a flat observation."""

  part: ObsPart
  one_hot_from: int | None  # the smallest value of a number that becomes a one-hot, else None


def layout(task: str, space: Any) -> tuple[tuple[int, ...], np.dtype, tuple[ObsPart, ...]]:
  """Returns shape, dtype and parts of one observation of `observe`."""
  leaves = leaves_of(task, space)
  if is_array(space):
    return leaves[0].part.shape, _stored(leaves[0].part.dtype), ()
  parts = tuple(leaf.part for leaf in leaves)
  size = sum(part.size for part in parts)
  return (size,), _dtype(leaves), parts if len(parts) > 1 else ()


def is_array(space: Any) -> bool:
  """Returns whether observations of a space are one array, which keeps its shape.

  A user's class with a shape and a dtype counts as one.
  """
  return type(space).__name__ not in ('Discrete', 'MultiDiscrete', 'Dict', 'Tuple')


def _stored(dtype: Any) -> np.dtype:
  """Returns the dtype in which an array of an observation is stored."""
  return np.dtype(np.uint8) if dtype == np.bool_ else narrowed(dtype)


def _dtype(leaves: Sequence[Leaf]) -> np.dtype:
  """Returns the dtype of a flat observation: uint8 if all its parts fit, else float32."""
  small = all(_stored(leaf.part.dtype) == np.uint8 for leaf in leaves)
  return np.dtype(np.uint8 if small else np.float32)


def leaves_of(task: str, space: Any, name: str = '', start: int = 0, one_hot: bool = True
              ) -> list[Leaf]:
  """Returns the arrays of an observation in the order of their names.

  A number (Discrete) becomes a one-hot vector. In a dict it stays a number, since it may count
  something.

  Args:
    task: name of the task, for error messages.
    space: the space of observations, or of a part.
    name: the name of the part; '' for the whole observation.
    start: index of the part's first element in the flat observation.
    one_hot: whether a Discrete space becomes a one-hot.

  Raises:
    ValueError: the space, or a part, is of another kind.
  """
  kind = type(space).__name__
  inner = None
  if kind == 'Dict':
    inner = sorted(space.spaces.items())
  elif kind == 'Tuple':
    inner = [(str(i), part) for i, part in enumerate(space.spaces)]
  if inner is not None:
    leaves: list[Leaf] = []
    for key, part in inner:
      part_start = start + sum(leaf.part.size for leaf in leaves)
      part_name = f'{name}/{key}' if name else key
      leaves += leaves_of(task, part, part_name, part_start, kind == 'Tuple')
    return leaves

  if kind == 'Box':
    shape = tuple(space.shape)
    return [Leaf(ObsPart(name, shape, box_dtype(space), start, is_channels_last(shape)), None)]
  if kind == 'MultiBinary':
    shape = tuple(np.atleast_1d(space.n)) if not space.shape else tuple(space.shape)
    return [Leaf(ObsPart(name, shape, np.dtype(bool), start, is_channels_last(shape)), None)]
  if kind == 'Discrete':
    if not one_hot:
      # `num_values` describes numbers from 0 on only.
      values = 0 if _first(space) else int(space.n)
      return [Leaf(ObsPart(name, (), np.dtype(np.int32), start, num_values=values), None)]
    return [Leaf(ObsPart(name, (int(space.n),), np.dtype(bool), start), _first(space))]
  if kind == 'MultiDiscrete':
    sizes = [int(n) for n in np.ravel(space.nvec)]
    firsts = [int(first) for first in np.ravel(space.start)]
    return [Leaf(ObsPart(f'{name}/{i}' if name else str(i), (sizes[i],), np.dtype(bool),
                         start + sum(sizes[:i])), firsts[i]) for i in range(len(sizes))]
  raise ValueError(f'env.task: the observations of {task} are {kind}; only arrays (Box, '
                   'MultiBinary), numbers (Discrete, MultiDiscrete), and dicts and tuples of them '
                   'can be learned from')


def _first(space: Any) -> int:
  """Returns the smallest value of a Discrete space; 0 for gymnax's spaces."""
  return int(getattr(space, 'start', 0))


def _arrays(obs: Any, space: Any) -> list[Any]:
  """Returns the arrays [B, ...] of B environments' observations in the order of `leaves_of`."""
  kind = type(space).__name__
  if kind == 'Dict':
    return [x for name, inner in sorted(space.spaces.items()) for x in _arrays(obs[name], inner)]
  if kind == 'Tuple':
    return [x for part, inner in zip(obs, space.spaces, strict=True) for x in _arrays(part, inner)]
  if kind == 'MultiDiscrete':
    flat = obs.reshape(len(obs), -1)
    return [flat[:, i] for i in range(flat.shape[1])]
  return [obs]


def observe(obs: Any, space: Any, leaves: Sequence[Leaf]) -> Any:
  """Returns observations [B, ...], of NumPy if `obs` is, of JAX otherwise.

  An array keeps its shape. Numbers become one-hots, and dicts and tuples one flat vector with the
  parts in the order of their names.

  Args:
    obs: observations of B environments: an array [B, ...], or dicts and tuples of them.
    space: the space of one observation.
    leaves: `leaves_of` the space.
  """
  arrays = [x.astype(narrowed(x.dtype)) for x in _arrays(obs, space)]
  if is_array(space):
    # A cast to the same dtype is left out: it would be an operation of every Atari program.
    stored = _stored(arrays[0].dtype)
    return arrays[0] if arrays[0].dtype == stored else arrays[0].astype(stored)
  size = len(arrays[0])
  dtype = _dtype(leaves)
  columns = []
  for x, leaf in zip(arrays, leaves, strict=True):
    if leaf.one_hot_from is not None:
      values = leaf.one_hot_from + np.arange(leaf.part.size, dtype=np.int32)
      x = x.reshape(size, 1) == values
    columns.append(x.reshape(size, -1).astype(dtype))
  # NumPy or jax.numpy, without an import of JAX in worker processes.
  xnp = arrays[0].__array_namespace__()
  return xnp.concatenate(columns, axis=1)


def observe_one(obs: Any, space: Any, leaves: Sequence[Leaf]) -> np.ndarray:
  """Returns the observation of one environment as `observe` does, without the axis [B]."""
  return observe(_with_axis(obs, space), space, leaves)[0]


def _with_axis(obs: Any, space: Any) -> Any:
  """Returns one environment's observation of NumPy with a leading axis [1] of each array."""
  kind = type(space).__name__
  if kind == 'Dict':
    return {name: _with_axis(obs[name], inner) for name, inner in space.spaces.items()}
  if kind == 'Tuple':
    return tuple(_with_axis(part, inner) for part, inner in zip(obs, space.spaces, strict=True))
  return np.asarray(obs)[None]


def one_hots(space: Any) -> tuple[slice, ...]:
  """Returns the places of one-hots in flat observations of a space."""
  if is_array(space):
    return ()
  return tuple(slice(leaf.part.start, leaf.part.start + leaf.part.size)
               for leaf in leaves_of('', space) if leaf.one_hot_from is not None)


def batch_axes(obs: Any, space: Any) -> int:
  """Returns the number of leading axes of observations: 0 for one observation, 1 for a batch.

  Args:
    obs: an array, or dicts and tuples of them.
    space: the space of one observation.

  Raises:
    KeyError, IndexError, TypeError: the observations have another structure.
  """
  kind = type(space).__name__
  if kind == 'Dict':
    name, inner = min(space.spaces.items())
    return batch_axes(obs[name], inner)
  if kind == 'Tuple':
    return batch_axes(obs[0], space.spaces[0])
  return np.ndim(obs) - len(space.shape or ())


def arrays_of(obs: Any, space: Any) -> Any:
  """Returns observations with a NumPy array in place of each leaf, in the space's structure."""
  kind = type(space).__name__
  if kind == 'Dict':
    return {name: arrays_of(obs[name], inner) for name, inner in space.spaces.items()}
  if kind == 'Tuple':
    return tuple(arrays_of(part, inner) for part, inner in zip(obs, space.spaces, strict=True))
  return np.asarray(obs)


def task_actions(actions: np.ndarray, space: Any) -> np.ndarray:
  """Returns actions in the form and with the dtype that a task takes, within its bounds.

  Args:
    actions: [B, ...], in the form of policies: choices count from 0, and a vector has one axis.
    space: the space of one action.
  """
  # A copy: an environment may keep its action.
  actions = np.array(actions, getattr(space, 'dtype', None)).reshape(len(actions), *space.shape)
  first = getattr(space, 'start', None)
  if first is not None:
    # The sum may have another dtype, as that of int8 and an int64.
    return (actions + first).astype(actions.dtype, copy=False)
  return within(actions, space)


def within(actions: Any, space: Any) -> Any:
  """Returns actions of floats clipped to the bounds of a Box, in their own dtype.

  Policies compute with float32, which may round an action to a number just outside of the bounds.
  Actions of whole numbers are returned unchanged.

  Args:
    actions: [B, ...] of NumPy or JAX, in the shape and, if it has 64 bits, the dtype of the task.
    space: the space of one action.
  """
  if not hasattr(space, 'low') or not np.issubdtype(actions.dtype, np.floating):
    return actions
  low = _inner_bound(space.low, space.dtype, actions.dtype, np.inf)
  high = _inner_bound(space.high, space.dtype, actions.dtype, -np.inf)
  xnp = actions.__array_namespace__()
  return xnp.minimum(xnp.maximum(actions, low), high)


def _inner_bound(bound: Any, space_dtype: Any, dtype: Any, inwards: float) -> np.ndarray:
  """Returns a Box's bound in another dtype, rounded to a number within the Box.

  Args:
    bound: the lower or upper bound.
    space_dtype: dtype of the Box.
    dtype: dtype of the result.
    inwards: inf for a lower bound, -inf for an upper one.
  """
  bound = np.asarray(bound, space_dtype)
  if bound.dtype == dtype:
    return bound
  with np.errstate(over='ignore'):
    rounded = bound.astype(dtype)
  outside = rounded < bound if inwards > 0 else rounded > bound
  return np.where(outside, np.nextafter(rounded, rounded.dtype.type(inwards)), rounded)


def box_dtype(space: Any) -> np.dtype:
  """Returns the dtype in which an array of a Box is stored, since programs have no 64 bits.

  float64 becomes float32. int64 becomes int32, and uint64 uint32, if the bounds of the Box fit;
  otherwise they become float32, which keeps 24 bits of any number.
  """
  dtype = np.dtype(space.dtype)
  if dtype.kind not in 'iu' or dtype.name not in _NARROWED:
    return narrowed(dtype)
  lowest, highest = limits_of(_NARROWED[dtype.name])
  # A user's own class may have no bounds; JAX has no larger numbers than these.
  low = getattr(space, 'low', lowest)
  high = getattr(space, 'high', highest)
  fits = np.min(low, initial=0) >= lowest and np.max(high, initial=0) <= highest
  return np.dtype(_NARROWED[dtype.name] if fits else np.float32)


def limits_of(dtype: Any) -> tuple[int, int] | None:
  """Returns the smallest and the largest whole number of a dtype; None for a dtype of floats."""
  dtype = np.dtype(dtype)
  if dtype.kind not in 'biu':
    return None
  return (0, 1) if dtype.kind == 'b' else (np.iinfo(dtype).min, np.iinfo(dtype).max)


def whole_numbers(space: Any) -> tuple[Any, Any] | None:
  """Returns the smallest and largest number that observations may have; None for floats.

  The bounds of a Box are no limits, but the dtype in which it is stored is.

  Args:
    space: a space without parts, of Gymnasium.
  """
  kind = type(space).__name__
  if kind == 'Discrete':
    return int(space.start), int(space.start) + int(space.n) - 1
  if kind == 'MultiDiscrete':
    return space.start, space.start + space.nvec - 1
  if kind == 'MultiBinary':
    return 0, 1
  return limits_of(box_dtype(space)) or limits_of(space.dtype)


def holds(dtype: Any, array: np.ndarray) -> bool:
  """Returns whether a dtype holds an array's numbers: floats are rounded, whole numbers equal."""
  limits = limits_of(dtype)
  if limits is None:
    return np.can_cast(array.dtype, dtype, 'same_kind')
  if array.dtype.kind not in 'biu':
    return False
  lowest, highest = limits
  return np.can_cast(array.dtype, dtype) or not ((array < lowest) | (array > highest)).any()


def narrowed(dtype: Any) -> np.dtype:
  """Returns float32 for float64, and any other dtype unchanged."""
  return np.dtype(np.float32) if dtype == np.float64 else np.dtype(dtype)
