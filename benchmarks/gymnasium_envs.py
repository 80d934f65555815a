"""Measures Gymnasium environments: this package's compiled rollout, and Gymnasium's vector classes.

  python benchmarks/gymnasium_envs.py [TASK] [NUM_ENVS] [STEPS]

The policy is a fixed random sequence of actions, so that only stepping is measured. The variants
take turns. The script prints the steps a second of each: the median of five turns, the lowest and
the highest.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit.envs import gymnasium_envs

TURNS = 5


def compiled(task: str, actions: np.ndarray, processes: int) -> Callable[[], None]:
  """Returns a function that takes all steps in one compiled program."""
  vector_env = gymnasium_envs.make_vector_env(f'gymnasium:{task}', {}, range(actions.shape[1]),
                                              processes)

  def steps(token, actions):
    def step(t, carry):
      token, rewards = carry
      token, state = vector_env.send(token, None, actions[t])
      token, _, step = vector_env.recv(token, state)
      return token, rewards + step.reward
    return lax.fori_loop(0, len(actions), step, (token, jnp.zeros(actions.shape[1])))[1]

  program = jax.jit(steps).lower(vector_env.handle, actions).compile()
  return lambda: jax.block_until_ready(program(vector_env.handle, actions))


def in_python(task: str, actions: np.ndarray, mode: str) -> Callable[[], None]:
  """Returns a function that steps a vector environment of Gymnasium; `mode` is sync or async."""
  vector_env = gymnasium.make_vec(task, actions.shape[1], vectorization_mode=mode)
  vector_env.reset(seed=0)

  def steps():
    for action in actions:
      vector_env.step(action)
  return steps


def main(task: str = 'CartPole-v1', num_envs: int = 64, num_steps: int = 1000) -> None:
  """Prints the steps a second of each variant."""
  space = gymnasium.make(task).action_space
  space.seed(0)
  actions = np.stack([[space.sample() for _ in range(num_envs)] for _ in range(num_steps)])
  cores = len(os.sched_getaffinity(0))
  variants = {f'compiled rollout, {n} processes': compiled(task, actions, n)
              for n in sorted({1, cores, 2 * cores})}
  variants['SyncVectorEnv'] = in_python(task, actions, 'sync')
  variants['AsyncVectorEnv'] = in_python(task, actions, 'async')

  rates: dict[str, list[float]] = {name: [] for name in variants}
  for turn in range(TURNS + 1):
    for name, run in variants.items():
      since = time.perf_counter()
      run()
      if turn:  # the first one warms up
        rates[name].append(num_envs * num_steps / (time.perf_counter() - since))

  print(f'{task}, {num_envs} environments, {num_steps} steps, {cores} cores')
  for name, turns in rates.items():
    print(f'{name:32} {statistics.median(turns):10,.0f} steps/s ({min(turns):,.0f} to '
          f'{max(turns):,.0f})')


if __name__ == '__main__':
  main(*sys.argv[1:2], *map(int, sys.argv[2:]))
