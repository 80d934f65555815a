"""Agents that act on NumPy arrays outside of a run, and that are saved to a folder of their own."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from podracer_jit.agents import action_masks
from podracer_jit.envs import spaces
from podracer_jit.envs.families import family_of
from podracer_jit.errors import refusing
from podracer_jit.experiment import build, modules
from podracer_jit.experiment.schema import Experiment
from podracer_jit.options import shorten
from podracer_jit.parts import user_path
from podracer_jit.play import evaluation, export
from podracer_jit.runtime import host
from podracer_jit.workdir import checkpoints, files, record, sources

PARAMETERS = 'parameters.safetensors'
_DRAFT = '.saving'  # in the name of a folder until it is complete


class Agent:
  """A trained policy for one task.

  Attributes:
    task: `env.task` of the run.
    update: updates that made its parameters.
    steps: valid agent steps that they were learned from.
    experiment: the experiment of the run, placed on one device.
    player: the policy as evaluations use it.
  """

  def __init__(self, experiment: Experiment, player: evaluation.Player, seed: int = 0):
    """Wraps a policy.

    Args:
      experiment: the experiment that trained the policy.
      player: the policy.
      seed: seeds the actions that `act` draws.
    """
    self.task = player.task
    self.update = player.update
    self.steps = player.steps
    self.experiment = experiment
    self.player = player
    self._key = jax.random.key(seed)
    self._calls = 0

  def __repr__(self) -> str:
    return f'<Agent for {shorten(self.task)} after update {self.update:,} ({self.steps:,} steps)>'

  def act(self, obs: Any, state: Any = None, *, greedy: bool = False, is_first: Any = None
          ) -> tuple[Any, Any]:
    """Chooses actions for one observation, or for each of a batch.

    The drawn actions depend on the agent's seed and on the number of earlier calls.

    Args:
      obs: an observation in the form of the task, or a batch of them [B, ...]: an array, or dicts
        and tuples of arrays.
      state: the state that the last call returned; None where episodes begin.
      greedy: takes the most likely action instead of drawing one.
      is_first: [B] bool, for a batch: these rows begin an episode, and their part of `state` is
        reset.

    Returns:
      The action in the form of the task, [B, ...] for a batch; and the state for the next call:
      NumPy arrays [B, ...] for a recurrent network, None for others.

    Raises:
      ValueError: an argument has another structure, shape or type.
    """
    batch, is_batch = self._batch(obs)
    size = len(batch)
    if state is None:
      state = self._initial_state(size)
    self._check_state(state, size)
    is_first = np.zeros(size, bool) if is_first is None else np.asarray(is_first, bool)
    if is_first.shape != (size,):
      raise ValueError(f'is_first: must have the shape {(size,)}, got {is_first.shape}')

    key = jax.random.fold_in(self._key, self._calls)
    self._calls += 1
    inputs = jax.device_put((batch, state, is_first, key), self.player.device)
    actions, state = jax.device_get(self._decide(self.player.params, *inputs, greedy=greedy))
    if self._spaces:
      actions = spaces.task_actions(actions, self._spaces.action)
    return actions if is_batch else actions[0], state

  @refusing()
  def save(self, folder: str | Path) -> None:
    """Writes the agent to a new folder, which `load` reads.

    The folder has the config (config.json), the parameters (parameters.safetensors), checksums
    (manifest.json), and copies of your own modules (sources/). Reading it executes none of its
    content.

    Raises:
      ValueError: the folder exists and is not empty.
      OSError: a file cannot be written.
    """
    self._write(user_path(folder), {})

  @refusing()
  def export(self, folder: str | Path) -> None:
    """Writes the agent to a new folder, for programs that do not have this package.

    Beside the files of `save` it has a description (agent.json) and two programs of `jax.export`,
    for CPUs, NVIDIA's GPUs and TPUs and for any batch: greedy.jax and drawn.jax. `load` reads it,
    too. agent.json says how the programs are called, and how much they may differ from `act`.

    Raises:
      ValueError: there is something of that name already, or the network cannot be exported.
      OSError: it cannot be written.
    """
    folder = user_path(folder)
    check_new(folder)  # before the programs are compiled
    self._write(folder, export.files(self.player, self.experiment, self._spaces))

  def _write(self, folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes the files that every saved agent has, and `contents`, to a new folder in one step."""
    check_new(folder)
    # The folder gets its name in one step, once it is complete.
    drafts = (folder.with_name(f'{folder.name}{_DRAFT}{k or ""}') for k in itertools.count())
    draft = next(path for path in drafts if not path.exists())
    draft.mkdir(parents=True)
    params = jax.device_get(self.player.params)
    record.new(self.experiment.fields).write(draft)
    safetensors_numpy.save_file(
        {name: np.asarray(array, order='C') for name, array in checkpoints.leaves(params).items()},
        draft / PARAMETERS, {'update': str(self.update), 'steps': str(self.steps)})
    for name, content in contents.items():
      files.write(draft / name, content)
    sources.keep(draft, modules.sources(self.experiment.fields), 1)
    checkpoints.write_manifest(draft, checkpoints.digest(params))
    with contextlib.suppress(FileNotFoundError):
      folder.rmdir()  # `rename` needs a free name; an existing folder is empty.
    draft.rename(folder)

  @functools.cached_property
  def _spaces(self) -> spaces.Spaces | None:
    """The task's spaces; None for a user's family without `spaces_of`."""
    spaces_of = getattr(family_of(self.task), 'spaces_of', None)
    return spaces_of(self.task, self.player.options) if spaces_of else None

  @functools.cached_property
  def _leaves(self) -> list[spaces.Leaf]:
    """The arrays of an observation; the task has spaces."""
    assert self._spaces is not None
    return spaces.leaves_of(self.task, self._spaces.observation)

  def _batch(self, obs: Any) -> tuple[np.ndarray, bool]:
    """Returns observations in the form of the network, [B, ...], and whether they are a batch."""
    spec = self.experiment.spec
    try:
      obs, axes = self._array(obs)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
      raise ValueError(f'obs: is not an observation of {self.task}, which are '
                       f'{self._spaces and self._spaces.observation}: {error!r}') from None
    fits = obs.shape[1:] == spec.obs_shape and axes in (0, 1)
    # Bits of vectors are stored as bytes.
    inner = self._spaces and spaces.innermost(self._spaces.observation)
    bits = type(inner).__name__ == 'MultiBinary'
    if not fits or not spaces.holds(bool if bits else spec.obs_dtype, obs):
      numbers = f' from {obs.min()} to {obs.max()}' if obs.dtype.kind in 'iu' and obs.size else ''
      raise ValueError(
          f'obs: must be {spec.obs_dtype} of shape {spec.obs_shape}, or a batch of these; got '
          f'{obs.dtype} of shape {obs.shape if axes else obs.shape[1:]}{numbers}')
    obs = obs.astype(spec.obs_dtype, copy=False)
    if spec.action_mask is not None:
      stuck = np.flatnonzero(action_masks.without_choice(obs, spec).any(axis=-1))
      if len(stuck):
        where = f' [{stuck[0]}]' if axes else ''
        raise ValueError(f'obs{where}: its mask {spec.action_mask.name} allows no action')
    return obs, axes == 1

  def _array(self, obs: Any) -> tuple[np.ndarray, int]:
    """Returns observations as an array [B, ...], and the number of axes before one observation."""
    if not self._spaces or spaces.is_array(self._spaces.observation):
      # Observations of EnvPool and of JAX functions may have other shapes than their spaces.
      obs = np.asarray(spaces.array_in(obs, self._spaces and self._spaces.observation))
      axes = obs.ndim - len(self.experiment.spec.obs_shape)
      return (obs if axes else obs[None]), axes
    space = self._spaces.observation
    axes = spaces.batch_axes(obs, space)
    if not axes:
      return spaces.observe_one(obs, space, self._leaves)[None], axes
    return spaces.observe(spaces.arrays_of(obs, space), space, self._leaves), axes

  def _initial_state(self, size: int) -> Any:
    return jax.device_get(self.player.algorithm.initial_carry(size))

  def _check_state(self, state: Any, size: int) -> None:
    def shapes(tree):
      return jax.tree.map(np.shape, tree)
    expected = jax.eval_shape(lambda: self.player.algorithm.initial_carry(size))
    structure: Any = jax.tree.structure(state)
    same = structure == jax.tree.structure(expected)
    if not same or jax.tree.leaves(shapes(state)) != jax.tree.leaves(shapes(expected)):
      raise ValueError(f'state: must be what the last call for {size} '
                       f'observation{"s" if size > 1 else ""} returned, or None')

  @functools.cached_property
  def _decide(self) -> Any:
    """(params, obs [B, ...], state, is_first [B], key, greedy=) -> actions [B, ...], state."""
    player = self.player

    def decide(params, obs, state, is_first, key, *, greedy):
      """Returns actions and the next state; see `act`.

      Args:
        params: parameters of the network.
        obs: [B, ...].
        state: the recurrent state.
        is_first: [B] bool, these rows begin an episode.
        key: PRNG key.
        greedy: takes the most likely action instead of drawing one.
      """
      acted = player.act(params, obs, state, is_first, None if greedy else key)
      return player.policy.to_env(acted.action), acted.carry

    return jax.jit(decide, static_argnames='greedy')


def check_new(folder: Path) -> None:
  """Checks that an agent may be written to a folder.

  Raises:
    ValueError: there is something of that name already, or it is the current folder.
  """
  if folder.resolve() == Path.cwd():
    raise ValueError(f'{folder} is the current folder, which cannot be replaced; name another')
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(f'{folder} exists; choose another name, as nothing saved is overwritten')


def load_run(workdir: Path, update: int | None = None, seed: int = 0,
             allow_modules: Collection[str] = ()) -> tuple[Agent, str]:
  """Returns the agent of a run, on one device.

  Args:
    workdir: the workdir of the run.
    update: the update of the checkpoint; None: the newest whole one.
    seed: seeds the actions that the agent draws.
    allow_modules: modules of a user's own parts that may be imported if the config names them.

  Returns:
    The agent, and a line about newer checkpoints that are broken, or ''.

  Raises:
    ValueError: there is no run or checkpoint, or it names modules that are not allowed.
  """
  experiment = evaluation.read_experiment(workdir, allow_modules, update)
  host.prepare_host_for_any(experiment.placement, experiment.numerics.deterministic)
  agent = Agent(experiment, evaluation.restore(workdir, experiment, update), seed)
  return agent, evaluation.broken_note(workdir, agent.update) if update is None else ''


def load_saved(folder: Path, seed: int = 0, allow_modules: Collection[str] = ()) -> Agent:
  """Returns an agent that `Agent.save` has written.

  Args:
    folder: the folder of the agent.
    seed: seeds the actions that it draws.
    allow_modules: modules of a user's own parts that may be imported if the config names them.

  Raises:
    ValueError: the folder is not as it was saved, or names modules that are not allowed.
  """
  damage = checkpoints.problem_of_folder(folder)
  if damage:
    raise ValueError(f'{folder} is not as it was saved: {damage}')
  experiment = evaluation.read_experiment(folder, allow_modules)
  try:
    with safetensors.safe_open(folder / PARAMETERS, 'numpy') as file:
      arrays = {name: file.get_tensor(name) for name in file.keys()}
      update, steps = (int(file.metadata()[name]) for name in ('update', 'steps'))
  except (OSError, safetensors.SafetensorError, TypeError, KeyError, ValueError) as error:
    raise ValueError(f'{folder}: {PARAMETERS} cannot be read: {shorten(repr(error))}'
                     ) from None
  host.prepare_host_for_any(experiment.placement, experiment.numerics.deterministic)
  run = build.make_run(experiment)
  like = experiment.algorithm.acting(run.initial_state())
  own_arrays = checkpoints.leaves(like)
  for name, array in own_arrays.items():
    saved = arrays.get(name)
    if saved is None or (saved.shape, saved.dtype) != (array.shape, array.dtype):
      contents = 'nothing' if saved is None else f'{saved.dtype} {saved.shape}'
      raise ValueError(f'{folder}: the network has {name}, {array.dtype} {array.shape}, and '
                       f'{PARAMETERS} has {contents} in its place')
  params = jax.tree.unflatten(
      jax.tree.structure(like), [jax.device_put(arrays[name], run.place.mesh.devices.flat[0])
                                 for name in own_arrays])
  player = evaluation.make_player(run, params, update, steps)
  return Agent(experiment, player, seed)
