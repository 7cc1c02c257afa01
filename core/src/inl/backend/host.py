"""Host memory as limited by the operating system and the cgroup."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inl.backend.base import DeviceMemory

if TYPE_CHECKING:
    from inl.backend.base import Backend

ASSUMED: Final = 8 << 30
"""Total bytes where the system does not report them."""
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> DeviceMemory:
    """Return total and available bytes.

    Half of the total is assumed to be free if the OS does not report it.
    """
    if sys.platform == "win32":
        return _windows_memory()
    total = _total()
    for name in CGROUPS:
        limit = read_text(Path(name))
        if limit.isdigit():
            total = min(total, int(limit))
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return DeviceMemory(total, min(total, int(line.split()[1]) * 1024))
    return DeviceMemory(total, total // 2)


def is_host_memory(backend: Backend) -> bool:
    """Whether a device's memory is the host's: it has as many bytes."""
    return backend.memory().total == host_memory().total


def _total() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return ASSUMED


class _MemoryStatus(ctypes.Structure):
    """``MEMORYSTATUSEX`` of Windows."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 5),
    )


def _windows_memory() -> DeviceMemory:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    libraries: Any = ctypes  # typed without windll on other systems
    if not libraries.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return DeviceMemory(ASSUMED, ASSUMED // 2)
    return DeviceMemory(status.total, status.available)


def read_text(path: Path) -> str:
    """Return the text of a file of the kernel, stripped; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
