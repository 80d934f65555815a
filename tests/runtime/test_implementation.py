"""Which values channels keep alive."""

import gc
import weakref

import pytest

from podracer_jit.runtime.channels import DoubleBuffer, Versioned

pytestmark = pytest.mark.implementation


class Large:
  """A value that can be watched."""


@pytest.mark.parametrize('lag, kept', [(0, 1), (1, 2), (None, 0)])
def test_a_channel_keeps_its_last_lag_plus_1_values_and_no_other(lag, kept):
  """Parameters and rollouts are large, so a channel must not keep others alive."""
  channel = DoubleBuffer('values', 8, lag)
  values = [Large() for _ in range(4)]
  watched = [weakref.ref(value) for value in values]
  channel.prime(Versioned(values[0], 0))
  for _ in range(0 if lag is None else lag + 1):
    channel.get()
  for version in (1, 2, 3):
    channel.put(Versioned(values[version], version))
    channel.flush()
    channel.get()
  values.clear()
  gc.collect()
  assert [value() is not None for value in watched] == [i >= 4 - kept for i in range(4)]
