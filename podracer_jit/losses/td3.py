"""TD3 (1802.09477): twin delayed deterministic policy gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from podracer_jit.agents import networks, optimizers
from podracer_jit.losses.algorithm import Acted, Aux, Batch
from podracer_jit.losses.off_policy import OffPolicyActorCritic
from podracer_jit.options import INT32_MAX, option
from podracer_jit.types import Carry, Params, TrainState


class Actor(nn.Module):
  """Actions [N, A], from -1 to 1, for observations [N, ...]."""

  torso: nn.Module
  size: int  # A

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    """Returns the actions."""
    return jnp.tanh(nn.Dense(self.size)(networks.features_of(self.torso, obs)))


@dataclasses.dataclass(frozen=True)
class TD3(OffPolicyActorCritic):
  """Twin delayed DDPG for continuous actions and observations without images (algorithm 1).

  | option | the paper's value | section |
  |---|---|---|
  | `num_critics` | 2; the actor follows the first one | 4.2 |
  | `policy_delay` | 2 | 5.2, 6.1 |
  | `target_noise`, `target_noise_clip` | 0.2, 0.5 | 5.3, 6.1 |
  | `noise` | 0.1 | 6.1 |
  | `tau` | 0.005 | 6.1 |
  | `replay.min_size`, uniform actions | 10,000 on HalfCheetah and Ant, or 1,000 | 6.1 |
  | `replay.batch_size` | 100 | 6.1 |
  | `optimizer.learning_rate` (Adam) | 0.001 | 6.1 |
  | `network.hidden` (ReLU) | 400, 300 | 6.1 |

  Gradient steps are counted as with `SAC`: `replay.gradient_steps` in each update, whatever its
  rollout holds. A truncated episode is bootstrapped from its last observation.

  There are four differences from the paper. The target's action is clipped to the bounds, as in
  the authors' program; the paper clips the noise only. Both gradients are taken at the same
  parameters; the paper's actor follows the critic after its step. The critics' loss is half of the
  squared error. Returns may have several steps (`n_step`).
  """

  actor = Actor

  policy_delay: int = option(2, 'steps of the critics for one of the actor and of all targets',
                             at_least=1, at_most=INT32_MAX)
  target_noise: float = option(0.2, "deviation of the noise on the target policy's actions, which "
                               'are from -1 to 1', at_least=0)
  target_noise_clip: float = option(0.5, 'bound of that noise', at_least=0)
  noise: float = option(0.1, 'deviation of the noise of exploration, of actions from -1 to 1',
                        at_least=0)

  def init_target(self, params: Params) -> Params:
    """Returns the target actor and the target critics."""
    return params

  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns the config's optimizer for each part; each is clipped by itself."""
    own = self.parts.optimizer.transformation()
    return optimizers.by_part(actor=own, critic=own)

  def exploration(self, num_envs: int) -> np.ndarray:
    """Returns the standard deviation of each environment's noise, [num_envs] f32."""
    return self.noise * np.ones(num_envs, np.float32)

  def act(self, params: Any, obs: jax.Array, carry: Carry, valid: jax.Array,
          key: jax.Array | None, exploration: jax.Array | None) -> Acted:
    """Acts with noise, uniformly in the first steps, and with neither in evaluations.

    Args:
      params: the result of `acting`.
      obs: [B, ...].
      carry: None.
      valid: [B] bool; not read.
      key: PRNG key of the row; None: take the most likely action.
      exploration: [B] f32, the deviations of the noise; None in evaluations.
    """
    del valid
    mode = self.network.apply(params['actor'], obs)
    action = mode
    if exploration is not None:
      noisy = self.parts.policy.explore(key, mode, exploration)
      action = self.uniform_at_first(params, key, noisy)
    return Acted(action, None, carry, mode)

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns the critics' loss, and sums of terms.

    Args:
      params: of actor and critics, to differentiate; only the critics count.
      state: its target has the target actor and critics.
      batch: N transitions of the replay, and their importance weights [N].
      key: PRNG key of the noise on the target policy's actions.
    """
    transition = batch.items
    target = state.target.params

    # XLA vectorises over the last axis, so there is one only.
    noise = jax.random.normal(key, (transition.action.size,)).reshape(transition.action.shape)
    noise = jnp.clip(self.target_noise * noise, -self.target_noise_clip, self.target_noise_clip)
    next_action = self.network.apply(target['actor'], transition.next_obs) + noise
    next_q = jnp.min(self.q(target['critic'], transition.next_obs,
                            jnp.clip(next_action, -1.0, 1.0)), axis=0)
    value = transition.reward + transition.discount * next_q
    q = self.q(params['critic'], transition.obs, transition.action)
    error = q - value
    loss = 0.5 * jnp.sum(jnp.square(error), axis=0)

    aux = Aux.of({'critic_loss': loss, 'q': q[0]}, jnp.ones(loss.shape, bool))
    return (jnp.sum(batch.weight * loss) / batch.count,
            aux._replace(priority=jnp.max(jnp.abs(error), axis=0)))

  def gradient(self, state: TrainState, batch: Batch, key: jax.Array) -> tuple[Params, Aux]:
    """Returns the gradient of `loss`; if a step of the actor is due, with that of its own loss."""
    grads, aux = super().gradient(state, batch, key)
    first_critic = state.params['critic'][0]

    def actor_loss(actor):
      action = self.network.apply(actor, batch.items.obs)
      q = self.critic.apply(first_critic, batch.items.obs, action)
      return -jnp.sum(batch.weight * q) / batch.count

    # A step of the critics alone skips the actor. `jax.grad` is within the branch: with the result
    # of `jax.vjp` outside of it, both branches would return all intermediate values.
    slopes = jax.lax.cond(self.is_due(state), jax.grad(actor_loss),
                          functools.partial(jax.tree.map, jnp.zeros_like), state.params['actor'])
    # `loss` of a subclass may have terms of the actor, too.
    return grads | {'actor': jax.tree.map(jnp.add, grads['actor'], slopes)}, aux

  def is_due(self, state: TrainState) -> jax.Array:
    """Returns whether the next step is one of the actor and the targets, too, [] bool."""
    # The count of the targets is the only clock: a run that begins with another run's optimizer
    # would have two clocks if the optimizer counted too.
    return (state.target.gradient_steps + 1) % self.policy_delay == 0

  def update(self, state: TrainState, grads: Params, aux: Aux) -> TrainState:
    """Takes a step of the critics; at every `policy_delay`-th step also of actor and targets."""
    after = super().update(state, grads, aux)
    is_due = self.is_due(state)
    if_due = functools.partial(jax.tree.map, lambda new, old: jnp.where(is_due, new, old))

    params = after.params | {'actor': if_due(after.params['actor'], state.params['actor'])}
    of_part = after.opt_state.inner_states
    moments = if_due(of_part['actor'], state.opt_state.inner_states['actor'])
    targets = optax.incremental_update(params, state.target.params, self.tau)
    after = after._replace(
        params=params,
        opt_state=after.opt_state._replace(inner_states=of_part | {'actor': moments}))
    return after.with_target(if_due(targets, state.target.params))
