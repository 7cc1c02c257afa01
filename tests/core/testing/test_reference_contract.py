"""All conformance checks on the reference backend."""

from __future__ import annotations

from inl.testing import BackendContract, EngineContract, KernelContract, RunnerContract


class TestReference(BackendContract, KernelContract, RunnerContract, EngineContract):
    device = "reference:0"
