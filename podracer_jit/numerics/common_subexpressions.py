"""Common subexpression elimination before XLA's own.

XLA rewrites some arithmetic only if a value has a single user: `a / broadcast(b)` becomes
`a * broadcast(1 / b)`, and `a * c + b * c` becomes `(a + b) * c`. The result is rounded
differently. How many users a value has depends on whether XLA has merged equal operations yet: in a
program for several devices it merges them before these rewrites, in a program for one device
afterwards. So the gradient of a softmax had other bits on two learner devices than on one, also
within an island. If there is nothing to merge, both kinds of programs start equal.

`without_duplicates` therefore keeps one of several equal equations of a jaxpr. Some equations are
equal only to XLA, after JAX has translated them. They are brought into one form first:

- A call of a jitted function is replaced with the equations of that function.
- Operands that a primitive broadcasts are broadcast by equations of their own.
- Primitives that become other operations of XLA, such as `square`, are replaced with those.
- Primitives that compute nothing, such as `copy`, are replaced with their operand.
- Loops are not unrolled (`unroll` of `lax.scan`), because unrolled turns are copies of the body.

Observed on CPUs with jax 0.10.2. `tests/numerics/test_common_subexpressions.py` fails without it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

Atom = Var | Literal
Rule = Callable[[JaxprEqn], ClosedJaxpr | None]

# These tables have the names of primitives, because JAX does not export all of them.

# Primitives that call a function, with the parameter that has its jaxpr. The function's own rules
# for derivatives are dropped: an island contains its derivatives and is not differentiated itself.
CALLS: Mapping[str, str] = {
    'jit': 'jaxpr',
    'closed_call': 'call_jaxpr',
    'custom_jvp_call': 'call_jaxpr',
    'custom_vjp_call': 'call_jaxpr',
}

# Primitives with jaxprs in their parameters that XLA optimises like the rest of the program.
CONTROL_FLOW = frozenset({'scan', 'while', 'cond', 'remat2'})

# Primitives that become nothing in XLA.
IDENTITIES = frozenset({'stop_gradient', 'copy', 'copy_p', 'name'})

# Primitives that broadcast operands of shape () or with axes of size 1.
BROADCASTING = frozenset({
    'add', 'add_any', 'sub', 'mul', 'div', 'rem', 'max', 'min', 'pow', 'atan2', 'nextafter',
    'and', 'or', 'xor', 'eq', 'ne', 'lt', 'le', 'gt', 'ge', 'complex', 'igamma', 'igammac', 'zeta',
    'polygamma', 'regularized_incomplete_beta',
})

# Primitives that are replaced with other ones, at least for some parameters.
SPELLED_OUT = frozenset({'add_any', 'square', 'integer_pow', 'squeeze', 'broadcast_in_dim'})

# Primitives whose two operands may change places.
COMMUTATIVE = frozenset({'add', 'mul', 'max', 'min', 'and', 'or', 'xor', 'eq', 'ne'})

NEVER_MERGED = frozenset({
    'rng_uniform',  # each call gives other numbers, although JAX declares no effect
    'optimization_barrier',  # keeps values apart
})


def without_duplicates(closed: ClosedJaxpr) -> ClosedJaxpr:
  """Returns an equivalent jaxpr in which equal equations are merged.

  Equations with effects and barriers stay. Named scopes (`jax.named_scope`) are kept, names of
  inner `jit`s are not.
  """
  return rewritten(closed, _spelled_out, again=True)


def rewritten(closed: ClosedJaxpr, rule: Rule, again: bool) -> ClosedJaxpr:
  """Returns an equivalent jaxpr in which equations are replaced, and equal ones merged.

  Args:
    closed: the jaxpr; those of its control flow are rewritten, too.
    rule: returns the jaxpr of what an equation becomes, or None if it stays.
    again: whether what the rule returns is rewritten, too.
  """
  body = _Equations(rule, again, takes_constants=True)
  operands = [*map(body.constant, closed.consts), *closed.jaxpr.invars]
  results = body.add_all(closed.jaxpr, operands)
  variables, values = body.constants()
  jaxpr = closed.jaxpr.replace(constvars=variables, eqns=body.equations, outvars=results)
  return ClosedJaxpr(jaxpr, values)


class _Equations:
  """The equations of a jaxpr that is being built."""

  def __init__(self, rule: Rule, again: bool, takes_constants: bool):
    """Starts without equations.

    Args:
      rule: see `rewritten`.
      again: see `rewritten`.
      takes_constants: whether the jaxpr may get constants that are arrays.
    """
    self._rule = rule
    self._again = again
    self._is_replacing = False  # adds what the rule returned
    self.equations: list[JaxprEqn] = []
    self._takes_constants = takes_constants
    self._constants: dict[int, tuple[Var, Any]] = {}  # by the identity of the array
    self._results: dict[Hashable, Sequence[Atom]] = {}  # by the key of an equation
    self._reshaped: dict[Var, Atom] = {}  # result of a reshape -> its operand

  def constants(self) -> tuple[list[Var], list[Any]]:
    """Returns the variables of the constants, and the arrays that they stand for."""
    return ([variable for variable, _ in self._constants.values()],
            [value for _, value in self._constants.values()])

  def constant(self, value: Any) -> Var:
    """Returns the variable that stands for an array."""
    variable, _ = self._constants.setdefault(id(value), (Var(jax.typeof(value)), value))
    return variable

  def add_all(self, jaxpr: Jaxpr, operands: Sequence[Atom], scope: Any = None,
              context: Any = None) -> list[Atom]:
    """Adds the equations of a jaxpr.

    Args:
      jaxpr: its variables may occur in other jaxprs, too.
      operands: the values of its constants and inputs, in this order.
      scope: the named scopes around the jaxpr; None if there are none.
      context: replaces the context (`JaxprEqn.ctx`) of the equations, unless it is None.

    Returns:
      The values of its results.
    """
    values: dict[Var, Atom] = dict(zip([*jaxpr.constvars, *jaxpr.invars], operands, strict=True))

    def value_of(atom: Atom) -> Atom:
      return atom if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
      scopes = equation.source_info.name_stack
      source_info = equation.source_info.replace(name_stack=scope + scopes if scope else scopes)
      equation = equation.replace(invars=list(map(value_of, equation.invars)),
                                  source_info=source_info, ctx=context or equation.ctx)
      values.update(zip(equation.outvars, self._add(equation), strict=True))
    return list(map(value_of, jaxpr.outvars))

  def _add(self, equation: JaxprEqn) -> Sequence[Atom]:
    """Adds an equation, or what it stands for, unless an equal one was added before.

    Returns:
      The values of its results.
    """
    if _computes_nothing(equation):
      return equation.invars
    scope = equation.source_info.name_stack
    called = _called(equation)
    if called and (self._takes_constants or not called.consts):
      operands = [*map(self.constant, called.consts), *equation.invars]
      return self.add_all(called.jaxpr, operands, scope)
    replacement = None if self._is_replacing else self._rule(equation)
    if replacement:
      self._is_replacing = not self._again
      results = self.add_all(replacement.jaxpr, equation.invars, scope, equation.ctx)
      self._is_replacing = False
      return results
    if (equation.primitive.name == 'reshape' and equation.params['dimensions'] is None
        and equation.params['sharding'] is None):
      return self._add_reshape(equation)
    return self._add_once(equation)

  def _add_reshape(self, equation: JaxprEqn) -> Sequence[Atom]:
    """Adds a reshape of the first array, in place of a reshape of reshapes."""
    (operand,) = equation.invars
    if isinstance(operand, Var):
      operand = self._reshaped.get(operand, operand)
    (result,) = equation.outvars
    if operand.aval.shape == result.aval.shape:
      return [operand]
    (result,) = self._add_once(equation.replace(invars=[operand]))
    self._reshaped[result] = operand
    return [result]

  def _add_once(self, equation: JaxprEqn) -> Sequence[Atom]:
    """Adds an equation, unless an equal one was added before; returns its results."""
    name = equation.primitive.name
    may_merge = not equation.effects and name not in NEVER_MERGED
    key = _equation_key(equation, _operand_key) if may_merge else None
    if key is not None and key in self._results:
      return self._results[key]
    if name in CONTROL_FLOW:
      params = {option: _with_each_jaxpr(self._rewrite, value)
                for option, value in equation.params.items()}
      equation = equation.replace(params=params | ({'unroll': 1} if name == 'scan' else {}))
    # Results that nobody uses have no variables in `outvars`. A merged equation may use them.
    results = [Var(variable.aval) for variable in equation.outvars]
    self.equations.append(equation.replace(outvars=results))
    if key is not None:
      self._results[key] = results
    return results

  def _rewrite(self, jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr | ClosedJaxpr:
    """Returns a jaxpr of a parameter, rewritten by the same rule."""
    if isinstance(jaxpr, ClosedJaxpr):
      return rewritten(jaxpr, self._rule, self._again)
    body = _Equations(self._rule, self._again, takes_constants=False)
    results = body.add_all(jaxpr, [*jaxpr.constvars, *jaxpr.invars])
    return jaxpr.replace(eqns=body.equations, outvars=results)


def _computes_nothing(equation: JaxprEqn) -> bool:
  """Tells whether the result of an equation is its operand."""
  name = equation.primitive.name
  if name == 'convert_element_type':  # a conversion that only ends a weak type
    return (equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype
            and equation.params.get('sharding') is None)
  return name in IDENTITIES


def _called(equation: JaxprEqn) -> ClosedJaxpr | None:
  """Returns the jaxpr of the function that an equation calls, or None."""
  if equation.primitive.name not in CALLS:
    return None
  called = equation.params[CALLS[equation.primitive.name]]
  return called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())


def _spelled_out(equation: JaxprEqn) -> ClosedJaxpr | None:
  """Returns the jaxpr of what an equation becomes in XLA; None if it is one operation."""
  if equation.primitive.name not in BROADCASTING | SPELLED_OUT:
    return None
  inputs = tuple(atom.aval for atom in equation.invars)
  (result,) = equation.outvars
  return _spelled_out_primitive(equation.primitive, tuple(equation.params.items()), inputs,
                                result.aval.shape, equation.ctx)


@functools.lru_cache(maxsize=10_000)
def _spelled_out_primitive(primitive: Primitive, params: tuple[tuple[str, Any], ...],
                           inputs: tuple[Any, ...], shape: tuple[int, ...], context: Any
                           ) -> ClosedJaxpr | None:
  """Returns the jaxpr of what a primitive becomes in XLA; None if it is one operation.

  Args:
    primitive: of `BROADCASTING` or `SPELLED_OUT`.
    params: its parameters.
    inputs: the shapes and dtypes of its operands.
    shape: that of its result.
    context: of the equation (`JaxprEqn.ctx`). It is part of the key of this cache, because its mesh
      is part of the types of the results.
  """
  del context
  name = primitive.name
  if name in BROADCASTING and any(operand.shape != shape for operand in inputs):
    return jax.make_jaxpr(lambda *operands: primitive.bind(
        *(_broadcast(operand, shape) for operand in operands), **dict(params)))(*inputs)
  if name == 'add_any':  # the sum of two gradients
    return jax.make_jaxpr(lax.add)(*inputs)
  if name == 'square':
    return jax.make_jaxpr(lambda x: lax.mul(x, x))(*inputs)
  if name == 'integer_pow':
    return jax.make_jaxpr(lambda x: _power(x, dict(params)['y']))(*inputs)
  # A broadcast that only adds axes of size 1 is the same as a reshape.
  adds_axes = (name == 'broadcast_in_dim' and len(inputs) == 1 and inputs[0].ndim
               and math.prod(inputs[0].shape) == math.prod(shape)
               and dict(params).get('sharding') is None)
  if adds_axes or name == 'squeeze':
    return jax.make_jaxpr(lambda x: lax.reshape(x, shape))(*inputs)
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


def _with_each_jaxpr(change: Callable[[Jaxpr | ClosedJaxpr], Any], value: Any) -> Any:
  """Returns the value of a parameter with each jaxpr in it changed."""
  if isinstance(value, Jaxpr | ClosedJaxpr):
    return change(value)
  if isinstance(value, tuple | list):
    return type(value)(_with_each_jaxpr(change, part) for part in value)
  return value


def _equation_key(equation: JaxprEqn, operand_key: Callable[[Atom], Hashable]) -> Hashable | None:
  """Returns a key that equal equations share, or None if a parameter has none.

  Args:
    equation: the equation.
    operand_key: returns the key of an operand.
  """
  operands = tuple(map(operand_key, equation.invars))
  if equation.primitive.name in COMMUTATIVE:
    operands = tuple(sorted(operands, key=hash))
  params = dict(equation.params)
  if equation.primitive.name == 'dot_general':  # None stands for these
    params['preferred_element_type'] = equation.outvars[0].aval.dtype
    params['precision'] = params['precision'] or (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
  params.pop('weak_type', None)
  key = (equation.primitive, operands, _parameter_key(params), equation.ctx)
  try:
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
    return (_jaxpr_key(value.jaxpr), tuple(map(id, value.consts)))
  return _jaxpr_key(value) if isinstance(value, Jaxpr) else value


def _jaxpr_key(jaxpr: Jaxpr) -> Hashable:
  """Returns a key that jaxprs share if they differ only in their variables."""
  numbers: dict[Var, int] = {}

  def number(atom: Atom) -> Hashable:
    return numbers.setdefault(atom, len(numbers)) if isinstance(atom, Var) else _operand_key(atom)

  inputs = [*jaxpr.constvars, *jaxpr.invars]
  key: list[Hashable] = [(number(variable), str(variable.aval)) for variable in inputs]
  for equation in jaxpr.eqns:
    # An equation that is never merged, or has no key, is equal to itself only.
    never = equation.primitive.name in NEVER_MERGED
    key.append(id(equation) if never else _equation_key(equation, number) or id(equation))
    key.append(tuple(map(number, equation.outvars)))
  return (*key, tuple(map(number, jaxpr.outvars)))
