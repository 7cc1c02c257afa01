"""All conformance checks on the reference backend."""

from __future__ import annotations

from inl.testing import (
    BackendContract,
    EngineContract,
    KernelContract,
    RanksContract,
    RunnerContract,
)


class TestReference(
    BackendContract, KernelContract, RunnerContract, EngineContract, RanksContract
):
    device = "reference:0"
