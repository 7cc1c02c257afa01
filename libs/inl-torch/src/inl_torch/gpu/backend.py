"""Base class of torch backends on GPUs: captured graphs and Triton kernels."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, cast

import torch

from inl.backend.base import C, DeviceMemory, Precompiler, Program, Traits
from inl.backend.block_io import BlockIO
from inl.backend.tunable import Facts, Tunable
from inl.dtypes import E4M3, SIZES
from inl_torch.backend import TorchBackend, inference_mode
from inl_torch.gpu.capture_sizes import capture_sizes
from inl_torch.gpu.graphs import AsyncHostCopy, CapturedByShape, capture
from inl_torch.memory import allocating
from inl_torch.tensors import from_host, host_array
from inl_torch.torch_build import why_no_triton

if TYPE_CHECKING:
    from inl.device import Device
    from inl.dtypes import HostArray
    from inl.spec.kernel import Kernel
    from inl.spec.limits import Limits
    from inl.spec.program import ProgramInfo
    from inl.spec.step import Bucket
    from inl_torch.triton.tuning import Tuning

PINNED_BYTES = 1 << 20
"""Largest tensor that is copied to the device asynchronously, from pinned memory."""

LARGE_MEMORY = 32 << 30
"""Total bytes from which the activations of an 8192-token step are affordable: 1 GB for
a model of 8B parameters."""

DRAFTED_ROWS = 512
"""Most rows of hidden states of a captured step of a draft head. Larger ones are those
of prompts, whose time is that of their kernels."""

STEP_CONSUMES = (2,)
"""``consumes`` of a program ``(weights, message, state)``, which is captured."""


class GpuBackend(TorchBackend):
    """One GPU of ``torch.cuda``, which serves CUDA and ROCm builds of torch.

    Abstract: a child checks that torch can use the device before it calls this
    constructor, and provides the launch parameters of the Triton kernels and what a
    tuning measurement depends on. Each bucket becomes one graph. Where Triton is not
    installed or not used, the eager kernels are used alone.
    """

    traits = Traits(
        dtypes=("bfloat16", "float16", "float32"),
        block_size=16,
        depth=2,
        token_budget=8192,
        readers=min(os.cpu_count() or 1, 8),
        cache_share=0.9,
        max_batch=256,
        kv_dtypes=(E4M3,),
    )
    pool: Any
    """Memory pool of the graphs. It must outlive the graphs of every runner."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = torch.device("cuda", device.index)
        torch.cuda.set_device(self.place)
        if self.memory().total < LARGE_MEMORY:
            self.traits = self.traits._replace(token_budget=2048)
        require_ieee_float32()
        self.pool = torch.cuda.MemPool()

    def uses_triton(self) -> bool:
        """Whether Triton is installed and its kernels are known to suit the chip."""
        return has_triton()

    @abstractmethod
    def tuning(self) -> Tuning:
        """Return the launch parameters of the Triton kernels on this chip."""

    @abstractmethod
    def tuning_facts(self) -> Facts:
        """Return the versions for which tuning results are valid."""

    def memory(self) -> DeviceMemory:
        """Total and free bytes; what torch has cached but not allocated is free."""
        free, total = torch.cuda.mem_get_info(self.place)
        reserved = torch.cuda.memory_reserved(self.place)
        used = torch.cuda.memory_allocated(self.place)
        return DeviceMemory(total, free + reserved - used)

    def to_device(self, x: torch.Tensor) -> torch.Tensor:
        if x.nbytes <= PINNED_BYTES:
            return x.pin_memory().to(self.place, non_blocking=True)
        return x.to(self.place)

    def message(self, data: HostArray) -> torch.Tensor:
        """Copy to pinned host memory, from which the graph copies to its buffer."""
        nbytes = data.size * SIZES[data.dtype]
        with allocating(nbytes, f"{self.device}: message", self.memory):
            return from_host(data).pin_memory()

    def numpy(self, x: Any) -> HostArray:
        # The memory of such a copy is its own.
        return (
            host_array(x.wait()) if isinstance(x, AsyncHostCopy) else super().numpy(x)
        )

    def kernels(self) -> Iterable[Kernel]:
        yield from super().kernels()
        if self.uses_triton():
            from inl_torch import triton

            yield from triton.kernels(self.tuning())

    def buckets(self, limits: Limits) -> Sequence[Bucket]:
        return capture_sizes(limits)

    def compile(
        self,
        function: Program,
        bucket: Bucket | None,
        *,
        consumes: Sequence[int],
        info: ProgramInfo | None = None,
    ) -> Program:
        if info is not None and info.name == "draft":
            program = CapturedByShape(function, pool=self.pool.id, most=DRAFTED_ROWS)
            return self.guarded(program, bucket)
        if bucket is None or tuple(consumes) != STEP_CONSUMES:
            return self.guarded(inference_mode(function), bucket)
        return self.guarded(capture(function, pool=self.pool.id), bucket)

    def offers(self, kind: type[C]) -> C | None:
        if not self.uses_triton():
            return super().offers(kind)
        if kind is BlockIO:
            from inl_torch.gpu.blocks import block_io

            return cast("C", block_io(self.place))
        if kind is Tunable:
            from inl_torch.gpu.tuner import Tuner

            return cast("C", Tuner(self.place, self.tuning(), self.tuning_facts))
        # A dummy step that fails on one rank would leave the others in a collective.
        if kind is Precompiler and self.collectives is None:
            from inl_torch.triton.precompile import precompile

            return cast("C", Precompiler(partial(precompile, place=self.place)))
        return super().offers(kind)


def require_ieee_float32() -> None:
    """Disable TF32 in float32 products, and half-precision accumulation."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    assert not torch.backends.cuda.matmul.allow_tf32, "float32 products use TF32"


def distribution_version(name: str) -> str:
    """Version of an installed distribution, or a note that it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "from a source tree"


def has_triton() -> bool:
    """Whether Triton is installed, of an accepted version; does not import it."""
    return not why_no_triton()
