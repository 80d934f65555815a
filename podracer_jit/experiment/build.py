"""Builds the components of a run from its experiment, and the segments of the run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit import loops, options
from podracer_jit.actor import kept_envs, priorities
from podracer_jit.actor.acting import Acting, FirstReady, ForReplay, InStep
from podracer_jit.actor.rollout_program import KeptPrograms, RolloutProgram
from podracer_jit.agents import networks
from podracer_jit.agents.networks import Model
from podracer_jit.envs.families import family_of
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.experiment import modules
from podracer_jit.experiment.schema import Experiment
from podracer_jit.learner import replay_updates, rollout_updates
from podracer_jit.learner.learner import Learner, Parts, keys_of
from podracer_jit.learner.replay_learner import ReplayLearner
from podracer_jit.learner.rollout_learner import RolloutLearner
from podracer_jit.loops import Worker
from podracer_jit.losses.objective import Objective
from podracer_jit.replay import buffer
from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import FifoQueue, Versioned
from podracer_jit.schemes import gradients, wiring
from podracer_jit.schemes.reports import Report
from podracer_jit.schemes.table import SCHEMES
from podracer_jit.types import TrainState

MAX_THREADS = 16_384  # of environments; Linux lets all processes have 32,768 by default
# Environments of segments whose threads did not end; this keeps them alive.
_in_use_for_ever: list[contextlib.ExitStack] = []


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of a run that all its segments share."""

  experiment: Experiment
  place: placement.Placement
  network: nn.Module
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
        experiment.keeps_envs, self._gradient_workers, self.kept_programs)

  def _gradient_workers(self) -> list[gradients.GradientWorker]:
    """Returns the gradient workers of a scheme with separate updates."""
    if self.crew:
      return self.crew.gradient_workers()
    return gradients.on_devices(self.learner, self.place, self.experiment.scheme.each)

  def initial_state(self) -> TrainState:
    """Returns the train state of update 0, without the replay, which `learner.allocate` adds."""
    return self.learner.initial_state(self.experiment.seed)


class Snapshot(NamedTuple):
  """The state of a run between two segments, as its checkpoint has it."""

  state: TrainState  # without a replay if segments begin with an empty one
  envs: Any | None = None  # as in `kept_envs`; None if the environments begin anew
  segment: int = 0  # index of the next segment


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
  network = make_network(experiment)
  optimizer = experiment.optimizer
  learner_parts = Parts(network, experiment.spec.obs_shape, experiment.spec.obs_dtype,
                        optimizer.transformation(), optimizer.schedule(experiment.total_steps),
                        place.mesh)
  if experiment.algorithm.learns_from_replay:
    learner = _replay_learner(experiment, learner_parts)
  else:
    learner = _rollout_learner(experiment, learner_parts)
  return Run(experiment, place, network, learner, make_acting(experiment, network), crew)


def _problems_of_devices(experiment: Experiment, place: placement.Placement) -> Iterator[str]:
  """Yields a line for each part of an experiment that does not fit its devices."""
  scheme = experiment.scheme
  name = experiment.scheme_name
  mesh_size = place.mesh.size
  if experiment.num_grad_shards % mesh_size:
    yield options.uneven(experiment.group_count(),
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
    yield (f'scheme: {name} is for one process, not {place.processes}; {", ".join(able)} take '
           'several')
  if (scheme.alone or scheme.colocated) and place.actors != place.workers:
    yield (f'scheme: {name} acts where it learns; with actor_platform = '
           f'{experiment.placement.actor_platform} actors are on {place.actors}, learners on '
           f'{place.workers}')


def make_network(experiment: Experiment) -> nn.Module:
  """Returns the whole network of an experiment.

  Raises:
    ValueError: the network fails, or its layers shrink an observation to nothing.
  """
  try:
    network = experiment.algorithm.network_kind.build(
        experiment.network, experiment.policy, experiment.torso_options,
        experiment.normalise.moments)
  except ValueError as error:
    raise ValueError(f'network.{error}') from None
  name = experiment.network_name
  spec = experiment.spec
  obs = jax.ShapeDtypeStruct((1, 1, *spec.obs_shape), spec.obs_dtype)

  def init(obs):
    return network.init_with_output(jax.random.key(0), obs, network.initial_recurrent_state(1),
                                    jnp.ones((1, 1), bool))

  sizes = ', '.join(f'{option} = {options.shown(getattr(experiment.network, option))}'
                    for option in options.meanings(type(experiment.network)))
  described = f'{name} with {sizes}' if sizes else name
  nothing_left = (f'network.name: {described} leaves nothing of observations of '
                  f'{spec.obs_shape}; take smaller kernels and strides, or larger frames')
  try:
    (dist_params, *_), variables = jax.eval_shape(init, obs)
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own network may raise anything
    if type(experiment.network).__module__ == networks.__name__:
      # The output size of a shipped layer became zero or negative.
      raise ValueError(nothing_left) from None
    raise ValueError(f'network.name: {described} fails on observations of '
                     f'{spec.obs_shape}: {type(error).__name__}: '
                     f'{options.shorten(str(error))}') from error
  if not all(x.size for x in jax.tree.leaves(variables)):
    raise ValueError(nothing_left)
  if set(variables) - {'params', 'moments'}:
    raise ValueError(f'network.name: {name} has the variables {", ".join(variables)}; only params '
                     'can be trained')
  # Shipped networks can be called, and to trace a large one takes a second.
  if modules.named(experiment.fields):
    _check_calls(experiment, network, variables)
  if dist_params.shape[-1] != experiment.policy.dist_size:
    raise ValueError(f'policy: it reads {experiment.policy.dist_size} numbers, and {name} gives '
                     f'{dist_params.shape[-1]}')
  return _with_heads(network, experiment)


def _check_calls(experiment: Experiment, network: nn.Module, variables: Any) -> None:
  """Traces a call of the network as actors and learner make it: several rows, and nothing random.

  Args:
    experiment: to build.
    network: the whole network of the experiment.
    variables: the shapes of its variables.

  Raises:
    ValueError: the call fails, changes variables, or returns other shapes.
  """
  name = experiment.network_name
  spec = experiment.spec
  rows = 2, 3

  def call(variables, obs, valid):
    return network.apply(variables, obs, network.initial_recurrent_state(rows[1]), valid)

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
                     f'observations of {spec.obs_shape}, though not on a single one: '
                     f'{type(error).__name__}: {options.shorten(str(error))}') from error
  wanted = (*rows, experiment.policy.dist_size), rows
  shapes = tuple(getattr(output, 'shape', None) for output in outputs[:2])
  if shapes[0] is None or shapes[0][:2] != rows or shapes[1] != rows:
    raise ValueError(f'network.name: {name} must return arrays {wanted[0]} and {wanted[1]} for '
                     f'{rows[0]} rows of {rows[1]} environments, got {shapes[0]} and {shapes[1]}')


def _with_heads(network: nn.Module, experiment: Experiment) -> nn.Module:
  """Returns the network with the auxiliary heads of its algorithm, if it has any.

  Raises:
    ValueError: the network has no place for heads, or a head fails.
  """
  name = experiment.loss_name
  spec = experiment.spec
  try:
    heads = dict(experiment.algorithm.heads(spec))
    if not heads:
      return network
    if 'heads' not in {field.name for field in dataclasses.fields(network)}:
      raise TypeError(f'{type(network).__name__} takes no heads')
    network = network.clone(heads=heads)
    jax.eval_shape(lambda key: networks.init_params(network, key, spec.obs_shape, spec.obs_dtype),
                   jax.random.key(0))
  except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own heads may raise anything
    raise ValueError(f'loss.name: the heads of {name} fail on {spec.task}: '
                     f'{type(error).__name__}: {options.shorten(str(error))}') from error
  return network


def _rollout_learner(experiment: Experiment, parts: Parts) -> RolloutLearner:
  """Returns the learner of an algorithm that learns from each rollout once."""
  model = Model(parts.network.apply, parts.network.policy, experiment.torso_options.recurrent)
  objective = Objective(experiment.algorithm, model, experiment.unroll_length)
  sizes = rollout_updates.Sizes(
      experiment.env.num_envs, experiment.num_grad_shards, experiment.num_minibatches,
      experiment.num_epochs, experiment.microbatch_rows)
  return RolloutLearner(parts, objective, sizes, experiment.exact_reduce)


def _replay_learner(experiment: Experiment, parts: Parts) -> ReplayLearner:
  """Returns the learner of an algorithm that learns from a replay."""
  algorithm = experiment.algorithm
  replay = experiment.replay
  spec = experiment.spec
  groups = experiment.num_grad_shards
  group_envs = experiment.env.num_envs // groups
  sizes = replay_updates.Sizes(
      experiment.env.num_envs, groups, replay.batch_size, replay.gradient_steps,
      replay.min_size, algorithm.target_every, replay.importance_exponent,
      experiment.microbatch_rows)
  memory = buffer.Replay(
      replay.capacity // groups, group_envs, experiment.unroll_length, spec.stack,
      algorithm.n_step, algorithm.discount, replay.eviction, replay.priority_exponent,
      replay.eviction_exponent)
  like = priorities.shapes(group_envs, spec.obs_shape, spec.obs_dtype, spec.stack,
                           experiment.policy)
  return ReplayLearner(parts, algorithm, replay, memory, like, sizes, experiment.exact_reduce)


def make_acting(experiment: Experiment, network: nn.Module) -> Acting:
  """Returns the way in which the actors of an experiment act."""
  algorithm = experiment.algorithm
  spec = experiment.spec
  steps = experiment.unroll_length
  if experiment.env_batch:
    obs = jax.ShapeDtypeStruct(spec.obs_shape, spec.obs_dtype)
    return FirstReady(network, steps, spec.stack, obs)
  if algorithm.learns_from_replay:
    exploration = algorithm.exploration(experiment.env.num_envs)
    if np.shape(exploration) != (experiment.env.num_envs,):
      raise ValueError(f'loss.name: exploration of {experiment.loss_name} must return an array '
                       f'({experiment.env.num_envs},), a number for each environment; got '
                       f'{np.shape(exploration)}')
    return ForReplay(network, steps, spec.stack, algorithm.n_step, algorithm.discount, exploration)
  discount = algorithm.discount if experiment.normalise.reward else None
  return InStep(network, steps, spec.stack, discount)


def make_actors(run: Run, index: int, stack: contextlib.ExitStack, envs: Any | None = None
                ) -> list[wiring.LocalActor]:
  """Starts the environments of this process's actors for a segment.

  Args:
    run: the run that the segment belongs to.
    index: index of the segment, from 0: the streams of its environments depend on it.
    stack: closes the environments on its exit, after the programs that contain them have finished.
    envs: the state that the environments go on from, as in `kept_envs`; None if they begin anew.

  Returns:
    The actors, in order.
  """
  place = run.place
  # One program has one actor, which steps the environments of all devices.
  devices = [place.actors[0]] if run.experiment.scheme.graph.one_program else place.actors
  # Actors are numbered over all processes, so that seeds and keys do not depend on the processes.
  first = place.process * len(devices)
  actors = []
  for number, device in enumerate(devices, first):
    ids = shards_of(run.experiment, number, len(devices) * place.processes)
    actors.append(make_actor(run, index, ids, device, envs))
    stack.callback(actors[-1].rollout_program.close)
  return actors


def shards_of(experiment: Experiment, number: int, actors: int) -> range:
  """Returns the vector environments of an actor.

  Args:
    experiment: of the run.
    number: of the actor, from 0.
    actors: of the run.
  """
  per_actor = experiment.num_shards // actors
  return range(number * per_actor, (number + 1) * per_actor)


def make_actor(run: Run, index: int, ids: range, device: jax.Device, envs: Any | None = None
               ) -> wiring.LocalActor:
  """Starts the environments of an actor for a segment; its `rollout_program` closes them.

  Args:
    run: what the segment belongs to.
    index: of the segment, from 0.
    ids: the actor's vector environments, as `shards_of` returns them.
    device: of the actor.
    envs: see `make_actors`.
  """
  experiment = run.experiment
  width = experiment.env.num_envs // experiment.num_shards
  key = jax.random.fold_in(keys_of(experiment.seed).act, index)
  if run.life:
    key = jax.random.fold_in(key, experiment.num_shards + run.life)
  family = family_of(experiment.env.task)
  rollout_program = RolloutProgram([
      family.make_vector_env(experiment.env.task, experiment.env_options,
                             env_seeds(experiment.seed, index, i * width, width, run.life),
                             run.place.env_threads, experiment.env_batch)
      for i in ids])
  with contextlib.ExitStack() as failing:
    failing.callback(rollout_program.close)
    keys = [jax.random.fold_in(key, i) for i in ids]
    first_env = ids[0] * width
    state = run.acting.initial_state(rollout_program.vector_envs, keys, first_env)
    if envs:
      state = state._replace(envs=tuple(
          kept_envs.pick(envs, i, like) for i, like in zip(ids, state.envs, strict=True)))
    state = jax.device_put(state, device)
    failing.pop_all()
  return wiring.LocalActor(rollout_program, state, device, first_env)


def kept_env_shapes(run: Run) -> Any | None:
  """Returns the shapes of the environments' state in checkpoints; None if they do not have it."""
  if not run.experiment.keeps_envs:
    return None
  with contextlib.ExitStack() as stack:
    actor, *_ = make_actors(run, 0, stack)
    return kept_envs.shapes(actor.state, run.experiment.num_shards)


def envs_after(run: Run, states: Mapping[str, Any], first_update: int) -> Any:
  """Returns the environments' state after the last update of a segment.

  Args:
    run: the run that the segment belongs to.
    states: the workers' last states, by name.
    first_update: updates done before the segment.

  Returns:
    The state as in `kept_envs`; None if the next segment's environments begin anew.
  """
  if not run.experiment.keeps_envs:
    return None
  # The learner's state counts the updates; actors may have made more rollouts.
  updates = int(states['learner'].train.update) - first_update
  graph = run.experiment.scheme.graph
  return kept_envs.gather(graph.actors_after(run.plan, states, updates))


@contextlib.contextmanager
def segment(run: Run, snapshot: Snapshot, updates: int, report: Callable[[Report], None],
            stop: Callable[[], bool] = lambda: False) -> Iterator[wiring.Segment]:
  """Builds a segment: environments, and channels primed with the state.

  Args:
    run: the run that the segment belongs to.
    snapshot: where it begins; the streams of its environments depend on the segment's index. The
      state is donated. A replay that is missing begins empty.
    updates: number of updates, unless total_steps are reached or `stop` says so.
    report: called with each Report, by a thread of its own.
    stop: called after every update (with a scheme of one program: after every call of it); True
      ends the segment.

  Yields:
    The segment. On exit its environments are closed, after their programs have finished; unless
    the exit is a `loops.Stuck`, whose threads may still step them.
  """
  state, envs, index = snapshot
  if envs is not None and not jax.tree.leaves(state.replay):
    envs = priorities.forget(envs)
  state = run.learner.allocate(state)
  total_steps = run.experiment.total_steps
  mesh = run.place.mesh

  def ended(state: TrainState) -> bool:
    stopped = placement.any_process(stop(), mesh)
    return stopped or wiring.number(state.steps) >= total_steps

  def write(state: None, item: Versioned):
    report(item.value)
    return state, ()

  with contextlib.ExitStack() as stack:
    if run.crew:
      actors = run.crew.actors(index, stop)
    else:
      actors = make_actors(run, index, stack, envs)
    start = wiring.SegmentStart(state, int(state.update), updates, ended)
    # A queue passes on computed values only, so the waiting times of an update are known.
    reports = FifoQueue('reports', 1)
    workers, waits = run.experiment.scheme.graph.wire(run.plan, actors, start, reports)
    writer = Worker('writer', write, None, [wiring.Endpoint(reports)], [], 2**62)
    try:
      yield wiring.Segment([*workers, writer], waits)
    except loops.Stuck:
      # To close the environments would wait for those threads, and to free them would crash them.
      _in_use_for_ever.append(stack.pop_all())
      raise
