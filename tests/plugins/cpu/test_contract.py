"""The backend contract, which ``inl check cpu:0`` runs too."""

from __future__ import annotations

from inl.testing import (
    BackendContract,
    EngineContract,
    KernelContract,
    RanksContract,
    RunnerContract,
)


class TestCpu(
    BackendContract, KernelContract, RunnerContract, EngineContract, RanksContract
):
    device = "cpu:0"
