"""The CPU: host memory, torch's threads, and the eager kernels."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, final

import inl_cpu.threads  # noqa: F401 - before torch, which reads the environment

# isort: split
import torch

from inl.backend.base import Memory, Traits
from inl.backend.host import host_memory
from inl.errors import DeviceError
from inl_torch.backend import TorchBackend

if TYPE_CHECKING:
    from inl.device import Device

THREADS = "INL_THREADS"
"""Environment variable with the number of threads to compute with."""

MOST_THREADS = 4096


@final
class CpuBackend(TorchBackend):
    """Torch on the host; raises :class:`DeviceError` for an odd INL_THREADS."""

    traits = Traits(dtypes=("float32", "bfloat16"), depth=1)

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = torch.device("cpu")
        threads = threads_asked_for()
        if threads is not None:
            torch.set_num_threads(threads)

    def memory(self) -> Memory:
        return host_memory()


def threads_asked_for() -> int | None:
    """Read INL_THREADS; ``None`` leaves the number to torch."""
    found = os.environ.get(THREADS, "")
    if not found:
        return None
    plain = found.isascii() and found.isdigit() and len(found) <= len(str(MOST_THREADS))
    if not plain or not 1 <= int(found) <= MOST_THREADS:
        raise DeviceError(
            f"environment variable {THREADS}: found {found!r:.80}, "
            f"accepts a whole number from 1 to {MOST_THREADS}"
        )
    return int(found)
