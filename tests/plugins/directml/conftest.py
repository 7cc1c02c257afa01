"""ONNX Runtime's CPU provider in place of DirectML, for every test of this folder."""

from __future__ import annotations

import importlib.util

import pytest

if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")):
    collect_ignore_glob = ["test_directml_models.py", "test_webgpu.py"]


@pytest.fixture(autouse=True)
def cpu_provider(monkeypatch):
    monkeypatch.setenv("INL_DIRECTML_PROVIDER", "cpu")
