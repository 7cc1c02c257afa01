"""Collects these tests only where onnx and ONNX Runtime are installed."""

from __future__ import annotations

import importlib.util

import pytest

if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def onnx_backend():
    """The backend on ONNX Runtime's CPU provider."""
    from inl.device import Device
    from inl_directml.backend import DirectmlBackend

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INL_DIRECTML_PROVIDER", __import__("os").environ.get("PP","cpu"))
        yield DirectmlBackend(Device("directml:0"))
