"""Islands: arithmetic that has the same bits in every program that contains it.

XLA may compile the same arithmetic to different instructions in different programs. It fuses
operations with their surroundings, contracts products and sums, hoists loop invariants, unrolls
loops with one iteration and folds constants. An island is a computation that XLA compiles by
itself, without knowledge of the surrounding program:

- On a CPU, an island is a branch of a `cond` whose predicate is always true. A barrier hides the
  predicate from XLA. XLA compiles a branch as a separate function and fuses nothing across its
  border.
- On other platforms, an island stands between two barriers, because a `cond` on a GPU may make the
  host wait for the device. Loops over few operations are unrolled there (`_unrolled`).
- `without_duplicates` simplifies an island before XLA sees it, because XLA merges equal operations
  earlier in programs for several devices.

Rules for writing an island:

- Pass traced arrays as arguments; do not close over them.
- Keep collectives outside.
- Use every result: XLA drops unused results, and the remaining computation is a different one.
- Take gradients within the island. An island itself cannot be differentiated with custom rules.
- Integers, comparisons and copies need no island, since they are exact in any program.

Observed on CPUs with jax 0.10.2. `tests/schemes/test_islands.py` compares the compiled bodies of
each island in all programs that contain it. `tests/numerics/test_islands.py` fails without the
`cond`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from podracer_jit.numerics.common_subexpressions import CONTROL_FLOW, without_duplicates
from podracer_jit.numerics.precision import HIGHEST, products
from podracer_jit.numerics.thread_pool import independent_of_threads
from podracer_jit.numerics.tracing import zeros

# Prefix of the scopes that name islands in compiled programs.
PREFIX = 'island_'

# Called with the name, the arguments and the results of an island, all traced.
Observer = Callable[[str, tuple[Any, ...], Any], None]
_observers: list[Observer] = []


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
  """Adds what `observer` computes to the programs that are traced meanwhile, at each island.

  It is for scripts that search for an island whose results differ between two programs. Programs
  that were traced before have no observer; `jax.clear_caches()` has them traced again.

  Args:
    observer: may read the arrays that it gets, for example with `jax.debug.callback`.
  """
  _observers.append(observer)
  try:
    yield
  finally:
    _observers.remove(observer)


def island(name: str, skipped: Callable | None = None, precision: str = HIGHEST
           ) -> Callable[[Callable], Callable]:
  """Returns a decorator that makes an island of a function of pytrees of arrays.

  Args:
    name: the name of the island in compiled programs and in error messages of tests.
    skipped: the branch that is never taken: a function with the same arguments and result shapes
      that computes nothing. By default its results are zeros. An island that maps a large state to
      the next one should return its argument: XLA then updates the state in place.
    precision: of products and convolutions, see `precision.products`.
  """
  def decorate(function: Callable) -> Callable:
    named = jax.named_scope(PREFIX + name)(function)

    @functools.wraps(function)
    def isolated(*args: Any) -> Any:
      with products(precision):
        closed, shapes = jax.make_jaxpr(named, return_shape=True)(*args)
      closed = without_duplicates(closed)
      inputs, treedef = jax.tree.flatten(args)
      if skipped is None:
        closed, inputs = _without_unread(closed, inputs)

      def compute(closed: ClosedJaxpr, *inputs: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(closed)(*inputs))

      def nothing(*inputs: Any) -> Any:
        return skipped(*jax.tree.unflatten(treedef, inputs)) if skipped else zeros(shapes)

      inputs = lax.optimization_barrier(inputs)
      # The platform is chosen when the program is lowered, so it contains one variant only.
      results = lax.platform_dependent(
          *inputs, default=functools.partial(compute, _unrolled(closed)),
          cpu=functools.partial(
              _in_a_branch, functools.partial(compute, independent_of_threads(closed)), nothing))
      results = lax.optimization_barrier(results)
      for observer in _observers:
        observer(name, args, results)
      return results

    return isolated

  return decorate


def _without_unread(closed: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]]:
  """Drops inputs that a program does not read, such as the part of a state that no loss needs.

  An input of an island that nobody reads would still be computed and kept for it.
  """
  jaxpr = closed.jaxpr
  variables = [*jaxpr.outvars, *(x for eqn in jaxpr.eqns for x in eqn.invars)]
  read = {x for x in variables if isinstance(x, Var)}
  kept = [(variable, x) for variable, x in zip(jaxpr.invars, inputs, strict=True)
          if variable in read]
  jaxpr = jaxpr.replace(invars=[variable for variable, _ in kept],
                        debug_info=jaxpr.debug_info.with_unknown_names())
  return ClosedJaxpr(jaxpr, closed.consts), [x for _, x in kept]


# Most steps in a turn of an unrolled loop, and most operations of a step.
_STEPS_A_TURN = 64
_FEW_OPERATIONS = 24
_NOT_UNROLLED = CONTROL_FLOW | {'dot_general', 'conv_general_dilated', 'gather', 'scatter',
                                'random_bits', 'threefry2x32', 'rng_bit_generator'}


def _unrolled(closed: ClosedJaxpr) -> ClosedJaxpr:
  """Unrolls loops whose steps are a few operations on single numbers, such as returns.

  A turn of a loop on a GPU costs 6 microseconds, which is more than such a step computes.
  """
  def unrolled(eqn: JaxprEqn) -> JaxprEqn:
    if eqn.primitive.name != 'scan':
      return eqn
    steps = eqn.params['jaxpr'].jaxpr.eqns
    if len(steps) > _FEW_OPERATIONS or {x.primitive.name for x in steps} & _NOT_UNROLLED:
      return eqn
    turns = min(eqn.params['length'], _STEPS_A_TURN)
    return eqn.replace(params=eqn.params | {'unroll': max(turns, 1)})

  jaxpr = closed.jaxpr.replace(eqns=list(map(unrolled, closed.jaxpr.eqns)))
  return ClosedJaxpr(jaxpr, closed.consts)


def _in_a_branch(function: Callable, skipped: Callable, *args: Any) -> Any:
  """Calls `function` in a branch of a `cond` that is always taken."""
  # XLA would remove a `cond` whose predicate it knows.
  hidden_true = lax.optimization_barrier(jnp.bool_(True))
  return lax.cond(hidden_true, function, skipped, *args)
