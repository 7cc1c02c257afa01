"""Probe of the CPU: its name, memory and backend; imports no framework."""

from __future__ import annotations

import platform
from pathlib import Path

from inl.backend.host import host_memory
from inl.device import DeviceInfo
from inl_cpu.selection import select_backend

CPUINFO = Path("/proc/cpuinfo")


def probe() -> list[DeviceInfo]:
    """Report one device: all processors of the host.

    Raises :class:`~inl.errors.BackendUnavailable` if no backend is available.
    """
    return [DeviceInfo(0, cpu_name(), host_memory().total, select_backend().note)]


def cpu_name() -> str:
    """Model name of the processor, or its architecture if unknown."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"
