"""Backend of one AMD GPU: torch's ROCm build, whose devices are named "cuda"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, final

import torch

from inl.errors import BackendUnavailable
from inl_rocm import aiter_products
from inl_rocm.chips import Chip, chip_of
from inl_rocm.probe import INSTALL
from inl_rocm.tuning import architecture, chip_tuning, tuning_facts
from inl_torch.gpu.backend import GpuBackend, has_triton

if TYPE_CHECKING:
    from inl.backend.tunable import Facts
    from inl.device import Device
    from inl.spec.kernel import Kernel
    from inl_torch.triton.tuning import Tuning


@final
class RocmBackend(GpuBackend):
    """One AMD GPU, with HIP graphs; ranks exchange over RCCL.

    Chips that :mod:`inl_rocm.chips` does not list use torch's kernels alone. Raises
    :class:`BackendUnavailable` where this build of torch cannot use the device.
    """

    def __init__(self, device: Device) -> None:
        check_torch(device)
        super().__init__(device)

    def chip(self) -> Chip | None:
        """Return the chip, if its architecture is known."""
        return chip_of(architecture(self.place))

    def uses_triton(self) -> bool:
        return has_triton() and self.chip() is not None

    def kernels(self) -> Iterable[Kernel]:
        yield from super().kernels()
        yield from aiter_products.kernels()

    def tuning(self) -> Tuning:
        chip = self.chip()
        assert chip is not None, "Triton is used on known chips only"
        properties = torch.cuda.get_device_properties(self.place)
        return chip_tuning(chip, properties.multi_processor_count)

    def tuning_facts(self) -> Facts:
        return tuning_facts(self.place)


def check_torch(device: Device) -> None:
    """Raise :class:`BackendUnavailable` where this build of torch cannot use a GPU."""
    if torch.version.hip is None:
        raise BackendUnavailable(
            f"{device}: torch {torch.__version__} is not built for ROCm. Try: {INSTALL}"
        )
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            f"{device}: torch {torch.__version__} for ROCm {torch.version.hip} finds "
            "no usable GPU; install a build for a ROCm that the driver supports"
        )
    count = torch.cuda.device_count()
    if device.index >= count:
        raise BackendUnavailable(f"{device}: torch finds {count} ROCm devices")
