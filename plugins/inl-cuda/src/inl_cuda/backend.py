"""Backend of one NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

import torch

from inl.backend.base import PackedKernels
from inl.backend.provisional import DecodedBlocks, WeightCopies, WholeModels
from inl.checkpoints.blocks.codes import FLOAT8_SCALED
from inl.errors import BackendUnavailable
from inl_cuda.probe import INSTALL
from inl_cuda.settings import has_persistent_steps, requested_weights
from inl_torch.gpu.backend import GpuBackend, has_triton

if TYPE_CHECKING:
    from inl.backend.tunable import Facts
    from inl.device import Device
    from inl.spec.kernel import Kernel
    from inl_torch.triton.tuning import Tuning

C = TypeVar("C")

HOPPER = 9, 0
"""Compute capability from which the matrix units read float8 from shared memory."""


@final
class CudaBackend(GpuBackend):
    """One NVIDIA GPU.

    Raises :class:`BackendUnavailable` where this build of torch cannot use it.
    """

    def __init__(self, device: Device) -> None:
        check_torch(device)
        super().__init__(device)

    def kernels(self) -> Iterable[Kernel]:
        yield from super().kernels()
        if self._is_hopper() and has_triton():
            from inl_torch.triton.attention.prompt import CUDNN_KERNELS

            yield from CUDNN_KERNELS
        if one_row := self._one_row():
            yield from one_row.attention_kernels(self.tuning())
        if self._takes_float8():
            from inl_torch.triton.float8 import products

            yield from products.float8_kernels(self.tuning())
            if one_row:
                yield from one_row.float8_kernels(self.tuning())
        if has_triton() and requested_weights() == "packed":
            yield from self._packed_kernels()

    def offers(self, kind: type[C]) -> C | None:
        if kind is PackedKernels and has_triton() and not requested_weights():
            return cast("C", PackedKernels(self._packed_kernels))
        if kind is WeightCopies and has_triton() and self._multiplies_float8():
            from inl_torch.triton.int4.products import copied_bytes

            return cast("C", WeightCopies(self._copied_kernels, copied_bytes))
        if kind is DecodedBlocks and self._takes_float8():
            return cast("C", DecodedBlocks(FLOAT8_SCALED))
        if kind is WholeModels and self._has_persistent_steps():
            from inl_cuda.persistent.model import describe_step, persistent_model

            replace = partial(persistent_model, pdl=self.tuning().pdl)
            return cast("C", WholeModels(replace, True, describe_step))
        return super().offers(kind)

    def _has_persistent_steps(self) -> bool:
        """Whether steps of one row of a small model may be one kernel."""
        if self.collectives is not None or not has_persistent_steps():
            return False
        return self._one_row() is not None

    def _is_hopper(self) -> bool:
        return torch.cuda.get_device_capability(self.place) == HOPPER

    def _one_row(self) -> Any:
        """Return the module of the kernels of one row in CUDA C++, if they compile."""
        if not (self._is_hopper() and has_triton()):
            return None
        from inl_cuda.one_row import kernels

        return kernels if kernels.can_compile() else None

    def _packed_kernels(self) -> Iterable[Kernel]:
        from inl_torch.triton.moe import experts
        from inl_torch.triton.quantized import products

        yield from products.kernels(self.tuning())
        yield from experts.PACKED_KERNELS
        if self._multiplies_float8():
            from inl_torch.triton.int4 import products as streamed

            yield from streamed.int4_kernels(self.tuning())
            if one_row := self._one_row():
                yield from one_row.int4_kernels(self.tuning())

    def _copied_kernels(self) -> Iterable[Kernel]:
        """Return kernels of weights of 4 bits that have a copy in E4M3."""
        from inl_torch.triton.int4 import products

        yield from products.int4_kernels(self.tuning(), products.copied_int4)
        if one_row := self._one_row():
            yield from one_row.int4_kernels(self.tuning(), products.copied_int4)

    def _takes_float8(self) -> bool:
        """Whether weights in float8 stay as they are."""
        wanted = has_triton() and requested_weights() != "dense"
        return wanted and self._multiplies_float8()

    def _multiplies_float8(self) -> bool:
        """Whether Triton multiplies float8 on the matrix units of this chip."""
        return torch.cuda.get_device_capability(self.place) >= HOPPER

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
            f"build of torch for CUDA, no newer than the driver. Try: {INSTALL}"
        )
    count = torch.cuda.device_count()
    if device.index >= count:
        raise BackendUnavailable(f"{device}: torch finds {count} CUDA devices")
