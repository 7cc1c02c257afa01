"""The ROCm backend without a GPU: refusals, chips, launch parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inl.device import Device
from inl.errors import BackendUnavailable
from inl_rocm import backend as module
from inl_rocm.backend import RocmBackend, check_torch
from inl_rocm.chips import CHIPS
from inl_rocm.probe import INSTALL

DEVICE = Device("rocm:0")


@pytest.fixture
def opened(monkeypatch):
    """The backend on a fake chip, with no device behind it."""

    def make(architecture):
        monkeypatch.setattr(module, "architecture", lambda _place: architecture)
        properties = SimpleNamespace(multi_processor_count=304)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _place: properties
        )
        found = object.__new__(RocmBackend)
        found.device, found.place = DEVICE, torch.device("cuda", 0)
        return found

    return make


@pytest.mark.skipif(torch.version.hip is not None, reason="torch is built for ROCm")
def test_torch_without_hip_is_refused_with_the_command():
    with pytest.raises(BackendUnavailable) as caught:
        RocmBackend(DEVICE)
    assert str(caught.value) == (
        f"rocm:0: torch {torch.__version__} is not built for ROCm. Try: {INSTALL}"
    )


@pytest.mark.parametrize(
    ("available", "count", "message"),
    [(False, 0, "for ROCm 7.1 finds no usable GPU"), (True, 0, "finds 0 ROCm devices")],
)
def test_a_torch_that_finds_no_gpu(monkeypatch, available, count, message):
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(BackendUnavailable, match=message):
        check_torch(DEVICE)


@pytest.mark.parametrize("architecture", CHIPS)
def test_launch_parameters_of_a_chip(opened, architecture):
    pytest.importorskip("triton")
    tuning, chip = opened(architecture).tuning(), CHIPS[architecture]
    assert (tuning.lanes, tuning.shared_bytes) == (chip.lanes, chip.shared_bytes)
    assert (tuning.processors, tuning.filters, tuning.pdl) == (304, True, False)
    # Rules for NVIDIA's registers spill with 32 lanes.
    has_table = tuning.attention_tile("prompt", 64, is_float32=False) is not None
    assert has_table == (chip.lanes == 32)


def test_kernels_of_a_known_chip_and_of_another(opened, monkeypatch):
    pytest.importorskip("triton")
    known = {kernel.label for kernel in opened("gfx942").kernels()}
    assert {"attention/triton", "attention/eager", "sample/triton"} <= known
    unknown = {kernel.label for kernel in opened("gfx1010").kernels()}
    assert unknown == {label for label in known if "/triton" not in label}


def test_filters_are_sampled_in_triton(opened):
    """The op's kernel does not refuse "sample_filtered" on AMD's chips."""
    pytest.importorskip("triton")
    (kernel,) = [
        each for each in opened("gfx942").kernels() if each.label == "sample/triton"
    ]
    logits = SimpleNamespace(dtype=torch.bfloat16)
    assert kernel.refuse(logits, None, None, sampler="sample_filtered") is None


def test_large_heads_use_torch(opened):
    pytest.importorskip("triton")
    (kernel,) = [
        each for each in opened("gfx1100").kernels() if each.label == "attention/triton"
    ]
    q = SimpleNamespace(dtype=torch.bfloat16, shape=(1, 4, 256))
    assert kernel.refuse(q) == "heads of 256 elements, takes 128 at most"
