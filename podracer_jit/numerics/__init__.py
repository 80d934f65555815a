"""Deterministic sums and loops, fast CPU convolutions, and fingerprints."""
