"""G and U on what is drawn from a replay: losses of transitions, and updates of many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit.learner import rollout_updates
from podracer_jit.numerics.deterministic import AXIS, exact_sum, map_in_loop
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.replay import buffer
from podracer_jit.types import Experience, Metrics, Params, Target, TrainState, Transition

# `losses.algorithm.ReplayAlgorithm.loss` with its network
Loss = Callable[[Params, Params, Transition, jax.Array],
                tuple[jax.Array, tuple[Metrics, jax.Array]]]


class Sizes(NamedTuple):
  """What the arithmetic of an update depends on; all of it belongs to the experiment."""

  num_envs: int
  num_grad_shards: int  # groups, each with a replay
  batch_size: int  # of a gradient step, all groups together
  gradient_steps: int  # of an update
  min_size: int  # transitions that must be there before the first
  target_every: int  # gradient steps
  importance_exponent: float
  microbatch_rows: int


def make_steps(loss: Loss, memory: buffer.Replay, update: Callable, sizes: Sizes,
               mesh_size: int = 1, sum_groups: rollout_updates.SumGroups = exact_sum):
  """Returns steps(state, count) -> (state, sums): `count` gradient steps, on one device of a mesh.

  Each draws a batch, descends, and sets the priorities of what it drew. Sums over the steps: of
  'terms', 'grad_norm', 'sampled_age' (gradient steps since a transition was added).
  """
  groups = sizes.num_grad_shards // mesh_size
  share = sizes.batch_size // sizes.num_grad_shards

  def of_group(params, target, batch, weight):
    cut = rollout_updates.pieces(share, 1, sizes.microbatch_rows)
    pieces = jax.tree.map(lambda x: x.reshape(cut, -1, *x.shape[1:]), (batch, weight))

    def of_piece(piece):
      gradient, (terms, error) = jax.grad(loss, has_aux=True)(params, target, *piece)
      return (gradient, terms), error

    def add(total, piece):
      made, error = of_piece(piece)
      return jax.tree.map(jnp.add, total, made), error

    first = jax.tree.map(lambda x: x[0], pieces)
    total, error = lax.scan(add, _zeros(jax.eval_shape(of_piece, first)[0]), pieces)
    return total, error.reshape(-1)

  def step(state, key):
    keys = _group_keys(key, groups, mesh_size)
    with jax.named_scope('storing'):
      drawn = memory.sample(state.replay, keys, share)
      weight = _weights(drawn.probability, sizes.importance_exponent, mesh_size)
    with jax.named_scope('gradient'):
      made, error = map_in_loop(
          lambda group: of_group(state.params, state.target.params, *group),
          (drawn.transition, weight))
      grads, terms = sum_groups(made, mesh_size)
      grads = jax.tree.map(lambda g: g * (1.0 / sizes.batch_size), grads)
    age = (state.target.gradient_steps - drawn.transition.added).astype(jnp.float32)
    sums = dict(terms=terms, grad_norm=optax.tree.norm(grads),
                sampled_age=sum_groups(jnp.sum(age, axis=1), mesh_size))
    with jax.named_scope('update'):
      state, done = update(state, grads, terms), state.target.gradient_steps + 1
      target = lax.cond(done % sizes.target_every == 0,
                        lambda new, old: new, lambda new, old: old,
                        state.params, state.target.params)
    with jax.named_scope('storing'):
      held = memory.set_priorities(state.replay, drawn.place, error)
    return state._replace(target=Target(target, done), replay=held), sums

  def steps(state: TrainState, count: jax.Array):
    key = _key(state, 0)

    def turn(i, carry):
      state, sums = carry
      state, new = step(state, jax.random.fold_in(key, i))
      return state, jax.tree.map(jnp.add, sums, new)
    return lax.fori_loop(0, count, turn, (state, _zeros(jax.eval_shape(step, state, key)[1])))

  return steps


def _zeros(shapes: Any) -> Any:
  return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _key(state: TrainState, stream: int) -> jax.Array:
  """Of this update: 0 for sampling, 1 for eviction."""
  return jax.random.fold_in(rollout_updates.update_key(state), stream)


def _group_keys(key: jax.Array, groups: int, mesh_size: int) -> jax.Array:
  first = lax.axis_index(AXIS) * groups if mesh_size > 1 else 0
  return jax.vmap(lambda group: jax.random.fold_in(key, group))(first + jnp.arange(groups))


def _least(x: jax.Array, mesh_size: int) -> jax.Array:
  return lax.pmin(jnp.min(x), AXIS) if mesh_size > 1 else jnp.min(x)


def _weights(probability: jax.Array, exponent: float, mesh_size: int) -> jax.Array:
  """Importance weights (N P)^-exponent by their maximum; N, and the number of groups, cancel."""
  least = _least(probability, mesh_size)
  return jnp.power(least / jnp.maximum(probability, 1e-30), exponent)


def make_insert(memory: buffer.Replay, sizes: Sizes, mesh_size: int = 1):
  """Returns insert(state, experience, first_group) -> (state, valid rows), on one device of a mesh.

  `experience` is of whole groups, from the first_group of this device on; what is of none of its
  groups it lets be.
  """
  groups, envs = sizes.num_grad_shards // mesh_size, sizes.num_envs // sizes.num_grad_shards

  @jax.named_scope('storing')
  def insert(state: TrainState, experience: Experience, first_group: jax.Array):
    experience = experience._replace(episodes=())
    count = experience.reward.shape[1] // envs
    group = first_group + jnp.arange(count)
    group = jnp.where((group >= 0) & (group < groups), group, groups)
    apart = jax.tree.map(
        lambda x: x.reshape(x.shape[0], count, envs, *x.shape[2:]).swapaxes(0, 1), experience)
    keys = _group_keys(_key(state, 1), groups, mesh_size)
    keys = jax.vmap(jax.random.fold_in)(keys, state.replay.inserted)  # an update may add often
    held = memory.add(state.replay, group, apart, keys, state.target.gradient_steps)
    return state._replace(replay=held), jnp.sum(experience.valid, dtype=jnp.int32)

  return insert


def ready(state: TrainState, sizes: Sizes, mesh_size: int = 1) -> jax.Array:
  """Whether every group has its share of what must be there before the first gradient step."""
  return _least(state.replay.inserted, mesh_size) * sizes.num_grad_shards >= sizes.min_size


def make_finish(sizes: Sizes, learning_rate: Callable, mesh_size: int = 1):
  """Returns finish(state, count, sums, valid, batch) -> (state, metrics): ends an update.

  `count` gradient steps gave these sums, `valid` rows were added, with the fingerprint `batch`.
  Metrics are means over what was drawn, 0 before anything was.
  """
  def finish(state, count, sums, valid, batch):
    drawn = count * sizes.batch_size
    terms = dict(sums['terms'], sampled_age=sums['sampled_age'])
    terms.pop('valid')
    size, rate = jnp.sum(state.replay.size), learning_rate(state.steps)
    state = state._replace(update=state.update + 1, steps=state.steps + valid)
    total = state.target.gradient_steps * float(sizes.batch_size)
    return state, {k: v / jnp.maximum(drawn, 1) for k, v in terms.items()} | dict(
        grad_norm=sums['grad_norm'] / jnp.maximum(count, 1),
        param_norm=optax.tree.norm(state.params), learning_rate=rate,
        valid=valid, update=state.update, steps=state.steps, sampled=drawn,
        gradient_steps=state.target.gradient_steps,
        replay_size=lax.psum(size, AXIS) if mesh_size > 1 else size,
        replay_ratio=total / jnp.maximum(state.steps, 1), batch=batch,
        params=fingerprint(state.params))

  return finish


def make_learn(insert: Callable, steps: Callable, finish: Callable, sizes: Sizes,
               mesh_size: int = 1):
  """Returns learn(state, experience) -> (state, metrics): adds, then takes all gradient steps.

  For one device of a mesh, with the experience of its environments; none before there is enough.
  """
  def learn(state: TrainState, experience: Experience):
    first = lax.axis_index(AXIS) * sizes.num_envs // mesh_size if mesh_size > 1 else 0
    batch = fingerprint(experience._replace(episodes=()), 1, first, sizes.num_envs)
    state, valid = insert(state, experience, jnp.int32(0))
    if mesh_size > 1:
      batch, valid = lax.psum((batch, valid), AXIS)
    count = jnp.where(ready(state, sizes, mesh_size), sizes.gradient_steps, 0)
    state, sums = steps(state, count)
    state, metrics = finish(state, count, sums, valid, batch)
    return state, metrics | dict(episodes=experience.episodes)

  return learn
