"""Agents as files for other programs: a description, and programs for JAX alone (`jax.export`).

The programs are traced under `convolution.plainly`, which replaces our fast convolutions by XLA's
own operations, and at the precision of the config. The network is mapped over the rows of a
symbolic batch with `vmap`, because a network of a user's may ask for the length of its batch. Each
row draws with a key of its own. A new program runs once beside the agent, and an export beyond
`TOLERANCE` is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from podracer_jit import options
from podracer_jit.agents import action_masks
from podracer_jit.envs import spaces
from podracer_jit.experiment.schema import Experiment
from podracer_jit.numerics import convolution
from podracer_jit.play import evaluation
from podracer_jit.workdir import checkpoints, record

DESCRIPTION = 'agent.json'
FORMAT = 1  # of the description and the programs' arguments
PLATFORMS = ('cpu', 'cuda', 'tpu')
PROGRAMS = {'greedy': 'greedy.jax', 'drawn': 'drawn.jax'}
# Largest difference of distribution parameters and states from those of the agent: `absolute` plus
# `relative` times the value.
TOLERANCE = {'absolute': 1e-5, 'relative': 1e-4}
_CHECKED_ROWS = 5
_PRNG = 'threefry2x32'
_ARGUMENTS = {
    'parameters': 'dict: the arrays of parameters.safetensors by name',
    'observation': 'as `observation` says, with an axis for the batch before each array; numbers '
                   'are arrays of shape [batch]',
    'state': 'list: an array [batch, *shape] for each entry of `state`; zeros before the first '
             'call, then the result of the call before',
    'is_first': 'bool [batch]: the observation begins an episode; the state of that row is reset',
    'key': 'uint32 [2], another one in each call: key data of jax.random, threefry2x32'}
_RESULTS = {
    'action': 'as `action` says, [batch, *shape]',
    'state': 'list of arrays, for the next call',
    'distribution': 'float32 [batch, size]: what the action is drawn from or chosen by, see '
                    '`policy`'}
# Meaning of the numbers that each policy reads. Policies of users are not listed.
_NUMBERS = {
    'categorical': 'logits of the choices',
    'product_of_categoricals': "logits of the first element's choices, then of the second's, ...",
    'gaussian': 'means, then logarithms of standard deviations; draws are clipped to the bounds',
    'scaled_gaussian': 'means, then logarithms of standard deviations; draws are clipped to '
                       '[-1, 1], then scaled to the bounds',
    'tanh_gaussian': 'means, then logarithms of standard deviations; tanh of the draws is scaled '
                     'to the bounds',
    'epsilon_greedy': 'values of the actions; the greedy action is taken, also in place of a draw',
    'deterministic': 'the greedy action from -1 to 1, which is scaled to the bounds; an algorithm '
                     'may draw around it'}

# The entry of `policy` that says how a mask is obeyed.
_MASK = ('{name} of an observation says which choices are legal, and the network does not read it; '
         'numbers of illegal ones are the lowest float32 / 2; at least one must be legal')


def files(player: evaluation.Player, experiment: Experiment, task_spaces: spaces.Spaces | None
          ) -> dict[str, bytes]:
  """Returns the description and the programs of an agent, by the names of their files.

  The programs use convolutions of XLA alone, in the precision of `numerics.precision`.
  The program that draws actions is run once and compared with the agent.

  Args:
    player: the policy.
    experiment: the experiment that trained it.
    task_spaces: the spaces of the task; None if its family does not tell them.

  Raises:
    ValueError: the network cannot be exported, or the exported one computes something else.
  """
  interface = _Interface(player, experiment, task_spaces)
  try:
    distribution = player.algorithm.acted_shapes.distribution
    programs = {name: interface.program(name) for name in PROGRAMS}
  except Exception as error:  # noqa: BLE001 - a user's own network or policy may raise anything
    raise ValueError(f'export: the network {experiment.network_name} cannot be exported: '
                     f'{type(error).__name__}: {options.shorten(str(error))}') from error
  if distribution is None:
    raise ValueError(f'export: act of {experiment.loss_name} gives no distribution')
  description = interface.description(programs)
  description['checked'] = interface.check(programs['drawn'])
  contents = {PROGRAMS[name]: bytes(program.serialize()) for name, program in programs.items()}
  contents[DESCRIPTION] = (json.dumps(description, indent=2) + '\n').encode()
  return contents


class _Interface:
  """The arguments and results of an agent's programs."""

  def __init__(self, player: evaluation.Player, experiment: Experiment,
               task_spaces: spaces.Spaces | None):
    self._player = player
    self._experiment = experiment
    self._spaces = task_spaces
    self._names = list(checkpoints.leaves(player.params))
    self._tree = jax.tree.structure(player.params)
    # Shapes of one observation and of one row of the state.
    self._obs = self._shapes_of_observation()
    self._state = jax.eval_shape(lambda: jax.tree.map(
        lambda x: x[0], player.algorithm.initial_carry(1)))

  def program(self, name: str) -> jax_export.Exported:
    """Returns the program `name` for all platforms and any batch."""
    (batch,) = jax_export.symbolic_shape('batch')

    def rows(x):
      return jax.ShapeDtypeStruct((batch, *x.shape), x.dtype)

    params = {each: jax.ShapeDtypeStruct(x.shape, x.dtype)
              for each, x in checkpoints.leaves(self._player.params).items()}
    arguments = [params, jax.tree.map(rows, self._obs),
                 list(map(rows, jax.tree.leaves(self._state))),
                 jax.ShapeDtypeStruct((batch,), bool)]
    if name == 'drawn':
      arguments.append(jax.ShapeDtypeStruct((2,), np.uint32))
    with convolution.plainly():
      return jax_export.export(jax.jit(self._act), platforms=PLATFORMS)(*arguments)

  def _act(self, params: Mapping[str, jax.Array], obs: Any, state: list[jax.Array],
           is_first: jax.Array, key: jax.Array | None = None
           ) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """Computes what the programs do.

    Args:
      params: see `_ARGUMENTS`, also for the others.
      obs: observations of the task.
      state: arrays of the recurrent state.
      is_first: whether each observation begins an episode.
      key: key data; None: greedy actions.

    Returns:
      Actions, state and distribution; see `_RESULTS`.
    """
    player = self._player
    params = jax.tree.unflatten(self._tree, [params[name] for name in self._names])

    def row(obs, state, is_first, number):
      """Acts for one row.

      Args:
        obs: [...].
        state: the carry of one environment.
        is_first: [] bool, whether an episode begins.
        number: [] i32, of the row; rows draw with keys of their own.

      Returns:
        Its action, the next carry, and the parameters of the distribution.
      """
      obs, state, is_first = jax.tree.map(lambda x: x[None], (obs, state, is_first))
      row_key = None
      if key is not None:
        row_key = jax.random.fold_in(jax.random.wrap_key_data(key, impl=_PRNG), number)
      acted = player.act(params, self._observe(obs), state, is_first, row_key)
      return jax.tree.map(lambda x: x[0], (acted.action, acted.carry, acted.distribution))

    # Row by row: a network may ask for the length of its batch, which is a symbol here.
    state = jax.tree.unflatten(jax.tree.structure(self._state), state)
    action, state, distribution = jax.vmap(row)(obs, state, is_first,
                                                jnp.arange(is_first.shape[0]))
    action = self._to_task(player.policy.to_env(action))
    return action, jax.tree.leaves(state), distribution

  def _observe(self, obs: Any) -> jax.Array:
    """Returns the network's input [1, ...] of an observation of the task, with an axis [1]."""
    spec = self._experiment.spec
    space = self._spaces and self._spaces.observation
    if self._is_array:
      return spaces.array_in(obs, space).astype(spec.obs_dtype)
    return spaces.observe(obs, space, spaces.leaves_of(spec.task, space)).astype(spec.obs_dtype)

  def _to_task(self, action: jax.Array) -> jax.Array:
    """Returns actions [batch, ...] as the task takes them; see `spaces.task_actions`."""
    if self._spaces is None:
      return action
    space = self._spaces.action
    action = action.reshape(action.shape[0], *space.shape)
    first = getattr(space, 'start', None)
    if first is not None:
      action = action + first
    action = action.astype(_stored(getattr(space, 'dtype', None) or action.dtype))
    return spaces.within(action, space)

  @property
  def _is_array(self) -> bool:
    return self._spaces is None or spaces.is_array(self._spaces.observation)

  def _shapes_of_observation(self) -> Any:
    """Returns the shapes and types of one observation, in the structure of the task's."""
    spec = self._experiment.spec
    space = self._spaces and self._spaces.observation
    if not self._is_array:
      return _shapes(space)
    # EnvPool's and JAX's environments may have other shapes than their spaces.
    dtype = (space and _dtype_of(spaces.innermost(space))) or spec.obs_dtype
    array = jax.ShapeDtypeStruct(spec.obs_shape, _stored(dtype))
    is_inside = spaces.innermost(space) is not space
    return jax.tree.map(lambda _: array, _shapes(space)) if is_inside else array

  def description(self, programs: Mapping[str, jax_export.Exported]) -> dict[str, Any]:
    """Returns the description of the agent for programs that load it."""
    experiment = self._experiment
    spec = action_masks.seen(experiment.spec)
    mask = experiment.spec.action_mask
    policy = self._player.policy
    recurrent = experiment.torso_options.recurrent
    action = jax.eval_shape(self._to_task, jax.ShapeDtypeStruct(
        (1, *policy.action_shape), policy.action_dtype))
    action_space = {'shape': list(action.shape[1:]), 'dtype': str(action.dtype)}
    if spec.action_low:
      action_space |= {'low': list(spec.action_low), 'high': list(spec.action_high)}
    else:
      action_space |= {'choices': list(spec.action_choices) or spec.num_actions,
                       'first': np.asarray(getattr(
                           self._spaces and self._spaces.action, 'start', 0)).tolist()}
    return {
        'format': FORMAT,
        'task': self._player.task,
        'env': {name: value for name, value in self._player.options.items()},
        'update': self._player.update,
        'steps': self._player.steps,
        'observation': jax.tree.map(_as_json, self._obs),
        'network': {
            'name': experiment.network_name,
            'options': {name: getattr(experiment.network, name)
                        for name in options.meanings(type(experiment.network))},
            'core': experiment.torso_options.core if recurrent else None,
            'reads': {
                'shape': list(spec.obs_shape), 'dtype': str(spec.obs_dtype),
                'channels_last': spec.channels_last,
                'parts': [{'name': part.name, 'shape': list(part.shape),
                           'dtype': str(part.dtype), 'start': part.start}
                          for part in spec.parts]},
            'normalises': list(experiment.normalise.moments),
            'parameters': sum(math.prod(x.shape) for x in jax.tree.leaves(self._player.params))},
        'state': [_as_json(x) for x in jax.tree.leaves(self._state)],
        'policy': {'name': experiment.policy_name,
                   'size': experiment.algorithm.acted_shapes.distribution.shape[-1],
                   'distribution': _NUMBERS.get(
                       experiment.policy_name, experiment.loss.policy_reads)} | (
                           {} if mask is None else {'mask': _MASK.format(name=mask.name)}),
        'action': action_space,
        'programs': {
            name: {'file': PROGRAMS[name],
                   'arguments': [each for each in _ARGUMENTS
                                 if each != 'key' or name == 'drawn'],
                   'results': list(_RESULTS),
                   'platforms': list(program.platforms),
                   'calling_convention': program.calling_convention_version}
            for name, program in programs.items()},
        'arguments': _ARGUMENTS,
        'results': _RESULTS,
        'call': 'jax.export.deserialize(bytes of the file).call(*arguments)',
        'tolerance': TOLERANCE,
        'versions': record.versions()}

  def check(self, program: jax_export.Exported) -> dict[str, Any]:
    """Compares the program that draws with the agent on a few rows.

    Returns:
      The number of rows, and the largest difference.

    Raises:
      ValueError: a difference is larger than the tolerance.
    """
    rng = np.random.default_rng(0)
    rows = _CHECKED_ROWS
    obs = self._sample(rng, rows)
    state = [rng.uniform(-1, 1, (rows, *x.shape)).astype(x.dtype)
             for x in jax.tree.leaves(self._state)]
    is_first = np.arange(rows) % 2 == 0
    params = checkpoints.leaves(self._player.params)

    def expected_results(arguments):
      params, obs, state, is_first = arguments
      state = jax.tree.unflatten(jax.tree.structure(self._state), state)
      params = jax.tree.unflatten(self._tree, [params[name] for name in self._names])
      acted = self._player.act(params, self._observe(obs), state, is_first, None)
      return jax.tree.leaves(acted.carry), acted.distribution

    with jax.default_device(self._player.device):
      expected = jax.jit(expected_results)((params, obs, state, is_first))
      # The other program differs only in how it chooses among the same numbers.
      _, *actual = program.call(params, obs, state, is_first, np.zeros(2, np.uint32))
    largest = 0.0
    for x, y in zip(*map(jax.tree.leaves, jax.device_get((actual, expected))), strict=True):
      differences = np.abs(x - y)
      largest = max(largest, float(np.max(differences, initial=0.0)))
      if not np.all(differences <= TOLERANCE['absolute'] + TOLERANCE['relative'] * np.abs(y)):
        raise ValueError(f'export: the exported network {self._experiment.network_name} computes '
                         f'something else than the agent: they differ by up to {largest:.2g}')
    return {'rows': rows, 'largest_difference': largest}

  def _sample(self, rng: np.random.Generator, rows: int) -> Any:
    """Returns observations [rows, ...] that a task may have."""
    def sample(x):
      if jnp.issubdtype(x.dtype, jnp.floating):
        return rng.normal(size=(rows, *x.shape)).astype(x.dtype)
      # Numbers from 0 to 1 are in every space of integers but those that begin later.
      high = 256 if x.dtype == np.uint8 else 2
      return rng.integers(0, high, (rows, *x.shape)).astype(x.dtype)
    return jax.tree.map(sample, self._obs)


def _shapes(space: Any) -> Any:
  """Returns the shapes and types of one observation of a space of Gymnasium or gymnax."""
  kind = type(space).__name__
  if kind == 'Dict':
    return {name: _shapes(inner) for name, inner in space.spaces.items()}
  if kind == 'Tuple':
    return tuple(_shapes(inner) for inner in space.spaces)
  return jax.ShapeDtypeStruct(tuple(space.shape or ()), _stored(_dtype_of(space)))


def _dtype_of(space: Any) -> Any:
  """Returns the dtype of arrays of a space, as `spaces` stores it; None for one without."""
  is_box = type(space).__name__ == 'Box'
  return spaces.box_dtype(space) if is_box else getattr(space, 'dtype', None)


def _stored(dtype: Any) -> np.dtype:
  """Returns the type that JAX has for a type of NumPy: float32 for float64, and so on."""
  return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _as_json(x: jax.ShapeDtypeStruct) -> dict[str, Any]:
  return {'shape': list(x.shape), 'dtype': str(x.dtype)}


