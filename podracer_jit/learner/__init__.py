"""Gradients (G) and updates (U) from rollouts and from a replay, and their compiled programs."""
