"""Backend of one DirectX 12 adapter through torch-directml."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch

from inl.backend.base import CachedMemory, DeviceMemory, Program, Traits
from inl.backend.host import host_memory
from inl.errors import BackendUnavailable
from inl.spec.tree import leaves
from inl_directml.legacy.detours import Detours
from inl_directml.legacy.operators import NativeOnly
from inl_directml.probe import adapters_of_torch
from inl_directml.settings import INSTALL
from inl_torch.backend import TorchBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inl.device import Device
    from inl.spec.program import ProgramInfo
    from inl.spec.step import Bucket

C = TypeVar("C")
FALLBACK = "The operator .* fall back to run on the CPU"
"""What torch-directml warns of when it first computes an operator on the CPU."""


@final
class TorchDirectmlBackend(TorchBackend):
    """One adapter through torch-directml. Steps are computed op by op.

    Operators are checked in the first call with arguments of some shapes, since they
    depend on nothing else: one that the device lacks raises
    :class:`~inl.errors.KernelFailed`, it is not computed on the CPU. Raises
    :class:`BackendUnavailable` where torch-directml cannot use the device.
    """

    traits = Traits(dtypes=("float32", "float16"), block_size=16, depth=1)

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = open_adapter(device)
        listed = {info.index: info.memory_bytes for info in adapters_of_torch()}
        self._bytes = listed.get(device.index) or host_memory().total
        warnings.filterwarnings("error", message=FALLBACK)

    def memory(self) -> DeviceMemory:
        """All bytes of the adapter; what is in use, torch-directml does not report.

        Without a number in the registry of Windows, the memory of the host.
        """
        return DeviceMemory(self._bytes, self._bytes)

    def empty_cache(self) -> None:
        """Do nothing: torch-directml has no function for it."""

    def offers(self, kind: type[C]) -> C | None:
        return None if kind is CachedMemory else super().offers(kind)

    def compile(
        self,
        function: Program,
        bucket: Bucket | None,
        *,
        consumes: Sequence[int],  # noqa: ARG002
        info: ProgramInfo | None = None,  # noqa: ARG002
    ) -> Program:
        # Nothing is compiled: there are no inputs to consume and no program to name.
        return self.guarded(checked(function), bucket)


def open_adapter(device: Device) -> torch.device:
    """Return the torch device of an adapter.

    Raises :class:`BackendUnavailable` with the reason that torch-directml gives.
    """
    try:
        import torch_directml

        count = torch_directml.device_count()
        if device.index < count:
            place: torch.device = torch_directml.device(device.index)
            return place
        reason = f"{count} adapters found"
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
    raise BackendUnavailable(
        f"{device}: torch {torch.__version__} with torch-directml: {reason}; needed: a "
        f"DirectX 12 adapter, and on WSL libd3d12.so of Windows; try: "
        f"{INSTALL['torch']} in an environment of its own"
    )


def checked(function: Program) -> Program:
    """Wrap a program so that it uses the detours and is checked for each new shape."""
    seen: set[Any] = set()

    def run(*args: Any) -> Any:
        shapes = tuple(tuple(x.shape) for x in leaves(args) if hasattr(x, "shape"))
        # Not inference mode: torch 2.4 cannot dispatch views of another dtype in it.
        with torch.no_grad(), Detours():
            if shapes in seen:
                return function(*args)
            with NativeOnly():
                result = function(*args)
            seen.add(shapes)
            return result

    return run
