"""Parts that `benchmarks.parts` measures. A part is built once and called many times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.parts.segments import Figures, Measure, begin, copy_of
from benchmarks.parts.training import Training
from podracer_jit import loops
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.envs.protocol import EnvSpec, TimeStep, VectorEnv
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import changed
from podracer_jit.runtime import placement
from podracer_jit.runtime.channels import Versioned
from podracer_jit.schemes import wiring
from podracer_jit.types import TrainState

NAMES = ('environment', 'policy', 'rollout', 'learner', 'sync', 'cleanba', 'fused',
         'conventional_rollout', 'conventional_sync', 'conventional_cleanba')
# The same parts of a changed experiment: plain_learner, shards4_sync, ...
VARIANTS = {'plain': dict(exact_reduce=False)} | {
    f'shards{n}': dict(num_shards=n) for n in (1, 2, 4)}
ALL = (*NAMES, *(f'{variant}_{name}' for variant in VARIANTS
                 for name in ('rollout', 'learner', 'sync', 'cleanba')))


def repeat(fires: Sequence[Callable[[], int]], seconds: float) -> Figures:
  """Calls each function repeatedly, on a thread of its own.

  Args:
    fires: functions that return their number of valid steps.
    seconds: duration; each function is called at least once.

  Returns:
    The valid steps a second of all functions, and the longest mean time of a call.
  """

  def work(fire):
    steps = calls = 0
    start = time.perf_counter()
    while not calls or time.perf_counter() - start < seconds:
      steps += fire()
      calls += 1
    elapsed = time.perf_counter() - start
    return steps / elapsed, elapsed / calls

  with ThreadPoolExecutor(len(fires)) as threads:
    rates, periods = zip(*threads.map(work, fires), strict=True)
  return Figures(sum(rates), max(periods))


def make_steps(vector_envs: Sequence[VectorEnv], to_env: Callable, steps: int) -> Callable:
  """Builds a function that only steps environments.

  Args:
    vector_envs: the environments, which take turns as in the rollout program.
    to_env: (the policy's action) -> the environments' action.
    steps: steps of each vector environment in a call.

  Returns:
    run(token, envs, actions) -> (token, envs, valid steps [] i32). For each vector environment,
    `envs` has the simulator's state and a mask [B] bool of environments whose episode has ended,
    and `actions` has an array [steps, B, ...].
  """

  def run(token: jax.Array, envs: Sequence[tuple[Any, jax.Array]], actions: Sequence[jax.Array]):
    def send(i, t, token, envs, valid):
      """Sends the actions of step t to vector environment i.

      Args:
        i: index of the vector environment.
        t: [] i32, the step.
        token: orders the calls of environments.
        envs: see `run`.
        valid: [] i32, valid steps so far.

      Returns:
        The new `token` and `envs`, and `valid`.
      """
      simulator, ended = envs[i]
      action = lax.dynamic_index_in_dim(actions[i], t, keepdims=False)
      token, simulator = vector_envs[i].send(token, simulator, to_env(action))
      return token, (*envs[:i], (simulator, ended), *envs[i + 1:]), valid

    def receive(i, token, envs, valid):
      """Receives a step of vector environment i.

      Args:
        i: index of the vector environment.
        token: orders the calls of environments.
        envs: see `run`.
        valid: [] i32, valid steps so far.

      Returns:
        The new `token`, `envs` and `valid`.
      """
      simulator, ended = envs[i]
      # The step after the end of an episode is a reset, which does not count.
      valid = valid + jnp.sum(~ended, dtype=jnp.int32)
      token, simulator, step = vector_envs[i].recv(token, simulator)
      ended = step.terminated | step.truncated
      return token, (*envs[:i], (simulator, ended), *envs[i + 1:]), valid

    def turn(t, carry):
      for i in range(len(vector_envs)):
        carry = send(i, t, *receive(i, *carry))
      return carry

    carry = token, tuple(envs), jnp.int32(0)
    for i in range(len(vector_envs)):
      carry = send(i, 0, *carry)
    carry = lax.fori_loop(1, steps, turn, carry)
    for i in range(len(vector_envs)):
      carry = receive(i, *carry)
    return carry

  return run


def environment(run: build.Run, state: TrainState, stack: contextlib.ExitStack) -> Measure:
  """Returns a measurement of the environments alone, which repeat the actions of one rollout.

  A policy chooses the actions, since the cost of a step depends on them: in MuJoCo a stronger push
  makes more contacts.
  """
  with contextlib.ExitStack() as at_first:
    actions = [tuple(rollout.action for rollout in fire())
               for fire in acting(run, state, False, at_first)]

  def prepare(actor: wiring.LocalActor, actions: Sequence[jax.Array]) -> Callable[[], int]:
    rollout_program = actor.rollout_program
    vector_envs = rollout_program.vector_envs
    envs = tuple((jax.tree.map(jnp.array, env.first_state), jnp.zeros(env.num_envs, bool))
                 for env in vector_envs)
    token, envs = jax.device_put((jnp.array(vector_envs[0].handle), envs), actor.device)
    steps = make_steps(vector_envs, run.experiment.policy.to_env, run.experiment.unroll_length)
    program = rollout_program.load(steps, (token, envs, actions), donate=(0, 1))

    def fire() -> int:
      nonlocal token, envs
      token, envs, valid = program(token, envs, actions)
      return int(valid)

    return fire

  actors = build.make_actors(run, build.Snapshot(state), stack)
  fires = [prepare(*pair) for pair in zip(actors, actions, strict=True)]
  return lambda seconds: repeat(fires, seconds)


class IdleVectorEnv:
  """A vector environment that does nothing: results are ready at once, and no episode ends.

  The token counts the calls, so that XLA cannot compute an observation before its step.
  """

  def __init__(self, spec: EnvSpec, num_envs: int):
    """Draws two observations of each environment, which alternate."""
    self.num_envs = num_envs
    self.handle = np.zeros((), np.int32)
    self.first_state = None
    numbers = np.random.default_rng(0).integers(0, 2, (2, num_envs, *spec.obs_shape))
    self._obs = numbers.astype(spec.obs_dtype)
    self.first_obs = self._obs[0]

  def send(self, token: jax.Array, state: None, action: jax.Array
           ) -> tuple[jax.Array, None]:
    """Counts a call; the result depends on the action, so that XLA computes the action."""
    return token + 1 + jnp.sum(action != action, dtype=jnp.int32), state

  def recv(self, token: jax.Array, state: None) -> tuple[jax.Array, None, TimeStep]:
    """Returns the next observations, without rewards."""
    false = jnp.zeros(self.num_envs, bool)
    zero = jnp.zeros(self.num_envs)
    obs = jnp.asarray(self._obs)[token % 2]
    step = TimeStep(obs=obs, reward=zero, terminated=false, truncated=false, raw_reward=zero,
                    game_over=false, env_id=jnp.arange(self.num_envs))
    return token, state, step

  def close(self) -> None:
    """Does nothing: there are no threads to end."""


def policy(run: build.Run, state: TrainState, stack: contextlib.ExitStack) -> Measure:
  """Returns a measurement of the rollout program without environments: policy, draws, storage."""
  experiment = run.experiment
  count = len(run.place.actors)
  width = experiment.env.num_envs // experiment.num_shards

  def prepare(device: jax.Device) -> Callable[[], int]:
    vector_envs = [IdleVectorEnv(experiment.spec, width)] * (experiment.num_shards // count)
    rollout_program = RolloutProgram(vector_envs)
    stack.callback(rollout_program.close)
    keys = [jax.random.key(i) for i in range(len(vector_envs))]
    actor_state = jax.device_put(run.acting.initial_state(vector_envs, keys, 0), device)
    params = placement.put_params(experiment.algorithm.for_actors(state), device)
    program = rollout_program.load(run.acting.rollout(vector_envs), (params, actor_state),
                                   donate=(1,))

    def fire() -> int:
      nonlocal actor_state
      actor_state, rollouts = jax.block_until_ready(program(params, actor_state))
      return sum(x.reward.size for x in rollouts)

    return fire

  fires = [prepare(device) for device in run.place.actors]
  return lambda seconds: repeat(fires, seconds)


def acting(run: build.Run, state: TrainState, by_python: bool, stack: contextlib.ExitStack
           ) -> list[Callable[[], tuple]]:
  """Returns a function for each actor, which makes its next rollouts with the first parameters.

  Args:
    run: the run that the actors belong to.
    state: whose parameters they use.
    by_python: whether Python steps the environments.
    stack: closes the environments.
  """
  if by_python:
    segment = begin(run, state, 'sync', by_python, stack, lambda report: None, lambda: False)

    def stepped_by_python(worker: loops.Worker):
      params = worker.reads[0].channel.get()
      return lambda: worker.fire(worker.state, params)[1][0].value

    return [stepped_by_python(worker) for worker in segment.workers[:len(run.place.actors)]]

  # An actor's worker collects its states until the learner takes them, so it is of no use here.
  def prepare(actor: wiring.LocalActor):
    actor_state = actor.state
    rollout = actor.begin(run.plan, lambda: False)
    params = Versioned(actor.receive(run.learner.algorithm.for_actors(state)), 0)

    def fire() -> tuple:
      nonlocal actor_state
      actor_state, item = rollout(actor_state, params)
      return jax.block_until_ready(item.value)

    return fire

  return [prepare(actor) for actor in build.make_actors(run, build.Snapshot(state), stack)]


def rollout(run: build.Run, state: TrainState, by_python: bool, stack: contextlib.ExitStack
            ) -> Measure:
  """Returns a measurement of actors without a learner.

  Args:
    run: the run that the actors belong to.
    state: whose parameters they use.
    by_python: whether Python steps the environments.
    stack: closes the environments.
  """
  def counted(fire):
    return lambda: sum(int(np.sum(rollout.valid)) for rollout in fire())
  fires = [counted(fire) for fire in acting(run, state, by_python, stack)]
  return lambda seconds: repeat(fires, seconds)


def learner(run: build.Run, state: TrainState) -> Measure:
  """Returns a measurement of the learner without actors."""
  num_envs = run.experiment.env.num_envs
  mesh = run.place.mesh
  with contextlib.ExitStack() as stack:
    fires = acting(run, state, False, stack)
    batch = placement.gather([
        placement.scatter(fire(), a * num_envs // len(fires), num_envs, mesh)
        for a, fire in enumerate(fires)], mesh)
    jax.block_until_ready(batch)
  state = copy_of(state, run)

  def fire() -> int:
    nonlocal state
    state, metrics = run.learner.program(state, batch)
    return int(metrics['valid'][0])

  return lambda seconds: repeat([fire], seconds)


def of_variant(name: str, run: build.Run) -> tuple[str, build.Run]:
  """Returns the part's name without its variant, and the run of that variant."""
  variant, _, part = name.partition('_')
  if variant not in VARIANTS:
    return name, run
  return part, build.make_run(changed(run.experiment, **VARIANTS[variant]))


def make(name: str, run: build.Run, state: TrainState, stack: contextlib.ExitStack) -> Measure:
  """Builds a part.

  Args:
    name: the name of the part, without a variant.
    run: the run that the part belongs to.
    state: the part begins with a copy of it.
    stack: closes the environments of the part.
  """
  base = name.removeprefix('conventional_')
  by_python = name.startswith('conventional_')
  if base == 'environment':
    return environment(run, state, stack)
  if base == 'policy':
    return policy(run, state, stack)
  if base == 'learner':
    return learner(run, state)
  if base == 'rollout':
    return rollout(run, state, by_python, stack)
  return Training(run, state, base, by_python, stack)
