"""The backend contract, which ``inl check cpu:0`` runs too."""

from __future__ import annotations

from inl.testing import (
    BackendContract,
    BlocksContract,
    EngineContract,
    KernelContract,
    RunnerContract,
)


class TestCpu(
    BackendContract, KernelContract, RunnerContract, BlocksContract, EngineContract
):
    device = "cpu:0"
