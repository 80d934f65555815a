"""Precision of matrix products and convolutions, and repeatable kernels of GPUs."""

from __future__ import annotations

import contextlib
import dataclasses

import jax

from podracer_jit.options import option

HIGHEST = 'highest'
BFLOAT16 = 'bfloat16'
_PRECISIONS = (HIGHEST, 'default', BFLOAT16)


@dataclasses.dataclass(frozen=True)
class NumericsOptions:
  """The section `numerics`; on CPUs, only `precision = 'bfloat16'` changes the bits of a result."""

  precision: str = option(
      HIGHEST, 'of matrix products and convolutions: highest: float32; default: as fast as the '
      'device can, TF32 on NVIDIA GPUs and bfloat16 on TPUs; bfloat16: the torso of the network '
      'computes in it, and everything else as with highest', choices=_PRECISIONS)
  deterministic: bool = option(
      True, 'on NVIDIA GPUs, a program gives the same bits whenever it runs; False: also kernels '
      'that do not, chosen by their speed when the program is compiled')


def products(precision: str) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which traced products and convolutions of float32 have a precision.

  Without one, GPUs and TPUs multiply in fewer bits than float32 has; CPUs never do.

  Args:
    precision: `NumericsOptions.precision`.
  """
  return jax.default_matmul_precision('default' if precision == 'default' else HIGHEST)
