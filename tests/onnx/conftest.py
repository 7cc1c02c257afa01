"""Collects these tests only where onnx and ONNX Runtime are installed."""

from __future__ import annotations

import importlib.util

import pytest

if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def onnx_backend():
    """A backend on ONNX Runtime's CPU provider."""
    from onnx_cpu import OnnxCpu

    return OnnxCpu()
