"""ONNX Runtime's CPU provider in place of DirectML, for every test of this folder."""

from __future__ import annotations

import pytest

from needed_packages import needing

pytest_pycollect_makemodule = needing(
    "onnx",
    "onnxruntime",
    modules=("test_directml_models.py", "test_webgpu.py"),
)


@pytest.fixture(autouse=True)
def cpu_provider(monkeypatch):
    monkeypatch.setenv("INL_DIRECTML_PROVIDER", "cpu")
