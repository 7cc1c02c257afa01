"""Opening a GPU while torch is imported, for both take seconds and wait for no one."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inl.device import Device
    from inl_cuda.backend import CudaBackend

DRIVERS = ("libcuda.so.1", "nvcuda.dll")


def open_backend(device: Device) -> CudaBackend:
    """Open one GPU.

    Raises :class:`~inl.errors.BackendUnavailable` where this torch cannot use it.
    """
    working = [Thread(target=open_context, args=(device.index,), daemon=True)]
    if find_spec("triton") is not None:
        working.append(Thread(target=name_compiler, daemon=True))
    for thread in working:
        thread.start()
    with uncollected():
        from inl_cuda.backend import CudaBackend
    for thread in working:
        thread.join()
    return CudaBackend(device)


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage: torch makes none, of a million objects, while it loads."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def open_context(index: int) -> None:
    """Make the context that torch will find; what fails here is torch's to report."""
    # As torch does, before the driver first looks.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    for name in DRIVERS:
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        number, context = ctypes.c_int(), ctypes.c_void_p()
        if not (driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(number), index)):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
        return


def name_compiler() -> None:
    """Have Triton digest its half gigabyte of library, which names its cache."""
    with suppress(ImportError, OSError):
        from triton.runtime.cache import triton_key

        triton_key()
