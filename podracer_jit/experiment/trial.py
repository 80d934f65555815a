"""Tries a user's own parts on shapes, so that a mistake is found before a run starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from podracer_jit import metrics
from podracer_jit.actor import rollouts
from podracer_jit.agents import running_moments
from podracer_jit.experiment import build, checks, memory, modules
from podracer_jit.experiment.schema import Experiment
from podracer_jit.learner import updates
from podracer_jit.learner.from_rollouts import Prepared
from podracer_jit.losses.algorithm import Acted, Algorithm, Aux, Batch
from podracer_jit.types import TrainState

# Metrics of every run, and further results of an update, which a loss term must not replace.
_TAKEN = (metrics.UPDATES.keys() - metrics.TERMS.keys()) | {
    'batch', 'params', 'moments', 'finite', 'valid'}


def check(run: build.Run) -> dict[str, tuple[Any, ...]]:
  """Traces an update of a run with a user's own parts, in pieces; computes and compiles nothing.

  Args:
    run: the run that will start.

  Returns:
    The shapes of what the methods of the algorithm get, by method (see `method`); empty if all
    parts of the run are shipped ones.

  Raises:
    ValueError: a part fails, or returns something else than its interface says, in one line.
  """
  experiment = run.experiment
  # Shipped parts fit together, and to trace them takes seconds.
  if not modules.named(experiment.fields):
    return {}
  algorithm = experiment.algorithm
  calls = _try_acting(run)
  with modules.one_line(experiment.fields, f'env.task: {experiment.env.task}'):
    memory.bytes_of_pool(experiment, run.acting)
  with in_loss(run, 'note_about_minibatches'):
    list(checks.notes(experiment))
  batch, more = (_replay_batch(run), {}) if algorithm.learns_from_replay else _rollout_batch(run)
  state = _view(algorithm)
  key = jax.eval_shape(jax.random.key, 0)
  calls |= more | {'loss': (state.params, state, batch, key), 'gradient': (state, batch, key)}
  grads, aux = _try_loss(run, calls)
  before = algorithm.state_shapes._replace(update=None, steps=None, key=None)
  with (in_loss(run, 'update') if build.overrides(algorithm, 'update') else modules.one_line(
      experiment.fields, f'optimizer.name: a step of {type(experiment.optimizer).__name__}')):
    _try_update(algorithm, before, grads, aux)
  return calls | {'update': (before, grads, aux)}


def method(run: build.Run, name: str) -> Callable:
  """Returns function(steps, *args), a method of the algorithm as the learner and actors call it.

  Its options have the values of their schedules after `steps`.
  """
  algorithm = run.experiment.algorithm
  return lambda steps, *args: getattr(algorithm.at(steps), name)(*args)


def _call(run: build.Run, name: str, *args: Any) -> Any:
  """Returns the shapes of the results of a method."""
  return jax.eval_shape(method(run, name), run.experiment.algorithm.state_shapes.steps, *args)


def _view(algorithm: Algorithm) -> TrainState:
  """Returns the shapes of the state that methods get."""
  return updates.view(algorithm.state_shapes)._replace(steps=None)


def _try_acting(run: build.Run) -> dict[str, tuple[Any, ...]]:
  """Traces how the algorithm acts in the environments of a pool, and in evaluations.

  Returns:
    The shapes of what `act`, and with a replay `priority`, get.

  Raises:
    ValueError: it fails, or gives something else than in a single environment.
  """
  experiment = run.experiment
  algorithm = experiment.algorithm
  spec = experiment.spec
  num_envs = experiment.env.num_envs // experiment.num_shards
  explores = getattr(run.acting, 'exploration', None) is not None
  exploration = _shape(jnp.float32, num_envs) if explores else None
  key = jax.eval_shape(jax.random.key, 0)
  with in_loss(run, 'initial_carry'):
    carry = jax.eval_shape(lambda: algorithm.initial_carry(num_envs))
  inputs = (jax.eval_shape(algorithm.acting, algorithm.state_shapes),
            _shape(spec.obs_dtype, num_envs, *spec.obs_shape),
            carry, _shape(bool, num_envs))

  def act(steps, *args):
    acted = method(run, 'act')(steps, *args)
    _check_acted(experiment, acted, num_envs)
    return experiment.policy.to_env(acted.action)

  who = build.who_acts(experiment)
  for when, *how in (('', key, exploration),
                     (' in evaluations (exploration = None)', key, None),
                     (' in greedy evaluations (key = None, exploration = None)', None, None)):
    with modules.one_line(experiment.fields, who + when):
      jax.eval_shape(act, algorithm.state_shapes.steps, *inputs, *how)

  calls = {'act': (*inputs, key, exploration)}
  if not algorithm.learns_from_replay:
    return calls
  rows = jax.eval_shape(lambda: rollouts.empty_rollout(
      algorithm, None, num_envs, experiment.items.length + 1))
  rows = rows._replace(action=None, episodes=None)
  with in_loss(run, 'priority'):
    _check_priority(_call(run, 'priority', rows), num_envs)
  return calls | {'priority': (rows,)}


def _check_acted(experiment: Experiment, acted: Any, num_envs: int) -> None:
  """Checks the traced results of `Algorithm.act`.

  Args:
    experiment: to build.
    acted: the results.
    num_envs: B.

  Raises:
    ValueError: they are not as `losses.algorithm` says.
  """
  policy = experiment.policy
  if not isinstance(acted, Acted):
    raise ValueError(f'must return Acted(action, extras, carry, distribution); got '
                     f'{type(acted).__name__}')

  def check(field: str, wanted: Any) -> None:
    words = [str(jax.tree.map(lambda x: f'{x.dtype} {x.shape}', tree))
             for tree in (wanted, getattr(acted, field))]
    if words[0] != words[1]:
      raise ValueError(f'must return the {field} {words[0]} for {num_envs} environments, got '
                       f'{words[1]}')

  check('action', jax.ShapeDtypeStruct((num_envs, *policy.action_shape), policy.action_dtype))
  check('carry', jax.eval_shape(lambda: experiment.algorithm.initial_carry(num_envs)))
  for x in jax.tree.leaves(acted.extras):
    if x.shape[:1] != (num_envs,):
      raise ValueError(f'must return extras [B, ...], here ({num_envs}, ...), got {x.shape}')
  shape = getattr(acted.distribution, 'shape', None)
  wanted = (num_envs, policy.dist_size)
  # An `act` of its own may draw from what it likes.
  if build.overrides(experiment.algorithm, 'act') and len(shape or ()) in (0, 2):
    wanted = (num_envs, shape[1]) if shape else None
  if shape != wanted:
    raise ValueError(f'must return the distribution {(num_envs, policy.dist_size)} that the policy '
                     f'{experiment.policy_name} reads, got {shape}')


def _rollout_batch(run: build.Run) -> tuple[Batch, dict[str, tuple[Any, ...]]]:
  """Returns the shapes of a microbatch, and of what the methods got that made it."""
  experiment = run.experiment
  source = run.learner.source
  groups = source.groups
  state = _view(experiment.algorithm)
  rollout = build.rollout_shapes(experiment, groups.envs)

  inputs = jax.eval_shape(source.inputs_of_targets, rollout)
  with in_loss(run, 'targets'):
    targets = _call(run, 'targets', state, inputs)
    rows = (experiment.unroll_length, groups.envs)
    for target in jax.tree.leaves(targets):
      if target.shape[:2] != rows:
        raise ValueError(f'must return arrays [T, N, ...], here {rows}, got {target.shape}')
    for name in running_moments.of_targets(state.params):
      if not isinstance(targets, Mapping) or name not in targets:
        raise ValueError(f"must return a dict with {name!r}, as params['moments'] of init has it")

  share = experiment.group_items // experiment.num_minibatches
  count = updates.num_microbatches(share, experiment.items.network_rows,
                                   experiment.microbatch_rows)

  def read(rollout, targets, items):
    prepared = Prepared(rollout, targets, None, None, None)
    return source.read(prepared, jnp.int32(0), items)

  with in_loss(run, 'items'):
    items, item_targets = jax.eval_shape(read, rollout, targets, _shape(jnp.int32, share // count))
  # The rows of a minibatch in all groups.
  by_group = jax.tree.map(
      lambda x: _shape(x.dtype, groups.count, experiment.items.length, share, *x.shape[2:]),
      (rollout.valid, targets))
  with in_loss(run, 'statistics'):
    statistics = _call(run, 'statistics', state, *by_group)
  batch = Batch(items, item_targets, None, _shape(jnp.float32), statistics)
  return batch, {'targets': (state, inputs), 'statistics': (state, *by_group)}


def _replay_batch(run: build.Run) -> Batch:
  """Returns the shapes of a microbatch that is drawn from a replay."""
  source = run.learner.source
  size = source.group_batch // updates.num_microbatches(
      source.group_batch, run.experiment.items.network_rows, run.experiment.microbatch_rows)
  replay = run.learner.replay_shapes()
  # As if one device had all blocks.
  store = source.store._replace(blocks=source.blocks._replace(mesh_size=1))
  with in_loss(run, 'items'):
    if not store.fifo:
      # Each item has a slot of its own, along the first axis; no other axis has this size.
      count = run.experiment.items.length + 2
      items = jax.eval_shape(store.from_ring, replay.ring, _shape(jnp.int32, count))
      for x in jax.tree.leaves(items):
        if x.shape[:1] != (count,):
          raise ValueError(f'must make arrays [N, ...], here ({count}, ...), with replay.eviction '
                           f'= prioritised; got {x.shape}')
    items = jax.eval_shape(store.read, replay, _shape(jnp.int32, size))
  return Batch(items, None, _shape(jnp.float32, size), _shape(jnp.float32), None)


def _try_loss(run: build.Run, calls: Mapping[str, tuple[Any, ...]]) -> tuple[Any, Aux]:
  """Traces the loss and its gradient; returns the shapes of the gradient and of its Aux.

  Args:
    run: the run that will start.
    calls: what the methods 'loss' and 'gradient' get.
  """
  algorithm = run.experiment.algorithm

  def loss(steps, params, state, batch, key):
    """Calls `Algorithm.loss`, and checks its results.

    Args:
      steps: see `method`.
      params: see `Algorithm.loss`, also for the others.
      state: without counters.
      batch: the microbatch.
      key: PRNG key.
    """
    result = method(run, 'loss')(steps, running_moments.frozen(params), state, batch, key)
    loss, aux = _pair(result, 'the loss and its Aux')
    _check_loss(algorithm, loss, aux)
    if batch.weight is not None and aux.priority is not None:
      _check_priority(aux.priority, len(batch.weight))
    return loss

  with in_loss(run, 'loss'):
    jax.eval_shape(loss, algorithm.state_shapes.steps, *calls['loss'])
  with in_loss(run, 'gradient' if build.overrides(algorithm, 'gradient') else 'loss'):
    grads, aux = _pair(_call(run, 'gradient', *calls['gradient']), 'the gradient and its Aux')
    _check_aux(algorithm, aux)
    _check_same('the gradient with the {} of state.params', algorithm.state_shapes.params, grads)
  return grads, aux._replace(priority=None)


def _check_priority(priority: Any, items: int) -> None:
  """Checks that priorities are numbers, one for each of `items` items.

  Raises:
    ValueError: they are not.
  """
  if jnp.shape(priority) != (items,) or not jnp.issubdtype(priority.dtype, jnp.floating):
    raise ValueError(f'must return priorities [N], here float32 ({items},), got '
                     f'{jnp.result_type(priority)} {jnp.shape(priority)}')


def _shape(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def _pair(result: Any, meaning: str) -> tuple[Any, Any]:
  if not isinstance(result, tuple) or len(result) != 2:
    raise ValueError(f'must return a pair, {meaning}; got {_kind(result)}')
  return result


def _kind(result: Any) -> str:
  return 'an array' if isinstance(result, jax.Array) else type(result).__name__


def _check_loss(algorithm: Algorithm, loss: Any, aux: Any) -> None:
  """Checks the traced results of an algorithm's loss.

  Raises:
    ValueError: one of them is not as `losses.algorithm` says.
  """
  if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
    raise ValueError('must return a scalar loss of floats, the sum over valid rows; got '
                     f'{jnp.result_type(loss)} {jnp.shape(loss)}')
  _check_aux(algorithm, aux)


def _check_aux(algorithm: Algorithm, aux: Any) -> None:
  """Checks the traced Aux of a loss or a gradient.

  Raises:
    ValueError: it is not as `losses.algorithm` says.
  """
  if not isinstance(aux, Aux):
    raise ValueError(f'must return Aux(terms, valid) as its second result; got {_kind(aux)}')
  if not isinstance(aux.terms, Mapping):
    raise ValueError(f'must return a dict of loss terms in its Aux; got {_kind(aux.terms)}')
  if jnp.shape(aux.valid) != ():
    raise ValueError('must return the number of valid rows in its Aux; got an array '
                     f'{jnp.shape(aux.valid)}')
  if algorithm.measures_kl and 'approx_kl' not in aux.terms:
    raise ValueError("must return the loss term 'approx_kl', as measures_kl = True says; got "
                     f'{", ".join(aux.terms) or "no terms"}')
  for name, term in aux.terms.items():
    if name in _TAKEN:
      raise ValueError(f'must not return a loss term {name!r}: every run has a metric of this name')
    if jnp.shape(term) != ():
      raise ValueError(f'must return sums over rows as loss terms; {name!r} is an array '
                       f'{jnp.shape(term)}')


def _try_update(algorithm: Algorithm, state: TrainState, grads: Any, aux: Aux) -> None:
  """Traces an update.

  Args:
    algorithm: that makes it.
    state: the shapes of what it gets.
    grads: the shapes of a gradient.
    aux: the shapes of its Aux.

  Raises:
    ValueError: something in the state has another shape or type after it.
  """
  steps = algorithm.state_shapes.steps
  rate = jax.eval_shape(lambda steps: algorithm.at(steps).learning_rate(), steps)
  if rate.shape != ():
    raise ValueError(f'its schedule must return one number for one, got an array {rate.shape}')
  if not build.overrides(algorithm, 'update'):
    # Another shape would be broadcast to the parameter's.
    step, _ = jax.eval_shape(
        lambda steps, *args: algorithm.at(steps).optimizer.update(*args, kl=0.0),
        steps, grads, state.opt_state, state.params)
    _check_same('a step with the {} of the parameters', state.params, step)
  after = jax.eval_shape(lambda steps, *args: algorithm.at(steps).update(*args), steps, state,
                         grads, aux)
  if not isinstance(after, TrainState):
    raise ValueError(f'must return the state, with _replace; got {_kind(after)}')
  for what, old, new in (('parameters', state.params, after.params),
                         ('opt_state', state.opt_state, after.opt_state),
                         ('target', state.target, after.target)):
    _check_same(f'{what} with the {{}} that it got', old, new)


def _check_same(what: str, wanted: Any, got: Any) -> None:
  """Checks that a tree of shapes is like another one.

  Args:
    what: a method must return; {} stands for the property that is wrong.
    wanted: the tree.
    got: the other one.

  Raises:
    ValueError: it has another structure, or an array of another shape or type.
  """
  if jax.tree.structure(wanted) != jax.tree.structure(got):
    raise ValueError(f'must return {what.format("structure")}')
  named = jax.tree_util.tree_leaves_with_path(wanted)
  for (path, before), after in zip(named, jax.tree.leaves(got), strict=True):
    if (before.shape, before.dtype) != (after.shape, after.dtype):
      where = jax.tree_util.keystr(path, simple=True, separator='/')
      raise ValueError(f'must return {what.format("shapes and types")}; {where} is {after.dtype} '
                       f'{after.shape}, not {before.dtype} {before.shape}')


def in_loss(run: build.Run, method: str) -> contextlib.AbstractContextManager[None]:
  """Turns an exception in a method of the algorithm into a line."""
  experiment = run.experiment
  return modules.one_line(experiment.fields, f'loss.name: {method} of {experiment.loss_name}')
