"""G and U: exact gradients and updates, and their fusion with each other and with the rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit.agents import running_moments
from podracer_jit.losses.objective import Objective
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.types import Metrics, Params, Rollout, TrainState


class Sizes(NamedTuple):
  """What the arithmetic of an update depends on; all of it belongs to the experiment."""

  num_envs: int
  num_grad_shards: int
  num_minibatches: int
  num_epochs: int
  microbatch_rows: int  # at most so many network rows to a pass; 0: a group's minibatch at once

  def groups(self, mesh_size: int = 1, exact: bool = True) -> Groups:
    """Returns the groups of environments, as a device of a mesh of this size has them."""
    return Groups(self.num_grad_shards, self.num_envs // self.num_grad_shards, mesh_size, exact)


def pieces(items: int, item_rows: int, microbatch_rows: int) -> int:
  """Into how many equal pieces to cut `items` so that each has at most microbatch_rows rows."""
  most = max(1, microbatch_rows // item_rows) if microbatch_rows else items
  return next(n for n in range(1, items + 1) if items % n == 0 and items // n <= most)


def make_group_gradients(objective: Objective, sizes: Sizes, groups: Groups) -> Callable:
  """Returns gradients(params, rollout, targets, elements [local, n]) -> (grads, terms).

  Both have a leading axis [local] of the groups of this device.
  """
  batch_statistics = island('batch_statistics')(objective.batch_statistics)

  @island('gradient')
  def of_minibatch(params: Params, minibatch: Any, statistics: Any) -> tuple[Params, Metrics]:
    def loss(params):
      return objective.loss(running_moments.frozen(params), minibatch, statistics)
    return jax.grad(loss, has_aux=True)(params)

  def gradients(params: Params, rollout: Rollout, targets: Any, elements: jax.Array):
    first_envs = jnp.arange(groups.local) * groups.envs

    def of_group(first_env, elements, statistics):
      count = pieces(elements.size, objective.rows_per_element, sizes.microbatch_rows)

      def of_piece(piece):
        minibatch = objective.unit.gather(rollout, targets, first_env, groups.envs, piece)
        return of_minibatch(params, minibatch, statistics)

      return _sum_in_order(of_piece, elements.reshape(count, -1))

    # Observations are large to gather, and statistics do not use them.
    small = rollout._replace(obs=rollout.reward[..., None], core=())
    minibatches = jax.vmap(
        lambda *group: objective.unit.gather(small, targets, group[0], groups.envs, group[1]))(
            first_envs, elements)
    statistics = batch_statistics(
        *groups.gather((minibatches[0].valid, minibatches[1])))
    return groups.map(lambda *group: of_group(*group, statistics), first_envs, elements)

  return gradients


def _sum_in_order(function: Callable, xs: jax.Array) -> Any:
  """Returns the sum of function(x) of all rows of xs, from the first to the last."""
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(function, xs[0]))
  return lax.scan(lambda total, x: (jax.tree.map(jnp.add, total, function(x)), None), zeros, xs)[0]


def make_gradient(objective: Objective, sizes: Sizes, mesh_size: int = 1, exact: bool = True
                  ) -> Callable:
  """Returns gradient(params, rollout, targets, elements [local, n]) -> (grads, terms).

  Each group's gradient is taken in the same shapes everywhere and the groups are added in a fixed
  order, so the result does not depend on how many devices share them, if `exact`.
  """
  groups = sizes.groups(mesh_size, exact)
  gradients = make_group_gradients(objective, sizes, groups)
  return lambda *args: groups.total(gradients(*args))


def make_update(optimizer: optax.GradientTransformation, learning_rate: Callable) -> Callable:
  """Returns update(state, grads, terms) -> (state, norm of grads).

  The learning rate is that of the state's step count.
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def as_they_are(params, opt_state, steps, grads, terms):
    return params, opt_state, jnp.zeros(())

  @island('update', skipped=as_they_are)
  def step(params, opt_state, steps, grads, terms):
    kl = terms.get('approx_kl', 0.0) / jnp.maximum(terms['valid'], 1.0)
    change, opt_state = optimizer.update(grads, opt_state, params, kl=kl)
    rate = learning_rate(steps)
    params = jax.tree.map(lambda p, c: p - rate * c, params, change)
    return params, opt_state, optax.tree.norm(grads)

  def update(state: TrainState, grads: Params, terms: Metrics) -> tuple[TrainState, jax.Array]:
    params, opt_state, norm = step(state.params, state.opt_state, state.steps, grads, terms)
    return state._replace(params=params, opt_state=opt_state), norm

  return update


def _orders(key: jax.Array, sizes: Sizes, objective: Objective, groups: Groups) -> jax.Array:
  """Elements in the order of every epoch and group: [epochs * minibatches, local groups, n]."""
  count = sizes.num_envs // sizes.num_grad_shards * objective.elements_per_env

  def order(epoch, group):
    if not objective.algorithm.shuffles:
      return jnp.arange(count)
    return jax.random.permutation(jax.random.fold_in(jax.random.fold_in(key, epoch), group), count)

  orders = jax.vmap(lambda e: jax.vmap(lambda g: order(e, g))(groups.numbers()))(
      jnp.arange(sizes.num_epochs))
  orders = orders.reshape(sizes.num_epochs, groups.local, sizes.num_minibatches, -1)
  return orders.transpose(0, 2, 1, 3).reshape(-1, groups.local, orders.shape[-1])


class Prepared(NamedTuple):
  """What the gradient steps of an update share, on one device of the mesh."""

  rollout: Rollout  # its rewards as the loss takes them; without episodes
  targets: Any  # of the objective, [T, B]
  orders: jax.Array  # [steps, local groups, n]: the elements of each minibatch
  seen: Metrics  # of the batch: 'batch' fingerprint, 'valid' rows, 'moments', 'episodes'


def make_prepare(objective: Objective, sizes: Sizes, mesh_size: int = 1, exact: bool = True
                 ) -> Callable:
  """Returns prepare(params, key, rollout) -> Prepared, once an update, with its own key."""
  groups = sizes.groups(mesh_size, exact)
  targets_of_group = island('targets')(objective.targets)

  def make_targets(params: Params, rollout: Rollout):
    inputs = objective.target_inputs(rollout)

    def of_group(first_env):
      envs = first_env + jnp.arange(groups.envs)
      return targets_of_group(params, jax.tree.map(lambda x: jnp.take(x, envs, axis=1), inputs))

    return groups.join(groups.map(of_group, jnp.arange(groups.local) * groups.envs))

  def prepare(params: Params, key: jax.Array, rollout: Rollout) -> Prepared:
    batch, episodes = rollout._replace(episodes=()), rollout.episodes
    batch_print, valid = groups.total_of_integers((
        fingerprint(batch, 1, groups.first_env(), sizes.num_envs),
        jnp.sum(batch.valid, dtype=jnp.int32)))
    scaled, rewards = running_moments.scale_rewards(params, batch, groups)
    targets = make_targets(params, scaled)
    moments = running_moments.observe(params, batch, targets, groups) | rewards
    return Prepared(scaled, targets, _orders(key, sizes, objective, groups),
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
  @island('metrics')
  def means(terms, grad_norm, weights, kl_factor, steps):
    terms = jax.tree.map(jnp.sum, terms)
    rows = jnp.maximum(terms.pop('valid'), 1.0)
    return {name: total / rows for name, total in terms.items()} | dict(
        grad_norm=jnp.mean(grad_norm), param_norm=optax.tree.norm(weights),
        learning_rate=learning_rate(steps) * kl_factor)

  metrics = means(*steps, running_moments.weights(state.params),
                  optax.tree.get(state.opt_state, 'kl_factor', jnp.float32(1.0)), state.steps)
  # Only now: all steps of this update normalised by what was known before it.
  state = state._replace(params=running_moments.add(state.params, seen['moments']),
                         update=state.update + 1, steps=state.steps + seen['valid'])
  return state, metrics | dict(
      valid=seen['valid'], update=state.update, steps=state.steps, batch=seen['batch'],
      params=fingerprint(state.params), episodes=seen['episodes'])


def fuse(prepare: Callable, gradient: Callable, update: Callable, learning_rate: Callable):
  """Returns learn(state, rollout) -> (state, metrics): all epochs and minibatches in one scan.

  G and U one after the other, for one device of a mesh; `rollout` holds this device's environments.
  """

  def learn(state: TrainState, rollout: Rollout) -> tuple[TrainState, Metrics]:
    prepared = prepare(state.params, update_key(state), rollout)

    def step(state, elements):
      with jax.named_scope('gradient'):
        grads, terms = gradient(state.params, prepared.rollout, prepared.targets, elements)
      with jax.named_scope('update'):
        state, grad_norm = update(state, grads, terms)
      return state, (terms, grad_norm)

    state, steps = lax.scan(step, state, prepared.orders)
    return finish(state, prepared.seen, steps, learning_rate)

  return learn


def make_learn(objective: Objective, optimizer: optax.GradientTransformation,
               learning_rate: Callable, sizes: Sizes, mesh_size: int = 1, exact: bool = True):
  """Returns learn(state, rollout) -> (state, metrics), G and U fused; see `fuse`.

  learning_rate: valid steps learned from -> what the optimizer's output is multiplied by.
  """
  return fuse(make_prepare(objective, sizes, mesh_size, exact),
              make_gradient(objective, sizes, mesh_size, exact),
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
