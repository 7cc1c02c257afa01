"""AMD GPUs by architecture, the name of a compiler target such as "gfx942"."""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    """An architecture for which the Triton kernels are compiled and checked."""

    name: str
    """Product name, or that of the family."""
    lanes: int
    """Threads of a wavefront, in the mode that Triton compiles for."""
    shared_bytes: int
    """LDS of one workgroup."""
    matrix: str
    """Prefix of the matrix instructions."""
    bytes_per_second: float
    """Memory bandwidth of the family's usual product, nominal."""


MI200 = Chip("AMD Instinct MI200", 64, 64 << 10, "v_mfma", 1.6e12)
MI300 = Chip("AMD Instinct MI300", 64, 64 << 10, "v_mfma", 5.3e12)
MI350 = Chip("AMD Instinct MI350", 64, 160 << 10, "v_mfma", 8.0e12)
RDNA3 = Chip("AMD Radeon RX 7000", 32, 64 << 10, "v_wmma", 9.6e11)
RDNA4 = Chip("AMD Radeon RX 9000", 32, 64 << 10, "v_wmma", 6.4e11)

CHIPS = {
    "gfx90a": MI200,
    "gfx942": MI300,
    "gfx950": MI350,
    "gfx1100": RDNA3,
    "gfx1201": RDNA4,
}
"""Architecture -> chip; each is compiled for in the tests."""

RELATED = {"gfx1101": RDNA3, "gfx1102": RDNA3, "gfx1200": RDNA4}
"""Smaller products of the same instruction set."""


def chip_of(architecture: str) -> Chip | None:
    """Return the chip of an architecture such as "gfx942:sramecc+:xnack-", if known."""
    name = architecture.partition(":")[0]
    return CHIPS.get(name) or RELATED.get(name)
