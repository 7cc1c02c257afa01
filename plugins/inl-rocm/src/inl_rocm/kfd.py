"""AMD GPUs as the Linux kernel's compute driver (KFD) lists them in sysfs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"
DEVICE_FILE = "dev/kfd"

VIDEO_MEMORY = ("1", "2")
"""``heap_type`` of memory banks on the GPU, mapped by the host or not."""


class Gpu(NamedTuple):
    """One GPU."""

    architecture: str
    """Such as "gfx942"."""
    memory_bytes: int | None
    unique_id: int
    """As in ``GPU-<16 hexadecimal digits>``; 0 where the chip has none."""
    bus_address: str
    """PCI address, such as "0000:c1:00.0"."""


def gpus(root: Path) -> Iterator[Gpu]:
    """Yield the GPUs under ``root``, in the order of ROCm's device indices.

    Nodes of CPUs, and of GPUs that this process may not use, are left out.
    """
    nodes = root / TOPOLOGY
    names = sorted((p for p in nodes.iterdir() if p.name.isdigit()), key=_number)
    for node in names:
        facts = properties(node / "properties")
        if facts.get("simd_count", 0) and facts.get("gfx_target_version", 0):
            yield Gpu(
                architecture(facts["gfx_target_version"]),
                memory_bytes(node),
                facts.get("unique_id", 0),
                bus_address(facts.get("domain", 0), facts.get("location_id", 0)),
            )


def _number(folder: Path) -> int:
    return int(folder.name)


def properties(file: Path) -> dict[str, int]:
    """Read a file of lines "name number"; empty if it cannot be read."""
    try:
        text = file.read_text("ascii", "replace")
    except OSError:
        return {}
    return {
        name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.M)
    }


def architecture(version: int) -> str:
    """Name of a ``gfx_target_version``: 90402 is "gfx942", 90010 is "gfx90a"."""
    major, rest = divmod(version, 10000)
    minor, step = divmod(rest, 100)
    return f"gfx{major}{minor:x}{step:x}"


def memory_bytes(node: Path) -> int | None:
    """Total video memory of a node, if the driver reports it."""
    banks = [properties(bank) for bank in node.glob("mem_banks/*/properties")]
    sizes = [
        bank.get("size_in_bytes", 0)
        for bank in banks
        if str(bank.get("heap_type")) in VIDEO_MEMORY
    ]
    return sum(sizes) or None


def bus_address(domain: int, location: int) -> str:
    """PCI address of a ``location_id``: bus, device and function."""
    return f"{domain:04x}:{location >> 8:02x}:{location >> 3 & 31:02x}.{location & 7}"


def can_open(root: Path) -> bool:
    """Whether this user may open the driver's device file."""
    return os.access(root / DEVICE_FILE, os.R_OK | os.W_OK)
