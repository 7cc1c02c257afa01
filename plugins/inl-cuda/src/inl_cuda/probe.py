"""Detection of NVIDIA GPUs through the driver's management library (NVML)."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from inl.device import DeviceInfo
from inl.errors import BackendUnavailable
from inl.install_command import install_command
from inl_torch.torch_build import require_torch, without_triton

LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
INSTALL = install_command("torch", options="--force-reinstall")
TORCH = "torch>=2.5"
VISIBLE = "CUDA_VISIBLE_DEVICES"
NAME_BYTES = 96
VERSION_BYTES = 80
MEMORY_CLOCK = 2
"""``NVML_CLOCK_MEM``; clocks are in MHz."""


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def probe() -> list[DeviceInfo]:
    """Return name and memory of each visible GPU; imports no framework.

    Raises :class:`BackendUnavailable`, with the reason, where there is none or where
    torch cannot use it.
    """
    library = load()
    with session(library):
        devices = [
            describe(library, index, handle)
            for index, handle in enumerate(handles(library, os.environ.get(VISIBLE)))
        ]
    if not devices:
        hidden = (
            f"; {VISIBLE} is {os.environ[VISIBLE]!r}" if VISIBLE in os.environ else ""
        )
        raise BackendUnavailable(f"the NVIDIA driver shows no GPU{hidden}")
    require_torch("cuda", INSTALL, TORCH)
    note = without_triton(install_command("triton")) if sys.platform == "linux" else ""
    return [replace(info, note=note) for info in devices]


def driver_version() -> str:
    """Version of the driver; "unknown" without one."""
    try:
        library = load()
        with session(library):
            text = ctypes.create_string_buffer(VERSION_BYTES)
            library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(VERSION_BYTES))
            return text.value.decode(errors="replace")
    except BackendUnavailable:
        return "unknown"


def load() -> Any:
    """Load NVML, which is part of the driver."""
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
def session(library: Any) -> Iterator[None]:
    """Initialize NVML, and shut it down at the end."""
    check(library, library.nvmlInit_v2(), "start")
    try:
        yield
    finally:
        library.nvmlShutdown()


def handles(library: Any, visible: str | None) -> Iterator[ctypes.c_void_p]:
    """Handles of the GPUs in CUDA's order, as selected by ``visible``.

    visible: the value of ``CUDA_VISIBLE_DEVICES``, or ``None`` for all GPUs. As in
    CUDA, the list ends at the first invalid entry.
    """
    count = ctypes.c_uint()
    code = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    check(library, code, "count the GPUs")
    names = [str(index) for index in range(count.value)]
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
    for name in names:
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
    """Query the name and memory of one GPU."""
    name = ctypes.create_string_buffer(NAME_BYTES)
    code = library.nvmlDeviceGetName(handle, name, ctypes.c_uint(NAME_BYTES))
    check(library, code, f"name GPU {index}")
    memory = _Memory()
    # Boards that share the host's memory do not report a total.
    failed = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    total = None if failed else int(memory.total)
    product = name.value.decode(errors="replace")
    return DeviceInfo(
        index, product, total, bytes_per_second=bandwidth(library, handle)
    )


def bandwidth(library: Any, handle: ctypes.c_void_p) -> float | None:
    """Return the memory bandwidth of a GPU in bytes per second, if it is known.

    Memory transfers twice per clock.
    """
    clock, bits = ctypes.c_uint(), ctypes.c_uint()
    try:
        failed = library.nvmlDeviceGetMaxClockInfo(
            handle, ctypes.c_uint(MEMORY_CLOCK), ctypes.byref(clock)
        )
        failed = failed or library.nvmlDeviceGetMemoryBusWidth(
            handle, ctypes.byref(bits)
        )
    except AttributeError:  # a driver before version 495 has no bus width
        return None
    return None if failed else 2e6 * clock.value * bits.value / 8 or None


def check(library: Any, code: int, action: str) -> None:
    """Raise :class:`BackendUnavailable` with NVML's message for a nonzero ``code``."""
    if code:
        library.nvmlErrorString.restype = ctypes.c_char_p
        message = library.nvmlErrorString(code) or b"unknown error"
        raise BackendUnavailable(
            f"the NVIDIA driver cannot {action}: {message.decode(errors='replace')} "
            f"(NVML {code})"
        )
