"""PPO (1707.06347): advantages of one sequence, and the clipped loss of rows."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import rlax

from podracer_jit.agents.policies import Policy


def gae(
    value: jax.Array,
    r_t: jax.Array,
    discount_t: jax.Array,
    done: jax.Array,
    gae_lambda: float,
) -> jax.Array:
  """Generalised advantage estimates (1506.02438, equation 16) of one sequence, [T].

  Args:
    value: [T + 1], V(obs[t]); the last row is bootstrapped from.
    r_t: [T], rewards that came back with obs[1:].
    discount_t: [T], gamma, or zero after a termination.
    done: [T] bool, the episode ended (terminated or truncated) with this row, so that the next one
      is invalid and no trace may run through it.
    gae_lambda: the exponential weight.
  """
  chex.assert_equal_shape([r_t, discount_t, done, value[1:]])
  lambda_t = gae_lambda * (1.0 - done.astype(jnp.float32))
  return rlax.truncated_generalized_advantage_estimation(r_t, discount_t, lambda_t, value)


def vtrace(
    value: jax.Array,
    r_t: jax.Array,
    discount_t: jax.Array,
    rho: jax.Array,
    trace_lambda: float,
) -> tuple[jax.Array, jax.Array]:
  """Advantages and value targets by V-trace (1802.01561, section 4.1) of one sequence, each [T].

  Args:
    value: [T + 1], V(obs[t]); the last row is bootstrapped from.
    r_t: [T], rewards that came back with obs[1:].
    discount_t: [T], gamma, or zero after a termination.
    rho: [T], the importance weight of the policy that is trained; zero on invalid rows.
    trace_lambda: the mixing parameter of remark 2.
  """
  chex.assert_equal_shape([r_t, discount_t, rho, value[1:]])
  made = rlax.vtrace_td_error_and_advantage(value[:-1], value[1:], r_t, discount_t, rho,
                                            trace_lambda)
  # The importance weight is PPO's own ratio, so it is not in the advantage a second time.
  return made.q_estimate - value[:-1], made.errors + value[:-1]


def ppo_loss(
    dist: jax.Array,
    value: jax.Array,
    action: jax.Array,
    behaviour_log_prob: jax.Array,
    behaviour_value: jax.Array,
    advantage: jax.Array,
    value_target: jax.Array,
    valid: jax.Array,
    policy: Policy,
    *,
    clip: float = 0.1,
    clip_value: bool = False,
    value_coef: float = 0.5,
    entropy_coef: float = 0.01,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The sum of the loss over the valid of N rows (divide by their number for PPO's mean).

  Args:
    dist: [N, K] of the policy that is trained, as the `policy` reads it.
    value: [N] of the critic that is trained.
    action: [N, ...].
    behaviour_log_prob: [N], log of the acting policy's probability.
    behaviour_value: [N], the acting network's value, what clip_value clips around.
    advantage: [N], normalised where that is wanted.
    value_target: [N].
    valid: [N] bool.
    policy: the family of distributions.
    clip: epsilon of equation 7.
    clip_value: clip the value's change too, as openai/baselines does.
    value_coef: c1 of equation 9; the squared error is halved.
    entropy_coef: c2 of equation 9.

  Returns:
    The scalar loss, and sums over valid rows: policy_loss, value_loss, entropy, approx_kl
    (Schulman's k3 estimate), clip_fraction.

  Raises:
    AssertionError: where the shapes are not as above (chex).
  """
  chex.assert_shape(dist, (len(value), policy.dist_size))
  chex.assert_shape(action, (len(value), *policy.action_shape))
  chex.assert_equal_shape(
      [value, behaviour_log_prob, behaviour_value, advantage, value_target, valid])
  mask = valid.astype(jnp.float32)
  log_ratio = policy.log_prob(dist, action) - behaviour_log_prob
  ratio = jnp.exp(log_ratio)
  surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
  error = jnp.square(value - value_target)
  if clip_value:
    near = behaviour_value + jnp.clip(value - behaviour_value, -clip, clip)
    error = jnp.maximum(error, jnp.square(near - value_target))
  terms = {
      'policy_loss': -jnp.sum(mask * surrogate),
      'value_loss': 0.5 * jnp.sum(mask * error),
      'entropy': jnp.sum(mask * policy.entropy(dist)),
      'approx_kl': jnp.sum(mask * (ratio - 1.0 - log_ratio)),
      'clip_fraction': jnp.sum(mask * (jnp.abs(ratio - 1.0) > clip))}
  loss = (terms['policy_loss'] + value_coef * terms['value_loss']
          - entropy_coef * terms['entropy'])
  return loss, terms
