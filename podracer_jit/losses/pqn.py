"""PQN (2407.04811): Q-learning on rollouts by lambda returns, without replay and target network."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.agents import policies, q_networks
from podracer_jit.losses.algorithm import Acted, Algorithm, Aux, Batch
from podracer_jit.losses.items import Items, environments, rows
from podracer_jit.options import option
from podracer_jit.types import Carry, Params, Rollout, TrainState, discounts


@dataclasses.dataclass(frozen=True)
class PQN(Algorithm):
  """Regression of Q to lambda returns, for discrete actions (algorithm 1).

  The returns are those of the parameters that begin an update. Layer normalisation of the torso
  takes the place of a target network. Unlike in the authors' program, a truncated episode is
  bootstrapped from its last observation. In schemes whose actors lag, nothing corrects for the
  older policy.

  The authors' program (mttga/purejaxql) has these settings for MinAtar, in
  config/alg/pqn_minatar.yaml:

  | option | value | setting |
  |---|---|---|
  | `env.num_envs`, `unroll_length` | 128, 32 | NUM_ENVS, NUM_STEPS |
  | `num_minibatches`, `num_epochs` | 32, 2 | NUM_MINIBATCHES, NUM_EPOCHS |
  | `trace_lambda`, `discount` | 0.65, 0.99 | LAMBDA, GAMMA |
  | `epsilon` | from 1 to 0.05 in the first tenth | EPS_START, EPS_FINISH, EPS_DECAY |
  | `optimizer` | RAdam, 5e-4, linearly to 0 | LR, LR_LINEAR_DECAY |
  | `optimizer.max_grad_norm` | 10 | MAX_GRAD_NORM |
  | `network` | 16 channels of 3 x 3, 128 units, `layer_norm` | NORM_TYPE, CNN in the code |
  """

  policy_reads: ClassVar[str] = policies.ACTION_VALUES
  takes: ClassVar[frozenset[str]] = frozenset({'core'})
  shuffles: ClassVar[bool] = True
  targets_read_all_obs: ClassVar[bool] = True

  trace_lambda: float = option(0.65, 'lambda, which mixes returns of all lengths', at_least=0,
                               at_most=1)
  epsilon: float = option(0.05, 'probability of a random action; linear:1:0.05:0.1 lets it fall',
                          at_least=0, at_most=1)

  def make_network(self) -> nn.Module:
    """Returns the Q-network around the config's torso."""
    p = self.parts
    return q_networks.ActionValues(p.torso, p.policy, tuple(p.moments), p.torso_options.core_name,
                                   p.torso_options.core_size)

  def exploration(self, num_envs: int) -> np.ndarray:
    """Returns the probability of a random action, [num_envs] f32."""
    return self.epsilon * np.ones(num_envs, np.float32)

  def act(self, params: Any, obs: jax.Array, carry: Carry, valid: jax.Array,
          key: jax.Array | None, exploration: jax.Array | None) -> Acted:
    """Acts epsilon-greedily, or greedily without `exploration`.

    Args:
      params: of the Q-network.
      obs: [B, ...].
      carry: arrays [B, ...] of a recurrent network; else None.
      valid: [B] bool; False: obs is the last of an episode, and the carry begins anew.
      key: PRNG key of the row; None: take the most likely action.
      exploration: [B] f32, the probabilities of a random action; None: none is.
    """
    q, _, carry = self.network.apply(params, obs[None], carry, valid[None])
    policy = self.parts.policy
    action = policy.mode(q[0]) if exploration is None else policy.explore(key, q[0], exploration)
    return Acted(action, None, carry, q[0])

  def items(self) -> Items:
    """Returns rows, or environments for a recurrent network."""
    return environments(self.parts.unroll_length) if self.recurrent else rows()

  def targets(self, state: TrainState, rollout: Rollout) -> jax.Array:
    """Returns the lambda returns [T, N]."""
    value = self.unroll(state.params, rollout)[1]
    return jax.vmap(lambda *a: lambda_returns(*a, self.trace_lambda), in_axes=1, out_axes=1)(
        value[1:], rollout.reward, discounts(rollout, self.discount),
        rollout.terminated | rollout.truncated)

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns half the mean squared distance to the returns, and sums of terms.

    Args:
      params: of the Q-network, to differentiate.
      state: not read.
      batch: rows [1, N, ...], or environments [T, N, ...] for a recurrent network; its targets are
        the lambda returns, [1, N] or [T, N].
      key: not read.
    """
    del state, key
    row = batch.items  # rows [1, N, ...] or environments [T, N, ...]
    if self.recurrent:
      q = self.unroll(params, row)[0][:-1]
    else:
      q = self.network.apply(params, row.obs)[0]
    taken = q_networks.values_of(q, row.action)
    error = jnp.where(row.valid, batch.targets - taken, 0.0)
    loss = 0.5 * jnp.square(error)
    terms = {'loss': loss, 'abs_td_error': jnp.abs(error), 'q': taken}
    return jnp.sum(loss) / batch.count, Aux.of(terms, row.valid)


def lambda_returns(value: jax.Array, r_t: jax.Array, discount_t: jax.Array, done: jax.Array,
                   trace_lambda: float) -> jax.Array:
  """Returns the lambda returns of one sequence (2407.04811, algorithm 1).

  G_t = r_t + discount_t ((1 - lambda_t) value_t + lambda_t G_{t+1}), where lambda_t is 0 if the
  episode ends, and G_T is the last value.

  Args:
    value: [T] f32, the largest action value of obs[1:].
    r_t: [T] f32, rewards that came back with obs[1:].
    discount_t: [T] f32, gamma, or zero after a termination.
    done: [T] bool, the episode ended with this row (terminated or truncated). The next row is
      invalid, so the trace is cut here.
    trace_lambda: the mixing parameter.

  Returns:
    The returns [T].

  Raises:
    AssertionError: the shapes differ from those above (chex).
  """
  chex.assert_rank(value, 1)
  chex.assert_equal_shape([value, r_t, discount_t, done])
  lambda_t = trace_lambda * (1.0 - done.astype(jnp.float32))

  # As `rlax.lambda_returns`, whose import takes 0.4 s; see `ppo.gae`.
  def step(later, xs):
    reward, discount, value, decay = xs
    total = reward + discount * ((1.0 - decay) * value + decay * later)
    return total, total

  return jax.lax.scan(step, value[-1], (r_t, discount_t, value, lambda_t), reverse=True)[1]
