"""Tries a user's own parts on shapes, so that a mistake is found before a run starts."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podracer_jit import options
from podracer_jit.actor import rollouts
from podracer_jit.agents import running_moments
from podracer_jit.envs import frames
from podracer_jit.experiment import build, memory, modules
from podracer_jit.experiment.schema import Experiment
from podracer_jit.learner import rollout_updates
from podracer_jit.types import Rollout, TrainState

# Metrics of every run, which a loss term must not replace.
_TAKEN = frozenset((
    'update', 'steps', 'frames', 'sps', 'elapsed_s', 'wall_s', 'episode_return', 'episode_length',
    'episodes', 'actor_wait_s', 'learner_wait_s', 'cgd', 'gud', 'grad_norm', 'param_norm',
    'learning_rate', 'batch', 'params', 'moments', 'warning', 'sampled', 'sampled_age',
    'samples_per_s', 'gradient_steps', 'replay_size', 'replay_ratio', 'finite'))


def check(run: build.Run) -> None:
  """Traces an update of a run with a user's own parts, in pieces; computes and compiles nothing.

  Args:
    run: the run that will start.

  Raises:
    ValueError: a part fails, or returns something else than its interface says, in one line.
  """
  experiment = run.experiment
  # Shipped parts fit together, and to trace them takes seconds.
  if not modules.named(experiment.fields):
    return
  with _one_line(experiment, 'policy', experiment.policy_name):
    memory.bytes_of_pool(experiment, run.network, run.acting)
  state = run.learner.state_shapes()
  if experiment.algorithm.learns_from_replay:
    grads = _try_replay_loss(run, state)
  else:
    grads = _try_rollout_loss(run, state.params)
  with _one_line(experiment, 'optimizer.name', type(experiment.optimizer).__name__):
    _try_optimizer(run, state, grads)


def _try_rollout_loss(run: build.Run, params: Any) -> Any:
  """Traces the algorithm's methods on a group; returns the shapes of the gradient."""
  experiment = run.experiment
  objective = run.learner.objective
  sizes = run.learner.sizes
  group_envs = sizes.num_envs // sizes.num_grad_shards
  rollout = jax.eval_shape(lambda: _empty_rollout(run, group_envs))

  with _in_loss(run, 'targets'):
    targets = jax.eval_shape(
        lambda params, rollout: objective.targets(params, objective.target_inputs(rollout)),
        params, rollout)
    rows = (experiment.unroll_length, group_envs)
    for target in jax.tree.leaves(targets):
      if target.shape[:2] != rows:
        raise ValueError(f'must return arrays [T, N, ...], here {rows}, got {target.shape}')

  elements = group_envs * objective.elements_per_env // sizes.num_minibatches
  count = rollout_updates.num_microbatches(elements, objective.rows_per_element,
                                           sizes.microbatch_rows)

  def minibatch_of(size):
    return jax.eval_shape(
        lambda rollout, targets, first_env, elements: objective.unit.gather(
            rollout, targets, first_env, group_envs, elements),
        rollout, targets, _shape(jnp.int32), _shape(jnp.int32, size))

  with _in_loss(run, 'batch_statistics'):
    share, share_targets = minibatch_of(elements)
    by_group = jax.tree.map(
        lambda x: _shape(x.dtype, sizes.num_grad_shards, *x.shape), (share.valid, share_targets))
    statistics = jax.eval_shape(objective.batch_statistics, *by_group)

  def loss(params, minibatch, statistics):
    result = objective.loss(running_moments.frozen(params), minibatch, statistics)
    loss, loss_terms = _pair(result, 'the loss and its terms')
    _check_loss(loss, loss_terms)
    return loss, loss_terms

  with _in_loss(run, 'loss'):
    grads, _ = jax.eval_shape(jax.grad(loss, has_aux=True), params,
                              minibatch_of(elements // count), statistics)
  return grads


def _empty_rollout(run: build.Run, num_envs: int) -> Rollout:
  """Returns a rollout of zeros [T, num_envs, ...] as the algorithm's methods get it."""
  experiment = run.experiment
  spec = experiment.spec
  steps = experiment.unroll_length
  obs = frames.begin(jnp.zeros((num_envs, *spec.obs_shape), spec.obs_dtype), steps, spec.stack)
  rollout = rollouts.zeros(obs, num_envs, experiment.policy, steps)
  recurrent_state = jax.tree.map(lambda x: x[None], run.network.initial_recurrent_state(num_envs))
  returns = rollout.reward if experiment.normalise.reward else None
  return rollout._replace(episodes=None, recurrent_state=recurrent_state,
                          discounted_return=returns)


def _try_replay_loss(run: build.Run, state: TrainState) -> Any:
  """Traces the loss of a batch drawn from a replay; returns the shapes of the gradient."""
  sizes = run.learner.sizes
  share = sizes.batch_size // sizes.num_grad_shards
  size = share // rollout_updates.num_microbatches(share, 1, sizes.microbatch_rows)
  batch = jax.tree.map(lambda x: _shape(x.dtype, size, *x.shape[2:]), memory.drawn_shapes(run))

  def loss(params, target_params, batch, weight):
    result = run.experiment.algorithm.loss(run.network, params, target_params, batch, weight)
    loss, aux = _pair(result, 'the loss, and its terms with the TD errors')
    loss_terms, error = _pair(aux, 'the terms and the TD errors')
    _check_loss(loss, loss_terms)
    if jnp.shape(error) != (size,):
      raise ValueError(f'must return |TD error| [N], here ({size},), got {jnp.shape(error)}')
    return loss, loss_terms

  with _in_loss(run, 'loss'):
    grads, _ = jax.eval_shape(jax.grad(loss, has_aux=True), state.params, state.target.params,
                              batch, _shape(jnp.float32, size))
  return grads


def _shape(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def _pair(result: Any, meaning: str) -> tuple[Any, Any]:
  if not isinstance(result, tuple) or len(result) != 2:
    raise ValueError(f'must return a pair, {meaning}; got {_kind(result)}')
  return result


def _kind(result: Any) -> str:
  return 'an array' if isinstance(result, jax.Array) else type(result).__name__


def _check_loss(loss: Any, loss_terms: Any) -> None:
  """Checks the traced results of an algorithm's loss.

  Raises:
    ValueError: one of them is not as `losses.algorithm` says.
  """
  if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
    raise ValueError('must return a scalar loss of floats, the sum over valid rows; got '
                     f'{jnp.result_type(loss)} {jnp.shape(loss)}')
  if not isinstance(loss_terms, Mapping):
    raise ValueError(f'must return a dict of loss terms; got {_kind(loss_terms)}')
  if 'valid' not in loss_terms:
    raise ValueError("must return the loss term 'valid', the number of valid rows; got "
                     f'{", ".join(loss_terms) or "no terms"}')
  for name, term in loss_terms.items():
    if name in _TAKEN:
      raise ValueError(f'must not return a loss term {name!r}: every run has a metric of this name')
    if jnp.shape(term) != ():
      raise ValueError(f'must return sums over rows as loss terms; {name!r} is an array '
                       f'{jnp.shape(term)}')


def _try_optimizer(run: build.Run, state: TrainState, grads: Any) -> None:
  """Traces a step of the optimizer, and its schedule.

  Args:
    run: the run that will start.
    state: the shapes of its train state.
    grads: the shapes of a gradient.

  Raises:
    ValueError: the change of a parameter, or the optimizer's own state, has another shape or type.
  """
  parts = run.learner.parts
  optimizer = optax.with_extra_args_support(parts.optimizer)
  rate = jax.eval_shape(parts.learning_rate, state.steps)
  if rate.shape != ():
    raise ValueError(f'its schedule must return one number for one, got an array {rate.shape}')
  change, opt_state = jax.eval_shape(
      lambda grads, opt_state, params: optimizer.update(grads, opt_state, params, kl=0.0),
      grads, state.opt_state, state.params)
  for what, before, after in (('a step', state.params, change),
                              ("the optimizer's state", state.opt_state, opt_state)):
    if jax.tree.structure(before) != jax.tree.structure(after):
      raise ValueError(f'its update must return {what} with the structure that it got')
    named = jax.tree_util.tree_leaves_with_path(before)
    for (path, old), new in zip(named, jax.tree.leaves(after), strict=True):
      if (old.shape, old.dtype) != (new.shape, new.dtype):
        where = jax.tree_util.keystr(path, simple=True, separator='/')
        raise ValueError(f'its update must keep shapes and types: of {what}, {where} is '
                         f'{old.dtype} {old.shape} before and {new.dtype} {new.shape} after')


def _in_loss(run: build.Run, method: str) -> contextlib.AbstractContextManager[None]:
  """Turns an exception in a method of the algorithm into a line."""
  experiment = run.experiment
  return _one_line(experiment, 'loss.name', f'{method} of {experiment.loss_name}')


@contextlib.contextmanager
def _one_line(experiment: Experiment, field: str, subject: str) -> Iterator[None]:
  """Turns any exception of a user's part into a ValueError of one line.

  Args:
    experiment: has the part.
    field: the config's field that names the part.
    subject: the part, or its method, in words.
  """
  try:
    yield
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a part is a program: it may raise anything
    kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
    raise ValueError(f'{field}: {subject}{_line_of(experiment, error)}: {kind}'
                     f'{options.shorten(str(error), 500)}') from error


def _line_of(experiment: Experiment, error: Exception) -> str:
  """Returns the last line of a user's file that an exception came through: ' (mine.py, line 3)'."""
  names = modules.named(experiment.fields).values()
  files = {getattr(sys.modules.get(name), '__file__', None) for name in names}
  frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
  return f' ({Path(frames[-1].filename).name}, line {frames[-1].lineno})' if frames else ''
