"""Backend of one AMD GPU: torch's ROCm build, whose devices are named "cuda"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, final

import torch

from inl.backend.tunable import Facts
from inl.errors import BackendUnavailable
from inl_rocm import aiter_products
from inl_rocm.chips import Chip, chip_of
from inl_rocm.probe import INSTALL
from inl_torch.gpu.backend import GpuBackend, distribution_version, has_triton

if TYPE_CHECKING:
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
        from inl_rocm.tuning import chip_tuning

        chip = self.chip()
        assert chip is not None, "Triton is used on known chips only"
        properties = torch.cuda.get_device_properties(self.place)
        return chip_tuning(chip, properties.multi_processor_count)

    def tuning_facts(self) -> Facts:
        return Facts(
            device=f"{torch.cuda.get_device_name(self.place)} "
            f"{architecture(self.place)}",
            driver=f"hip {torch.version.hip}",
            compiler=f"torch {torch.__version__}",
            plugin=f"inl-rocm {distribution_version('inl-rocm')}",
        )


def architecture(place: torch.device) -> str:
    """Name of the compiler target of the chip at ``place``, such as "gfx942"."""
    name: str = torch.cuda.get_device_properties(place).gcnArchName
    return name.partition(":")[0]


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
