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

  There are three differences from the paper. Both gradients are taken at the same parameters; the
  paper's actor follows the critic after its step. The critics' loss is half of the squared error.
  Returns may have several steps (`n_step`).
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
    """Returns the losses of critics and actor, added, and sums of terms.

    Args:
      params: of actor and critics, to differentiate.
      state: its params equal `params` and have no gradient, so the loss of each part changes only
        that part; its target has the target actor and critics.
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
    error = self.q(params['critic'], transition.obs, transition.action) - value

    first_critic = state.params['critic'][0]

    def q_of(actor):
      action = self.network.apply(actor, transition.obs)
      return self.critic.apply(first_critic, transition.obs, action)

    def with_slopes(actor):
      q, back = jax.vjp(q_of, actor)
      return q, back(-batch.weight / batch.count)[0]

    def without_slopes(actor):
      return q_of(actor), jax.tree.map(jnp.zeros_like, actor)

    # A step of the critics alone needs no gradient of the actor, which takes a fifth of the time.
    # It is taken within the branch; else both branches would return all that it needs.
    actor = state.params['actor']
    q, slopes = jax.lax.cond(self.is_due(state), with_slopes, without_slopes, actor)
    # This is 0, and has the gradient of the actor's loss.
    of_actor = sum(jax.tree.leaves(jax.tree.map(
        lambda slope, new, old: jnp.vdot(slope, new - old), slopes, params['actor'], actor)))

    losses = {'critic_loss': 0.5 * jnp.sum(jnp.square(error), axis=0), 'actor_loss': -q}
    aux = Aux.of(losses | {'q': q}, jnp.ones(q.shape, bool))
    return (jnp.sum(batch.weight * sum(losses.values())) / batch.count + of_actor,
            aux._replace(priority=jnp.max(jnp.abs(error), axis=0)))

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
