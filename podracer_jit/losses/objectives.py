"""What a learner optimises: how a loss of `losses/` is fed from rollouts, as five pure functions.

An *item* is the smallest thing a minibatch is made of: a whole sequence (IMPALA) or a row (PPO).
Everything here sees one group of environments, or a piece of one, in shapes that do not depend on
how many groups share a device: that is what makes gradients equal to the last bit anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer_jit import losses
from podracer_jit.agents import running_moments
from podracer_jit.agents.policies import Policy
from podracer_jit.envs import frames
from podracer_jit.numerics.deterministic import rounded
from podracer_jit.types import Metrics, Params, Rollout, discounts

# (params, obs [T, N, ...], core before them, valid [T, N]) -> dist [T, N, K], value [T, N], core
Apply = Callable[[Params, jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array, Any]]
# Adds [groups, n] over all items of all groups of all devices, in one fixed order.
Sum = Callable[[jax.Array], jax.Array]


class Objective(NamedTuple):
  """A loss with its way through the data."""

  item_rows: int  # network rows of one item
  items_per_env: int  # items that one environment's rollout holds
  shuffle: bool  # whether an epoch draws its minibatches at random
  # the parts of a rollout that `prepare` needs, so that no more frames are gathered for it
  needed: Callable[[Rollout], Rollout]
  # (params, needed of one group) -> targets [T, B_group], once an update
  prepare: Callable[[Params, Rollout], Any]
  # (rollout, targets, first environment of the group, its size, items [n]) -> piece
  take: Callable[[Rollout, Any, jax.Array, int, jax.Array], Any]
  # (pieces of all groups, each [groups, ...], sum) -> what all pieces of a minibatch share
  shared: Callable[[Any, Sum], Any]
  # the parts of (rollout, targets) that `shared` needs, so that no frames are gathered for it
  light: Callable[[Rollout, Any], tuple[Rollout, Any]]
  # (params, piece, shared) -> loss, sums of terms over valid rows ('valid' counts them)
  loss: Callable[[Params, Any, Any], tuple[jax.Array, Metrics]]


def _without_obs(rollout: Rollout, targets: Any) -> tuple[Rollout, Any]:
  return rollout._replace(obs=rollout.reward[..., None], core=()), targets


def _last_obs(rollout: Rollout) -> Rollout:
  return rollout._replace(obs=frames.last(rollout.obs))


def _whole(rollout: Rollout) -> Rollout:
  return rollout


def _sequences(rollout: Rollout, targets: Any, first_env: jax.Array, group_envs: int,
               items: jax.Array) -> tuple[Rollout, Any]:
  """Items are environments: [T, n, ...] of each."""
  del group_envs
  return jax.tree.map(lambda x: jnp.take(x, first_env + items, axis=1), (rollout, targets))


def _rows(rollout: Rollout, targets: Any, first_env: jax.Array, group_envs: int,
          items: jax.Array) -> tuple[Rollout, Any]:
  """Items are rows, counted environment by environment within a step: [1, n, ...] of them."""
  step, env = items // group_envs, first_env + items % group_envs
  obs = frames.pick(rollout.obs, step, env)[None]
  rollout, targets = jax.tree.map(lambda x: x[step, env][None],
                                  (rollout._replace(obs=()), targets))
  return rollout._replace(obs=obs), targets


def _unroll(apply: Apply, params: Params, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
  """dist and value at all T + 1 rows; what is after the last row is never asked."""
  core = jax.tree.map(lambda x: x[0], rollout.core)
  valid = jnp.concatenate([rollout.valid, rollout.valid[-1:]])
  return apply(params, frames.stacks(rollout.obs), core, valid)[:2]


def impala(apply: Apply, policy: Policy, unroll_length: int, options: Mapping[str, Any],
           recurrent: bool = False) -> Objective:
  """V-trace on whole sequences; see `losses.impala_loss` for the options beside `discount`."""
  del recurrent  # sequences are what it learns from anyway
  options = dict(options)
  discount = options.pop('discount')

  def loss(params, piece, shared):
    del shared
    rollout, _ = piece
    dist, value = _unroll(apply, params, rollout)
    per_sequence = jax.vmap(lambda *a: losses.impala_loss(*a, policy, **options), in_axes=1)
    loss, terms = per_sequence(
        dist[:-1], value, rollout.action, rollout.behaviour_log_prob, rollout.reward,
        discounts(rollout, discount), rollout.valid)
    terms['valid'] = rollout.valid.astype(jnp.float32)
    return jnp.sum(loss), jax.tree.map(jnp.sum, terms)

  return Objective(
      item_rows=unroll_length + 1, items_per_env=1, shuffle=False, needed=_last_obs,
      prepare=lambda params, rollout: (), take=_sequences,
      shared=lambda pieces, add: (), light=_without_obs, loss=loss)


def _by_gae(apply: Apply, policy: Policy, discount: float, gae_lambda: float, recurrent: bool):
  """Returns PPO's `prepare`, by the acting network's values but for what follows the last row."""
  del policy

  def prepare(params, rollout):
    if recurrent:
      last_value = _unroll(apply, params, rollout)[1][-1]
    else:
      last_value = apply(params, frames.last(rollout.obs), (), rollout.valid[-1:])[1][0]
    value = jnp.concatenate([rollout.behaviour_value, last_value[None]])
    advantage = jax.vmap(lambda *a: losses.gae(*a, gae_lambda), in_axes=1, out_axes=1)(
        value, rollout.reward, discounts(rollout, discount),
        rollout.terminated | rollout.truncated)
    return {'advantage': advantage, 'value_target': advantage + rollout.behaviour_value}

  return prepare


def _by_vtrace(apply: Apply, policy: Policy, discount: float, gae_lambda: float, recurrent: bool):
  """Returns PPO's `prepare`, by the parameters that the update begins with."""
  del recurrent  # all rows are asked for anyway

  def prepare(params, rollout):
    dist, value = _unroll(apply, params, rollout)
    log_rho = policy.log_prob(dist[:-1], rollout.action) - rollout.behaviour_log_prob
    rho = jnp.where(rollout.valid, jnp.exp(log_rho), 0.0)
    advantage, value_target = jax.vmap(
        lambda *a: losses.vtrace(*a, gae_lambda), in_axes=1, out_axes=1)(
            value, rollout.reward, discounts(rollout, discount), rho)
    return {'advantage': advantage, 'value_target': value_target}

  return prepare


def ppo(apply: Apply, policy: Policy, unroll_length: int, options: Mapping[str, Any],
        recurrent: bool = False) -> Objective:
  """PPO on shuffled rows, of a recurrent network on shuffled environments.

  Advantages are made once an update, from the acting network's values; what follows the last row
  is valued by the parameters that the update begins with. With `vtrace` they are V-trace's, all
  by those parameters, as NAPPO corrects late rollouts (2007.02622). The other options are those of
  `losses.ppo_loss` and `losses.gae`.
  """
  options = dict(options)
  discount, gae_lambda, vtrace, scaled = (
      options.pop(name) for name in ('discount', 'gae_lambda', 'vtrace', 'normalise_advantage'))
  make_targets = _by_vtrace if vtrace else _by_gae

  def shared(pieces, add):
    rollout, targets = pieces

    def masked_sum(x):
      return add(jnp.where(rollout.valid, x, 0.0).reshape(len(x), -1))
    count = jnp.maximum(masked_sum(jnp.ones(rollout.valid.shape)), 1.0)
    if not scaled:
      return count, jnp.zeros(()), jnp.ones(())
    mean = rounded(masked_sum(targets['advantage']) / count)
    variance = masked_sum(rounded(jnp.square(targets['advantage'] - mean))) / count
    return count, mean, jnp.sqrt(variance) + 1e-8

  def loss(params, piece, shared):
    rollout, targets = piece
    count, mean, std = shared
    if recurrent:
      dist, value = (x[:-1] for x in _unroll(apply, params, rollout))
    else:
      dist, value, _ = apply(params, rollout.obs, (), rollout.valid)
    moments = running_moments.of(params)
    unit = 1.0 / running_moments.deviation(moments['values']) if 'values' in moments else 1.0
    rows = (dist, value * unit, rollout.action, rollout.behaviour_log_prob,
            rollout.behaviour_value * unit, (targets['advantage'] - mean) * (1.0 / std),
            targets['value_target'] * unit, rollout.valid)
    loss, terms = losses.ppo_loss(
        *(x.reshape(-1, *x.shape[2:]) for x in rows), policy, **options)
    terms['valid'] = jnp.sum(rollout.valid.astype(jnp.float32))
    return loss / count, terms

  return Objective(
      item_rows=unroll_length + 1 if recurrent else 1,
      items_per_env=1 if recurrent else unroll_length, shuffle=True,
      needed=_whole if recurrent or vtrace else _last_obs,
      prepare=make_targets(apply, policy, discount, gae_lambda, recurrent),
      take=_sequences if recurrent else _rows,
      shared=shared, light=_without_obs, loss=loss)


OBJECTIVES = {'impala': impala, 'ppo': ppo}
