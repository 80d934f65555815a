"""The devices and the compilation cache that all tests have."""

from tests.conftest import pytest_configure, pytest_configure_node  # noqa: F401 - pytest's hooks
