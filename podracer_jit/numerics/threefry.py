"""The hash behind JAX's random numbers: in one kernel on CPUs, and in NumPy.

JAX compiles it for CPUs as a loop with about ten kernels in each turn. Without a loop XLA fuses it
into one, with the same bits, since it has integers only: a `fold_in` of 64 keys then compiles in a
third of the time, and a million numbers take a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)  # of rounds 1 to 4, 5 to 8, and so on in turn
_PARITY = 0x1BD11BDA  # from the cipher Threefish

_Array = TypeVar('_Array', jax.Array, np.ndarray)


def threefry2x32(key_0: _Array, key_1: _Array, x_0: _Array, x_1: _Array) -> tuple[_Array, _Array]:
  """Returns Threefry-2x32 with 20 rounds (Salmon et al., *Parallel random numbers*, 2011).

  Args:
    key_0: first word of the key, u32 of any shape.
    key_1: second word.
    x_0: first word of the counter; all four have one shape.
    x_1: second word.
  """
  keys = key_0, key_1, key_0 ^ key_1 ^ _PARITY
  # No array is changed in place: it may be an argument.
  x_0 = x_0 + key_0
  x_1 = x_1 + key_1
  for i in range(5):
    for distance in _ROTATIONS[i % 2]:
      x_0 = x_0 + x_1
      x_1 = x_0 ^ (x_1 << distance | x_1 >> 32 - distance)
    x_0 = x_0 + keys[(i + 1) % 3]
    x_1 = x_1 + (keys[(i + 2) % 3] + (i + 1))
  return x_0, x_1


def fold_in(key: np.ndarray, data: Sequence[int]) -> np.ndarray:
  """Returns what `jax.random.fold_in` gives, without a program that must be compiled.

  Args:
    key: [2] u32, the data of a key of Threefry.
    data: D numbers of 32 bits.

  Returns:
    [D, 2] u32, the data of a key for each number.
  """
  low = np.asarray(data, np.uint32)
  return np.stack(threefry2x32(*key[:, None], np.zeros_like(low), low), axis=-1)


def _lowered(key_0: jax.Array, key_1: jax.Array, x_0: jax.Array, x_1: jax.Array
             ) -> tuple[jax.Array, jax.Array]:
  """Returns the hash, in another kernel than that of its key, which often is a hash itself.

  Else the key's hash would be computed again for each number, and LLVM would take minutes to
  compile such a kernel; with jax 0.11 it does not end if there are three hashes.
  """
  # The loop makes no turn. XLA drops barriers before it fuses, and also a loop that only adds.
  _, key_0, key_1 = lax.while_loop(
      lambda carry: carry[0], lambda carry: (~carry[0], carry[1] * carry[1], carry[2] * carry[2]),
      (lax.optimization_barrier(jnp.bool_(False)), key_0, key_1))
  return threefry2x32(key_0, key_1, x_0, x_1)


mlir.register_lowering(threefry2x32_p, mlir.lower_fun(_lowered, multiple_results=True),
                       platform='cpu')
