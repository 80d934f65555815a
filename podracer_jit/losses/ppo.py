"""PPO (1707.06347) on shuffled rows, or on shuffled environments with a recurrent network."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import rlax

from podracer_jit import schedules
from podracer_jit.agents import running_moments
from podracer_jit.agents.policies import Policy
from podracer_jit.envs import frames
from podracer_jit.losses.algorithm import Algorithm, Aux, Batch, Predictions
from podracer_jit.losses.items import Items, environments, rows
from podracer_jit.options import option
from podracer_jit.types import Params, Rollout, TrainState, discounts


@dataclasses.dataclass(frozen=True)
class PPO(Algorithm):
  """Proximal policy optimisation (1707.06347).

  Advantages are computed once in an update, by GAE from the acting network's values; the value
  after the last row comes from the parameters at the beginning of the update. With `vtrace` they
  are V-trace advantages, and all values come from those parameters, as NAPPO corrects late rollouts
  (2007.02622). Its authors' program does more, with `vtrace_variant` = nappo: the ratio is to these
  parameters instead of those that acted, the advantage is weighted by the clipped importance
  weight, lambda is 1, and advantages are normalised over each group's rollout, not the minibatch.
  """

  normalises: ClassVar[frozenset[str]] = frozenset({'obs', 'returns', 'values'})
  shuffles: ClassVar[bool] = True
  measures_kl: ClassVar[bool] = True

  gae_lambda: float = option(0.95, 'exponential weight of advantages', at_least=0, at_most=1)
  clip: float = option(0.1, 'epsilon of the clipped surrogate (equation 7)', at_least=0)
  clip_smoothly: bool = option(False, 'the ratio is bounded by a sigmoid, as rl_games does')
  clip_value: bool = option(False, "the value's change is clipped too, as openai/baselines does")
  value_coef: float = option(0.5, 'weight of the value loss', at_least=0)
  entropy_coef: float = option(0.01, 'weight of the entropy bonus')
  normalise_advantage: bool = option(True, 'advantages of a minibatch get mean 0 and deviation 1')
  reward_scale: float = option(1.0, 'rewards are multiplied by this', above=0, constant=True)
  vtrace: bool = option(False, 'advantages and value targets are corrected by V-trace')
  vtrace_variant: str = option('impala', "impala: V-trace as its paper has it; nappo: as NAPPO's "
                               'authors use it', choices=('impala', 'nappo'))

  def problems(self) -> Iterator[str]:
    """Yields problems of the combination of options, one line each."""
    if self.vtrace_variant != 'impala' and not self.vtrace:
      yield (f'vtrace_variant: without loss.vtrace it must be impala, got {self.vtrace_variant}; '
             'or set loss.vtrace = True')
    clips = self.clip.values if isinstance(self.clip, schedules.Schedule) else (self.clip,)
    if self.clip_smoothly and min(clips) == 0:
      yield 'clip: with loss.clip_smoothly it must be above 0, got 0'

  @property
  def targets_read_all_obs(self) -> bool:
    """Whether `targets` computes the values of all rows."""
    return self.vtrace or self.recurrent

  def items(self) -> Items:
    """Returns rows, or environments for a recurrent network."""
    return environments(self.parts.unroll_length) if self.recurrent else rows()

  def note_about_minibatches(self, rows: int) -> str:
    """Returns a phrase if a minibatch has one row, whose advantage cannot be normalised."""
    return ('its only advantage is not normalised (loss.normalise_advantage), since it would be 0'
            if self.normalise_advantage and rows < 2 else '')

  def targets(self, state: TrainState, rollout: Rollout) -> dict[str, jax.Array]:
    """Returns 'advantage' and 'value_target', [T, N] each."""
    compute = self._targets_by_vtrace if self.vtrace else self._targets_by_gae
    if self.reward_scale != 1:
      rollout = rollout._replace(reward=rollout.reward * self.reward_scale)
    return compute(state.params, rollout)

  def _targets_by_gae(self, params, rollout):
    """Returns GAE targets from the acting network's values."""
    if self.recurrent:
      last_value = self.unroll(params, rollout)[1][-1]
    else:
      last_obs = frames.last(rollout.obs)
      last_value = self.network.apply(params, last_obs, None, rollout.valid[-1:])[1][0]
    behaviour_value = rollout.extras['value']
    value = jnp.concatenate([behaviour_value, last_value[None]])
    advantage = jax.vmap(lambda *a: gae(*a, self.gae_lambda), in_axes=1, out_axes=1)(
        value, rollout.reward, discounts(rollout, self.discount),
        rollout.terminated | rollout.truncated)
    return {'advantage': advantage, 'value_target': advantage + behaviour_value}

  def _targets_by_vtrace(self, params, rollout):
    """Returns V-trace targets from the values and probabilities of `params`."""
    dist_params, value = self.unroll(params, rollout)
    log_rho = (self.parts.policy.log_prob(dist_params[:-1], rollout.action)
               - rollout.extras['log_prob'])
    rho = jnp.where(rollout.valid, jnp.exp(log_rho), 0.0)
    trace_lambda = 1.0 if self._as_nappo else self.gae_lambda
    advantage, value_target = jax.vmap(
        lambda *a: vtrace(*a, trace_lambda), in_axes=1, out_axes=1)(
            value, rollout.reward, discounts(rollout, self.discount), rho)
    targets = {'advantage': advantage, 'value_target': value_target}
    if self._as_nappo:
      weighted = jnp.minimum(rho, 1.0) * advantage
      if self.normalise_advantage:
        mean, deviation = _mean_and_deviation(weighted, rollout.valid)
        weighted = (weighted - mean) / deviation
      targets |= {'advantage': weighted, 'log_prob': log_rho + rollout.extras['log_prob']}
    return targets

  @property
  def _as_nappo(self) -> bool:
    return self.vtrace and self.vtrace_variant == 'nappo'

  def statistics(self, state: TrainState, valid: jax.Array, targets: Any
                 ) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and deviation of the advantages of valid rows.

    They are 0 and 1 if advantages are not normalised. The advantage of a minibatch of one row would
    be 0, so it is not normalised.
    """
    del state
    chex.assert_type(valid, bool)
    chex.assert_equal_shape([valid, targets['advantage']])
    if not self.normalise_advantage or valid.size == 1 or self._as_nappo:
      return jnp.zeros(()), jnp.ones(())
    return _mean_and_deviation(targets['advantage'], valid)

  def unit_of_values(self, params: Params) -> jax.Array | float:
    """Returns the factor of errors of values: they count in deviations if values are normalised."""
    moments = running_moments.moments_of(params)
    return 1.0 / running_moments.deviation(moments['values']) if 'values' in moments else 1.0

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns this part's share of the minibatch's mean loss, and sums of its terms.

    Args:
      params: of the network.
      state: not read.
      batch: rows [1, N, ...], or environments [T, N, ...] for a recurrent network, with `targets`.
      key: not read.
    """
    del state, key
    rollout = batch.items  # rows [1, N, ...] or environments [T, N, ...]
    mean, std = batch.statistics
    if self.recurrent:
      dist_params, value = (x[:-1] for x in self.unroll(params, rollout))
    else:
      dist_params, value, _ = self.network.apply(params, rollout.obs, None, rollout.valid)

    unit = self.unit_of_values(params)
    before = batch.targets.get('log_prob', rollout.extras['log_prob'])
    of_rows = (dist_params, value * unit, rollout.action, before,
               rollout.extras['value'] * unit, (batch.targets['advantage'] - mean) / std,
               batch.targets['value_target'] * unit, rollout.valid)
    loss, terms = ppo_loss(
        *(x.reshape(-1, *x.shape[2:]) for x in of_rows), self.parts.policy, clip=self.clip,
        clip_smoothly=self.clip_smoothly, clip_value=self.clip_value, value_coef=self.value_coef,
        entropy_coef=self.entropy_coef)
    predictions = Predictions.of(
        rollout.extras['value'], batch.targets['value_target'], rollout.valid)
    return loss / batch.count, Aux(terms, jnp.sum(rollout.valid.astype(jnp.float32)),
                                   predictions=predictions)


def _mean_and_deviation(x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the mean and deviation [] of the valid elements of x."""
  count = jnp.maximum(jnp.sum(valid.astype(jnp.float32)), 1.0)

  def mean_over_valid(x):
    return jnp.sum(jnp.where(valid, x, 0.0)) / count

  mean = mean_over_valid(x)
  variance = mean_over_valid(jnp.square(x - mean))
  # All may be equal, and their deviation 0.
  return mean, jnp.sqrt(variance) + 1e-8


def gae(
    value: jax.Array,
    r_t: jax.Array,
    discount_t: jax.Array,
    done: jax.Array,
    gae_lambda: float,
) -> jax.Array:
  """Returns generalised advantage estimates (1506.02438, equation 16) of one sequence.

  Args:
    value: [T + 1] f32, V(obs[t]); the last row is used for bootstrapping only.
    r_t: [T] f32, rewards that came back with obs[1:].
    discount_t: [T] f32, gamma, or zero after a termination.
    done: [T] bool, the episode ended with this row (terminated or truncated). The next row is
      invalid, so the trace is cut here.
    gae_lambda: the exponential weight.

  Returns:
    Advantages [T].

  Raises:
    AssertionError: the shapes differ from those above (chex).
  """
  chex.assert_rank(value, 1)
  chex.assert_equal_shape([r_t, discount_t, done, value[1:]])
  lambda_t = gae_lambda * (1.0 - done.astype(jnp.float32))
  delta_t = r_t + discount_t * value[1:] - value[:-1]

  # As `rlax.truncated_generalized_advantage_estimation`, bit for bit. The import of rlax takes
  # 0.4 s, which a run with one program would wait for.
  def step(advantage, xs):
    delta, discount, decay = xs
    advantage = delta + discount * decay * advantage
    return advantage, advantage

  return jax.lax.scan(step, 0.0, (delta_t, discount_t, lambda_t), reverse=True)[1]


def vtrace(
    value: jax.Array,
    r_t: jax.Array,
    discount_t: jax.Array,
    rho: jax.Array,
    trace_lambda: float,
) -> tuple[jax.Array, jax.Array]:
  """Returns advantages and value targets of one sequence by V-trace (1802.01561, section 4.1).

  Args:
    value: [T + 1] f32, V(obs[t]); the last row is used for bootstrapping only.
    r_t: [T] f32, rewards that came back with obs[1:].
    discount_t: [T] f32, gamma, or zero after a termination.
    rho: [T] f32, importance weight of the trained policy; zero on invalid rows.
    trace_lambda: the mixing parameter of remark 2.

  Returns:
    Advantages [T] and value targets [T].

  Raises:
    AssertionError: the shapes differ from those above (chex).
  """
  chex.assert_rank(value, 1)
  chex.assert_equal_shape([r_t, discount_t, rho, value[1:]])
  vtrace_output = rlax.vtrace_td_error_and_advantage(value[:-1], value[1:], r_t, discount_t, rho,
                                                     trace_lambda)
  # `pg_advantage` contains the importance weight. PPO's loss multiplies by its own ratio, so the
  # advantage must not contain the weight a second time.
  return vtrace_output.q_estimate - value[:-1], vtrace_output.errors + value[:-1]


def ppo_loss(
    dist_params: jax.Array,
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
    clip_smoothly: bool = False,
    clip_value: bool = False,
    value_coef: float = 0.5,
    entropy_coef: float = 0.01,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns PPO's loss summed over valid rows; divide by their number for the paper's mean.

  Args:
    dist_params: [N, K] f32, the trained policy's distribution parameters.
    value: [N] f32, the trained critic's values.
    action: [N, ...], the acting policy's actions.
    behaviour_log_prob: [N] f32, the acting policy's log-probabilities in nats.
    behaviour_value: [N] f32, the acting network's values, around which clip_value clips.
    advantage: [N] f32, normalised or not.
    value_target: [N] f32.
    valid: [N] bool.
    policy: the policy whose parameters `dist_params` holds.
    clip: epsilon of equation 7.
    clip_smoothly: bound the ratio by `smooth_clip`.
    clip_value: clip the value's change too, as in openai/baselines.
    value_coef: c1 of equation 9; the squared error is halved.
    entropy_coef: c2 of equation 9.

  Returns:
    The scalar loss, and sums over valid rows: policy_loss, value_loss, entropy, approx_kl
    (Schulman's k3 estimate), clip_fraction.

  Raises:
    AssertionError: the shapes differ from those above (chex).
  """
  chex.assert_type(valid, bool)
  chex.assert_shape(dist_params, (len(value), policy.dist_size))
  chex.assert_shape(action, (len(value), *policy.action_shape))
  chex.assert_equal_shape(
      [value, behaviour_log_prob, behaviour_value, advantage, value_target, valid])

  mask = valid.astype(jnp.float32)
  log_ratio = policy.log_prob(dist_params, action) - behaviour_log_prob
  ratio = jnp.exp(log_ratio)
  # rlax's clipped surrogate is a mean over all rows; this one is a sum over valid ones.
  bounded = (smooth_clip if clip_smoothly else jnp.clip)(ratio, 1 - clip, 1 + clip)
  surrogate = jnp.minimum(ratio * advantage, bounded * advantage)

  error = jnp.square(value - value_target)
  if clip_value:
    clipped_value = behaviour_value + jnp.clip(value - behaviour_value, -clip, clip)
    error = jnp.maximum(error, jnp.square(clipped_value - value_target))

  loss_terms = {
      'policy_loss': -jnp.sum(mask * surrogate),
      'value_loss': 0.5 * jnp.sum(mask * error),
      'entropy': jnp.sum(mask * policy.entropy(dist_params)),
      'approx_kl': jnp.sum(mask * (ratio - 1.0 - log_ratio)),
      'clip_fraction': jnp.sum(mask * (jnp.abs(ratio - 1.0) > clip))}
  loss = (loss_terms['policy_loss'] + value_coef * loss_terms['value_loss']
          - entropy_coef * loss_terms['entropy'])
  return loss, loss_terms


def smooth_clip(x: jax.Array, low: float, high: float) -> jax.Array:
  """Returns x between two bounds, which it never reaches, with slope 1 in their middle.

  It is rl_games' smooth clamp: a sigmoid, so numbers outside of the bounds keep a gradient.
  """
  width = high - low
  return low + width * jax.nn.sigmoid(4 * ((x - low) / width - 0.5))
