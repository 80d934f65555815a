"""IMPALA (1802.01561): V-trace actor-critic on whole sequences."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import rlax

from podracer_jit.agents.policies import Policy
from podracer_jit.losses.algorithm import Algorithm, Aux, Batch, Predictions
from podracer_jit.options import option
from podracer_jit.types import Params, TrainState, discounts


@dataclasses.dataclass(frozen=True)
class IMPALA(Algorithm):
  """V-trace actor-critic (1802.01561, section 4); `impala_loss` explains the options.

  The loss is the sum over a minibatch, as in the paper. Cleanba's learner devices each compute it
  of their own part, and average their gradients: `divisor` is their number there, which matters
  because gradients are clipped.
  """

  vtrace_lambda: float = option(1.0, "the mixing parameter of V-trace's remark 2", at_least=0,
                                at_most=1)
  clip_rho: float = option(1.0, 'bound of the importance weights of values', at_least=0)
  clip_pg_rho: float = option(1.0, 'bound of the importance weights of the policy gradient',
                              at_least=0)
  baseline_coef: float = option(0.5, 'weight of the value loss', at_least=0)
  entropy_coef: float = option(0.01, 'weight of the entropy bonus')
  divisor: int = option(1, "the loss is the minibatch's sum divided by this", at_least=1,
                       at_most=1_000_000)

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns the loss summed over sequences; see `Algorithm.loss`."""
    del state, key
    rollout = batch.items
    dist_params, value = self.unroll(params, rollout)
    per_sequence = jax.vmap(lambda *a: _loss_and_targets(
        *a, self.parts.policy, vtrace_lambda=self.vtrace_lambda, clip_rho=self.clip_rho,
        clip_pg_rho=self.clip_pg_rho, baseline_coef=self.baseline_coef,
        entropy_coef=self.entropy_coef), in_axes=1, out_axes=(0, 0, 1))
    loss, terms, value_target = per_sequence(
        dist_params[:-1], value, rollout.action, rollout.extras['log_prob'], rollout.reward,
        discounts(rollout, self.discount), rollout.valid)
    valid = jnp.sum(rollout.valid.astype(jnp.float32))
    predictions = Predictions.of(jax.lax.stop_gradient(value[:-1]), value_target, rollout.valid)
    total = jnp.sum(loss) if self.divisor == 1 else jnp.sum(loss) / self.divisor
    return total, Aux(jax.tree.map(jnp.sum, terms), valid, predictions=predictions)


def impala_loss(
    dist_params: jax.Array,
    value: jax.Array,
    action: jax.Array,
    behaviour_log_prob: jax.Array,
    r_t: jax.Array,
    discount_t: jax.Array,
    valid: jax.Array,
    policy: Policy,
    *,
    vtrace_lambda: float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
    baseline_coef: float = 0.5,
    entropy_coef: float = 0.01,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns the loss summed over one sequence's valid rows, as in Cleanba and monobeast.

  Args:
    dist_params: [T, K] f32, the learner's distribution parameters for obs[:-1].
    value: [T + 1] f32, the learner's baseline; the last row is used for bootstrapping only.
    action: [T, ...], the behaviour policy's actions.
    behaviour_log_prob: [T] f32, log mu(action) in nats.
    r_t: [T] f32, rewards that came back with obs[1:].
    discount_t: [T] f32, gamma, or zero after a termination.
    valid: [T] bool. An invalid row has importance weight zero, so the traces of earlier rows end
      there with V(obs), the value of the true last observation of a truncated episode.
    policy: the policy whose parameters `dist_params` holds.
    vtrace_lambda: the mixing parameter of V-trace's remark 2.
    clip_rho: rho-bar of equation 1.
    clip_pg_rho: bound of the importance weight of the policy gradient.
    baseline_coef: weight of half the squared V-trace error.
    entropy_coef: weight of the entropy bonus.

  Returns:
    The scalar loss, and sums over valid rows: policy_loss, baseline_loss, entropy, rho.

  Raises:
    AssertionError: the shapes differ from those above (chex).
  """
  return _loss_and_targets(
      dist_params, value, action, behaviour_log_prob, r_t, discount_t, valid, policy,
      vtrace_lambda=vtrace_lambda, clip_rho=clip_rho, clip_pg_rho=clip_pg_rho,
      baseline_coef=baseline_coef, entropy_coef=entropy_coef)[:2]


def _loss_and_targets(dist_params, value, action, behaviour_log_prob, r_t, discount_t, valid,
                      policy, *, vtrace_lambda, clip_rho, clip_pg_rho, baseline_coef, entropy_coef):
  """Returns the results of `impala_loss`, and the targets of the values, [T] f32."""
  chex.assert_type(valid, bool)
  chex.assert_shape(dist_params, (len(r_t), policy.dist_size))
  chex.assert_shape(action, (len(r_t), *policy.action_shape))
  chex.assert_equal_shape([behaviour_log_prob, r_t, discount_t, valid, value[1:]])

  mask = valid.astype(jnp.float32)
  target_log_prob = policy.log_prob(dist_params, action)
  rho = mask * jnp.exp(jax.lax.stop_gradient(target_log_prob) - behaviour_log_prob)
  vtrace = rlax.vtrace_td_error_and_advantage(
      value[:-1], value[1:], r_t, discount_t, rho, vtrace_lambda, clip_rho, clip_pg_rho)
  # rlax stops the gradient of the targets in `errors`, but not of the values in `pg_advantage`.
  advantage = jax.lax.stop_gradient(vtrace.pg_advantage)

  loss_terms = {
      'policy_loss': -jnp.sum(mask * target_log_prob * advantage),
      'baseline_loss': 0.5 * jnp.sum(mask * jnp.square(vtrace.errors)),
      'entropy': jnp.sum(mask * policy.entropy(dist_params)),
      'rho': jnp.sum(rho)}
  loss = (loss_terms['policy_loss'] + baseline_coef * loss_terms['baseline_loss']
          - entropy_coef * loss_terms['entropy'])
  return loss, loss_terms, jax.lax.stop_gradient(vtrace.errors + value[:-1])
