"""Gradients (G) and updates (U) compiled for their meshes, in one program or in two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from podracer_jit.learner import replay_updates, rollout_updates
from podracer_jit.losses.objective import Objective
from podracer_jit.numerics.deterministic import AXIS, pairwise_sum, partial_sums
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.types import Experience, Metrics, Params, Rollout, TrainState

EVERYWHERE = PartitionSpec()
BY_ENV = PartitionSpec(None, AXIS)
BY_GROUP = PartitionSpec(AXIS)
BY_DEVICE = PartitionSpec(AXIS)
# The train state is replicated, except for the replay.
STATE = TrainState(*[EVERYWHERE] * len(TrainState._fields))._replace(replay=BY_GROUP)


def _all_episodes(batch_stats: Metrics) -> Metrics:
  """Returns the metrics with the episodes [T, B] of all devices' environments."""
  episodes = jax.lax.all_gather(batch_stats['episodes'], AXIS, axis=1, tiled=True)
  return batch_stats | dict(episodes=episodes)


def fused_learner(learn: Callable, mesh: Mesh) -> Callable:
  """Returns `learn` compiled for the whole mesh.

  Args:
    learn: (state, rollout) -> (state, metrics), on one device of the mesh.
    mesh: the mesh of the learner.

  Returns:
    learner(state, rollout) -> (state, metrics). The state is replicated (its replay sharded by
    group) and donated, the rollout sharded by environment. Metrics have a leading axis [1] of
    updates.
  """

  def whole(state, rollout):
    state, metrics = learn(state, rollout)
    return state, _all_episodes(metrics)

  def learner(state, rollout):
    state, metrics = jax.shard_map(
        whole, mesh=mesh, in_specs=(STATE, BY_ENV), out_specs=(STATE, EVERYWHERE),
        check_vma=False)(state, rollout)
    return state, _add_update_axis(metrics)

  return jax.jit(learner, donate_argnums=0)


def fused_program(rollout: Callable, learn: Callable, calls: int, mesh: Mesh) -> Callable:
  """Returns `rollout_updates.make_fused` of a whole mesh, to be jitted.

  Args:
    rollout: (params, actor_state) -> (actor_state, rollouts), of one device's environments.
    learn: (state, rollout) -> (state, metrics), on one device of the mesh.
    calls: updates that the arrays of metrics have room for.
    mesh: the mesh of the learner.

  Returns:
    The function of `make_fused`. Its train state is replicated; its actor state has a leading axis
    of devices, which is sharded.
  """
  def learn_whole(state, rollouts):
    state, metrics = learn(state, rollouts)
    return state, _all_episodes(metrics)

  fused = rollout_updates.make_fused(rollout, learn_whole, calls)

  def on_device(state, actor_state, limit, total_steps):
    """Runs `fused` on one device, whose actor state has a leading axis [1]; see `make_fused`.

    Args:
      state: the train state.
      actor_state: the state of this device's environments, [1, ...] each.
      limit: [] i32, most updates.
      total_steps: [] i32, valid steps after which no update begins.
    """
    actor_state = jax.tree.map(lambda x: x[0], actor_state)
    state, actor_state, count, metrics = fused(state, actor_state, limit, total_steps)
    return state, jax.tree.map(lambda x: x[None], actor_state), count, metrics

  return jax.shard_map(
      on_device, mesh=mesh, in_specs=(STATE, BY_DEVICE, EVERYWHERE, EVERYWHERE),
      out_specs=(STATE, BY_DEVICE, EVERYWHERE, EVERYWHERE), check_vma=False)


def _add_update_axis(metrics: Metrics) -> Metrics:
  """Returns the metrics with a leading axis [1] of updates, as a report has them."""
  return jax.tree.map(lambda x: x[None], metrics)


class GradientPrograms(NamedTuple):
  """Compiled gradient functions of one worker that computes no updates."""

  mesh: Mesh
  prepare: Callable  # (params, key, rollout) -> Prepared, once an update
  gradient: Callable  # (params, Prepared, step) -> (grads, loss_terms), partial sums [n, ...]


def gradient_programs(objective: Objective, sizes: rollout_updates.Sizes, mesh: Mesh
                      ) -> GradientPrograms:
  """Compiles the gradient functions of a worker.

  Args:
    objective: the algorithm with its network.
    sizes: sizes of the worker's share of the experiment.
    mesh: the mesh of the worker.

  Returns:
    The programs of `GradientPrograms`.
  """
  prepare = rollout_updates.make_prepare(objective, sizes, mesh.size)
  gradients = rollout_updates.make_group_gradients(objective, sizes, sizes.groups(mesh.size))

  def prepare_all(params: Params, key: jax.Array, rollout: Rollout):
    prepared = prepare(params, key, rollout)
    return prepared._replace(batch_stats=_all_episodes(prepared.batch_stats))

  def gradient_of(params: Params, prepared: rollout_updates.Prepared, step: jax.Array):
    chex.assert_rank(step, 0)
    # Partial sums are fewer bytes to send to the parameter server than the gradients of all groups.
    indices = prepared.minibatch_indices[step]
    return partial_sums(gradients(params, prepared.rollout, prepared.targets, indices))

  def compiled(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs,
                                 check_vma=False))

  # `minibatch_indices` has its groups on the second axis, like the environments of arrays [T, B].
  prepared_specs = rollout_updates.Prepared(
      rollout=BY_ENV, targets=BY_ENV, minibatch_indices=BY_ENV, batch_stats=EVERYWHERE)
  return GradientPrograms(
      mesh,
      prepare=compiled(prepare_all, (EVERYWHERE, EVERYWHERE, BY_ENV), prepared_specs),
      gradient=compiled(gradient_of, (EVERYWHERE, prepared_specs, EVERYWHERE), BY_GROUP))


class UpdatePrograms(NamedTuple):
  """Compiled update functions of one device that computes no gradients; both donate the state."""

  # (state, partial sums of (grads, loss_terms)) -> (state, (loss_terms, grad_norm))
  step: Callable
  # (state, Prepared.batch_stats, [second result of each step]) -> (state, metrics)
  finish: Callable


def update_programs(optimizer: optax.GradientTransformation,
                    learning_rate: Callable) -> UpdatePrograms:
  """Compiles the update functions, for gradients of any number of groups.

  Args:
    optimizer: turns gradients into changes of the parameters.
    learning_rate: valid steps learned from so far -> factor of the changes.

  Returns:
    The programs of `UpdatePrograms`.
  """
  update = rollout_updates.make_update(optimizer, learning_rate)

  def step(state: TrainState, groups: Any):
    chex.assert_equal_shape(jax.tree.leaves(groups), dims=0)
    grads, loss_terms = jax.tree.map(pairwise_sum, groups)
    state, grad_norm = update(state, grads, loss_terms)
    return state, (loss_terms, grad_norm)

  def finish(state: TrainState, batch_stats: Metrics, steps: list):
    steps = jax.tree.map(lambda *x: jnp.stack(x), *steps)
    state, metrics = rollout_updates.finish(state, batch_stats, steps, learning_rate)
    return state, _add_update_axis(metrics)

  return UpdatePrograms(jax.jit(step, donate_argnums=0), jax.jit(finish, donate_argnums=0))


class ReplayPrograms(NamedTuple):
  """Compiled functions of a learner whose experience arrives at any time; both donate the state."""

  # (state, experience of some groups, index of the first of them)
  #   -> (state, (valid rows, fingerprint of the experience))
  insert: Callable
  # (state, gradient steps, sum of valid rows, sum of fingerprints) -> (state, metrics)
  # It takes no gradient steps before the replay has the minimal number of transitions.
  learn: Callable


def replay_programs(insert: Callable, steps: Callable, finish: Callable,
                    sizes: replay_updates.Sizes, mesh: Mesh) -> ReplayPrograms:
  """Compiles adding and learning as separate programs.

  Every device of the mesh gets all experience, and keeps the part of its own groups.

  Args:
    insert: the function that `replay_updates.make_insert` returned.
    steps: the function that `replay_updates.make_steps` returned.
    finish: the function that `replay_updates.make_finish` returned.
    sizes: numbers that the arithmetic of an update depends on.
    mesh: the mesh of the learner.

  Returns:
    The programs of `ReplayPrograms`.
  """
  groups = sizes.num_grad_shards // mesh.size
  envs = sizes.num_envs // sizes.num_grad_shards

  def insert_own(state: TrainState, experience: Experience, first_group: jax.Array):
    chex.assert_rank(first_group, 0)
    # Relative to the groups of this device; `insert` ignores groups outside of [0, groups).
    relative = first_group - jax.lax.axis_index(AXIS) * groups
    state, valid = insert(state, experience, relative)
    batch = fingerprint(experience._replace(episodes=None), 1, first_group * envs, sizes.num_envs)
    return state, (valid, batch)

  def learn(state: TrainState, count: jax.Array, valid: jax.Array, batch: jax.Array):
    """Takes gradient steps and ends the update.

    Args:
      state: with a replay.
      count: [] i32, gradient steps.
      valid: [] i32, valid rows added since the previous call.
      batch: [2] u32, sum of the fingerprints of the experience that was added.
    """
    chex.assert_rank([count, valid], 0)
    chex.assert_shape(batch, (2,))
    count = jnp.where(replay_updates.ready(state, sizes, mesh.size), count, 0)
    state, sums = steps(state, count)
    state, metrics = finish(state, count, sums, valid, batch)
    return state, _add_update_axis(metrics)

  def compiled(function: Callable, replicated_args: int) -> Callable:
    in_specs = (STATE, *[EVERYWHERE] * replicated_args)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=(STATE, EVERYWHERE),
                            check_vma=False)
    # Without donation every call would copy the replay.
    return jax.jit(sharded, donate_argnums=0)

  return ReplayPrograms(insert=compiled(insert_own, replicated_args=2),
                        learn=compiled(learn, replicated_args=3))
