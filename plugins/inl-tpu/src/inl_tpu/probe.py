"""Detection of TPUs through the PCI bus; imports no framework.

Google TPU chips are PCI devices of vendor 0x1ae0. Their device files can be opened by
one process at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from inl.backend.host import read_text
from inl.device import DeviceInfo
from inl.errors import BackendUnavailable
from inl.install_command import install_command
from inl.plugin.frameworks import require_framework, require_modules
from inl_tpu.settings import VARIABLE, platform

PCI = Path("/sys/bus/pci/devices")
DEVICE_FILES = Path("/dev")
PROCESSES = Path("/proc")
GPU_FILE = re.compile(r"nvidia\d+")
"""Name of the device file of an NVIDIA GPU."""

VENDOR = "0x1ae0"

JAX = "jax>=0.10,<0.11"

HOST_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
"""Number of virtual devices of JAX's CPU platform, in ``XLA_FLAGS``."""

INSTALL = {
    "tpu": install_command("inl-tpu[tpu]"),
    "cpu": install_command("jax>=0.10,<0.11"),
    "cuda": install_command("jax[cuda12]>=0.10,<0.11"),
}
"""Command that installs what a platform needs."""


class Chip(NamedTuple):
    """A generation of TPU; figures are for one JAX device."""

    name: str
    memory_bytes: int
    bytes_per_second: float
    devices: int = 1
    """JAX devices per chip."""


CHIPS = {
    "0x0027": Chip("TPU v3", 16 << 30, 4.5e11, devices=2),
    "0x005e": Chip("TPU v4", 32 << 30, 1.2e12),
    "0x0062": Chip("TPU v5p", 95 << 30, 2.7e12),
    "0x0063": Chip("TPU v5e", 16 << 30, 8.1e11),
    "0x006f": Chip("TPU v6e", 32 << 30, 1.6e12),
    "0x0076": Chip("TPU7x", 96 << 30, 3.7e12, devices=2),
}
"""PCI device id -> chip."""


def probe() -> list[DeviceInfo]:
    """Return the TPUs of this machine, or the devices of the requested JAX platform.

    Raises :class:`BackendUnavailable`, with the reason, where there is none.
    """
    target = platform()
    devices = tpus() if target == "tpu" else stand_ins(target)
    check_installed(target)
    return devices


def tpus() -> list[DeviceInfo]:
    """Return the attached TPUs, in order of their PCI addresses."""
    chips = list(attached())
    if not chips:
        raise BackendUnavailable(
            f"no TPU: no PCI device of vendor {VENDOR} (Google) under {PCI}; "
            f"{VARIABLE}=cpu runs the TPU code on the CPU"
        )
    if holder := holding_process():
        raise BackendUnavailable(
            f"the TPU is held by another process: {holder}; a TPU serves one process "
            "at a time, end that one first"
        )
    each = [chip for chip in chips for _ in range(chip.devices)]
    return [
        DeviceInfo(index, chip.name, chip.memory_bytes, "", chip.bytes_per_second)
        for index, chip in enumerate(each)
    ]


def attached() -> Iterator[Chip]:
    """Yield the TPU chips on the PCI bus."""
    for folder in sorted(PCI.iterdir()) if PCI.is_dir() else ():
        if read_text(folder / "vendor") == VENDOR:
            chip = CHIPS.get(read_text(folder / "device"))
            if chip is not None:
                yield chip


def holding_process() -> str | None:
    """Return name and id of another process that has a TPU's device file open.

    Only the processes that this user may inspect are found.
    """
    files = re.compile(rf"{re.escape(str(DEVICE_FILES))}/(accel|vfio/)\d+")
    folders = sorted(PROCESSES.iterdir()) if PROCESSES.is_dir() else []
    for folder in folders:
        if not folder.name.isdigit() or folder.name == str(os.getpid()):
            continue
        try:
            targets = {str(fd.readlink()) for fd in (folder / "fd").iterdir()}
        except OSError:
            continue
        if any(map(files.fullmatch, targets)):
            return f"{read_text(folder / 'comm') or 'process'} (pid {folder.name})"
    return None


def stand_ins(target: str) -> list[DeviceInfo]:
    """Return the devices of another JAX platform, on which the TPU code runs."""
    count = 1
    if target == "cpu":
        match = HOST_DEVICES.search(os.environ.get("XLA_FLAGS", ""))
        count = int(match[1]) if match else 1
    elif target == "cuda":
        files = DEVICE_FILES.iterdir() if DEVICE_FILES.is_dir() else ()
        count = sum(bool(GPU_FILE.fullmatch(file.name)) for file in files)
        if not count:
            raise BackendUnavailable(
                f"{VARIABLE}=cuda: no NVIDIA GPU, {DEVICE_FILES}/nvidia0 is missing; "
                "install its driver"
            )
    name, note = f"tpu code on {target}", f"set by {VARIABLE}"
    return [DeviceInfo(index, name, note=note) for index in range(count)]


def check_installed(target: str) -> None:
    """Raise :class:`BackendUnavailable` if a package of the platform is missing, or
    JAX is of another version or cannot be imported.
    """
    needed = ("jax", "libtpu") if target == "tpu" else ("jax",)
    require_modules(needed, INSTALL[target])
    require_framework(JAX, INSTALL[target])
