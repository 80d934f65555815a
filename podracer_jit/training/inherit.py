"""Begins a run with the state of another run, as far as it fits: --init_from."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from podracer_jit.experiment import build
from podracer_jit.options import shorten
from podracer_jit.runtime import host, placement
from podracer_jit.types import TrainState
from podracer_jit.workdir import checkpoints
from podracer_jit.workdir.history import Origin

# Parts of a state that a run can take from another run: the network's parameters with the target
# network, the running statistics, the state of the optimizer, and the replay.
PARTS = ('parameters', 'normalisation', 'optimizer', 'replay')
BY_DEFAULT = ('parameters', 'normalisation', 'optimizer')
_PARTLY = '--init_partly begins with fresh values for what does not fit'


class Request(NamedTuple):
  """The state to begin with, as the command line asks for it."""

  workdir: Path  # of the other run
  parts: tuple[str, ...] | None = None  # of PARTS; None: BY_DEFAULT, the optimizer only if it fits
  partly: bool = False  # take the arrays that fit; the others begin anew


class Inherited(NamedTuple):
  """The first state of a run."""

  state: TrainState  # without a replay, unless that was asked for
  origin: Origin


def read(run: build.Run, request: Request) -> Inherited:
  """Returns the first state of a run that begins with another run's newest checkpoint.

  Arrays fit if their names, shapes and types are the same. The other run's config is not read, so
  its task, algorithm and modules do not matter. Counters and the PRNG key are never taken. All
  processes call this.

  Args:
    run: the run that begins.
    request: the other run, and the parts to take.

  Raises:
    ValueError: an array does not fit, or the other run's workdir cannot be used; the message names
      the array or the problem.
  """
  source = request.workdir.resolve()
  update = _newest(source)
  fresh_state = run.initial_state()
  own_arrays = checkpoints.leaves(fresh_state)
  source_arrays = checkpoints.saved_leaves(source, update)
  parts = request.parts or BY_DEFAULT
  if parts == PARTS and not jax.tree.leaves(run.learner.replay_shapes()):
    # 'all' means all parts that this run has.
    parts = BY_DEFAULT
  fit = _fit(own_arrays, source_arrays, request._replace(parts=parts), request.parts is None)
  taken = fit.taken
  if 'replay' in parts:
    _check_replay(run, source, update)
    taken = (*taken, 'replay')
  if not taken:
    raise ValueError(f'--init_from: nothing of {source} fits this run')

  with contextlib.closing(checkpoints.Checkpoints(source)) as saved:
    try:
      arrays = saved.restore_leaves(update, run.place.mesh)
      replay = None
      if 'replay' in taken:
        replay = saved.restore_replay(run.learner.replay_shapes(), update)
    except Exception as error:  # noqa: BLE001 - Orbax has many; a run may have deleted it meanwhile
      raise ValueError(f'--init_from: cannot read the checkpoint of update {update} in {source}: '
                       f'{shorten(str(error))}') from error
  state = _replaced(fresh_state, {name: array for name, array in arrays.items()
                                  if name in own_arrays and name not in fit.problems
                                  and _part_of(name) in taken})
  state = _with_target(state, arrays, taken)
  state = placement.replicate(state, run.place.mesh)
  origin = Origin(
      str(source), update, taken,
      fresh=(*fit.fresh, *(name for name in own_arrays if name in fit.problems)),
      unused=tuple(name for name in source_arrays
                   if name in fit.problems and name not in own_arrays),
      state_sha256=checkpoints.digest(state))
  return Inherited(state._replace(replay=replay), origin)


class _Fit(NamedTuple):
  """Parts of another run's state that fit a run."""

  taken: tuple[str, ...]  # parts with at least one array that fits
  fresh: tuple[str, ...]  # parts that begin anew
  problems: dict[str, str]  # by name: the problem of each array of a taken part that does not fit


def _fit(own_arrays: Mapping[str, Any], source_arrays: Mapping[str, Any], request: Request,
         is_default: bool) -> _Fit:
  """Finds the parts of another run's state, apart from the replay, that fit a run.

  Args:
    own_arrays: the arrays of the run that begins, by name.
    source_arrays: the arrays of the other run, or their shapes, by name.
    request: the other run, and the parts to take.
    is_default: True if nobody has named the parts, so that the optimizer need not fit.

  Raises:
    ValueError: something does not fit, and the request does not allow that.
  """
  source = request.workdir.resolve()
  taken = []
  fresh = []
  problems = {}
  for part in request.parts:
    own = {name: leaf for name, leaf in own_arrays.items() if _part_of(name) == part}
    source_part = {name: leaf for name, leaf in source_arrays.items() if _part_of(name) == part}
    misfits = _misfits(source_part, own)
    if part == 'optimizer' and misfits:
      # Another network has other arrays of the same kinds; another optimizer has other kinds.
      same_kind = _same_kind(own, source_part)
      if is_default and not (same_kind and request.partly):
        fresh.append(part)
        continue
      if not same_kind:
        raise ValueError(f'--init_parts: the optimizer of {source} keeps other statistics; leave '
                         'optimizer out')
    if misfits and not request.partly:
      raise ValueError(f'--init_from: {_words(next(iter(misfits.items())), source)}; {_PARTLY}')
    problems |= misfits
    if own.keys() - misfits.keys():
      taken.append(part)
  return _Fit(tuple(taken), tuple(fresh), problems)


def problem_of_shapes(run: build.Run, workdir: Path, update: int) -> str:
  """Returns the reason why a run cannot go on from a checkpoint; '' if it can.

  Args:
    run: the run with the changed config.
    workdir: the workdir of the run.
    update: the update of the checkpoint.
  """
  items = {'state': run.learner.state_shapes(), 'replay': run.learner.replay_shapes(),
           'envs': build.kept_env_shapes(run)}
  if not run.experiment.checkpoint.replay:
    items['replay'] = None
  for item, shapes in items.items():
    saved = checkpoints.saved_leaves(workdir, update, item)
    own = checkpoints.leaves(shapes)
    # A replay and environments that only one side has begin anew.
    if item != 'state' and not (saved and own):
      continue
    for misfit in _misfits(saved, own).items():
      return _words(misfit, workdir)
  return ''


def _newest(source: Path) -> int:
  """Returns the update of the newest whole checkpoint, the same in all processes."""
  if not source.is_dir():
    raise ValueError(f'--init_from: {source} does not exist')
  update = host.of_process_0(checkpoints.newest_whole(source))
  if update is None:
    raise ValueError(f'--init_from: {source} has no whole checkpoint')
  return update


def _part_of(name: str) -> str:
  """Returns the part that an array of a train state belongs to; '' for counters, keys and targets.

  The optimizer keeps statistics of running moments, too, but no gradient ever reaches these.
  """
  if name.startswith('params/'):
    return 'normalisation' if name.startswith('params/moments/') else 'parameters'
  return 'optimizer' if name.startswith('opt_state/') and '/moments/' not in name else ''


def _misfits(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
  """Returns the problem of each array that does not fit, by name; arrays of this run come first."""
  problems = {}
  for name, leaf in own.items():
    if name not in saved:
      problems[name] = 'is only here, not in'
    elif saved[name].shape != _data(leaf).shape:
      problems[name] = f'has the shape {_data(leaf).shape} here, {saved[name].shape} in'
    elif saved[name].dtype != _data(leaf).dtype:
      problems[name] = f'has the type {_data(leaf).dtype} here, {saved[name].dtype} in'
  return problems | {name: 'is not here, only in' for name in saved if name not in own}


def _data(leaf: Any) -> Any:
  """Returns an array, or its shape, in the form that checkpoints have: PRNG keys are numbers."""
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.eval_shape(jax.random.key_data, leaf)
  return leaf


def _words(misfit: tuple[str, str], source: Path) -> str:
  name, problem = misfit
  return f'{shorten(name)} {problem} {source}'


def _same_kind(own: Sequence[str], other: Sequence[str]) -> bool:
  """Returns whether two optimizers keep the same kinds of statistics, whatever their parameters."""
  def kinds(names: Sequence[str]) -> set[str]:
    return {re.split('/params/', name)[0] for name in names}
  return kinds(own) == kinds(other)


def _check_replay(run: build.Run, source: Path, update: int) -> None:
  """Checks that the replay of a checkpoint fits this run.

  Raises:
    ValueError: it does not fit, or the checkpoint or this run has no replay.
  """
  own = checkpoints.leaves(run.learner.replay_shapes())
  saved = checkpoints.saved_leaves(source, update, 'replay')
  if not own:
    raise ValueError(f'--init_parts: {run.experiment.loss_name} has no replay')
  if not run.experiment.checkpoint.replay:
    raise ValueError('--init_parts: with checkpoint.replay = False every segment begins with an '
                     'empty replay')
  if not saved:
    raise ValueError(f'--init_parts: the checkpoint of update {update} in {source} has no replay')
  for misfit in _misfits(saved, own).items():
    raise ValueError(f'--init_parts: the replay does not fit: {_words(misfit, source)}')


def _replaced(tree: Any, arrays: Mapping[str, jax.Array]) -> Any:
  """Returns the tree with the named leaves replaced."""
  return jax.tree_util.tree_map_with_path(
      lambda path, leaf: arrays.get(jax.tree_util.keystr(path, simple=True, separator='/'), leaf),
      tree)


def _with_target(state: TrainState, arrays: Mapping[str, jax.Array], taken: Sequence[str]
                 ) -> TrainState:
  """Returns the state with the target network that belongs to its parameters.

  Arrays of the other run's target network are used if they fit; the others are copies of the
  parameters. Ages of transitions are counted in gradient steps, so a replay brings the counter of
  gradient steps along.

  Args:
    state: the state, whose parameters are final.
    arrays: the arrays of the other run, by name.
    taken: the parts that were taken.
  """
  if not jax.tree.leaves(state.target) or 'parameters' not in taken:
    return _with_count(state, arrays, taken)
  params = checkpoints.leaves(state.params)
  fitting = {}
  for name, own in params.items():
    target = arrays.get(f'target/params/{name}')
    fits = target is not None and (target.shape, target.dtype) == (own.shape, own.dtype)
    fitting[f'params/{name}'] = target if fits else own
  return _with_count(state._replace(target=_replaced(state.target, fitting)), arrays, taken)


def _with_count(state: TrainState, arrays: Mapping[str, jax.Array], taken: Sequence[str]
                ) -> TrainState:
  """Returns the state with the gradient steps of the other run if its replay was taken."""
  if 'replay' not in taken:
    return state
  count = arrays['target/gradient_steps']
  return state._replace(target=state.target._replace(gradient_steps=count))
