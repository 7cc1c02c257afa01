"""Which CPU this is; imports no framework."""

from __future__ import annotations

import platform
from pathlib import Path

from inl.backend.host import host_memory
from inl.device import DeviceInfo
from inl_cpu.choice import choose

CPUINFO = Path("/proc/cpuinfo")


def probe() -> list[DeviceInfo]:
    """One device, every processor of the host together, with what computes there.

    Raises :class:`~inl.errors.BackendUnavailable` where nothing does.
    """
    return [DeviceInfo(0, cpu_name(), host_memory().total, choose().note)]


def cpu_name() -> str:
    """Name of the processor as the system gives it, else of its architecture."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"
