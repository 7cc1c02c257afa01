"""Every promise of a backend, as ``inl check reference:0`` checks them."""

from __future__ import annotations

from inl.testing import BackendContract, EngineContract, KernelContract, RunnerContract


class TestReference(BackendContract, KernelContract, RunnerContract, EngineContract):
    device = "reference:0"
