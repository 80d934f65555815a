"""Gradients (G) and updates (U): the core that rollouts and replays share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit import schedules
from podracer_jit.agents import running_moments
from podracer_jit.losses.algorithm import Algorithm, Aux, Batch
from podracer_jit.numerics import blocks
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.numerics.tracing import traced, zeros
from podracer_jit.types import Metrics, Params, TrainState

# Stream of an update's PRNG keys that losses get; epochs, draws and evictions have the first ones.
_OF_LOSSES = 2**31 - 1
_OF_AUXILIARY = 2**31 - 2  # stream of an auxiliary phase


def view(state: TrainState) -> TrainState:
  """Returns the part of a state that an algorithm computes gradients from."""
  return TrainState(state.params, None, None, state.steps, None, state.target)


def update_key(state: TrainState) -> jax.Array:
  """Returns the PRNG key of the update that begins from `state`."""
  return jax.random.fold_in(state.key, state.update)


def auxiliary_key(state: TrainState) -> jax.Array:
  """Returns the PRNG key of the auxiliary phase of the update that began from `state`."""
  return jax.random.fold_in(update_key(state), _OF_AUXILIARY)


def num_microbatches(items: int, rows_per_item: int, microbatch_rows: int) -> int:
  """Returns the number of equal microbatches that a group's share of a minibatch is split into.

  It is the smallest divisor of `items` that keeps a microbatch within `microbatch_rows` rows.

  Args:
    items: items to split.
    rows_per_item: network input rows of one item.
    microbatch_rows: most rows in a microbatch; 0: no limit. A microbatch has at least one item.
  """
  most = max(1, microbatch_rows // rows_per_item) if microbatch_rows else items
  return next(count for count in range(1, items + 1)
              if items % count == 0 and items // count <= most)


class Draw(NamedTuple):
  """Minibatch of an update, on one device."""

  index: jax.Array  # [local groups, n] i32: the items of each group
  weight: jax.Array | None  # [local groups, n] f32: importance weights; None for rollouts
  count: jax.Array | float  # valid rows (of a replay: items) in all groups, at least 1
  statistics: Any  # of `Algorithm.statistics`


def make_gradients(algorithm: Algorithm, read: Callable, groups: Groups, microbatch_rows: int
                   ) -> Callable:
  """Builds the function that computes the gradient of each group of this device.

  Args:
    algorithm: bound to a task.
    read: (source, group [] i32, items [n] i32) -> (items, targets), of one group of this device.
    groups: the groups of environments, seen from this device.
    microbatch_rows: most rows in one pass of the network; 0: a group's whole minibatch.

  Returns:
    gradients(view, source, draw, key) -> ((grads, Aux), priorities), each with a leading axis
    [local groups]; priorities [local, n] are those of the algorithm's Aux. `key` is the PRNG key of
    the gradient step.
  """
  rows_per_item = algorithm.items().network_rows

  def gradients(state: TrainState, source: Any, draw: Draw, key: jax.Array):
    """Computes the gradients; see above.

    Args:
      state: as `view` returns it.
      source: what `read` reads.
      draw: the minibatch.
      key: PRNG key of the gradient step.
    """
    chex.assert_shape(draw.index, (groups.local, None))

    @island('gradient', precision=algorithm.parts.precision)
    def of_microbatch(state, batch, key):
      # A known count, such as a replay's batch size, is a constant inside the island: as an input,
      # a division by it would round differently.
      if batch.count is None:
        batch = batch._replace(count=jnp.float32(draw.count))
      grads, aux = algorithm.at(state.steps).gradient(state._replace(steps=None), batch, key)
      return (grads, aux._replace(priority=None)), aux.priority

    def of_group(group, number, index, weight):
      """Adds the gradients of the microbatches of a group, from the first to the last.

      Args:
        group: [] i32, index of the group on this device.
        number: [] i32, its index among all groups.
        index: [n] i32, its items.
        weight: [n] f32, their importance weights, or None.

      Returns:
        (grads, Aux) without priorities, and priorities [n] or None.
      """
      microbatches = num_microbatches(index.size, rows_per_item, microbatch_rows)
      group_key = jax.random.fold_in(key, number)

      def one(inputs):
        i, index, weight = inputs
        items, targets = read(source, group, index)
        count = draw.count if isinstance(draw.count, jax.Array) else None
        batch = Batch(items, targets, weight, count, draw.statistics)
        return of_microbatch(state, batch, jax.random.fold_in(group_key, i))

      xs = jax.tree.map(lambda x: x.reshape(microbatches, -1), (index, weight))
      xs = (jnp.arange(microbatches), *xs)
      gradient, (shapes, _) = traced(one, jax.tree.map(lambda x: x[0], xs))

      def add(total, inputs):
        sums, priority = gradient(inputs)
        return jax.tree.map(jnp.add, total, sums), priority

      total, priority = lax.scan(add, zeros(shapes), xs)
      return total, jax.tree.map(lambda x: x.reshape(-1), priority)

    return groups.map(of_group, jnp.arange(groups.local), groups.numbers(), draw.index,
                      draw.weight)

  return gradients


def step_key(key: jax.Array, step: jax.Array) -> jax.Array:
  """Returns the PRNG key of the losses of a gradient step.

  Args:
    key: of the update.
    step: [] i32, number of the step in the update.
  """
  return jax.random.fold_in(jax.random.fold_in(key, _OF_LOSSES), step)


def make_update(algorithm: Algorithm) -> Callable:
  """Returns update(state, grads, aux) -> (state, norm of the gradient before clipping [] f32).

  `grads` and `aux` are summed over all groups.
  """

  def unchanged(state, grads, aux):
    """Takes no step; see `islands.island` for why this branch returns its arguments."""
    del grads, aux
    return state, jnp.zeros(())

  @island('update', skipped=unchanged, precision=algorithm.parts.precision)
  def step(state, grads, aux):
    """Takes one step of the optimizer."""
    # Running moments stay as they are; weight decay, for example, would change them.
    after = algorithm.at(state.steps).update(state._replace(steps=None), grads, aux)
    params = running_moments.with_moments_of(after.params, state.params)
    return after._replace(params=params, steps=state.steps), optax.tree.norm(grads)

  def update(state: TrainState, grads: Params, aux: Aux) -> tuple[TrainState, jax.Array]:
    chex.assert_trees_all_equal_shapes(state.params, grads)
    before = state._replace(update=None, key=None, replay=None)
    after, norm = step(before, grads, aux)
    target = state.target
    if target is not None:
      target = after.target._replace(gradient_steps=target.gradient_steps + 1)
    return state._replace(params=after.params, opt_state=after.opt_state, target=target), norm

  return update


def logged(algorithm: Algorithm, state: TrainState) -> Metrics:
  """Returns the learning rate, and the values of options that change, by their names.

  Args:
    algorithm: bound to a task.
    state: as `view` returns it.
  """
  now = algorithm.at(state.steps)
  optimizer = algorithm.parts.optimizer
  values = {f'loss.{name}': getattr(now, name) for name in schedules.scheduled(algorithm)}
  values |= {f'optimizer.{name}': getattr(now.parts.optimizer, name)
             for name in schedules.scheduled(optimizer) if name != 'learning_rate'}
  return values | {'learning_rate': now.learning_rate()}


def finite_parts(state: TrainState) -> Metrics:
  """Returns whether parts of a train state are finite that no loss shows, as scalar bools by name.

  A number whose square overflows makes running moments, or an optimizer's, infinite. Everything
  divided by them is 0 then, and the run learns nothing more without a NaN in any loss.
  """
  def none_infinite(x: jax.Array) -> jax.Array:
    return blocks.sums(lambda x, _: ((~jnp.isfinite(x)).astype(jnp.uint32),), x)[0] == 0

  def all_finite(tree: Any) -> jax.Array:
    numbers = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    # A scalar of an optimizer, such as its best loss so far, may begin as infinity.
    answers = [~jnp.isnan(x) for x in numbers if x.ndim == 0]
    answers += [lax.platform_dependent(x.reshape(-1), cpu=none_infinite,
                                       default=lambda x: jnp.all(jnp.isfinite(x)))
                for x in blocks.few_arrays([x for x in numbers if x.ndim])]
    return jnp.all(jnp.stack(answers)) if answers else jnp.bool_(True)

  return dict(moments=all_finite(running_moments.moments_of(state.params)),
              optimizer=all_finite(state.opt_state))
