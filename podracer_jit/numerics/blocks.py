"""Sums over large arrays, block by block.

On a CPU, XLA writes the terms of a long sum to memory before it adds them, and adds them in many
passes, which takes far longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

# Arrays of fewer numbers are joined to one, which compiles faster. Larger ones take long to copy.
JOIN_BELOW = 1 << 16
_BLOCK = 1 << 13  # terms of a block, unless a row has more
_AT_ONCE = 4  # blocks that are added in one pass; more take longer to compile


def few_arrays(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns arrays with the same numbers: the small ones of each type are joined to one."""
  large = [x for x in arrays if x.size >= JOIN_BELOW]
  small = [x for x in arrays if 0 < x.size < JOIN_BELOW]
  return large + [
      jnp.concatenate([x.reshape(-1) for x in small if x.dtype == dtype])
      for dtype in dict.fromkeys(x.dtype for x in small)]


def sums(terms: Callable[[jax.Array, jax.Array | int], tuple[jax.Array, ...]], x: jax.Array,
         terms_of_row: int = 1) -> jax.Array:
  """Returns sums modulo 2^32 over an array, without arrays of its size.

  Args:
    terms: called with rows x[i:i + n] and i; returns k uint32 arrays of one shape, the terms to
      add, each computed elementwise.
    x: the array, [N, ...], not empty.
    terms_of_row: the terms of a row in each array.

  Returns:
    [k] uint32, a sum for each of those arrays.
  """
  rows = min(len(x), max(1, _BLOCK // terms_of_row))
  whole, rest = divmod(len(x), rows)

  def add(i, totals):
    new = terms(lax.dynamic_slice_in_dim(x, i * rows, rows), i * rows)
    return tuple(total + term for total, term in zip(totals, new, strict=True))

  zeros = tuple(jnp.zeros(term.shape, term.dtype)
                for term in jax.eval_shape(lambda x: terms(x, 0), x[:rows]))
  by_place = lax.fori_loop(0, whole, add, zeros, unroll=_AT_ONCE)
  total = jnp.stack([jnp.sum(places, dtype=jnp.uint32) for places in by_place])
  if rest:
    total += jnp.stack([jnp.sum(places, dtype=jnp.uint32)
                        for places in terms(x[-rest:], whole * rows)])
  return total
