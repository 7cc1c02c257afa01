"""Host memory as limited by the operating system and the cgroup."""

from __future__ import annotations

import os
from pathlib import Path

from inl.backend.base import DeviceMemory

CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> DeviceMemory:
    """Return total and available bytes.

    Half of the total is assumed to be free if the OS does not report it.
    """
    total = _total()
    for name in CGROUPS:
        limit = _read(name).strip()
        if limit.isdigit():
            total = min(total, int(limit))
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return DeviceMemory(total, min(total, int(line.split()[1]) * 1024))
    return DeviceMemory(total, total // 2)


def _total() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def _read(name: str) -> str:
    try:
        return Path(name).read_text()
    except OSError:
        return ""
