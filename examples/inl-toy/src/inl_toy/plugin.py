"""Entry point ``toy``: names the backend, and imports nothing but ``inl``."""

from inl.device import DeviceInfo
from inl.plugin import hookimpl


def probe():
    """List the devices; where there is none, raise BackendUnavailable and say why."""
    return [DeviceInfo(0, "toy (NumPy in float32)")]


@hookimpl
def inl_register_backends(register):
    register("toy", "inl_toy.backend:Backend", probe=probe)
