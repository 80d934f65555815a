"""Builds the components of a run from its experiment, and the segments of the run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer_jit import loops, options, schedules
from podracer_jit.actor import kept_envs, priorities, rollouts
from podracer_jit.actor.acting import Acting, FirstReady, InStep
from podracer_jit.actor.rollout_program import KeptPrograms, RolloutProgram
from podracer_jit.actor.rollouts import ActorState
from podracer_jit.agents import action_masks, networks, running_moments
from podracer_jit.envs import frames
from podracer_jit.envs.families import family_of
from podracer_jit.envs.protocol import VectorEnvOfShapes
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.errors import EnvironmentFailed, OtherEpisodes
from podracer_jit.experiment import modules, placing
from podracer_jit.experiment.schema import Experiment
from podracer_jit.learner.from_replay import FromReplay
from podracer_jit.learner.from_rollouts import FromRollouts
from podracer_jit.learner.learner import (
  Learner,
  ReplayLearner,
  RolloutLearner,
  keys_for_acting,
)
from podracer_jit.losses.algorithm import Algorithm
from podracer_jit.numerics import counters
from podracer_jit.numerics.groups import Groups
from podracer_jit.options import INT32_MAX
from podracer_jit.replay import buffer
from podracer_jit.runtime import host, placement, stored_programs
from podracer_jit.runtime.channels import Closed
from podracer_jit.schemes import gradients, replaying, wiring
from podracer_jit.schemes.reports import Report, ReportQueue
from podracer_jit.schemes.table import SCHEMES
from podracer_jit.types import Rollout, TrainState

MAX_THREADS = 16_384  # of environments; Linux lets all processes have 32,768 by default
# Environments of segments whose threads did not end; this keeps them alive.
_in_use_for_ever: list[contextlib.ExitStack] = []


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of a run that all its segments share."""

  experiment: Experiment
  place: placement.Placement
  learner: Learner
  acting: Acting
  crew: Crew | None = None  # that acts elsewhere
  life: int = 0  # of the actors; those that were begun again have other random numbers
  # Programs that step environments, for the next segments; `dataclasses.replace` copies none.
  kept_programs: KeptPrograms = dataclasses.field(default_factory=dict, init=False)

  @property
  def plan(self) -> wiring.Plan:
    """The parts from which segments are wired."""
    experiment = self.experiment
    return wiring.Plan(
        experiment.scheme, self.place, self.learner, self.acting, experiment.env.num_envs,
        experiment.num_shards, experiment.total_steps, experiment.placement.updates_per_call,
        experiment.deterministic, self._gradient_workers, self.kept_programs)

  @property
  def described_place(self) -> dict[str, Any]:
    """The placement, as the headers of receipts have it, with the threads that there are."""
    described = placing.as_json(self.experiment.placement)
    return described | dict(env_threads=self.place.env_threads,
                            xla_threads=host.xla_threads() or described['xla_threads'])

  def _gradient_workers(self) -> list[gradients.GradientWorker]:
    """Returns the workers of a scheme in which U takes the gradient of each."""
    if self.crew:
      return self.crew.gradient_workers()
    return gradients.on_devices(self.learner, self.place)

  def initial_state(self) -> TrainState:
    """Returns the train state of update 0, without the replay, which `learner.allocate` adds."""
    return self.learner.initial_state(self.experiment.seed)

  def initial_state_later(self) -> Callable[[], TrainState]:
    """Starts to compute `initial_state`; returns the function that waits for it.

    The program compiles while environments start. The constructor of a pool holds Python's lock, so
    nothing can be traced meanwhile, but XLA compiles.
    """
    thread = concurrent.futures.ThreadPoolExecutor(1, 'first state')
    future = thread.submit(self.initial_state)
    thread.shutdown(wait=False)
    return future.result


# Updates of a segment that never ends.
_ENDLESS = INT32_MAX


class Snapshot(NamedTuple):
  """Where a run is between two updates, as its checkpoint has it."""

  # Without a replay if it begins empty. Of a new run, it may be the function that returns it.
  state: TrainState | Callable[[], TrainState]
  envs: Any | None = None  # as in `kept_envs`; None if the environments begin anew
  segment: int = 0  # index of the segment: the life of simulators, and of the pipeline
  first: int | None = None  # updates done when the segment began; None: it begins here
  before: Any = None  # with a lag, within a segment: what actors got before the last update
  # [R, num_shards, T, B, ...], what all vector environments were sent in the segment's rollouts;
  # None if they begin anew, or if `envs` has all of their state.
  sent: np.ndarray | None = None

  def whole(self) -> Snapshot:
    """Returns the snapshot with its state, which it waits for."""
    return self._replace(state=self.state()) if callable(self.state) else self

  @property
  def update(self) -> int:
    """Updates done."""
    return self.first if callable(self.state) else int(self.state.update)

  @property
  def begun(self) -> int:
    """Updates done when the segment began."""
    return self.update if self.first is None else self.first


class Crew(Protocol):
  """Interface of what acts, and computes gradients, outside of this process."""

  def of(self, experiment: Experiment) -> Crew:
    """Returns what does the same for another experiment, instead of for this one."""

  def actors(self, index: int, stop: Callable[[], bool]) -> list[wiring.Actor]:
    """Returns the actors of a segment, in order.

    Args:
      index: index of the segment.
      stop: whether the run shall stop; then nothing waits long for a rollout or a gradient.
    """

  def gradient_workers(self) -> list[gradients.GradientWorker]:
    """Returns the gradient workers, in order."""

  def metrics(self) -> dict[str, float]:
    """Returns figures since the last call, for the record of an update."""

  def lives(self) -> dict[str, int]:
    """Returns the lives of the actors that were begun again, by name."""


def make_run(experiment: Experiment, crew: Crew | None = None,
             place: placement.Placement | None = None) -> Run:
  """Finds the devices of an experiment and builds everything but environments.

  Args:
    experiment: to build.
    crew: that acts, if `placement.cluster` asks for one.
    place: devices that were found already.

  Raises:
    ValueError: the devices do not fit; the message names the field, its value and a right one.
  """
  if crew is None and experiment.placement.is_remote:
    raise ValueError(f'placement.cluster: {experiment.placement.cluster} is for training; for all '
                     'else it must be none')
  if place is None:
    place = placement.resolve(experiment.placement, experiment.num_shards,
                              experiment.spec.is_function)
    for problem in _problems_of_devices(experiment, place):
      raise ValueError(problem)
  # This checks exploration, which acting reads.
  acting = make_acting(experiment, place.actors[0].platform)
  check_network(experiment)
  return Run(experiment, place, make_learner(experiment, place.mesh), acting, crew)


def _problems_of_devices(experiment: Experiment, place: placement.Placement) -> Iterator[str]:
  """Yields a line for each part of an experiment that does not fit its devices."""
  scheme = experiment.scheme
  name = experiment.scheme_name
  mesh_size = place.mesh.size
  if experiment.num_grad_shards % mesh_size:
    yield options.uneven(experiment.group_count(),
                         experiment.placement.learner_count(mesh_size, place.processes))
  if experiment.env.num_envs % mesh_size:
    yield options.uneven(experiment.env_count(),
                         experiment.placement.learner_count(mesh_size, place.processes))
  actors = len(place.actors) * place.processes
  if experiment.env_batch and experiment.num_shards != actors:
    yield ('num_shards: must be the number of actors where they are asynchronous '
           f'(env_batch = {experiment.env_batch}), {actors}; got {experiment.num_shards}')
  threads = experiment.num_shards // place.processes * experiment.placement.env_threads
  if threads > MAX_THREADS and not experiment.placement.is_remote:
    yield (f'placement.env_threads: {experiment.placement.env_threads} threads of each pool '
           f'(num_shards = {experiment.num_shards}) are {threads:,}; must be at most '
           f'{MAX_THREADS:,} in a process')
  if place.processes > 1 and (scheme.alone or not scheme.graph.several_processes):
    able = [other_name for other_name, other in SCHEMES.items()
            if other.graph.several_processes and not other.alone]
    on_cluster = '' if scheme.deterministic or scheme.graph.one_program else (
        f'; actors of {name} on other machines are those of placement.cluster = ray, without '
        '--distributed')
    yield (f'scheme: {name} is for one process, not {place.processes}; {", ".join(able)} take '
           f'several{on_cluster}')
  workers = tuple(device for device in place.workers if device.process_index == place.process)
  if (scheme.alone or scheme.colocated) and place.actors != workers:
    able = [other_name for other_name, other in SCHEMES.items()
            if not (other.alone or other.colocated) and other.replay == scheme.replay]
    yield (f'scheme: {name} acts where it learns; with actor_platform = '
           f'{experiment.placement.actor_platform} actors are on {_kinds(place.actors)}, learners '
           f'on {_kinds(workers)}; schemes whose actors may have other devices: '
           f'{", ".join(able)}')


def _kinds(devices: Sequence[jax.Device]) -> str:
  """Returns the platform of some devices with their numbers, such as 'cpu 0, 1'."""
  return f'{devices[0].platform} {", ".join(str(device.id) for device in devices)}'


def check_network(experiment: Experiment) -> None:
  """Checks by shapes the network that the algorithm makes, and how it acts with it.

  Raises:
    ValueError: the network fails, its layers shrink an observation to nothing, or it gives the
      policy something else than this reads; or the algorithm cannot act, or make its state.
  """
  algorithm = experiment.algorithm
  name = experiment.network_name
  spec = action_masks.seen(experiment.spec)
  sizes = ', '.join(f'{option} = {options.shown(getattr(experiment.network, option))}'
                    for option in options.meanings(type(experiment.network)))
  described = f'{name} with {sizes}' if sizes else name
  nothing_left = (f'network.name: {described} leaves nothing of observations of '
                  f'{spec.obs_shape}; take smaller kernels and strides, or larger frames')
  headless = _without_heads(experiment)
  own = [method for method in ('make_network', 'initial_carry', 'init')
         if overrides(algorithm, method)]
  try:
    headless.network  # noqa: B018 - made here, and kept
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own network may raise anything
    if 'make_network' not in own and isinstance(error, ValueError):
      raise ValueError(f'network.{error}') from None
    with modules.one_line(experiment.fields, _method(experiment, 'make_network')):
      raise
  key = jax.eval_shape(jax.random.key, 0)
  try:
    variables = jax.eval_shape(headless.init, key)
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own network may raise anything
    if own:
      with modules.one_line(experiment.fields, _method(experiment, own[-1])):
        raise
    if type(experiment.network).__module__ == networks.__name__:
      # The output size of a shipped layer became zero or negative.
      raise ValueError(nothing_left) from None
    raise ValueError(f'network.name: {described} fails on observations of '
                     f'{spec.obs_shape}: {type(error).__name__}: '
                     f'{options.shorten(str(error))}') from error
  if not all(x.size for x in jax.tree.leaves(variables)):
    raise ValueError(nothing_left)
  makes_variables = type(algorithm).init is Algorithm.init
  if makes_variables and set(variables) - {'params', 'moments'}:
    raise ValueError(f'network.name: {name} has the variables {", ".join(variables)}; only params '
                     'can be trained')
  moments = set(experiment.normalise.moments)
  kept = set(running_moments.moments_of(variables))
  # An algorithm may keep more: moments of observations for itself, and of its targets.
  own = set() if algorithm.learns_from_replay else kept - {'returns', 'values'}
  if kept - own != moments - own or not moments <= kept:
    raise ValueError(f"loss.name: init of {experiment.loss_name} must return params['moments'] "
                     f'with {", ".join(sorted(moments)) or "nothing"}, the quantities that '
                     'normalise names, as init of Algorithm does')
  # Shipped networks can be called, and to trace a large one takes a second.
  if modules.named(experiment.fields) and makes_variables and (
      type(algorithm).act is Algorithm.act):
    _check_calls(experiment, variables)
  if headless is not algorithm:
    try:
      jax.eval_shape(algorithm.init, key)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own head may raise anything
      raise _of_heads(experiment, error) from error
  own = [method for method in ('init_target', 'make_optimizer') if overrides(algorithm, method)]
  with modules.one_line(experiment.fields, _method(experiment, ' or '.join(own)) if own
                        else f'optimizer.name: {type(experiment.optimizer).__name__}'):
    algorithm.state_shapes  # noqa: B018 - made here, and kept
  exploration_of(experiment)
  with modules.one_line(experiment.fields, who_acts(experiment)):
    algorithm.acted_shapes  # noqa: B018 - made here, and kept


def overrides(algorithm: Algorithm, method: str) -> bool:
  """Returns whether a method of an algorithm is a user's own."""
  return not getattr(type(algorithm), method).__module__.startswith('podracer_jit.')


def _method(experiment: Experiment, method: str) -> str:
  """Returns the field and the name of a method of the algorithm, for error messages."""
  return f'loss.name: {method} of {experiment.loss_name}'


def who_acts(experiment: Experiment) -> str:
  """Returns the field and the name of the part that is at fault if acting fails."""
  if overrides(experiment.algorithm, 'act'):
    return _method(experiment, 'act')
  if ':' in experiment.policy_name:
    return f'policy: {experiment.policy_name}'
  return f'network.name: {experiment.network_name}'


def _without_heads(experiment: Experiment) -> Algorithm:
  """Returns an algorithm whose network has no auxiliary heads; the same one if it has none.

  Raises:
    ValueError: the heads cannot be made, or its network has no place for them.
  """
  algorithm = experiment.algorithm
  try:
    if not algorithm.heads():
      return algorithm
    network = algorithm.make_network()
    if 'heads' not in {field.name for field in dataclasses.fields(network)}:
      raise TypeError(f'{type(network).__name__} takes no heads')
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own heads may raise anything
    raise _of_heads(experiment, error) from error
  headless = dataclasses.replace(algorithm)
  # A copy of a frozen dataclass; `network` is cached in its __dict__.
  vars(headless)['network'] = action_masks.masked(network.clone(heads=None), experiment.spec)
  return headless


def _of_heads(experiment: Experiment, error: BaseException) -> ValueError:
  return ValueError(f'loss.name: the heads of {experiment.loss_name} fail on '
                    f'{experiment.spec.task}: {type(error).__name__}: '
                    f'{options.shorten(str(error))}')


def _check_calls(experiment: Experiment, variables: Any) -> None:
  """Traces a call of the network as actors and learner make it: several rows, and nothing random.

  Args:
    experiment: to build; its algorithm has an actor-critic.
    variables: the shapes of the network's variables.

  Raises:
    ValueError: the call fails, changes variables, or returns other shapes.
  """
  name = experiment.network_name
  spec = experiment.spec
  rows = 2, 3

  def call(variables, obs, valid):
    algorithm = experiment.algorithm
    return algorithm.network.apply(variables, obs, algorithm.initial_carry(rows[1]), valid)

  try:
    outputs = jax.eval_shape(call, variables,
                             jax.ShapeDtypeStruct((*rows, *spec.obs_shape), spec.obs_dtype),
                             jax.ShapeDtypeStruct(rows, bool))
  except flax.errors.InvalidRngError as error:
    # The rest of flax's message is a link.
    cause = str(error).partition(' (http')[0]
    raise ValueError(f'network.name: {name} draws random numbers in each call ({cause}), but '
                     'actors and learner must compute the same probabilities; leave dropout out, '
                     'or make it deterministic=True') from error
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own network may raise anything
    raise ValueError(f'network.name: {name} fails on {rows[0]} rows of {rows[1]} environments with '
                     f'observations of {action_masks.seen(spec).obs_shape}, though not on a '
                     f'single one: '
                     f'{type(error).__name__}: {options.shorten(str(error))}') from error
  size = experiment.policy.dist_size
  wanted = (*rows, size), rows
  shapes = tuple(getattr(output, 'shape', None) for output in outputs[:2])
  if shapes[0] is None or shapes[0][:2] != rows or shapes[1] != rows:
    raise ValueError(f'network.name: {name} must return arrays {wanted[0]} and {wanted[1]} for '
                     f'{rows[0]} rows of {rows[1]} environments, got {shapes[0]} and {shapes[1]}')
  if shapes[0][2:] != (size,):
    raise ValueError(f'policy: {experiment.policy_name} reads {size} numbers, and {name} gives '
                     f'{shapes[0][2]}')


def make_learner(experiment: Experiment, mesh: Mesh) -> Learner:
  """Returns the learner of an experiment on a mesh."""
  algorithm = experiment.algorithm
  num_envs = experiment.env.num_envs
  count = experiment.num_grad_shards
  # XLA's all-reduce adds one gradient of each device, so each device is one group.
  if not experiment.exact_reduce and not algorithm.learns_from_replay:
    count = mesh.size
  # With a replay, `envs` has no meaning: a group has a share of a batch.
  groups = Groups(count, num_envs // count, mesh.size, experiment.exact_reduce,
                  together=mesh.devices.flat[0].platform != 'cpu')
  if not algorithm.learns_from_replay:
    return RolloutLearner(
        FromRollouts(algorithm, groups, experiment.num_epochs, experiment.num_minibatches,
                     experiment.microbatch_rows), mesh,
        rollout_shapes(experiment, groups.envs) if algorithm.auxiliary() else None)
  replay = experiment.replay
  blocks = groups._replace(count=experiment.replay_blocks,
                           envs=num_envs // experiment.replay_blocks)
  store = buffer.Replay(
      replay.capacity, blocks, experiment.unroll_length, experiment.spec.stack, experiment.items,
      replay.eviction, replay.priority_exponent, replay.eviction_exponent, replay.copies,
      experiment.spare_rollouts)
  return ReplayLearner(
      FromReplay(algorithm, groups, store, replay, experiment.microbatch_rows), mesh,
      priorities.shapes(algorithm, blocks.envs))


def rollout_shapes(experiment: Experiment, num_envs: int) -> Rollout:
  """Returns the shapes of a rollout [T, num_envs, ...] as the algorithm's methods get it."""
  algorithm = experiment.algorithm
  spec = experiment.spec
  steps = experiment.unroll_length

  def zeros():
    obs = frames.begin(jnp.zeros((num_envs, *spec.obs_shape), spec.obs_dtype), steps, spec.stack)
    rollout = rollouts.empty_rollout(algorithm, obs, num_envs, steps)
    carry = jax.tree.map(lambda x: x[None], algorithm.initial_carry(num_envs))
    returns = rollout.reward if experiment.normalise.reward else None
    return rollout._replace(episodes=None, carry=carry, discounted_return=returns)

  return jax.eval_shape(zeros)


def make_acting(experiment: Experiment, platform: str = 'cpu') -> Acting:
  """Returns the way in which the actors of an experiment act, on devices of a platform."""
  algorithm = experiment.algorithm
  if experiment.env_batch:
    return FirstReady(algorithm)
  return InStep(algorithm, exploration_of(experiment),
                algorithm.discount if experiment.normalise.reward else None,
                first_apart=platform != 'cpu')


def exploration_of(experiment: Experiment) -> np.ndarray | None:
  """Returns the constants of all environments, as `Algorithm.exploration` returns them.

  Raises:
    ValueError: there is not one for each environment.
  """
  num_envs = experiment.env.num_envs
  algorithm = experiment.algorithm
  if schedules.scheduled(algorithm):
    algorithm = algorithm.at(counters.zero(experiment.total_steps))
  with modules.one_line(experiment.fields, _method(experiment, 'exploration')):
    exploration = algorithm.exploration(num_envs)
    if exploration is not None and np.shape(exploration) != (num_envs,):
      raise ValueError(f'must return an array ({num_envs},), a number for each environment; got '
                       f'{np.shape(exploration)}')
  return None if exploration is None else np.asarray(exploration)


class Events(NamedTuple):
  """Functions that are called while a segment is made."""

  # Whether the run shall stop: environments are replayed no further, and nobody waits for others.
  stop: Callable[[], bool] = lambda: False
  # Called with the steps that were replayed, and all steps to replay.
  replaying: Callable[[int, int], None] = lambda done, total: None
  # The next update after this one at which `after` must be called.
  next_pause: Callable[[int], int] = lambda update: _ENDLESS
  # Called by the thread that learns, after each call of updates, with the position, and a function
  # that waits until all reports are written; whether the segment ends here.
  after: Callable[[wiring.Position, Callable[[], None]], bool] = lambda position, wait: False
  # What environments are made in.
  starting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
  # (run, index of the segment) -> the actors that `start_early` has made for it; () if it has not.
  early: Callable[[Run, int], Sequence[wiring.LocalActor]] = lambda run, index: ()


_NO_EVENTS = Events()


def compiles_each_segment(run: Run) -> bool:
  """Returns whether each segment of a run compiles programs, so that `start_early` saves time."""
  spec = run.experiment.spec
  # The environments of Python may use something that only one of them can have, such as a port.
  has_addresses = not (spec.is_function or spec.calls_python) and not run.crew
  return has_addresses and not all(map(stored_programs.is_supported, _devices_of_actors(run)))


def start_early(run: Run, index: int, stack: contextlib.ExitStack) -> list[wiring.LocalActor]:
  """Starts the environments of a segment, and compiles their programs, before it begins.

  Args:
    run: the run that the segment belongs to.
    index: of the segment.
    stack: closes the environments on its exit.

  Returns:
    The actors of the segment, for `Events.early`.

  Raises:
    EnvironmentFailed: an environment has failed.
  """
  actors = []
  for ids, device in _places_of_actors(run):
    actors.append(make_actor(run, index, ids, device))
    stack.callback(actors[-1].rollout_program.close)
    run.experiment.scheme.graph.load(run.plan, actors[-1], segment_end(run.experiment, 0))
  return actors


def make_actors(run: Run, snapshot: Snapshot, stack: contextlib.ExitStack,
                events: Events = _NO_EVENTS) -> list[wiring.LocalActor]:
  """Starts the environments of this process's actors, unless that was done early.

  Args:
    run: the run of the actors.
    snapshot: where it is; the streams of its environments depend on the index of the segment.
    stack: closes the environments on its exit, after the programs that contain them have finished.
    events: called meanwhile.

  Returns:
    The actors, in order.

  Raises:
    Closed: the run was stopped meanwhile.
    EnvironmentFailed: an environment has failed, or cannot go on where it was.
  """
  envs = snapshot.envs
  if envs is not None and not jax.tree.leaves(snapshot.state.replay):
    envs = priorities.forget(envs)
  early = events.early(run, snapshot.segment)
  for actor in early:
    stack.callback(actor.rollout_program.close)
  actors = []
  replays = []
  for number, (ids, device) in enumerate(_places_of_actors(run)):
    if early:
      fresh = early[number]
    else:
      fresh = make_actor(run, snapshot.segment, ids, device)
      stack.callback(fresh.rollout_program.close)
    actors.append(fresh._replace(state=_going_on(fresh.state, envs, ids, device)))
    if snapshot.sent is not None:
      width = len(fresh.state.envs[0].ended)
      seeds = env_seeds(run.experiment.seed, snapshot.segment, fresh.first_env, width * len(ids))
      replays.append(replaying.Replay(
          run.experiment.env.task, seeds, fresh.rollout_program, fresh.state,
          snapshot.sent[:, ids.start:ids.stop], actors[-1].state))
  _replay(run, replays, events)
  return actors


def _devices_of_actors(run: Run) -> Sequence[jax.Device]:
  """Returns the device of each of this process's actors.

  One program has one actor, which steps the environments of all devices.
  """
  return run.place.actors[:1 if run.experiment.scheme.graph.one_program else None]


def _places_of_actors(run: Run) -> Iterator[tuple[range, jax.Device]]:
  """Yields the vector environments of each of this process's actors, and its device.

  Actors are numbered over all processes, so that seeds and keys do not depend on the processes.
  """
  devices = _devices_of_actors(run)
  for number, device in enumerate(devices, run.place.process * len(devices)):
    yield shards_of(run.experiment, number, len(devices) * run.place.processes), device


def _replay(run: Run, replays: Sequence[replaying.Replay], events: Events) -> None:
  """Replays in all processes, which go on together or not at all; see `make_actors`."""
  failure: Exception | None = None
  try:
    replaying.replay(replays, run.kept_programs, events.stop, events.replaying)
  except (Closed, EnvironmentFailed) as error:
    failure = error
  kinds = Closed, OtherEpisodes, EnvironmentFailed
  happened = placement.any_process([isinstance(failure, kind) for kind in kinds], run.place.mesh)
  for kind, is_raised in zip(kinds, happened, strict=True):
    if is_raised:
      raise failure or kind(f'env.task: {run.experiment.env.task} cannot go on where it was in '
                            'another process')


def _going_on(state: ActorState, envs: Any | None, ids: range, device: jax.Device) -> ActorState:
  """Returns the state of an actor whose environments go on.

  Args:
    state: the first state of its environments.
    envs: the state of all environments, as in `kept_envs`; None: they begin anew.
    ids: the actor's vector environments.
    device: of the actor.
  """
  if not envs:
    return state
  return jax.device_put(state._replace(envs=tuple(
      kept_envs.pick(envs, i, like) for i, like in zip(ids, state.envs, strict=True))), device)


def shards_of(experiment: Experiment, number: int, actors: int) -> range:
  """Returns the vector environments of an actor.

  Args:
    experiment: of the run.
    number: of the actor, from 0.
    actors: of the run.
  """
  per_actor = experiment.num_shards // actors
  return range(number * per_actor, (number + 1) * per_actor)


def make_actor(run: Run, index: int, ids: range, device: jax.Device) -> wiring.LocalActor:
  """Starts the environments of an actor for a segment; its `rollout_program` closes them.

  Args:
    run: what the segment belongs to.
    index: of the segment, from 0.
    ids: the actor's vector environments, as `shards_of` returns them.
    device: of the actor.
  """
  experiment = run.experiment
  width = experiment.env.num_envs // experiment.num_shards
  salts = (index, experiment.num_shards + run.life) if run.life else (index,)
  keys = keys_for_acting(experiment.seed, salts, ids)
  family = family_of(experiment.env.task)
  cores = run.place.env_cores

  def options_of(shard: int) -> Mapping[str, Any]:
    pinned = family.on_cores(cores[shard % len(cores)]) if cores else {}
    return {**experiment.env_options, **pinned}

  rollout_program = RolloutProgram([
      family.make_vector_env(experiment.env.task, options_of(i),
                             env_seeds(experiment.seed, index, i * width, width, run.life),
                             run.place.env_threads, experiment.env_batch)
      for i in ids])
  with contextlib.ExitStack() as failing:
    failing.callback(rollout_program.close)
    first_env = ids[0] * width
    state = run.acting.initial_state(rollout_program.vector_envs, keys, first_env)
    state = jax.device_put(state, device)
    failing.pop_all()
  return wiring.LocalActor(rollout_program, state, device, first_env)


def kept_env_shapes(run: Run) -> Any | None:
  """Returns the shapes of the environments' state in checkpoints; None if they do not have it."""
  if not run.experiment.deterministic:
    return None
  state = shapes_of_pool(run.experiment, run.acting)
  return kept_envs.shapes(state.envs[0], run.experiment.num_shards)


def shapes_of_pool(experiment: Experiment, acting: Acting) -> ActorState:
  """Returns the shapes of the state of an actor with one vector environment; starts nothing."""
  vector_env = vector_env_of_shapes(experiment)
  return jax.eval_shape(lambda key: acting.initial_state([vector_env], [key], 0),
                        jax.eval_shape(jax.random.key, 0))


def vector_env_of_shapes(experiment: Experiment) -> VectorEnvOfShapes:
  """Returns what replaces one of the vector environments while shapes are computed."""
  # All vector environments have the same shapes, so one is enough.
  num_envs = experiment.env.num_envs // experiment.num_shards
  vector_env = VectorEnvOfShapes(experiment.spec, num_envs, experiment.env_batch)
  if experiment.spec.is_function:
    task = experiment.env.task
    vector_env.state_shapes = family_of(task).state_shapes(task, experiment.env_options, num_envs)
  return vector_env


def segment_end(experiment: Experiment, first: int) -> int:
  """Returns the update with which a segment ends that began after update `first`."""
  return min(_ENDLESS, first + (experiment.env.renew_every_updates or _ENDLESS))


def snapshot_at(run: Run, position: wiring.Position, index: int, first: int) -> Snapshot:
  """Returns where a run is after an update of a segment; all processes call it.

  Args:
    run: the run.
    position: the position after the update, which is still valid.
    index: index of the segment.
    first: updates done when the segment began.
  """
  experiment = run.experiment
  is_within = experiment.resumes_exactly and position.update < segment_end(experiment, first)
  state = position.state
  if experiment.scheme.graph.separate_updates:
    state = run.learner.central.whole(state)
  envs = None
  if is_within or experiment.keeps_envs:
    envs = kept_envs.gather(position.actors())
  if not is_within:
    return Snapshot(state, envs, index + 1)
  before = None
  if experiment.scheme.lag:
    before = jax.tree.map(lambda x: jax.device_get(x.addressable_data(0)), position.before())
  return Snapshot(state, envs, index, first, before)


@contextlib.contextmanager
def segment(run: Run, snapshot: Snapshot, updates: int, report: Callable[[Report], None],
            events: Events = _NO_EVENTS) -> Iterator[wiring.Segment]:
  """Builds the rest of a segment: environments, and channels primed with the state.

  Args:
    run: the run that the segment belongs to.
    snapshot: where it begins, or goes on. The state is donated. A replay that is missing begins
      empty.
    updates: most updates; the segment may end earlier, as do `total_steps`.
    report: called with each Report, by a thread of its own.
    events: called meanwhile.

  Yields:
    The segment. On exit its environments are closed, after their programs have finished; unless
    the exit is a `loops.Stuck`, whose threads may still step them.

  Raises:
    Closed: it was stopped while its environments were replayed.
    EnvironmentFailed: an environment has failed, or cannot go on where it was.
  """
  with contextlib.ExitStack() as stack:
    try:
      with events.starting():
        if run.crew:
          actors = run.crew.actors(snapshot.segment, events.stop)
        else:
          actors = make_actors(run, snapshot, stack, events)
      yield _Graphs(report, events, stack).wire(run, actors, snapshot, updates)
    except loops.Stuck:
      # To close the environments would wait for those threads, and to free them would crash them.
      _in_use_for_ever.append(stack.pop_all())
      raise


class _Graphs:
  """Makes the graphs of a segment, one after the other, with the same environments."""

  def __init__(self, report: Callable[[Report], None], events: Events,
               stack: contextlib.ExitStack):
    """Takes what all graphs share; see `segment`.

    Args:
      report: called with each Report.
      events: called meanwhile.
      stack: closes the environments.
    """
    self._report = report
    self._events = events
    self._stack = stack

  def wire(self, run: Run, actors: Sequence[wiring.Actor], snapshot: Snapshot, updates: int
           ) -> wiring.Segment:
    """Returns a graph, ready to run.

    Args:
      run: with the devices of the graph.
      actors: its actors.
      snapshot: where it begins; the state is donated.
      updates: most updates; it may end earlier, as the segment ends.
    """
    reports = ReportQueue()

    def after(position: wiring.Position) -> bool:
      steps = counters.fetch_int(position.state.steps)
      is_over = self._events.after(position._replace(steps=steps), reports.wait_written)
      return is_over or steps >= run.experiment.total_steps

    update = snapshot.update
    index = snapshot.segment
    first = snapshot.begun
    end = segment_end(run.experiment, first)
    state = snapshot.state

    @functools.cache
    def state_later() -> TrainState:
      return run.learner.allocate(state() if callable(state) else state)

    start = wiring.SegmentStart(
        state_later, update, first, min(updates, end - update),
        snapshot.before, self._events.next_pause, after)
    del snapshot  # it would stay in memory
    # A thread may still compute the state.
    for actor in actors:
      run.experiment.scheme.graph.load(run.plan, actor, start.updates)
    workers, waits = run.experiment.scheme.graph.wire(run.plan, actors, start, reports)
    delay_s = run.experiment.placement.learner_delay_s
    if delay_s:
      workers = [worker.slower(delay_s) if worker.name == 'learner' else worker
                 for worker in workers]

    def go_on(run: Run, position: wiring.Position, updates: int) -> wiring.Segment:
      before = None
      if run.experiment.scheme.lag:
        before = placement.replicate(position.before(), run.place.mesh)
      state = placement.replicate(position.state, run.place.mesh)
      moved = self._moved(run, actors, position.actors())
      return self.wire(run, moved, Snapshot(state, None, index, first, before), updates)

    return wiring.Segment([*workers, reports.writer(self._report)], waits, go_on)

  def _moved(self, run: Run, actors: Sequence[wiring.LocalActor], states: Sequence[ActorState]
             ) -> list[wiring.LocalActor]:
    """Returns actors on the devices of a run that go on with the environments of others.

    Args:
      run: with the new devices.
      actors: those that have the environments, whose programs are not called any more.
      states: their states.
    """
    vector_envs = [env for actor in actors for env in actor.rollout_program.release()]
    envs = [env for state in states for env in state.envs]
    tokens = [state.token for state in states for _ in state.envs]
    width = run.experiment.env.num_envs // run.experiment.num_shards
    moved = []
    devices = _devices_of_actors(run)
    for number, device in enumerate(devices):
      ids = shards_of(run.experiment, number, len(devices))
      program = RolloutProgram(vector_envs[ids.start:ids.stop])
      self._stack.callback(program.close)
      state = ActorState(tokens[ids.start], tuple(envs[ids.start:ids.stop]))
      state = jax.device_put(state, device, may_alias=False)
      moved.append(wiring.LocalActor(program, state, device, ids.start * width))
    return moved


def on_devices(run: Run, place: placement.PlacementOptions) -> Run:
  """Returns a run with another placement.

  Raises:
    ValueError: it cannot have this placement.
  """
  other = make_run(dataclasses.replace(run.experiment, placement=place))
  # Programs that were compiled for one device can be loaded for another one.
  other.kept_programs.update(run.kept_programs)
  return other


def moved(snapshot: Snapshot, run: Run) -> Snapshot:
  """Returns a snapshot of a run without a replay on the learner's devices of another placement."""
  return snapshot._replace(state=placement.replicate(snapshot.whole().state, run.place.mesh))


def compile_learner(run: Run) -> None:
  """Compiles the program of the learner of a run whose actors have programs of their own."""
  experiment = run.experiment
  graph = experiment.scheme.graph
  if graph.one_program or graph.separate_updates:
    return
  shapes = run.learner.state_shapes()
  given = jax.eval_shape(experiment.algorithm.for_actors, shapes)
  _, experience = jax.eval_shape(run.acting.rollout([vector_env_of_shapes(experiment)]), given,
                                 shapes_of_pool(experiment, run.acting))
  sharding = NamedSharding(run.place.mesh, PartitionSpec())
  state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
  batch = placement.batch_shapes(experience[0], experiment.env.num_envs, run.place.mesh)
  run.learner.program.lower(state, batch).compile()
