"""Evaluations, agents, exports and videos of trained policies."""
