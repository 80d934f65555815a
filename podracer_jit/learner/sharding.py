"""Gradients (G) and updates (U) compiled for their meshes, in one program or in two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from podracer_jit.learner import from_rollouts, updates
from podracer_jit.learner.from_replay import FromReplay
from podracer_jit.learner.from_rollouts import FromRollouts, Prepared
from podracer_jit.losses.algorithm import Algorithm
from podracer_jit.numerics import counters, indexing
from podracer_jit.numerics.deterministic import AXIS, exact_sum
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.tracing import traced
from podracer_jit.types import Experience, Metrics, Rollout, TrainState

EVERYWHERE = PartitionSpec()
BY_ENV = PartitionSpec(None, AXIS)
BY_DEVICE = PartitionSpec(AXIS)
SENT = 'sent'  # among the metrics of `make_fused`


def state_specs(source: FromRollouts | FromReplay) -> TrainState:
  """Returns how a train state is sharded: it is replicated, except for parts of its replay."""
  return TrainState(*[EVERYWHERE] * len(TrainState._fields))._replace(replay=source.replay_specs)


def _all_episodes(batch_stats: Metrics) -> Metrics:
  """Returns the metrics with the episodes [T, B] of all devices' environments."""
  episodes = jax.lax.all_gather(batch_stats['episodes'], AXIS, axis=1, tiled=True)
  return batch_stats | dict(episodes=episodes)


def _learn_of(source: FromRollouts | FromReplay) -> Callable:
  """Returns `source.learn` whose metrics have the episodes of all devices."""
  def learn(state, rollout):
    state, metrics = source.learn(state, rollout)
    return state, _all_episodes(metrics)
  return learn


def whole_update(source: FromRollouts | FromReplay, mesh: Mesh) -> Callable:
  """Returns `source.learn` compiled for the whole mesh.

  Args:
    source: functions of an update, seen from one device of the mesh.
    mesh: the mesh of the learner.

  Returns:
    learner(state, rollout) -> (state, metrics). The state is replicated (its replay is not, see
    `state_specs`) and donated, the rollout sharded by environment. Metrics have a leading axis [1]
    of updates.
  """
  specs = state_specs(source)

  def learner(state, rollout):  # profiles and the cache have this name
    state, metrics = jax.shard_map(
        _learn_of(source), mesh=mesh, in_specs=(specs, BY_ENV), out_specs=(specs, EVERYWHERE),
        check_vma=False)(state, rollout)
    return state, _add_update_axis(metrics)

  return jax.jit(learner, donate_argnums=0)


def make_fused(for_actors: Callable, rollout: Callable, learn: Callable, most: int,
               sent_by: Callable = lambda actor_state: ()) -> Callable:
  """Builds a function that alternates rollouts and updates in one program.

  Args:
    for_actors: `Algorithm.for_actors`.
    rollout: (`ForActors`, actor_state) -> (actor_state, rollouts).
    learn: (state, rollout) -> (state, metrics).
    most: updates that the arrays of metrics have room for.
    sent_by: actor_state -> arrays to return for each update, see `rollouts.sent_by`.

  Returns:
    fused(state, actor_state, limit, total_steps) -> (state, actor_state, count, metrics). It makes
    `count` updates: `limit`, or fewer if `total_steps` valid steps are reached. The first `count`
    rows of the metrics [most, ...] are set. `limit` must not exceed `most`. The metrics also have
    the arrays of `sent_by` as SENT, if there are any.
  """

  def once(state, actor_state):
    with jax.named_scope('rollout'):
      actor_state, rollouts = rollout(for_actors(state), actor_state)
    with jax.named_scope('learn'):
      state, metrics = learn(state, from_rollouts.concatenate(rollouts))
    # An actor's state has the actions of one rollout only.
    sent = sent_by(actor_state)
    return state, actor_state, dict(metrics, **{SENT: sent}) if sent else metrics

  def fused(state, actor_state, limit, total_steps):
    """Makes up to `limit` updates.

    Args:
      state: the train state.
      actor_state: the actor's state.
      limit: [] i32, most updates, at most `most`.
      total_steps: count of valid steps after which no update begins.

    Returns:
      The train state, the actor's state, the number of updates [] i32, and metrics [most, ...].
    """
    make_one, (_, _, shapes) = traced(once, state, actor_state)
    # A while_loop cannot stack results, so metrics are written into arrays allocated before it.
    buffers = jax.tree.map(lambda s: jnp.zeros((most, *s.shape), s.dtype), shapes)

    def goes_on(carry):
      state, _, count, _ = carry
      return (count < limit) & counters.is_less(state.steps, total_steps)

    def body(carry):
      state, actor_state, count, buffers = carry
      state, actor_state, metrics = make_one(state, actor_state)
      buffers = jax.tree.map(
          lambda buffer, x: indexing.write_row(buffer, x, count), buffers, metrics)
      return state, actor_state, count + 1, buffers

    return lax.while_loop(goes_on, body, (state, actor_state, jnp.int32(0), buffers))

  return fused


def fused_program(source: FromRollouts | FromReplay, rollout: Callable, most: int, mesh: Mesh
                  ) -> Callable:
  """Returns `make_fused` of a whole mesh, to be jitted.

  Args:
    source: functions of an update, seen from one device of the mesh.
    rollout: (`ForActors`, actor_state) -> (actor_state, rollouts), of one device's environments.
    most: updates that the arrays of metrics have room for.
    mesh: the mesh of the learner.

  Returns:
    The function of `make_fused`. Its train state is replicated; its actor state has a leading axis
    of devices, which is sharded.
  """
  specs = state_specs(source)
  fused = make_fused(source.algorithm.for_actors, rollout, _learn_of(source), most)

  def on_device(state, actor_state, limit, total_steps):
    """Runs `fused` on one device, whose actor state has a leading axis [1]; see `make_fused`.

    Args:
      state: the train state.
      actor_state: the state of this device's environments, [1, ...] each.
      limit: [] i32, most updates.
      total_steps: count of valid steps after which no update begins.
    """
    actor_state = jax.tree.map(lambda x: x[0], actor_state)
    state, actor_state, count, metrics = fused(state, actor_state, limit, total_steps)
    return state, jax.tree.map(lambda x: x[None], actor_state), count, metrics

  return jax.shard_map(
      on_device, mesh=mesh, in_specs=(specs, BY_DEVICE, EVERYWHERE, EVERYWHERE),
      out_specs=(specs, BY_DEVICE, EVERYWHERE, EVERYWHERE), check_vma=False)


def _add_update_axis(metrics: Metrics) -> Metrics:
  """Returns the metrics with a leading axis [1] of updates, as a report has them."""
  return jax.tree.map(lambda x: x[None], metrics)


class GradientPrograms(NamedTuple):
  """Compiled gradient functions of one worker that computes no updates."""

  mesh: Mesh
  prepare: Callable  # (view of the state, key, rollout) -> Prepared, once an update
  gradient: Callable  # (view, Prepared, step) -> (grads, Aux), sums over the worker's groups


def gradient_programs(source: FromRollouts, mesh: Mesh) -> GradientPrograms:
  """Compiles the gradient functions of a worker.

  Args:
    source: functions of an update, for the worker's groups.
    mesh: the mesh of the worker.

  Returns:
    The programs of `GradientPrograms`.
  """
  def prepare_all(state: TrainState, key: jax.Array, rollout: Rollout):
    prepared = source.prepare(state, key, rollout)
    return prepared._replace(batch_stats=_all_episodes(prepared.batch_stats))

  def gradient_of(state: TrainState, prepared: Prepared, step: jax.Array):
    chex.assert_rank(step, 0)
    return source.groups.total(source.gradients(state, prepared, step))

  def compiled(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs,
                                 check_vma=False))

  # `items` has its groups on the second axis, like the environments of arrays [T, B].
  prepared_specs = Prepared(rollout=BY_ENV, targets=BY_ENV, items=BY_ENV, key=EVERYWHERE,
                            batch_stats=EVERYWHERE)
  return GradientPrograms(
      mesh,
      prepare=compiled(prepare_all, (EVERYWHERE, EVERYWHERE, BY_ENV), prepared_specs),
      gradient=compiled(gradient_of, (EVERYWHERE, prepared_specs, EVERYWHERE), EVERYWHERE))


class UpdatePrograms(NamedTuple):
  """Compiled update functions of one device that computes no gradients; both donate the state."""

  # (state, (grads, Aux) of all groups) -> (state, (Aux, grad_norm))
  step: Callable
  # (state, Prepared.batch_stats, [second result of each step]) -> (state, metrics)
  finish: Callable


def update_programs(algorithm: Algorithm) -> UpdatePrograms:
  """Compiles the update functions of an algorithm."""
  update = updates.make_update(algorithm)

  def step(state: TrainState, sums: Any):
    grads, aux = sums
    state, grad_norm = update(state, grads, aux)
    return state, (aux, grad_norm)

  def finish(state: TrainState, batch_stats: Metrics, steps: list):
    steps = jax.tree.map(lambda *x: jnp.stack(x), *steps)
    state, metrics = from_rollouts.finish(algorithm, state, batch_stats, steps)
    return state, _add_update_axis(metrics)

  return UpdatePrograms(jax.jit(step, donate_argnums=0), jax.jit(finish, donate_argnums=0))


def copies_of_first(mesh: Mesh) -> Callable:
  """Compiles the function that gives all devices of a mesh what its first device has.

  Args:
    mesh: the mesh, over several processes, which all call the function.

  Returns:
    A function of a tree of arrays that count as replicated, although only those on the first device
    have the right values. It returns the tree with these values on all devices, to the last bit.
  """
  def on_device(tree):
    is_first = lax.axis_index(AXIS) == 0
    # Sums of integers with zeros change no bit; a float -0.0 would become 0.0.
    own = jax.tree.map(lambda x: jnp.where(is_first, _as_integers(x), 0)[None], tree)
    return jax.tree.map(_from_integers, exact_sum(own, mesh.size), tree)

  return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=EVERYWHERE, out_specs=EVERYWHERE,
                               check_vma=False))


def _as_integers(x: jax.Array) -> jax.Array:
  """Returns the bits of an array of any type as unsigned integers."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(x)
  if x.dtype == bool:
    return x.astype(jnp.uint8)
  return lax.bitcast_convert_type(x, jnp.dtype(f'uint{8 * x.dtype.itemsize}'))


def _from_integers(bits: jax.Array, like: jax.Array) -> jax.Array:
  """Returns the array of the type of `like` that has these bits; see `_as_integers`."""
  if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like))
  if like.dtype == bool:
    return bits.astype(bool)
  return lax.bitcast_convert_type(bits, like.dtype)


class ReplayPrograms(NamedTuple):
  """Compiled functions of a learner whose experience arrives at any time; both donate the state."""

  # (state, experience of some blocks, index of the first of them)
  #   -> (state, (valid rows, fingerprint of the experience))
  insert: Callable
  # (state, gradient steps, sum of valid rows, sum of fingerprints) -> (state, metrics)
  # It takes no gradient steps before the replay has the minimal number of items.
  learn: Callable


def replay_programs(source: FromReplay, mesh: Mesh) -> ReplayPrograms:
  """Compiles adding and learning as separate programs.

  Every device of the mesh gets all experience, and stores the rows of its own blocks.

  Args:
    source: functions of an update, seen from one device of the mesh.
    mesh: the mesh of the learner.

  Returns:
    The programs of `ReplayPrograms`.
  """
  blocks = source.blocks
  specs = state_specs(source)

  def insert(state: TrainState, experience: Experience, first_block: jax.Array):
    chex.assert_rank(first_block, 0)
    added = Groups(experience.reward.shape[1] // blocks.envs, blocks.envs)
    state = source.observe(state, experience, added)
    state, valid = source.insert(state, experience, first_block + jnp.arange(added.count))
    batch = fingerprint(experience._replace(episodes=None), 1, first_block * blocks.envs,
                        blocks.count * blocks.envs)
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
    count = jnp.where(source.is_ready(state), count, 0)
    state, sums = source.take_steps(state, count)
    state, metrics = source.finish(state, count, sums, valid, batch)
    return state, _add_update_axis(metrics)

  def compiled(function: Callable, replicated_args: int) -> Callable:
    in_specs = (specs, *[EVERYWHERE] * replicated_args)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=(specs, EVERYWHERE),
                            check_vma=False)
    # Without donation every call would copy the replay.
    return jax.jit(sharded, donate_argnums=0)

  return ReplayPrograms(insert=compiled(insert, replicated_args=2),
                        learn=compiled(learn, replicated_args=3))
