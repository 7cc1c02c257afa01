"""Backends of several frameworks on this machine's processor."""

from __future__ import annotations

import importlib.util

import pytest

from inl.device import Device


def cpu():
    from inl_cpu.native_backend import NativeBackend

    return NativeBackend(Device("cpu:0"))


def torch():
    pytest.importorskip("torch")
    from inl_cpu.torch_backend import TorchCpuBackend

    return TorchCpuBackend(Device("cpu:0"))


def jax():
    pytest.importorskip("jax")
    from inl_tpu.backend import TpuBackend

    return TpuBackend(Device("tpu:0"))


def onnx():
    if importlib.util.find_spec("onnxruntime") is None:
        pytest.skip("needs onnxruntime")
    from inl_directml.backend import DirectmlBackend

    return DirectmlBackend(Device("directml:0"))


def reference():
    from inl.backend.reference import ReferenceBackend

    return ReferenceBackend(Device("reference:0"))


MAKERS = {
    "cpu": cpu, "torch": torch, "jax": jax, "onnx": onnx, "reference": reference,
}  # fmt: skip
