"""Gradients (G) and updates (U) from rollouts, and programs that fuse them with the rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit.agents import running_moments
from podracer_jit.losses.objective import Objective
from podracer_jit.numerics import indexing
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.numerics.tracing import traced, zeros
from podracer_jit.types import Metrics, Params, Rollout, TrainState


class Sizes(NamedTuple):
  """Numbers that the arithmetic of an update depends on; all are part of the experiment."""

  num_envs: int  # on all devices
  num_grad_shards: int  # groups of environments
  num_minibatches: int  # in an epoch
  num_epochs: int  # in an update
  microbatch_rows: int  # most rows in one pass of the network; 0: a group's whole minibatch

  def groups(self, mesh_size: int = 1, exact: bool = True) -> Groups:
    """Returns the groups of environments, seen from one device of a mesh of this size."""
    return Groups(self.num_grad_shards, self.num_envs // self.num_grad_shards, mesh_size, exact)


def num_microbatches(elements: int, rows_per_element: int, microbatch_rows: int) -> int:
  """Returns the number of equal microbatches that a group's share of a minibatch is split into.

  It is the smallest divisor of `elements` that keeps a microbatch within `microbatch_rows` rows.

  Args:
    elements: minibatch elements to split.
    rows_per_element: network input rows of one element.
    microbatch_rows: most rows in a microbatch; 0: no limit. A microbatch has at least one element.
  """
  most = max(1, microbatch_rows // rows_per_element) if microbatch_rows else elements
  return next(count for count in range(1, elements + 1)
              if elements % count == 0 and elements // count <= most)


def make_group_gradients(objective: Objective, sizes: Sizes, groups: Groups) -> Callable:
  """Builds the function that computes the gradient of each group of this device.

  Args:
    objective: the algorithm with its network.
    sizes: numbers that the arithmetic of an update depends on.
    groups: the groups of environments, seen from this device.

  Returns:
    gradients(params, rollout, targets, elements) -> (grads, loss_terms). `rollout` and `targets`
    [T, B] are those of this device's environments; `elements` [local, n] i32 are the minibatch
    elements of each group. Both results have a leading axis [local].
  """
  batch_statistics = island('batch_statistics')(objective.batch_statistics)

  @island('gradient')
  def microbatch_gradient(params: Params, minibatch: Any, statistics: Any
                          ) -> tuple[Params, Metrics]:
    def loss(params):
      # Running moments are in `params`, but no gradient may flow into them.
      return objective.loss(running_moments.frozen(params), minibatch, statistics)
    return jax.grad(loss, has_aux=True)(params)

  def gradients(params: Params, rollout: Rollout, targets: Any, elements: jax.Array):
    """Returns the gradient and loss terms of each group of this device.

    Args:
      params: the parameters to differentiate.
      rollout: [T, B], of this device's environments.
      targets: [T, B] each, the objective's targets of `rollout`.
      elements: [local, n] i32, the minibatch elements of each group.
    """
    chex.assert_shape(elements, (groups.local, None))
    chex.assert_shape(rollout.reward, (None, groups.local * groups.envs))
    chex.assert_equal_shape([rollout.reward, rollout.valid])
    first_envs = jnp.arange(groups.local) * groups.envs

    def group_gradient(first_env, elements, statistics):
      count = num_microbatches(elements.size, objective.rows_per_element, sizes.microbatch_rows)

      def gradient(microbatch):
        minibatch = objective.unit.gather(rollout, targets, first_env, groups.envs, microbatch)
        return microbatch_gradient(params, minibatch, statistics)

      return _sum_in_order(gradient, elements.reshape(count, -1))

    # Observations are large to gather, and statistics do not use them.
    without_obs = rollout._replace(obs=rollout.reward[..., None], recurrent_state=None)

    def gather(first_env, elements):
      return objective.unit.gather(without_obs, targets, first_env, groups.envs, elements)

    small_rollout, minibatch_targets = jax.vmap(gather)(first_envs, elements)
    # Every device computes the statistics from the minibatches of all groups.
    statistics = batch_statistics(*groups.gather((small_rollout.valid, minibatch_targets)))
    return groups.map(lambda *group: group_gradient(*group, statistics), first_envs, elements)

  return gradients


def _sum_in_order(function: Callable, xs: jax.Array) -> Any:
  """Returns the sum of function(x) over the rows x of `xs`, added from the first to the last."""
  function, shapes = traced(function, xs[0])

  def add(total, x):
    return jax.tree.map(jnp.add, total, function(x)), None

  return lax.scan(add, zeros(shapes), xs)[0]


def make_gradient(objective: Objective, sizes: Sizes, mesh_size: int = 1, exact: bool = True
                  ) -> Callable:
  """Builds the function that computes a minibatch's gradient, on one device of a mesh.

  The gradient of a group has the same shapes on any mesh. If `exact`, the groups are added in a
  fixed order, and the result does not depend on the number of devices.

  Args:
    objective: the algorithm with its network.
    sizes: numbers that the arithmetic of an update depends on.
    mesh_size: devices of the mesh.
    exact: True: groups are added in one fixed order; False: by XLA's all-reduce.

  Returns:
    gradient(params, rollout, targets, elements) -> (grads, loss_terms), summed over the groups of
    all devices. See `make_group_gradients` for the arguments.
  """
  groups = sizes.groups(mesh_size, exact)
  gradients = make_group_gradients(objective, sizes, groups)
  return lambda *args: groups.total(gradients(*args))


def make_update(optimizer: optax.GradientTransformation, learning_rate: Callable) -> Callable:
  """Builds the function that applies a gradient.

  Args:
    optimizer: turns gradients into changes of the parameters. Its update gets the mean approximate
      KL divergence of the minibatch as the extra argument `kl`.
    learning_rate: valid steps learned from so far -> factor of the changes.

  Returns:
    update(state, grads, loss_terms) -> (state, norm of the gradient before clipping).
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def unchanged(params, opt_state, steps, grads, loss_terms):
    """Takes no step; see `islands.island` for why this branch returns its arguments.

    Args:
      params: returned.
      opt_state: returned.
      steps: unused.
      grads: unused.
      loss_terms: unused.
    """
    del steps, grads, loss_terms
    return params, opt_state, jnp.zeros(())

  @island('update', skipped=unchanged)
  def step(params, opt_state, steps, grads, loss_terms):
    """Takes one step of the optimizer.

    Args:
      params: the parameters.
      opt_state: the optimizer's state.
      steps: [] i32, valid steps learned from so far.
      grads: the gradient by `params`.
      loss_terms: sums over the minibatch; 'valid' is the number of valid rows.

    Returns:
      The parameters, the optimizer's state, and the norm of the gradient before clipping [] f32.
    """
    # Loss terms are sums. A minibatch without valid rows must not divide by zero.
    kl = loss_terms.get('approx_kl', 0.0) / jnp.maximum(loss_terms['valid'], 1.0)
    change, opt_state = optimizer.update(grads, opt_state, params, kl=kl)
    rate = learning_rate(steps)
    params = jax.tree.map(lambda p, c: p - rate * c, params, change)
    return params, opt_state, optax.tree.norm(grads)

  def update(state: TrainState, grads: Params, loss_terms: Metrics) -> tuple[TrainState, jax.Array]:
    chex.assert_trees_all_equal_shapes(state.params, grads)
    params, opt_state, norm = step(state.params, state.opt_state, state.steps, grads, loss_terms)
    return state._replace(params=params, opt_state=opt_state), norm

  return update


def _minibatch_indices(key: jax.Array, sizes: Sizes, objective: Objective, groups: Groups
                       ) -> jax.Array:
  """Returns the elements of each minibatch and group.

  The permutation of a group depends on the group's index among all groups, not on the mesh.

  Args:
    key: the update's key.
    sizes: numbers that the arithmetic of an update depends on.
    objective: decides whether an epoch shuffles, and how many elements an environment has.
    groups: the groups of environments, seen from this device.

  Returns:
    [epochs * minibatches, local, n] i32.
  """
  count = sizes.num_envs // sizes.num_grad_shards * objective.elements_per_env

  def permutation(epoch, group):
    if not objective.algorithm.shuffles:
      return jnp.arange(count)
    group_key = jax.random.fold_in(jax.random.fold_in(key, epoch), group)
    return jax.random.permutation(group_key, count)

  by_group = jax.vmap(permutation, in_axes=(None, 0))
  by_epoch = jax.vmap(by_group, in_axes=(0, None))
  indices = by_epoch(jnp.arange(sizes.num_epochs), groups.numbers())

  # [epochs, local, elements] -> [epochs, minibatches, local, n]
  indices = indices.reshape(sizes.num_epochs, groups.local, sizes.num_minibatches, -1)
  indices = indices.transpose(0, 2, 1, 3)
  return indices.reshape(-1, groups.local, indices.shape[-1])


class Prepared(NamedTuple):
  """Inputs that all gradient steps of an update share, on one device of the mesh."""

  rollout: Rollout  # [T, B], with scaled rewards if the experiment normalises them; no episodes
  targets: Any  # targets of the objective, [T, B]
  minibatch_indices: jax.Array  # [steps, local groups, n] i32: the elements of each minibatch
  batch_stats: Metrics  # 'batch' (fingerprint), 'valid', 'moments' and 'episodes'


def make_prepare(objective: Objective, sizes: Sizes, mesh_size: int = 1, exact: bool = True
                 ) -> Callable:
  """Builds the function that prepares an update, on one device of a mesh.

  Args:
    objective: the algorithm with its network.
    sizes: numbers that the arithmetic of an update depends on.
    mesh_size: devices of the mesh.
    exact: True: statistics are added in one fixed order; False: by XLA's all-reduce.

  Returns:
    prepare(params, key, rollout) -> Prepared. `key` is the update's (`update_key`), and `rollout`
    [T, B] is of this device's environments.
  """
  groups = sizes.groups(mesh_size, exact)
  targets_of_group = island('targets')(objective.targets)

  def make_targets(params: Params, rollout: Rollout):
    inputs = objective.target_inputs(rollout)

    # One group at a time, since an island's shapes must not depend on the mesh.
    def group_targets(first_env):
      envs = first_env + jnp.arange(groups.envs)
      group_inputs = jax.tree.map(lambda x: indexing.read(x, slice(None), envs), inputs)
      return targets_of_group(params, group_inputs)

    first_envs = jnp.arange(groups.local) * groups.envs
    return groups.join(groups.map(group_targets, first_envs))

  def prepare(params: Params, key: jax.Array, rollout: Rollout) -> Prepared:
    chex.assert_shape(rollout.reward, (None, groups.local * groups.envs))
    chex.assert_equal_shape([rollout.reward, rollout.terminated, rollout.truncated, rollout.valid])
    chex.assert_type([rollout.terminated, rollout.truncated, rollout.valid], bool)
    batch = rollout._replace(episodes=None)

    # The fingerprint is computed before rewards are scaled, so it identifies the actors' data.
    batch_fingerprint, valid = groups.total_of_integers((
        fingerprint(batch, 1, groups.first_env(), sizes.num_envs),
        jnp.sum(batch.valid, dtype=jnp.int32)))

    scaled, return_moments = running_moments.scale_rewards(params, batch, groups)
    targets = make_targets(params, scaled)
    moments = running_moments.observe(params, batch, targets, groups) | return_moments
    return Prepared(
        rollout=scaled,
        targets=targets,
        minibatch_indices=_minibatch_indices(key, sizes, objective, groups),
        batch_stats=dict(batch=batch_fingerprint, valid=valid, moments=moments,
                         episodes=rollout.episodes))

  return prepare


def update_key(state: TrainState) -> jax.Array:
  """Returns the PRNG key of the update that begins from `state`."""
  return jax.random.fold_in(state.key, state.update)


def finish(state: TrainState, batch_stats: Metrics, steps: tuple[Metrics, jax.Array],
           learning_rate: Callable) -> tuple[TrainState, Metrics]:
  """Ends an update: counts it, merges running moments and computes metrics.

  Args:
    state: after the last gradient step.
    batch_stats: statistics of the update's rollout, see `Prepared`.
    steps: loss terms, each [steps], and gradient norms [steps] f32.
    learning_rate: the schedule; see `make_learn`.

  Returns:
    The next state, and metrics: means of the loss terms over valid rows of all gradient steps,
    `grad_norm` before clipping, `param_norm`, `learning_rate`, `valid` rows, the `batch` and
    `params` fingerprints, the rollout's episodes, and `finite` (see `finite_parts`).
  """
  chex.assert_rank(steps[1], 1)
  chex.assert_equal_shape_prefix([*jax.tree.leaves(steps[0]), steps[1]], 1)

  @island('metrics')
  def means(loss_terms, grad_norm, weights, kl_factor, steps):
    """Returns the metrics that need arithmetic with rounding.

    Args:
      loss_terms: [gradient steps] each, sums over the valid rows of a minibatch.
      grad_norm: [gradient steps] f32.
      weights: the parameters without running moments.
      kl_factor: [] f32, the optimizer's adaptive factor of the learning rate.
      steps: [] i32, valid steps learned from before this update.
    """
    loss_terms = jax.tree.map(jnp.sum, loss_terms)
    rows = jnp.maximum(loss_terms.pop('valid'), 1.0)
    return {name: total / rows for name, total in loss_terms.items()} | dict(
        grad_norm=jnp.mean(grad_norm), param_norm=optax.tree.norm(weights),
        learning_rate=learning_rate(steps) * kl_factor)

  metrics = means(*steps, running_moments.weights(state.params),
                  optax.tree.get(state.opt_state, 'kl_factor', jnp.float32(1.0)), state.steps)
  # Moments change at the end: all steps of an update normalise by the statistics before it.
  state = state._replace(params=running_moments.add(state.params, batch_stats['moments']),
                         update=state.update + 1, steps=state.steps + batch_stats['valid'])
  return state, metrics | dict(
      valid=batch_stats['valid'], update=state.update, steps=state.steps,
      batch=batch_stats['batch'], params=fingerprint(state.params),
      episodes=batch_stats['episodes'], finite=finite_parts(state))


def finite_parts(state: TrainState) -> Metrics:
  """Returns whether parts of a train state are finite that no loss shows, as scalar bools by name.

  A number whose square overflows makes running moments, or an optimizer's, infinite. Everything
  divided by them is 0 then, and the run learns nothing more without a NaN in any loss.
  """
  def is_finite(x: jax.Array) -> jax.Array:
    # A scalar of an optimizer, such as its best loss so far, may begin as infinity.
    return ~jnp.any(jnp.isnan(x)) if x.ndim == 0 else jnp.all(jnp.isfinite(x))

  def all_finite(tree: Any) -> jax.Array:
    numbers = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([is_finite(x) for x in numbers])) if numbers else jnp.bool_(True)

  return dict(moments=all_finite(running_moments.moments_of(state.params)),
              optimizer=all_finite(state.opt_state))


def fuse(prepare: Callable, gradient: Callable, update: Callable, learning_rate: Callable):
  """Builds the function of a whole update, all epochs and minibatches in one scan.

  Args:
    prepare: the function that `make_prepare` returned.
    gradient: the function that `make_gradient` returned.
    update: the function that `make_update` returned.
    learning_rate: the schedule; see `make_learn`.

  Returns:
    learn(state, rollout) -> (state, metrics), on one device of a mesh. `rollout` [T, B] is of this
    device's environments.
  """

  def learn(state: TrainState, rollout: Rollout) -> tuple[TrainState, Metrics]:
    prepared = prepare(state.params, update_key(state), rollout)

    def step(state, elements):
      with jax.named_scope('gradient'):
        grads, loss_terms = gradient(state.params, prepared.rollout, prepared.targets, elements)
      with jax.named_scope('update'):
        state, grad_norm = update(state, grads, loss_terms)
      return state, (loss_terms, grad_norm)

    state, steps = lax.scan(step, state, prepared.minibatch_indices)
    return finish(state, prepared.batch_stats, steps, learning_rate)

  return learn


def make_learn(objective: Objective, optimizer: optax.GradientTransformation,
               learning_rate: Callable, sizes: Sizes, mesh_size: int = 1, exact: bool = True):
  """Builds the function of a whole update from an objective; see `fuse`.

  Args:
    objective: the algorithm with its network.
    optimizer: turns gradients into changes of the parameters.
    learning_rate: valid steps learned from so far -> factor of the optimizer's output.
    sizes: numbers that the arithmetic of an update depends on.
    mesh_size: devices of the mesh.
    exact: True: gradients are added in one fixed order; False: by XLA's all-reduce.

  Returns:
    learn(state, rollout) -> (state, metrics), on one device of a mesh.
  """
  return fuse(make_prepare(objective, sizes, mesh_size, exact),
              make_gradient(objective, sizes, mesh_size, exact),
              make_update(optimizer, learning_rate), learning_rate)


def make_fused(rollout, learn, calls: int):
  """Builds a function that alternates rollouts and updates in one program.

  Args:
    rollout: (params, actor_state) -> (actor_state, rollouts).
    learn: (state, rollout) -> (state, metrics).
    calls: updates that the arrays of metrics have room for.

  Returns:
    fused(state, actor_state, limit, total_steps) -> (state, actor_state, count, metrics). It makes
    `count` updates: `limit`, or fewer if `total_steps` valid steps are reached. The first `count`
    rows of the metrics [calls, ...] are set. `limit` must not exceed `calls`.
  """

  def once(state, actor_state):
    with jax.named_scope('rollout'):
      actor_state, rollouts = rollout(state.params, actor_state)
    with jax.named_scope('learn'):
      state, metrics = learn(state, concatenate(rollouts))
    return state, actor_state, metrics

  def fused(state, actor_state, limit, total_steps):
    """Makes up to `limit` updates.

    Args:
      state: the train state.
      actor_state: the actor's state.
      limit: [] i32, most updates, at most `calls`.
      total_steps: [] i32, valid steps after which no update begins.

    Returns:
      The train state, the actor's state, the number of updates [] i32, and metrics [calls, ...].
    """
    make_one, (_, _, shapes) = traced(once, state, actor_state)
    # A while_loop cannot stack results, so metrics are written into arrays allocated before it.
    buffers = jax.tree.map(lambda s: jnp.zeros((calls, *s.shape), s.dtype), shapes)

    def goes_on(carry):
      state, _, count, _ = carry
      return (count < limit) & (state.steps < total_steps)

    def body(carry):
      state, actor_state, count, buffers = carry
      state, actor_state, metrics = make_one(state, actor_state)
      buffers = jax.tree.map(
          lambda buffer, x: indexing.write_row(buffer, x, count), buffers, metrics)
      return state, actor_state, count + 1, buffers

    return lax.while_loop(goes_on, body, (state, actor_state, jnp.int32(0), buffers))

  return fused


def concatenate(rollouts: tuple[Rollout, ...]) -> Rollout:
  """Concatenates rollouts [T, B_i] of vector environments to one [T, B_1 + B_2 + ...]."""
  chex.assert_equal_shape([rollout.reward for rollout in rollouts], dims=0)
  if len(rollouts) == 1:
    return rollouts[0]
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *rollouts)
