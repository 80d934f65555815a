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
from podracer_jit.types import Metrics, Params, Rollout, discounts

# (params, obs [N, ...]) -> logits [N, A], value [N]
Apply = Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]]
# Adds [groups, n] over all items of all groups of all devices, in one fixed order.
Sum = Callable[[jax.Array], jax.Array]


class Objective(NamedTuple):
  """A loss with its way through the data."""

  item_rows: int  # network rows of one item
  items_per_env: int  # items that one environment's rollout holds
  shuffle: bool  # whether an epoch draws its minibatches at random
  # (params, rollout of one group, its last obs only) -> targets [T, B_group], once an update
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
  return rollout._replace(obs=rollout.action[..., None], episodes=()), targets


def impala(apply: Apply, unroll_length: int, options: Mapping[str, Any]) -> Objective:
  """V-trace on whole sequences; see `losses.impala_loss` for the options beside `discount`."""
  options = dict(options)
  discount = options.pop('discount')

  def take(rollout, targets, first_env, group_envs, items):
    del targets, group_envs
    return jax.tree.map(lambda x: jnp.take(x, first_env + items, axis=1),
                        rollout._replace(episodes=()))

  def loss(params, piece, shared):
    del shared
    steps, envs = piece.obs.shape[:2]
    logits, value = apply(params, piece.obs.reshape(-1, *piece.obs.shape[2:]))
    logits, value = (x.reshape(steps, envs, *x.shape[1:]) for x in (logits, value))
    per_sequence = jax.vmap(lambda *a: losses.impala_loss(*a, **options), in_axes=1)
    loss, terms = per_sequence(
        logits[:-1], value, piece.action, piece.behaviour_log_prob, piece.reward,
        discounts(piece, discount), piece.valid)
    terms['valid'] = piece.valid.astype(jnp.float32)
    return jnp.sum(loss), jax.tree.map(jnp.sum, terms)

  return Objective(
      item_rows=unroll_length + 1, items_per_env=1, shuffle=False,
      prepare=lambda params, rollout: (), take=take,
      shared=lambda pieces, add: (), light=_without_obs, loss=loss)


def ppo(apply: Apply, unroll_length: int, options: Mapping[str, Any]) -> Objective:
  """PPO on shuffled rows; see `losses.ppo_loss` and `losses.gae` for the options.

  Advantages are made once an update, from the acting network's values; what follows the last row
  is valued by the parameters that the update begins with.
  """
  options = dict(options)
  discount, gae_lambda = options.pop('discount'), options.pop('gae_lambda')
  normalise = options.pop('normalise_advantage')

  def prepare(params, rollout):
    _, last_value = apply(params, rollout.obs[-1])
    value = jnp.concatenate([rollout.behaviour_value, last_value[None]])
    advantage = jax.vmap(lambda *a: losses.gae(*a, gae_lambda), in_axes=1, out_axes=1)(
        value, rollout.reward, discounts(rollout, discount),
        rollout.terminated | rollout.truncated)
    return {'advantage': advantage, 'value_target': advantage + rollout.behaviour_value}

  def take(rollout, targets, first_env, group_envs, items):
    step, env = items // group_envs, first_env + items % group_envs
    return jax.tree.map(lambda x: x[step, env], (rollout._replace(episodes=()), targets))

  def shared(pieces, add):
    rollout, targets = pieces

    def masked_sum(x):  # with where: mask * x would be contracted with the addition in some fusions
      return add(jnp.where(rollout.valid, x, 0.0))
    count = jnp.maximum(masked_sum(jnp.ones(rollout.valid.shape)), 1.0)
    if not normalise:
      return count, jnp.zeros(()), jnp.ones(())
    mean = masked_sum(targets['advantage']) / count
    variance = masked_sum(jnp.square(targets['advantage'] - mean)) / count
    return count, mean, jnp.sqrt(variance) + 1e-8

  def loss(params, piece, shared):
    rollout, targets = piece
    count, mean, std = shared
    logits, value = apply(params, rollout.obs)
    loss, terms = losses.ppo_loss(
        logits, value, rollout.action, rollout.behaviour_log_prob, rollout.behaviour_value,
        (targets['advantage'] - mean) / std, targets['value_target'], rollout.valid, **options)
    terms['valid'] = jnp.sum(rollout.valid.astype(jnp.float32))
    return loss / count, terms

  return Objective(
      item_rows=1, items_per_env=unroll_length, shuffle=True, prepare=prepare, take=take,
      shared=shared, light=_without_obs, loss=loss)


OBJECTIVES = {'impala': impala, 'ppo': ppo}
