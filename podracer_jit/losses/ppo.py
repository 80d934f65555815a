"""PPO (1707.06347) on shuffled rows, or on shuffled environments of a recurrent network."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import rlax

from podracer_jit.agents import running_moments
from podracer_jit.agents.networks import Model
from podracer_jit.agents.policies import Policy
from podracer_jit.envs import frames
from podracer_jit.losses.algorithm import RolloutAlgorithm, unroll
from podracer_jit.losses.minibatches import ENVIRONMENTS, ROWS, Minibatch, Unit
from podracer_jit.options import option
from podracer_jit.types import Metrics, Params, Rollout, discounts


@dataclasses.dataclass(frozen=True)
class PPO(RolloutAlgorithm):
  """Proximal policy optimisation (1707.06347).

  Advantages are made once an update, from the acting network's values; what follows the last row
  is valued by the parameters that the update begins with. With `vtrace` they are V-trace's, all by
  those parameters, as NAPPO corrects late rollouts (2007.02622).
  """

  shuffles: ClassVar[bool] = True
  measures_kl: ClassVar[bool] = True
  normalises_values: ClassVar[bool] = True

  gae_lambda: float = option(0.95, 'exponential weight of advantages', at_least=0, at_most=1)
  clip: float = option(0.1, 'epsilon of the clipped surrogate (equation 7)', at_least=0)
  clip_value: bool = option(False, "the value's change is clipped too, as openai/baselines does")
  value_coef: float = option(0.5, 'weight of the value loss', at_least=0)
  entropy_coef: float = option(0.01, 'weight of the entropy bonus')
  normalise_advantage: bool = option(True, 'advantages of a minibatch get mean 0 and deviation 1')
  vtrace: bool = option(False, 'advantages and value targets are corrected by V-trace')

  def minibatch_unit(self, recurrent: bool) -> Unit:
    """Returns rows; of a recurrent network environments, whose rows have an order."""
    return ENVIRONMENTS if recurrent else ROWS

  def target_inputs(self, rollout: Rollout, recurrent: bool) -> Rollout:
    """Returns the whole rollout where all its rows are valued anew."""
    whole = recurrent or self.vtrace
    return rollout if whole else super().target_inputs(rollout, recurrent)

  def targets(self, model: Model, params: Params, rollout: Rollout) -> dict[str, jax.Array]:
    """Returns 'advantage' and 'value_target', [T, N] each."""
    make = self._targets_by_vtrace if self.vtrace else self._targets_by_gae
    return make(model, params, rollout)

  def _targets_by_gae(self, model, params, rollout):
    if model.recurrent:
      last_value = unroll(model, params, rollout)[1][-1]
    else:
      last_value = model.apply(params, frames.last(rollout.obs), (), rollout.valid[-1:])[1][0]
    value = jnp.concatenate([rollout.behaviour_value, last_value[None]])
    advantage = jax.vmap(lambda *a: gae(*a, self.gae_lambda), in_axes=1, out_axes=1)(
        value, rollout.reward, discounts(rollout, self.discount),
        rollout.terminated | rollout.truncated)
    return {'advantage': advantage, 'value_target': advantage + rollout.behaviour_value}

  def _targets_by_vtrace(self, model, params, rollout):
    dist, value = unroll(model, params, rollout)
    log_rho = model.policy.log_prob(dist[:-1], rollout.action) - rollout.behaviour_log_prob
    rho = jnp.where(rollout.valid, jnp.exp(log_rho), 0.0)
    advantage, value_target = jax.vmap(
        lambda *a: vtrace(*a, self.gae_lambda), in_axes=1, out_axes=1)(
            value, rollout.reward, discounts(rollout, self.discount), rho)
    return {'advantage': advantage, 'value_target': value_target}

  def batch_statistics(self, valid: jax.Array, targets: Any
                       ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the number of valid rows, and mean and deviation of their advantages."""
    count = jnp.maximum(jnp.sum(valid.astype(jnp.float32)), 1.0)
    if not self.normalise_advantage:
      return count, jnp.zeros(()), jnp.ones(())

    def mean_over_valid(x):
      return jnp.sum(jnp.where(valid, x, 0.0)) / count

    mean = mean_over_valid(targets['advantage'])
    variance = mean_over_valid(jnp.square(targets['advantage'] - mean))
    return count, mean, jnp.sqrt(variance) + 1e-8

  def loss(self, model: Model, params: Params, minibatch: Minibatch, statistics: Any
           ) -> tuple[jax.Array, Metrics]:
    """Returns the clipped loss, as a share of the minibatch's mean; see `RolloutAlgorithm.loss`."""
    rollout, targets = minibatch
    count, mean, std = statistics
    if model.recurrent:
      dist, value = (x[:-1] for x in unroll(model, params, rollout))
    else:
      dist, value, _ = model.apply(params, rollout.obs, (), rollout.valid)
    moments = running_moments.of(params)
    unit = 1.0 / running_moments.deviation(moments['values']) if 'values' in moments else 1.0
    rows = (dist, value * unit, rollout.action, rollout.behaviour_log_prob,
            rollout.behaviour_value * unit, (targets['advantage'] - mean) / std,
            targets['value_target'] * unit, rollout.valid)
    loss, terms = ppo_loss(
        *(x.reshape(-1, *x.shape[2:]) for x in rows), model.policy, clip=self.clip,
        clip_value=self.clip_value, value_coef=self.value_coef, entropy_coef=self.entropy_coef)
    terms['valid'] = jnp.sum(rollout.valid.astype(jnp.float32))
    return loss / count, terms


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
