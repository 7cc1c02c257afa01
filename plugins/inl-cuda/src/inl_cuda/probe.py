"""Which NVIDIA GPUs there are, asked of the driver's management library (NVML)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inl.device import DeviceInfo
from inl.errors import BackendUnavailable

LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
VISIBLE = "CUDA_VISIBLE_DEVICES"
NAME_BYTES = 96


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def probe() -> list[DeviceInfo]:
    """Name and memory of each visible GPU; imports no framework.

    Raises :class:`BackendUnavailable` with the reason where there is none.
    """
    library = load()
    with opened(library):
        found = [
            describe(library, index, handle)
            for index, handle in enumerate(handles(library, os.environ.get(VISIBLE)))
        ]
    if not found:
        hidden = (
            f"; {VISIBLE} is {os.environ[VISIBLE]!r}" if VISIBLE in os.environ else ""
        )
        raise BackendUnavailable(f"the NVIDIA driver shows no GPU{hidden}")
    return found


def load() -> Any:
    """Load NVML, which comes with the driver."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise BackendUnavailable(
        f"no NVIDIA driver: {LIBRARIES[0]} not found; install the driver of the GPU, "
        "or run the container with its GPUs"
    )


@contextmanager
def opened(library: Any) -> Iterator[None]:
    """Begin and end a session with NVML."""
    check(library, library.nvmlInit_v2(), "start")
    try:
        yield
    finally:
        library.nvmlShutdown()


def handles(library: Any, visible: str | None) -> Iterator[ctypes.c_void_p]:
    """The GPUs that CUDA will number 0, 1, ...; it stops at the first odd entry."""
    count = ctypes.c_uint()
    code = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    check(library, code, "count the GPUs")
    named = [str(index) for index in range(count.value)]
    if visible is not None:
        named = [part.strip() for part in visible.split(",")]
    for name in named:
        handle = ctypes.c_void_p()
        if name.isascii() and name.isdigit() and int(name) < count.value:
            code = library.nvmlDeviceGetHandleByIndex_v2(
                ctypes.c_uint(int(name)), ctypes.byref(handle)
            )
            check(library, code, f"open GPU {name}")
        elif name.startswith(("GPU-", "MIG-")):
            code = library.nvmlDeviceGetHandleByUUID(
                name.encode(), ctypes.byref(handle)
            )
            if code:
                return
        else:
            return
        yield handle


def describe(library: Any, index: int, handle: ctypes.c_void_p) -> DeviceInfo:
    """Ask for one GPU's name and memory."""
    name = ctypes.create_string_buffer(NAME_BYTES)
    code = library.nvmlDeviceGetName(handle, name, ctypes.c_uint(NAME_BYTES))
    check(library, code, f"name GPU {index}")
    memory = _Memory()
    # Boards that share the host's memory do not say how much of it is theirs.
    silent = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    total = None if silent else int(memory.total)
    return DeviceInfo(index, name.value.decode(errors="replace"), total)


def check(library: Any, code: int, action: str) -> None:
    """Raise :class:`BackendUnavailable` in NVML's own words."""
    if code:
        library.nvmlErrorString.restype = ctypes.c_char_p
        words = library.nvmlErrorString(code) or b"unknown error"
        raise BackendUnavailable(
            f"the NVIDIA driver cannot {action}: {words.decode(errors='replace')} "
            f"(NVML {code})"
        )
