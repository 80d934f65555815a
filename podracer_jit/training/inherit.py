"""Begins a run with the state of another run, as far as it fits: --init_from."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from podracer_jit.experiment import build
from podracer_jit.losses.algorithm import Algorithm
from podracer_jit.options import shorten
from podracer_jit.runtime import host, placement
from podracer_jit.types import TrainState
from podracer_jit.workdir import checkpoints
from podracer_jit.workdir.record import Origin

# Parts of a state that a run takes from another run: the network's parameters with the target
# network, the running statistics, and the state of the optimizer, if it fits.
PARTS = ('parameters', 'normalisation', 'optimizer')
_PARTLY = '--init_partly begins with fresh values for what does not fit'


def read(run: build.Run, source: Path, partly: bool) -> tuple[TrainState, Origin]:
  """Returns the first state of a run that begins with another run's newest checkpoint.

  Arrays fit if their names, shapes and types are the same. The other run's config is not read, so
  its task, algorithm and modules do not matter. Counters, the PRNG key and the replay are never
  taken. All processes call this.

  Args:
    run: the run that begins.
    source: the workdir of the other run.
    partly: arrays that do not fit begin anew.

  Returns:
    The state, and where it came from.

  Raises:
    ValueError: an array does not fit, or the other run's workdir cannot be used; the message names
      the array or the problem.
  """
  source = source.resolve()
  update = _newest(source)
  fresh_state = run.initial_state()
  own_arrays = checkpoints.leaves(fresh_state)
  source_arrays = checkpoints.saved_leaves(source, update)
  fit = _fit(own_arrays, source_arrays, source, partly)
  if not fit.taken:
    raise ValueError(f'--init_from: nothing of {source} fits this run')

  with contextlib.closing(checkpoints.Checkpoints(source)) as saved:
    try:
      arrays = saved.restore_leaves(update, run.place.mesh)
    except Exception as error:  # noqa: BLE001 - Orbax has many; a run may have deleted it meanwhile
      raise ValueError(f'--init_from: cannot read the checkpoint of update {update} in {source}: '
                       f'{shorten(str(error))}') from error
  state = _replaced(fresh_state, {name: array for name, array in arrays.items()
                                  if name in own_arrays and name not in fit.problems
                                  and _part_of(name) in fit.taken})
  if 'parameters' in fit.taken:
    state = _with_target(state, arrays, run.learner.algorithm)
  state = placement.replicate(state, run.place.mesh)
  origin = Origin(
      str(source), update, fit.taken,
      fresh=(*fit.fresh, *(name for name in own_arrays if name in fit.problems)),
      unused=tuple(name for name in source_arrays
                   if name in fit.problems and name not in own_arrays),
      state_sha256=checkpoints.digest(state))
  return state, origin


class _Fit(NamedTuple):
  """Parts of another run's state that fit a run."""

  taken: tuple[str, ...]  # parts with at least one array that fits
  fresh: tuple[str, ...]  # parts that begin anew
  problems: dict[str, str]  # by name: the problem of each array of a taken part that does not fit


def _fit(own_arrays: Mapping[str, Any], source_arrays: Mapping[str, Any], source: Path,
         partly: bool) -> _Fit:
  """Finds the parts of another run's state that fit a run.

  Args:
    own_arrays: the arrays of the run that begins, by name.
    source_arrays: the arrays of the other run, or their shapes, by name.
    source: the workdir of the other run.
    partly: arrays that do not fit begin anew.

  Raises:
    ValueError: something does not fit, and must.
  """
  taken = []
  fresh = []
  problems = {}
  for part in PARTS:
    own = {name: leaf for name, leaf in own_arrays.items() if _part_of(name) == part}
    source_part = {name: leaf for name, leaf in source_arrays.items() if _part_of(name) == part}
    misfits = _misfits(source_part, own)
    # Another network has other arrays of the same kinds; another optimizer has other kinds.
    if part == 'optimizer' and misfits and not (partly and _same_kind(own, source_part)):
      fresh.append(part)
      continue
    if misfits and not partly:
      raise ValueError(f'--init_from: {_words(next(iter(misfits.items())), source)}; {_PARTLY}')
    problems |= misfits
    if own.keys() - misfits.keys():
      taken.append(part)
  return _Fit(tuple(taken), tuple(fresh), problems)


def problem_of_shapes(run: build.Run, workdir: Path, update: int, renews_envs: bool) -> str:
  """Returns the reason why a run cannot go on from a checkpoint; '' if it can.

  Args:
    run: the run with the changed config.
    workdir: the workdir of the run.
    update: the update of the checkpoint.
    renews_envs: whether environments of simulators begin anew.
  """
  goes_on = run.experiment.keeps_envs or not renews_envs
  items = {'state': run.learner.state_shapes(), 'replay': run.learner.replay_shapes(),
           'envs': build.kept_env_shapes(run) if goes_on else None}
  if not run.experiment.checkpoint.replay or checkpoints.has_replays_of_groups(workdir, update):
    items['replay'] = None
  for item, shapes in items.items():
    saved = checkpoints.saved_leaves(workdir, update, item)
    own = checkpoints.leaves(shapes)
    # A replay and environments that only one side has begin anew.
    if item != 'state' and not (saved and own):
      continue
    for name, problem in _misfits(saved, own).items():
      if name != 'steps':  # a count has the form that total_steps need
        return _words((name, problem), workdir)
  return ''


def _newest(source: Path) -> int:
  """Returns the update of the newest whole checkpoint, the same in all processes."""
  if not source.is_dir():
    raise ValueError(f'--init_from: {source} '
                     f'{"is a file; name a folder" if source.exists() else "does not exist"}')
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
    # A network of several, such as a critic, has its number before its parameters.
    return {re.split(r'/(?:\d+/)?params/', name)[0] for name in names}
  return kinds(own) == kinds(other)


def _replaced(tree: Any, arrays: Mapping[str, jax.Array]) -> Any:
  """Returns the tree with the named leaves replaced."""
  return jax.tree_util.tree_map_with_path(
      lambda path, leaf: arrays.get(jax.tree_util.keystr(path, simple=True, separator='/'), leaf),
      tree)


def _with_target(state: TrainState, arrays: Mapping[str, jax.Array], algorithm: Algorithm
                 ) -> TrainState:
  """Returns the state with the target parameters that belong to its parameters.

  Arrays of the other run's target are used if they fit; the others are those of
  `Algorithm.init_target`.

  Args:
    state: the state, whose parameters are final.
    arrays: the arrays of the other run, by name.
    algorithm: of the run.
  """
  if not jax.tree.leaves(state.target):
    return state
  target = state.target._replace(params=algorithm.init_target(state.params))
  fitting = {}
  for name, own in checkpoints.leaves(target).items():
    saved = arrays.get(f'target/{name}')
    if name != 'gradient_steps' and saved is not None and (
        (saved.shape, saved.dtype) == (own.shape, own.dtype)):
      fitting[name] = saved
  return state._replace(target=_replaced(target, fitting))
