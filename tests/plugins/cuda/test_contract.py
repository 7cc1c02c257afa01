"""The backend contract, as checked by ``inl check cuda:0``."""

from __future__ import annotations

import pytest

from inl.device import Device
from inl.testing import (
    BackendContract,
    EngineContract,
    KernelContract,
    RanksContract,
    RunnerContract,
)

REASON = Device("cuda:0").why_not()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
class TestCuda(
    BackendContract, KernelContract, RunnerContract, EngineContract, RanksContract
):
    device = "cuda:0"
