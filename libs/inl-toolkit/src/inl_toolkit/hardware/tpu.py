"""TPUs through the backend that ``inl-tpu`` registers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from inl.device import Device, DeviceType
from inl.errors import BackendUnavailable, DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.backend.base import Backend, DeviceMemory


def is_tpu_available() -> bool:
    """Return whether ``inl-tpu`` is installed and finds a TPU."""
    return Device(DeviceType.TPU).is_available()


class Transfers(NamedTuple):
    """Copies between host and device since :meth:`TPUBackend.initialize`."""

    to_device: int = 0
    to_host: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0


class Pool(NamedTuple):
    """Arrays of :meth:`TPUBackend.to_device` that are alive.

    The memory of one that is dropped is used again by the framework's allocator.
    """

    arrays: int = 0
    bytes: int = 0
    peak_bytes: int = 0
    """Most bytes at one time."""

    def changed(self, arrays: int, size: int) -> Pool:
        """Return it with arrays added, or dropped."""
        held = self.bytes + size
        return Pool(self.arrays + arrays, held, max(held, self.peak_bytes))


@final
class TPUBackend:
    """One TPU: copies, memory and statistics. Computation is ``inl.nn`` and engines'.

    Constructing it opens nothing. index: of the TPU, from 0.
    """

    def __init__(self, index: int = 0) -> None:
        self.device = Device(DeviceType.TPU, index)
        self.transfers = Transfers()
        self.pool = Pool()
        self._backend: Backend | None = None

    def initialize(self) -> bool:
        """Open the device; ``False`` if it cannot be used, see :meth:`why_not`."""
        from inl.plugin import make_backend

        if self._backend is None:
            try:
                self._backend = make_backend(self.device)
            except DeviceError:
                return False
        return True

    def why_not(self) -> str | None:
        """Return why the device cannot be used, or ``None``."""
        return self.device.why_not()

    def memory(self) -> DeviceMemory:
        """Return total and free memory; raises ``BackendUnavailable`` if not open."""
        return self._open().memory()

    def to_device(self, array: NDArray[Any]) -> Any:
        """Copy a host array; raises ``BackendUnavailable`` if not open."""
        from inl.dtypes import wrap

        held = self._open().tensor(wrap(np.asarray(array)))
        self.pool = self.pool.changed(1, array.nbytes)
        weakref.finalize(held, self._drop, array.nbytes)
        self.transfers = self.transfers._replace(
            to_device=self.transfers.to_device + 1,
            bytes_to_device=self.transfers.bytes_to_device + array.nbytes,
        )
        return held

    def to_host(self, array: Any) -> NDArray[Any]:
        """Copy a device array; raises ``BackendUnavailable`` if not open."""
        from inl.dtypes import widen

        copy = widen(self._open().numpy(array))
        self.transfers = self.transfers._replace(
            to_host=self.transfers.to_host + 1,
            bytes_to_host=self.transfers.bytes_to_host + copy.nbytes,
        )
        return copy

    def _drop(self, size: int) -> None:
        self.pool = self.pool.changed(-1, -size)

    def _open(self) -> Backend:
        if self._backend is None:
            reason = self.why_not() or "call initialize() first"
            raise BackendUnavailable(f"{self.device}: is not open: {reason}")
        return self._backend
