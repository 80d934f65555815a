"""Skips tests that need an extra which is not installed; `scripts/test` installs all extras."""

import pytest

# Modules that a shipped config needs beyond those of every installation.
_MODULES = {
    'ppo_minatar': 'gymnax', 'ppo_playground': 'mujoco_playground', 'pqn_minatar': 'gymnax'}


def skip_without(config: str) -> None:
  """Skips the test if a shipped config needs a module that is not installed."""
  if config in _MODULES:
    pytest.importorskip(_MODULES[config])
