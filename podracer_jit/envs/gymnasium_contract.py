"""Checks of the values that `reset` and `step` of a Gymnasium environment return.

Nothing is cast in silence: floats never become whole numbers, and whole numbers keep their value.
Worker processes import this module, so it does not import JAX.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from podracer_jit.envs import spaces
from podracer_jit.options import shorten, shown

RESET = 'reset must return two values: observation, info (a dict)'
STEP = 'step must return five values: observation, reward, terminated, truncated, info'

# Types that need no further look.
_REWARDS = (float, np.float64, np.float32)
_FLAGS = (bool, np.bool_)
_WHOLE = (int, np.int64, np.int32)


class WrongValue(Exception):
  """Raised for a value that an environment must not return; the message says what is right."""


class Contract:
  """Takes the results of `reset` and `step` apart, and checks each value."""

  def __init__(self, task: str, space: Any):
    """Prepares the checks.

    Args:
      task: name of the task, for error messages.
      space: the space of observations.
    """
    self._space = space
    self._leaves = spaces.leaves_of(task, space)
    self._is_array = spaces.is_array(space)
    self._check = _checker(space, '', axis=not self._is_array)

  def after_reset(self, results: Any) -> np.ndarray:
    """Returns the observation that `reset` returned, in the form of `spaces.observe_one`.

    Raises:
      WrongValue: the results break the contract.
    """
    if not (isinstance(results, tuple | list) and len(results) == 2
            and isinstance(results[1], Mapping)):
      raise WrongValue(f'returned {_described(results)}; {RESET}')
    return self._observation(results[0])

  def after_step(self, results: Any) -> tuple[np.ndarray, float, bool, bool]:
    """Returns the observation, as `after_reset`, the reward, terminated and truncated.

    Raises:
      WrongValue: the results break the contract.
    """
    if not isinstance(results, (tuple, list)) or len(results) != 5:  # noqa: UP038 - it is faster
      old = ''
      if isinstance(results, tuple | list) and len(results) == 4:
        old = ' (four are the interface of the old gym: done is now terminated or truncated)'
      raise WrongValue(f'returned {_described(results)}; {STEP}{old}')
    obs, reward, terminated, truncated, _ = results
    # The usual types need no function call.
    if type(reward) not in _REWARDS:
      reward = _reward(reward)
    if type(terminated) not in _FLAGS:
      terminated = _flag('terminated', terminated)
    if type(truncated) not in _FLAGS:
      truncated = _flag('truncated', truncated)
    return self._observation(obs), float(reward), bool(terminated), bool(truncated)

  def _observation(self, obs: Any) -> np.ndarray:
    arrays = self._check(obs)
    if self._is_array:
      return spaces.array_in(arrays, self._space)
    return spaces.observe(arrays, self._space, self._leaves)[0]


def _reward(value: Any) -> float:
  number = _number(value)
  if number is None:
    raise WrongValue(f'returned the reward {_described(value)}; a reward must be one real number, '
                     'such as 1.0')
  return number


def _flag(name: str, value: Any) -> bool:
  """Returns `terminated` or `truncated`."""
  number = _number(value)
  if number not in (0, 1):
    raise WrongValue(f'returned {_described(value)} as {name}; {name} must be one bool, True or '
                     'False')
  return bool(number)


def _number(value: Any) -> float | None:
  """Returns a real number, or an array without axes, as a float; None if it is neither."""
  if isinstance(value, numbers.Real):
    try:
      return float(value)
    except OverflowError:
      return None
  array = _array(value)
  if array is None or array.shape or not np.can_cast(array.dtype, np.float64, 'same_kind'):
    return None
  return float(array)


def _array(value: Any) -> np.ndarray | None:
  """Returns a value as an array; None if that fails, or if elements of it are masked."""
  try:
    return None if np.ma.is_masked(value) else np.asarray(value)
  except Exception:  # noqa: BLE001 - an object's __array__ may raise anything
    return None


def _checker(space: Any, name: str, axis: bool) -> Callable[[Any], Any]:
  """Returns a function that checks an observation, and returns its arrays.

  The result has the structure of the space, as `spaces.observe` takes it.

  Args:
    space: the space of the observation, or of a part of it.
    name: the name of the part, as in `spaces.ObsPart`; '' for the whole observation.
    axis: whether the arrays get a leading axis [1].
  """
  kind = type(space).__name__
  if kind == 'Dict':
    return _dict_checker(space, name, axis)
  if kind == 'Tuple':
    return _tuple_checker(space, name, axis)
  return _array_checker(space, name, axis)


def _dict_checker(space: Any, name: str, axis: bool) -> Callable[[Any], Any]:
  checkers = {key: _checker(part, _joined(name, key), axis) for key, part in space.spaces.items()}

  def check(obs: Any) -> dict[Any, Any]:
    if not isinstance(obs, Mapping):
      raise _wrong(name, obs, f'it must be a dict with the keys {shown(list(checkers))}')
    arrays = {}
    for key, checker in checkers.items():
      if key not in obs:
        raise _wrong(name, obs, f'the key {key!r} of its space is missing')
      arrays[key] = checker(obs[key])
    return arrays

  return check


def _tuple_checker(space: Any, name: str, axis: bool) -> Callable[[Any], Any]:
  checkers = [_checker(part, _joined(name, i), axis) for i, part in enumerate(space.spaces)]

  def check(obs: Any) -> tuple[Any, ...]:
    # Gymnasium takes lists and arrays for tuples, too.
    if not (isinstance(obs, tuple | list) or isinstance(obs, np.ndarray) and obs.ndim):
      raise _wrong(name, obs, f'it must be a tuple of {len(checkers)} parts')
    if len(obs) != len(checkers):
      raise _wrong(name, obs, f'it has {len(obs)} parts; its space has {len(checkers)}')
    return tuple(checker(part) for checker, part in zip(checkers, obs, strict=True))

  return check


def _array_checker(space: Any, name: str, axis: bool) -> Callable[[Any], np.ndarray]:
  shape = tuple(space.shape)
  dtype = np.dtype(space.dtype)
  lowest, highest = spaces.whole_numbers(space) or (None, None)
  # Arrays of the space's own dtype need no look at their numbers.
  any_number = lowest is None or (
      type(space).__name__ == 'Box' and spaces.limits_of(dtype) == (lowest, highest))

  is_discrete = type(space).__name__ == 'Discrete'

  def check(obs: Any) -> np.ndarray:
    # The usual cases come first and are fast.
    array = obs
    if type(obs) is np.ndarray and obs.dtype == dtype and obs.shape == shape:
      if any_number:
        return obs[None] if axis else obs
    elif is_discrete and type(obs) in _WHOLE and lowest <= obs <= highest:
      return np.array([obs] if axis else obs)
    else:
      array = converted(obs)
    if lowest is not None and ((array < lowest) | (array > highest)).any():
      raise _wrong(name, obs, f'its numbers must be from {_limit(lowest)} to {_limit(highest)} '
                              f'({shown(space)})')
    return array[None] if axis else array

  def converted(obs: Any) -> np.ndarray:
    array = _array(obs)
    if array is None:
      raise _wrong(name, obs, f'it must be an array of {dtype}')
    if array.shape != shape:
      raise _wrong(name, obs, f'its shape must be {shape}, as its space has it, and is '
                              f'{array.shape}')
    if lowest is None and not np.can_cast(array.dtype, dtype, 'same_kind'):
      raise _wrong(name, obs, f'its dtype must be {dtype}, as its space has it, and is '
                              f'{array.dtype}')
    if lowest is not None and array.dtype.kind not in 'biu':
      raise _wrong(name, obs, f'its space has the dtype {dtype}, which {array.dtype} does not fit; '
                              f'return whole numbers, or declare a Box of floats')
    return array

  return check


def _joined(name: str, key: Any) -> str:
  return f'{name}/{key}' if name else str(key)


def _wrong(name: str, value: Any, right: str) -> WrongValue:
  """Returns the error about an observation, or about the part `name` of it."""
  part = f'the part {name!r} of the observation' if name else 'the observation'
  return WrongValue(f'returned {part} as {_described(value)}; {right}')


def _limit(bound: Any) -> str:
  return shown(bound.tolist() if isinstance(bound, np.ndarray) else bound)


def _described(value: Any) -> str:
  """Returns a value with its type, or its dtype and shape, for error messages."""
  try:
    text = shown(value)
  except Exception:  # noqa: BLE001 - an object's __repr__ may raise anything
    text = 'a value'
  if isinstance(value, np.ndarray):
    return f'{text} ({value.dtype} of shape {value.shape})'
  if isinstance(value, tuple | list):
    return f'{len(value)} values, {text}'
  return f'{text} ({shorten(type(value).__name__)})'
