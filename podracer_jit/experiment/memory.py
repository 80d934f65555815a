"""Estimates the memory of a run by the shapes of its arrays, and compares it with the machine's.

The estimate is a lower bound: it adds arrays that exist at the same time. It leaves out memory that
shapes do not determine: the environments, activations of the network, copies between devices,
Python and the libraries. So a run that is refused would not fit, but a run that is accepted may
still run out of memory.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit import options
from podracer_jit.actor.acting import Acting
from podracer_jit.agents import running_moments
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.experiment import build, placing
from podracer_jit.experiment.schema import EnvOptions, Experiment, TrainingOptions
from podracer_jit.learner.updates import num_microbatches
from podracer_jit.losses.algorithm import Acted, Algorithm, ForActors
from podracer_jit.replay import buffer
from podracer_jit.runtime.machine import host_memory

HOST = 'this machine'
_USUAL_OBS = 4 * 84 * 84  # bytes of an observation of Atari
LARGE_REPLAY = 10_000_000  # bytes from which a replay is worth a line
NEAR = 0.8  # share of the memory above which a run gets a warning

_Place = jax.Device | str  # a device with memory of its own, or HOST


class Part(NamedTuple):
  """Arrays that a run keeps in one place."""

  name: str
  nbytes: int
  place: _Place
  fields: tuple[str, ...]  # the config's fields that determine its size


def estimate(run: build.Run) -> list[Part]:
  """Returns the parts of the memory that this process needs at least; allocates nothing.

  There are two moments: while actors act, and while the learner computes a gradient. For each
  place, the result has the parts of the moment that needs more. All CPU devices are one place, the
  host.
  """
  acting, learning = _moments(run)
  totals = [_total_by_place(parts) for parts in (acting, learning)]
  # If both moments need the same in a place, the parts of the first count.
  return [part for i, parts in enumerate((acting, learning)) for part in parts
          if part.nbytes and totals[i][part.place] == max(x[part.place] for x in totals)
          and (i == 0 or totals[0][part.place] != totals[1][part.place])]


def check(run: build.Run, copies: int = 1) -> list[str]:
  """Compares the estimate with the memory of each place.

  Args:
    run: of the experiment.
    copies: number of such runs in this process.

  Returns:
    One line for each place whose memory is nearly used up.

  Raises:
    ValueError: the run does not fit; the message is one line and begins with the field that is the
      likely cause.
  """
  parts = [part._replace(nbytes=part.nbytes * copies) for part in estimate(run)]
  warnings = []
  for place, needed in _total_by_place(parts).items():
    limit = capacity(place)
    if limit is None or needed <= NEAR * limit:
      continue
    line = _describe(run, [part for part in parts if part.place == place], limit)
    if needed > limit:
      raise ValueError(line)
    warnings.append(line)
  return warnings


def of_replay(run: build.Run, copies: int = 1) -> list[str]:
  """Returns a line about a large replay: its memory, and that of the disk; none of a small one.

  Args:
    run: of the experiment.
    copies: number of such runs in this process.
  """
  size = copies * run.place.mesh.size * _bytes_on_device(run.learner.replay_shapes())
  if not run.experiment.algorithm.learns_from_replay or size < LARGE_REPLAY:
    return []
  saved = run.experiment.checkpoint
  on_disk = ''
  if saved.replay:
    has_one_segment = run.experiment.resumes_exactly and not run.experiment.env.renew_every_updates
    kept = 2 if has_one_segment else saved.keep + 1
    on_disk = (', and as much on the disk in each checkpoint, of which there are up to '
               f'{kept + 1} while one is written')
  return [f'replay.capacity: {run.experiment.replay.capacity:,} items take {_gigabytes(size)} of '
          f'memory{on_disk}']


def capacity(place: _Place) -> int | None:
  """Returns the bytes of a place's memory; None if they are unknown."""
  if place == HOST:
    return host_memory()
  return (place.memory_stats() or {}).get('bytes_limit')


def _moments(run: build.Run) -> tuple[list[Part], list[Part]]:
  """Returns the parts that exist while actors act, and while a gradient is computed."""
  train_state = run.learner.state_shapes()
  params = train_state.params
  given = jax.eval_shape(run.experiment.algorithm.for_actors, train_state)
  always = _learner_parts(run, nbytes(train_state))
  state, experience, episodes = _actor_bytes(run)
  experiment = run.experiment
  place = run.place
  rollout_fields = ('env.num_envs', 'unroll_length', 'env.task')
  acting = []
  learning = []

  for device in _actor_devices(run):
    always.append(Part("environments' observations and states", state * _states_at_once(run),
                       _place(device), rollout_fields))
    acting.append(Part('rollouts', experience * _rollouts_at_once(run), _place(device),
                       rollout_fields))
    if not experiment.scheme.graph.one_program:
      acting.append(Part("actors' parameters", nbytes(given), _place(device),
                         _network_fields(run)))

  if experiment.scheme.graph.one_program:
    updates = min(experiment.placement.updates_per_call, build.segment_end(experiment, 0))
    always.append(Part('reports', updates * episodes, _place(place.learners[0]),
                       ('placement.updates_per_call', *rollout_fields)))

  gradient = nbytes(running_moments.weights(params))
  learning += [Part('gradient', gradient, _place(device), _network_fields(run))
               for device in _optimizer_devices(run)]
  actors = _actors(run)
  shares = place.mesh.size * (len(place.workers) if experiment.scheme.each else 1)
  for device in place.learners:
    if not experiment.scheme.graph.free_rates:
      learning.append(Part('rollouts', experience * actors // shares, _place(device),
                           rollout_fields))
    learning.append(Part('minibatch indices', _index_bytes(run) // shares, _place(device),
                         ('num_epochs', *rollout_fields)))
    learning.append(Part('observations of a pass of the network', _pass_bytes(run),
                         _place(device), rollout_fields))
    learning.append(Part('items of a pass of the network', _drawn_bytes(run), _place(device),
                         ('replay.batch_size',)))
  return always + acting, always + learning


def _learner_parts(run: build.Run, state_bytes: int) -> list[Part]:
  """Returns the parts of the train state: a copy on each device, and each device's replay."""
  replay = run.learner.replay_shapes()
  parts = [Part('parameters and optimizer state', state_bytes, _place(device),
                _network_fields(run)) for device in _optimizer_devices(run)]
  name, fields, copies = 'replay', ('replay.capacity',), 1
  if not run.experiment.algorithm.learns_from_replay:
    # The phase reads a copy, in which groups are side by side.
    name, fields, copies = 'rollouts of the auxiliary phase', ('env.num_envs', 'unroll_length'), 2
  parts += [Part(name, copies * _bytes_on_device(replay), _place(device), fields)
            for device in run.place.learners]
  return parts


def _actors(run: build.Run) -> int:
  """Returns the number of actors of the run, in all processes."""
  return len(run.place.actors) * run.place.processes


def _actor_devices(run: build.Run) -> tuple[jax.Device, ...]:
  """Returns the device of each of this process's actors; those of a cluster have their own."""
  if run.experiment.placement.is_remote:
    return ()
  return run.place.actors


def _optimizer_devices(run: build.Run) -> Sequence[jax.Device]:
  """Returns this process's devices with an optimizer; with separate updates a run has one."""
  learners = run.place.learners
  if not run.experiment.scheme.graph.separate_updates:
    return learners
  return [device for device in learners if device == run.place.mesh.devices.flat[0]]


def _rollouts_at_once(run: build.Run) -> int:
  """Returns the number of an actor's rollouts that exist while it acts.

  With a lag, the actor makes the second rollout while the learner uses the first.
  """
  return 2 if run.experiment.scheme.lag and build.segment_end(run.experiment, 0) > 1 else 1


def _states_at_once(run: build.Run) -> int:
  """Returns the number of an actor's states that exist while it acts.

  Checkpoints have the state that belongs to an update, and actors are ahead of it.
  """
  experiment = run.experiment
  donated = experiment.scheme.graph.one_program or not experiment.deterministic
  return 1 if donated else 2 + bool(experiment.scheme.lag)


def _actor_bytes(run: build.Run) -> tuple[int, int, int]:
  """Returns the bytes of an actor's state, of its rollout, and of a rollout's episodes."""
  experiment = run.experiment
  pools = experiment.num_shards // _actors(run)
  return tuple(size * pools for size in bytes_of_pool(experiment, run.acting))


def bytes_of_pool(experiment: Experiment, acting: Acting) -> tuple[int, int, int]:
  """Returns the bytes of a vector environment's state, of its rollout, and of its episodes."""
  vector_env = build.vector_env_of_shapes(experiment)
  # Tracing the network itself would take seconds at every start.
  acting = acting._replace(algorithm=_AlgorithmOfShapes(acting.algorithm))
  state = build.shapes_of_pool(experiment, acting)
  _, experience = jax.eval_shape(acting.rollout([vector_env]), ForActors(None), state)
  return (nbytes(state.envs), nbytes(experience), nbytes([x.episodes for x in experience]))


def _index_bytes(run: build.Run) -> int:
  """Returns the bytes of an update's minibatch indices; 0 if epochs do not shuffle."""
  experiment = run.experiment
  algorithm = experiment.algorithm
  if algorithm.learns_from_replay or not algorithm.shuffles:
    return 0
  items = experiment.num_grad_shards * experiment.group_items
  return experiment.num_epochs * items * np.dtype(np.int32).itemsize


def _pass_bytes(run: build.Run) -> int:
  """Returns the bytes of the observations of a pass of the network for a gradient, on one device.

  They are gathered from the rollout. Vectors of integers, such as one-hots, and normalised images
  are also converted to float32 at once, and other images a few rows at a time. Stacks of frames are
  left out.
  """
  experiment = run.experiment
  spec = experiment.spec
  if experiment.algorithm.learns_from_replay or spec.stack > 1:
    return 0
  rows_per_item = experiment.items.network_rows
  items = experiment.group_items // experiment.num_minibatches
  passes = num_microbatches(items, rows_per_item, experiment.microbatch_rows)
  converted = 0
  is_whole = len(spec.obs_shape) == 1 or experiment.normalise.obs
  if is_whole and not np.issubdtype(spec.obs_dtype, np.floating):
    converted = math.prod(spec.obs_shape) * np.dtype(np.float32).itemsize
  return items // passes * rows_per_item * (obs_bytes(spec) + converted)


def _drawn_bytes(run: build.Run) -> int:
  """Returns the bytes of the items of a pass of the network, on one device; 0 without a replay."""
  experiment = run.experiment
  if not experiment.algorithm.learns_from_replay:
    return 0
  source = run.learner.source
  passes = num_microbatches(source.group_batch, experiment.items.network_rows,
                            experiment.microbatch_rows)
  groups_at_once = source.groups.local if source.groups.together else 1
  return nbytes(drawn_shapes(run)) * groups_at_once // (source.groups.count * passes)


def drawn_shapes(run: build.Run) -> Any:
  """Returns the shapes of the items that a gradient step draws, as of one group."""
  store = run.learner.source.store
  alone = store._replace(blocks=store.blocks._replace(mesh_size=1))
  replay: buffer.State = run.learner.replay_shapes()
  places = jax.ShapeDtypeStruct((run.experiment.replay.batch_size,), jnp.int32)
  return jax.eval_shape(alone.read, replay, places)


def _network_fields(run: build.Run) -> tuple[str, ...]:
  """Returns the config's fields that determine the sizes of layers."""
  experiment = run.experiment
  names = [f'network.{name}' for name, default in options.defaults(
      type(experiment.network)).items() if isinstance(default, tuple | int)
      and not isinstance(default, bool)]
  return (*names, *(['network.core_size'] if experiment.torso_options.recurrent else []),
          'env.task')


def _describe(run: build.Run, parts: Sequence[Part], limit: int) -> str:
  """Returns the error message of a place whose memory does not suffice.

  Args:
    run: the run of the experiment.
    parts: the parts in this place.
    limit: bytes of the place.
  """
  by_name: collections.Counter[str] = collections.Counter()
  for part in parts:
    by_name[part.name] += part.nbytes
  needed = sum(by_name.values())
  shown = ', '.join(f'{name} {_gigabytes(size)}' for name, size in by_name.most_common()
                    if size >= 0.01 * needed)
  largest = by_name.most_common(1)[0][0]
  fields = next(part.fields for part in parts if part.name == largest)
  place = parts[0].place
  field = _largest_field(run, fields)
  if field == 'env.task':
    shown += f' (observations are {run.experiment.spec.obs_shape})'
  return (f'{field}: the run needs at least {_gigabytes(needed)} of memory: '
          f'{shown}; {place} has {_gigabytes(limit)}')


def _largest_field(run: build.Run, fields: Sequence[str]) -> str:
  """Returns the field that is the largest multiple of its default, which is the likely cause."""
  experiment = run.experiment
  sections = {'network': (experiment.network, experiment.torso_options),
              'replay': (experiment.replay,), 'placement': (experiment.placement,),
              'env': (experiment.env,), '': (experiment,)}
  of_experiment = options.defaults(TrainingOptions) | options.defaults(EnvOptions)

  def ratio(field: str) -> float:
    # A task has no default; the size of its observations is compared with Atari's.
    if field == 'env.task':
      return obs_bytes(experiment.spec) / _USUAL_OBS
    section, _, name = field.rpartition('.')
    for part in sections[section]:
      value = getattr(part, name, None)
      default = options.defaults(type(part)).get(name) if section else of_experiment[name]
      default = default or placing.FIXED.get(name)
      if isinstance(value, int | tuple | list) and value and default:
        return np.max(value) / np.max(default)
    return 0.0

  return max(fields, key=ratio)


def obs_bytes(spec: EnvSpec) -> int:
  """Returns the bytes of one observation."""
  return math.prod(spec.obs_shape) * np.dtype(spec.obs_dtype).itemsize


def _gigabytes(size: int) -> str:
  """Returns a number of bytes in gigabytes, with two digits or more."""
  gigabytes = size / 1e9
  return f'{gigabytes:,.0f} GB' if gigabytes >= 10 else f'{gigabytes:.2g} GB'


def _total_by_place(parts: Sequence[Part]) -> collections.Counter:
  """Returns the bytes that the parts need in each place."""
  totals: collections.Counter = collections.Counter()
  for part in parts:
    totals[part.place] += part.nbytes
  return totals


def _place(device: jax.Device) -> _Place:
  """Returns the place of a device's memory; CPU devices share the host's."""
  return HOST if device.platform == 'cpu' else device


def nbytes(tree: Any) -> int:
  """Returns the bytes of the arrays of a tree, or of their shapes."""
  return sum(int(np.prod(x.shape, dtype=object)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _bytes_on_device(tree: Any) -> int:
  """Returns the bytes that a device of the learner has of a replay, from its sharded shapes."""
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
             for x in jax.tree.leaves(tree))


class _AlgorithmOfShapes:
  """Replaces the algorithm of actors while shapes are computed."""

  def __init__(self, algorithm: Algorithm):
    self._algorithm = algorithm

  def __getattr__(self, name: str) -> Any:
    return getattr(self._algorithm, name)

  def at(self, steps: None) -> _AlgorithmOfShapes:
    """Returns itself; see `Algorithm.at`."""
    del steps
    return self

  def act(self, params: Any, obs: jax.Array, *args: Any) -> Acted:
    """Returns zeros of the shapes of `Algorithm.act`, whose arguments these are."""
    del params, args
    return jax.tree.map(lambda x: jnp.zeros((len(obs), *x.shape[1:]), x.dtype),
                        self._algorithm.acted_shapes)
