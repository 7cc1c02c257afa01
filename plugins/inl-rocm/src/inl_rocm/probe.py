"""Detection of AMD GPUs through sysfs, and amdsmi where it is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from inl.device import DeviceInfo
from inl.errors import BackendUnavailable
from inl.install_command import install_command
from inl_rocm.chips import CHIPS, RELATED, chip_of
from inl_rocm.kfd import DEVICE_FILE, TOPOLOGY, Gpu, can_open, gpus
from inl_torch.torch_build import require_torch, without_triton

INDEX: Final = "https://download.pytorch.org/whl/rocm7.1"
INSTALL: Final = install_command(
    "torch", options=f"--force-reinstall --index-url {INDEX}"
)
"""Installs torch's ROCm build."""

TORCH: Final = "torch>=2.5"

VISIBLE: Final = (
    ("ROCR_VISIBLE_DEVICES",),
    ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
)
"""Variables that select GPUs, each level out of what the previous one has left. Of the
variables of a level, the first that is set counts."""

UNNAMED: Final = ("", "N/A")
"""What amdsmi returns as the name of a product that it does not know."""

EAGER: Final = "unknown to inl-rocm: computes without Triton"


def probe(root: Path = Path("/")) -> list[DeviceInfo]:
    """Return name and memory of each visible GPU; imports no framework.

    root: folder of ``sys`` and ``dev``. Raises :class:`BackendUnavailable`, with the
    reason, where there is none or where torch cannot use it.
    """
    found = visible(attached(root), os.environ)
    if not found:
        chosen = [name for level in VISIBLE for name in level if name in os.environ]
        hidden = "".join(f"; {name} is {os.environ[name]!r}" for name in chosen)
        raise BackendUnavailable(f"the AMD driver shows no GPU{hidden}")
    require_torch("hip", INSTALL, TORCH)
    names = product_names()
    return [describe(index, gpu, names) for index, gpu in enumerate(found)]


def attached(root: Path) -> list[Gpu]:
    """Return the GPUs of the driver, which this user may open."""
    if not (root / TOPOLOGY).is_dir():
        raise BackendUnavailable(
            f"no AMD GPU driver: no {root / TOPOLOGY}; install the amdgpu driver, or "
            "run the container with --device /dev/kfd --device /dev/dri"
        )
    found = list(gpus(root))
    if found and not can_open(root):
        raise BackendUnavailable(
            f"no permission for {root / DEVICE_FILE}. Try: sudo usermod -a -G "
            "render,video $USER, then log in again"
        )
    return found


def visible(found: Sequence[Gpu], variables: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that the variables select, in their order.

    Entries are indices or ``GPU-<unique id>``. As in ROCm, a list ends at the first
    invalid entry.
    """
    left = list(found)
    for level in VISIBLE:
        value = next((variables[name] for name in level if name in variables), None)
        if value is not None:
            left = selected(left, value)
    return left


def selected(found: Sequence[Gpu], value: str) -> list[Gpu]:
    by_name = {str(index): gpu for index, gpu in enumerate(found)}
    by_name |= {f"GPU-{gpu.unique_id:016x}": gpu for gpu in found if gpu.unique_id}
    chosen: list[Gpu] = []
    for name in value.split(","):
        if name.strip() not in by_name:
            break
        chosen.append(by_name[name.strip()])
    return chosen


def describe(index: int, gpu: Gpu, names: Mapping[str, str]) -> DeviceInfo:
    """Describe a GPU by amdsmi's name of the product, or by the name of its family."""
    chip, name = chip_of(gpu.architecture), names.get(gpu.bus_address, "")
    family = f"{chip.name} ({gpu.architecture})" if chip else gpu.architecture
    return DeviceInfo(
        index,
        name if name not in UNNAMED else family,
        gpu.memory_bytes,
        without_triton(INSTALL)
        if chip
        else f"{EAGER}; known: {', '.join(sorted({**CHIPS, **RELATED}))}",
        chip.bytes_per_second if chip else None,
    )


def product_names() -> dict[str, str]:
    """Return the product of each PCI address, as amdsmi knows it; empty without it."""
    try:
        amdsmi: Any = import_module("amdsmi")
        amdsmi.amdsmi_init()
        try:
            return {
                amdsmi.amdsmi_get_gpu_device_bdf(handle).lower():
                amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"]
                for handle in amdsmi.amdsmi_get_processor_handles()
            }  # fmt: skip
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception:
        # amdsmi raises its own errors, and others where its library does not load.
        return {}
