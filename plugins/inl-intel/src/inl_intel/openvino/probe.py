"""Detection of OpenVINO and of its devices through sysfs; imports no framework."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from inl.device import DeviceInfo
from inl.errors import BackendUnavailable
from inl.install_command import install_command
from inl.plugin.frameworks import require_framework
from inl_intel.probe import attached, driver_of
from inl_intel.settings import RUNTIME, requested_runtime

OPENVINO: Final = "openvino>=2026.4,<2026.5"
"""Accepted versions: the inputs of its paged attention change between releases."""

INSTALL: Final = install_command("inl-intel[openvino]")

ACCELERATORS: Final = "sys/class/accel"
NPU_DRIVER: Final = "intel_vpu"


def probe(root: Path = Path("/")) -> list[DeviceInfo]:
    """Return the devices of OpenVINO that ``INL_XPU_RUNTIME`` names.

    root: folder of ``sys``. Raises :class:`BackendUnavailable`, with the reason, where
    there is none, or OpenVINO is missing or of another version.
    """
    kind = requested_runtime().removeprefix("openvino-")
    require_framework(OPENVINO, INSTALL)
    if kind == "npu" and not has_npu(root):
        raise BackendUnavailable(
            f"no Intel NPU: no device with driver {NPU_DRIVER} under "
            f"{root / ACCELERATORS}; install its driver, or run the container with "
            "--device /dev/accel"
        )
    names = [card.name for card in attached(root)] if kind == "gpu" else [kind.upper()]
    return [
        DeviceInfo(index, f"OpenVINO on {name}", note=f"set by {RUNTIME}")
        for index, name in enumerate(names)
    ]


def has_npu(root: Path) -> bool:
    """Whether the driver of Intel's NPUs has a device."""
    return any(
        driver_of(device) == NPU_DRIVER for device in (root / ACCELERATORS).glob("*")
    )
