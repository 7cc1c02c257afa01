"""Numbers of cores where there is no ``/sys``: macOS and Windows."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

FAST_CORES: Final = (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu")
"""Names for ``sysctlbyname``. The first is the number of performance cores: a slower
core would make the others wait. Only macOS on ARM has it."""
CORE: Final = 0
"""``RelationProcessorCore`` of Windows."""


def system_cores() -> int | None:
    """Number of physical cores to compute with; ``None`` if the system does not say."""
    if sys.platform == "darwin":
        return _mac_cores()
    if sys.platform == "win32":
        return _windows_cores()
    return None


def _mac_cores() -> int | None:
    library = ctypes.CDLL(None)
    for name in FAST_CORES:
        count = ctypes.c_int32()
        size = ctypes.c_size_t(ctypes.sizeof(count))
        places = ctypes.byref(count), ctypes.byref(size)
        if not library.sysctlbyname(name, *places, None, 0) and count.value > 0:
            return count.value
    return None


class _Processors(ctypes.Structure):
    """``SYSTEM_LOGICAL_PROCESSOR_INFORMATION`` of Windows on 64 bits."""

    _fields_ = (
        ("mask", ctypes.c_uint64),
        ("relation", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 2),
    )


def _windows_cores() -> int | None:
    """Cores of the processor group of this process, which has at most 64 processors."""
    libraries: Any = ctypes  # typed without windll on other systems
    read = libraries.windll.kernel32.GetLogicalProcessorInformation
    size = ctypes.c_uint32(0)
    read(None, ctypes.byref(size))
    entries = (_Processors * (size.value // ctypes.sizeof(_Processors)))()
    if not size.value or not read(entries, ctypes.byref(size)):
        return None
    return sum(entry.relation == CORE for entry in entries) or None
