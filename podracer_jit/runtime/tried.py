"""Versions of libraries with which the package was tried; scripts/versions tries them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

# Versions of jax by Python. The first one is that of the Python's lock file.
JAX = {
    '3.11': ('0.10.2', '0.10.0'),
    '3.12': ('0.11.2', '0.10.2', '0.12.0.1'),
    '3.13': ('0.11.2', '0.12.0.1'),
}


def order(version: str) -> tuple[int, ...]:
  """Returns numbers by which versions can be compared: '0.13.0rc1' gives (0, 13, 0)."""
  numbers = []
  for part in version.split('.'):
    digits = ''.join(itertools.takewhile(str.isdigit, part))
    if not digits:
      break
    numbers.append(int(digits))
    if digits != part:
      break
  return tuple(numbers)


# The lowest and the highest version of libraries of which the package uses private parts. setup.cfg
# has the bounds beyond which pip installs none.
_ALL_JAX = sorted({version for versions in JAX.values() for version in versions}, key=order)
TRIED = {
    'jax': (_ALL_JAX[0], _ALL_JAX[-1]),
    'envpool': ('1.2.5', '1.2.7'),
    'orbax-checkpoint': ('0.12.8', '0.12.8'),
    'ray': ('2.60.0', '2.60.0'),
}


def untried(versions: Mapping[str, str]) -> str:
  """Returns a line about versions that were not tried; empty if all were.

  Args:
    versions: of the installed packages, by name; packages that are not in TRIED do not count.
  """
  parts = []
  for name, (low, high) in TRIED.items():
    version = versions.get(name)
    if version is not None and not order(low) <= order(version) <= order(high):
      parts.append(f'{name} {version} (tried: {low if low == high else f"{low} to {high}"})')
  return f'untried versions: {", ".join(parts)}' if parts else ''


# XLA calls this and later versions of EnvPool by an interface that jax has from that version on.
_ENVPOOL, _JAX = '1.2.7', '0.11'


def misfit(envpool: str, jax: str) -> str:
  """Returns why a version of EnvPool cannot be called from a version of jax; empty if it can.

  Args:
    envpool: its version.
    jax: its version.
  """
  if order(envpool) < order(_ENVPOOL) or order(jax) >= order(_JAX):
    return ''
  return (f'envpool {envpool} needs jax {_JAX} or newer, and jax {jax} is installed; install '
          f'another jax, or "envpool<{_ENVPOOL}"')
