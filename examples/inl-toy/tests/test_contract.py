"""Every promise of a backend, as ``inl check toy:0`` checks them."""

from inl.testing import BackendContract, EngineContract, KernelContract, RunnerContract


class TestBackend(BackendContract, KernelContract, RunnerContract, EngineContract):
    device = "toy:0"
