"""Every promise of a backend, as ``inl check cpu:0`` checks them."""

from __future__ import annotations

from inl.testing import BackendContract, EngineContract, KernelContract, RunnerContract


class TestCpu(BackendContract, KernelContract, RunnerContract, EngineContract):
    device = "cpu:0"
