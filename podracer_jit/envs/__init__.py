"""Environments: their protocol, its implementation by EnvPool, and stacks of frames."""
