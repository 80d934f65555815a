"""Networks of value-based agents (flax): Q-values of choices, or of an action that they choose.

They are called as `networks.ActorCritic` is: dist is what their `Policy` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer_jit.agents import networks
from podracer_jit.agents.policies import Policy
from podracer_jit.options import internal, option


class Dueling(nn.Module):
  """A torso with a stream for the state's value and one for advantages (1511.06581, equation 9)."""

  torso: nn.Module
  policy: Policy
  hidden: int  # units of each stream; 0: as many as the torso has features
  core: str = ''

  @nn.compact
  def __call__(self, obs: jax.Array, core: Any = (), valid: jax.Array | None = None):
    """On T rows of N environments: (Q-values [T, N, A], the largest [T, N], core)."""
    del valid
    x = self.torso(obs.reshape(-1, *obs.shape[2:]))
    # Two gradients meet here (section 4.2).
    x = _scale_gradient(x, 2 ** -0.5)
    value, advantage = (
        nn.Dense(size, kernel_init=networks.orthogonal(1.0), name=name)(
            nn.relu(nn.Dense(self.hidden or x.shape[-1], name=f'{name}_hidden')(x)))
        for name, size in (('value', 1), ('advantage', self.policy.dist_size)))
    advantage = advantage - jnp.mean(advantage, axis=-1, keepdims=True)
    q = (value + advantage).reshape(*obs.shape[:2], -1)
    return q, jnp.max(q, axis=-1), core

  def action_value(self, obs: jax.Array, dist: jax.Array, action: jax.Array) -> jax.Array:
    """Q of actions [N], of which dist [N, A] has the values."""
    del obs
    return jnp.take_along_axis(dist, action[..., None], axis=-1)[..., 0]

  def initial_core(self, num_envs: int) -> tuple[()]:
    """It remembers nothing."""
    return ()


@jax.custom_vjp
def _scale_gradient(x: jax.Array, scale: float) -> jax.Array:
  return x


_scale_gradient.defvjp(lambda x, scale: (x, scale), lambda scale, g: (g * scale, None))


class Deterministic(nn.Module):
  """A policy that is an action in [-1, 1], and its critic (1803.00933, appendix D).

  The paper does not say where the action joins the critic (here after its first layer) nor what
  follows the second layers (here tanh, as after the first).
  """

  provides: ClassVar[str] = networks.POLICY_AND_CRITIC

  policy: Policy = internal(None)
  actor_hidden: Sequence[int] = option((300, 200), "units of the policy's layers", at_least=1,
                                       at_most=networks.MAX_UNITS, max_length=networks.MAX_LAYERS)
  critic_hidden: Sequence[int] = option((400, 300), "units of the critic's layers", at_least=1,
                                        at_most=networks.MAX_UNITS,
                                        max_length=networks.MAX_LAYERS, not_empty=True)
  core: str = internal('')

  def setup(self):
    """Makes the layers, which two methods share."""
    self._actor = [nn.Dense(size) for size in self.actor_hidden]
    small = nn.initializers.uniform(3e-3)
    def centred(*args):
      return 2 * small(*args) - 3e-3
    self._action = nn.Dense(self.policy.action_shape[0], kernel_init=centred)
    self._critic = [nn.Dense(size) for size in self.critic_hidden]
    self._value = nn.Dense(1, kernel_init=centred)

  def __call__(self, obs: jax.Array, core: Any = (), valid: jax.Array | None = None):
    """On T rows of N environments: (actions [T, N, A], their values [T, N], core)."""
    del valid
    action = self.act(obs.reshape(-1, *obs.shape[2:]))
    value = self.criticise(obs.reshape(-1, *obs.shape[2:]), action)
    return action.reshape(*obs.shape[:2], -1), value.reshape(obs.shape[:2]), core

  def act(self, obs: jax.Array) -> jax.Array:
    """The policy's action [N, A] on [N, ...]."""
    x = obs.reshape(len(obs), -1)
    for layer in self._actor:
      x = jnp.tanh(layer(x))
    return jnp.tanh(self._action(x))

  def criticise(self, obs: jax.Array, action: jax.Array) -> jax.Array:
    """The critic's value [N] of actions [N, A] on [N, ...]."""
    first, *rest = self._critic
    x = jnp.concatenate([jnp.tanh(first(obs.reshape(len(obs), -1))), action], axis=-1)
    for layer in rest:
      x = jnp.tanh(layer(x))
    return self._value(x)[:, 0]

  def action_value(self, obs: jax.Array, dist: jax.Array, action: jax.Array) -> jax.Array:
    """Q of actions [N, A], whatever the policy would do."""
    del dist
    return self.criticise(obs, action)

  def initial_core(self, num_envs: int) -> tuple[()]:
    """It remembers nothing."""
    return ()


def dueling(torso: nn.Module, policy: Policy) -> Dueling:
  """Returns the dueling network around a torso, whose last layer becomes that of the two streams.

  A torso says by `split_last_layer` which layer that is; of one that does not, all layers stay and
  the streams have as many units as it has features.

  Raises:
    ValueError: the torso has no layer, in a line that begins with the field.
  """
  if not hasattr(torso, 'split_last_layer'):
    return Dueling(torso, policy, 0)
  without, units = torso.split_last_layer()
  return Dueling(without, policy, units)


POLICY_AND_CRITIC = {'deterministic': Deterministic}
