"""IMPALA's loss with V-trace (1802.01561, section 4), for one sequence."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import rlax

from podracer_jit.agents.policies import Policy


def impala_loss(
    dist: jax.Array,
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
  """The sum of the loss over one sequence's valid rows, as Cleanba and monobeast sum it.

  Args:
    dist: [T, K], the learner's policy on obs[:-1], as the `policy` reads it.
    value: [T + 1], the learner's baseline; the last row is bootstrapped from.
    action: [T, ...], what the behaviour policy did.
    behaviour_log_prob: [T], log mu(action).
    r_t: [T], rewards that came back with obs[1:].
    discount_t: [T], gamma, or zero after a termination.
    valid: [T] bool. An invalid row has importance weight zero, which ends the traces of the rows
      before it in V(obs) there: the true last observation of a truncated episode.
    policy: the family of distributions.
    vtrace_lambda: the mixing parameter of V-trace's remark 2.
    clip_rho: rho-bar of equation 1.
    clip_pg_rho: the clipping of the importance weight of the policy gradient.
    baseline_coef: weight of the squared V-trace error (which is halved).
    entropy_coef: weight of the entropy bonus.

  Returns:
    The scalar loss, and sums over valid rows: policy_loss, baseline_loss, entropy, rho.

  Raises:
    AssertionError: where the shapes are not as above (chex).
  """
  chex.assert_shape(dist, (len(r_t), policy.dist_size))
  chex.assert_shape(action, (len(r_t), *policy.action_shape))
  chex.assert_equal_shape([behaviour_log_prob, r_t, discount_t, valid, value[1:]])
  mask = valid.astype(jnp.float32)
  target_log_prob = policy.log_prob(dist, action)
  rho = mask * jnp.exp(jax.lax.stop_gradient(target_log_prob) - behaviour_log_prob)
  vtrace = rlax.vtrace_td_error_and_advantage(
      value[:-1], value[1:], r_t, discount_t, rho, vtrace_lambda, clip_rho, clip_pg_rho)
  # The errors carry the gradient of -V(obs[t]) alone, their targets are constants; the advantages
  # would carry one too.
  advantage = jax.lax.stop_gradient(vtrace.pg_advantage)
  terms = {
      'policy_loss': -jnp.sum(mask * target_log_prob * advantage),
      'baseline_loss': 0.5 * jnp.sum(mask * jnp.square(vtrace.errors)),
      'entropy': jnp.sum(mask * policy.entropy(dist)),
      'rho': jnp.sum(rho)}
  loss = (terms['policy_loss'] + baseline_coef * terms['baseline_loss']
          - entropy_coef * terms['entropy'])
  return loss, terms
