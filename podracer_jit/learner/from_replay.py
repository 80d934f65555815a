"""Learning from a replay: batches drawn from the items of many rounds of rollouts."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit.agents import action_masks, running_moments
from podracer_jit.envs import frames
from podracer_jit.learner import updates
from podracer_jit.learner.updates import Draw
from podracer_jit.losses.algorithm import Algorithm
from podracer_jit.numerics import counters
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.numerics.tracing import traced, zeros
from podracer_jit.replay import buffer, tree
from podracer_jit.replay.options import ReplayOptions
from podracer_jit.types import Experience, Metrics, TrainState


class FromReplay:
  """Functions of an update from a replay, on one device of a mesh."""

  def __init__(self, algorithm: Algorithm, groups: Groups, memory: buffer.Replay,
               options: ReplayOptions, microbatch_rows: int):
    """Builds the functions; compiles nothing.

    Args:
      algorithm: bound to a task.
      groups: the groups of environments, seen from one device; each has a replay of its own.
      memory: functions of the replay of each group.
      options: the options of the replay.
      microbatch_rows: most rows in one pass of the network; 0: a group's whole batch.
    """
    self.algorithm = algorithm
    self.groups = groups
    self.memory = memory
    self.options = options
    self.gradient_steps = options.gradient_steps
    # Every group draws an equal part of the batch.
    self.group_batch = options.batch_size // groups.count
    self._gradients = updates.make_gradients(algorithm, self.read, groups, microbatch_rows)
    self._update = updates.make_update(algorithm)

  def learn(self, state: TrainState, experience: Experience) -> tuple[TrainState, Metrics]:
    """Makes an update: adds experience, then takes gradient steps if the replay is large enough.

    Args:
      state: with a replay.
      experience: [T, B], of this device's environments.

    Returns:
      The next state, and metrics; see `finish`.
    """
    groups = self.groups
    batch = fingerprint(experience._replace(episodes=None), 1, groups.first_env(),
                        groups.count * groups.envs)
    state = self.observe(state, experience, groups)
    state, valid = self.insert(state, experience, jnp.int32(0))
    batch, valid = groups.total_of_integers((batch, valid))
    count = jnp.where(self.is_ready(state), self.gradient_steps, 0)
    state, sums = self.take_steps(state, count)
    state, metrics = self.finish(state, count, sums, valid, batch)
    return state, metrics | dict(episodes=experience.episodes)

  def observe(self, state: TrainState, experience: Experience, groups: Groups) -> TrainState:
    """Returns the state whose running moments have experience that is about to be added.

    Each row counts once, however often it is drawn. The moments of each group are merged by
    themselves, in order, since actors may bring several groups at once or one after the other. A
    target network reads the same normalised observations as the network.

    Args:
      state: the state.
      experience: [T, B].
      groups: those of the experience, seen from this device.
    """
    if not running_moments.moments_of(state.params):
      return state
    obs = action_masks.split(experience.obs, self.algorithm.parts.spec)[0]
    one = Groups(1, groups.envs)
    rows = groups.split((frames.stacks(obs)[:-1], experience.valid))
    moments = groups.gather(groups.map(
        lambda obs, valid: running_moments.measure(obs, valid, one), *rows))

    def merge(params, of_group):
      return running_moments.add(params, {'obs': of_group}), None

    params, _ = lax.scan(merge, state.params, moments)
    target = state.target.params
    if running_moments.moments_of(target):
      target = running_moments.with_moments_of(target, params)
    return state._replace(params=params).with_target(target)

  @jax.named_scope('storing')
  def insert(self, state: TrainState, experience: Experience, first_group: jax.Array
             ) -> tuple[TrainState, jax.Array]:
    """Adds experience to the replay.

    Args:
      state: with a replay.
      experience: [T, B], of whole groups. Groups outside of this device are ignored.
      first_group: [] i32, index of the first of them among the groups of this device.

    Returns:
      The state, and the number of valid rows, also of ignored groups.
    """
    groups = self.groups
    chex.assert_rank(first_group, 0)
    chex.assert_equal_shape([experience.reward, experience.valid])
    experience = experience._replace(episodes=None)
    count = experience.reward.shape[1] // groups.envs
    group = first_group + jnp.arange(count)
    # `add` drops groups with an index out of range. A negative index would count from the end.
    group = jnp.where((group >= 0) & (group < groups.local), group, groups.local)
    by_group = Groups(count, groups.envs).split(experience)
    keys = self._group_keys(_key(state, 1))
    # An update may add several times, and each addition needs keys of its own.
    keys = jax.vmap(jax.random.fold_in)(keys, state.replay.inserted)
    replay = self.memory.add(state.replay, group, by_group, keys, state.target.gradient_steps)
    return state._replace(replay=replay), jnp.sum(experience.valid, dtype=jnp.int32)

  def is_ready(self, state: TrainState) -> jax.Array:
    """Returns whether every group has received its share of `min_size` items, [] bool.

    It is equal on all devices.
    """
    smallest = self.groups.smallest(state.replay.inserted)
    return smallest >= -(-self.options.min_size // self.groups.count)

  def take_steps(self, state: TrainState, count: jax.Array) -> tuple[TrainState, Metrics]:
    """Takes gradient steps. Each draws a batch and sets new priorities of the drawn items.

    Args:
      state: with a replay.
      count: [] i32, number of steps.

    Returns:
      The state, and sums over the steps: 'aux' (`Aux`), 'grad_norm', and 'sampled_age' (gradient
      steps between an item's addition and its use).
    """
    chex.assert_rank(count, 0)
    draw_key = _key(state, 0)
    loss_key = updates.update_key(state)
    step, (_, shapes) = traced(self._step, state, draw_key, loss_key)

    def body(i, carry):
      state, sums = carry
      state, results = step(state, jax.random.fold_in(draw_key, i), updates.step_key(loss_key, i))
      return state, jax.tree.map(jnp.add, sums, results)

    # The number of steps is data: it is 0 until the replay has enough items.
    return lax.fori_loop(0, count, body, (state, zeros(shapes)))

  def _step(self, state: TrainState, draw_key: jax.Array, loss_key: jax.Array
            ) -> tuple[TrainState, Metrics]:
    """Takes a gradient step; see `take_steps`."""
    groups = self.groups

    @island('importance_weights')
    def weights(probability, least):
      """Returns importance weights (N P)^-beta over their maximum (1511.05952, section 3.4).

      N and the number of groups cancel.
      """
      # An empty replay has probabilities of zero; its draws are not learned from.
      ratio = least / jnp.maximum(probability, 1e-30)
      return jnp.power(ratio, self.options.importance_exponent)

    @island('sampled_age')
    def sum_of_ages(added, gradient_steps):
      return jnp.sum((gradient_steps - added).astype(jnp.float32))

    with jax.named_scope('storing'):
      place, probability = self.memory.draw(state.replay, self._group_keys(draw_key),
                                            self.group_batch)
      # The largest weight of the whole batch belongs to the smallest probability.
      least = groups.smallest(probability)
      weight = groups.map(lambda p: weights(p, least), probability)

    with jax.named_scope('gradient'):
      draw = Draw(place, weight, float(self.options.batch_size), None)
      sums, priority = self._gradients(updates.view(state), state.replay, draw, loss_key)
      grads, aux = groups.total(sums)

    # The clock of a replay is the number of gradient steps so far.
    clock = state.target.gradient_steps
    added = self.memory.added(state.replay, place)
    age = groups.total(groups.map(lambda added: sum_of_ages(added, clock), added))

    with jax.named_scope('update'):
      state, grad_norm = self._update(state, grads, aux)

    if priority is not None:
      with jax.named_scope('storing'):
        state = state._replace(replay=self.memory.set_priorities(state.replay, place, priority))
    return state, dict(aux=aux, grad_norm=grad_norm, sampled_age=age)

  def read(self, replay: buffer.State, group: jax.Array, place: jax.Array) -> tuple[Any, None]:
    """Returns items of a group; see `updates.make_gradients`."""
    return self.memory.read(replay, group, place), None

  def _group_keys(self, key: jax.Array) -> jax.Array:
    """Returns a key for each group of this device, [local], that does not depend on the mesh."""
    return jax.vmap(lambda group: jax.random.fold_in(key, group))(self.groups.numbers())

  def finish(self, state: TrainState, count: jax.Array, sums: Metrics, valid: jax.Array,
             batch: jax.Array) -> tuple[TrainState, Metrics]:
    """Ends an update: counts it and computes metrics.

    Args:
      state: after the last gradient step.
      count: [] i32, gradient steps of this update.
      sums: the sums of `take_steps`.
      valid: [] i32, valid rows that were added.
      batch: [2] u32, the fingerprint of the experience that was added.

    Returns:
      The next state, and metrics. Loss terms and ages are means over the drawn items, and 0 if none
      were drawn.
    """
    chex.assert_rank([count, valid], 0)
    chex.assert_shape(batch, (2,))
    batch_size = self.options.batch_size
    rows_for_each = self.algorithm.items().period  # that are added for each item

    @island('metrics')
    def means(sums, count, state, steps):
      """Returns the metrics that need arithmetic with rounding.

      Args:
        sums: the sums of `take_steps`.
        count: [] i32, gradient steps of this update.
        state: as `updates.view` returns it, before the update is counted.
        steps: valid steps added until the end of this update.
      """
      # Without gradient steps all sums are 0, and so must be the means.
      drawn = jnp.maximum(count * batch_size, 1)
      gradient_steps = state.target.gradient_steps
      return sums['aux'].metrics() | updates.logged(self.algorithm, state) | dict(
          sampled_age=sums['sampled_age'] / drawn,
          grad_norm=sums['grad_norm'] / jnp.maximum(count, 1),
          param_norm=optax.tree.norm(state.params),
          replay_ratio=gradient_steps * float(batch_size * rows_for_each) / jnp.maximum(
              counters.as_float(steps), 1.0))

    steps = counters.add(state.steps, valid)
    metrics = means(sums, count, updates.view(state), steps)
    state = state._replace(update=state.update + 1, steps=steps)
    # A node of the tree is the sum of its children, so the root is finite only if all of them are.
    broken = self.groups.total_of_integers(
        jnp.sum(~jnp.isfinite(tree.total(state.replay.priorities)), dtype=jnp.int32))
    finite = updates.finite_parts(state) | dict(replay=broken == 0)
    return state, metrics | dict(
        finite=finite,
        valid=valid, update=state.update, steps=steps, sampled=count * batch_size,
        gradient_steps=state.target.gradient_steps,
        replay_size=self.groups.total_of_integers(jnp.sum(state.replay.size)), batch=batch,
        params=fingerprint(state.params))


def _key(state: TrainState, stream: int) -> jax.Array:
  """Returns a key of this update: stream 0 is for sampling, stream 1 for eviction."""
  return jax.random.fold_in(updates.update_key(state), stream)
