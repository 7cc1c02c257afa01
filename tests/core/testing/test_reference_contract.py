"""All conformance checks on the reference backend."""

from __future__ import annotations

from inl.testing import (
    BackendContract,
    BlocksContract,
    EngineContract,
    KernelContract,
    RunnerContract,
)


class TestReference(
    BackendContract, KernelContract, RunnerContract, BlocksContract, EngineContract
):
    device = "reference:0"
