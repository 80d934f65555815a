"""Environment pools with the compiled program that steps them, closed in a safe order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from typing import Any

import jax

from podracer_jit.envs.protocol import VectorEnv
from podracer_jit.runtime import stored_programs

# Programs of earlier segments by their keys; see `RolloutProgram.load`.
KeptPrograms = MutableMapping[Hashable, Any]


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

  def load(self, function: Callable, args: tuple[Any, ...], donate: tuple[int, ...],
           out_shardings: Any = None, kept: KeptPrograms | None = None, key: Hashable = None
           ) -> Callable:
    """Compiles a function that steps the vector environments.

    Args:
      function: the function to jit.
      args: its arguments, arrays or shapes, to compile it for.
      donate: indices of the arguments whose buffers are donated.
      out_shardings: shardings of the results, as `jax.jit` takes them.
      kept: programs of earlier segments of the run, which need not be traced and compiled again;
        the new one is added. None: keeps nothing.
      key: tells functions of a run apart that differ in more than their vector environments.

    Returns:
      The compiled function. Call it from one thread at a time.
    """
    device = _device_of(args)
    kept = {} if kept is None else kept
    key = (key, device, len(self.vector_envs))
    jitted = jax.jit(function, donate_argnums=donate, out_shardings=out_shardings)
    if all(getattr(env, 'is_function', False) for env in self.vector_envs):
      if key not in kept:
        kept[key] = jitted.lower(*args).compile()
      self._program = kept[key]
    elif self._have_addresses and stored_programs.is_supported(device):
      if key not in kept:
        with _placeholders(self.vector_envs):
          lowered = jitted.lower(*args)
        kept[key] = stored_programs.compile_or_read(lowered, device)
      self._program = kept[key].load([env.address for env in self.vector_envs], device)
    else:
      # A program with references to a simulator is useless to a later process.
      with stored_programs.outside_of_jax_cache():
        self._program = jitted.lower(*args).compile()

    def call(*args):
      results = self._program(*args)
      # Once one output is ready, all are. Holding one array keeps no whole rollout alive; the last
      # one belongs to the experience, which is never donated.
      self._last = jax.tree.leaves(results)[-1]
      return results

    return call

  @property
  def _have_addresses(self) -> bool:
    """Whether addresses are the program's only references to the simulators."""
    return all(getattr(env, 'address', None) is not None for env in self.vector_envs)

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


@contextlib.contextmanager
def _placeholders(vector_envs: Sequence[VectorEnv]) -> Iterator[None]:
  """Puts placeholders into the programs that are traced in the block, in place of addresses."""
  addresses = [env.address for env in vector_envs]
  try:
    for index, env in enumerate(vector_envs):
      env.address = stored_programs.placeholder(index)
    yield
  finally:
    for env, address in zip(vector_envs, addresses, strict=True):
      env.address = address


def _device_of(args: Any) -> jax.Device:
  """Returns the first device of the arrays among a program's arguments; else JAX's first device."""
  for leaf in jax.tree.leaves(args):
    if isinstance(leaf, jax.Array):
      return next(iter(leaf.sharding.device_set))
  return jax.devices()[0]
