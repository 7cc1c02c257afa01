"""The checks of ``inl check`` on OpenVINO's CPU device, in both forms of its graphs."""

from __future__ import annotations

import pytest

from inl.device import Device
from inl.testing.contracts import EngineContract, KernelContract, RunnerContract
from inl.testing.target import Target
from inl_intel.openvino.backend import OpenVinoBackend

ADAPTERS = {"engine/adapters": "the weights of a compiled graph are constants"}
OPS = (
    "activate", "all_gather", "all_reduce", "clip", "gated_activation", "gated_mlp",
    "layer_norm", "linear", "norm_logits", "norm_mlp", "norm_qkv", "qkv_linear",
    "reduce_add_norm", "rms_norm", "rope", "rope_table", "sigmoid_gate", "silu",
    "soft_cap", "take_rows", "zeros_like",
)  # fmt: skip
"""Ops of a graph that can be called alone: all but those of attention."""


@pytest.fixture(autouse=True)
def _on_openvino(openvino_cpu):
    """The setting, for checks that open the device by its name."""


def opened(*, pages, only=()):
    """A target with a backend of OpenVINO's CPU device."""
    target = Target(Device("xpu:0"), only=only)
    backend = OpenVinoBackend(Device("xpu:0"), name="CPU", pages=pages)
    target.__dict__["backend"] = backend
    return target


class TestPaged(RunnerContract, EngineContract):
    device = "xpu:0"
    gaps = ADAPTERS
    _target = opened(pages=True)


class TestGathered(RunnerContract):
    """The form for NPUs and GPUs, on the CPU."""

    device = "xpu:0"
    _target = opened(pages=False)


@pytest.mark.long
class TestGatheredEngine(EngineContract):
    device = "xpu:0"
    gaps = ADAPTERS
    _target = opened(pages=False)

    def run_check(self, check):
        if check.name.startswith("engine/stream"):
            pytest.skip("opens the device by its name, in its own form")
        super().run_check(check)


@pytest.mark.full
class TestOps(KernelContract):
    """Each op in a graph of its own."""

    device = "xpu:0"
    _target = opened(pages=True, only=OPS)
