"""Gradients (G) and updates (U) on transitions drawn from a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit.learner import rollout_updates
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.numerics.tracing import traced, zeros
from podracer_jit.replay import buffer, tree
from podracer_jit.types import Experience, Metrics, Params, Target, TrainState, Transition

# `losses.algorithm.ReplayAlgorithm.loss` of a network:
# (params, target params, batch [n, ...], weight [n])
#   -> (loss, (sums of loss terms, |TD error| [n]))
Loss = Callable[[Params, Params, Transition, jax.Array],
                tuple[jax.Array, tuple[Metrics, jax.Array]]]


class Sizes(NamedTuple):
  """Numbers that the arithmetic of an update depends on; all are part of the experiment."""

  num_envs: int  # on all devices
  num_grad_shards: int  # groups of environments, each with a replay
  batch_size: int  # transitions in a gradient step, from all groups together
  gradient_steps: int  # in an update
  min_size: int  # transitions in the replay before the first gradient step
  target_every: int  # gradient steps between copies to the target network
  importance_exponent: float  # beta of prioritised replay (1511.05952)
  microbatch_rows: int  # most rows in one pass of the network; 0: a group's whole batch

  def groups(self, mesh_size: int = 1, exact: bool = True) -> Groups:
    """Returns the groups of environments, seen from one device of a mesh of this size."""
    return Groups(self.num_grad_shards, self.num_envs // self.num_grad_shards, mesh_size, exact)


def make_steps(loss: Loss, memory: buffer.Replay, update: Callable, sizes: Sizes,
               mesh_size: int = 1, exact: bool = True) -> Callable:
  """Builds the function of an update's gradient steps, on one device of a mesh.

  Each step draws a batch, updates the parameters and sets new priorities of the drawn transitions.

  Args:
    loss: see `Loss`.
    memory: functions of the replay of each group.
    update: the function that `rollout_updates.make_update` returned.
    sizes: numbers that the arithmetic of an update depends on.
    mesh_size: devices of the mesh.
    exact: True: gradients are added in one fixed order; False: by XLA's all-reduce.

  Returns:
    steps(state, count) -> (state, sums), which takes `count` gradient steps. `sums` over the steps
    are 'loss_terms', 'grad_norm' and 'sampled_age' (gradient steps between a transition's
    addition and its use).
  """
  groups = sizes.groups(mesh_size, exact)
  # Every group draws an equal part of the batch.
  group_batch = sizes.batch_size // sizes.num_grad_shards

  @island('importance_weights')
  def weights(probability, least):
    """Returns importance weights (N P)^-beta over their maximum (1511.05952, section 3.4).

    N and the number of groups cancel.
    """
    # An empty replay has probabilities of zero; its draws are not learned from.
    return jnp.power(least / jnp.maximum(probability, 1e-30), sizes.importance_exponent)

  @island('gradient')
  def microbatch_gradient(params, target_params, batch, weight):
    """Returns the gradient of a microbatch's part of the mean loss.

    Args:
      params: the parameters to differentiate.
      target_params: parameters of the target network.
      batch: transitions [n, ...].
      weight: [n] f32, importance weights.

    Returns:
      (gradient, sums of loss terms), and |TD error| [n] f32.
    """
    def mean_loss(params):
      total, (loss_terms, error) = loss(params, target_params, batch, weight)
      # Divided by the batch size of all groups, so that the sum over groups is the mean.
      return total / sizes.batch_size, (loss_terms, error)

    gradient, (loss_terms, error) = jax.grad(mean_loss, has_aux=True)(params)
    return (gradient, loss_terms), error

  def group_gradient(params, target_params, batch, weight):
    """Returns the gradient of a group's part of the batch, see `microbatch_gradient`.

    The batch is split into microbatches, whose gradients are added in order.

    Args:
      params: the parameters to differentiate.
      target_params: parameters of the target network.
      batch: transitions [group_batch, ...].
      weight: [group_batch] f32, importance weights.
    """
    count = rollout_updates.num_microbatches(group_batch, 1, sizes.microbatch_rows)
    microbatches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), (batch, weight))

    def gradient(microbatch):
      return microbatch_gradient(params, target_params, *microbatch)

    gradient, (shapes, _) = traced(gradient, jax.tree.map(lambda x: x[0], microbatches))

    def add(total, microbatch):
      sums, error = gradient(microbatch)
      return jax.tree.map(jnp.add, total, sums), error

    total, error = lax.scan(add, zeros(shapes), microbatches)
    return total, error.reshape(-1)

  @island('sampled_age')
  def sum_of_ages(added, gradient_steps):
    return jnp.sum((gradient_steps - added).astype(jnp.float32))

  def step(state, key):
    with jax.named_scope('storing'):
      drawn = memory.sample(state.replay, _group_keys(key, groups), group_batch)
      # The largest weight of the whole batch belongs to the smallest probability.
      least = groups.smallest(drawn.probability)
      weight = groups.map(lambda p: weights(p, least), drawn.probability)

    with jax.named_scope('gradient'):
      sums, error = groups.map(
          lambda *group: group_gradient(state.params, state.target.params, *group),
          drawn.transition, weight)
      grads, loss_terms = groups.total(sums)

    # The clock of a replay is the number of gradient steps so far.
    clock = state.target.gradient_steps
    age = groups.total(groups.map(lambda added: sum_of_ages(added, clock), drawn.transition.added))

    with jax.named_scope('update'):
      state, grad_norm = update(state, grads, loss_terms)
      copies_target = (clock + 1) % sizes.target_every == 0
      target = lax.cond(copies_target, lambda params, target: params,
                        lambda params, target: target, state.params, state.target.params)

    with jax.named_scope('storing'):
      replay = memory.set_priorities(state.replay, drawn.place, error)
    return (state._replace(target=Target(target, clock + 1), replay=replay),
            dict(loss_terms=loss_terms, grad_norm=grad_norm, sampled_age=age))

  def steps(state: TrainState, count: jax.Array):
    chex.assert_rank(count, 0)
    key = _key(state, 0)
    one_step, (_, shapes) = traced(step, state, key)

    def body(i, carry):
      state, sums = carry
      state, results = one_step(state, jax.random.fold_in(key, i))
      return state, jax.tree.map(jnp.add, sums, results)

    # The number of steps is data: it is 0 until the replay has enough transitions.
    return lax.fori_loop(0, count, body, (state, zeros(shapes)))

  return steps


def _key(state: TrainState, stream: int) -> jax.Array:
  """Returns a key of this update: stream 0 is for sampling, stream 1 for eviction."""
  return jax.random.fold_in(rollout_updates.update_key(state), stream)


def _group_keys(key: jax.Array, groups: Groups) -> jax.Array:
  """Returns a key for each group of this device, [local], that does not depend on the mesh."""
  return jax.vmap(lambda group: jax.random.fold_in(key, group))(groups.numbers())


def make_insert(memory: buffer.Replay, sizes: Sizes, mesh_size: int = 1):
  """Builds the function that adds experience to the replay, on one device of a mesh.

  Args:
    memory: functions of the replay of each group.
    sizes: numbers that the arithmetic of an update depends on.
    mesh_size: devices of the mesh.

  Returns:
    insert(state, experience, first_group) -> (state, number of valid rows). `experience` [T, B]
    consists of whole groups; the first of them has index `first_group` among the groups of this
    device. Groups outside of this device are ignored, but their valid rows are counted.
  """
  groups = sizes.groups(mesh_size)

  @jax.named_scope('storing')
  def insert(state: TrainState, experience: Experience, first_group: jax.Array):
    chex.assert_rank(first_group, 0)
    chex.assert_equal_shape([experience.reward, experience.valid, experience.priority])
    experience = experience._replace(episodes=None)
    count = experience.reward.shape[1] // groups.envs
    group = first_group + jnp.arange(count)
    # `add` drops groups with an index out of range. A negative index would count from the end.
    group = jnp.where((group >= 0) & (group < groups.local), group, groups.local)
    by_group = Groups(count, groups.envs).split(experience)
    keys = _group_keys(_key(state, 1), groups)
    # An update may add several times, and each addition needs keys of its own.
    keys = jax.vmap(jax.random.fold_in)(keys, state.replay.inserted)
    replay = memory.add(state.replay, group, by_group, keys, state.target.gradient_steps)
    return state._replace(replay=replay), jnp.sum(experience.valid, dtype=jnp.int32)

  return insert


def ready(state: TrainState, sizes: Sizes, mesh_size: int = 1) -> jax.Array:
  """Returns whether every group has received its share of `sizes.min_size` transitions.

  Args:
    state: with a replay.
    sizes: numbers that the arithmetic of an update depends on.
    mesh_size: devices of the mesh.

  Returns:
    A scalar bool, equal on all devices.
  """
  smallest = sizes.groups(mesh_size).smallest(state.replay.inserted)
  return smallest * sizes.num_grad_shards >= sizes.min_size


def make_finish(sizes: Sizes, learning_rate: Callable, mesh_size: int = 1):
  """Builds the function that ends an update, on one device of a mesh.

  Args:
    sizes: numbers that the arithmetic of an update depends on.
    learning_rate: valid steps learned from so far -> rate, for the metrics.
    mesh_size: devices of the mesh.

  Returns:
    finish(state, count, sums, valid, batch) -> (state, metrics). `count` gradient steps gave
    `sums`; `valid` rows were added, with the fingerprint `batch` [2] uint32. Loss terms and ages
    are means over the drawn transitions, and 0 if none were drawn.
  """
  groups = sizes.groups(mesh_size)

  @island('metrics')
  def means(sums, count, params, steps_before, steps, gradient_steps):
    """Returns the metrics that need arithmetic with rounding.

    Args:
      sums: the sums that the function of `make_steps` returned.
      count: [] i32, gradient steps of this update.
      params: after the update.
      steps_before: [] i32, valid steps added before this update.
      steps: [] i32, valid steps added until the end of this update.
      gradient_steps: [] i32, gradient steps since the beginning.
    """
    # Without gradient steps all sums are 0, and so must be the means.
    drawn = jnp.maximum(count * sizes.batch_size, 1)
    loss_terms = dict(sums['loss_terms'], sampled_age=sums['sampled_age'])
    # 'valid' is the number of drawn transitions, which is `drawn`.
    loss_terms.pop('valid')
    return {name: total / drawn for name, total in loss_terms.items()} | dict(
        grad_norm=sums['grad_norm'] / jnp.maximum(count, 1), param_norm=optax.tree.norm(params),
        learning_rate=learning_rate(steps_before),
        replay_ratio=gradient_steps * float(sizes.batch_size) / jnp.maximum(steps, 1))

  def finish(state, count, sums, valid, batch):
    """Ends an update: counts it and computes metrics.

    Args:
      state: after the last gradient step.
      count: [] i32, gradient steps of this update.
      sums: the sums that the function of `make_steps` returned.
      valid: [] i32, valid rows that were added.
      batch: [2] u32, the fingerprint of the experience that was added.

    Returns:
      The next state, and metrics.
    """
    chex.assert_rank([count, valid], 0)
    chex.assert_shape(batch, (2,))
    steps = state.steps + valid
    metrics = means(sums, count, state.params, state.steps, steps, state.target.gradient_steps)
    state = state._replace(update=state.update + 1, steps=steps)
    # A node of the tree is the sum of its children, so the root is finite only if all of them are.
    broken = groups.total_of_integers(
        jnp.sum(~jnp.isfinite(tree.total(state.replay.priorities)), dtype=jnp.int32))
    finite = rollout_updates.finite_parts(state) | dict(replay=broken == 0)
    return state, metrics | dict(
        finite=finite,
        valid=valid, update=state.update, steps=steps, sampled=count * sizes.batch_size,
        gradient_steps=state.target.gradient_steps,
        replay_size=groups.total_of_integers(jnp.sum(state.replay.size)), batch=batch,
        params=fingerprint(state.params))

  return finish


def make_learn(insert: Callable, steps: Callable, finish: Callable, sizes: Sizes,
               mesh_size: int = 1):
  """Builds the function of a whole update, on one device of a mesh.

  Args:
    insert: the function that `make_insert` returned.
    steps: the function that `make_steps` returned.
    finish: the function that `make_finish` returned.
    sizes: numbers that the arithmetic of an update depends on.
    mesh_size: devices of the mesh.

  Returns:
    learn(state, experience) -> (state, metrics). It adds the experience of this device's
    environments, then takes `sizes.gradient_steps` gradient steps, or none until the replay has
    `sizes.min_size` transitions.
  """
  def learn(state: TrainState, experience: Experience):
    groups = sizes.groups(mesh_size)
    batch = fingerprint(experience._replace(episodes=None), 1, groups.first_env(), sizes.num_envs)
    state, valid = insert(state, experience, jnp.int32(0))
    batch, valid = groups.total_of_integers((batch, valid))
    count = jnp.where(ready(state, sizes, mesh_size), sizes.gradient_steps, 0)
    state, sums = steps(state, count)
    state, metrics = finish(state, count, sums, valid, batch)
    return state, metrics | dict(episodes=experience.episodes)

  return learn
