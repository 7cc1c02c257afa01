"""A backend on ONNX Runtime; these tests need it and onnx."""

from __future__ import annotations

import pytest

from needed_packages import needing

pytest_pycollect_makemodule = needing("onnx", "onnxruntime")


@pytest.fixture(scope="session")
def onnx_backend():
    """A backend on ONNX Runtime's CPU provider."""
    from onnx_cpu import OnnxCpu

    return OnnxCpu()
