"""Common subexpression elimination before XLA's own.

XLA rewrites some arithmetic only if a value has a single user: `a / broadcast(b)` becomes
`a * broadcast(1 / b)`, and `a * c + b * c` becomes `(a + b) * c`. The result is rounded
differently. How many users a value has depends on whether XLA has merged equal operations yet: in a
program for several devices it merges them before these rewrites, in a program for one device
afterwards. So the gradient of a softmax had other bits on two learner devices than on one, also
within an island. If there is nothing to merge, both kinds of programs start equal.

`without_duplicates` therefore keeps one of several equal equations of a jaxpr. Some duplicates
arise only when JAX translates a jaxpr to XLA's operations. They are made explicit first:

- A call of a jitted function is replaced with the equations of that function.
- Operands that a primitive broadcasts are broadcast by equations of their own.
- Primitives that become other operations of XLA, such as `square`, are replaced with those.

Observed on CPUs with jax 0.10.2. `tests/numerics/test_common_subexpressions.py` fails without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

Atom = Var | Literal

# Primitives that call a function, with the parameter that has its jaxpr. Rules for its derivative
# get lost, which is right: an island is not differentiated, but contains its derivatives.
CALLS: Mapping[str, str] = {
    'jit': 'jaxpr',
    'closed_call': 'call_jaxpr',
    'custom_jvp_call': 'call_jaxpr',
    'custom_vjp_call': 'call_jaxpr',
}

# Primitives with jaxprs in their parameters that XLA optimises like the rest of the program.
CONTROL_FLOW = frozenset({'scan', 'while', 'cond', 'remat2'})

# Primitives that broadcast operands of shape () or with axes of size 1.
BROADCASTING = frozenset({
    'add', 'add_any', 'sub', 'mul', 'div', 'rem', 'max', 'min', 'pow', 'atan2', 'nextafter',
    'and', 'or', 'xor', 'eq', 'ne', 'lt', 'le', 'gt', 'ge',
})

# Primitives that are replaced with other ones.
SPELLED_OUT = frozenset({'add_any', 'square', 'integer_pow'})

# Primitives whose two operands may change places.
COMMUTATIVE = frozenset({'add', 'mul', 'max', 'min', 'and', 'or', 'xor', 'eq', 'ne'})

# Primitives that must not be merged although they have no effect: two calls of the first give other
# numbers, and the second is there to keep values apart.
NEVER_MERGED = frozenset({'rng_uniform', 'optimization_barrier'})


def without_duplicates(closed: ClosedJaxpr) -> ClosedJaxpr:
  """Returns a jaxpr with the same results in which no two equations compute the same.

  Equations keep their scopes (`jax.named_scope`), so profiles and compiled programs name them as
  before.
  """
  body = _Equations(takes_constants=True)
  operands = [*map(body.constant, closed.consts), *closed.jaxpr.invars]
  results = body.add_all(closed.jaxpr, operands)
  variables, values = body.constants()
  jaxpr = closed.jaxpr.replace(constvars=variables, eqns=body.equations, outvars=results)
  return ClosedJaxpr(jaxpr, values)


class _Equations:
  """The equations of a jaxpr that is being built."""

  def __init__(self, takes_constants: bool):
    """Starts without equations.

    Args:
      takes_constants: whether the jaxpr may get constants that are arrays.
    """
    self.equations: list[JaxprEqn] = []
    self._takes_constants = takes_constants
    self._constants: dict[int, tuple[Var, Any]] = {}  # by the identity of the array
    self._results: dict[Hashable, Sequence[Atom]] = {}  # by what an equation computes

  def constants(self) -> tuple[list[Var], list[Any]]:
    """Returns the variables of the constants, and the arrays that they stand for."""
    return ([variable for variable, _ in self._constants.values()],
            [value for _, value in self._constants.values()])

  def constant(self, value: Any) -> Var:
    """Returns the variable that stands for an array."""
    variable, _ = self._constants.setdefault(id(value), (Var(jax.typeof(value)), value))
    return variable

  def add_all(self, jaxpr: Jaxpr, operands: Sequence[Atom], scope: Any = None) -> list[Atom]:
    """Adds the equations of a jaxpr.

    Args:
      jaxpr: its variables may occur in other jaxprs, too.
      operands: what its constants and inputs are, in this order.
      scope: the scopes around the jaxpr, or None.

    Returns:
      What its results are.
    """
    atoms: dict[Var, Atom] = dict(zip([*jaxpr.constvars, *jaxpr.invars], operands, strict=True))

    def atom(of: Atom) -> Atom:
      return of if isinstance(of, Literal) else atoms[of]

    for equation in jaxpr.eqns:
      scopes = equation.source_info.name_stack
      source_info = equation.source_info.replace(name_stack=scope + scopes if scope else scopes)
      equation = equation.replace(invars=list(map(atom, equation.invars)), source_info=source_info)
      atoms.update(zip(equation.outvars, self._add(equation), strict=True))
    return list(map(atom, jaxpr.outvars))

  def _add(self, equation: JaxprEqn) -> Sequence[Atom]:
    """Adds an equation, unless an equal one is there. Returns what its results are."""
    name = equation.primitive.name
    if name == 'stop_gradient':
      return equation.invars
    replacement = _replacement(equation)
    if replacement is not None and (self._takes_constants or not replacement.consts):
      operands = [*map(self.constant, replacement.consts), *equation.invars]
      return self.add_all(replacement.jaxpr, operands, equation.source_info.name_stack)
    key = None if equation.effects or name in NEVER_MERGED else _what_it_computes(equation)
    if key in self._results:
      return self._results[key]
    if name in CONTROL_FLOW:
      equation = equation.replace(params={option: _each_jaxpr(_simplified, value)
                                          for option, value in equation.params.items()})
    # An equation has no variables for results that are not used, but an equal one may use them.
    results = [Var(variable.aval) for variable in equation.outvars]
    self.equations.append(equation.replace(outvars=results))
    if key is not None:
      self._results[key] = results
    return results


def _replacement(equation: JaxprEqn) -> ClosedJaxpr | None:
  """Returns the jaxpr of what an equation calls, or of what it becomes in XLA, or None."""
  name = equation.primitive.name
  if name in CALLS:
    called = equation.params[CALLS[name]]
    return called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
  if name not in BROADCASTING | SPELLED_OUT:
    return None
  inputs = tuple(atom.aval for atom in equation.invars)
  (result,) = equation.outvars
  return _spelled_out(equation.primitive, tuple(equation.params.items()), inputs,
                      result.aval.shape)


@functools.lru_cache(maxsize=10_000)
def _spelled_out(primitive: Primitive, params: tuple[tuple[str, Any], ...],
                 inputs: tuple[Any, ...], shape: tuple[int, ...]) -> ClosedJaxpr | None:
  """Returns the jaxpr of what a primitive becomes in XLA, or None if it is one operation.

  Args:
    primitive: of `BROADCASTING` or `SPELLED_OUT`.
    params: its parameters.
    inputs: the shapes and dtypes of its operands.
    shape: that of its result.
  """
  if any(operand.shape != shape for operand in inputs):
    return jax.make_jaxpr(lambda *operands: primitive.bind(
        *(_broadcast(operand, shape) for operand in operands), **dict(params)))(*inputs)
  if primitive.name == 'add_any':  # the sum of two gradients
    return jax.make_jaxpr(lax.add)(*inputs)
  if primitive.name == 'square':
    return jax.make_jaxpr(lambda x: lax.mul(x, x))(*inputs)
  if primitive.name == 'integer_pow':
    return jax.make_jaxpr(lambda x: _power(x, dict(params)['y']))(*inputs)
  return None


def _broadcast(operand: jax.Array, shape: Sequence[int]) -> jax.Array:
  if operand.shape == shape:
    return operand
  return lax.broadcast_in_dim(operand, shape, range(len(shape)) if operand.ndim else ())


def _power(x: jax.Array, exponent: int) -> jax.Array:
  """Returns a power, with the products that JAX would use."""
  if exponent < 0:
    return lax.div(lax.full_like(x, 1), _power(x, -exponent))
  product = None
  while exponent:
    if exponent & 1:
      product = x if product is None else lax.mul(product, x)
    exponent >>= 1
    if exponent:
      x = lax.mul(x, x)
  return lax.full_like(x, 1) if product is None else product


def _simplified(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr | ClosedJaxpr:
  """Returns a jaxpr of a parameter without duplicates."""
  if isinstance(jaxpr, ClosedJaxpr):
    return without_duplicates(jaxpr)
  body = _Equations(takes_constants=False)
  results = body.add_all(jaxpr, [*jaxpr.constvars, *jaxpr.invars])
  return jaxpr.replace(eqns=body.equations, outvars=results)


def _each_jaxpr(change: Callable[[Jaxpr | ClosedJaxpr], Any], value: Any) -> Any:
  """Returns the value of a parameter with each jaxpr in it changed."""
  if isinstance(value, Jaxpr | ClosedJaxpr):
    return change(value)
  if isinstance(value, tuple | list):
    return type(value)(_each_jaxpr(change, part) for part in value)
  return value


class _Text(NamedTuple):
  """A jaxpr as a key of a dictionary: equal if the texts of the jaxprs are equal."""

  jaxpr: Jaxpr
  constants: tuple[int, ...]

  def __hash__(self) -> int:
    return hash((len(self.jaxpr.eqns), self.constants))

  def __eq__(self, other: object) -> bool:
    return (isinstance(other, _Text) and self.constants == other.constants
            and str(self.jaxpr) == str(other.jaxpr))


def _what_it_computes(equation: JaxprEqn) -> Hashable | None:
  """Returns a key that equal equations share, or None if the parameters have none."""
  name = equation.primitive.name
  operands = tuple(map(_operand_key, equation.invars))
  if name in COMMUTATIVE:
    operands = tuple(sorted(operands, key=hash))
  try:
    key = (name, operands, _parameter_key(equation.params))
    hash(key)
  except TypeError:
    return None
  return key


def _operand_key(atom: Atom) -> Hashable:
  if isinstance(atom, Var):
    return atom
  value = np.asarray(atom.val, atom.aval.dtype)
  return (value.dtype, value.shape, value.tobytes())


def _parameter_key(value: Any) -> Hashable:
  if isinstance(value, Mapping):
    return tuple((option, _parameter_key(value[option])) for option in sorted(value))
  if isinstance(value, tuple | list):
    return tuple(map(_parameter_key, value))
  if isinstance(value, ClosedJaxpr):
    return _Text(value.jaxpr, tuple(map(id, value.consts)))
  return _Text(value, ()) if isinstance(value, Jaxpr) else value
