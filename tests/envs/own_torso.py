"""A torso that asks for the layout of a task's observations; see `networks.fit_to_task`."""

from collections.abc import Sequence

import flax.linen as nn

from podracer_jit.envs.protocol import ObsPart
from podracer_jit.options import internal


class Asks(nn.Module):
  """Torso with the two fields that `fit_to_task` sets."""

  channels_last: bool = internal(False)
  parts: Sequence[ObsPart] = internal(())
