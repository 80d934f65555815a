"""Islands: arithmetic that has the same bits in every program that contains it.

XLA compiles the same arithmetic to other instructions in other programs: it fuses it with what
stands around it, contracts products with sums, hoists loop invariants, unrolls loops of one turn
and folds what it knows. An island is a computation of its own, into which XLA cannot look from
outside and from which it cannot look out:

- On a CPU it is a branch of a `cond` whose predicate is always true, which a barrier hides. XLA
  compiles a branch as a function of its own, and fuses nothing across its border.
- Elsewhere it stands between two barriers, since on a GPU a `cond` may make the host wait for the
  device. That is so by construction; it was not run there yet.

Rules for whoever writes an island:

- What it reads comes in by its arguments, never by closing over a traced array.
- Collectives stand outside.
- All that it returns must be used: XLA drops results that nobody reads, and what is left is
  another computation.
- Integers, comparisons and copies need no island; they are exact anywhere.

Seen on CPUs with jax 0.10.2. `tests/schemes/test_islands.py` compares the compiled bodies of each
island in all programs that have it, `tests/numerics/test_islands.py` fails without the `cond`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PREFIX = 'island_'  # of the scopes in compiled programs that name islands


def island(name: str, skipped: Callable | None = None) -> Callable[[Callable], Callable]:
  """Returns a decorator that makes an island of a function of pytrees of arrays.

  Args:
    name: tells the island in compiled programs and in error messages of tests.
    skipped: a function of the same arguments and results that computes nothing; it is the branch
      that is never taken. By default its results are zeros. An island that turns a large state
      into the next one should return the state it is given: XLA then updates it in place.
  """
  def decorate(function: Callable) -> Callable:
    named = jax.named_scope(PREFIX + name)(function)

    @functools.wraps(function)
    def isolated(*args: Any) -> Any:
      args = lax.optimization_barrier(args)
      results = lax.platform_dependent(
          *args, cpu=functools.partial(_in_a_branch, named, skipped or _zeros_of(function)),
          default=named)
      return lax.optimization_barrier(results)

    return isolated

  return decorate


def _in_a_branch(function: Callable, skipped: Callable, *args: Any) -> Any:
  hidden_true = lax.optimization_barrier(jnp.bool_(True))
  return lax.cond(hidden_true, function, skipped, *args)


def _zeros_of(function: Callable) -> Callable:
  """Returns a function with the results of `function` as zeros."""
  def zeros(*args):
    shapes = jax.eval_shape(function, *args)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  return zeros
