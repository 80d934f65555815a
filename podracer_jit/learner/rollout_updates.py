"""G and U: exact gradients and updates, and their fusion with each other and with the rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit.agents import running_moments
from podracer_jit.losses.minibatches import mask_inputs
from podracer_jit.losses.objective import Objective
from podracer_jit.numerics.deterministic import AXIS, exact_sum, map_in_loop, pairwise_sum
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.types import Metrics, Params, Rollout, TrainState

# ([groups on this device, ...], size of the mesh) -> their sum over the groups of all devices
SumGroups = Callable[[Any, int], Any]


class Sizes(NamedTuple):
  """What the arithmetic of an update depends on; all of it belongs to the experiment."""

  num_envs: int
  num_grad_shards: int
  num_minibatches: int
  num_epochs: int
  microbatch_rows: int  # at most so many network rows to a pass; 0: a group's minibatch at once


def pieces(items: int, item_rows: int, microbatch_rows: int) -> int:
  """Into how many equal pieces to cut `items` so that each has at most microbatch_rows rows."""
  most = max(1, microbatch_rows // item_rows) if microbatch_rows else items
  return next(n for n in range(1, items + 1) if items % n == 0 and items // n <= most)


def make_gradient(objective: Objective, sizes: Sizes, mesh_size: int = 1,
                  sum_groups: SumGroups = exact_sum, last_sum: SumGroups | None = None):
  """Returns gradient(params, rollout, targets, items [groups, n]) -> (grads, terms).

  Each group's gradient is taken in the same shapes everywhere and the groups are added in a fixed
  order, so the result does not depend on how many devices share them (but for `plain_sum`).
  `last_sum`, where given, adds the gradients themselves.
  """
  group_envs = sizes.num_envs // sizes.num_grad_shards
  groups = sizes.num_grad_shards // mesh_size
  def add(tree):
    return sum_groups(tree, mesh_size)

  def gradient(params: Params, rollout: Rollout, targets: Any, items: jax.Array):
    firsts = jnp.arange(groups) * group_envs
    light = jax.vmap(
        lambda first, some: objective.unit.gather(*mask_inputs(rollout, targets), first, group_envs,
                                                  some))(firsts, items)
    shared = objective.batch_statistics(light, lambda x: add(jax.vmap(pairwise_sum)(x)))
    loss = jax.grad(lambda params, *rest: objective.loss(running_moments.frozen(params), *rest),
                    has_aux=True)

    def of_group(group):
      first, some = group
      some = some.reshape(pieces(some.size, objective.rows_per_element, sizes.microbatch_rows), -1)

      def of_piece(piece):
        minibatch = objective.unit.gather(rollout, targets, first, group_envs, piece)
        return loss(params, minibatch, shared)

      zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(of_piece, some[0]))
      return lax.scan(lambda total, piece: (jax.tree.map(jnp.add, total, of_piece(piece)), None),
                      zeros, some)[0]

    return (last_sum or sum_groups)(map_in_loop(of_group, (firsts, items)), mesh_size)

  return gradient


def make_update(optimizer: optax.GradientTransformation, learning_rate: Callable):
  """Returns update(state, grads, terms) -> state; the rate is that of the state's step count."""
  optimizer = optax.with_extra_args_support(optimizer)

  def update(state: TrainState, grads: Params, terms: Metrics) -> TrainState:
    kl = terms.get('approx_kl', 0.0) / jnp.maximum(terms['valid'], 1.0)
    steps, opt_state = optimizer.update(grads, state.opt_state, state.params, kl=kl)
    rate = learning_rate(state.steps)
    params = jax.tree.map(lambda p, s: p - rate * s, state.params, steps)
    return state._replace(params=params, opt_state=opt_state)

  return update


def _orders(key: jax.Array, sizes: Sizes, objective: Objective, mesh_size: int) -> jax.Array:
  """Items in the order of every epoch and group: [epochs * minibatches, groups here, n]."""
  groups = sizes.num_grad_shards // mesh_size
  first = lax.axis_index(AXIS) * groups if mesh_size > 1 else 0
  count = sizes.num_envs // sizes.num_grad_shards * objective.elements_per_env

  def order(epoch, group):
    if not objective.algorithm.shuffles:
      return jnp.arange(count)
    return jax.random.permutation(jax.random.fold_in(jax.random.fold_in(key, epoch), group), count)

  orders = jax.vmap(lambda e: jax.vmap(lambda g: order(e, g))(first + jnp.arange(groups)))(
      jnp.arange(sizes.num_epochs))
  orders = orders.reshape(sizes.num_epochs, groups, sizes.num_minibatches, -1)
  return orders.transpose(0, 2, 1, 3).reshape(-1, groups, orders.shape[-1])


class Prepared(NamedTuple):
  """What the gradient steps of an update share, on one device of the mesh."""

  rollout: Rollout  # its rewards as the loss takes them; without episodes
  targets: Any  # of the objective, [T, B]
  orders: jax.Array  # [steps, groups here, n]: the items of each minibatch
  seen: Metrics  # of the batch: 'batch' fingerprint, 'valid' rows, 'moments', 'episodes'


def make_prepare(objective: Objective, sizes: Sizes, mesh_size: int = 1,
                 sum_groups: SumGroups = exact_sum):
  """Returns prepare(params, key, rollout) -> Prepared, once an update, with its own key."""
  groups = sizes.num_grad_shards // mesh_size
  group_envs = sizes.num_envs // sizes.num_grad_shards

  def total(x):  # [T, B on this device, ...] -> [...]
    x = x.reshape(x.shape[0], groups, group_envs, *x.shape[2:]).swapaxes(0, 1)
    return sum_groups(jax.vmap(pairwise_sum)(x.reshape(groups, -1, *x.shape[3:])), mesh_size)

  def make_targets(params: Params, rollout: Rollout):
    needed = objective.target_inputs(rollout)

    def of_group(first):  # no slices: one of all there is would not depend on the turn
      envs = first + jnp.arange(group_envs)
      return objective.targets(params, jax.tree.map(lambda x: jnp.take(x, envs, axis=1), needed))
    targets = map_in_loop(of_group, jnp.arange(groups) * group_envs)  # [groups, T, B_group]
    return jax.tree.map(lambda x: jnp.concatenate(list(x), axis=1), targets)

  def prepare(params: Params, key: jax.Array, rollout: Rollout) -> Prepared:
    batch, episodes = rollout._replace(episodes=()), rollout.episodes
    first = lax.axis_index(AXIS) * sizes.num_envs // mesh_size if mesh_size > 1 else 0
    sums = fingerprint(batch, 1, first, sizes.num_envs), jnp.sum(batch.valid, dtype=jnp.int32)
    batch_print, valid = lax.psum(sums, AXIS) if mesh_size > 1 else sums
    scaled, rewards = running_moments.scale_rewards(params, batch, total)
    targets = make_targets(params, scaled)
    moments = running_moments.observe(params, batch, targets, total) | rewards
    return Prepared(scaled, targets, _orders(key, sizes, objective, mesh_size),
                    dict(batch=batch_print, valid=valid, moments=moments, episodes=episodes))

  return prepare


def update_key(state: TrainState) -> jax.Array:
  """The key of the update that `state` is about to make."""
  return jax.random.fold_in(state.key, state.update)


def finish(state: TrainState, seen: Metrics, steps: tuple[Metrics, jax.Array],
           learning_rate: Callable) -> tuple[TrainState, Metrics]:
  """Ends an update: (state, metrics).

  Args:
    state: after the last gradient step.
    seen: of Prepared.
    steps: the terms and the norms of the gradients, [steps].
    learning_rate: the schedule; see `make_learn`.

  Returns:
    The state, with the moments of what was seen, and metrics: means of the terms over valid rows of
    all gradient steps, `grad_norm` before clipping, `param_norm`, `learning_rate`, `valid` rows,
    the `batch` and `params` fingerprints, and the rollout's episodes.
  """
  (terms, grad_norm), rate = steps, learning_rate(state.steps)
  terms = jax.tree.map(jnp.sum, terms)
  rows = jnp.maximum(terms.pop('valid'), 1.0)
  # Only now: all steps of this update normalised by what was known before it.
  state = state._replace(params=running_moments.add(state.params, seen['moments']),
                         update=state.update + 1, steps=state.steps + seen['valid'])
  return state, {name: total / rows for name, total in terms.items()} | dict(
      grad_norm=jnp.mean(grad_norm),
      param_norm=optax.tree.norm(running_moments.weights(state.params)),
      learning_rate=rate * optax.tree.get(state.opt_state, 'kl_factor', 1.0), valid=seen['valid'],
      update=state.update, steps=state.steps, batch=seen['batch'],
      params=fingerprint(state.params), episodes=seen['episodes'])


def fuse(prepare: Callable, gradient: Callable, update: Callable, learning_rate: Callable):
  """Returns learn(state, rollout) -> (state, metrics): all epochs and minibatches in one scan.

  G and U one after the other, for one device of a mesh; `rollout` holds this device's environments.
  """

  def learn(state: TrainState, rollout: Rollout) -> tuple[TrainState, Metrics]:
    prepared = prepare(state.params, update_key(state), rollout)

    def step(state, items):
      with jax.named_scope('gradient'):
        grads, terms = gradient(state.params, prepared.rollout, prepared.targets, items)
      with jax.named_scope('update'):
        return update(state, grads, terms), (terms, optax.tree.norm(grads))

    state, steps = lax.scan(step, state, prepared.orders)
    return finish(state, prepared.seen, steps, learning_rate)

  return learn


def make_learn(objective: Objective, optimizer: optax.GradientTransformation,
               learning_rate: Callable, sizes: Sizes, mesh_size: int = 1,
               sum_groups: SumGroups = exact_sum):
  """Returns learn(state, rollout) -> (state, metrics), G and U fused; see `fuse`.

  learning_rate: valid steps learned from -> what the optimizer's output is multiplied by.
  """
  return fuse(make_prepare(objective, sizes, mesh_size, sum_groups),
              make_gradient(objective, sizes, mesh_size, sum_groups),
              make_update(optimizer, learning_rate), learning_rate)


def make_fused(rollout, learn, calls: int):
  """Returns fused(state, actor_state, limit, total_steps) -> (state, actor_state, count, metrics).

  At most `limit` updates (and `calls`, for which metrics have room), fewer where total_steps is
  reached: rollout and learning turn by turn in one program, with no Python between updates.
  """

  def once(state, actor_state):
    with jax.named_scope('rollout'):
      actor_state, rollouts = rollout(state.params, actor_state)
    with jax.named_scope('learn'):
      state, metrics = learn(state, concatenate(rollouts))
    return state, actor_state, metrics

  def fused(state, actor_state, limit, total_steps):
    shapes = jax.eval_shape(once, state, actor_state)[2]
    room = jax.tree.map(lambda s: jnp.zeros((calls, *s.shape), s.dtype), shapes)

    def goes_on(carry):
      state, _, count, _ = carry
      return (count < limit) & (state.steps < total_steps)

    def body(carry):
      state, actor_state, count, room = carry
      state, actor_state, metrics = once(state, actor_state)
      room = jax.tree.map(
          lambda r, x: lax.dynamic_update_index_in_dim(r, x, count, 0), room, metrics)
      return state, actor_state, count + 1, room

    return lax.while_loop(goes_on, body, (state, actor_state, jnp.int32(0), room))

  return fused


def concatenate(rollouts: tuple[Rollout, ...]) -> Rollout:
  """Shards side by side, [T, B_1 + B_2 + ...]."""
  if len(rollouts) == 1:
    return rollouts[0]
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *rollouts)
