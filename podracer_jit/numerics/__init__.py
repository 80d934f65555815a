"""Deterministic sums and loops, fast CPU convolutions and random numbers, and fingerprints."""

from podracer_jit.numerics import threefry as _threefry  # noqa: F401 - registers it with JAX
