"""Detection of Intel GPUs through sysfs and the Level Zero loader."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from inl.backend.host import read_text
from inl.device import DeviceInfo
from inl.errors import BackendUnavailable
from inl.install_command import install_command, pip_command
from inl_intel.settings import requested_runtime
from inl_torch.torch_build import require_torch, without_triton

CARDS: Final = "sys/class/drm"
VENDOR: Final = "0x8086"
DRIVERS: Final = ("xe", "i915")
LOADER: Final = "libze_loader.so.1"
"""The Level Zero loader, through which torch reaches the GPU."""

VISIBLE: Final = "ZE_AFFINITY_MASK"
"""Environment variable: comma-separated indices of GPUs, or of their tiles ("0.1")."""

INDEX: Final = "https://download.pytorch.org/whl/xpu"
INSTALL: Final = install_command(
    "torch", options=f"--force-reinstall --index-url {INDEX}"
)
"""Installs torch's XPU build."""

TORCH: Final = "torch>=2.6"

IPEX: Final = "intel_extension_for_pytorch"
"""Module of Intel's discontinued extension of torch, which is never imported."""

IPEX_NOTE: Final = (
    "intel-extension-for-pytorch is installed but not used: it is discontinued, and "
    f"torch has its own XPU support; {pip_command('uninstall')} "
    "intel-extension-for-pytorch"
)

FAMILIES: Final = {
    "0x0bd": "Intel Data Center GPU Max",
    "0x569": "Intel Arc A series",
    "0x56a": "Intel Arc A series",
    "0x56b": "Intel Arc A series",
    "0x56c": "Intel Data Center GPU Flex",
    "0xe20": "Intel Arc B series",
    "0xe21": "Intel Arc B series",
    "0x64a": "Intel Core Ultra 200V graphics",
    "0x7d4": "Intel Core Ultra graphics",
    "0x7d5": "Intel Core Ultra graphics",
    "0x7dd": "Intel Core Ultra graphics",
}
"""Prefix of a PCI device id -> GPU family, for the families that torch supports."""


class Card(NamedTuple):
    """One Intel GPU of the kernel's graphics drivers."""

    device_id: str
    driver: str
    memory_bytes: int | None

    @property
    def name(self) -> str:
        family = FAMILIES.get(self.device_id[:5], "Intel GPU")
        return f"{family} ({self.device_id})"

    @property
    def is_old(self) -> bool:
        """Whether it predates torch's support: the old driver, and no known family."""
        return self.driver == "i915" and self.device_id[:5] not in FAMILIES


def load(name: str) -> None:
    """Load a shared library; raises :class:`OSError` if there is none."""
    ctypes.CDLL(name)


def probe(
    root: Path = Path("/"), load: Callable[[str], object] = load
) -> list[DeviceInfo]:
    """Return the visible GPUs; imports no framework.

    root: folder of ``sys``. load: loads a shared library. Raises
    :class:`BackendUnavailable`, with the reason, where there is none, where torch
    cannot use it, or for an unknown value of INL_XPU_RUNTIME.
    """
    requested_runtime()
    found = visible(attached(root), os.environ.get(VISIBLE))
    if not found:
        raise BackendUnavailable(
            f"no Intel GPU is visible; {VISIBLE} is {os.environ[VISIBLE]!r}"
        )
    try:
        load(LOADER)
    except OSError as error:
        raise BackendUnavailable(
            f"no Level Zero loader: {LOADER} not found. Try: apt-get install libze1 "
            "libze-intel-gpu1"
        ) from error
    require_torch("xpu", INSTALL, TORCH)
    note = IPEX_NOTE if find_spec(IPEX) else without_triton(INSTALL)
    return [
        DeviceInfo(index, card.name, card.memory_bytes, note)
        for index, card in enumerate(found)
    ]


def attached(root: Path) -> list[Card]:
    """Return the GPUs that torch can use; raises where there is none."""
    found = list(cards(root))
    if not found:
        raise BackendUnavailable(
            f"no Intel GPU: no device of vendor {VENDOR} with driver "
            f"{' or '.join(DRIVERS)} under {root / CARDS}; install the driver of the "
            "GPU, or run the container with --device /dev/dri"
        )
    usable = [card for card in found if not card.is_old]
    if not usable:
        names = ", ".join(card.name for card in found)
        raise BackendUnavailable(
            f"{names}: older than the GPUs that torch supports, which are Arc, Data "
            "Center GPU Max and Flex, and Core Ultra graphics"
        )
    return usable


def cards(root: Path) -> Iterator[Card]:
    """Yield the Intel GPUs under ``root``, in order of their numbers."""
    folder = root / CARDS
    names = [p for p in folder.glob("card*") if re.fullmatch(r"card\d+", p.name)]
    for card in sorted(names, key=lambda path: int(path.name[4:])):
        driver = driver_of(card)
        if read_text(card / "device/vendor") == VENDOR and driver in DRIVERS:
            size = read_text(card / "lmem_total_bytes")
            yield Card(
                read_text(card / "device/device"), driver, int(size) if size else None
            )


def driver_of(card: Path) -> str:
    """Name of the kernel driver of a card or an accelerator; empty if it has none."""
    try:
        return (card / "device/driver").readlink().name
    except OSError:
        return ""


def visible(found: Sequence[Card], mask: str | None) -> list[Card]:
    """Return the cards that ``mask`` selects, in their order; all without a mask."""
    if not mask:
        return list(found)
    heads = [entry.strip().partition(".")[0] for entry in mask.split(",")]
    chosen = {int(head) for head in heads if head.isascii() and head.isdigit()}
    return [card for index, card in enumerate(found) if index in chosen]
