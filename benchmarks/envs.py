"""Measures simulation alone, with random actions: EnvPool's table 1 and figure 3 (2206.10558).

  python -m benchmarks.envs --tasks=Pong-v5,Ant-v4 --num_envs=1,8,64
  python -m benchmarks.envs --tasks=Pong-v5 --num_envs=64 --threads=2 --batches=16,32

Variants, of which all take turns:

- for-loop: environments one after the other, called from Python;
- subprocess: Gymnasium's `AsyncVectorEnv`, one process for each environment, shared memory, up to
  eight of them for each core;
- sync: one EnvPool that steps all environments at once;
- async: one EnvPool that continues with the first environments that are ready (--batches);
- rollout: EnvPool's XLA interface in a compiled loop, as the package's actors have it.

A table in Markdown has steps a second of all environments, the median of --rounds with the lowest
and the highest. The paper counts frames: four in a step of Atari, five substeps in one of MuJoCo.
For-loop and subprocess call EnvPool's single environments, so all variants have the same
simulators, and with one environment the variants show what they cost by themselves. With --pin each
thread of a pool stays on a core of its own. On a machine with several NUMA nodes, start the command
under `numactl` for each node, and add the speeds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import envpool
import gymnasium
import numpy as np

# Steps of all environments in a call of the compiled loop.
LOOP_STEPS = 32
PROCESSES_OF_A_CORE = 8


class One(gymnasium.Env):
  """A single environment of EnvPool as Gymnasium's class."""

  def __init__(self, task: str):
    self._pool = envpool.make_gymnasium(task, num_envs=1)
    self.observation_space = self._pool.observation_space
    self.action_space = self._pool.action_space

  def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
    """Returns the first observation."""
    obs, _ = self._pool.reset()
    return _first(obs), {}

  def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
    """Takes a step; the episode that follows an end begins by itself."""
    obs, reward, *_ = self._pool.step(np.asarray(action)[None])
    return _first(obs), float(reward[0]), False, False, {}


def _first(obs: Any) -> Any:
  """Returns the first row of an observation, which may be a dict."""
  return {name: _first(x) for name, x in obs.items()} if isinstance(obs, dict) else obs[0]


def random_actions(space: gymnasium.Space, rows: int) -> np.ndarray:
  """Returns actions [rows, ...] drawn from a space.

  Raises:
    ValueError: it is neither Discrete nor a Box.
  """
  rng = np.random.default_rng(0)
  if isinstance(space, gymnasium.spaces.Discrete):
    return rng.integers(space.n, size=rows).astype(np.int32)
  if not isinstance(space, gymnasium.spaces.Box):
    raise ValueError(f'are {space}; only Discrete and Box can be drawn')
  low, high = np.clip(space.low, -1e3, 1e3), np.clip(space.high, -1e3, 1e3)
  return rng.uniform(low, high, size=(rows, *space.shape)).astype(space.dtype)


def for_loop(task: str, num_envs: int) -> Iterator[int]:
  """Steps environments one after the other; yields after each step of all of them."""
  envs = [One(task) for _ in range(num_envs)]
  actions = random_actions(envs[0].action_space, num_envs)
  for env in envs:
    env.reset()
  while True:
    for env, action in zip(envs, actions, strict=True):
      env.step(action)
    yield num_envs


def subprocess(task: str, num_envs: int) -> Iterator[int]:
  """Steps a process for each environment."""
  with contextlib.closing(gymnasium.vector.AsyncVectorEnv(
      [lambda: One(task)] * num_envs, shared_memory=True, context='spawn')) as envs:
    envs.reset()
    actions = random_actions(envs.single_action_space, num_envs)
    while True:
      envs.step(actions)
      yield num_envs


def pool(task: str, num_envs: int, batch: int, threads: int, pin: bool) -> Iterator[int]:
  """Steps a pool of EnvPool; asynchronously if `batch` is less than `num_envs`.

  Args:
    task: of EnvPool.
    num_envs: environments.
    batch: environments of a step.
    threads: of the pool.
    pin: whether each thread has a core of its own.
  """
  envs = envpool.make_gymnasium(task, num_envs=num_envs, batch_size=batch, num_threads=threads,
                                thread_affinity_offset=_first_core() if pin else -1)
  actions = random_actions(envs.action_space, num_envs)
  envs.async_reset()
  while True:
    *_, info = envs.recv()
    ids = info['env_id']
    envs.send(actions[ids], ids)
    yield batch


def rollout(task: str, num_envs: int, threads: int, pin: bool) -> Iterator[int]:
  """Steps a pool in a compiled loop.

  Args:
    task: of EnvPool.
    num_envs: environments.
    threads: of the pool.
    pin: whether each thread has a core of its own.
  """
  import jax  # noqa: PLC0415 - processes of environments do without
  from jax import lax  # noqa: PLC0415

  envs = envpool.make_gymnasium(task, num_envs=num_envs, num_threads=threads,
                                thread_affinity_offset=_first_core() if pin else -1)
  envs.async_reset()
  arrays = [*envs.spec.state_array_spec.values(), *envs.spec.action_array_spec.values()]
  # Without x64, JAX would turn the float64 of MuJoCo into float32, which EnvPool refuses.
  has_float64 = np.dtype(np.float64) in [np.dtype(x.dtype) for x in arrays]
  x64 = functools.partial(jax.enable_x64, has_float64)
  with x64():
    actions = jax.numpy.asarray(random_actions(envs.action_space, num_envs))
    handle, recv, send, _ = envs.xla()

  @jax.jit
  def steps(handle):
    def step(_, handle):
      handle, (_, _, _, _, info) = recv(handle)
      return send(handle, actions, info['env_id'])
    return lax.fori_loop(0, LOOP_STEPS, step, handle)

  while True:
    with x64():
      handle = jax.block_until_ready(steps(handle))
    yield LOOP_STEPS * num_envs


def _first_core() -> int:
  """Returns the first core that this process may use.

  Raises:
    ValueError: the cores are not consecutive, and EnvPool counts on from the first one.
  """
  cores = sorted(os.sched_getaffinity(0))
  if cores[-1] - cores[0] >= len(cores):
    raise ValueError(f'--pin: wants consecutive cores, and this process may use {cores}')
  return cores[0]


def speed(steps: Iterator[int], seconds: float) -> float:
  """Returns the steps a second of a variant, which goes on for so long."""
  began_s = time.perf_counter()
  count = 0
  while (passed_s := time.perf_counter() - began_s) < seconds:
    count += next(steps)
  return count / passed_s


def variants(task: str, num_envs: int, args: argparse.Namespace
             ) -> dict[str, Callable[[], Iterator[int]]]:
  """Returns what begins each variant, by its name."""
  threads = min(args.threads or len(os.sched_getaffinity(0)), num_envs)
  begin: dict[str, Callable[[], Iterator[int]]] = {
      'for-loop': lambda: for_loop(task, num_envs),
      'sync': lambda: pool(task, num_envs, num_envs, threads, args.pin),
      'rollout': lambda: rollout(task, num_envs, threads, args.pin)}
  if num_envs <= PROCESSES_OF_A_CORE * len(os.sched_getaffinity(0)):
    begin['subprocess'] = lambda: subprocess(task, num_envs)
  for batch in args.batches or [max(1, num_envs // 2)]:
    if batch < num_envs:
      begin[f'async, first {batch}'] = lambda batch=batch: pool(
          task, num_envs, batch, threads, args.pin)
  return begin


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  own = argparse.ArgumentParser(prog='python -m benchmarks.envs', description=__doc__,
                                allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
  own.add_argument('--tasks', default='Pong-v5,Ant-v4', help='of EnvPool, by comma')
  own.add_argument('--num_envs', default='1,8,64', help='numbers of environments, by comma')
  own.add_argument('--batches', type=numbers, help="of asynchronous steps; default: half of them")
  own.add_argument('--threads', type=int, default=0, help='of a pool; 0: as many as cores')
  own.add_argument('--pin', action='store_true', help='threads stay on their cores')
  own.add_argument('--seconds', type=float, default=2.0, help='of a measurement')
  own.add_argument('--rounds', type=int, default=3, help='of all variants')
  args = own.parse_args(argv)
  warnings.filterwarnings('ignore')
  print('| task | environments | variant | steps a second |')
  print('| --- | --- | --- | --- |')
  for task in args.tasks.split(','):
    if task not in envpool.list_all_envs():
      print(f'envs: --tasks: EnvPool has no {task!r}', file=sys.stderr)
      return 2
    try:
      random_actions(envpool.make_gymnasium(task, num_envs=1).action_space, 1)
      if args.pin:
        _first_core()
    except ValueError as error:
      what = '' if str(error).startswith('--') else f'--tasks: the actions of {task} '
      print(f'envs: {what}{error}', file=sys.stderr)
      return 2
    for num_envs in numbers(args.num_envs):
      measured = measure(variants(task, num_envs, args), args.seconds, args.rounds)
      for name, speeds in measured.items():
        print(f'| {task} | {num_envs:,} | {name} | {statistics.median(speeds):,.0f} '
              f'({min(speeds):,.0f} to {max(speeds):,.0f}) |', flush=True)
  return 0


def measure(begin: dict[str, Callable[[], Iterator[int]]], seconds: float, rounds: int
            ) -> dict[str, list[float]]:
  """Returns the speeds of variants that take turns, by name."""
  running = {}
  for name, start in begin.items():
    running[name] = start()
    next(running[name])  # makes the environments, or compiles
    print(f'{name} is ready', file=sys.stderr, flush=True)
  speeds: dict[str, list[float]] = {name: [] for name in running}
  for _ in range(rounds):
    for name, steps in running.items():
      speeds[name].append(speed(steps, seconds))
  for steps in running.values():
    steps.close()
  return speeds


def numbers(text: str) -> list[int]:
  """Returns the numbers of a text, by comma."""
  return [int(part) for part in text.split(',')]


if __name__ == '__main__':
  sys.exit(main())
