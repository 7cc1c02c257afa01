"""The throwaway JAX backend, as a fixture: test folders are no packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def jax_module():
    """The module ``jax_backend.py`` beside this file."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed: pip install 'jax[cpu]'")
    place = Path(__file__).with_name("jax_backend.py")
    spec = importlib.util.spec_from_file_location("jax_backend", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
