"""Fixtures: the native backend, skipped if its library is not built."""

from __future__ import annotations

import numpy as np
import pytest

from inl.device import Device
from inl_cpu.library import open_library


@pytest.fixture
def backend(monkeypatch):
    """A fresh native backend with two threads."""
    found = open_library()
    if found.library is None:
        pytest.skip(found.reason)
    from inl_cpu.native_backend import NativeBackend

    monkeypatch.setenv("INL_THREADS", "2")
    return NativeBackend(Device("cpu"))


@pytest.fixture
def rng():
    return np.random.default_rng(11)
