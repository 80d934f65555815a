"""Keys of vector environments."""

import functools
import warnings

import jax
import pytest

from podracer_jit.learner.learner import keys_for_acting, keys_of


@pytest.mark.parametrize('seed', [0, 1, 2**31 - 1])
@pytest.mark.parametrize('salts', [(0,), (7,), (3, 9)])
def test_keys_for_acting_are_those_of_jax_without_a_program(seed, salts):
  folded = functools.reduce(jax.random.fold_in, salts, keys_of(seed).act)
  expected = [jax.random.fold_in(folded, i) for i in (0, 1, 5)]
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
      lambda event, duration, **kwargs: compiled.append(event) if 'compile' in event else None)
  try:
    with warnings.catch_warnings(action='error'):  # such as of an overflow
      keys = keys_for_acting(seed, salts, (0, 1, 5))
  finally:
    jax.monitoring.clear_event_listeners()
  assert not compiled
  assert [key.dtype for key in keys] == [key.dtype for key in expected]
  assert [key.shape for key in keys] == [()] * 3
  for key, other in zip(keys, expected, strict=True):
    assert (jax.random.key_data(key) == jax.random.key_data(other)).all()
