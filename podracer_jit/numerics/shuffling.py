"""Random permutations without a sort.

`jax.random.permutation` sorts random numbers, twice if there are many. On a CPU that takes longer
than the gradients of a small network.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.numerics import indexing

_ROUNDS = 24  # fewer give some permutations of 5 to 8 numbers more often than others


def permutation(key: jax.Array, count: int) -> jax.Array:
  """Returns a random permutation of 0, 1, ..., count - 1, [count] i32.

  A Feistel cipher (Black and Rogaway, *Ciphers with arbitrary finite domains*, 2002) permutes the
  places of a rectangle that has `count` places or a few more: columns and rows rotate in turn, each
  by a random distance. A number that comes to a place beyond `count` is permuted again. Each number
  is computed apart from all others, exactly and thus equally in any program.

  Args:
    key: PRNG key.
    count: of numbers.
  """
  # An even number of columns allows odd permutations; a divisor of `count` wastes no places.
  side = math.isqrt(max(count - 1, 0)) + 1
  side += side % 2
  divisors = (size for size in range(side, 2 * side, 2) if count % size == 0 and size < count)
  columns = next(divisors, side)
  rows = -(-count // columns)
  # The remainder makes some distances likelier than others by at most columns / 2**32.
  bits = jax.random.bits(key, (_ROUNDS // 2, columns + rows), jnp.uint32)
  by_column = (bits[:, :columns] % jnp.uint32(rows)).astype(jnp.int32)
  by_row = (bits[:, columns:] % jnp.uint32(columns)).astype(jnp.int32)

  def shuffled(number: jax.Array) -> jax.Array:
    def turn(i, place):
      row, column = place
      row = _rotated(row, indexing.read(by_column, i, column), rows)
      return row, _rotated(column, indexing.read(by_row, i, row), columns)

    row, column = lax.fori_loop(0, _ROUNDS // 2, turn, indexing.divide(number, columns))
    return row * columns + column

  def again(numbers: jax.Array) -> jax.Array:
    return jnp.where(numbers < count, numbers, shuffled(numbers))

  numbers = shuffled(jnp.arange(count, dtype=jnp.int32))
  if rows * columns == count:
    return numbers
  return lax.while_loop(lambda numbers: jnp.any(numbers >= count), again, numbers)


def _rotated(place: jax.Array, distance: jax.Array, size: int) -> jax.Array:
  """Returns the place after a rotation by a distance below `size`."""
  moved = place + distance
  return jnp.where(moved < size, moved, moved - size)
