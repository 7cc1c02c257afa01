"""The conformance tests that ``inl check toy:0`` runs."""

from inl.testing import BackendContract, EngineContract, KernelContract, RunnerContract


class TestBackend(BackendContract, KernelContract, RunnerContract, EngineContract):
    device = "toy:0"
