"""What hand-offs keep inside."""

import pytest

from podracer_jit.runtime.channels import DoubleBuffer, Stamped

pytestmark = pytest.mark.implementation


def test_a_value_is_dropped_once_it_was_given():
  """Parameters and rollouts are large."""
  class Large:
    pass

  handoff = DoubleBuffer('parameters', 3, lag=0)
  primed = Large()
  handoff.prime(Stamped(primed, 0))
  handoff.get()
  assert handoff._primed is None and not handoff._slots
