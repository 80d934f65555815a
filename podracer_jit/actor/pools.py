"""Environments with the compiled program that steps them, and the one safe order to end both."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from podracer_jit.envs.protocol import Shard


class Pools:
  """Shards and the compiled program that contains them: ended in the one order that is safe.

  A program holds bare pointers to its pools and does not keep them alive: a pool closed while its
  program runs, or before it is called again, is a segmentation fault.
  """

  def __init__(self, shards: Sequence[Shard]):
    self.shards = tuple(shards)
    self._program = self._last = None

  def load(self, function, args, donate: tuple[int, ...], out_shardings: Any = None) -> Callable:
    """Compiles `function` for `args` and returns it; call it from one thread at a time."""
    # With its pointers it will never be found again, so it is not to fill the cache of programs.
    name = 'jax_persistent_cache_min_compile_time_secs'
    least = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
      self._program = jax.jit(function, donate_argnums=donate,
                              out_shardings=out_shardings).lower(*args).compile()
    finally:
      jax.config.update(name, least)

    def call(*args):
      made = self._program(*args)
      # One output says when all are ready, and keeps no rollout alive; the last is never donated.
      self._last = jax.tree.leaves(made)[-1]
      return made

    return call

  def close(self) -> None:
    """Waits for the program's last output, drops the program, closes the pools; can be repeated."""
    with contextlib.suppress(Exception):  # of the program: whoever called it has seen it
      jax.block_until_ready(self._last)
    self._program = self._last = None
    shards, self.shards = self.shards, ()
    for shard in shards:
      shard.close()
