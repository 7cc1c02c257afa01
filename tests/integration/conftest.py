"""The scaffold of a traced backend, as a fixture: test folders are no packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def jax_module(tmp_path_factory):
    """What the modules of the traced scaffold define, see ``traced.load``."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed: pip install 'jax[cpu]'")
    place = Path(__file__).with_name("traced.py")
    spec = importlib.util.spec_from_file_location("traced", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(tmp_path_factory.mktemp("scaffold"))
