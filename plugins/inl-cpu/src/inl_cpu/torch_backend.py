"""CPU backend through torch, the fallback without a native library."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import inl_cpu.threads  # noqa: F401 - must precede torch, which reads the environment

# isort: split
import torch

from inl.backend.base import C, DeviceMemory, ForkSafety, Traits
from inl.backend.host import host_memory
from inl.dtypes import E4M3
from inl.forks import on_fork
from inl_cpu.cores import requested_threads
from inl_torch.backend import TorchBackend

if TYPE_CHECKING:
    from inl.device import Device


@final
class TorchCpuBackend(TorchBackend):
    """Torch on the host; raises :class:`DeviceError` for an invalid INL_THREADS."""

    traits = Traits(dtypes=("float32", "bfloat16"), depth=1, kv_dtypes=(E4M3,))

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = torch.device("cpu")
        threads = requested_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Compute with one thread: OpenMP does not start its threads again."""
        torch.set_num_threads(1)

    def offers(self, kind: type[C]) -> C | None:
        offer = ForkSafety()
        return offer if isinstance(offer, kind) else super().offers(kind)

    def memory(self) -> DeviceMemory:
        return host_memory()
