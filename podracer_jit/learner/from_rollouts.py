"""Learning from rollouts: epochs of minibatches of each round, which is then dropped."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from podracer_jit.agents import action_masks, running_moments
from podracer_jit.envs import frames
from podracer_jit.learner import updates
from podracer_jit.learner.updates import Draw
from podracer_jit.losses.algorithm import Algorithm, Aux
from podracer_jit.numerics import counters, indexing, shuffling
from podracer_jit.numerics.deterministic import AXIS
from podracer_jit.numerics.fingerprints import fingerprint
from podracer_jit.numerics.groups import Groups
from podracer_jit.numerics.islands import island
from podracer_jit.numerics.tracing import traced, zeros
from podracer_jit.types import Metrics, Rollout, TrainState


class Prepared(NamedTuple):
  """Inputs that all gradient steps of an update share, on one device of the mesh."""

  rollout: Rollout  # [T, B], with scaled rewards if the experiment normalises them; no episodes
  targets: Any  # of `Algorithm.targets`, [T, B, ...]
  items: jax.Array  # [steps, local groups, n] i32: the items of each minibatch
  key: jax.Array  # PRNG key of the update
  batch_stats: Metrics  # 'batch' (fingerprint), 'valid', 'moments' and 'episodes'


class _Window(NamedTuple):
  """Windows of a rollout; see `items.Window`."""

  rollout: Rollout  # [T, B, ...]
  row: jax.Array  # [N] i32, first rows
  env: jax.Array  # [N] i32
  length: int  # L

  def read(self, tree: Any) -> Any:
    """Returns the rows of arrays [T, B, ...], [L, N, ...]."""
    if self._is_whole:
      return jax.tree.map(lambda x: indexing.read(x, slice(None), self.env), tree)
    rows = self.row + jnp.arange(self.length)[:, None]
    return jax.tree.map(lambda x: indexing.read(x, rows, self.env[None]), tree)

  @property
  def _is_whole(self) -> bool:
    return self.length == len(self.rollout.reward)

  def rows(self) -> Rollout:
    """See `items.Window`."""
    rows = self.read(self.rollout._replace(obs=None, carry=None))
    if not self._is_whole:
      return rows
    return rows._replace(carry=jax.tree.map(
        lambda x: indexing.read(x, slice(None), self.env), self.rollout.carry))

  def obs(self, step: jax.Array) -> jax.Array:
    """See `items.Window`."""
    return frames.pick(self.rollout.obs, self.row + step, self.env)

  def all_obs(self) -> Any:
    """See `items.Window`."""
    obs = self.rollout.obs
    if self._is_whole:
      return jax.tree.map(lambda x: indexing.read(x, slice(None), self.env), obs)
    return jnp.stack([self.obs(jnp.full_like(self.row, i)) for i in range(self.length + 1)])


class FromRollouts:
  """Functions of an update from rollouts, on one device of a mesh."""

  replay_specs = PartitionSpec(AXIS)  # of the rollouts that an auxiliary phase keeps

  def __init__(self, algorithm: Algorithm, groups: Groups, num_epochs: int, num_minibatches: int,
               microbatch_rows: int):
    """Builds the functions; compiles nothing.

    Args:
      algorithm: bound to a task.
      groups: the groups of environments, seen from one device.
      num_epochs: passes over a round of rollouts.
      num_minibatches: minibatches of an epoch.
      microbatch_rows: most rows in one pass of the network; 0: a group's whole minibatch.
    """
    self.algorithm = algorithm
    self.groups = groups
    self.gradient_steps = num_epochs * num_minibatches
    self._num_epochs = num_epochs
    self._num_minibatches = num_minibatches
    self._microbatch_rows = microbatch_rows
    self._items = algorithm.items()
    self._gradients = updates.make_gradients(algorithm, self.read, groups, microbatch_rows)
    self._update = updates.make_update(algorithm)
    self.auxiliary = algorithm.auxiliary()
    if self.auxiliary:
      # The rollouts of several updates are side by side, as if of more environments.
      phase = self.auxiliary
      self._phase = FromRollouts(
          phase.algorithm, groups._replace(envs=groups.envs * phase.every), phase.num_epochs,
          phase.num_minibatches, microbatch_rows)

  def seen_from(self, groups: Groups) -> FromRollouts:
    """Returns the same functions for other groups, such as those of one of several workers."""
    return FromRollouts(self.algorithm, groups, self._num_epochs, self._num_minibatches,
                        self._microbatch_rows)

  def learn(self, state: TrainState, rollout: Rollout) -> tuple[TrainState, Metrics]:
    """Makes an update: all epochs and minibatches in one scan.

    Args:
      state: before the update.
      rollout: [T, B], of this device's environments.

    Returns:
      The next state, and metrics; see `finish`.
    """
    prepared = self.prepare(updates.view(state), updates.update_key(state), rollout)
    state, steps = self._take_steps(state, prepared)
    terms = {}
    if self.auxiliary:
      state, terms = self._in_phase(state, prepared)
    state, metrics = finish(self.algorithm, state, prepared.batch_stats, steps)
    return state, metrics | terms

  def _take_steps(self, state: TrainState, prepared: Prepared
                  ) -> tuple[TrainState, tuple[Aux, jax.Array]]:
    """Takes all gradient steps; returns the state, and each step's Aux and gradient norm."""
    def step(state, number):
      with jax.named_scope('gradient'):
        grads, aux = self.groups.total(self.gradients(updates.view(state), prepared, number))
      with jax.named_scope('update'):
        state, grad_norm = self._update(state, grads, aux)
      return state, (aux, grad_norm)

    return lax.scan(step, state, jnp.arange(self.gradient_steps))

  def _in_phase(self, state: TrainState, prepared: Prepared) -> tuple[TrainState, Metrics]:
    """Keeps an update's rollout; every few updates, takes the steps of the auxiliary phase.

    Args:
      state: after the update's own gradient steps; its `replay` has the rollouts, see `kept`.
      prepared: the update's rollout and targets.

    Returns:
      The state, and the means of the phase's loss terms, which are 0 in updates without it.
    """
    arrays, treedef = jax.tree.flatten((prepared.rollout, prepared.targets))
    place = state.update % self.auxiliary.every * self.groups.envs
    kept = tuple(lax.dynamic_update_slice_in_dim(old, new, place, axis=2)
                 for old, new in zip(state.replay, self.groups.split(arrays), strict=True))

    def phase(state, kept):
      rollout, targets = treedef.unflatten(self._phase.groups.join(kept))
      key = updates.auxiliary_key(state)
      items = self._phase._minibatches(key, len(rollout.reward))
      state, (aux, _) = self._phase._take_steps(state, Prepared(rollout, targets, items, key, {}))
      return state, _means(aux)

    def no_phase(state, kept):
      del kept
      return state, zeros(shapes)

    without_kept = state._replace(replay=None)
    phase, (_, shapes) = traced(phase, without_kept, kept)
    is_due = state.update % self.auxiliary.every == self.auxiliary.every - 1
    state, terms = lax.cond(is_due, phase, no_phase, without_kept, kept)
    return state._replace(replay=kept), terms

  def kept(self, rollout: Rollout) -> Any:
    """Returns the shapes of what is kept for the auxiliary phase, of all devices.

    Args:
      rollout: arrays or shapes of a rollout of one group, [T, B, ...].

    Returns:
      The arrays of rollout and targets, [groups, T, every * B, ...] each.
    """
    one = self.seen_from(self.groups._replace(count=1, mesh_size=1))
    state = self.algorithm.state_shapes
    prepared = jax.eval_shape(
        lambda state, rollout: one.prepare(updates.view(state), updates.update_key(state), rollout),
        state, rollout)

    def side_by_side(x):
      steps, envs, *more = x.shape
      return jax.ShapeDtypeStruct(
          (self.groups.count, steps, self.auxiliary.every * envs, *more), x.dtype)
    return tuple(map(side_by_side, jax.tree.leaves((prepared.rollout, prepared.targets))))

  def prepare(self, state: TrainState, key: jax.Array, rollout: Rollout) -> Prepared:
    """Prepares an update.

    Args:
      state: at the beginning of the update, as `updates.view` returns it.
      key: the update's PRNG key (`updates.update_key`).
      rollout: [T, B], of this device's environments.
    """
    groups = self.groups
    chex.assert_shape(rollout.reward, (None, groups.local * groups.envs))
    chex.assert_equal_shape([rollout.reward, rollout.terminated, rollout.truncated, rollout.valid])
    chex.assert_type([rollout.terminated, rollout.truncated, rollout.valid], bool)
    batch = rollout._replace(episodes=None)

    # The fingerprint is computed before rewards are scaled, so it identifies the actors' data.
    batch_fingerprint, valid = groups.total_of_integers((
        fingerprint(batch, 1, groups.first_env(), groups.count * groups.envs),
        jnp.sum(batch.valid, dtype=jnp.int32)))

    scaled, return_moments = running_moments.scale_rewards(state.params, batch, groups)
    targets = self._targets(state, scaled)
    obs, _ = action_masks.split(batch.obs, self.algorithm.parts.spec)
    moments = running_moments.observe(
        state.params, batch._replace(obs=obs), targets, groups) | return_moments
    return Prepared(
        rollout=scaled, targets=targets, items=self._minibatches(key, len(batch.reward)), key=key,
        batch_stats=dict(batch=batch_fingerprint, valid=valid, moments=moments,
                         episodes=rollout.episodes))

  def inputs_of_targets(self, rollout: Rollout) -> Rollout:
    """Returns the part of a rollout that `Algorithm.targets` reads."""
    if self.algorithm.targets_read_all_obs:
      return rollout
    return rollout._replace(obs=frames.last(rollout.obs))

  def _targets(self, state: TrainState, rollout: Rollout) -> Any:
    """Returns the algorithm's targets [T, B, ...] of this device's environments."""
    groups = self.groups
    rollout = self.inputs_of_targets(rollout)

    @island('targets', precision=self.algorithm.parts.precision)
    def targets_of_group(state, rollout):
      return self.algorithm.at(state.steps).targets(state._replace(steps=None), rollout)

    # One group at a time, so that on CPUs an island's shapes do not depend on the mesh.
    def group_targets(first_env):
      envs = first_env + jnp.arange(groups.envs)
      group_rollout = jax.tree.map(lambda x: indexing.read(x, slice(None), envs), rollout)
      return targets_of_group(state, group_rollout)

    first_envs = jnp.arange(groups.local) * groups.envs
    return groups.join(groups.map(group_targets, first_envs))

  def _minibatches(self, key: jax.Array, unroll_length: int) -> jax.Array:
    """Returns the items of each minibatch and group, [epochs * minibatches, local, n] i32.

    The permutation of a group depends on the group's index among all groups, not on the mesh.

    Args:
      key: the update's key.
      unroll_length: T.
    """
    groups = self.groups
    count = groups.envs * self._items.count(unroll_length)

    def permutation(epoch, group):
      if not self.algorithm.shuffles:
        return jnp.arange(count)
      group_key = jax.random.fold_in(jax.random.fold_in(key, epoch), group)
      return shuffling.permutation(group_key, count)

    by_group = jax.vmap(permutation, in_axes=(None, 0))
    by_epoch = jax.vmap(by_group, in_axes=(0, None))
    items = by_epoch(jnp.arange(self._num_epochs), groups.numbers())

    # [epochs, local, items] -> [epochs, minibatches, local, n]
    items = items.reshape(self._num_epochs, groups.local, self._num_minibatches, -1)
    items = items.transpose(0, 2, 1, 3)
    return items.reshape(-1, groups.local, items.shape[-1])

  def gradients(self, state: TrainState, prepared: Prepared, step: jax.Array) -> tuple[Any, Aux]:
    """Returns the gradient and Aux of each group of this device, with a leading axis [local].

    Args:
      state: as `updates.view` returns it.
      prepared: the update's inputs.
      step: [] i32, number of the gradient step in the update.
    """
    draw = self.draw(state, prepared, step)
    return self._gradients(state, prepared, draw, updates.step_key(prepared.key, step))[0]

  def draw(self, state: TrainState, prepared: Prepared, step: jax.Array) -> Draw:
    """Returns the minibatch of a gradient step; see `gradients`."""
    items = prepared.items[step]
    count, statistics = self._statistics(state, prepared, items)
    return Draw(items, None, count, statistics)

  def _statistics(self, state: TrainState, prepared: Prepared, items: jax.Array
                  ) -> tuple[jax.Array, Any]:
    """Returns the number of a minibatch's valid rows [] f32, at least 1, and its statistics.

    Every device computes them from the minibatches of all groups.
    """
    groups = self.groups

    @island('batch_statistics')
    def statistics(state, valid, targets):
      count = jnp.maximum(jnp.sum(valid.astype(jnp.float32)), 1.0)
      algorithm = self.algorithm.at(state.steps)
      return count, algorithm.statistics(state._replace(steps=None), valid, targets)

    def rows(first_env, items):
      window = self._window(prepared.rollout, first_env, items)
      return window.read((prepared.rollout.valid, prepared.targets))

    of_groups = jax.vmap(rows)(jnp.arange(groups.local) * groups.envs, items)
    return statistics(state, *groups.gather(of_groups))

  def _window(self, rollout: Rollout, first_env: jax.Array, items: jax.Array) -> _Window:
    """Returns the windows of a group's items.

    Items are numbered from row to row, and within a row environment by environment.
    """
    number, env = indexing.divide(items, self.groups.envs)
    return _Window(rollout, number * self._items.period, first_env + env, self._items.length)

  def read(self, prepared: Prepared, group: jax.Array, items: jax.Array) -> tuple[Any, Any]:
    """Returns items of a group and their targets; see `updates.make_gradients`."""
    window = self._window(prepared.rollout, group * self.groups.envs, items)
    return self._items.make(window), window.read(prepared.targets)


@island('auxiliary_metrics')
def _means(aux: Aux) -> Metrics:
  """Returns the means of loss terms over valid rows, of Aux [gradient steps]."""
  aux = jax.tree.map(jnp.sum, aux)
  return {name: total / jnp.maximum(aux.valid, 1.0) for name, total in aux.terms.items()}


def finish(algorithm: Algorithm, state: TrainState, batch_stats: Metrics,
           steps: tuple[Aux, jax.Array]) -> tuple[TrainState, Metrics]:
  """Ends an update: counts it, merges running moments and computes metrics.

  Args:
    algorithm: bound to a task.
    state: after the last gradient step.
    batch_stats: statistics of the update's rollout, see `Prepared`.
    steps: the Aux of each step, and gradient norms [steps] f32.

  Returns:
    The next state, and metrics: means of the loss terms over valid rows of all gradient steps,
    `grad_norm` before clipping, `param_norm`, `learning_rate`, `valid` rows, the `batch` and
    `params` fingerprints, the rollout's episodes, and `finite` (see `updates.finite_parts`).
  """
  chex.assert_rank(steps[1], 1)
  chex.assert_equal_shape_prefix([*jax.tree.leaves(steps[0]), steps[1]], 1)

  @island('metrics')
  def means(aux, grad_norm, weights, kl_factor, state):
    """Returns the metrics that need arithmetic with rounding.

    Args:
      aux: [gradient steps] each, sums over the valid rows of a minibatch.
      grad_norm: [gradient steps] f32.
      weights: the parameters without running moments.
      kl_factor: [] f32, the optimizer's adaptive factor of the learning rate.
      state: as `updates.view` returns it.
    """
    aux = jax.tree.map(jnp.sum, aux)
    options = updates.logged(algorithm, state)
    options['learning_rate'] = options['learning_rate'] * kl_factor
    return aux.metrics() | options | dict(
        grad_norm=jnp.mean(grad_norm), param_norm=optax.tree.norm(weights))

  metrics = means(*steps, running_moments.weights(state.params),
                  optax.tree.get(state.opt_state, 'kl_factor', jnp.float32(1.0)),
                  updates.view(state))
  # Moments change at the end: all steps of an update normalise by the statistics before it.
  state = state._replace(params=running_moments.add(state.params, batch_stats['moments']),
                         update=state.update + 1,
                         steps=counters.add(state.steps, batch_stats['valid']))
  return state, metrics | dict(
      valid=batch_stats['valid'], update=state.update, steps=state.steps,
      batch=batch_stats['batch'], params=fingerprint(state.params),
      episodes=batch_stats['episodes'], finite=updates.finite_parts(state))


def concatenate(rollouts: tuple[Rollout, ...]) -> Rollout:
  """Concatenates rollouts [T, B_i] of vector environments to one [T, B_1 + B_2 + ...]."""
  chex.assert_equal_shape([rollout.reward for rollout in rollouts], dims=0)
  if len(rollouts) == 1:
    return rollouts[0]
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *rollouts)
