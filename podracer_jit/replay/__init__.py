"""Prioritised replay, stored on the learner's devices."""
