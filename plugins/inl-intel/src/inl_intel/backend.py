"""Backend of one Intel GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

import torch

from inl.backend.base import DeviceMemory, Traits
from inl.dtypes import E4M3
from inl.errors import BackendUnavailable
from inl_intel import rope
from inl_intel.probe import INSTALL
from inl_intel.settings import requested_kernels
from inl_torch.backend import TorchBackend
from inl_torch.gpu.backend import has_triton

if TYPE_CHECKING:
    from inl.device import Device
    from inl.spec.kernel import Kernel


@final
class XpuBackend(TorchBackend):
    """One Intel GPU. Steps are computed op by op, without captured graphs.

    module: the functions of ``torch.xpu``. kind: type of its torch devices. Both exist
    to run the backend where there is no such GPU. Raises :class:`BackendUnavailable`
    where this build of torch cannot use the device.
    """

    traits = Traits(
        dtypes=("bfloat16", "float16", "float32"),
        block_size=16,
        depth=1,
        token_budget=2048,
        readers=min(os.cpu_count() or 1, 8),
        kv_dtypes=(E4M3,),
    )

    def __init__(
        self, device: Device, module: Any = torch.xpu, kind: str = "xpu"
    ) -> None:
        check_torch(device, module)
        self.device = device
        self.module = module
        self.place = torch.device(kind, device.index)
        module.set_device(self.place)
        torch.set_float32_matmul_precision("highest")

    def memory(self) -> DeviceMemory:
        """Total and free bytes; what torch has cached but not allocated is free.

        Integrated GPUs do not report free memory: there, all that torch has not
        allocated is free.
        """
        used = self.module.memory_allocated(self.place)
        try:
            free, total = self.module.mem_get_info(self.place)
        except RuntimeError:
            total = self.module.get_device_properties(self.place).total_memory
            return DeviceMemory(total, total - used)
        return DeviceMemory(
            total, free + self.module.memory_reserved(self.place) - used
        )

    def empty_cache(self) -> None:
        self.module.empty_cache()

    def kernels(self) -> Iterable[Kernel]:
        yield from super().kernels()
        yield from rope.KERNELS
        if self.uses_triton():
            from inl_intel.tuning import NARROW_LANES, WIDE_ONLY, xpu_tuning
            from inl_torch import triton

            properties = self.module.get_device_properties(self.place)
            left = WIDE_ONLY if NARROW_LANES in properties.sub_group_sizes else ()
            found = triton.kernels(xpu_tuning(properties.gpu_subslice_count))
            yield from (kernel for kernel in found if kernel.op not in left)

    def uses_triton(self) -> bool:
        """Whether Triton is installed, can compile for the device, and is wanted."""
        is_gpu = self.place.type == "xpu"
        return is_gpu and has_triton() and requested_kernels() == "triton"


def check_torch(device: Device, module: Any) -> None:
    """Raise :class:`BackendUnavailable` where this build of torch cannot use a GPU."""
    if not module.is_available():
        raise BackendUnavailable(
            f"{device}: torch {torch.__version__} finds no usable Intel GPU; a build "
            f"for XPU is needed, and the driver of the GPU. Try: {INSTALL}"
        )
    count = module.device_count()
    if device.index >= count:
        raise BackendUnavailable(f"{device}: torch finds {count} XPU devices")
