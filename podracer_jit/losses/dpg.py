"""Ape-X DPG (1803.00933, section 3.2): deterministic policy gradients with n-step returns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax
from jax import lax

from podracer_jit.agents import networks, policies
from podracer_jit.losses import returns
from podracer_jit.losses.algorithm import MAX_N_STEP, Acted, Algorithm, Aux, Batch, weighted_loss
from podracer_jit.losses.items import Items, transitions
from podracer_jit.options import INT32_MAX, option
from podracer_jit.types import Carry, Params, Rollout, TrainState


@dataclasses.dataclass(frozen=True)
class DPG(Algorithm):
  """Deterministic policy gradients for continuous actions.

  Policy and critic have separate weights, so the gradient of the summed loss contains the gradient
  of each.

  | option | the paper's value | where |
  |---|---|---|
  | `separate_optimizers` | "the two networks are optimized separately" | section 3.2 |
  | `importance_weights` | of both losses, which are "on the sampled experience" | section 3.2 |
  | `replay.importance_exponent` | 0.4, "otherwise as per DQN" | section 4.1, appendix D |
  | `optimizer.max_grad_norm` | 40, "otherwise as per DQN" | appendices C and D |
  | `optimizer.learning_rate` (Adam), of both networks | 1e-4 | appendix D |
  | `dqda_clip`, `noise` | 1, 0.3 | appendix D |
  | `target_every` | 100 | appendix D |
  | `n_step` | 5 * | |

  * The paper gives the n of DQN alone, which is 3. Here it is 5, as in D4PG (1804.08617), the
  parallel paper that builds on Ape-X DPG. D4PG weights the critic's loss alone.
  """

  learns_from_replay: ClassVar[bool] = True
  policy_reads: ClassVar[str] = policies.ACTION
  network_role: ClassVar[str] = networks.POLICY_AND_CRITIC
  takes: ClassVar[frozenset[str]] = frozenset()
  normalises: ClassVar[frozenset[str]] = frozenset()

  n_step: int = option(5, 'steps of a return before it is bootstrapped', at_least=1,
                       at_most=MAX_N_STEP)
  target_every: int = option(100, 'gradient steps between copies to the target network',
                             at_least=1, at_most=INT32_MAX)
  noise: float = option(0.3, 'deviation of the noise of exploration, of actions from -1 to 1',
                        at_least=0)
  dqda_clip: float = option(1.0, "bound of each element of the critic's gradient by the action",
                            at_least=0)
  critic_rate: float = option(1.0, "the critic's learning rate, relative to the optimizer's",
                              at_least=0)
  separate_optimizers: bool = option(
      True, 'policy and critic have an optimizer each, which clips its gradient by itself; False: '
      'one, which clips both together', earlier=False)
  importance_weights: str = option('both', 'the losses that importance weights multiply',
                                   choices=('both', 'critic'))

  def problems(self) -> Iterator[str]:
    """See `Algorithm.problems`."""
    if not self.separate_optimizers and self.critic_rate != 1.0:
      yield (f'critic_rate: with separate_optimizers = False both networks have one rate; must be '
             f'1.0, got {self.critic_rate}')

  def make_network(self) -> nn.Module:
    """Returns the config's policy with its critic."""
    return self.parts.torso.clone(policy=self.parts.policy)

  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns the config's optimizer for each network, or one for both."""
    own = self.parts.optimizer.transformation()
    if not self.separate_optimizers:
      return own
    return optax.partition(
        dict(actor=own, critic=optax.chain(own, optax.scale(self.critic_rate))), self.networks_of)

  def networks_of(self, params: Params) -> Any:
    """Returns the name of the network of each parameter, 'actor' or 'critic'.

    The actor has the parameters that the network's method `act` reads.

    Args:
      params: of both networks.

    Raises:
      ValueError: no parameter is the critic's alone.
    """
    spec = self.parts.spec
    obs = jax.ShapeDtypeStruct((1, *spec.obs_shape), spec.obs_dtype)
    of_actor = jax.eval_shape(functools.partial(self.network.init, method='act'),
                              jax.eval_shape(jax.random.key, 0), obs)
    paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(of_actor)}
    names = jax.tree_util.tree_map_with_path(
        lambda path, _: 'actor' if path in paths else 'critic', params)
    if 'critic' not in jax.tree.leaves(names):
      raise ValueError('loss.separate_optimizers: act of the network has all of its parameters, so '
                       "none is the critic's alone; must be False")
    return names

  def init_target(self, params: Params) -> Params:
    """Returns the target policy and critic."""
    return params

  def exploration(self, num_envs: int) -> np.ndarray:
    """Returns the standard deviation of each environment's noise, [num_envs] f32."""
    return (self.noise * np.ones(num_envs)).astype(np.float32)

  def act(self, params: Any, obs: jax.Array, carry: Carry, valid: jax.Array,
          key: jax.Array | None, exploration: jax.Array | None) -> Acted:
    """Acts with noise, and without in evaluations; see `Algorithm.act`.

    Args:
      params: of policy and critic.
      obs: [B, ...].
      carry: None.
      valid: [B] bool; not read.
      key: PRNG key of the row; None: take the most likely action.
      exploration: [B] f32, the deviations of the noise; None in evaluations.
    """
    del carry, valid
    policy_action, value = (x[0] for x in self.network.apply(params, obs[None]))
    policy = self.parts.policy
    action = (policy.mode(policy_action) if exploration is None
              else policy.explore(key, policy_action, exploration))
    action_value = self._q(params, obs, action)
    return Acted(action, {'action_value': action_value, 'value': value}, None, policy_action)

  def items(self) -> Items:
    """Returns transitions over n steps."""
    return transitions(self.n_step, self.discount)

  def priority(self, rows: Rollout) -> jax.Array:
    """Returns |n-step TD error| by the acting network's values; see `Algorithm.priority`."""
    return returns.n_step_priority(rows, self.discount)

  def _q(self, params, obs, action):
    """Returns the critic's values [N]."""
    return self.network.apply(params, obs, action, method='criticise')

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns the weighted losses of critic and policy; see `Algorithm.loss`.

    The TD errors are the critic's.

    Args:
      params: of policy and critic.
      state: with the target networks.
      batch: of n-step transitions, with importance weights.
      key: not read.
    """
    del key
    transition = batch.items
    error = jax.vmap(critic_td_error)(
        self._q(params, transition.obs, transition.action), transition.reward, transition.discount,
        self.network.apply(state.target.params, transition.next_obs[None])[1][0])

    # The policy's loss must not change the critic, so its gradient stops at the critic's weights.
    action = self.network.apply(params, transition.obs, method='act')
    critic_params = lax.stop_gradient(params)
    value, vjp = jax.vjp(lambda a: self._q(critic_params, transition.obs, a),
                         lax.stop_gradient(action))
    (dqda,) = vjp(jnp.ones_like(value))
    actor_loss = jax.vmap(lambda a, dqda: policy_loss(a, dqda, self.dqda_clip))(action, dqda)

    critic_loss, aux = weighted_loss(error, batch, dict(q=value))
    if self.importance_weights == 'both':
      actor_loss = batch.weight * actor_loss
    return critic_loss + jnp.sum(actor_loss) / batch.count, aux

  def update(self, state: TrainState, grads: Params, aux: Aux) -> TrainState:
    """Takes a step, and copies the networks to their targets in time."""
    state = super().update(state, grads, aux)
    return state.with_target(optax.periodic_update(
        state.params, state.target.params, state.target.gradient_steps + 1, self.target_every))


def critic_td_error(q_tm1: jax.Array, r_t: jax.Array, discount_t: jax.Array, q_t: jax.Array
                    ) -> jax.Array:
  """Returns the critic's n-step TD error, r_t + discount_t * q_t - q_tm1.

  The gradient flows through q_tm1 only. The critic's loss is half the squared error.

  Args:
    q_tm1: [] f32, the critic's value of the transition's first observation and action.
    r_t: [] f32, the discounted sum of rewards of the n steps.
    discount_t: [] f32, gamma^n, or zero after a termination.
    q_t: [] f32, the target critic's value of the last observation and the target policy's action.

  Returns:
    The TD error [].

  Raises:
    AssertionError: the shapes differ from those above (chex).
  """
  chex.assert_type([q_tm1, r_t, discount_t, q_t], float)
  chex.assert_equal_shape([q_tm1, r_t, discount_t, q_t])
  return rlax.td_learning(q_tm1, r_t, discount_t, q_t)


def policy_loss(a_t: jax.Array, dqda_t: jax.Array, clip: float) -> jax.Array:
  """Returns the loss [] whose gradient by a_t is -dqda_t, clipped elementwise to [-clip, clip].

  `rlax.dpg_loss` clips the norm of dqda_t instead.

  Args:
    a_t: [A] f32, the policy's action.
    dqda_t: [A] f32, the gradient of the critic's value by the action at a_t.
    clip: bound of each element; 1 in appendix D of the paper.

  Raises:
    AssertionError: the shapes differ from those above (chex).
  """
  chex.assert_rank(a_t, 1)
  chex.assert_equal_shape([a_t, dqda_t])
  return -jnp.sum(jax.lax.stop_gradient(jnp.clip(dqda_t, -clip, clip)) * a_t)
