"""torch-directml with torch's CPU in place of an adapter.

``INL_TEST_NO_DETOUR=1`` plants a fault: an operator that the device lacks.
"""

import os

import torch

from inl_directml.legacy import detours
from inl_torch.eager import attention, sample

# The branches of the kernels for devices other than the CPU.
attention.exact_plan = attention.static_plan
sample._may_filter = lambda _: True

if os.environ.get("INL_TEST_NO_DETOUR"):
    del detours.REPLACED[torch.Tensor.index_copy_]


def device_count():
    return 1


def device(index):
    assert index == 0
    return torch.device("cpu")
