"""Learning from a replay: batches drawn from the items of many rounds of rollouts."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from podracer_jit.agents import action_masks, running_moments
from podracer_jit.learner import updates
from podracer_jit.learner.updates import Draw
from podracer_jit.losses.algorithm import Algorithm
from podracer_jit.numerics import counters, indexing
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.numerics.tracing import traced, zeros
from podracer_jit.replay import buffer, tree
from podracer_jit.replay.options import ReplayOptions
from podracer_jit.types import Experience, Metrics, TrainState


class FromReplay:
  """Functions of an update from a replay, on one device of a mesh."""

  def __init__(self, algorithm: Algorithm, groups: Groups, store: buffer.Replay,
               options: ReplayOptions, microbatch_rows: int):
    """Builds the functions; compiles nothing.

    Args:
      algorithm: bound to a task.
      groups: the groups that a gradient is summed over, seen from one device; each has an equal
        part of a batch, of any environments.
      store: functions of the replay.
      options: the options of the replay.
      microbatch_rows: most rows in one pass of the network; 0: a group's whole batch.
    """
    self.algorithm = algorithm
    self.groups = groups
    self.blocks = store.blocks
    self.store = store
    self.options = options
    self.replay_specs = store.specs()
    self.gradient_steps = options.gradient_steps
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
    blocks = self.blocks
    batch = fingerprint(experience._replace(episodes=None), 1, blocks.first_env(),
                        blocks.count * blocks.envs)
    state = self.observe(state, experience, blocks)
    state, valid = self.insert(state, experience, blocks.numbers(), is_sharded=True)
    batch, valid = blocks.total_of_integers((batch, valid))
    count = jnp.where(self.is_ready(state), self.gradient_steps, 0)
    state, sums = self.take_steps(state, count)
    state, metrics = self.finish(state, count, sums, valid, batch)
    return state, metrics | dict(episodes=experience.episodes)

  def observe(self, state: TrainState, experience: Experience, blocks: Groups) -> TrainState:
    """Returns the state whose running moments have experience that is about to be added.

    Each row counts once, however often it is drawn. The moments of each block are merged by
    themselves, in order, since actors may bring several blocks at once or one after the other. A
    target network reads the same normalised observations as the network.

    Args:
      state: the state.
      experience: [T, B].
      blocks: those of the experience, seen from this device.
    """
    if not running_moments.moments_of(state.params):
      return state
    obs = action_masks.split(experience.obs, self.algorithm.parts.spec)[0]
    one = Groups(1, blocks.envs)
    rows = blocks.split((obs[:-1], experience.valid))
    moments = blocks.gather(blocks.map(
        lambda obs, valid: running_moments.measure(obs, valid, one), *rows))

    def merge(params, of_block):
      return running_moments.add(params, {'obs': of_block}), None

    params, _ = lax.scan(merge, state.params, moments)
    target = state.target.params
    if running_moments.moments_of(target):
      target = running_moments.with_moments_of(target, params)
    return state._replace(params=params).with_target(target)

  @jax.named_scope('storing')
  def insert(self, state: TrainState, experience: Experience, number: jax.Array,
             is_sharded: bool = False) -> tuple[TrainState, jax.Array]:
    """Adds experience to the replay.

    Args:
      state: with a replay.
      experience: [T, B], of whole blocks.
      number: [k] i32, the blocks of the experience among all blocks.
      is_sharded: True if each device has the experience of its own blocks; False if all devices
        have the same.

    Returns:
      The state, and the number of valid rows of the experience.
    """
    chex.assert_rank(number, 1)
    chex.assert_equal_shape([experience.reward, experience.valid])
    experience = experience._replace(episodes=None)
    by_block = Groups(len(number), self.blocks.envs).split(experience)
    # An update may add several times, and each addition needs a key of its own.
    key = jax.random.fold_in(_of_group_0(_key(state, 1)), state.replay.inserted[0])
    replay = self.store.add(state.replay, number, by_block, key, state.target.gradient_steps,
                            is_sharded)
    return state._replace(replay=replay), jnp.sum(experience.valid, dtype=jnp.int32)

  def is_ready(self, state: TrainState) -> jax.Array:
    """Returns whether the replay has received `min_size` items, [] bool."""
    return state.replay.inserted[0] >= self.options.min_size

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
    keys = _key(state, 0), updates.update_key(state), _key(state, 2)
    step, (_, shapes) = traced(self._step, state, keys)

    def body(i, carry):
      state, sums = carry
      draw_key, loss_key, evict_key = keys
      state, results = step(state, (jax.random.fold_in(draw_key, i), updates.step_key(loss_key, i),
                                    jax.random.fold_in(evict_key, i)))
      return state, jax.tree.map(jnp.add, sums, results)

    # The number of steps is data: it is 0 until the replay has enough items.
    return lax.fori_loop(0, count, body, (state, zeros(shapes)))

  def _step(self, state: TrainState, keys: tuple[jax.Array, jax.Array, jax.Array]
            ) -> tuple[TrainState, Metrics]:
    """Takes a gradient step with keys for draws, losses and evictions; see `take_steps`."""
    draw_key, loss_key, evict_key = keys
    groups = self.groups

    @island('importance_weights')
    def weights(probability, least):
      """Returns importance weights (N P)^-beta over their maximum (1511.05952, section 3.4).

      N cancels.
      """
      # An empty replay has probabilities of zero; its draws are not learned from.
      ratio = least / jnp.maximum(probability, 1e-30)
      return jnp.power(ratio, self.options.importance_exponent)

    @island('sampled_age')
    def sum_of_ages(added, gradient_steps):
      return jnp.sum((gradient_steps - added).astype(jnp.float32))

    with jax.named_scope('storing'):
      place, probability = self.store.draw(state.replay, _of_group_0(draw_key),
                                          self.options.batch_size)
      weight = weights(probability, jnp.min(probability))

    with jax.named_scope('gradient'):
      draw = Draw(self._own_share(place), self._own_share(weight), float(self.options.batch_size),
                  None)
      sums, priority = self._gradients(updates.view(state), state.replay, draw, loss_key)
      grads, aux = groups.total(sums)

    # The clock of a replay is the number of gradient steps so far.
    age = sum_of_ages(self.store.added(state.replay, place), state.target.gradient_steps)

    with jax.named_scope('update'):
      state, grad_norm = self._update(state, grads, aux)

    with jax.named_scope('storing'):
      replay = state.replay
      if priority is not None:
        # The condition is always false. It makes the writes depend on what was read, so XLA changes
        # the tree in place; else it copies the tree if all weights are alike.
        place = jnp.where(probability < 0, tree.NOWHERE, place)
        replay = self.store.set_priorities(replay, place, groups.gather(priority).reshape(-1))
      if self.options.evict_every:
        due = state.target.gradient_steps % self.options.evict_every == 0
        replay = self.store.evict(replay, evict_key, due)
    return state._replace(replay=replay), dict(aux=aux, grad_norm=grad_norm, sampled_age=age)

  def _own_share(self, drawn: jax.Array) -> jax.Array:
    """Returns the parts of a batch [N] that belong to this device's groups, [local, N / groups].

    The first group has the first draws, and so on, whatever environments they are of.
    """
    return indexing.read(drawn.reshape(self.groups.count, -1), self.groups.numbers())

  def read(self, replay: buffer.State, group: jax.Array, place: jax.Array) -> tuple[Any, None]:
    """Returns the items of a group's share of a batch; see `updates.make_gradients`."""
    del group
    return self.store.read(replay, place), None

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
    # Rows that are added for each item.
    rows_for_each = self.algorithm.items().period / self.store.copies

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
    finite = updates.finite_parts(state) | dict(
        replay=jnp.isfinite(tree.total(state.replay.priorities)[0]))
    return state, metrics | dict(
        finite=finite,
        valid=valid, update=state.update, steps=steps, sampled=count * batch_size,
        gradient_steps=state.target.gradient_steps,
        replay_size=state.replay.size[0], batch=batch,
        params=fingerprint(state.params))


def _key(state: TrainState, stream: int) -> jax.Array:
  """Returns a key of this update.

  Args:
    state: the state.
    stream: 0 is for draws, 1 for evictions of additions, 2 for those of gradient steps.
  """
  return jax.random.fold_in(updates.update_key(state), stream)


def _of_group_0(key: jax.Array) -> jax.Array:
  """Returns the key of a draw or an eviction.

  Groups had replays and keys of their own until version 0.8; runs of one group keep their bits.
  """
  return jax.random.fold_in(key, 0)
