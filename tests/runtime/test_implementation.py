"""What channels keep inside."""

import pytest

from podracer_jit.runtime.channels import DoubleBuffer, Versioned

pytestmark = pytest.mark.implementation


def test_a_value_is_dropped_once_it_was_given():
  """Parameters and rollouts are large."""
  class Large:
    pass

  channel = DoubleBuffer('parameters', 3, lag=0)
  primed = Large()
  channel.prime(Versioned(primed, 0))
  channel.get()
  assert channel._primed is None and not channel._slots
