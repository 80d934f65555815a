"""Environment pools with the compiled program that steps them, closed in a safe order."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from podracer_jit.envs.protocol import VectorEnv


@contextlib.contextmanager
def _out_of_the_cache() -> Iterator[None]:
  """Keeps programs that are compiled in the block out of the persistent compilation cache.

  A program with pointers is useless to a later process.
  """
  name = 'jax_persistent_cache_min_compile_time_secs'
  previous_seconds = getattr(jax.config, name)
  jax.config.update(name, math.inf)
  try:
    yield
  finally:
    jax.config.update(name, previous_seconds)


class RolloutProgram:
  """Vector environments and the compiled program that steps them.

  A program holds bare pointers to its pools and does not keep them alive. If a pool is closed while
  its program runs, or before the program is called again, the process ends with a segmentation
  fault. `close` ends both in the only safe order.
  """

  def __init__(self, vector_envs: Sequence[VectorEnv]):
    self.vector_envs = tuple(vector_envs)
    self._program = None
    self._last = None

  def load(self, function, args, donate: tuple[int, ...], out_shardings: Any = None) -> Callable:
    """Compiles a function that steps the vector environments.

    Args:
      function: the function to jit.
      args: its arguments, arrays or shapes, to compile it for.
      donate: indices of the arguments whose buffers are donated.
      out_shardings: shardings of the results, as `jax.jit` takes them.

    Returns:
      The compiled function. Call it from one thread at a time.
    """
    lowered = jax.jit(function, donate_argnums=donate, out_shardings=out_shardings).lower(*args)
    if all(getattr(env, 'is_function', False) for env in self.vector_envs):
      self._program = lowered.compile()
    else:
      with _out_of_the_cache():
        self._program = lowered.compile()

    def call(*args):
      results = self._program(*args)
      # Once one output is ready, all are. Holding one array keeps no whole rollout alive; the last
      # one belongs to the experience, which is never donated.
      self._last = jax.tree.leaves(results)[-1]
      return results

    return call

  def close(self) -> None:
    """Waits for the program's last output, drops the program and closes the pools; idempotent."""
    # Errors of the program have already been raised to its caller.
    with contextlib.suppress(Exception):
      jax.block_until_ready(self._last)
    self._program = None
    self._last = None
    vector_envs = self.vector_envs
    self.vector_envs = ()
    for vector_env in vector_envs:
      vector_env.close()
