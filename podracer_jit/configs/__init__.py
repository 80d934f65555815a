"""Shipped experiments, one in each file."""
