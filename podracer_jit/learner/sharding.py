"""G and U compiled for their meshes: fused into one program, or apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from podracer_jit.learner import replay_updates, rollout_updates
from podracer_jit.losses.objective import Objective
from podracer_jit.numerics.deterministic import AXIS, branches, pairwise_sum
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.types import Experience, Metrics, Params, Rollout, TrainState

EVERYWHERE, BY_ENV, BY_GROUP = PartitionSpec(), PartitionSpec(None, AXIS), PartitionSpec(AXIS)
STATE = TrainState(*[EVERYWHERE] * len(TrainState._fields))._replace(replay=BY_GROUP)


def _all_episodes(seen: Metrics) -> Metrics:
  return seen | dict(episodes=jax.lax.all_gather(seen['episodes'], AXIS, axis=1, tiled=True))


def fused_learner(learn: Callable, mesh: Mesh) -> Callable:
  """learn over the whole mesh: state replicated and donated, rollouts cut by environment."""

  def whole(state, rollout):
    state, metrics = learn(state, rollout)
    return state, _all_episodes(metrics)

  def learner(state, rollout):
    state, metrics = jax.shard_map(
        whole, mesh=mesh, in_specs=(STATE, BY_ENV), out_specs=(STATE, EVERYWHERE),
        check_vma=False)(state, rollout)
    return state, jax.tree.map(lambda x: x[None], metrics)  # a report of one update

  return jax.jit(learner, donate_argnums=0)


class GradientPrograms(NamedTuple):
  """G of one worker, apart from U, on the worker's mesh."""

  mesh: Mesh
  prepare: Callable  # (params, key, rollout) -> Prepared
  gradient: Callable  # (params, Prepared, step) -> sums of groups, [n, ...] each


def gradient_programs(objective: Objective, sizes: rollout_updates.Sizes, mesh: Mesh
                      ) -> GradientPrograms:
  """For a worker whose share of an experiment has these sizes."""
  prepare = rollout_updates.make_prepare(objective, sizes, mesh.size)
  gradients = rollout_updates.make_group_gradients(objective, sizes, sizes.groups(mesh.size))

  def prepare_all(params: Params, key: jax.Array, rollout: Rollout):
    made = prepare(params, key, rollout)
    return made._replace(seen=_all_episodes(made.seen))

  def gradient_of(params: Params, prepared: rollout_updates.Prepared, step: jax.Array):
    return branches(gradients(params, prepared.rollout, prepared.targets, prepared.orders[step]))

  prepared = rollout_updates.Prepared(BY_ENV, BY_ENV, BY_ENV, EVERYWHERE)
  return GradientPrograms(mesh, *(
      jax.jit(jax.shard_map(function, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False))
      for function, takes, gives in (
          (prepare_all, (EVERYWHERE, EVERYWHERE, BY_ENV), prepared),
          (gradient_of, (EVERYWHERE, prepared, EVERYWHERE), PartitionSpec(AXIS)))))


class UpdatePrograms(NamedTuple):
  """U, apart from G, on one device."""

  step: Callable  # (state, sums of groups) -> (state, (terms, gradient's norm)); donates the state
  finish: Callable  # (state, seen of Prepared, [what step gave]) -> (state, metrics); donates it


def update_programs(optimizer: optax.GradientTransformation,
                    learning_rate: Callable) -> UpdatePrograms:
  """For gradients of any number of groups."""
  update = rollout_updates.make_update(optimizer, learning_rate)

  def step(state: TrainState, groups: Any):
    grads, terms = jax.tree.map(pairwise_sum, groups)
    state, grad_norm = update(state, grads, terms)
    return state, (terms, grad_norm)

  def finish(state: TrainState, seen: Metrics, steps: list):
    steps = jax.tree.map(lambda *x: jnp.stack(x), *steps)
    state, metrics = rollout_updates.finish(state, seen, steps, learning_rate)
    return state, jax.tree.map(lambda x: x[None], metrics)  # a report of one update

  return UpdatePrograms(jax.jit(step, donate_argnums=0), jax.jit(finish, donate_argnums=0))


class ReplayPrograms(NamedTuple):
  """What a learner does whose rollouts come as they come; both donate the state."""

  # (state, experience of some groups, the first of these) -> (state, (valid rows, fingerprint))
  insert: Callable
  # (state, gradient steps to make if there is enough to draw from, sums of what insert gave)
  #   -> (state, metrics)
  learn: Callable


def replay_programs(insert: Callable, steps: Callable, finish: Callable,
                    sizes: replay_updates.Sizes, mesh: Mesh) -> ReplayPrograms:
  """For experience that is on every device of the mesh; each keeps what is of its groups."""
  groups, envs = sizes.num_grad_shards // mesh.size, sizes.num_envs // sizes.num_grad_shards

  def insert_here(state: TrainState, experience: Experience, first_group: jax.Array):
    here = first_group - jax.lax.axis_index(AXIS) * groups
    state, valid = insert(state, experience, here)
    batch = fingerprint(experience._replace(episodes=()), 1, first_group * envs, sizes.num_envs)
    return state, (valid, batch)

  def learn(state: TrainState, count: jax.Array, valid: jax.Array, batch: jax.Array):
    count = jnp.where(replay_updates.ready(state, sizes, mesh.size), count, 0)
    state, sums = steps(state, count)
    state, metrics = finish(state, count, sums, valid, batch)
    return state, jax.tree.map(lambda x: x[None], metrics)  # a report of one update

  return ReplayPrograms(*(
      jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(STATE, *[EVERYWHERE] * others),
                            out_specs=(STATE, EVERYWHERE), check_vma=False), donate_argnums=0)
      for function, others in ((insert_here, 2), (learn, 3))))
