"""Networks of value-based agents (flax): Q-networks, a policy with a Q critic, and a critic alone.

All but the critic take observations [T, N, ...] and return what their policy reads, action values
or an action, and the value of the greedy action; Q-networks also the carry of their recurrent core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer_jit.agents import action_masks, networks
from podracer_jit.agents.networks import TorsoOptions
from podracer_jit.agents.policies import Policy
from podracer_jit.options import internal, option
from podracer_jit.types import Carry


def values_of(q: jax.Array, action: jax.Array) -> jax.Array:
  """Returns the values [...] of actions [...], from action values [..., A]."""
  return jnp.take_along_axis(q, action[..., None], axis=-1)[..., 0]


class ActionValues(nn.Module):
  """Q-network: a torso, an optional recurrent core, and a linear head."""

  torso: nn.Module
  policy: Policy
  moments: Sequence[str] = ()  # normalised quantities: 'obs', 'returns'
  core: str = ''  # one of networks.CORES; '' for none
  core_size: int = 0  # H, units of the core

  @nn.compact
  def __call__(self, obs: jax.Array, carry: Carry = None, valid: jax.Array | None = None,
               legal: jax.Array | None = None) -> tuple[jax.Array, jax.Array, Carry]:
    """Returns (Q-values [T, N, A], the largest of each [T, N], carry) of obs [T, N, ...].

    Args:
      obs: T rows of N environments.
      carry: of the core before the first row, shaped like `initial_carry`.
      valid: [T, N] bool, for a core; the row after an invalid one has the initial carry.
      legal: [T, N, A] bool, the actions of which the largest is taken; None: all.
    """
    rows = obs.shape[:2]
    obs, _ = networks.standardised(self, obs.reshape(-1, *obs.shape[2:]))
    x = networks.features_of(self.torso, obs)
    if self.core:
      chex.assert_shape(valid, rows)
      x, carry = networks.remember(self.core, self.core_size, x.reshape(*rows, -1), carry, valid)
    q = self.head(x, legal).reshape(*rows, -1)
    return q, jnp.max(action_masks.restrict(q, legal), axis=-1), carry

  def head(self, x: jax.Array, legal: jax.Array | None) -> jax.Array:
    """Returns Q-values [..., A] of features [..., F]; `__call__` makes its layers.

    Args:
      x: the features.
      legal: [T, N, A] bool, the legal actions; None: all.
    """
    del legal
    return nn.Dense(self.policy.dist_size, name='q')(x)

  def initial_carry(self, num_envs: int) -> Carry:
    """Returns the carry at an episode's start, arrays [N, H]; None without a core."""
    return networks.initial_carry(self.core, self.core_size, num_envs)


class Dueling(ActionValues):
  """Q-network with a value stream and an advantage stream as its head (1511.06581, equation 9).

  With an action mask, the mean of equation 9 is that of the legal actions (`action_masks`).
  """

  hidden: int = 0  # units of each stream; 0: as many as there are features

  def head(self, x: jax.Array, legal: jax.Array | None) -> jax.Array:
    """See `ActionValues`."""
    # The gradients of both streams add up below them, so they are scaled by 1 / sqrt(2)
    # (section 4.2).
    x = _scale_gradient(x, 2 ** -0.5)
    value, advantage = (
        nn.Dense(size, kernel_init=networks.orthogonal(1.0), name=name)(
            nn.relu(nn.Dense(self.hidden or x.shape[-1], name=f'{name}_hidden')(x)))
        for name, size in (('value', 1), ('advantage', self.policy.dist_size)))
    counted = None if legal is None else legal.reshape(advantage.shape)
    return value + (advantage - jnp.mean(advantage, axis=-1, keepdims=True, where=counted))


@jax.custom_vjp
def _scale_gradient(x: jax.Array, scale: float) -> jax.Array:
  """Returns x; the gradient is multiplied by `scale`."""
  return x


_scale_gradient.defvjp(lambda x, scale: (x, scale), lambda scale, g: (g * scale, None))


class Deterministic(nn.Module):
  """Deterministic policy with actions in [-1, 1], and its critic (1803.00933, appendix D).

  The paper leaves two choices open. Here the action joins the critic after its first layer, and
  tanh follows every hidden layer.
  """

  provides: ClassVar[str] = networks.POLICY_AND_CRITIC

  policy: Policy = internal(None)
  actor_hidden: Sequence[int] = option((300, 200), "units of the policy's layers", at_least=1,
                                       at_most=networks.MAX_UNITS, max_length=networks.MAX_LAYERS)
  critic_hidden: Sequence[int] = option((400, 300), "units of the critic's layers", at_least=1,
                                        at_most=networks.MAX_UNITS,
                                        max_length=networks.MAX_LAYERS, not_empty=True)

  def setup(self):
    """Creates the layers, which several methods share."""
    self._actor = [nn.Dense(size) for size in self.actor_hidden]

    # Output layers begin with weights uniform in [-3e-3, 3e-3].
    small = nn.initializers.uniform(3e-3)
    def centred(*args):
      return 2 * small(*args) - 3e-3

    self._action = nn.Dense(self.policy.action_shape[0], kernel_init=centred)
    self._critic = [nn.Dense(size) for size in self.critic_hidden]
    self._value = nn.Dense(1, kernel_init=centred)

  def __call__(self, obs: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
    """Returns actions [T, N, A] for obs [T, N, ...], and their values [T, N]."""
    action = self.act(obs.reshape(-1, *obs.shape[2:]))
    value = self.criticise(obs.reshape(-1, *obs.shape[2:]), action)
    return action.reshape(*obs.shape[:2], -1), value.reshape(obs.shape[:2])

  def act(self, obs: jax.Array) -> jax.Array:
    """Returns the policy's actions [N, A] for obs [N, ...]."""
    x = obs.reshape(len(obs), -1)
    for layer in self._actor:
      x = jnp.tanh(layer(x))
    return jnp.tanh(self._action(x))

  def criticise(self, obs: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the critic's values [N] of actions [N, A] for obs [N, ...]."""
    chex.assert_rank(action, 2)
    chex.assert_equal_shape_prefix([obs, action], 1)
    first_layer, *later_layers = self._critic
    # The action enters after the first layer, as in DDPG (1509.02971, section 7).
    features = jnp.tanh(first_layer(obs.reshape(len(obs), -1)))
    x = jnp.concatenate([features, action], axis=-1)
    for layer in later_layers:
      x = jnp.tanh(layer(x))
    return self._value(x)[:, 0]


class Critic(nn.Module):
  """Values [N] of flat observations [N, D] and actions [N, A]."""

  torso: nn.Module

  @nn.compact
  def __call__(self, obs: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the values."""
    x = jnp.concatenate([obs.reshape(len(obs), -1), action], axis=-1)
    return nn.Dense(1)(networks.features_of(self.torso, x))[:, 0]


def dueling(torso: nn.Module, policy: Policy, options: TorsoOptions = networks.PLAIN,
            moments: Sequence[str] = ()) -> Dueling:
  """Returns the dueling network around a torso, with a recurrent core before the streams.

  If the torso has `split_last_layer`, its last layer is replaced by the hidden layers of the two
  streams. Otherwise all its layers stay, and the streams have as many units as they get features.

  Args:
    torso: as the config says.
    policy: reads the action values.
    options: of the torso; the core counts.
    moments: normalised quantities, 'obs' or none.

  Raises:
    ValueError: the torso has no layer; the message begins with the field's name.
  """
  units = 0
  if hasattr(torso, 'split_last_layer'):
    torso, units = torso.split_last_layer()
  return Dueling(torso, policy, tuple(moments), options.core_name, options.core_size, units)


POLICY_AND_CRITIC = {'deterministic': Deterministic}
