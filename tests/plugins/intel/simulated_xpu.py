"""Plugin of the XPU backend with torch's CPU behind the names of ``torch.xpu``."""

from __future__ import annotations

import os
from types import SimpleNamespace

from inl.backend.host import host_memory
from inl.device import DeviceInfo, DeviceType
from inl.plugin import hookimpl

DTYPES = "INL_TEST_XPU_DTYPES"
"""Environment variable: comma-separated dtypes of the backend; all by default."""

MODULE = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 1,
    set_device=lambda _place: None,
    empty_cache=lambda: None,
    mem_get_info=lambda _place: (host_memory().free, host_memory().total),
    memory_reserved=lambda _place: 0,
    memory_allocated=lambda _place: 0,
    get_device_properties=lambda _place: SimpleNamespace(total_memory=1 << 30),
)


@hookimpl
def inl_register_backends(register):
    register(DeviceType.XPU, "simulated_xpu:open_backend", probe="simulated_xpu:probe")


def probe():
    return [DeviceInfo(0, "torch's CPU as an XPU")]


def open_backend(device):
    from inl_intel.backend import XpuBackend

    backend = XpuBackend(device, MODULE, "cpu")
    if dtypes := os.environ.get(DTYPES):
        backend.traits = backend.traits._replace(dtypes=tuple(dtypes.split(",")))
    return backend
