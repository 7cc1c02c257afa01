"""A model with adapters on Triton kernels answers as merged weights do."""

from __future__ import annotations

from test_speculation import Kernels
from triton_place import PLACE

from inl.device import Device
from inl.testing import adapter_checks
from inl.testing.oracle import Tiny
from inl.testing.target import Target


def test_adapters_of_a_model(monkeypatch):
    monkeypatch.setattr(adapter_checks, "COUNT", 2)
    target = Target(Device("cpu"), seed=1)
    target.__dict__["backend"] = Kernels()
    measure = adapter_checks.answers_with_adapters(Tiny(target, "float32"))
    assert measure.ratio < 1, PLACE
