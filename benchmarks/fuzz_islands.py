"""Searches for functions that have other bits in another program although they are islands.

.venv/bin/python -m benchmarks.fuzz_islands --first=1 --count=200 [--isa=AVX2]

The random seed n gives function n: 6 to 14 operations on arrays of several shapes, each applied to
earlier results, and the gradient of it all. The function is an island. It runs in four programs
that must agree: alone, in a loop, beside a copy of itself that is no island, and in a program for
two devices. The script prints the number and the operations of each function that differs.

A search over whole experiments is `benchmarks.fuzz_bits`; this one tries far more arithmetic.

--isa: the newest CPU instructions that XLA may use: SSE4_2, AVX, AVX2 or AVX512.
Exit code: 0 no difference, 1 some functions differ.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from podracer_jit.numerics.islands import island

# Arrays of these shapes can be combined with each other. They are the arguments of a function.
SHAPES = ((6, 4, 10), (6, 4, 10), (4, 10), (10,), (6, 4, 1), (6, 1, 10))
WEIGHTS = (10, 10)


def _positive(x: jax.Array) -> jax.Array:
  return jax.nn.softplus(x) + 0.1


UNARY: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    'tanh': jnp.tanh, 'sin': jnp.sin, 'sigmoid': jax.nn.sigmoid, 'gelu': jax.nn.gelu,
    'relu': jax.nn.relu, 'elu': jax.nn.elu, 'softplus': jax.nn.softplus,
    'square': jnp.square, 'cube': lambda x: jnp.tanh(x) ** 3,
    'exp': lambda x: jnp.exp(jnp.tanh(x)), 'exp(-x)': lambda x: jnp.exp(-jnp.tanh(x)),
    'log': lambda x: jnp.log(_positive(x)), 'sqrt': lambda x: jnp.sqrt(_positive(x)),
    'rsqrt': lambda x: lax.rsqrt(_positive(x)), '1 / x': lambda x: 1 / _positive(x),
    'pow': lambda x: jnp.power(_positive(x), 1.7),
    '0.3 * x': lambda x: 0.3 * x, 'x / 0.7': lambda x: x / 0.7, 'x + 0.2': lambda x: x + 0.2,
    'clip': lambda x: jnp.clip(x, -1.0, 1.0),
    'copy': lambda x: jnp.array(x, copy=True),
    'checkpoint': lambda x: jax.checkpoint(jnp.sin)(x),
    'reshape': lambda x: x.reshape(1, -1).reshape(x.shape),
    'x + integers': lambda x: x + jnp.arange(x.shape[-1]) * 0.1,
}

BINARY: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    'x + y': jnp.add, 'x - y': jnp.subtract, 'x * y': jnp.multiply, 'max': jnp.maximum,
    'x / y': lambda x, y: x / _positive(y), 'x / sqrt(y)': lambda x, y: x / jnp.sqrt(_positive(y)),
    'x / exp(y)': lambda x, y: x / jnp.exp(jnp.tanh(y)),
    'where': lambda x, y: jnp.where(x > 0, y, x),
    'x y + x': lambda x, y: x * y + x,
}

# Each has an axis of its argument, whose size it keeps or makes 1.
ALONG_AN_AXIS: Mapping[str, Callable[[jax.Array, int], jax.Array]] = {
    'mean': lambda x, axis: jnp.mean(x, axis, keepdims=True),
    'sum': lambda x, axis: jnp.sum(x, axis, keepdims=True),
    'std': lambda x, axis: jnp.sqrt(jnp.var(x, axis, keepdims=True) + 1e-3),
    'largest': lambda x, axis: jnp.max(x, axis, keepdims=True),
    'logsumexp': lambda x, axis: jax.nn.logsumexp(x, axis, keepdims=True),
    'norm': lambda x, axis: jnp.sqrt(jnp.sum(x * x, axis, keepdims=True) + 1e-3),
    'softmax': jax.nn.softmax, 'log_softmax': jax.nn.log_softmax, 'cumsum': jnp.cumsum,
    'x / mean': lambda x, axis: x / jnp.mean(_positive(x), axis, keepdims=True),
    'x / expanded mean': lambda x, axis: x / jnp.expand_dims(jnp.mean(_positive(x), axis), axis),
    'x / squeezed mean': lambda x, axis: x / jnp.expand_dims(
        jnp.squeeze(jnp.mean(_positive(x), axis, keepdims=True), axis), axis),
    'scan': lambda x, axis: jnp.moveaxis(
        lax.scan(lambda c, row: (jnp.tanh(c + row), c / _positive(row)),
                 jnp.moveaxis(x, axis, 0)[0], jnp.moveaxis(x, axis, 0))[1], 0, axis),
    'unrolled scan': lambda x, axis: jnp.moveaxis(
        lax.scan(lambda c, row: (jnp.tanh(c + row), c / _positive(row)),
                 jnp.moveaxis(x, axis, 0)[0], jnp.moveaxis(x, axis, 0), unroll=True)[1], 0, axis),
    'standardize': lambda x, axis: jax.nn.standardize(x, axis, epsilon=1e-3),
}


class Operation(NamedTuple):
  """A step of a function."""

  name: str
  function: Callable[..., jax.Array]  # of the weights and the operands
  operands: Sequence[int]  # arguments, numbered first, and results of earlier steps


def _matmul(weights: jax.Array, x: jax.Array) -> jax.Array:
  return jnp.broadcast_to(x, SHAPES[0]) @ weights


def _dense(weights: jax.Array, x: jax.Array) -> jax.Array:
  """Returns the product as `flax.linen.Dense` computes it."""
  return lax.dot_general(jnp.broadcast_to(x, SHAPES[0]), weights, (((2,), (0,)), ((), ())))


def draw(number: int) -> tuple[str, Callable[..., jax.Array]]:
  """Returns a text with the operations of function `number`, and the function.

  Its arguments are `arguments(number)`, and its result is a scalar.
  """
  rng = random.Random(number)
  operations = []
  for step in range(rng.randint(6, 14)):
    kind = rng.choice(['unary'] * 4 + ['binary'] * 4 + ['axis'] * 3 + ['product'])
    # Recent results are drawn more often, so that functions are deep, too.
    operands = [rng.choice([rng.randrange(len(SHAPES) + step),
                            max(0, len(SHAPES) + step - rng.randint(1, 3))]) for _ in range(2)]
    if kind == 'unary':
      name = rng.choice(list(UNARY))
      operations.append(Operation(name, _without_weights(UNARY[name]), operands[:1]))
    elif kind == 'binary':
      name = rng.choice(list(BINARY))
      operations.append(Operation(name, _without_weights(BINARY[name]), operands))
    elif kind == 'axis':
      name, axis = rng.choice(list(ALONG_AN_AXIS)), rng.choice([-1, -1, -2])
      along = _along(ALONG_AN_AXIS[name], axis)
      operations.append(Operation(f'{name} of axis {axis}', _without_weights(along), operands[:1]))
    else:
      name, function = rng.choice([('matmul', _matmul), ('dense', _dense)])
      operations.append(Operation(name, function, operands[:1]))

  def function(weights: jax.Array, *arrays: jax.Array) -> jax.Array:
    results = list(arrays)
    for operation in operations:
      results.append(operation.function(weights, *(results[i] for i in operation.operands)))
    return sum(jnp.sum(jnp.sin(result)) for result in results[-3:])

  text = ', '.join(f'{len(SHAPES) + step} = {operation.name} of {operation.operands}'
                   for step, operation in enumerate(operations))
  return text, function


def _without_weights(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  return lambda weights, *operands: function(*operands)


def _along(operation: Callable[[jax.Array, int], jax.Array], axis: int) -> Callable:
  def along(x: jax.Array) -> jax.Array:
    return operation(x, axis) if x.ndim >= -axis else x
  return along


def arguments(number: int) -> list[np.ndarray]:
  """Returns weights and arrays for function `number`."""
  rng = np.random.default_rng(number)
  return [rng.normal(size=shape).astype(np.float32) for shape in (WEIGHTS, *SHAPES)]


def different_programs(function: Callable[..., jax.Array], args: Sequence[Any]) -> list[str]:
  """Returns the programs in which an island gives other bits than alone.

  The island computes the function and its gradient. JAX must have two devices.

  Args:
    function: returns a scalar.
    args: its arguments, pytrees of arrays.

  Raises:
    AssertionError: the function or its gradient is not finite.
  """
  isolated = island('function')(jax.value_and_grad(function, argnums=range(len(args))))

  def in_a_loop(*args):
    def turn(i, _):
      # The barrier keeps the island in the loop, although each turn computes the same.
      in_turn, _ = lax.optimization_barrier((args, i))
      return isolated(*in_turn)
    return lax.fori_loop(0, 2, turn, jax.tree.map(jnp.zeros_like, isolated(*args)))

  def beside_a_copy(*args):
    return isolated(*args), jax.value_and_grad(function, argnums=range(len(args)))(*args)

  def on_devices(*args):
    # A sum over the devices makes it a program with collectives, as a learner's is.
    results = isolated(*args)
    return results, lax.psum(results, 'device')

  two_devices = jax.shard_map(on_devices, mesh=Mesh(jax.devices()[:2], 'device'),
                              in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
  alone = jax.jit(isolated)(*args)
  for leaf in jax.tree.leaves(alone):
    np.testing.assert_array_equal(np.isfinite(leaf), True)  # others would hide differences
  expected = _bytes(alone)
  others = {'in a loop': jax.jit(in_a_loop)(*args),
            'beside a copy': jax.jit(beside_a_copy)(*args)[0],
            'on two devices': jax.jit(two_devices)(*args)[0]}
  return [program for program, results in others.items() if _bytes(results) != expected]


def _bytes(tree: Any) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def main() -> int:
  """Draws and compares functions; prints those that differ."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--first', type=int, default=1, help='the number of the first function')
  parser.add_argument('--count', type=int, default=200)
  parser.add_argument('--isa', choices=['SSE4_2', 'AVX', 'AVX2', 'AVX512'])
  options = parser.parse_args()
  if options.isa:
    os.environ['XLA_FLAGS'] = (f"{os.environ.get('XLA_FLAGS', '')} "
                               f'--xla_cpu_max_isa={options.isa}').strip()
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 2)
  different = 0
  for number in range(options.first, options.first + options.count):
    text, function = draw(number)
    programs = different_programs(function, arguments(number))
    if programs:
      different += 1
      print(f'function {number} differs {" and ".join(programs)}: {text}', flush=True)
    jax.clear_caches()
  print(f'{different} of {options.count} functions differ')
  return int(different > 0)


if __name__ == '__main__':
  sys.exit(main())
