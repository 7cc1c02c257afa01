"""Host memory as limited by the operating system and the cgroup."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.backend.base import DeviceMemory

if TYPE_CHECKING:
    from inl.backend.base import Backend

ASSUMED: Final = 8 << 30
"""Total bytes where the system does not report them."""


class Cgroup(NamedTuple):
    """Names of the files that limit the memory of a container."""

    folder: str
    limit: str
    usage: str
    files: tuple[str, ...]
    """Fields of ``memory.stat``: pages of files, which the system drops when needed."""


CGROUPS = (
    Cgroup(
        "/sys/fs/cgroup", "memory.max", "memory.current",
        ("active_file", "inactive_file"),
    ),
    Cgroup(
        "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)  # fmt: skip


def host_memory() -> DeviceMemory:
    """Return total and available bytes.

    Half of the total is assumed to be free if the OS does not report it.
    """
    if sys.platform == "win32":
        return _windows_memory()
    total, free = _total(), None
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for group in CGROUPS:
        limit = read_text(Path(group.folder, group.limit))
        if limit.isdigit() and int(limit) < total:
            total = int(limit)
            free = min(total if free is None else free, total - _used(group))
    return DeviceMemory(total, total // 2 if free is None else max(free, 0))


def _used(group: Cgroup) -> int:
    """Return the bytes of a cgroup that the system cannot take back."""
    usage = read_text(Path(group.folder, group.usage))
    if not usage.isdigit():
        return 0
    lines = read_text(Path(group.folder, "memory.stat")).splitlines()
    stat = dict(line.split() for line in lines if line.count(" ") == 1)
    files = (stat.get(name, "0") for name in group.files)
    return int(usage) - sum(int(count) for count in files if count.isdigit())


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
