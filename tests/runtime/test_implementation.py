"""Private state of channels."""

import pytest

from podracer_jit.runtime.channels import DoubleBuffer, Versioned

pytestmark = pytest.mark.implementation


def test_a_channel_drops_a_value_after_its_last_get():
  """Parameters and rollouts are large, so a channel must not keep them alive."""
  class Large:
    pass

  channel = DoubleBuffer('parameters', 3, lag=0)
  primed = Large()
  channel.prime(Versioned(primed, 0))
  channel.get()
  assert channel._primed is None and not channel._slots
