"""Entry point ``vendor``, as written for plugin contract 1.2."""

from inl.device import DeviceInfo
from inl.plugin import FEATURES, hookimpl

INL_CONTRACT = (1, 2)
INL_FEATURES = frozenset(FEATURES)


def probe():
    return [DeviceInfo(0, "vendor NPU", 1 << 30, "written for 1.2", 1e9)]


@hookimpl
def inl_register_backends(register):
    register(
        "vendor", "inl_vendor.backend:VendorBackend", probe="inl_vendor.plugin:probe"
    )
    register("vendor_simple", "inl_vendor.simple:SimpleBackend")


@hookimpl
def inl_register_kernels(register, device_type):
    if device_type == "vendor_simple":
        register("inl_vendor.simple:extra")
