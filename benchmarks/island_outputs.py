"""Finds the island that gives other results for the same arguments in another program.

An island has the same bits in every program that contains it (`numerics.islands`). So if two
programs part, an island is the cause if and only if it has had equal arguments and different
results. Islands that only follow a difference have different arguments, too.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from podracer_jit.numerics import fingerprints, islands

# For each island the fingerprints of its arguments, and of the results that they gave.
Outputs = Mapping[str, Mapping[str, set[str]]]


@contextlib.contextmanager
def recorded_outputs() -> Iterator[Outputs]:
  """Records the islands of the programs that are traced, compiled and run meanwhile.

  The fingerprints are computed beside the islands, so these programs are slower, and other programs
  to XLA than without the record. The record is complete once the results of the programs are there.
  """
  outputs: dict[str, dict[str, set[str]]] = collections.defaultdict(
      lambda: collections.defaultdict(set))

  def observe(name: str, args: tuple[Any, ...], results: Any) -> None:
    def note(of_args: np.ndarray, of_results: np.ndarray) -> None:
      outputs[name][fingerprints.as_hex(of_args)].add(fingerprints.as_hex(of_results))

    jax.debug.callback(note, _fingerprint(args), _fingerprint(results))

  with islands.observed(observe):
    yield outputs
    jax.effects_barrier()


def causes(a: Outputs, b: Outputs) -> list[str]:
  """Returns the names of the islands that had equal arguments and different results."""
  return sorted(name for name in a.keys() & b.keys()
                if any(a[name][args] != b[name][args] for args in a[name].keys() & b[name].keys()))


def _fingerprint(tree: Any) -> jax.Array:
  """Returns the fingerprint of a tree whose leaves may be keys of random numbers."""
  def plain(leaf: jax.Array) -> jax.Array:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf
  return fingerprints.fingerprint(jax.tree.map(plain, tree))
