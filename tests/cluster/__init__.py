"""Tests of actors on a Ray cluster."""

import tests.ray_nodes  # noqa: F401 - Ray reads the variables that it sets when it is imported
