"""The parts that scripts/benchmark.py measures: each is built once, then run for some seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import conventional
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit import loops
from podracer_jit.actor import rollouts
from podracer_jit.envs import envpool_envs
from podracer_jit.run import build, experiment
from podracer_jit.run.metrics import Meter, Report
from podracer_jit.runtime import placement
from podracer_jit.schemes import wiring
from podracer_jit.schemes.table import SCHEMES
from podracer_jit.types import TrainState

NAMES = ('environment', 'policy', 'rollout', 'learner', 'fused', 'sync', 'cleanba',
         'conventional_rollout', 'conventional_sync', 'conventional_cleanba')
# The same parts of a changed experiment: plain_learner, shards4_sync, ...
VARIANTS = {'plain': dict(exact_reduce=False)} | {
    f'shards{n}': dict(num_shards=n) for n in (1, 2, 4)}
ALL = (*NAMES, *(f'{variant}_{name}' for variant in VARIANTS
                 for name in ('rollout', 'learner', 'sync', 'cleanba')))
CAPACITY = 65_536  # transitions of a replay, if they hold an update


class Figures(NamedTuple):
  """What one measurement of a part found."""

  sps: float
  seconds_per_update: float


Measure = Callable[[float], Figures]  # runs a part for so many seconds


def repeat(fires: Sequence[Callable[[], int]], seconds: float) -> Figures:
  """Calls each, which returns its valid steps, again and again on a thread of its own."""

  def work(fire):
    steps = calls = 0
    start = time.perf_counter()
    while not calls or time.perf_counter() - start < seconds:
      steps, calls = steps + fire(), calls + 1
    elapsed = time.perf_counter() - start
    return steps / elapsed, elapsed / calls

  with ThreadPoolExecutor(len(fires)) as threads:
    rates, periods = zip(*threads.map(work, fires), strict=True)
  return Figures(sum(rates), max(periods))


def pools_of(parts: wiring.Parts, actor: int) -> list[conventional.PoolArgs]:
  """What the pools of an actor are made of, as in `build.segment`."""
  config, place = parts.config, parts.place
  width = config['env']['num_envs'] // config['num_shards']
  per_actor = config['num_shards'] // len(place.actors)
  options = experiment.env_options(config)
  return [conventional.PoolArgs(config['env']['task'], options,
                                envpool_envs.env_seeds(config['seed'], 0, i * width, width),
                                place.env_threads)
          for i in range(actor * per_actor, (actor + 1) * per_actor)]


def make_steps(shards: Sequence[envpool_envs.Shard], to_env: Callable, steps: int) -> Callable:
  """Returns run(token, ended, actions) -> (token, ended, valid steps): nothing but steps.

  actions: of each shard [steps, B, ...], as its policy has them. Shards take turns as in the
  rollout program.
  """

  def run(token: jax.Array, ended: Sequence[jax.Array], actions: Sequence[jax.Array]):
    def send(token, t, i):
      return shards[i].send(token, to_env(lax.dynamic_index_in_dim(actions[i], t, keepdims=False)))

    def receive(i, token, ended, valid):
      token, step = shards[i].recv(token)
      ended, valid = list(ended), valid + jnp.sum(~ended[i], dtype=jnp.int32)
      ended[i] = step.terminated | step.truncated
      return token, tuple(ended), valid

    def turn(t, carry):
      for i in range(len(shards)):
        token, *rest = receive(i, *carry)
        carry = send(token, t, i), *rest
      return carry

    for i in range(len(shards)):
      token = send(token, 0, i)
    carry = lax.fori_loop(1, steps, turn, (token, tuple(ended), jnp.int32(0)))
    for i in range(len(shards)):
      carry = receive(i, *carry)
    return carry

  return run


def environment(parts: wiring.Parts, state: TrainState, stack: contextlib.ExitStack) -> Measure:
  """The ceiling: the environments, sent the actions of one rollout again and again.

  A policy's own, since what a step costs follows from what is done: a stronger push of MuJoCo's
  makes more contacts.
  """
  with contextlib.ExitStack() as at_first:
    actions = [tuple(made.action for made in fire())
               for fire in acting(parts, state, False, at_first)]

  def prepare(a: int, device: jax.Device) -> Callable[[], int]:
    pools = rollouts.Pools([envpool_envs.Shard(*args) for args in pools_of(parts, a)])
    stack.callback(pools.close)
    ended = tuple(jnp.zeros(shard.num_envs, bool) for shard in pools.shards)
    token, ended = jax.device_put((jnp.array(pools.shards[0].handle), ended), device)
    run = make_steps(pools.shards, parts.network.policy.to_env, parts.config['unroll_length'])
    program = pools.load(run, (token, ended, actions[a]), donate=(0, 1))

    def fire() -> int:
      nonlocal token, ended
      token, ended, valid = program(token, ended, actions[a])
      return int(valid)

    return fire

  fires = [prepare(a, device) for a, device in enumerate(parts.place.actors)]
  return lambda seconds: repeat(fires, seconds)


def small_replay(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config with a replay, if it has one, that is soon filled and fits beside others.

  Without what `apex` alone can have: it has no one speed.
  """
  if 'replay' not in config:
    return dict(config)
  rows, groups = experiment.batch_rows(config), max(1, config['num_grad_shards'])
  enough = -(-max(CAPACITY, rows) // groups) * groups
  options = config['replay']
  return config | dict(replay=options | dict(
      capacity=min(options['capacity'], enough), min_size=min(options['min_size'], rows),
      params_every=1, samples_per_insert=0))


def copy_of(state: TrainState, parts: wiring.Parts) -> TrainState:
  """The state for one who donates it; a replay is empty."""
  copy = placement.replicate(state._replace(replay=()), parts.place.mesh)
  return copy._replace(replay=build.empty_replay(parts)) if state.target else copy


class Still:
  """In place of a shard: gives observations that it has, at once, and no episode ever ends.

  The token counts the calls, so that no observation is known before its turn.
  """

  def __init__(self, spec: envpool_envs.EnvSpec, num_envs: int):
    """Two different observations of each environment."""
    self.num_envs, self.handle = num_envs, np.zeros((), np.int32)
    numbers = np.random.default_rng(0).integers(0, 2, (2, num_envs, *spec.obs_shape))
    self._obs = numbers.astype(spec.obs_dtype)
    self.first_obs = self._obs[0]

  def send(self, token: jax.Array, action: jax.Array) -> jax.Array:
    """Nothing but that the action must be there."""
    return token + 1 + jnp.sum(action != action, dtype=jnp.int32)

  def recv(self, token: jax.Array) -> tuple[jax.Array, envpool_envs.TimeStep]:
    """The next observations, no rewards."""
    no, none = jnp.zeros(self.num_envs, bool), jnp.zeros(self.num_envs)
    return token, envpool_envs.TimeStep(
                                obs=jnp.asarray(self._obs)[token % 2], reward=none, terminated=no,
                                truncated=no, raw_reward=none, game_over=no,
                                env_id=jnp.arange(self.num_envs))

  def close(self) -> None:
    """Nothing to end."""


def policy(parts: wiring.Parts, state: TrainState, stack: contextlib.ExitStack) -> Measure:
  """The rollout program without environments: policy, sampling and storing."""
  config, count = parts.config, len(parts.place.actors)
  width = config['env']['num_envs'] // config['num_shards']

  def prepare(a: int, device: jax.Device) -> Callable[[], int]:
    pools = rollouts.Pools([Still(parts.spec, width)] * (config['num_shards'] // count))
    stack.callback(pools.close)
    keys = [jax.random.key(i) for i in range(len(pools.shards))]
    acting = jax.device_put(build.actor_state(parts, pools.shards, keys, 0), device)
    params = placement.put_params(state.params, device)
    program = pools.load(wiring.make_rollout(parts, pools), (params, acting), donate=(1,))

    def fire() -> int:
      nonlocal acting
      acting, made = jax.block_until_ready(program(params, acting))
      return sum(x.reward.size for x in made)

    return fire

  fires = [prepare(a, device) for a, device in enumerate(parts.place.actors)]
  return lambda seconds: repeat(fires, seconds)


def begin(parts: wiring.Parts, state: TrainState, scheme: str, by_python: bool,
          stack: contextlib.ExitStack, report: Callable[[Report], None],
          stop: Callable[[], bool]) -> wiring.Segment:
  """A segment without an end; its actors replaced by conventional ones where `by_python`."""
  parts = parts._replace(scheme=SCHEMES[scheme])
  segment = stack.enter_context(build.segment(parts, copy_of(state, parts), 0, 2**31 - 1, report,
                                              stop))
  if not by_python:
    return segment
  policy, workers = conventional.make_policy(parts.network), list(segment.workers)
  for a, device in enumerate(parts.place.actors):  # they come first among the workers
    workers[a], close = conventional.replace_actor(
        workers[a], pools_of(parts, a), device, policy, parts.config['unroll_length'],
        parts.spec.stack)
    stack.callback(close)
  return segment._replace(workers=workers)


def acting(parts: wiring.Parts, state: TrainState, by_python: bool, stack: contextlib.ExitStack
           ) -> list[Callable[[], tuple]]:
  """Calls that make the rollouts of an actor, one call an actor, with the first parameters."""
  segment = begin(parts, state, 'sync', by_python, stack, lambda report: None, lambda: False)

  def prepare(worker: loops.Worker):
    state, params = worker.state, worker.reads[0].handoff.get()

    def fire() -> tuple:
      nonlocal state
      state, (made,) = worker.fire(state, params)
      return jax.block_until_ready(made.value)

    return fire

  return [prepare(worker) for worker in segment.workers[:len(parts.place.actors)]]


def rollout(parts: wiring.Parts, state: TrainState, by_python: bool, stack: contextlib.ExitStack
            ) -> Measure:
  """Actors without a learner."""
  def counted(fire):
    return lambda: sum(int(np.sum(made.valid)) for made in fire())
  fires = [counted(fire) for fire in acting(parts, state, by_python, stack)]
  return lambda seconds: repeat(fires, seconds)


def learner(parts: wiring.Parts, state: TrainState) -> Measure:
  """The learner without actors."""
  num_envs, mesh = parts.config['env']['num_envs'], parts.place.mesh
  with contextlib.ExitStack() as stack:
    fires = acting(parts, state, False, stack)
    batch = placement.gather([
        placement.scatter(fire(), a * num_envs // len(fires), num_envs, mesh)
        for a, fire in enumerate(fires)], mesh)
    jax.block_until_ready(batch)
  state = copy_of(state, parts)

  def fire() -> int:
    nonlocal state
    state, metrics = parts.learner(state, batch)
    return int(metrics['valid'][0])

  return lambda seconds: repeat([fire], seconds)


class Training:
  """A segment on threads of its own, held between two firings while others are measured."""

  def __init__(self, parts: wiring.Parts, state: TrainState, scheme: str, by_python: bool,
               stack: contextlib.ExitStack):
    """Starts the threads, held; what ends them goes on the stack."""
    self._changed = threading.Condition()
    # With a lag, two rollouts may be ready by the time of a hold: the updates that learn from them
    # would come too soon after it.
    self._skipped = 2 * SCHEMES[scheme].lag
    self._open, self._firing = False, 0
    self._made: dict[str, jax.Array] = {}  # by worker, of its last firing
    self._enough: Callable[[], bool] = lambda: False
    self._stopping, self._reports = threading.Event(), []  # (time, steps, updates)
    segment = begin(parts, state, scheme, by_python, stack, self._report,
                    self._stopping.is_set)
    self._meter = Meter(parts.config['log']['window'], parts.spec.frame_skip, segment.waits, {})
    threads = stack.enter_context(ThreadPoolExecutor(1))
    self._run = threads.submit(loops.run, [*map(self._gated, segment.workers[:-1]),
                                           segment.workers[-1]])  # the writer only listens
    self._run.add_done_callback(lambda run: self._set())
    stack.callback(lambda: (self._stopping.set(), self._set(_open=True)))

  def __call__(self, seconds: float) -> Figures:
    """Lets it train for so long; returns when it is at rest again."""
    first = len(self._reports) + self._skipped
    # Asked by who reports: waking this thread for each would be felt in a round of a millisecond.
    self._set(_open=True, _enough=lambda: (
        len(self._reports) >= first + 2
        and self._reports[-1][0] - self._reports[first][0] >= seconds))
    self._wait(self._enough)
    (start, steps, update), (end, *last) = self._reports[first], self._reports[-1]
    self._set(_open=False)
    self._wait(lambda: not self._firing)
    jax.block_until_ready(self._made)
    elapsed = end - start
    return Figures((last[0] - steps) / elapsed, elapsed / (last[1] - update))

  def _report(self, report: Report) -> None:
    *_, (record, _) = self._meter.records(report)  # the statistics are part of training
    if record.get('sampled', 1):  # not while a replay is filled
      with self._changed:
        self._reports.append((time.perf_counter(), record['steps'], record['update']))
        if self._enough():
          self._changed.notify_all()

  def _set(self, **fields: Any) -> None:
    with self._changed:
      vars(self).update(fields)
      self._changed.notify_all()

  def _wait(self, ready: Callable[[], bool]) -> None:
    with self._changed:
      self._changed.wait_for(lambda: ready() or self._run.done())
    if self._run.done():
      raise RuntimeError('training ended too early') from self._run.exception()

  def _gated(self, worker: loops.Worker) -> loops.Worker:
    def fire(state, *inputs):
      with self._changed:
        self._changed.wait_for(lambda: self._open)
        self._firing += 1
      try:
        state, outputs = worker.fire(state, *inputs)
        arrays = [x for x in jax.tree.leaves([item.value for item in outputs])
                  if isinstance(x, jax.Array)]
        self._made[worker.name] = arrays[-1]  # of all; and it keeps no rollout alive
        return state, outputs
      finally:
        with self._changed:
          self._firing -= 1
          if not self._open:
            self._changed.notify_all()

    return worker._replace(fire=fire)


def of_variant(name: str, parts: wiring.Parts) -> tuple[str, wiring.Parts]:
  """(name of the part without its variant, what the variant is made of)."""
  variant, _, rest = name.partition('_')
  if variant not in VARIANTS:
    return name, parts
  return rest, build.make_parts(parts.config | VARIANTS[variant])


def make(name: str, parts: wiring.Parts, state: TrainState, stack: contextlib.ExitStack) -> Measure:
  """Builds the part called `name`, which begins from a copy of `state`; of no variant."""
  base, by_python = name.removeprefix('conventional_'), name.startswith('conventional_')
  if base == 'environment':
    return environment(parts, state, stack)
  if base == 'policy':
    return policy(parts, state, stack)
  if base == 'learner':
    return learner(parts, state)
  if base == 'rollout':
    return rollout(parts, state, by_python, stack)
  return Training(parts, state, base, by_python, stack)
