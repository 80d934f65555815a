"""Tests of the developers' benchmarks."""
