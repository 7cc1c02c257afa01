"""An NVIDIA GPU: Triton kernels above torch's, and a CUDA graph for each bucket."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast, final

import torch

from inl.backend.base import C, DeviceMemory, Precompiler, Program, Traits
from inl.backend.tunable import Tunable
from inl.dtypes import SIZES
from inl.errors import BackendUnavailable
from inl_cuda.settings import weights_asked_for
from inl_torch.backend import TorchBackend, inferring
from inl_torch.gpu.capture_sizes import ladder
from inl_torch.gpu.graphs import capture
from inl_torch.memory import allocating
from inl_torch.tensors import from_host

if TYPE_CHECKING:
    from inl.device import Device
    from inl.dtypes import HostArray
    from inl.spec.kernel import Kernel
    from inl.spec.limits import Limits
    from inl.spec.step import Bucket

LARGE = 32 << 30
"""Bytes of memory beside which those of a long step are few: 1 GB for a model of 8B."""

STEP = (2,)
"""What ``(weights, message, state)`` consumes: the shape of a program to capture."""


@final
class CudaBackend(TorchBackend):
    """One GPU; raises :class:`BackendUnavailable` where this torch cannot use it."""

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
        if self.memory().total < LARGE:
            self.traits = self.traits._replace(token_budget=2048)
        float32_is_ieee()
        # Held here, for it has to outlive the graphs of every runner in turn.
        self._pool = torch.cuda.MemPool()

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.place)
        held = torch.cuda.memory_reserved(self.place)
        return DeviceMemory(
            total, free + held - torch.cuda.memory_allocated(self.place)
        )

    def message(self, data: HostArray) -> torch.Tensor:
        """Pinned memory: the graph's own copy of it is the only one."""
        nbytes = data.size * SIZES[data.dtype]
        with allocating(nbytes, f"{self.device}: message", self.memory):
            return from_host(data).pin_memory()

    def kernels(self) -> Iterable[Kernel]:
        yield from super().kernels()
        if importlib.util.find_spec("triton") is not None:
            from inl_cuda.tuning import tuning
            from inl_torch import triton
            from inl_torch.triton.quantized import products as packed_products

            cut = tuning(self.place)
            yield from triton.kernels(cut)
            if weights_asked_for() == "packed":
                yield from packed_products.kernels(cut)

    def buckets(self, limits: Limits) -> Sequence[Bucket]:
        return ladder(limits)

    def compile(
        self, function: Program, bucket: Bucket | None, *, consumes: Sequence[int]
    ) -> Program:
        if bucket is None or tuple(consumes) != STEP:
            return self.guarded(inferring(function), bucket)
        return self.guarded(capture(function, pool=self._pool.id), bucket)

    def offers(self, kind: type[C]) -> C | None:
        if importlib.util.find_spec("triton") is None:
            return super().offers(kind)
        if kind is Tunable:
            from inl_torch.gpu.tuner import Ways

            return cast("C", Ways(self.place))
        # A rank whose step of nobody fails would leave the others in a sum.
        if kind is Precompiler and self.collectives is None:
            from inl_torch.triton.precompile import prepare

            return cast("C", Precompiler(partial(prepare, place=self.place)))
        return super().offers(kind)


def check_torch(device: Device) -> None:
    """Refuse a device that the driver has but this build of torch cannot use."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise BackendUnavailable(
            f"{device}: torch {torch.__version__} finds no usable CUDA; install a "
            "build of torch for CUDA, no newer than the driver"
        )
    count = torch.cuda.device_count()
    if device.index >= count:
        raise BackendUnavailable(f"{device}: torch finds {count} CUDA devices")


def float32_is_ieee() -> None:
    """Keep float32 products out of TF32, and half sums in float32."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    assert not torch.backends.cuda.matmul.allow_tf32, "float32 means float32"
