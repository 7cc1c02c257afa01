"""Opens a GPU while torch is imported, since both take seconds and are independent."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING

from inl.garbage_collection import gc_disabled

if TYPE_CHECKING:
    from inl.device import Device
    from inl_cuda.backend import CudaBackend

DRIVERS = ("libcuda.so.1", "nvcuda.dll")


def open_backend(device: Device) -> CudaBackend:
    """Open one GPU.

    Raises :class:`~inl.errors.BackendUnavailable` where this torch cannot use it.
    """
    threads = [Thread(target=create_context, args=(device.index,), daemon=True)]
    if find_spec("triton") is not None:
        threads.append(Thread(target=compute_triton_key, daemon=True))
    for thread in threads:
        thread.start()
    with gc_disabled():
        from inl_cuda.backend import CudaBackend
    for thread in threads:
        thread.join()
    return CudaBackend(device)


def create_context(index: int) -> None:
    """Create the primary context that torch will use; errors are left to torch."""
    # As torch does, before the driver first looks.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    for name in DRIVERS:
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        if not (driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), index)):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        return


def compute_triton_key() -> None:
    """Let Triton hash its half gigabyte of library for the key of its kernel cache."""
    with suppress(ImportError, OSError):
        from triton.runtime.cache import triton_key

        triton_key()
