"""The conformance tests that ``inl check toy:0`` runs."""

from inl.testing import (
    BackendContract,
    BlocksContract,
    EngineContract,
    KernelContract,
    RunnerContract,
)


class TestBackend(
    BackendContract, KernelContract, RunnerContract, BlocksContract, EngineContract
):
    device = "toy:0"
