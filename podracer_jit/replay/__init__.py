"""Prioritised replay on the learner's devices."""
