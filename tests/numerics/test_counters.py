"""Counts of steps, compared with Python's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer_jit.numerics import counters

NARROW, WIDE = counters.zero(2**31 - 1), counters.zero(2**31)
NUMBERS = (0, 1, 2**30 - 1, 2**30, 2**31, 2**32 - 1, 2**32, 5_700_000_000, 2**53)


def test_a_count_is_wide_if_it_must_be():
  assert (NARROW.shape, NARROW.dtype) == ((), jnp.int32)
  assert (WIDE.shape, WIDE.dtype) == ((2,), jnp.uint32)


@pytest.mark.parametrize('number', NUMBERS)
def test_wide_counts_are_those_of_python(number):
  count = jnp.asarray(counters.of(number, WIDE))
  assert counters.fetch_int(count) == number
  for more in (0, 1, 2**30 - 1, 2**31 - 1):
    assert counters.fetch_int(jax.jit(counters.add)(count, jnp.int32(more))) == number + more
  assert jax.jit(counters.as_float)(count) == np.float32(number)
  for other in NUMBERS:
    is_less = jax.jit(counters.is_less)(count, jnp.asarray(counters.of(other, WIDE)))
    assert bool(is_less) == (number < other)


def test_narrow_counts_are_those_of_python():
  count = jax.jit(counters.add)(jnp.asarray(counters.of(2**30, NARROW)), jnp.int32(7))
  assert (count.dtype, counters.fetch_int(count)) == (jnp.int32, 2**30 + 7)
  assert counters.as_float(count) == np.float32(2**30 + 7)
  assert counters.is_less(count, jnp.int32(2**31 - 1)) and not counters.is_less(count, count)


def test_a_count_is_converted_for_other_total_steps():
  wide = counters.converted(jnp.int32(12345), WIDE)
  assert (wide.shape, counters.fetch_int(wide)) == ((2,), 12345)
  narrow = counters.converted(wide, NARROW)
  assert (narrow.shape, narrow.dtype, counters.fetch_int(narrow)) == ((), jnp.int32, 12345)
  assert counters.converted(wide, WIDE) is wide
