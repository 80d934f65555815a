"""Environment pools with the compiled program that steps them, closed in a safe order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, MutableMapping, Sequence
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
    # The shapes of its results; None if it was not traced, as an earlier segment's was kept.
    self.result_shapes: Any | None = None
    self._program = None
    self._key: Hashable = None  # of the loaded program
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
      kept: programs of earlier segments of the run, which need not be traced and compiled again,
        nor the one that is loaded; the new one is added. None: keeps nothing.
      key: tells functions of a run apart that differ in more than their vector environments.

    Returns:
      The compiled function. Call it from one thread at a time.
    """
    device = _device_of(args)
    key = (key, len(self.vector_envs), donate, *map(_kind_of, jax.tree.leaves(args)))
    if self._program is None or kept is None or key != self._key:
      self.result_shapes = None
      jitted = jax.jit(function, donate_argnums=donate, out_shardings=out_shardings)
      self._program = self._compiled(jitted, args, device, {} if kept is None else kept, key)
      self._key = key

    def call(*args):
      results = self._program(*args)
      # Once one output is ready, all are. Holding one array keeps no whole rollout alive; the last
      # one belongs to the experience, which is never donated.
      self._last = jax.tree.leaves(results)[-1]
      return results

    return call

  def _compiled(self, jitted: Any, args: tuple[Any, ...], device: jax.Device, kept: KeptPrograms,
                key: Hashable) -> jax.stages.Compiled:
    """Returns a program, compiled or loaded.

    Args:
      jitted: the jitted function.
      args: of the function.
      device: of the arguments.
      kept: see `load`; the program is added if it can be kept.
      key: of the program in `kept`.
    """
    if all(getattr(env, 'is_function', False) for env in self.vector_envs):
      key = (*key, device)  # unlike a stored program, it cannot be loaded for another device
      if key not in kept:
        kept[key] = self._lower(jitted, args).compile()
      return kept[key]
    addresses = [getattr(env, 'address', None) for env in self.vector_envs]
    # Without an address, a program has other references to its simulators.
    if None in addresses or not stored_programs.is_supported(device):
      return stored_programs.compile_uncached(self._lower(jitted, args))
    stored = kept.get(key)
    if stored is not None and stored.fits(addresses):
      return stored.load(addresses, device)
    program, stored = stored_programs.load_or_compile(self._lower(jitted, args), addresses, device)
    if stored is not None:
      kept[key] = stored
    return program

  def _lower(self, jitted: Any, args: tuple[Any, ...]) -> jax.stages.Lowered:
    """Traces a jitted function for its arguments."""
    traced = jitted.trace(*args)
    self.result_shapes = traced.out_info
    return traced.lower()

  def release(self) -> Sequence[VectorEnv]:
    """Waits for the program's last output and drops the program; returns what it has stepped."""
    # Errors of the program have already been raised to its caller.
    with contextlib.suppress(Exception):
      jax.block_until_ready(self._last)
    self._program = None
    self._last = None
    vector_envs = self.vector_envs
    self.vector_envs = ()
    return vector_envs

  def close(self) -> None:
    """Closes the pools after the program's last output; idempotent."""
    for vector_env in self.release():
      vector_env.close()


def _kind_of(x: Any) -> Hashable:
  """Returns what a program must know of an argument: its shape and dtype, or its type."""
  return (x.shape, x.dtype) if hasattr(x, 'shape') else type(x)


def _device_of(args: Any) -> jax.Device:
  """Returns the first device of the arrays among a program's arguments; else JAX's first device."""
  for leaf in jax.tree.leaves(args):
    if isinstance(leaf, jax.Array):
      return next(iter(leaf.sharding.device_set))
  return jax.devices()[0]
