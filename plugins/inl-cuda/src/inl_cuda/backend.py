"""Backend of one NVIDIA GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, final

import torch

from inl.backend.base import Traits
from inl.errors import BackendUnavailable
from inl_cuda.settings import requested_weights
from inl_torch.gpu.backend import GpuBackend, has_triton

if TYPE_CHECKING:
    from inl.backend.tunable import Facts
    from inl.device import Device
    from inl.spec.kernel import Kernel
    from inl_torch.triton.tuning import Tuning

LARGE_MEMORY = 32 << 30
"""Total bytes from which the activations of an 8192-token step are affordable: 1 GB for
a model of 8B parameters."""


@final
class CudaBackend(GpuBackend):
    """One NVIDIA GPU.

    Raises :class:`BackendUnavailable` where this build of torch cannot use it.
    """

    traits = Traits(
        dtypes=("bfloat16", "float16", "float32"),
        block_size=16,
        depth=2,
        token_budget=8192,
        readers=min(os.cpu_count() or 1, 8),
        captures_programs=True,
    )

    def __init__(self, device: Device) -> None:
        check_torch(device)
        self.device = device
        self.place = torch.device("cuda", device.index)
        torch.cuda.set_device(self.place)
        if self.memory().total < LARGE_MEMORY:
            self.traits = self.traits._replace(token_budget=2048)
        require_ieee_float32()
        self.pool = torch.cuda.MemPool()

    def kernels(self) -> Iterable[Kernel]:
        yield from super().kernels()
        if has_triton() and requested_weights() == "packed":
            from inl_torch.triton.quantized import products

            yield from products.kernels(self.tuning())

    def tuning(self) -> Tuning:
        from inl_cuda.tuning import tuning

        return tuning(self.place)

    def tuning_facts(self) -> Facts:
        from inl_cuda.tuning import tuning_facts

        return tuning_facts(self.place)


def check_torch(device: Device) -> None:
    """Raise :class:`BackendUnavailable` where this build of torch cannot use a GPU."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise BackendUnavailable(
            f"{device}: torch {torch.__version__} finds no usable CUDA; install a "
            "build of torch for CUDA, no newer than the driver"
        )
    count = torch.cuda.device_count()
    if device.index >= count:
        raise BackendUnavailable(f"{device}: torch finds {count} CUDA devices")


def require_ieee_float32() -> None:
    """Disable TF32 in float32 products, and half-precision accumulation."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    assert not torch.backends.cuda.matmul.allow_tf32, "float32 products use TF32"
