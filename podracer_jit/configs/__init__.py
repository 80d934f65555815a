"""Experiments, one a file."""
