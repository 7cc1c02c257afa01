"""The floor where there is no native library: torch's threads and eager kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import inl_cpu.threads  # noqa: F401 - before torch, which reads the environment

# isort: split
import torch

from inl.backend.base import DeviceMemory, Traits
from inl.backend.host import host_memory
from inl_cpu.cores import threads_asked_for
from inl_torch.backend import TorchBackend

if TYPE_CHECKING:
    from inl.device import Device


@final
class TorchCpuBackend(TorchBackend):
    """Torch on the host; raises :class:`DeviceError` for an odd INL_THREADS."""

    traits = Traits(dtypes=("float32", "bfloat16"), depth=1)

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = torch.device("cpu")
        threads = threads_asked_for()
        if threads is not None:
            torch.set_num_threads(threads)

    def memory(self) -> DeviceMemory:
        return host_memory()
