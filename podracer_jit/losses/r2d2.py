"""R2D2 (Kapturowski et al. 2019): Q-learning on sequences of a replay, with a recurrent network.

"Recurrent Experience Replay in Distributed Reinforcement Learning", ICLR 2019. Its settings
(section 2.3 and appendix, table 2) and the fields that have them; those with a star are defaults:

| setting | value | field |
|---|---|---|
| discount | 0.997 | `loss.discount` * |
| steps of a return | 5 | `loss.n_step` * |
| burn-in and learned rows of a sequence | 40 and 80 | `loss.burn_in`, `loss.trace_length` * |
| rows from a sequence to the next | 40 | `unroll_length` times `loss.period` |
| copies to the target network | 2,500 gradient steps | `loss.target_every` * |
| share of the largest error in a priority | 0.9 | `loss.eta` * |
| exploration | 0.4^(1 + 7 i / (N - 1)) | `loss.epsilon`, `loss.epsilon_alpha` * |
| priority exponent | 0.9 | `replay.priority_exponent` |
| importance exponent | 0.6 | `replay.importance_exponent` |
| sequences in the replay, in a batch | 100,000, 64 | `replay.capacity`, `replay.batch_size` |
| Adam | 1e-4, epsilon 1e-3 | `optimizer.learning_rate`, `optimizer.eps` |
| environments | 256 | `env.num_envs` |
| LSTM | 512 | `network.core`, `network.core_size` |
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import rlax
from jax import lax

from podracer_jit.agents import q_networks
from podracer_jit.envs import frames
from podracer_jit.losses import returns
from podracer_jit.losses.algorithm import MAX_N_STEP, Acted, Aux, Batch
from podracer_jit.losses.dqn import DQN
from podracer_jit.losses.items import Items, sequences
from podracer_jit.options import option
from podracer_jit.types import Carry, Params, Rollout, TrainState

MAX_ROWS = 10_000


@dataclasses.dataclass(frozen=True)
class R2D2(DQN):
  """Double Q-learning with a recurrent dueling network, for discrete actions.

  A sequence begins with the recurrent state that the actor had there, and `burn_in` rows that only
  bring this state up to date. The next `trace_length` rows are learned from; n_step - 1 further
  rows complete their returns. Unlike in the paper, episodes may end within a sequence: the state
  begins anew there, and the row of the reset is masked. The network does not get the last action
  and reward. The loss of a sequence is a mean over `trace_length` rows; the paper does not say.
  """

  takes: ClassVar[frozenset[str]] = frozenset({'core'})
  normalises: ClassVar[frozenset[str]] = frozenset()

  discount: float = option(0.997, 'discount of future rewards', at_least=0, at_most=1)
  n_step: int = option(5, 'steps of a return before it is bootstrapped', at_least=1,
                       at_most=MAX_N_STEP)
  burn_in: int = option(40, 'first rows of a sequence, for the recurrent state only', at_least=0,
                        at_most=MAX_ROWS)
  trace_length: int = option(80, 'rows of a sequence that are learned from', at_least=1,
                             at_most=MAX_ROWS)
  period: int = option(1, 'rollouts from the beginning of a sequence to that of the next',
                       at_least=1, at_most=MAX_ROWS)
  eta: float = option(0.9, 'share of the largest TD error in the priority of a sequence; the mean '
                      'has the rest', at_least=0, at_most=1)

  def make_network(self) -> q_networks.Dueling:
    """Returns the dueling network around the config's torso and core."""
    p = self.parts
    return q_networks.dueling(p.torso, p.policy, p.torso_options, p.moments)

  def act(self, params: Any, obs: jax.Array, carry: Carry, valid: jax.Array,
          key: jax.Array | None, exploration: jax.Array | None) -> Acted:
    """Acts epsilon-greedily, or greedily without `exploration`.

    Args:
      params: of the network.
      obs: [B, ...].
      carry: arrays [B, ...] of the core.
      valid: [B] bool; False: obs is the last of an episode, and the carry begins anew.
      key: PRNG key of the row; None: take the best action.
      exploration: [B] f32, the probabilities of a random action; None: none is.
    """
    q, value, carry = self.network.apply(params, obs[None], carry, valid[None])
    return self.acted(q[0], value[0], key, exploration)._replace(carry=carry)

  def items(self) -> Items:
    """Returns sequences, which overlap if `unroll_length` times `period` is less than a length."""
    return sequences(self.burn_in + self.trace_length + self.n_step - 1,
                     self.period * self.parts.unroll_length)

  def _learned(self, rows: Rollout) -> jax.Array:
    """Returns the mask of the rows that are learned from, [trace_length, N]."""
    return rows.valid[self.burn_in:self.burn_in + self.trace_length]

  def _targets(self, rows: Rollout, value: jax.Array) -> jax.Array:
    """Returns the rescaled n-step targets of the rows that are learned from, [trace_length, N].

    Args:
      rows: [L, N].
      value: [L - burn_in + 1, N], rescaled values to bootstrap from, of the rows after the burn-in
        and the one after the last.
    """
    # The pair is read here, since rlax takes half a second to load.
    h = rlax.SIGNED_HYPERBOLIC_PAIR
    reward, discount, steps = returns.n_step_returns(
        *(x[self.burn_in:] for x in (rows.reward, rows.terminated, rows.truncated)), self.n_step,
        self.discount)
    row = jnp.arange(len(steps))[:, None]
    return h.apply(reward + discount * h.apply_inv(jnp.take_along_axis(value, row + steps, axis=0)))

  def _mixed(self, error: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the priorities [N] of sequences by their TD errors [trace_length, N].

    eta max |error| + (1 - eta) mean |error|, over valid rows.
    """
    error = jnp.where(valid, jnp.abs(error), 0.0)
    mean = jnp.sum(error, axis=0) / jnp.maximum(jnp.sum(valid.astype(jnp.float32), axis=0), 1.0)
    return self.eta * jnp.max(error, axis=0) + (1.0 - self.eta) * mean

  def priority(self, rows: Rollout) -> jax.Array:
    """Returns mixed |n-step TD errors| by the acting network's values; see `Algorithm.priority`."""
    value, q = (rows.extras[name][self.burn_in:] for name in ('value', 'action_value'))
    rows = rows._replace(extras=None)
    rows = jax.tree.map(lambda x: x[:-1], rows)
    target = self._targets(rows, value)
    return self._mixed(target - q[:self.trace_length], self._learned(rows))

  def q_values(self, params: Params, rows: Rollout) -> jax.Array:
    """Returns action values [L - burn_in + 1, N, A] of the rows after the burn-in.

    Args:
      params: of the network.
      rows: [L, N, ...], with L + 1 observations, and the carry before row 0.
    """
    obs = frames.stacks(rows.obs)
    # The last mask affects only a carry that is dropped; see `Algorithm.unroll`.
    valid = jnp.concatenate([rows.valid, rows.valid[-1:]])
    carry = jax.tree.map(lambda x: x[0], rows.carry)
    if self.burn_in and carry is not None:
      _, _, carry = self.network.apply(params, obs[:self.burn_in], carry, valid[:self.burn_in])
      carry = lax.stop_gradient(carry)
    return self.network.apply(params, obs[self.burn_in:], carry, valid[self.burn_in:])[0]

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns the weighted loss of the Q-network, sums of terms, and new priorities [N].

    Args:
      params: of the Q-network, to differentiate.
      state: its target has the target network.
      batch: N sequences [L, N, ...] of the replay, and their importance weights [N].
      key: not read.
    """
    del key
    rows = batch.items
    q = self.q_values(params, rows)
    # Double Q-learning: the network chooses the action, the target network says its value.
    best = jnp.argmax(q, axis=-1)
    value = q_networks.values_of(self.q_values(state.target.params, rows), best)
    target = lax.stop_gradient(self._targets(rows, value))

    learned = slice(self.burn_in, self.burn_in + self.trace_length)
    taken = q_networks.values_of(q[:self.trace_length], rows.action[learned])
    valid = self._learned(rows)
    error = jnp.where(valid, target - taken, 0.0)
    losses = 0.5 * batch.weight * jnp.square(error)  # [trace_length, N]
    aux = Aux.of(dict(q=taken, loss=losses, abs_td_error=jnp.abs(error),
                      importance_weight=jnp.broadcast_to(batch.weight, error.shape)), valid)
    priority = self._mixed(lax.stop_gradient(error), valid)
    return jnp.sum(losses) / (self.trace_length * batch.count), aux._replace(priority=priority)
