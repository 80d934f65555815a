"""The devices and the compilation cache of all tests."""

from tests.conftest import pytest_configure, pytest_configure_node  # noqa: F401 - pytest's hooks
