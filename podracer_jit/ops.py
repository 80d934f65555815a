"""G and U: exact gradients and updates, and their fusion with each other and with the rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit.objectives import Objective
from podracer_jit.receipts import fingerprint
from podracer_jit.types import Metrics, Params, Rollout, TrainState

AXIS = 'learner'  # the name of the learner mesh's axis


class Sizes(NamedTuple):
  """What the arithmetic of an update depends on; all of it belongs to the experiment."""

  num_envs: int
  num_grad_shards: int
  num_minibatches: int
  num_epochs: int
  microbatch_rows: int  # at most so many network rows to a pass; 0: a group's minibatch at once


def pairwise_sum(x: jax.Array) -> jax.Array:
  """Sum over the leading axis, neighbours first, in one order whatever XLA would prefer."""
  while x.shape[0] > 1:
    even = x.shape[0] // 2 * 2
    x = jnp.concatenate([x[:even:2] + x[1:even:2], x[even:]])
  return x[0]


def exact_sum(tree: Any, mesh_size: int) -> Any:
  """Sums [groups on this device, ...] over the groups of all devices, equal on any mesh."""
  def total(x):
    if mesh_size > 1:
      if x.shape[0].bit_count() == 1:  # a whole branch of the tree of sums: add before it travels
        x = pairwise_sum(x)[None]
      x = lax.all_gather(x, AXIS, tiled=True)
    return pairwise_sum(x)
  return jax.tree.map(total, tree)


def plain_sum(tree: Any, mesh_size: int) -> Any:
  """The same with XLA's own all-reduce, whose order depends on the mesh."""
  def total(x):
    x = jnp.sum(x, axis=0)
    return lax.psum(x, AXIS) if mesh_size > 1 else x
  return jax.tree.map(total, tree)


def map_in_loop(function: Callable, xs: Any) -> Any:
  """lax.map that XLA compiles alike for any number of turns.

  A single turn it would take out of the loop, where other fusions give other last bits. So the
  number of turns is hidden, and xs and ys have a row too many, lest the index of the only one be
  known.
  """
  count = jax.tree.leaves(xs)[0].shape[0]
  xs = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), xs)

  def turn(carry):
    i, ys = carry
    y = function(jax.tree.map(lambda x: x[i], xs))
    return i + 1, jax.tree.map(lambda ys, y: ys.at[i].set(y), ys, y)

  shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], xs))
  ys = jax.tree.map(lambda s: jnp.zeros((count + 1, *s.shape), s.dtype), shapes)
  end = lax.optimization_barrier(jnp.int32(count))
  _, ys = lax.while_loop(lambda carry: carry[0] < end, turn, (jnp.int32(0), ys))
  return jax.tree.map(lambda ys: ys[:count], ys)


def pieces(items: int, item_rows: int, microbatch_rows: int) -> int:
  """Into how many equal pieces to cut `items` so that each has at most microbatch_rows rows."""
  most = max(1, microbatch_rows // item_rows) if microbatch_rows else items
  return next(n for n in range(1, items + 1) if items % n == 0 and items // n <= most)


def make_gradient(objective: Objective, sizes: Sizes, mesh_size: int = 1,
                  sum_groups: Callable[[Any, int], Any] = exact_sum):
  """Returns gradient(params, rollout, targets, items [groups, n]) -> (grads, terms).

  Each group's gradient is taken in the same shapes everywhere and the groups are added in a fixed
  order, so the result does not depend on how many devices share them (but for `plain_sum`).
  """
  group_envs = sizes.num_envs // sizes.num_grad_shards
  groups = sizes.num_grad_shards // mesh_size
  def add(tree):
    return sum_groups(tree, mesh_size)

  def gradient(params: Params, rollout: Rollout, targets: Any, items: jax.Array):
    firsts = jnp.arange(groups) * group_envs
    light = jax.vmap(
        lambda first, some: objective.take(*objective.light(rollout, targets), first, group_envs,
                                           some))(firsts, items)
    shared = objective.shared(light, lambda x: add(jax.vmap(pairwise_sum)(x)))
    loss = jax.grad(objective.loss, has_aux=True)

    def of_group(group):
      first, some = group
      some = some.reshape(pieces(some.size, objective.item_rows, sizes.microbatch_rows), -1)

      def of_piece(piece):
        return loss(params, objective.take(rollout, targets, first, group_envs, piece), shared)

      zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(of_piece, some[0]))
      return lax.scan(lambda total, piece: (jax.tree.map(jnp.add, total, of_piece(piece)), None),
                      zeros, some)[0]

    return add(map_in_loop(of_group, (firsts, items)))

  return gradient


def make_update(optimizer: optax.GradientTransformation, learning_rate: Callable):
  """Returns update(state, grads) -> state; the rate is that of the state's step count."""

  def update(state: TrainState, grads: Params) -> TrainState:
    steps, opt_state = optimizer.update(grads, state.opt_state, state.params)
    rate = learning_rate(state.steps)
    params = jax.tree.map(lambda p, s: p - rate * s, state.params, steps)
    return state._replace(params=params, opt_state=opt_state)

  return update


def _orders(key: jax.Array, sizes: Sizes, objective: Objective, mesh_size: int) -> jax.Array:
  """Items in the order of every epoch and group: [epochs, minibatches, groups here, n]."""
  groups = sizes.num_grad_shards // mesh_size
  first = lax.axis_index(AXIS) * groups if mesh_size > 1 else 0
  count = sizes.num_envs // sizes.num_grad_shards * objective.items_per_env

  def order(epoch, group):
    if not objective.shuffle:
      return jnp.arange(count)
    return jax.random.permutation(jax.random.fold_in(jax.random.fold_in(key, epoch), group), count)

  orders = jax.vmap(lambda e: jax.vmap(lambda g: order(e, g))(first + jnp.arange(groups)))(
      jnp.arange(sizes.num_epochs))
  orders = orders.reshape(sizes.num_epochs, groups, sizes.num_minibatches, -1)
  return orders.transpose(0, 2, 1, 3)


def fuse(objective: Objective, gradient: Callable, update: Callable, sizes: Sizes,
         learning_rate: Callable, mesh_size: int = 1):
  """Returns learn(state, rollout) -> (state, metrics): all epochs and minibatches in one scan.

  G and U one after the other, for one device of a mesh of `mesh_size`; `rollout` holds this
  device's environments. Metrics: means of the terms over valid rows of all gradient steps,
  `grad_norm` before clipping, `param_norm`, `learning_rate`, `valid` rows, the `batch` and `params`
  fingerprints, and the rollout's episodes.
  """
  groups = sizes.num_grad_shards // mesh_size
  group_envs = sizes.num_envs // sizes.num_grad_shards

  def prepare(params: Params, rollout: Rollout):
    ends = rollout._replace(obs=rollout.obs[-1:])

    def of_group(first):
      part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, group_envs, 1), ends)
      return objective.prepare(params, part)
    targets = map_in_loop(of_group, jnp.arange(groups) * group_envs)  # [groups, T, B_group]
    return jax.tree.map(lambda x: jnp.concatenate(list(x), axis=1), targets)

  def learn(state: TrainState, rollout: Rollout) -> tuple[TrainState, Metrics]:
    targets = prepare(state.params, rollout)
    orders = _orders(jax.random.fold_in(state.key, state.update), sizes, objective, mesh_size)

    def step(state, items):
      grads, terms = gradient(state.params, rollout, targets, items)
      return update(state, grads), (terms, optax.tree.norm(grads))

    rate = learning_rate(state.steps)
    orders = orders.reshape(-1, *orders.shape[2:])
    state, (terms, grad_norm) = lax.scan(step, state, orders)
    terms = jax.tree.map(jnp.sum, terms)
    rows = jnp.maximum(terms.pop('valid'), 1.0)
    metrics = {name: total / rows for name, total in terms.items()}
    batch = rollout._replace(episodes=())
    here = rollout.action.shape[1]
    first = lax.axis_index(AXIS) * here if mesh_size > 1 else 0
    sums = (fingerprint(batch, 1, first, sizes.num_envs), jnp.sum(rollout.valid, dtype=jnp.int32))
    batch_print, valid = lax.psum(sums, AXIS) if mesh_size > 1 else sums
    state = state._replace(update=state.update + 1, steps=state.steps + valid)
    metrics |= dict(
        grad_norm=jnp.mean(grad_norm), param_norm=optax.tree.norm(state.params),
        learning_rate=rate, valid=valid, update=state.update,
        steps=state.steps, batch=batch_print, params=fingerprint(state.params),
        episodes=rollout.episodes)
    return state, metrics

  return learn


def make_learn(objective: Objective, optimizer: optax.GradientTransformation,
               learning_rate: Callable, sizes: Sizes, mesh_size: int = 1,
               sum_groups: Callable[[Any, int], Any] = exact_sum):
  """Returns learn(state, rollout) -> (state, metrics), G and U fused; see `fuse`.

  learning_rate: valid steps learned from -> what the optimizer's output is multiplied by.
  """
  return fuse(objective, make_gradient(objective, sizes, mesh_size, sum_groups),
              make_update(optimizer, learning_rate), sizes, learning_rate, mesh_size)


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
