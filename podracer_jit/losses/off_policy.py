"""Base class of off-policy actor-critics with several critics and a replay, such as SAC and TD3."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer_jit.agents import policies
from podracer_jit.agents.q_networks import Critic
from podracer_jit.losses.algorithm import MAX_N_STEP, Algorithm
from podracer_jit.losses.items import Items, transitions
from podracer_jit.numerics import counters
from podracer_jit.options import option
from podracer_jit.types import Params, TrainState


@dataclasses.dataclass(frozen=True)
class OffPolicyActorCritic(Algorithm):
  """Actor and critics that learn from a replay: continuous actions, observations without images.

  The network of the config is the torso of the actor and of each critic. A subclass defines
  `actor`, `act`, `loss` and the targets.
  """

  learns_from_replay: ClassVar[bool] = True
  policy_reads: ClassVar[str] = policies.ACTION  # stored actions are from -1 to 1
  takes: ClassVar[frozenset[str]] = frozenset()
  normalises: ClassVar[frozenset[str]] = frozenset()
  # The policy's network, made of a torso and the number of elements of an action.
  actor: ClassVar[type[nn.Module]]

  n_step: int = option(1, 'steps of a return before it is bootstrapped', at_least=1,
                       at_most=MAX_N_STEP)
  tau: float = option(0.005, 'share of the trained networks that their targets take in a step',
                      at_least=0, at_most=1)
  num_critics: int = option(2, 'critics; targets take the smallest of their values',
                            at_least=1, at_most=100)

  def make_network(self) -> nn.Module:
    """Returns the policy's network.

    Raises:
      ValueError: the torso is for images; critics have no use for it.
    """
    torso = self.parts.torso
    if any(getattr(torso, field, False) for field in ('needs_images', 'needs_parts')):
      raise ValueError(f'name: {type(torso).__name__} is for images, and critics read numbers '
                       'beside the action; mlp and simba take observations of any shape')
    return self.actor(torso, self.parts.policy.action_shape[0])

  @property
  def critic(self) -> Critic:
    """The network of one critic."""
    return Critic(self.parts.torso)

  def q(self, params: Params, obs: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the values of all critics, [num_critics, N].

    Args:
      params: a list, one of each critic.
      obs: [N, D].
      action: [N, A], from -1 to 1.
    """
    return jnp.stack([self.critic.apply(of_one, obs, action) for of_one in params])

  def init(self, key: jax.Array) -> Params:
    """Returns the actor, and a list of critics."""
    spec = self.parts.spec
    obs = jnp.zeros((1, *spec.obs_shape), spec.obs_dtype)
    action = jnp.zeros((1, *self.parts.policy.action_shape))
    keys = jax.random.split(key, 1 + self.num_critics)
    return {'actor': self.network.init(keys[0], obs),
            'critic': [self.critic.init(key, obs, action) for key in keys[1:]]}

  def acting(self, state: TrainState) -> dict[str, Any]:
    """Returns the actor, and the steps that end the random ones."""
    return {'actor': state.params['actor'], 'steps': state.steps}

  def uniform_at_first(self, params: Any, key: jax.Array, action: jax.Array) -> jax.Array:
    """Returns uniform actions in the first `replay.min_size` steps, later the given ones.

    Args:
      params: the result of `acting`.
      key: PRNG key.
      action: [B, A], from -1 to 1.
    """
    is_random = counters.as_float(params['steps']) < self.parts.min_size
    uniform = jax.random.uniform(key, action.shape, minval=-1.0, maxval=1.0)
    return jnp.where(is_random, uniform, action)

  def items(self) -> Items:
    """Returns transitions."""
    return transitions(self.n_step, self.discount)
