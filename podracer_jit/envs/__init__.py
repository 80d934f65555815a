"""Environments: the protocol, EnvPool behind it, and stacks of frames."""
