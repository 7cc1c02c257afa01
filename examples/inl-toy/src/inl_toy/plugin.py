"""Entry point ``toy``: registers the backend; imports only ``inl``."""

from inl.device import DeviceInfo
from inl.plugin import hookimpl


def probe():
    """List the devices; raise BackendUnavailable with the reason if there are none."""
    return [DeviceInfo(0, "toy (NumPy in float32)")]


@hookimpl
def inl_register_backends(register):
    register("toy", "inl_toy.backend:Backend", probe=probe)
