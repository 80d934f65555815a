"""Measures this package beside other programs for the same training."""
