"""Kinds of networks: how the network that an algorithm calls is built from the config's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn

from podracer_jit.agents import networks, policies, q_networks
from podracer_jit.agents.networks import POLICY_AND_CRITIC, TORSO, TorsoOptions
from podracer_jit.agents.policies import Policy


class Kind(NamedTuple):
  """A kind of network, which an algorithm asks for by `network_kind`."""

  role: str  # of the config's network that it is built from: TORSO or POLICY_AND_CRITIC
  # The network's output for the policy: policies.DISTRIBUTION, ACTION_VALUES or ACTION.
  policy_reads: str
  takes_torso_options: bool  # it can have a recurrent core and a separate critic torso
  # (the config's network, policy, torso options, names of its moments) -> the whole network
  build: Callable[[nn.Module, Policy, TorsoOptions, Sequence[str]], nn.Module]


def provides(part: type[nn.Module]) -> str:
  """Returns the role of the config's network: its attribute `provides`, or TORSO."""
  return getattr(part, 'provides', TORSO)


ACTOR_CRITIC = Kind(TORSO, policies.DISTRIBUTION, True, networks.actor_critic)
DUELING = Kind(TORSO, policies.ACTION_VALUES, False,
               lambda torso, policy, options, moments: q_networks.dueling(torso, policy))
DETERMINISTIC = Kind(POLICY_AND_CRITIC, policies.ACTION, False,
                     lambda pair, policy, options, moments: pair.clone(policy=policy))

NETWORKS = networks.TORSOS | q_networks.POLICY_AND_CRITIC
