"""JAX's CPU platform in place of a TPU, for every test of this folder."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("jax") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def cpu_platform(monkeypatch):
    monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")


@pytest.fixture(scope="session")
def tpu_backend():
    """The backend on the first CPU device."""
    from inl.device import Device
    from inl_tpu.backend import TpuBackend

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INL_TPU_PLATFORM", "cpu")
        return TpuBackend(Device("tpu:0"))
