"""Spaces of Gymnasium and gymnax as arrays: layout of observations, choices of integer actions.

Worker processes of Gymnasium import this module, so it does not import JAX. Its functions take
arrays of NumPy and of JAX alike. Kinds of spaces are told apart by the names of their classes,
since gymnax has classes of its own and EnvPool uses Gymnasium's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

_MOST_CHOICES = 10_000  # of one element of an integer action
# Dtypes that programs do not have while x64 is off.
_NARROWED = {'float64': np.float32, 'int64': np.int32, 'uint64': np.uint32}
MOST_VALUES = 4096  # of a number in an observation, which becomes a one-hot

# Number of the rules by which this module lays out observations. Workdirs record it, since a
# network fits one layout only; see `change_of_layout`. Those of podracer_jit 0.6 and before, which
# do not record it, have 1.
LAYOUT = 3


class ObsPart(NamedTuple):
  """Part of an observation that is a flat vector of several arrays; see `take_apart`."""

  name: str  # names of nested dicts are joined by '/'
  shape: tuple[int, ...]  # of the part in one observation
  dtype: np.dtype  # bool for a one-hot or a mask; float64 is converted to float32
  start: int  # index of the part's first element in the flat observation
  channels_last: bool = False  # the part is an image (H, W, C)

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

  An image is (C, H, W) if its last two axes are equal and its first is another, or if its first is
  at most half of each of the others. Any other image is (H, W, C).
  """
  if len(shape) != 3:
    return False
  first, middle, last = shape
  if first == middle or middle == last:
    return first == middle
  return not _are_few(first, middle, last)


def is_ambiguous(shape: tuple[int, ...]) -> bool:
  """Returns whether images of a shape may well be (C, H, W), although they count as (H, W, C)."""
  if not is_channels_last(shape):
    return False
  first, middle, last = shape
  is_square = first == middle != last
  return not (is_square or _are_few(last, first, middle))


def _are_few(channels: int, height: int, width: int) -> bool:
  """Returns whether an axis is so much shorter than the others that it must be the channels."""
  return 2 * channels <= min(height, width)


def choices(action: Any) -> tuple[int, ...]:
  """Returns the number of choices of each element of an integer action, else ()."""
  kind = type(action).__name__
  if kind == 'MultiDiscrete':
    return tuple(map(int, np.ravel(action.nvec)))
  if kind == 'MultiBinary':
    return (2,) * math.prod(action.shape)
  if kind == 'Box' and np.issubdtype(action.dtype, np.integer) and not np.any(action.low):
    high = np.ravel(action.high)
    return tuple(int(x) + 1 for x in high) if high.size and high.max() < _MOST_CHOICES else ()
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
    return leaves[0].part.shape, stored(space), ()
  parts = tuple(leaf.part for leaf in leaves)
  size = sum(part.size for part in parts)
  return (size,), flat_dtype(parts), parts if len(parts) > 1 else ()


def is_array(space: Any) -> bool:
  """Returns whether observations of a space are one array, which keeps its shape.

  An array that is alone in a dict or a tuple counts as one, too, and so does a user's class with a
  shape and a dtype.
  """
  return type(innermost(space)).__name__ not in ('Discrete', 'MultiDiscrete', 'Dict', 'Tuple')


def innermost(space: Any) -> Any:
  """Returns the space that is alone in dicts and tuples; any other space unchanged."""
  while type(space).__name__ in ('Dict', 'Tuple') and len(space.spaces) == 1:
    (space,) = space.spaces.values() if type(space).__name__ == 'Dict' else space.spaces
  return space


def array_in(obs: Any, space: Any) -> Any:
  """Returns the part of an observation that belongs to the `innermost` space."""
  while type(space).__name__ in ('Dict', 'Tuple') and len(space.spaces) == 1:
    ((key, space),) = _items(space)
    obs = obs[key]
  return obs


def _items(space: Any) -> list[tuple[Any, Any]]:
  """Returns the parts of a Dict, in the order of their names, or of a Tuple, by their keys."""
  if type(space).__name__ == 'Dict':
    return sorted(space.spaces.items())
  return list(enumerate(space.spaces))


def stored(space: Any) -> np.dtype:
  """Returns the dtype in which observations are stored that are one array.

  Images of bits are bool, since networks take bytes of images for pixels from 0 to 255.
  """
  array = innermost(space)
  if not has_bits(array):
    return box_dtype(array)
  return np.dtype(bool if len(array.shape) == 3 else np.uint8)


def flat_dtype(parts: Iterable[ObsPart]) -> np.dtype:
  """Returns the dtype of a flat observation: uint8 if all its parts fit, else float32."""
  small = all(part.dtype in (np.bool_, np.uint8) for part in parts)
  return np.dtype(np.uint8 if small else np.float32)


def leaves_of(task: str, space: Any, name: str = '', start: int = 0) -> list[Leaf]:
  """Returns the arrays of an observation in the order of their names.

  A number (Discrete, an element of a MultiDiscrete) becomes a one-hot vector.

  Args:
    task: name of the task, for error messages.
    space: the space of observations, or of a part.
    name: the name of the part; '' for the whole observation.
    start: index of the part's first element in the flat observation.

  Raises:
    ValueError: the space, or a part, is of another kind, or a number has too many values.
  """
  kind = type(space).__name__
  if kind in ('Dict', 'Tuple'):
    leaves: list[Leaf] = []
    for key, part in _items(space):
      part_start = start + sum(leaf.part.size for leaf in leaves)
      leaves += leaves_of(task, part, f'{name}/{key}' if name else str(key), part_start)
    return leaves

  if kind in ('Box', 'MultiBinary'):
    shape = tuple(space.shape)
    dtype = np.dtype(bool) if has_bits(space) else box_dtype(space)
    return [Leaf(ObsPart(name, shape, dtype, start, is_channels_last(shape)), None)]
  if kind == 'Discrete':
    return [_one_hot(task, name, int(space.n), _first(space), start)]
  if kind == 'MultiDiscrete':
    sizes = [int(n) for n in np.ravel(space.nvec)]
    firsts = [int(first) for first in np.ravel(space.start)]
    return [_one_hot(task, f'{name}/{i}' if name else str(i), sizes[i], firsts[i],
                     start + sum(sizes[:i])) for i in range(len(sizes))]
  raise ValueError(f'env.task: the observations of {task} are {kind}; only arrays (Box, '
                   'MultiBinary), numbers (Discrete, MultiDiscrete), and dicts and tuples of them '
                   'can be learned from')


def _one_hot(task: str, name: str, num_values: int, first: int, start: int) -> Leaf:
  """Returns the leaf of a number.

  Args:
    task: name of the task, for error messages.
    name: the name of the part; '' for the whole observation.
    num_values: values that the number can have.
    first: the smallest of them.
    start: index of the one-hot's first element in the flat observation.

  Raises:
    ValueError: the number has too many values.
  """
  if num_values > MOST_VALUES:
    base = math.isqrt(num_values - 1) + 1
    digits = (f'two digits, MultiDiscrete([{base}, {base}]), of divmod(number, {base})'
              if base <= MOST_VALUES else 'several digits, a MultiDiscrete')
    raise ValueError(f'env.task: the observations of {task} have a number '
                     f'{f"({name}) " if name else ""}with {num_values:,} values, which would be a '
                     f'one-hot of as many elements; at most {MOST_VALUES:,} can be learned from: a '
                     f'wrapper can give {digits}, or, if it counts something, a Box')
  return Leaf(ObsPart(name, (num_values,), np.dtype(bool), start), first)


def _first(space: Any) -> int:
  """Returns the smallest value of a Discrete space; 0 for gymnax's spaces."""
  return int(getattr(space, 'start', 0))


def _arrays(obs: Any, space: Any) -> list[Any]:
  """Returns the arrays [B, ...] of B environments' observations in the order of `leaves_of`."""
  kind = type(space).__name__
  if kind == 'Dict':
    return [x for name, inner in _items(space) for x in _arrays(obs[name], inner)]
  if kind == 'Tuple':
    return [x for part, inner in zip(obs, space.spaces, strict=True) for x in _arrays(part, inner)]
  if kind == 'MultiDiscrete':
    flat = obs.reshape(len(obs), -1)
    return [flat[:, i] for i in range(flat.shape[1])]
  return [obs]


def misfit(obs: Any, space: Any) -> str:
  """Returns which array of an observation has another shape than its space; '' if none has.

  The place of a part in the flat observation follows from the space. A single array keeps its own
  shape, whatever the space says.
  """
  def problem_of(array: Any, space: Any, name: str) -> str:
    is_number = type(space).__name__ == 'Discrete'
    fits = math.prod(array.shape) == 1 if is_number else array.shape == tuple(space.shape)
    if fits or not name:
      return ''
    return f'the part {name} is an array {array.shape}, and its space is {space}'
  return _first_problem(problem_of, obs, space)


def beyond_bits(obs: Any, space: Any) -> str:
  """Returns which array of an observation has no bits, although its space has; '' if none has."""
  def problem_of(array: Any, space: Any, name: str) -> str:
    if not has_bits(space) or np.max(array, initial=0) <= 1:
      return ''
    which = f'the part {name}' if name else 'one'
    return f'{which} has the number {np.max(array)}, and its space is {space}'
  return _first_problem(problem_of, obs, space)


def _first_problem(problem_of: Callable[[Any, Any, str], str], obs: Any, space: Any,
                   name: str = '') -> str:
  """Returns the first problem of an array of an observation; '' if there is none.

  Args:
    problem_of: returns the problem of an array, its space and its name, or ''.
    obs: one observation.
    space: its space.
    name: the name of the part; '' for the whole observation.
  """
  if type(space).__name__ not in ('Dict', 'Tuple'):
    return problem_of(obs, space, name)
  problems = (_first_problem(problem_of, obs[key], inner, f'{name}/{key}' if name else str(key))
              for key, inner in _items(space))
  return next(filter(None, problems), '')


def observe(obs: Any, space: Any, leaves: Sequence[Leaf]) -> Any:
  """Returns observations [B, ...], of NumPy if `obs` is, of JAX otherwise.

  An array keeps its shape, also one that is alone in a dict or a tuple. Numbers become one-hots,
  and dicts and tuples one flat vector with the parts in the order of their names.

  Args:
    obs: observations of B environments: an array [B, ...], or dicts and tuples of them.
    space: the space of one observation.
    leaves: `leaves_of` the space.
  """
  arrays = [x.astype(narrowed(x.dtype)) for x in _arrays(obs, space)]
  if is_array(space):
    # A cast to the same dtype is left out: it would be an operation of every Atari program.
    dtype = stored(space)
    return arrays[0] if arrays[0].dtype == dtype else arrays[0].astype(dtype)
  size = len(arrays[0])
  dtype = flat_dtype(leaf.part for leaf in leaves)
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


def change_of_layout(layout: int, space: Any, shape: tuple[int, ...], sees_images: bool,
                     reads_pixels: bool) -> str:
  """Returns how the layout of observations differs from an earlier one; '' if it does not.

  Args:
    layout: the number of the earlier one; see `LAYOUT`.
    space: the space of one observation.
    shape: of one observation, as the network reads it.
    sees_images: whether the network asks for the layout of images.
    reads_pixels: whether the network, or its normalisation, may tell bytes from other numbers.
  """
  change = _change_of_layout_1(space, shape, sees_images) if layout < 2 else ''
  if not change and layout < 3 and reads_pixels and _had_bytes(space):
    change = 'bytes from 0 to 1 are bits now, and were read as bytes up to 255'
  return change


def _had_bytes(space: Any) -> bool:
  """Returns whether an array in a space had bytes in layout 2 and has bits now."""
  if is_array(space):
    return has_bits(innermost(space)) and stored(space) == np.bool_
  # Among several parts, a MultiBinary had bits.
  return any(type(leaf).__name__ == 'Box' and has_bits(leaf) for leaf in without_parts(space))


def without_parts(space: Any) -> Iterable[Any]:
  """Yields the spaces in dicts and tuples."""
  if type(space).__name__ not in ('Dict', 'Tuple'):
    yield space
    return
  for _, part in _items(space):
    yield from without_parts(part)


def _change_of_layout_1(space: Any, shape: tuple[int, ...], sees_images: bool) -> str:
  """Returns how the layout of observations differs from layout 1; see `change_of_layout`."""
  inner = innermost(space)
  images = [shape]
  if is_array(space):
    was_flat = inner is not space
    if was_flat and (len(shape) != 1 or narrowed(inner.dtype) not in (bool, np.uint8, np.float32)):
      return 'an array that is alone in a dict keeps its shape and type now'
  else:
    if _has_number_in_dict(space):
      return 'a number (Discrete) in a dict is a one-hot now'
    images = [leaf.part.shape for leaf in leaves_of('', space)]
  for image in images:
    if sees_images and len(image) == 3 and is_channels_last(image):
      first, middle, last = image
      was_last = last < first if (first == middle) == (middle == last) else first == middle
      if not was_last:
        return f'an image {image} is (H, W, C) now, and was (C, H, W)'
  return ''


def _has_number_in_dict(space: Any) -> bool:
  """Returns whether a Dict in a space has a Discrete as its part."""
  kind = type(space).__name__
  if kind not in ('Dict', 'Tuple'):
    return False
  inner = [part for _, part in _items(space)]
  return (kind == 'Dict' and any(type(part).__name__ == 'Discrete' for part in inner)
          or any(map(_has_number_in_dict, inner)))


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


def has_bits(space: Any) -> bool:
  """Returns whether the numbers of an array are bytes or whole numbers from 0 to 1."""
  # A user's own class may have no bounds.
  return type(space).__name__ == 'MultiBinary' or (
      space.dtype == np.uint8 and np.max(getattr(space, 'high', 255), initial=0) <= 1)


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
  if has_bits(space):
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
