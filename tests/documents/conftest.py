"""The throwaway JAX backend, as a fixture: test folders are no packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def jax_module():
    """The module ``jax_backend.py`` of the integration tests."""
    place = Path(__file__).parents[1] / "integration" / "jax_backend.py"
    spec = importlib.util.spec_from_file_location("jax_backend", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
